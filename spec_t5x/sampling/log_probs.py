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

    ``logits`` are the target's, and ``probs`` the same after ``standardize``. With
    ``rescale_log_probs`` tokens are scored under the sampled distribution, in which an argmax token
    has 0, otherwise under the model's own softmax. If logits are not finite, no token follows the
    model's distribution, and neither is the log-probability.
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
