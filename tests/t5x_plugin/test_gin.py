"""The gin files that a launch includes, bound as T5X binds them."""

import dataclasses
import functools

import flax.linen as nn
import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import gin
import seqio
from flax import struct
from t5x.contrib.gpu.t5 import network as gpu
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.scalable_t5 import network as scalable
from t5x.examples.t5 import network as examples

from spec_t5x.errors import InputError
from spec_t5x.models.decoder_only import DecoderOnlyConfig
from spec_t5x.models.sizes import size
from spec_t5x.t5x_plugin.networks import decoder_only_config, t5_config
from spec_t5x.t5x_plugin.speculative_model import (
    SpeculativeDecoderOnlyModel,
    SpeculativeEncoderDecoderModel,
)
from tests.t5x_plugin import programs  # noqa: F401 registers the programs
from tests.t5x_plugin.toy_models import REPOSITORY

DECODER_ONLY_LAUNCH = """
from __gin__ import dynamic_registration
import seqio
from spec_t5x.models import decoder_only
from t5x import models
from t5x.examples.decoder_only import network

models.DecoderOnlyModel:
  module = @network.DecoderWrapper()
  vocabulary = @seqio.ByteVocabulary()
  optimizer_def = None
network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig:
  vocab_size = 384
  num_layers = 2
decoder_only.DecoderOnlyConfig:
  vocab_size = 384
  num_layers = 1
"""
LAUNCH = """
from __gin__ import dynamic_registration
import seqio
from t5x import models
from t5x.examples.t5 import network as t5_network

models.EncoderDecoderModel:
  module = @t5_network.Transformer()
  input_vocabulary = @seqio.ByteVocabulary()
  output_vocabulary = @seqio.ByteVocabulary()
  optimizer_def = None
t5_network.Transformer.config = @t5_network.T5Config()
t5_network.T5Config.vocab_size = 384
"""
SIZED_LAUNCH = """
from __gin__ import dynamic_registration
import seqio
DROPOUT_RATE = 0.1
VOCABULARY = @seqio.ByteVocabulary()
MODEL_SIZE = "byt5_small"
VOCABULARY_FILE = None
"""


@pytest.fixture
def made():
    """Provides a function that parses files and a launch, and returns a function of macros."""

    def parse(files, launch):
        for name in files:
            gin.parse_config((REPOSITORY / "gin_configs" / "t5x" / f"{name}.gin").read_text())
        gin.parse_config(launch)
        return lambda macro: gin.query_parameter(f"%{macro}").scoped_configurable_fn()

    return parse


def test_decoder_only_gin_makes_the_twin(made):
    value = made(["speculate", "decoder_only"], DECODER_ONLY_LAUNCH)
    model, draft = value("MODEL"), value("DRAFT")
    assert isinstance(model, SpeculativeDecoderOnlyModel)
    assert isinstance(draft.config, DecoderOnlyConfig)
    assert (draft.config.num_layers, model._network.config.num_layers) == (1, 2)
    assert draft.config.dtype == "bfloat16"


def test_a_decoder_alone_has_no_source_to_round(made):
    launch = DECODER_ONLY_LAUNCH + 'KV = "int8"'
    with pytest.raises(InputError, match="kv is 'int8' and the model has no source: leave kv out"):
        made(["speculate", "decoder_only"], launch)("MODEL")


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_network_of_scalable_t5_is_refused_with_what_decodes_it(scan_layers):
    config = scalable.T5Config(vocab_size=8, scan_layers=scan_layers)
    message = "module Transformer has setup of .*scalable_t5.*: speculate .*spec-t5x infer"
    with pytest.raises(InputError, match=message):
        t5_config(scalable.Transformer(config))


@gin.configurable(module="test_gin")
class Around:
    """An object of a user's own that holds a model."""

    def __init__(self, model):
        self.model = model


class Adapted(examples.Transformer):
    """A network of a user's own with the fields of T5X's and another one."""

    use_adapters: bool = True

    @functools.wraps(examples.Transformer.decode)
    def decode(self, *args, **kwargs):
        return 2.0 * super().decode(*args, **kwargs)


class Named(examples.Transformer):
    """A subclass that computes what T5X's network does."""

    title: str = "mine"


@struct.dataclass
class OwnConfig(examples.T5Config):
    """A config with a setting that no network here reads."""

    num_experts: int = 4


def test_a_network_without_a_config_is_refused_in_one_line():
    class Other(nn.Module):
        def __call__(self):
            raise NotImplementedError

    with pytest.raises(InputError, match="module Other has setup of flax.*, which is unknown here"):
        t5_config(Other())


