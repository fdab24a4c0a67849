"""A smaller T5 made of layers of a larger one: what a draft for it can start from.

Keeping every k-th layer is how DistilBERT starts (Sanh et al. 2019, arXiv 1910.01108).
The output of the kept layers is poor before training, and learnt far faster than from
random parameters: embedding, output layer and widths are the larger model's.

Such a draft may also *share* parameters with its target: embedding, encoder, and the maps
to keys and values of the source in each kept decoder layer. Shared, they stay as they are,
and what the target computes of a source with them serves the draft as well. The rest is
the draft's *own*.
"""

from collections.abc import Sequence

from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

_CROSS = "encoder_decoder_attention"
_SHARED_MAPS = ("key", "value")
_SHARED = ("token_embedder", "encoder")
_RULES = {
    "first": lambda layers, number: layers[:number],
    "last": lambda layers, number: layers[-number:],
    "every": lambda layers, number: layers[::number],
}


def kept_layers(rule: str, total: int) -> tuple[int, ...]:
    """The layers, from 0, that a rule keeps of ``total``.

    >>> kept_layers("all", 3), kept_layers("first:2", 6), kept_layers("last:1", 6)
    ((0, 1, 2), (0, 1), (5,))
    >>> kept_layers("every:3", 8)
    (0, 3, 6)

    Raises:
        InputError: no such rule, or a number that is not from 1 to ``total``.
    """
    if rule == "all":
        return tuple(range(total))
    name, _, number = rule.partition(":")
    if name not in _RULES or not number.isdigit():
        raise InputError(f"layers to keep are {rule!r}: give all, first:K, last:K or every:K")
    if not 1 <= int(number) <= total:
        raise InputError(f"layers to keep are {rule!r}, of {total}: give K from 1 to {total}")
    return tuple(_RULES[name](range(total), int(number)))


def keep_layers(
    params: PyTree, config: T5Config, *, encoder: Sequence[int], decoder: Sequence[int]
) -> tuple[PyTree, T5Config]:
    """The T5 of these layers alone, and all that is no layer.

    Args:
        params, config: the larger model.
        encoder, decoder: numbers of the layers to keep, in their order there.
    """
    smaller = config.with_layers(encoder=encoder, decoder=decoder)
    return {
        **params,
        "encoder": _with_layers(params["encoder"], encoder),
        "decoder": _with_layers(params["decoder"], decoder),
    }, smaller


def own_params(params: PyTree) -> PyTree:
    """What a draft has for itself of its parameters, where it shares the rest."""
    decoder, own = {}, {name: v for name, v in params.items() if name not in _SHARED}
    for name, module in params["decoder"].items():
        # An EAGLE head may leave the source out.
        if _CROSS in module:
            cross = {map_: v for map_, v in module[_CROSS].items() if map_ not in _SHARED_MAPS}
            module = {**module, _CROSS: cross}
        decoder[name] = module
    return {**own, "decoder": decoder}


def with_shared(own: PyTree, target_params: PyTree, layers: Sequence[int]) -> PyTree:
    """All parameters of a draft: its own, and those that it shares with its target.

    Args:
        own: see ``own_params``.
        target_params: the target's.
        layers: which decoder layer of the target's each of the draft's was.
    """
    decoder = dict(own["decoder"])
    for number, layer in enumerate(layers):
        module = decoder[f"layers_{number}"]
        if _CROSS not in module:
            continue
        theirs = target_params["decoder"][f"layers_{layer}"][_CROSS]
        shared = {name: theirs[name] for name in _SHARED_MAPS}
        decoder[f"layers_{number}"] = {**module, _CROSS: {**module[_CROSS], **shared}}
    return {**target_params, **own, "decoder": decoder}


def _with_layers(stack: PyTree, layers: Sequence[int]) -> PyTree:
    rest = {name: module for name, module in stack.items() if not name.startswith("layers_")}
    kept = {f"layers_{number}": stack[f"layers_{layer}"] for number, layer in enumerate(layers)}
    return {**rest, **kept}
