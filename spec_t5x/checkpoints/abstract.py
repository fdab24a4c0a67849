"""The parameters that a configuration asks for: names and shapes, no memory."""

import functools

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.types import PyTree


def abstract_params(config: T5Config) -> PyTree:
    """The tree of parameters of ``Transformer(config)``, as it is before training.

    Returns:
        Nested dicts whose leaves are ``jax.ShapeDtypeStruct``, all float32.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def init(tokens):
        # No weight is drawn here, so the key is without effect.
        key = jax.random.key(0)
        return Transformer(config).init(key, tokens, tokens, tokens, enable_dropout=False)

    return jax.eval_shape(init, tokens)["params"]


@functools.lru_cache(maxsize=16)
def expected_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its path, such as ``encoder/encoder_norm/scale``."""
    flat = flatten_dict(abstract_params(config), sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}