def test_a_network_of_a_users_own_is_refused_unless_it_computes_the_same():
    config = examples.T5Config(vocab_size=8)
    with pytest.raises(InputError, match=f"module Adapted has decode of {__name__}, which is unk"):
        t5_config(Adapted(config))
    for method in ("setup", "encode", "__call__"):
        own = {method: Adapted.decode, "__module__": __name__}
        with pytest.raises(InputError, match=f"module Own has {method} of {__name__}"):
            t5_config(type("Own", (examples.Transformer,), own)(config))
    assert t5_config(Named(config)) == t5_config(examples.Transformer(config))
    with pytest.raises(InputError, match="config.num_experts of Transformer is 4, which no"):
        t5_config(examples.Transformer(OwnConfig(vocab_size=8)))
    layers = decoder_only.TransformerConfig(vocab_size=8)
    assert decoder_only_config(decoder_only.DecoderWrapper(layers)).num_layers == 6
    for module in (decoder_only.DecoderWrapper(layers), decoder_only.Decoder(layers)):
        with pytest.raises(InputError, match=f"module {type(module).__name__} has"):
            t5_config(module)


def test_t5xs_network_for_gpus():
    """The network is that of ``t5x.examples.t5`` unless it divides attention logits."""
    config = gpu.T5Config(vocab_size=8)
    assert t5_config(gpu.Transformer(config)) == t5_config(examples.Transformer(config))
    with pytest.raises(InputError, match="config.scale_attn_logits of Transformer is True"):
        t5_config(gpu.Transformer(config.replace(scale_attn_logits=True)))


@pytest.mark.parametrize(
    ("files", "bound", "message"),
    [
        (["speculate"], "partitioner = None", "partitioner is None, with which T5X restores no"),
        (["speculate"], "inference_mode = 'predict'", "STATISTICS is True and t5x.export takes"),
        (["speculate", "export"], "inference_mode = 'predict'", None),
        (
            ["speculate", "decoder_only", "export"],
            "batch_size = 1",
            "the model to export is decoder-only",
        ),
        (
            ["speculate", "export"],
            "create_decoding_state_callback_fn = 'a function'",
            "create_decoding_state_callback_fn is set, but speculation would skip its",
        ),
        (
            ["speculate", "export"],
            "batch_size = 1\nexport_lib.create_inference_function.model_fn_extra_kwargs = "
            "{'prompt_with_targets': True}",
            "prompt_with_targets is True, and an exported",
        ),
    ],
)
def test_exports_that_would_fail_without_a_message(made, files, bound, message):
    value = made(files, DECODER_ONLY_LAUNCH if "decoder_only" in files else LAUNCH)
    gin.parse_config(f"export_lib.save.{bound}")
    if message is None:
        assert isinstance(value("MODEL"), SpeculativeEncoderDecoderModel)
        return
    with pytest.raises(InputError, match=message):
        value("MODEL")


@pytest.mark.parametrize(
    "model", ["models.EncoderDecoderModel", "speculative_model.SpeculativeEncoderDecoderModel"]
)
def test_an_export_cannot_refuse_prompts(made, model):
    launch = LAUNCH + "from spec_t5x.t5x_plugin import speculative_model\n"
    for prompted in (False, True):
        binding = f"{model}.predict_batch_with_aux.prompt_with_targets = {prompted}\n"
        value = made(["speculate", "export"], launch + binding)
        gin.parse_config("export_lib.save.batch_size = 1")
        if prompted:
            with pytest.raises(InputError, match="prompt_with_targets is True, and an exported"):
                value("MODEL")
        else:
            value("MODEL")


@pytest.mark.parametrize("program", ["train", "precompile"])
def test_programs_that_train_take_no_draft(made, program):
    made(["speculate"], LAUNCH)
    gin.bind_parameter(f"__main__.{program}.model_dir", "a directory")
    with pytest.raises(InputError, match=f"leave it out of t5x.{program}"):
        gin.finalize()


@pytest.mark.parametrize("program", ["__main__.infer", "__main__.evaluate", "export_lib.save"])
@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ("%MODEL", True),
        ("@speculation.speculate()", True),
        ("%MINE\nMINE = %MODEL", True),
        ("@test_gin.Around()\ntest_gin.Around.model = %MODEL", True),
        ("@models.EncoderDecoderModel()", False),
        ("%MINE\nMINE = @models.EncoderDecoderModel()", False),
        ("%MODEL\nMODEL = @models.EncoderDecoderModel()", False),
    ],
)
def test_a_program_that_decodes_gets_the_model_with_the_draft(made, program, model, drafts):
    made(["speculate", "export"], LAUNCH)
    gin.parse_config(f"{program}.model = {model}")
    if drafts:
        gin.finalize()
        return
    with pytest.raises(InputError, match="is a EncoderDecoderModel without a draft: give specul"):
        gin.finalize()


@pytest.mark.parametrize("name", ["draft_by_name", "export"])
def test_a_draft_without_speculate_gin_is_refused(made, name):
    made([name], LAUNCH + "MODEL = @models.EncoderDecoderModel()\nDRAFT_NAME = 'copy'")
    gin.parse_config("__main__.infer.model = %MODEL")
    with pytest.raises(InputError, match="without a draft: give speculate.gin"):
        gin.finalize()


def test_a_model_of_a_published_size(made):
    model = made(["sized_model"], SIZED_LAUNCH)("MODEL")
    assert isinstance(model.output_vocabulary, seqio.ByteVocabulary)
    expected = dataclasses.replace(size("byt5_small"), dropout_rate=0.1, dtype="bfloat16")
    assert t5_config(model.module) == expected
