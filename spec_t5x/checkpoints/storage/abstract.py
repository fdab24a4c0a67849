"""The parameters that a configuration asks for: names and shapes, no memory."""

import functools

from flax.traverse_util import flatten_dict

from spec_t5x.models.binding import ModelConfig, abstract_variables
from spec_t5x.types import PyTree


def abstract_params(config: ModelConfig) -> PyTree:
    """The tree of parameters of the network of ``config``, as it is before training.

    Returns:
        Nested dicts whose leaves are ``jax.ShapeDtypeStruct``, all float32.
    """
    return abstract_variables(config)["params"]


@functools.lru_cache(maxsize=16)
def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its path, such as ``encoder/encoder_norm/scale``."""
    flat = flatten_dict(abstract_params(config), sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}
