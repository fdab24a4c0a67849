"""What a step of a network costs: arithmetic operations, and memory that it must read.

Counted from the shapes of the parameters, of which none is made: the sizes of T5-XXL are
counted on any machine. Time is another matter (``experiments.tpu_compilation`` predicts
it, ``tuning.step_times`` measures it): a step takes at least as long as the slower of
the two takes at the machine's speed.

* Operations: of the matrix products, a multiplication with its addition as two. What is
  left out (norms, softmax, activations, biases) is a few operations for each number of a
  state, where a product has thousands.
* Memory: the weights that the step uses and the part of the caches that it attends to,
  each read once, as section 3.4 of the paper counts. Of a table of embeddings only the
  rows of the tokens are read, unless it is the output layer too.
"""

import dataclasses
import math
import re

import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig, expected_shapes
from spec_t5x.models.t5 import T5Config

# Projections of the source: made once for each input, then cached.
_OF_SOURCE = re.compile("encoder_decoder_attention/(key|value)/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call costs, for all of its rows together."""

    # A multiplication with its addition counts as two.
    operations: int
    # Read from memory, once each.
    weight_bytes: int
    cache_bytes: int

    @property
    def bytes_read(self) -> int:
        """Weights and caches."""
        return self.weight_bytes + self.cache_bytes


def decoder_step(
    config: ModelConfig,
    num_tokens: int = 1,
    *,
    cache_length: int = 0,
    source_length: int = 0,
    batch: int = 1,
    dtype: str | None = None,
) -> Cost:
    """The decoder over ``num_tokens`` new tokens of each row, output layer included.

    Args:
      config: the network.
      num_tokens: m, 1 in plain decoding and gamma + 1 in verification.
      cache_length: positions that each token attends to in the text, its own and those of
        the other new tokens included. A static cache is attended to in whole.
      source_length: positions that it attends to in the source; 0 without one.
      batch: rows, which share the weights and have caches of their own.
      dtype: what weights and caches are kept in; None takes the configuration's.

    Raises:
      InputError: a number out of range.
    """
    _check(num_tokens=num_tokens, batch=batch)
    _check(least=0, cache_length=cache_length, source_length=source_length)
    used = {path: shape for path, shape in _decoder(config).items() if not _OF_SOURCE.search(path)}
    tokens, attended = batch * num_tokens, cache_length + source_length
    # Keys and values of all heads of all layers, at one position.
    layers, joined = _cached(config)
    products = sum(math.prod(shape) for path, shape in used.items() if _is_product(config, path))
    attention = 2 * layers * joined * attended
    numbers = sum(_numbers_read(config, path, shape, tokens) for path, shape in used.items())
    size = jnp.dtype(dtype or config.dtype).itemsize
    return Cost(
        operations=2 * tokens * (products + attention),
        weight_bytes=size * numbers,
        cache_bytes=size * batch * 2 * layers * joined * attended,
    )


def encoder_call(
    config: T5Config, source_length: int, *, batch: int = 1, dtype: str | None = None
) -> Cost:
    """The encoder over a source, and the keys and values that the decoder makes of it.

    Args:
      config: a T5 with an encoder.
      source_length: tokens of each row, padding included.
      batch: rows.
      dtype: what the weights are kept in; None takes the configuration's.

    Raises:
      InputError: a number below 1.
    """
    _check(source_length=source_length, batch=batch)
    used = {
        path: shape
        for path, shape in expected_shapes(config).items()
        if path.startswith("encoder/") or _OF_SOURCE.search(path) or _is_token_table(path)
    }
    tokens = batch * source_length
    joined = config.num_heads * config.head_dim
    products = sum(math.prod(shape) for path, shape in used.items() if path.endswith("kernel"))
    attention = 2 * config.num_encoder_layers * joined * source_length
    numbers = sum(
        # Here the table is never an output layer.
        min(tokens, shape[0]) * shape[1] if _is_token_table(path) else math.prod(shape)
        for path, shape in used.items()
    )
    return Cost(
        operations=2 * tokens * (products + attention),
        weight_bytes=jnp.dtype(dtype or config.dtype).itemsize * numbers,
        cache_bytes=0,
    )


def _decoder(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All that is not the encoder's alone."""
    return {
        p: shape for p, shape in expected_shapes(config).items() if not p.startswith("encoder/")
    }


def _cached(config: ModelConfig) -> tuple[int, int]:
    """Layers that keep keys and values, and the width of either."""
    layers = config.num_decoder_layers if isinstance(config, T5Config) else config.num_layers
    return layers, config.num_heads * config.head_dim


def _is_token_table(path: str) -> bool:
    return path.endswith(("token_embedder/embedding", "token_embedding"))


def _is_product(config: ModelConfig, path: str) -> bool:
    """Whether each token is multiplied by this matrix."""
    return path.endswith("kernel") or (_is_token_table(path) and config.logits_via_embedding)


def _numbers_read(config: ModelConfig, path: str, shape: tuple[int, ...], tokens: int) -> int:
    """How many numbers of a parameter a call over so many tokens reads."""
    is_table = _is_token_table(path) or path.endswith("position_embedding")
    if is_table and not _is_product(config, path):
        return min(tokens, shape[0]) * shape[1]
    return math.prod(shape)


def _check(least: int = 1, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise InputError(f"{name} is {value}: give at least {least}")
