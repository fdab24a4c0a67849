"""A function for each of the kernels: products, norms, attention, and rows over a vocabulary."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.contrib.cpu.library import available
from spec_t5x.types import Array, Bool, Float32, Int, PyTree, UInt32

# Columns of a panel of weights, as the kernels have it.
PANEL = 64

_NONE = np.zeros(0, np.float32)


class Matrix(NamedTuple):
    """A matrix ``[inner, features]`` as the kernels read it.

    Attributes:
      panels: ``[panels, inner, PANEL]``, float32, bfloat16 or int8; or uint8 ``[panels, inner,
        PANEL / 2]``, two numbers of int4 in each.
      scales: ``[panels, groups, PANEL]``, one group of rows in int8, of 64 rows each in int4;
        None in the others.
      features: how many columns there are.
      bias: ``[features]``, added to a product; None for none.
      num: tokens of each row of the inputs that it is multiplied with; None for all. Results for
        the others are zeros, and nothing of them enters a cache.
    """

    panels: Array
    scales: Float32[Array, "panels groups width"] | None
    features: int
    bias: Float32[Array, "features"] | None = None
    num: Int[Array, ""] | None = None


class Norm(NamedTuple):
    """A layer norm: ``inputs / sqrt(mean(inputs ** 2) + epsilon) * scale + bias``.

    Centred, it is of the inputs less their mean.
    """

    scale: Float32[Array, "width"]
    epsilon: float
    bias: Float32[Array, "width"] | None = None
    centred: bool = False


def usable() -> bool:
    """Whether the kernels are available, and this process has one device, a CPU."""
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1 and available()


def suit(params: PyTree) -> bool:
    """Whether a model with these parameters can use the kernels.

    They must be float32 arrays on a CPU that is the only device, and the kernels be available:
    on several devices each matrix would be gathered for them.
    """
    leaves = jax.tree.leaves(params)
    if jax.local_device_count() > 1 or not leaves or not all(map(_is_suitable, leaves)):
        return False
    devices = set().union(*(leaf.devices() for leaf in leaves))
    return {device.platform for device in devices} == {"cpu"} and available()


def multiply(
    inputs: Float32[Array, "*rows inner"],
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    residual: Float32[Array, "*rows features"] | None = None,
) -> list[Float32[Array, "*rows _"]]:
    """The products of the inputs, normed first, with each matrix; the inputs are read once.

    ``residual`` is added to the product with a single matrix.
    """
    rows = inputs.shape[:-1]
    shapes = [jax.ShapeDtypeStruct((*rows, matrix.features), jnp.float32) for matrix in matrices]
    return _of_layer("SpecT5XMultiply", shapes, inputs, norm, [residual], matrices)


def dot_with_table(
    inputs: Float32[Array, "*rows inner"], table: Array, num: Int[Array, ""] | None = None
) -> Float32[Array, "*rows vocab"]:
    """``inputs @ table.T``, without a transposed table.

    The table ``[vocab, inner]`` is float32, or uint16: the bits of bfloat16. ``num`` as of
    ``Matrix``.
    """
    shape = jax.ShapeDtypeStruct((*inputs.shape[:-1], table.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("SpecT5XDot", shape)(inputs, _num_used(inputs, num), table)


def normalize(inputs: Float32[Array, "*rows width"], norm: Norm) -> Float32[Array, "*rows width"]:
    """The inputs, normed."""
    shape = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
    return _of_layer("SpecT5XNormalize", shape, inputs, norm)


def alone() -> bool:
    """Whether the kernels are usable, and beside other processes this one works for itself."""
    return jax.sharding.get_abstract_mesh().empty and usable()


def can_summarize(values: Array) -> bool:
    """Whether the kernels over a vocabulary are for these: float32, and the device is one CPU."""
    return values.dtype == jnp.float32 and alone()


def summarize(
    values: Float32[Array, "*rows width"], with_sums: bool = True
) -> tuple[Int[Array, "*rows"], Float32[Array, "*rows"]]:
    """Where each row's largest value is (the first of several), and ``log sum exp`` of the row.

    Without sums the second array means nothing.
    """
    rows = values.shape[:-1]
    shapes = [jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.int32, jnp.float32)]
    call = jax.ffi.ffi_call("SpecT5XSummarize", shapes, vmap_method="broadcast_all")
    return tuple(call(values, with_sums=with_sums))


def standardize(
    logits: Float32[Array, "*rows width"],
    temperatures: Float32[Array, "*rows"],
    *,
    top_k: int,
    top_p: float,
    least_temperature: float,
) -> Float32[Array, "*rows width"]:
    """The distribution that is sampled, row by row, in few passes over a row.

    Softmax at the row's temperature of the ``top_k`` largest logits, or the nucleus of mass
    ``top_p`` of it (0 keeps all); argmax, the first of several, up to ``least_temperature``.
    """
    shape = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    call = jax.ffi.ffi_call("SpecT5XStandardize", shape, vmap_method="broadcast_all")
    return call(
        logits,
        temperatures,
        top_k=np.int64(top_k),
        top_p=np.float32(top_p),
        least_temperature=np.float32(least_temperature),
    )


def compare(
    target_probs: Float32[Array, "*batch rows width"],
    draft_probs: Float32[Array, "*batch drafts width"],
    factors: Float32[Array, "*batch rows"],
) -> tuple[Float32[Array, "*batch drafts"], Float32[Array, "*batch rows"]]:
    """``sum min(p, q)`` and ``sum max(f p - q, 0)`` of rows of both, f a factor for each.

    Where the target has a row more than the draft, q is zero.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape[:-1], jnp.float32) for a in (draft_probs, target_probs)]
    call = jax.ffi.ffi_call("SpecT5XCompare", shapes, vmap_method="broadcast_all")
    return tuple(call(target_probs, draft_probs, factors))


