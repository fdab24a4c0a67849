"""Verifiers, which decide how many drafted tokens are accepted and draw the token after them.

A verifier is a pure function of arrays and a key, without a model, so that it can be enumerated
exactly (``tests/sampling/test_verification.py``) and serves any use of speculative sampling. All
functions here are for one row; ``verifiers.py`` binds them to the loops. A *draft* is a drafted
token x. In formulas p is the target's distribution, q the draft's, u a uniform number in [0, 1).

If a row proposes fewer than gamma tokens, ``draft_probs`` has zeros from the first position
without a proposal on (``mask_unproposed``), and a token there follows the target's distribution.
"""

import flax.struct
import jax.numpy as jnp
from jax import lax

from spec_t5x.sampling.distributions import (
    excess,
    normalize,
    residual,
    sample,
    sample_residual,
    values_at,
)
from spec_t5x.sampling.random_bits import uniform
from spec_t5x.types import Array, Bool, Float, Int, Key


@flax.struct.dataclass
class Verdict:
    """Decision of a verifier on one row or, after ``vmap``, on each row."""

    # Number of accepted drafts, 0 … gamma; they are the first ones.
    num_accepted: Int[Array, "*batch"]
    # Token after the accepted drafts: a correction, or a bonus if all drafts were accepted.
    next_token: Int[Array, "*batch"]
    # In a tree, the accepted node at depth 0, 1, …; at greater depths the last accepted one again.
    path: Int[Array, "*batch levels"] | None = None


def mask_unproposed(
    draft_probs: Float[Array, "gamma vocab"], num_proposed: Int[Array, ""]
) -> Float[Array, "gamma vocab"]:
    """Returns ``draft_probs`` with zeros at the positions from ``num_proposed`` on."""
    return jnp.where(jnp.arange(draft_probs.shape[0])[:, None] < num_proposed, draft_probs, 0.0)


# Token verification, Algorithm 1


def token_verification(
    key: Key[Array, ""],
    emit_key: Key[Array, ""],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
    lenience: float = 1.0,
) -> Verdict:
    """Verifies drafts one by one: speculative sampling (Algorithm 1 of Leviathan et al. 2023).

    If ``lenience`` is 1, the emitted tokens follow the target's distribution exactly, for any
    draft. Below 1 (section A.5) more drafts are accepted, and no token is emitted with more than
    ``1 / lenience`` times the target's probability.

    Args:
      key: random key of the decisions.
      emit_key: random key of the token after the accepted drafts.
      draft_tokens: the proposals, each drawn from its row of ``draft_probs``.
      draft_probs: the very distributions that the proposals were drawn from.
      target_probs: the target's distributions, at each draft and after the last one.
      lenience: l, which multiplies q in the comparison, in (0, 1]; 1 is lossless.
    """
    uniforms = uniform(key, draft_tokens.shape[0])
    accepted = count_accepted(uniforms, draft_tokens, draft_probs, target_probs, lenience)
    emission = emission_rows(accepted, draft_probs, target_probs)
    return Verdict(num_accepted=accepted, next_token=sample_residual(emit_key, *emission))


def count_accepted(
    uniforms: Float[Array, "gamma"],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
    lenience: float = 1.0,
) -> Int[Array, ""]:
    """Counts the leading drafts with ``u l q(x) < p(x)`` (Algorithm 1; section A.5 for l).

    A product needs no guard against division by 0; tokens of target probability 0 always fail.
    """
    of_draft = values_at(draft_probs, draft_tokens)
    of_target = values_at(target_probs[:-1], draft_tokens)
    return _leading((of_draft > 0) & (uniforms * lenience * of_draft < of_target))


def emission_rows(
    num_accepted: Int[Array, ""],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
    carried: Float[Array, "gamma+1"] | None = None,
) -> tuple[Float[Array, "vocab"], Float[Array, "vocab"]]:
    """Returns the p and q from whose residual the token after the accepted drafts is drawn.

    At the first rejected draft the residual is ``norm(max(0, p - q))``; after the last, p. In block
    verification p is multiplied by the ratio ``carried`` to it: without, the law would be wrong.
    """
    of_target, last = target_probs[num_accepted], draft_probs.shape[0] - 1
    if carried is not None:
        of_target = carried[num_accepted] * of_target
    if last < 0:
        return of_target, jnp.zeros(draft_probs.shape[1], draft_probs.dtype)
    is_draft = num_accepted <= last
    return of_target, jnp.where(is_draft, draft_probs[jnp.minimum(num_accepted, last)], 0.0)


