"""A smaller T5 made of layers of a larger T5, as the start of training a draft for it.

DistilBERT starts from every k-th layer (Sanh et al. 2019, arXiv 1910.01108). The kept layers
predict poorly before training, but learn far faster than random parameters: embedding, output
layer and widths are the larger model's.

A draft may also share parameters with its target (``models.shared_params``), and keep only the
columns of the output layer that score likely tokens (``models.narrow_head``).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.models.shared_params import CROSS, SHARED_MAPS
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID, Array, Float, Int, PyTree

_RULES = {
    "first": lambda layers, number: layers[:number],
    "last": lambda layers, number: layers[-number:],
    "every": lambda layers, number: layers[::number],
}


def kept_layers(rule: str, total: int) -> tuple[int, ...]:
    """Returns the layers, counted from 0, that a rule keeps of ``total``.

    >>> kept_layers("all", 3), kept_layers("first:2", 6), kept_layers("last:1", 6)
    ((0, 1, 2), (0, 1), (5,))
    >>> kept_layers("every:3", 8)
    (0, 3, 6)

    Raises:
        InputError: an unknown rule, or a number that is not from 1 to ``total``.
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
    """Returns a T5's ``params`` and ``config`` with only these layers of each stack, in order."""
    kept = {"encoder": encoder, "decoder": decoder}
    smaller = {name: _with_layers(params[name], layers) for name, layers in kept.items()}
    return {**params, **smaller}, config.with_layers(**kept)


def with_shared(own: PyTree, target_params: PyTree, layers: Sequence[int]) -> PyTree:
    """Returns all parameters of a draft: ``own``, and those that it shares with its target.

    ``layers`` are the target's decoder layers that the draft's layers were made of, in order.
    """
    decoder = dict(own["decoder"])
    for number, layer in enumerate(layers):
        module = decoder[f"layers_{number}"]
        # Layers of an EAGLE head may have no attention to the source.
        if CROSS in module:
            theirs = target_params["decoder"][f"layers_{layer}"][CROSS]
            shared = {name: theirs[name] for name in SHARED_MAPS}
            decoder[f"layers_{number}"] = {**module, CROSS: {**module[CROSS], **shared}}
    return {**target_params, **own, "decoder": decoder}


def narrowed_params(own: PyTree, params: PyTree, config: T5Config, ids) -> PyTree:
    """Returns a draft's own parameters with a narrow head of the tokens ``ids``.

    The head's ``kernel [embed, known]`` has columns of the output layer. ``own`` are the draft's
    own parameters (``shared_params.own_params``), ``params`` all of its parameters.
    """
    return with_narrow_head(own, output_kernel(params, config)[:, ids])


def with_narrow_head(own: PyTree, kernel: Any) -> PyTree:
    """Returns a draft's own parameters, or their shardings, with a narrow head as output layer."""
    decoder = {name: each for name, each in own["decoder"].items() if name != "logits_dense"}
    return {**own, "decoder": decoder, "narrow_head": {"kernel": kernel}}


def check_number(number: int, vocab_size: int) -> None:
    """Raises ``InputError`` unless a number of known tokens is from 1 to ``vocab_size - 1``."""
    if not 1 <= number < vocab_size:
        raise InputError(
            f"a narrow head of {number} of {vocab_size} tokens: give 1 to {vocab_size - 1}"
        )


def likeliest_ids(tokens: Int[Array, "tokens"], number: int, vocab_size: int) -> np.ndarray:
    """Returns the ``number`` ids most frequent in ``tokens``, with EOS, without padding, sorted.

    Raises:
        InputError: ``number`` is not from 1 to ``vocab_size - 1``.
    """
    check_number(number, vocab_size)
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    counts[PAD_ID], counts[EOS_ID] = -1, counts.max() + 1
    # Vocabularies are sorted by frequency: lower ids win ties.
    return np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)


def output_kernel(params: PyTree, config: T5Config) -> Float[Array, "embed vocab"]:
    """Returns a T5's output layer: its ``logits_dense``, or its scaled embedding if tied."""
    if config.logits_via_embedding:
        return params["token_embedder"]["embedding"].T * config.output_scale
    return params["decoder"]["logits_dense"]["kernel"]


def _with_layers(stack: PyTree, layers: Sequence[int]) -> PyTree:
    rest = {name: module for name, module in stack.items() if not name.startswith("layers_")}
    kept = {f"layers_{number}": stack[f"layers_{layer}"] for number, layer in enumerate(layers)}
    return {**rest, **kept}
