"""Prompts that T5X forces and the package's loops can force too."""

import functools

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.loops.outputs import first_hole
from spec_t5x.types import PAD_ID, Array, Int


def check_prompts(prompts: Int[Array, "batch width"], room: int | None = None) -> None:
    """Checks that prompts are whole: no padding before a token, no more tokens than room.

    T5X fills a hole with a token of its own and goes on forcing; the loops force a
    prefix. The check runs where the tokens are known, on the host while decoding.

    Args:
      prompts: the start token first, padded with 0.
      room: tokens that may follow the start token; None allows the width.

    Raises:
      InputError: a fault, in tokens that are known already; else the run fails with it.
    """
    check = functools.partial(_check, room=prompts.shape[1] - 1 if room is None else room)
    if isinstance(prompts, jax.core.Tracer):
        jax.debug.callback(check, prompts)
    else:
        check(prompts)


def _check(prompts: Int[Array, "batch width"], room: int) -> None:
    hole = first_hole(prompts)
    if hole is not None:
        raise InputError(
            f"prompt {hole} of the batch has padding or an end of sequence before its end: "
            "give prompts without holes"
        )
    longest = np.count_nonzero(np.asarray(prompts)[:, 1:] != PAD_ID, axis=1).max(initial=0)
    if longest > room:
        raise InputError(
            f"a prompt holds {longest} tokens and max_decode_len is {room}: raise max_decode_len "
            "or shorten the prompts"
        )