def sample(
    probs: Float32[Array, "*rows width"], uniforms: Float32[Array, "*rows 2"]
) -> Int[Array, "*rows"]:
    """A token of each row's distribution, by two numbers in [0, 1): ``distributions.sample``."""
    shape = jax.ShapeDtypeStruct(probs.shape[:-1], jnp.int32)
    return jax.ffi.ffi_call("SpecT5XSample", shape, vmap_method="broadcast_all")(probs, uniforms)


def sample_residual(
    target_probs: Float32[Array, "*rows width"],
    draft_probs: Float32[Array, "*rows width"],
    uniforms: Float32[Array, "*rows 2"],
) -> Int[Array, "*rows"]:
    """The same, of ``max(p - q, 0)``; of p where nothing is left."""
    shape = jax.ShapeDtypeStruct(target_probs.shape[:-1], jnp.int32)
    call = jax.ffi.ffi_call("SpecT5XSampleResidual", shape, vmap_method="broadcast_all")
    return call(target_probs, draft_probs, uniforms)


def threefry(
    keys: UInt32[Array, "*rows 2"], counts: UInt32[Array, "*rows"]
) -> UInt32[Array, "*rows 2"]:
    """Threefry-2x32 of ``(0, count)``, under a key of two words each, as JAX has it."""
    shape = jax.ShapeDtypeStruct(keys.shape, jnp.uint32)
    call = jax.ffi.ffi_call("SpecT5XThreefry", shape, vmap_method="broadcast_all")
    return call(keys, counts)


def extend_attention(
    states: Float32[Array, "batch new embed"],
    norm: Norm,
    matrices: Sequence[Matrix],
    keys: Float32[Array, "batch heads length head_dim"],
    values: Float32[Array, "batch heads length head_dim"],
    starts: Int[Array, "batch"],
    bias: Float32[Array, "heads length"] | None,
    scale: float = 1.0,
) -> tuple[
    Float32[Array, "batch new embed"],
    Float32[Array, "batch heads length head_dim"],
    Float32[Array, "batch heads length head_dim"],
]:
    """A layer's self-attention: ``states`` and what it makes of them, normed.

    New keys and values are written at ``starts``, then each query attends to what it may see: at
    position p positions 0 … p of its row. The cost grows with the text, not with the cache's
    length.

    Args:
      states: of the new tokens.
      norm: of the states.
      matrices: of queries, keys, values and of the output.
      keys, values: the cache, updated in place.
      starts: position of each row's first new token.
      bias: added to the scores by distance; None for none.
      scale: factor of the scores before the bias.

    Returns:
      The states and the cache.
    """
    return _extended("SpecT5XExtend", states, norm, matrices, (keys, values, starts), bias, scale)


