"""Models with random weights, of any published size, and random inputs, to measure time alone."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Target
from spec_t5x.machine.description import free_memory
from spec_t5x.models.binding import bind, expected_shapes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.names import AUTO
from spec_t5x.types import Int

_GIB = 2**30


def random_model(
    config: T5Config, dtype: str, seed: int, weights: str = AUTO, kv: str = AUTO
) -> T5Model:
    """Makes a model of the sizes of ``config`` with random weights on the device, in ``dtype``.

    Each array is drawn in place: no float32 copy, nothing on the host. Weights are scaled by
    fan-in, so that activations stay finite. ``weights`` and ``kv`` are those of
    ``models.binding.bind``.
    """
    shapes = expected_shapes(config)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    flat = {
        path: _random_array(key, path.endswith("scale"), shape, dtype)
        for key, (path, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = unflatten_dict(flat, sep="/")
    return bind(params, dataclasses.replace(config, dtype=dtype), weights, kv)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_array(key, is_scale: bool, shape: tuple[int, ...], dtype: str):
    if is_scale:
        return jnp.ones(shape, dtype)
    bound = (3 / shape[0]) ** 0.5
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)


def random_sources(target: Target, rows: int, length: int, seed: int) -> Int[np.ndarray, "..."]:
    """Draws random ids ``[rows, length]``, below 1000 and none of them padding or special."""
    draw = np.random.default_rng(seed).integers
    return draw(3, min(target.vocab_size, 1000), (rows, length), dtype=np.int32)


def check_memory(target: str, drafts: Sequence[str], dtype: str) -> None:
    """Raises ``InputError`` if this device cannot hold the target and the largest draft.

    A device that does not report its memory passes.

    Args:
      target, drafts: names of ``models.sizes``; the device holds one draft at a time.
      dtype: of the weights.
    """
    numbers = [
        sum(map(math.prod, expected_shapes(size(name)).values())) for name in (target, *drafts)
    ]
    # A tenth more than the weights, for caches and activations.
    needed = round(1.1 * (numbers[0] + max(numbers[1:], default=0)) * jnp.dtype(dtype).itemsize)
    available = free_memory()
    if available is not None and needed > available:
        raise InputError(
            f"{target} with {', '.join(drafts)} takes {needed / _GIB:.1f} GiB and this device has "
            f"{available / _GIB:.1f} free: choose smaller sizes"
        )


def check_vocabulary(target: str, num_ids: int, drafts: Sequence[str], prefix: str = "") -> None:
    """Raises ``InputError`` unless each of ``drafts`` has ``num_ids`` tokens, as ``target`` has.

    Drafts are names of ``models.sizes``, which messages have after a ``prefix``.
    """
    for name in drafts:
        if (own := size(name).vocab_size) != num_ids:
            raise InputError(
                f"draft {prefix}{name} has {own} tokens and target {target} {num_ids}: choose a "
                "draft of the target's vocabulary"
            )
