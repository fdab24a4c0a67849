"""The networks by their configurations: what a ``T5Config`` or a ``GPTConfig`` is of."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.models import gpt, t5
from spec_t5x.models.gpt import GPTConfig, GPTModel
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

ModelConfig = T5Config | GPTConfig
Model = T5Model | GPTModel

_FIRST_LAYER = re.compile(r"\blayers_0\b")


def bind(params: PyTree, config: ModelConfig) -> Model:
    """Parameters and their configuration as the loops' ``Target``."""
    return (GPTModel if isinstance(config, GPTConfig) else T5Model).create(params, config)


def abstract_variables(config: ModelConfig) -> PyTree:
    """Shapes of what the network initializes: ``params`` and ``params_axes``, float32.

    From the network's code alone: no weight is drawn and no memory taken.
    """
    network = gpt if isinstance(config, GPTConfig) else t5
    return network.abstract_variables(config)


@functools.lru_cache(maxsize=16)
def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its path, such as ``encoder/encoder_norm/scale``.

    The layers of a stack are alike: a network of one layer each is traced, which takes a
    fraction of the time of tracing them all.
    """
    counts = [f.name for f in dataclasses.fields(config) if re.fullmatch("num_.*layers", f.name)]
    shallow = abstract_variables(dataclasses.replace(config, **dict.fromkeys(counts, 1)))
    shapes = {}
    for path, leaf in flatten_dict(shallow["params"], sep="/").items():
        stack = path.partition("/")[0]
        of_stack = f"num_{stack}_layers" if stack in ("encoder", "decoder") else "num_layers"
        copies = getattr(config, of_stack) if _FIRST_LAYER.search(path) else 1
        for layer in range(copies):
            shapes[_FIRST_LAYER.sub(f"layers_{layer}", path)] = leaf.shape
    # In the order of a tree's leaves.
    return dict(sorted(shapes.items(), key=lambda item: item[0].split("/")))


def abstract_params(config: ModelConfig) -> PyTree:
    """The tree of parameters of the network of ``config``, as it is before training.

    Returns:
        Nested dicts whose leaves are ``jax.ShapeDtypeStruct``, all float32.
    """
    shapes = expected_shapes(config).items()
    flat = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes}
    return unflatten_dict(flat, sep="/")