# Block verification


def block_verification(
    key: Key[Array, ""],
    emit_key: Key[Array, ""],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Verdict:
    """Verifies the drafts jointly (Sun et al. 2024, arXiv 2403.10444).

    The rule is as exact as ``token_verification``, has the same arguments, and accepts at least as
    many drafts in expectation, because a position's spare probability is used at the next one.
    """
    thresholds, carried = block_thresholds(draft_tokens, draft_probs, target_probs)
    accepted = count_block_accepted(uniform(key, draft_tokens.shape[0]), thresholds)
    emission = emission_rows(accepted, draft_probs, target_probs, carried)
    return Verdict(num_accepted=accepted, next_token=sample_residual(emit_key, *emission))


def block_thresholds(
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> tuple[Float[Array, "gamma"], Float[Array, "gamma+1"]]:
    """Returns each draft's probability of success, and the carried ratios p_0 … p_gamma.

    They are ``p_0 = 1, p_i = min(1, p_{i-1} t(x_i) / d(x_i))``, with t and d the target's and the
    draft's distribution. Draft i succeeds with probability ``Z_i / (Z_i + 1 - p_i)``, where
    ``Z_i = sum max(p_i t - d, 0)`` is of the next row, whose d is 0 after the last draft.
    """
    of_draft = values_at(draft_probs, draft_tokens)
    of_target = values_at(target_probs[:-1], draft_tokens)
    # Only tokens that were not proposed have probability 0, or a row that is not finite.
    proposed = of_draft > 0

    def carry(ratio, probabilities):
        target_prob, draft_prob, proposed = probabilities
        ratio = jnp.minimum(_divide(ratio * target_prob, draft_prob), 1.0)
        ratio = jnp.where(proposed, ratio, 0.0)
        return ratio, ratio

    one = jnp.ones((), target_probs.dtype)
    # Unrolled, since a loop inside the iteration would split its CUDA graph.
    _, carried = lax.scan(carry, one, (of_target, of_draft, proposed), unroll=True)
    carried = jnp.concatenate([one[None], carried])
    # Where nothing was proposed, d is 0 and t has mass 1. A row of t that is not finite counts as
    # that: rules may exclude all tokens after an end. Else its token, which follows, shows it.
    follows = jnp.append(proposed[1:], True) & jnp.isfinite(target_probs[1:, 0])
    mass = jnp.where(follows, excess(carried, target_probs, draft_probs)[1:], carried[1:])
    denominator = mass + 1 - carried[1:]
    # The denominator is 0 if draft and target agree so far and in the next row.
    thresholds = jnp.where(denominator <= 0, 1.0, _divide(mass, denominator))
    return jnp.where(proposed, thresholds, 0.0), carried


def count_block_accepted(
    uniforms: Float[Array, "gamma"], thresholds: Float[Array, "gamma"]
) -> Int[Array, ""]:
    """Counts the drafts up to the last with ``u < threshold``; failures before it do not matter."""
    positions = jnp.arange(1, uniforms.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(uniforms < thresholds, positions, 0), initial=0)


# Rejection sampling, the comparison of section A.2


def rejection_verification(
    key: Key[Array, ""],
    emit_key: Key[Array, ""],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Verdict:
    """Accepts drafts one by one with probability ``p(x) / (M q(x))``, ``M = max p / q``.

    The rule is as exact as ``token_verification``, has its arguments, and accepts no more often:
    with probability ``1 / M``. After a rejection the next token is drawn from the target itself:
    the non-iterative version of section A.2.
    """
    uniforms = uniform(key, draft_tokens.shape[0])
    accepted = count_unrejected(uniforms, draft_tokens, draft_probs, target_probs)
    return Verdict(num_accepted=accepted, next_token=sample(emit_key, target_probs[accepted]))


def count_unrejected(
    uniforms: Float[Array, "gamma"],
    draft_tokens: Int[Array, "gamma"],
    draft_probs: Float[Array, "gamma vocab"],
    target_probs: Float[Array, "gamma+1 vocab"],
) -> Int[Array, ""]:
    """Counts the leading drafts with ``u M q(x) < p(x)`` (section A.2)."""
    of_draft = values_at(draft_probs, draft_tokens)
    of_target = values_at(target_probs[:-1], draft_tokens)
    shares = rejection_acceptance(target_probs[:-1], draft_probs)
    return _leading(uniforms * of_draft < shares * of_target)


def rejection_acceptance(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows"]:
    """Returns each row's ``1 / M = min q / p``, the rate of rejection sampling (section A.2)."""
    return jnp.min(_divide(draft_probs, target_probs), -1, where=target_probs > 0, initial=jnp.inf)


# Verification of known tokens, without chance


def matching_verification(
    draft_tokens: Int[Array, "gamma"],
    target_tokens: Int[Array, "gamma+1"],
    num_proposed: Int[Array, ""],
) -> Verdict:
    """Accepts drafts up to the first that is not the target's token, which it emits instead.

    If ``target_tokens`` are the argmax, this is ``token_verification`` at temperature 0. If Gumbel
    noise chose them, and the same noise the drafts (``distributions.gumbel_argmax``), it is coupled
    verification: the text depends on target and noise alone (arXiv 2408.07978).
    """
    return accept_leading(draft_tokens == target_tokens[:-1], target_tokens, num_proposed)


def lenient_argmax(
    logits: Float[Array, "*rows vocab"], lenience: float
) -> Bool[Array, "*rows vocab"]:
    """Returns the mask of tokens x with ``p(x) >= l max(p)`` (section A.5), a lossy rule.

    The paper prints the inequality reversed. p is the softmax of the logits, before
    ``standardize``; the lenience l is in (0, 1].
    """
    return logits - jnp.max(logits, axis=-1, keepdims=True) >= jnp.log(lenience)


def accept_leading(
    acceptable: Bool[Array, "gamma"],
    target_tokens: Int[Array, "gamma+1"],
    num_proposed: Int[Array, ""],
) -> Verdict:
    """Accepts proposed drafts up to the first unacceptable one, then emits the target's token."""
    proposed = jnp.arange(acceptable.shape[0]) < num_proposed
    accepted = _leading(proposed & acceptable)
    return Verdict(num_accepted=accepted, next_token=target_tokens[accepted])


# Several drafts for one position


def node_verification(
    uniforms: Float[Array, "children"],
    children: Int[Array, "children"],
    draft_probs: Float[Array, "vocab"],
    target_probs: Float[Array, "vocab"],
) -> tuple[Int[Array, ""], Float[Array, "vocab"]]:
    """Verifies several drafts for one position, drawn without replacement.

    Each child is tested against the residual that the children before it left (recursive rejection
    sampling: Jeon et al. 2024, arXiv 2402.14160), so that the target's distribution is kept.

    Args:
      uniforms: one number in [0, 1) for each child.
      children: distinct tokens in the order of their draws; a token that the draft could not draw
        counts as absent.
      draft_probs, target_probs: distributions at this position, before the first draw.

    Returns:
      The index of the accepted child, or ``len(children)`` if none is accepted; and the
      distribution to emit from if none is, to be ignored otherwise.
    """
    num = children.shape[0]

    def test(carry, child):
        target, draft, chosen = carry
        index, uniform, token = child
        present = draft[token] > 0
        accept = present & (uniform * draft[token] < target[token])
        left = residual(target, draft)
        without = normalize(draft.at[token].set(0.0))
        chosen = jnp.where((chosen == num) & accept, index, chosen)
        return (jnp.where(present, left, target), without, chosen), None

    start = (target_probs, draft_probs, jnp.int32(num))
    indices = jnp.arange(num, dtype=jnp.int32)
    (emission, _, chosen), _ = lax.scan(test, start, (indices, uniforms, children))
    return chosen, emission


def _divide(masses: Array, by: Array) -> Array:
    """Divides elementwise; where the divisor is not positive, returns the dividend."""
    return masses / jnp.where(by > 0, by, 1.0)


def _leading(accepted: Bool[Array, "gamma"]) -> Int[Array, ""]:
    """Counts the entries before the first false one."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)), dtype=jnp.int32)
