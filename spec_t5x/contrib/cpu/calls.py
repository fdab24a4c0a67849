"""JAX functions that call the kernels: products, norms, attention, sampling over a vocabulary."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.contrib.cpu.library import available
from spec_t5x.types import Array, Bool, Float32, Int, PyTree, UInt32

# Number of columns of a panel, which is a block of a matrix's columns stored row after row.
PANEL = 64

_NONE = np.zeros(0, np.float32)
# New states ``[batch new embed]``; the cache's keys and values ``[batch heads length head_dim]``.
Extended = tuple[Float32[Array, "_ _ _"], Float32[Array, "_ _ _ _"], Float32[Array, "_ _ _ _"]]


class Matrix(NamedTuple):
    """Matrix ``[inner, features]`` as the kernels read it.

    Attributes:
      panels: ``[panels, inner, PANEL]``, float32, bfloat16 or int8; or uint8 ``[panels, inner,
        PANEL / 2]``, two int4 weights in each.
      scales: factors ``[panels, groups, PANEL]`` of the columns: int8 has one group of all rows,
        int4 a group for every 64 rows. None for float32 and bfloat16.
      features: number of columns, without padding.
      bias: ``[features]``, added to a product; None for none.
      num: number of tokens of each batch row to multiply; None for all. Results for later tokens
        are zeros, and their keys and values are not written to the cache.
    """

    panels: Array
    scales: Float32[Array, "panels groups width"] | None
    features: int
    bias: Float32[Array, "features"] | None = None
    num: Int[Array, ""] | None = None


class Norm(NamedTuple):
    """Layer norm: ``inputs / sqrt(mean(inputs ** 2) + epsilon) * scale + bias``.

    ``centred`` subtracts the mean of the inputs first.
    """

    scale: Float32[Array, "width"]
    epsilon: float
    bias: Float32[Array, "width"] | None = None
    centred: bool = False


def usable() -> bool:
    """Returns True if the kernels are available and a CPU is this process's only device."""
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1 and available()


def suit(params: PyTree) -> bool:
    """Returns True if a model with these parameters can use the kernels.

    The kernels must be available, and all parameters concrete float32 arrays on a CPU that is the
    only device: on several devices each matrix would be gathered for the kernels.
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
    """Returns the products of the inputs, normed first if ``norm`` is given, with each matrix.

    With a single matrix, ``residual`` is added to the product.
    """
    rows = inputs.shape[:-1]
    shapes = [jax.ShapeDtypeStruct((*rows, matrix.features), jnp.float32) for matrix in matrices]
    return _of_layer("SpecT5XMultiply", shapes, inputs, norm, [residual], matrices)


def dot_with_table(
    inputs: Float32[Array, "*rows inner"], table: Array, num: Int[Array, ""] | None = None
) -> Float32[Array, "*rows vocab"]:
    """Computes ``inputs @ table.T`` for the first ``num`` tokens of each row, as in ``Matrix``.

    The table ``[vocab, inner]`` is float32, or uint16 with the bits of bfloat16 numbers.
    """
    shape = jax.ShapeDtypeStruct((*inputs.shape[:-1], table.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("SpecT5XDot", shape)(inputs, _num_used(inputs, num), table)


def row_major(array: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns an array that is row-major in memory, as kernels read it.

    JAX's ``with_layout_constraint`` does so, too, but lets XLA choose the layouts of all other
    results of the program, which JAX 0.10.0 to 0.11.0 then reads as row-major.
    """
    shape = jax.ShapeDtypeStruct(array.shape, jnp.float32)
    return jax.ffi.ffi_call("SpecT5XRowMajor", shape, input_output_aliases={0: 0})(array)


