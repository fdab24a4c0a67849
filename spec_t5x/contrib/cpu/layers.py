"""Blocks of the core's layers (norm, attention, MLP) as one or two calls of the kernels each.

``intercept`` replaces the methods in ``BLOCKS`` (see ``flax.linen.intercept_methods``) in networks
whose weights are packed in panels. The network itself computes attention with traits beyond T5's,
a scale and biases, and to a source in int8, although its query, key, value and output maps are
products with panels.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax.linen.module import InterceptorContext

from spec_t5x.contrib.cpu import calls
from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import Attention, NewTokens, PairBias, Traits
from spec_t5x.models.cache import LayerCache, RoundedHeads
from spec_t5x.models.layers import Dense, RMSNorm, activated
from spec_t5x.models.t5 import DecoderLayer, Layer, SelfAttentionLayer
from spec_t5x.types import Array


def intercept(plain: Callable, args: tuple, kwargs: dict, context: InterceptorContext) -> Any:
    """Calls the replacement of a network's method in ``BLOCKS``, or else the method."""
    for kind, name in BLOCKS:
        if context.method_name == name and isinstance(context.module, kind):
            return BLOCKS[kind, name](plain, context.module, *args, **kwargs)
    return plain(*args, **kwargs)


def _normalize(plain: Callable, norm: RMSNorm, inputs: Array) -> Array:
    if inputs.dtype != jnp.float32 or norm.dtype != "float32":
        return plain(inputs)
    return calls.normalize(inputs, _norm(norm))


def _attend(plain: Callable, layer: SelfAttentionLayer, states: Array, bias, deterministic: bool):
    """Computes attention of an encoder's layer, by XLA if it has dropout or other traits."""
    attention = layer.attention
    if not (deterministic and isinstance(bias, PairBias) and _is_plain(attention.traits)):
        return plain(states, bias, deterministic)
    norm, maps = _norm(layer.pre_attention_layer_norm), _maps(attention)
    given = bias.allowed, bias.by_position, attention.head_dim, attention.traits.scale
    return calls.whole_attention(states, norm, maps, *given)


def _attend_to_cache(
    plain: Callable, layer: Layer, states: Array, cache: LayerCache, tokens: NewTokens, *rest
) -> tuple[Array, LayerCache]:
    if isinstance(layer, DecoderLayer):
        attention, norm = layer.self_attention, layer.pre_self_attention_layer_norm
    else:
        attention, norm = layer.attention, layer.pre_attention_layer_norm
    in_slots = isinstance(tokens.places, Nodes)
    if not _is_plain(attention.traits) or not (in_slots or tokens.visible is None):
        return plain(states, cache, tokens, *rest)
    given = states, _norm(norm), _maps(attention), cache.keys, cache.values
    bias = tokens.by_distance(layer.relpos_bias)
    extend, places = calls.extend_attention, [tokens.places]
    if in_slots:
        extend, nodes = calls.extend_attention_nodes, tokens.places
        places = nodes.slots, nodes.slot_positions, nodes.visible
    states, keys, values = extend(*given, *places, bias, scale=attention.traits.scale)
    return states, cache.replace(keys=keys, values=values)


def _attend_to_source(
    plain: Callable, layer: DecoderLayer, states: Array, cache: LayerCache, cross_bias: Array
) -> Array:
    attention = layer.encoder_decoder_attention
    if not _is_plain(attention.traits):
        return plain(states, cache, cross_bias)
    maps = _matrix(attention.query), _matrix(attention.out)
    heads = cache.cross_keys, cache.cross_values
    # XLA's products of int8 would depend on the number of tokens in a call, in the last digits.
    heads = (_widened(each) if isinstance(each, RoundedHeads) else each for each in heads)
    # The bias masks the source's padding, so it is the same for all heads and queries.
    source = *heads, cross_bias[:, 0, 0]
    norm = _norm(layer.pre_cross_attention_layer_norm)
    return calls.source_attention(states, norm, maps, *source, attention.traits.scale)


def _widened(heads: RoundedHeads) -> Array:
    """Returns keys or values as numbers of the scales' type."""
    return heads.values.astype(heads.scales.dtype) * heads.scales.swapaxes(2, 3)


def _empty_cache(plain: Callable, layer: DecoderLayer, encoded: Array, max_length: int):
    cache = plain(encoded, max_length)
    if not _is_plain(layer.source_attention.traits):
        return cache
    # Otherwise a loop copies both in every iteration.
    keys, values = map(calls.row_major, (cache.cross_keys, cache.cross_values))
    return cache.replace(cross_keys=keys, cross_values=values)


def _feed_forward(
    plain: Callable, layer: Layer, states: Array, deterministic: bool = True
) -> Array:
    if not deterministic:
        return plain(states, deterministic)
    mlp, post_norm = layer.mlp, layer.post_mlp_layer_norm
    names = [*mlp.map_names, "wo"]
    *maps, output = (_with_bias(mlp.get_variable("params", name)) for name in names)
    # One call for all maps wakes the threads once, and short products run side by side.
    branches = calls.multiply(states, maps, _norm(layer.pre_mlp_layer_norm))
    hidden = activated(mlp.activations, branches)
    if post_norm is None:
        return calls.multiply(hidden, [output], residual=states)[0]
    return states + post_norm(calls.multiply(hidden, [output])[0])


BLOCKS: dict[tuple[type, str], Callable] = {
    (RMSNorm, "__call__"): _normalize,
    (SelfAttentionLayer, "attend"): _attend,
    (Layer, "attend_to_cache"): _attend_to_cache,
    (DecoderLayer, "attend_to_source"): _attend_to_source,
    (DecoderLayer, "empty_cache"): _empty_cache,
    (Layer, "feed_forward"): _feed_forward,
}


def _is_plain(traits: Traits) -> bool:
    """Returns True if attention has no traits but a scale and biases."""
    return traits == Traits(scale=traits.scale, use_bias=traits.use_bias)


def _norm(norm: RMSNorm) -> calls.Norm:
    scale = norm.get_variable("params", "scale")
    if norm.offset:
        scale = scale.astype(jnp.float32) + norm.offset
    bias = norm.get_variable("params", "bias") if norm.centred else None
    return calls.Norm(scale, norm.epsilon, bias, norm.centred)


def _maps(attention: Attention) -> list[calls.Matrix]:
    return list(map(_matrix, (attention.query, attention.key, attention.value, attention.out)))


def _matrix(dense: Dense) -> calls.Matrix:
    bias = dense.get_variable("params", "bias") if dense.use_bias else None
    return dense.get_variable("params", "kernel").for_kernels(bias)


def _with_bias(params: dict) -> calls.Matrix:
    return params["kernel"].for_kernels(params.get("bias"))
