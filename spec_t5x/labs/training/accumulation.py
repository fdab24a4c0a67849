"""The gradient of a batch, computed from a part of its rows at a time to save memory.

It is the gradient of the sums over all tokens, divided by the number of tokens at the end, and not
a mean of the parts' means.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_t5x.labs.training.losses import LossSums
from spec_t5x.models.logical_axes import constrain
from spec_t5x.types import PAD_ID, Array, Key, PyTree

# Takes parameters, a batch's arrays, the dropout key and parameters that are not trained.
LossFn = Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], LossSums]


def mean_gradient(
    loss_fn: LossFn, parts: int
) -> Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], tuple[PyTree, LossSums]]:
    """Returns the function that computes the gradient of the mean loss of a batch's tokens.

    It takes what ``loss_fn`` takes, reads the rows in ``parts`` turns, and returns the gradient
    and the sums over the tokens of all rows.
    """

    def summed(*given):
        sums = loss_fn(*given)
        return sums.loss, sums

    gradient_of_sum = jax.grad(summed, has_aux=True)

    def in_parts(params, inputs, key, frozen):
        def add_part(total, numbered):
            number, part = numbered
            part_key = jax.random.fold_in(key, number)
            found = gradient_of_sum(params, part, part_key, frozen)
            return jax.tree.map(jnp.add, total, found), None

        dealt = jax.tree.map(lambda rows: _dealt(rows, parts), inputs)
        first = jax.tree.map(lambda rows: rows[0], dealt)
        shapes = jax.eval_shape(gradient_of_sum, params, first, key, frozen)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add_part, zeros, (jnp.arange(parts), dealt))[0]

    def mean(*given):
        gradients, sums = (gradient_of_sum if parts == 1 else in_parts)(*given)
        scale = 1.0 / jnp.maximum(sums.num_tokens, 1.0)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients), sums

    return mean


def padded_rows(rows: Array, multiple: int) -> Array:
    """Appends empty rows up to the next multiple of ``multiple``."""
    missing = -rows.shape[0] % multiple
    if not missing:
        return rows
    return jnp.pad(rows, ((0, missing), (0, 0)), constant_values=PAD_ID)


def _dealt(rows: Array, parts: int) -> Array:
    """Deals out rows, ``[batch, length]``, as ``[parts, batch / parts, length]``, one by one.

    So every device of a mesh has its share of each part, and no part has all the padding.
    """
    rows = padded_rows(rows, parts)
    dealt = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1)
    return constrain(dealt, (None, "batch", "length"))
