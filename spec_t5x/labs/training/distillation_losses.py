"""Divergences that a draft is trained down: between its distributions and the target's.

With p the target's distribution of a token and q the draft's, in nats except the last:

    forward_kl        KL(p || q): the draft covers all that the target may say
    reverse_kl        KL(q || p): the draft says nothing that the target does not
    jeffreys          KL(p || q) + KL(q || p), symmetric (Jeffreys 1946)
    total_variation   1 - sum min(p, q): one minus the acceptance rate of a draft, beta
                      (Theorem 3.5), which is what speculative decoding lives on

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares them for drafts.

All are sums over the vocabulary of one term for each token, and functions of the draft's
logits through q alone. With ``r = q dD/dq`` their gradient to the logits is therefore
``r - q sum(r)``, where a constant in ``dD/dq`` falls out. So each divergence is two lines
here, its terms and r. As for the cross-entropy, nothing of the logits' size is stored but
the derivative itself.

Logits may be as far apart as float32 has them: log-probabilities are differences of
logits, never logarithms of what may be 0. A token that is masked, by minus infinity, in
both models counts for nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec_t5x.types import Array, Float32

Divergence = Callable[
    [Float32[Array, "batch length vocab"], Float32[Array, "batch length vocab"]],
    Float32[Array, "batch length"],
]


class _Pair(NamedTuple):
    """Both distributions at every token; all ``[batch, length, vocab]``."""

    target_probs: Array
    draft_probs: Array
    # log p - log q; 0 where neither can be.
    log_ratio: Array


def _pair(target_logits: Array, draft_logits: Array) -> _Pair:
    target_z = jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
    draft_z = jax.nn.logsumexp(draft_logits, axis=-1, keepdims=True)
    is_masked = jnp.isneginf(target_logits) & jnp.isneginf(draft_logits)
    apart = jnp.where(is_masked, 0.0, target_logits - draft_logits)
    return _Pair(
        target_probs=jnp.exp(target_logits - target_z),
        draft_probs=jnp.exp(draft_logits - draft_z),
        log_ratio=jnp.where(is_masked, 0.0, apart - target_z + draft_z),
    )


def _times(probs: Array, values: Array) -> Array:
    """``probs * values``, where 0 times infinity is 0: the limit of x log x."""
    return jnp.where(probs > 0, probs * values, 0.0)


def _divergence(terms: Callable[[_Pair], Array], slopes: Callable[[_Pair], Array]) -> Divergence:
    """The function of both models' logits that sums ``terms``; no gradient to the target.

    Args:
        terms: what each token of the vocabulary adds.
        slopes: r of the module's docstring.
    """

    @jax.custom_vjp
    def divergence(target_logits, draft_logits):
        return jnp.sum(terms(_pair(target_logits, draft_logits)), axis=-1)

    def forward(target_logits, draft_logits):
        return divergence(target_logits, draft_logits), (target_logits, draft_logits)

    def backward(residuals, cotangents):
        pair = _pair(*residuals)
        of_each = slopes(pair)
        total = jnp.sum(of_each, axis=-1, keepdims=True)
        gradient = of_each - pair.draft_probs * total
        return None, gradient * cotangents[..., None]

    divergence.defvjp(forward, backward)
    return divergence


def _sign_of_excess(pair: _Pair) -> Array:
    """+1 where the draft says a token too often, -1 where too seldom, 0 where just right."""
    return jnp.sign(pair.draft_probs - pair.target_probs)


# KL(target || draft) of every token, in nats.
forward_kl = _divergence(
    terms=lambda pair: _times(pair.target_probs, pair.log_ratio),
    slopes=lambda pair: -pair.target_probs,
)
# KL(draft || target), in nats.
reverse_kl = _divergence(
    terms=lambda pair: -_times(pair.draft_probs, pair.log_ratio),
    slopes=lambda pair: -_times(pair.draft_probs, pair.log_ratio),
)
# The sum of both, in nats.
jeffreys = _divergence(
    terms=lambda pair: (
        _times(pair.target_probs, pair.log_ratio) - _times(pair.draft_probs, pair.log_ratio)
    ),
    slopes=lambda pair: -_times(pair.draft_probs, pair.log_ratio) - pair.target_probs,
)
# 1 - sum min(p, q), in [0, 1]: the probability of a rejection. Where the distributions hardly
# overlap, the gradient is next to 0: a draft from scratch better starts with forward_kl.
total_variation = _divergence(
    # Half the distance, not one less the overlap: exact near 0.
    terms=lambda pair: 0.5 * jnp.abs(pair.target_probs - pair.draft_probs),
    slopes=lambda pair: _times(pair.draft_probs, 0.5 * _sign_of_excess(pair)),
)

# By the names in gin files.
DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jeffreys": jeffreys,
    "total_variation": total_variation,
}

# Without any divergence: the draft learns the tokens of a text, whoever wrote it.
CROSS_ENTROPY = "cross_entropy"
OBJECTIVES = (CROSS_ENTROPY, *DIVERGENCES)
