"""Prompts that T5X forces and the package's loops can force too."""

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import PAD_ID, Array, Int


def check_prompts(prompts: Int[Array, "batch width"]) -> None:
    """Checks that no prompt has a hole: padding with a token after it.

    T5X fills a hole with a token of its own and goes on forcing; the loops force a
    prefix. The check runs where the tokens are known, on the host while decoding.

    Raises:
      InputError: a hole, in tokens that are known already; else the run fails with it.
    """
    if isinstance(prompts, jax.core.Tracer):
        jax.debug.callback(_check, prompts)
    else:
        _check(prompts)


def _check(prompts: Int[Array, "batch width"]) -> None:
    is_token = np.asarray(prompts)[:, 1:] != PAD_ID
    # A prefix never rises again.
    holes = np.flatnonzero((np.diff(is_token.astype(np.int8), axis=1) > 0).any(axis=1))
    if holes.size:
        raise InputError(
            f"prompt {holes[0]} of the batch has padding or an end of sequence before its end: "
            "give prompts without holes"
        )
