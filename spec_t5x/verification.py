"""Verifiers: which drafts to keep, and the token that follows them.

A verifier is a pure function of arrays and a key. It knows no model, so it can be
enumerated exactly (``tests/test_verification.py`` does) and serves any use of
speculative sampling. All functions here are for one row; the loops ``vmap`` them.
"""

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.distributions import residual, sample
from spec_t5x.types import Array, Bool, Float, Int, Key


@flax.struct.dataclass
class Verdict:
    """What a verifier decided for one row (or, after ``vmap``, for each row)."""

    # How many of the drafts stand, 0 … gamma.
    num_accepted: Int[Array, "*batch"]
    # The token that follows them: a correction, or a bonus after the last draft.
    next_token: Int[Array, "*batch"]


def count_accepted(
    uniforms: Float[Array, "gamma"],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Int[Array, ""]:
    """Number of leading drafts with ``u q(x) < p(x)`` (Algorithm 1).

    The product needs no guard against division by zero, and a token that the
    target excludes is never accepted, whatever ``u``.
    """
    of_draft = _probability_of(draft_tokens, draft_probs)
    of_target = _probability_of(draft_tokens, target_probs[:-1])
    return _leading(uniforms * of_draft < of_target)


def emission_probs(
    num_accepted: Int[Array, ""],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Float[Array, "vocab"]:
    """Distribution of the token after ``num_accepted`` drafts (Algorithm 1).

    ``norm(max(0, p - q))`` at the first rejected draft, the target's own after the
    last one.
    """
    gamma = draft_probs.shape[0]
    here = target_probs[num_accepted]
    if gamma == 0:
        return here
    rejected = draft_probs[jnp.minimum(num_accepted, gamma - 1)]
    return jnp.where(num_accepted < gamma, residual(here, rejected), here)


def token_verification(
    key: Key[Array, ""],
    emit_key: Key[Array, ""],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Verdict:
    """Speculative sampling, token by token (Algorithm 1 of Leviathan et al. 2023).

    The emitted tokens follow the target's distribution exactly, for any draft.

    Args:
      key: drives the accept/reject decisions.
      emit_key: draws the token that follows.
      draft_tokens: the proposals, each drawn from its row of ``draft_probs``.
      draft_probs: the very distributions the proposals were drawn from.
      target_probs: the target's, at each draft and after the last one.
    """
    uniforms = jax.random.uniform(key, draft_tokens.shape)
    accepted = count_accepted(uniforms, draft_tokens, draft_probs, target_probs)
    emission = emission_probs(accepted, draft_probs, target_probs)
    return Verdict(num_accepted=accepted, next_token=sample(emit_key, emission))


def greedy_verification(
    draft_tokens: Int[Array, "gamma"], target_tokens: Int[Array, "gamma+1"]
) -> Verdict:
    """``token_verification`` where the target is argmax: no noise, no probabilities.

    With all of the target's mass on one token, that token is the only one accepted
    and the only one emitted, however the draft was drawn.
    """
    accepted = _leading(draft_tokens == target_tokens[:-1])
    return Verdict(num_accepted=accepted, next_token=target_tokens[accepted])


def _probability_of(tokens, probs):
    return jnp.take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def _leading(accepted: Bool[Array, "gamma"]) -> Int[Array, ""]:
    """How many entries are true before the first false one."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)), dtype=jnp.int32)
