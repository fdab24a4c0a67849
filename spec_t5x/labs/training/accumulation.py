"""The gradient of a batch, computed over parts of its rows in turn to save memory.

The parts' gradients of summed losses are added, and divided by the batch's number of tokens at the
end: the result is the gradient of the batch's mean loss, not a mean of the parts' means.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_t5x.labs.training.losses import LossSums
from spec_t5x.models.logical_axes import constrain
from spec_t5x.types import PAD_ID, Array, Key, PyTree

# Maps trained parameters, a batch's arrays, dropout key and frozen parameters to sums over tokens.
LossFn = Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], LossSums]


def mean_gradient(
    loss_fn: LossFn, parts: int
) -> Callable[[PyTree, PyTree, Key[Array, ""], PyTree | None], tuple[PyTree, LossSums]]:
    """Returns a function that computes the gradient of the mean loss of a batch's tokens.

    The function has the arguments of ``loss_fn``, computes the rows in ``parts`` parts, one after
    another, and returns the gradient and the ``LossSums`` of all rows.
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
    """Appends rows of padding ids to [batch, length], up to a multiple of ``multiple`` rows."""
    missing = -rows.shape[0] % multiple
    if not missing:
        return rows
    return jnp.pad(rows, ((0, missing), (0, 0)), constant_values=PAD_ID)


def _dealt(rows: Array, parts: int) -> Array:
    """Splits rows, [batch, length], into [parts, batch / parts, length]: row i to i modulo parts.

    Every device of a mesh thus has a share of each part, and the padding rows are spread out.
    """
    rows = padded_rows(rows, parts)
    dealt = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]).swapaxes(0, 1)
    return constrain(dealt, (None, "batch", "length"))
