"""T5X models and their speculative counterparts with the same parameters."""

import dataclasses
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import decoding, models
from t5x.examples.decoder_only import network as decoder_only_network
from t5x.examples.t5 import network as t5_network

from spec_t5x.labs.t5x_training import stock_network
from spec_t5x.models.t5 import T5Config
from spec_t5x.t5x_plugin.drafts import ModelDraft
from spec_t5x.t5x_plugin.networks import decoder_only_config
from spec_t5x.t5x_plugin.speculation import speculate
from spec_t5x.t5x_plugin.speculative_model import DRAFT
from spec_t5x.types import PyTree
from tests.child import REPOSITORY, printed
from tests.toy_t5 import disturbed, tiny_t5

VOCAB = 40
SOURCE, TARGET = 9, 16
EOS = 1


class OwnMetrics(models.EncoderDecoderModel):
    """Subclass as a user may write it, which decodes as T5X's model does."""


class Pair(NamedTuple):
    """Pair of a T5X model with its parameters and a draft with its parameters."""

    model: models.BaseTransformerModel
    params: PyTree
    draft: ModelDraft
    draft_params: PyTree

    def speculative(self, **options: Any):
        """Returns the speculative model, gamma 3 unless ``options`` give it, and its parameters."""
        options = {"draft": self.draft, "gamma": 3, **options}
        has_params = isinstance(options["draft"], ModelDraft)
        draft = {DRAFT: self.draft_params} if has_params else {}
        return speculate(self.model, **options), {**self.params, **draft}


SIZES = {
    "1.1": {"vocab_size": VOCAB},
    "1.0": {
        "vocab_size": VOCAB,
        "mlp_activations": ("relu",),
        "logits_via_embedding": True,
        "num_decoder_layers": 2,
        "emb_dim": 24,
        "num_heads": 3,
    },
}
# Values that T5X's networks hard-code.
BUCKETS = {"relpos_num_buckets": 32, "relpos_max_distance": 128}


def t5x_network(config: T5Config) -> t5_network.Transformer:
    """Returns T5X's own network of these sizes, without dropout."""
    return stock_network.t5x_network(dataclasses.replace(config, dropout_rate=0.0))


def environment(devices: int) -> dict[str, str]:
    """Returns a child's environment: this process's import paths, ``devices`` simulated devices."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def run_program(program: str, *arguments: str, devices: int) -> None:
    """Runs Python code with simulated devices."""
    printed("-c", program, *arguments, **environment(devices))


def make_pair(size: str, decode_fn=decoding.temperature_sample) -> Pair:
    """Returns a T5 (``size``: key of ``SIZES``) and a draft that gives about half its tokens."""
    target = tiny_t5(0, **SIZES[size], **BUCKETS)
    if "logits_dense" in target.params["decoder"]:
        # Lets some texts end.
        dense = target.params["decoder"]["logits_dense"]
        dense["kernel"] = dense["kernel"].at[:, EOS].multiply(2.0)
    draft = disturbed(target, 0.05)
    # Only the vocabulary's end of sequence is used.
    vocabulary = seqio.ByteVocabulary()
    model = models.EncoderDecoderModel(
        module=t5x_network(target.config),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=None,
        decode_fn=decode_fn,
    )
    return Pair(model, target.params, ModelDraft(config=draft.config), draft.params)


def make_batch(rows: int, seed: int = 0) -> dict[str, jax.Array]:
    """Returns a T5X batch of random sources and shifted prompts, both of varied lengths."""
    rng = np.random.default_rng(seed)

    def padded(width, shortest, shift):
        tokens = rng.integers(2, VOCAB, (rows, width))
        lengths = rng.integers(shortest, width - 2, rows)[:, None]
        tokens = np.where(np.arange(width) < lengths, tokens, 0)
        return np.pad(tokens, ((0, 0), (shift, 0)))[:, :width]

    return {
        "encoder_input_tokens": jnp.asarray(padded(SOURCE, 1, 0), jnp.int32),
        "decoder_input_tokens": jnp.asarray(padded(TARGET, 0, 1), jnp.int32),
    }


DECODER_ONLY = {
    "vocab_size": VOCAB,
    "emb_dim": 16,
    "num_heads": 2,
    "num_layers": 2,
    "head_dim": 8,
    "mlp_dim": 24,
    "mlp_activations": ("gelu", "linear"),
    "dropout_rate": 0.0,
}


def make_decoder_only_pair(bidirectional: bool, tied: bool) -> Pair:
    """Returns a decoder-only model and, as the draft, the model without its last layer."""
    # Only the vocabulary's end of sequence is used.
    vocabulary = seqio.ByteVocabulary()

    def network(**changes):
        sizes = {**DECODER_ONLY, "logits_via_embedding": tied, **changes}
        return decoder_only_network.DecoderWrapper(decoder_only_network.TransformerConfig(**sizes))

    model = models.DecoderOnlyModel(
        module=network(),
        vocabulary=vocabulary,
        optimizer_def=None,
        inputs_bidirectional_attention=bidirectional,
    )
    tokens = jnp.ones((1, TARGET), jnp.int32)

    def params(module, seed):
        found = module.init(jax.random.key(seed), tokens, tokens, enable_dropout=False)["params"]
        # Larger weights separate the logits, so that texts differ.
        return jax.tree.map(lambda leaf: 2.0 * leaf, dict(found))

    small = network(num_layers=1)
    target_params = params(model.module, 0)
    draft_params = {
        "decoder": {
            name: value for name, value in target_params["decoder"].items() if name != "layers_1"
        }
    }
    return Pair(model, target_params, ModelDraft(config=decoder_only_config(small)), draft_params)