def extend_attention_nodes(
    states: Float32[Array, "batch new embed"],
    norm: Norm,
    matrices: Sequence[Matrix],
    keys: Float32[Array, "batch heads slots head_dim"],
    values: Float32[Array, "batch heads slots head_dim"],
    slots: Int[Array, "batch new"],
    slot_positions: Int[Array, "batch slots"],
    visible: Bool[Array, "batch new slots"],
    bias: Float32[Array, "heads slots"] | None,
    scale: float = 1.0,
) -> tuple[
    Float32[Array, "batch new embed"],
    Float32[Array, "batch heads slots head_dim"],
    Float32[Array, "batch heads slots head_dim"],
]:
    """``extend_attention`` of tokens that need not follow one another (``interfaces.Nodes``).

    What a token is given is, bit for bit, what ``extend_attention`` gives at the end of the
    token's text.
    """
    places = keys, values, slots, slot_positions, visible
    return _extended("SpecT5XExtendNodes", states, norm, matrices, places, bias, scale)


def source_attention(
    states: Float32[Array, "batch new embed"],
    norm: Norm,
    matrices: Sequence[Matrix],
    keys: Float32[Array, "inputs heads source head_dim"],
    values: Float32[Array, "inputs heads source head_dim"],
    mask: Float32[Array, "inputs source"],
    scale: float = 1.0,
) -> Float32[Array, "batch new embed"]:
    """A layer's attention to sources: ``states`` and what it makes of them, normed.

    Each source is read by as many rows as there are for an input, in their order. ``matrices``
    are of queries and of the output; ``mask`` is added to the scores, negative where there is no
    token.
    """
    shape, given = jax.ShapeDtypeStruct(states.shape, jnp.float32), (keys, values, mask)
    options = {"scale": np.float32(scale)}
    return _of_layer("SpecT5XAttend", shape, states, norm, given, matrices, **options)


def whole_attention(
    states: Float32[Array, "batch length embed"],
    norm: Norm,
    matrices: Sequence[Matrix],
    allowed: Bool[Array, "batch 1 length length"],
    bias: Float32[Array, "1 heads length length"],
    head_dim: int,
    scale: float = 1.0,
) -> Float32[Array, "batch length embed"]:
    """A layer's attention over whole sequences: ``states`` and what it makes of them, normed.

    Each token attends to those that ``allowed`` lets it see; ``matrices`` as of
    ``extend_attention``.
    """
    shape, given = jax.ShapeDtypeStruct(states.shape, jnp.float32), (allowed, bias)
    options = {"scale": np.float32(scale), "head_dim": np.int64(head_dim)}
    return _of_layer("SpecT5XAttendWhole", shape, states, norm, given, matrices, **options)


def _extended(name: str, states, norm, matrices, cache, bias, scale):
    shapes = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (states, *cache[:2])]
    options = {"scale": np.float32(scale), "aliases": {4: 1, 5: 2}}
    return tuple(_of_layer(name, shapes, states, norm, (*cache, bias), matrices, **options))


def _of_layer(
    name: str,
    shapes: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    inputs: Array,
    norm: Norm | None,
    given: Sequence[Array | None] = (),
    matrices: Sequence[Matrix] = (),
    aliases: dict[int, int] | None = None,
    **options,
):
    """A call on a layer's inputs: they, their norm, what is ``given``, and matrices."""
    norm = Norm(_NONE, 0.0) if norm is None else norm
    # Panels, scales and biases of all.
    parts = [m.panels for m in matrices], [m.scales for m in matrices], [m.bias for m in matrices]
    num = _num_used(inputs, matrices[0].num if matrices else None)
    operands = inputs, num, norm.scale, norm.bias, *given, *itertools.chain(*parts)
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases=aliases)
    return call(
        *(_NONE if operand is None else operand for operand in operands),
        epsilon=np.float32(norm.epsilon),
        centred=norm.centred,
        **options,
    )


def _num_used(inputs: Array, num: Int[Array, ""] | None) -> Int[Array, ""]:
    """How many new tokens of ``inputs [..., new, width]`` count."""
    return jnp.int32(inputs.shape[-2] if inputs.ndim > 1 else 1) if num is None else num


def _is_suitable(leaf) -> bool:
    # A traced model's devices are not known.
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.dtype == jnp.float32
    )
