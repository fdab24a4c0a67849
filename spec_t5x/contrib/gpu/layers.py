"""Blocks of the core's layers by kernels, eight in a decoder layer of T5.

``intercept`` replaces the methods in ``BLOCKS`` (see ``flax.linen.intercept_methods``). The network
itself computes what the kernels cannot: more rows and new tokens than ``_is_few`` allows, matrices
in int4, and traits that T5 lacks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.module import InterceptorContext

from spec_t5x.contrib.gpu import kernels
from spec_t5x.contrib.gpu.attention import Contexts, attend_to_source, attend_to_text
from spec_t5x.contrib.gpu.products import Norm, fits, multiply
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.interfaces import Nodes
from spec_t5x.machine.operations import switch
from spec_t5x.models.attention import Attention, NewTokens, Traits
from spec_t5x.models.cache import LayerCache, RoundedHeads
from spec_t5x.models.layers import Dense, RMSNorm
from spec_t5x.models.t5 import DecoderLayer, Layer
from spec_t5x.models.weights import Form
from spec_t5x.types import Array


def intercept(plain: Callable, args: tuple, kwargs: dict, context: InterceptorContext) -> Any:
    """Calls the replacement of a network's method in ``BLOCKS``, or else the method."""
    for kind, name in BLOCKS:
        if context.method_name == name and isinstance(context.module, kind):
            return BLOCKS[kind, name](plain, context.module, *args, **kwargs)
    return plain(*args, **kwargs)


def _multiply(plain: Callable, dense: Dense, inputs: Array) -> Array:
    """Computes one map: the output layer, or one outside of the blocks below."""
    matrix = dense.get_variable("params", "kernel")
    if not dense.use_bias and _suits(inputs, matrix):
        return _products(inputs, [matrix], dtype=dense.dtype)[0]
    return plain(inputs)


def _attend_to_cache(
    plain: Callable, layer: Layer, states: Array, cache: LayerCache, tokens: NewTokens, *rest
) -> tuple[Array, LayerCache]:
    if isinstance(layer, DecoderLayer):
        attention, norm = layer.self_attention, layer.pre_self_attention_layer_norm
    else:
        attention, norm = layer.attention, layer.pre_attention_layer_norm
    is_causal = isinstance(tokens.places, Nodes) or tokens.visible is None
    if not (is_causal and _attends(layer, attention, norm, states)):
        return plain(states, cache, tokens, *rest)
    new = _maps(norm, attention, (attention.query, attention.key, attention.value), states)
    given = cache.keys, cache.values, tokens.places, tokens.by_distance(layer.relpos_bias)
    contexts, keys, values = attend_to_text(new, *given, in_tiles=_in_tiles(states))
    return _added(states, contexts, attention), cache.replace(keys=keys, values=values)


def _attend_to_source(
    plain: Callable, layer: DecoderLayer, states: Array, cache: LayerCache, cross_bias: Array
) -> Array:
    attention, norm = layer.encoder_decoder_attention, layer.pre_cross_attention_layer_norm
    if not _attends(layer, attention, norm, states):
        return plain(states, cache, cross_bias)
    source, scales = [cache.cross_keys, cache.cross_values], []
    if isinstance(cache.cross_keys, RoundedHeads):
        source, scales = [each.values for each in source], [each.scales for each in source]
    (queries,) = _maps(norm, attention, (attention.query,), states)
    # The bias masks the source's padding, so it is the same for all heads and queries.
    given = *source, cross_bias[:, 0, 0], scales
    contexts = attend_to_source(queries, *given, in_tiles=_in_tiles(states))
    return _added(states, contexts, attention)


def _feed_forward(
    plain: Callable, layer: Layer, states: Array, deterministic: bool = True
) -> Array:
    mlp, norm = layer.mlp, layer.pre_mlp_layer_norm
    params = mlp.variables["params"]
    *maps, output = (params[name]["kernel"] for name in (*mlp.map_names, "wo"))
    is_t5s = _is_rms(norm) and layer.post_mlp_layer_norm is None and not mlp.use_bias
    suit = _suits(states, *maps) and _suits(states, output)
    if not (deterministic and is_t5s and suit):
        return plain(states, deterministic)
    (hidden,) = _products(states, maps, _norm(norm), activations=mlp.activations)
    return _products(hidden, [output], residual=states)[0]


