"""T5Gemma and T5Gemma 2: networks, checkpoints and drafts against transformers."""

import copy
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load, load_vocabulary
from spec_t5x.contrib.t5gemma.huggingface import _read_config, check_supported, open_model
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.faults import message_of

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
make_t5gemma = pytest.importorskip("tests.contrib.t5gemma.torch_t5gemma").make_t5gemma
# It is skipped without PyTorch, too.
from tests.checkpoints.test_special_ids import (  # noqa: E402
    NUM_IDS,
    TEXTS,
    same_logits,
    save_tokenizer,
    their_sources,
    tokenizer_of,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

KINDS = ("t5gemma", "t5gemma2")
START, EOS, PAD = 2, 1, 0
NUM_NEW = 14
OPTIONS = GenerateOptions(gamma=3, max_decode_len=NUM_NEW, batch_size=2)


def gemmas_tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer whose sources begin with the start token, and have no end token."""
    tokenizer = tokenizer_of(START, EOS, PAD)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", START)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Provides ``made(kind)``: a target, and the directory of it and of a draft."""

    @functools.cache
    def make(kind):
        root = tmp_path_factory.mktemp(kind)
        target = make_t5gemma(kind, NUM_IDS, 4, 1)
        for name, model in (("target", target), ("draft", make_t5gemma(kind, NUM_IDS, 2, 2))):
            model.save_pretrained(root / name)
            save_tokenizer(root / name, gemmas_tokenizer())
        return target, root

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(made, kind):
    model, root = made(kind)
    loaded = load(root / "target")
    theirs, is_token = their_sources(gemmas_tokenizer(), PAD)
    # Longer than the windows of local layers; text and source hold the token that ends an image.
    texts = np.random.default_rng(0).integers(0, NUM_IDS, (len(TEXTS), 12))
    texts[:, 3] = theirs[:, 2] = NUM_IDS - 1
    visible = {"decoder_attention_mask": np.ones(texts.shape)}
    same_logits(model, loaded, theirs, is_token, texts, START, **visible)


@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_that_of_transformers(made, kind):
    model, root = made(kind)
    theirs, is_token = map(torch.tensor, their_sources(gemmas_tokenizer(), PAD))
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": NUM_NEW}
    expected = model.generate(theirs, attention_mask=is_token.long(), **options).numpy()[:, 1:]
    assert len(np.unique(expected)) > 12
    # Drafts of the family; others read no layer of a target.
    for draft in (None, str(root / "draft"), "early_exit:2"):
        generator = Generator.load(root / "target", draft)
        for (answer, *_), row in zip(generator.generate(TEXTS, OPTIONS), expected, strict=True):
            ids = generator.vocabulary.to_theirs(answer.output_ids)
            assert ids == row.tolist()[: len(ids)]
            assert len(ids) == NUM_NEW or ids[-1] == EOS


@pytest.mark.parametrize("kind", KINDS)
def test_conversions(made, tmp_path, kind):
    target = made(kind)[1] / "target"
    convert(target, tmp_path / "native", to="native", dtype="float32")
    for other in ("t5x", "huggingface"):
        message = message_of(convert, target, tmp_path / "checkpoint_0", to=other)
        assert f"is a T5Gemma, which {other} cannot store: give native" in message
    texts = [
        [answer[0].output for answer in Generator.load(directory).generate(TEXTS, OPTIONS)]
        for directory in (target, tmp_path / "native")
    ]
    assert texts[0] == texts[1]


def test_names_of_tensors_and_settings_of_version_4(made, tmp_path):
    """Version 4 named the text model and the rotations of T5Gemma 2 otherwise."""
    _, root = made("t5gemma2")
    tensors = load_file(root / "target" / "model.safetensors")
    renamed = {
        name.replace("encoder.embed", "encoder.text_model.embed"): tensors[name] for name in tensors
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    save_tokenizer(tmp_path, gemmas_tokenizer())
    values = json.loads((root / "target" / "config.json").read_text())
    for stack in (values["decoder"], values["encoder"]["text_config"]):
        of_global = stack.pop("rope_parameters")["full_attention"]
        stack |= {
            "rope_theta": of_global["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": of_global["factor"]},
            "rope_local_base_freq": 10_000.0,
        }
        del stack["layer_types"]
        stack["sliding_window_pattern"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    old, new = load(tmp_path), load(root / "target")
    assert old.config == new.config
    jax.tree.map(np.testing.assert_array_equal, old.params, new.params)


def test_a_source_has_the_tokenizers_frame(made):
    vocabulary = load_vocabulary(made("t5gemma")[1] / "target")
    (start,) = vocabulary.from_theirs([START])
    ids = vocabulary.encode("the quick fox")
    assert vocabulary.framed(ids) == [start, *ids]
    assert vocabulary.framed(ids, 2) == [start, ids[0]]
    # Id 0 starts a text and pads, and is no token of a source.
    assert start != 0


def paths(values, before=()):
    """Yields the places of a stack's entries, those of its rotations included."""
    for name, value in values.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


@pytest.mark.parametrize("kind", KINDS)
def test_absent_entries_have_the_defaults_of_transformers(kind):
    """Sizes are refused instead."""
    config = make_t5gemma(kind, NUM_IDS, 2, 1).config
    # A dictionary of plain values.
    whole = json.loads(config.to_json_string(use_diff=False))
    refused, defaults = set(), set()

    def stacks(values):
        return values["decoder"], values["encoder"].get("text_config", values["encoder"])

    def read(values):
        check_supported(values, Path("here"))
        return _read_config(values, Path("here"))

    for *above, name in paths(stacks(whole)[0]):
        sparse = copy.deepcopy(whole)
        for stack in stacks(sparse):
            functools.reduce(dict.get, above, stack).pop(name, None)
        try:
            found = read(sparse)
        except InputError:
            refused.add(name)
            continue
        theirs = type(config).from_dict(copy.deepcopy(sparse))
        assert found == read(json.loads(theirs.to_json_string(use_diff=False))), (*above, name)
        defaults.add(name)
    assert {"head_dim", "vocab_size", "sliding_window"} <= refused
    assert {"attn_logit_softcapping", "final_logit_softcapping", "rope_parameters"} <= defaults
    assert {"rope_theta", "rope_type", "layer_types", "hidden_activation"} <= defaults
    for values in (whole["encoder"], whole):
        values.pop("eoi_token_index", None)
    for stack in stacks(whole):
        stack |= {"vocab_size": 300_000, "final_logit_softcapping": None}
    found = read(whole)
    assert found.image_end_id == (256_000 if kind == "t5gemma2" else 0)
    assert found.logits_softcap == 0


def test_a_tokenizer_in_the_directory_above(made, tmp_path):
    root = made("t5gemma")[1]
    inner = shutil.copytree(root / "target", tmp_path / "checkpoint-5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (inner / name).rename(tmp_path / name)
    expected = load_vocabulary(root / "target")
    assert load_vocabulary(inner).fingerprint() == expected.fingerprint()


def test_tokens_of_the_settings_and_special_tokens_that_are_to_be_split(made, tmp_path, caplog):
    root = shutil.copytree(made("t5gemma")[1] / "target", tmp_path / "model")
    values = json.loads((root / "config.json").read_text())
    # Rows for more tokens.
    for stack in ("encoder", "decoder"):
        values[stack]["vocab_size"] += 9
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<hl>"]}
    settings |= {"split_special_tokens": True}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = open_model(root, values, has_weights=False).vocabulary
    theirs = transformers.AutoTokenizer.from_pretrained(root)
    ids = ours.to_theirs(ours.framed(ours.encode("a <hl> b")))
    assert theirs.convert_tokens_to_ids("<hl>") in ids
    assert ids == theirs("a <hl> b", split_special_tokens=False).input_ids
    assert any(
        "sets split_special_tokens, which is not applied" in line for line in caplog.messages
    )


def test_entries_of_an_encoder_of_t5gemma_2(made):
    values = json.loads((made("t5gemma2")[1] / "target" / "config.json").read_text())
    texts = values["encoder"]["text_config"]

    def read(text_config=texts, **changes):
        changed = values | {"encoder": values["encoder"] | changes | {"text_config": text_config}}
        check_supported(changed, Path("here"))
        return _read_config(changed, Path("here"))

    assert read(eoi_token_index=7).image_end_id == 7
    # transformers' other name of the entry, which it prefers.
    assert read(eoi_token_id=5).image_end_id == 5
    assert read(eoi_token_id=None, eoi_token_index=7).image_end_id == 7
    assert read(eoi_token_index=-1).image_end_id == 0
    # The network does not use it.
    assert read(texts | {"attn_logit_softcapping": 9.0}) == read()
    assert "ends images is 0, which means none here" in message_of(read, eoi_token_index=0)
    for window in (0, -4):
        message = message_of(read, texts | {"sliding_window": window})
        assert message == f"here: sliding_window is {window}: give at least 1"


def test_unsupported_settings_are_refused(made, tmp_path):
    _, root = made("t5gemma")
    values = json.loads((root / "target" / "config.json").read_text())

    def message(**changes):
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        return message_of(load, tmp_path)

    rope = {"rope_theta": 1e4, "rope_type": "yarn"}
    for changed, expected in (
        ({"rope_parameters": rope}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": rope | {"rope_type": "default", "rope_theta": None}}, "NoneType"),
        ({"attention_bias": True}, "has attention_bias, which is not supported"),
        ({"is_causal": False}, "has is_causal False: give a T5Gemma without it"),
        ({"is_causal": None}, "has is_causal None: give a T5Gemma without it"),
        ({"hidden_activation": "gelu"}, "has hidden_activation 'gelu': supported are gelu_pytorch"),
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": 0}, "config.json: intermediate_size is 0: give at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: give at least 1"),
        ({"sliding_window": -2}, "sliding_window is -2"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0: give a number from 0"),
        ({"attn_logit_softcapping": 0.0}, "has attn_logit_softcapping 0, by which transformers"),
        ({"final_logit_softcapping": 0}, "has final_logit_softcapping 0, by which transformers"),
    ):
        stacks = {name: values[name] | changed for name in ("encoder", "decoder")}
        assert expected in message(**stacks)
    other = message(decoder=values["decoder"] | {"rms_norm_eps": 1e-3})
    assert "rms_norm_eps 1e-06 in its encoder and 0.001 in its decoder" in other
    softcapped = {"encoder": values["encoder"] | {"attn_logit_softcapping": 9.0}}
    assert "attn_logit_softcapping 9.0 in its encoder and 3.0" in message(**softcapped)
    assert "an encoder-only model" in message(is_encoder_decoder=False)
    assert "is quantized" in message(quantization_config={})
