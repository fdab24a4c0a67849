"""The gradient of a batch, a part of its rows at a time.

What a step holds for its derivative grows with the rows that it reads at once. Read in
parts it is as little as one part needs, and the gradient is the same: of the sums over all
tokens, divided by their number at the end, and not a mean of the parts' means.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_t5x.labs.training.losses import LossSums
from spec_t5x.models.logical_axes import constrain
from spec_t5x.types import PAD_ID, Array, Key, PyTree

# Of parameters, a batch's arrays, the dropout key and parameters that are not trained.
LossFn = Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], LossSums]


def mean_gradient(
    loss_fn: LossFn, parts: int
) -> Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], tuple[PyTree, LossSums]]:
    """The gradient of the mean loss of a batch's tokens, and its sums.

    Args:
        loss_fn: gives sums over the tokens of the rows that it is given.
        parts: the rows are read in so many turns.
    """

    def summed(params, inputs, key, frozen):
        sums = loss_fn(params, inputs, key, frozen)
        return sums.loss, sums

    gradient_of_sum = jax.grad(summed, has_aux=True)

    def in_parts(params, inputs, key, frozen):
        def add_part(total, numbered):
            number, part = numbered
            part_key = jax.random.fold_in(key, number)
            found = gradient_of_sum(params, part, part_key, frozen)
            return jax.tree.map(jnp.add, total, found), None

        turns = (jnp.arange(parts), jax.tree.map(lambda rows: _shared_out(rows, parts), inputs))
        first = jax.tree.map(lambda turn: turn[0], turns[1])
        shapes = jax.eval_shape(gradient_of_sum, params, first, key, frozen)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add_part, zeros, turns)[0]

    def mean(params, inputs, key, frozen):
        found = (gradient_of_sum if parts == 1 else in_parts)(params, inputs, key, frozen)
        gradients, sums = found
        scale = 1.0 / jnp.maximum(sums.num_tokens, 1.0)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients), sums

    return mean


def padded_rows(rows: Array, multiple: int) -> Array:
    """The rows and, where ``multiple`` does not divide their number, empty ones after them."""
    missing = -rows.shape[0] % multiple
    if not missing:
        return rows
    return jnp.pad(rows, ((0, missing), (0, 0)), constant_values=PAD_ID)


def _shared_out(rows: Array, parts: int) -> Array:
    """``[batch, length]`` as ``[parts, batch / parts, length]``, dealt out one by one.

    So every device of a mesh has its share of each part, and no part has all the padding.
    """
    rows = padded_rows(rows, parts)
    dealt = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1)
    return constrain(dealt, (None, "batch", "length"))