BLOCKS: dict[tuple[type, str], Callable] = {
    (Dense, "__call__"): _multiply,
    (Layer, "attend_to_cache"): _attend_to_cache,
    (DecoderLayer, "attend_to_source"): _attend_to_source,
    (Layer, "feed_forward"): _feed_forward,
}


def _attends(layer: Layer, attention: Attention, norm: RMSNorm, states: Array) -> bool:
    """Returns True if the kernels have all traits of an attention, and tokens are few."""
    config, traits = layer.config, attention.traits
    is_t5s = traits == Traits(scale=traits.scale) and _is_rms(norm)
    is_t5s &= not (config.has_post_norms or config.merges_source)
    # Triton computes blocks of a power of two.
    whole = attention.head_dim in (16, 32, 64, 128, 256)
    # In tiles, any number of rows: products of more rows are XLA's.
    return is_t5s and whole and _is_few(states, most_in_tiles=len(states))


def _is_rms(norm: RMSNorm) -> bool:
    return not norm.centred and not norm.offset


def _maps(
    norm: RMSNorm, attention: Attention, denses: Sequence[Dense], states: Array
) -> list[Array]:
    """Returns the maps of normed states to queries and more, by one kernel if it can."""
    matrices = [dense.get_variable("params", "kernel") for dense in denses]
    if all(_suits(states, matrix) for matrix in matrices):
        queries, *others = _products(states, matrices, _norm(norm))
    else:
        normed = norm(states)
        queries, *others = (dense(normed) for dense in denses)
    scale = attention.traits.scale
    return [queries if scale == 1 else queries * scale, *others]


def _added(states: Array, contexts: Array | Contexts, attention: Attention) -> Array:
    """Returns states + the output map of the contexts of all heads."""
    matrix = attention.out.get_variable("params", "kernel")
    if _suits(states, matrix):
        return _products(contexts, [matrix], residual=states, dtype=str(states.dtype))[0]
    if isinstance(contexts, Contexts):
        contexts = contexts.of_all_keys((Ellipsis,), slice(None)).astype(states.dtype)
    return states + attention.out(contexts)


def _products(
    inputs: Array | Contexts,
    matrices: Sequence[Transposed],
    norm: Norm | None = None,
    *,
    residual: Array | None = None,
    **options,
) -> list[Array]:
    """Calls ``products.multiply`` for the tokens of all rows."""
    given = inputs if residual is None else residual
    tokens, in_tiles = given.shape[:-1], _in_tiles(given)
    in_tiles &= all(matrix.values.dtype != jnp.float32 for matrix in matrices)
    inputs, residual = jax.tree.map(
        lambda array: array.reshape(-1, *array.shape[len(tokens) :]), (inputs, residual)
    )
    options |= {"residual": residual, "in_tiles": in_tiles}
    products = multiply(inputs, matrices, norm, **options)
    return [product.reshape(*tokens, -1) for product in products]


def _suits(inputs: Array, *matrices: Array | Form) -> bool:
    """Returns True if one program can multiply the inputs of all rows with all matrices."""
    readable = all(isinstance(matrix, Transposed) for matrix in matrices)
    return _is_few(inputs) and readable and fits(*matrices)


def _in_tiles(states: Array) -> bool:
    """Returns True if tensor cores compute tokens in tiles: the same for any number of tokens."""
    return states.dtype == jnp.bfloat16 and states.ndim > 2 and len(states) > 1


def _is_few(inputs: Array, most_in_tiles: int = kernels.MOST_ROWS_IN_TILES) -> bool:
    """Returns True if the kernels compute so many tokens: of one row, with the switch of more."""
    *leading, _ = inputs.shape
    rows, tokens = math.prod(leading[:1]), math.prod(leading[1:])
    # Sizes that are no numbers are those of an export for other devices.
    if jax.config.jax_default_device is not None or not isinstance(rows * tokens, int):
        return False
    in_tiles, most_rows = _in_tiles(inputs), 1
    if switch(kernels.SWITCH) == "1":
        most_rows = most_in_tiles if in_tiles else kernels.MOST_ROWS
    return rows <= most_rows and tokens <= (kernels.TILE if in_tiles else kernels.MOST_TOKENS)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.get_variable("params", "scale"), norm.epsilon)
