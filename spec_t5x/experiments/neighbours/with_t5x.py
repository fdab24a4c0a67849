"""T5X: its own network and its ``temperature_sample`` at temperature 0, compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import seqio
import t5x
from t5x import decoding, models
from t5x.examples.t5 import network

from spec_t5x.checkpoints.loading import load
from spec_t5x.experiments.neighbours.interface import Job, until_end
from spec_t5x.generation import bucket
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

_GREEDY = {"temperature": 0.0, "topk": 0, "rescale_log_probs": True}


class Decoder:
    """``predict_batch`` of T5X's model over sources that are padded as ours are."""

    def __init__(self, model: models.EncoderDecoderModel, params, job: Job):
        self._params = params
        self._max_source_len = job.max_source_len
        self._targets = jnp.zeros((1, job.max_decode_len), jnp.int32)
        self._predict = jax.jit(functools.partial(_predict, model))
        self._encode = jax.jit(functools.partial(_encode, model))

    def decode(self, ids: list[int], max_tokens: int) -> list[int]:
        """See ``interface.Decoder``: one program, told at run time when to stop."""
        outputs = self._predict(self._params, self._source(ids), self._targets, max_tokens)
        tokens = np.asarray(outputs)[0, :max_tokens].tolist()
        return until_end(tokens)

    def encode(self, ids: list[int]) -> bool:
        """The encoder alone."""
        jax.block_until_ready(self._encode(self._params, self._source(ids)))
        return True

    def _source(self, ids: list[int]) -> np.ndarray:
        padded = np.full((1, bucket(len(ids), self._max_source_len)), PAD_ID, np.int32)
        padded[0, : len(ids)] = ids
        return padded


def version() -> str:
    """Its own and JAX's."""
    return f"T5X {getattr(t5x, '__version__', '(a checkout)')}, JAX {jax.__version__}"


def make(job: Job) -> Decoder:
    """T5X's model of the copy's sizes, with our reading of its weights.

    T5X's parameters have the names and shapes that ours have (``tests/checkpoints``).
    """
    loaded = load(job.target_copy, dtype="float32")
    # Its end of sequence is all that counts here.
    vocabulary = seqio.PassThroughVocabulary(loaded.config.vocab_size, eos_id=EOS_ID)
    model = models.EncoderDecoderModel(
        module=_network(loaded.config),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=None,
        decode_fn=decoding.temperature_sample,
    )
    return Decoder(model, loaded.params, job)


def _network(config: T5Config) -> network.Transformer:
    names = (
        "vocab_size",
        "emb_dim",
        "num_heads",
        "num_encoder_layers",
        "num_decoder_layers",
        "head_dim",
        "mlp_dim",
        "mlp_activations",
        "logits_via_embedding",
    )
    sizes = {name: getattr(config, name) for name in names}
    return network.Transformer(network.T5Config(dropout_rate=0.0, dtype=jnp.float32, **sizes))


def _predict(model, params, sources, targets, max_tokens):
    tokens, _ = model.predict_batch_with_aux(
        params,
        {"encoder_input_tokens": sources, "decoder_input_tokens": targets},
        decoder_params={**_GREEDY, "max_decode_steps": max_tokens},
    )
    return tokens


def _encode(model, params, sources):
    return model.module.apply(
        {"params": params}, sources, enable_dropout=False, method=model.module.encode
    )
