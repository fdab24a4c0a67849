"""Divergences between a target's and a draft's distributions, which distillation minimizes.

With p the target's distribution at a position and q the draft's, in nats except the last:

    forward_kl        KL(p || q): the draft covers all tokens that are likely under the target
    reverse_kl        KL(q || p): the draft avoids tokens that are unlikely under the target
    jeffreys          KL(p || q) + KL(q || p), symmetric (Jeffreys 1946)
    total_variation   1 - sum min(p, q): the probability of a rejection, one minus beta
                      (Theorem 3.5). If the distributions hardly overlap, its gradient is nearly
                      0: a randomly initialized draft should start with forward_kl

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares these divergences for drafts.

Each is a sum over the vocabulary. Logits may be any float32 numbers: log-probabilities are
differences of logits, never logarithms of probabilities, which may be 0. A token of probability
0 in both models contributes 0. ``jax.checkpoint`` recomputes the terms for the
derivative, so that no array of the logits' size is stored for it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_t5x.types import Array, Float32

Divergence = Callable[
    [Float32[Array, "batch length vocab"], Float32[Array, "batch length vocab"]],
    Float32[Array, "batch length"],
]


# A function of p, q and log p - log q, all ``[batch, length, vocab]``.
_Terms = Callable[[Array, Array, Array], Array]


def _pair(target_logits: Array, draft_logits: Array) -> tuple[Array, Array, Array]:
    """Returns p, q and log p - log q, which is 0 where both logits are minus infinity."""
    target_z = jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
    draft_z = jax.nn.logsumexp(draft_logits, axis=-1, keepdims=True)
    is_masked = jnp.isneginf(target_logits) & jnp.isneginf(draft_logits)
    apart = jnp.where(is_masked, 0.0, target_logits - draft_logits)
    log_ratio = jnp.where(is_masked, 0.0, apart - target_z + draft_z)
    return jnp.exp(target_logits - target_z), jnp.exp(draft_logits - draft_z), log_ratio


def _times(probs: Array, values: Array) -> Array:
    """Returns ``probs * values``, and 0 where a probability is 0: the limit of x log x."""
    return probs * jnp.where(probs > 0, values, 0.0)


def _divergence(terms: _Terms) -> Divergence:
    """Returns the divergence that sums ``terms`` over the vocabulary, given both models' logits.

    The divergence has no gradient with respect to the target's logits.
    """

    @jax.checkpoint
    def divergence(target_logits, draft_logits):
        pair = _pair(jax.lax.stop_gradient(target_logits), draft_logits)
        return jnp.sum(terms(*pair), axis=-1)

    return divergence


# Divergences by their names in gin files.
DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": _divergence(lambda p, q, ratio: _times(p, ratio)),
    "reverse_kl": _divergence(lambda p, q, ratio: -_times(q, ratio)),
    "jeffreys": _divergence(lambda p, q, ratio: _times(p, ratio) - _times(q, ratio)),
    # Half the L1 distance, because 1 - sum min(p, q) loses all digits near 0.
    "total_variation": _divergence(lambda p, q, ratio: 0.5 * jnp.abs(p - q)),
}

# The objective without a divergence: the cross-entropy of the text's tokens.
CROSS_ENTROPY = "cross_entropy"
OBJECTIVES = (CROSS_ENTROPY, *DIVERGENCES)
