"""Log-probabilities of emitted tokens, with T5X's ``rescale_log_probs`` meaning."""

import jax.numpy as jnp

from spec_t5x.sampling.distributions import MIN_TEMPERATURE, Sampling, log_sum_exp, values_at
from spec_t5x.types import Array, Float32, Int


def token_log_probs(
    logits: Float32[Array, "batch new vocab"],
    probs: Float32[Array, "batch new vocab"],
    tokens: Int[Array, "batch new"],
    settings: Sampling,
    rescale_log_probs: bool,
) -> Float32[Array, "batch new"]:
    """Returns the natural log-probability of each token.

    A log-probability is not finite if its logits are not: no token follows the model's
    distribution then.

    Args:
      logits: the target's.
      probs: the same after ``standardize``.
      tokens: one for each position.
      settings: those of ``probs``.
      rescale_log_probs: scores tokens under the sampled distribution, in which an argmax token
        has 0; otherwise under the model's own softmax.
    """
    if not rescale_log_probs:
        return values_at(logits, tokens) - log_sum_exp(logits)
    is_sound = jnp.isfinite(jnp.max(logits, axis=-1))
    if settings.greedy:
        rescaled = jnp.float32(0.0)
    else:
        rescaled = jnp.log(values_at(probs, tokens))
        if settings.temperature.ndim:
            # A token that lenience accepted at temperature 0 has 0, as if all rows were greedy.
            at_argmax = settings.temperature <= MIN_TEMPERATURE
            rescaled = jnp.where(at_argmax[:, None], 0.0, rescaled)
    return jnp.where(is_sound, rescaled, jnp.nan)