def look_up(tokens: Int[Array, "*shape"], table: Array) -> Float32[Array, "*shape width"]:
    """Returns the table's rows of ``tokens``; NaN for tokens outside ``[0, vocab)``.

    The table ``[vocab, width]`` is float32, or uint16 with the bits of bfloat16 numbers.
    """
    shape = jax.ShapeDtypeStruct((*tokens.shape, table.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("SpecT5XLookUp", shape)(tokens.astype(jnp.int32), table)


def normalize(inputs: Float32[Array, "*rows width"], norm: Norm) -> Float32[Array, "*rows width"]:
    """Applies the layer norm over the last axis."""
    shape = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
    return _of_layer("SpecT5XNormalize", shape, inputs, norm)


def alone() -> bool:
    """Returns True if the kernels are usable and no mesh is set."""
    return jax.sharding.get_abstract_mesh().empty and usable()


def summarize(
    values: Float32[Array, "*rows width"], with_sums: bool = True
) -> tuple[Int[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns each row's argmax (the first, if tied) and its ``log(sum(exp(values)))``.

    If ``with_sums`` is False, the second array is undefined.
    """
    rows = values.shape[:-1]
    shapes = [jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.int32, jnp.float32)]
    return tuple(_of_rows("SpecT5XSummarize", shapes, values, with_sums=with_sums))


def standardize(
    logits: Float32[Array, "*rows width"],
    temperatures: Float32[Array, "*rows"],
    top_k: UInt32[Array, "*rows"],
    top_p: Float32[Array, "*rows"],
    *,
    least_temperature: float,
) -> Float32[Array, "*rows width"]:
    """Returns the distribution that each row of logits is sampled from.

    It is the softmax at the row's temperature, cut to the ``top_k`` largest logits, then to the
    nucleus of mass ``top_p`` (0: uncut). Up to ``least_temperature`` it is 1 at the first argmax.
    """
    shape = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    options = {"least_temperature": np.float32(least_temperature)}
    return _of_rows("SpecT5XStandardize", shape, logits, temperatures, top_k, top_p, **options)


def compare(
    target_probs: Float32[Array, "*batch rows width"],
    draft_probs: Float32[Array, "*batch drafts width"],
    factors: Float32[Array, "*batch rows"],
) -> tuple[Float32[Array, "*batch drafts"], Float32[Array, "*batch rows"]]:
    """Returns ``sum(min(p, q))`` and ``sum(max(f * p - q, 0))`` of target p and draft q by row.

    ``factors`` are f. If the target has one row more than the draft, q is zero in that row.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape[:-1], jnp.float32) for a in (draft_probs, target_probs)]
    return tuple(_of_rows("SpecT5XCompare", shapes, target_probs, draft_probs, factors))


def sample(
    probs: Float32[Array, "*rows width"], uniforms: Float32[Array, "*rows 2"]
) -> Int[Array, "*rows"]:
    """Samples a token of each row with two uniform numbers, as ``distributions.sample_at``."""
    shape = jax.ShapeDtypeStruct(probs.shape[:-1], jnp.int32)
    return _of_rows("SpecT5XSample", shape, probs, uniforms)


def sample_residual(
    target_probs: Float32[Array, "*rows width"],
    draft_probs: Float32[Array, "*rows width"],
    uniforms: Float32[Array, "*rows 2"],
) -> Int[Array, "*rows"]:
    """Samples a token of each row from ``max(p - q, 0)``, or from p if that is zero everywhere."""
    shape = jax.ShapeDtypeStruct(target_probs.shape[:-1], jnp.int32)
    return _of_rows("SpecT5XSampleResidual", shape, target_probs, draft_probs, uniforms)


def threefry(
    keys: UInt32[Array, "*rows 2"], counts: UInt32[Array, "*rows"]
) -> UInt32[Array, "*rows 2"]:
    """Returns JAX's Threefry-2x32 hash of ``(0, count)`` under each key of two words."""
    return _of_rows("SpecT5XThreefry", jax.ShapeDtypeStruct(keys.shape, jnp.uint32), keys, counts)


def extend_attention(
    states: Float32[Array, "batch new embed"],
    norm: Norm,
    matrices: Sequence[Matrix],
    keys: Float32[Array, "batch heads length head_dim"],
    values: Float32[Array, "batch heads length head_dim"],
    starts: Int[Array, "batch"],
    bias: Float32[Array, "heads length"] | None,
    scale: float = 1.0,
) -> Extended:
    """Computes ``states + self_attention(norm(states))`` of new tokens over a cache.

    New keys and values are written at ``starts``, then the query at position p attends to
    positions 0 … p of its row. The cost grows with the text, not with the cache's length.

    Args:
      states, norm: states of the new tokens, and the norm applied before attention.
      matrices: maps to queries, keys and values, and the output map.
      keys, values: the cache, updated in place.
      starts: position of each row's first new token.
      bias: ``bias[h, d]`` is added to the scores of keys d positions before the query; or None.
      scale: factor of the scores before the bias.
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
) -> Extended:
    """Computes ``extend_attention`` for tokens of a tree or of beams (``interfaces.Nodes``).

    Results are, bit for bit, those of ``extend_attention`` at the end of each token's own text.
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
    """Computes ``states + cross_attention(norm(states))`` over encoded sources.

    Each source serves ``batch / inputs`` consecutive rows. ``matrices`` are the maps of queries and
    of the output; ``mask`` is added to the scores and is negative for padding.
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
    """Computes ``states + self_attention(norm(states))`` of whole sequences, without a cache.

    A query attends to the keys that ``allowed`` marks; ``matrices`` as in ``extend_attention``.
    """
    shape, given = jax.ShapeDtypeStruct(states.shape, jnp.float32), (allowed, bias)
    options = {"scale": np.float32(scale), "head_dim": np.int64(head_dim)}
    return _of_layer("SpecT5XAttendWhole", shape, states, norm, given, matrices, **options)


def _of_rows(name: str, shapes, *arrays: Array, **options):
    """Calls a kernel that computes each row alone, so that ``vmap`` may add rows."""
    call = jax.ffi.ffi_call(name, shapes, vmap_method="broadcast_all")
    return call(*arrays, **options)


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
    """Calls a kernel on a layer's inputs, norm, further arrays (None: empty) and matrices."""
    norm = Norm(_NONE, 0.0) if norm is None else norm
    # The kernels take all panels first, then all scales, then all biases.
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
    """Returns ``num``, or if None the number of tokens of ``inputs [..., new, width]``."""
    whole = inputs.shape[-2] if inputs.ndim > 1 else 1
    return jnp.asarray(whole if num is None else num, jnp.int32)


def _is_suitable(leaf) -> bool:
    # A traced model's devices are not known.
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.dtype == jnp.float32
    )
