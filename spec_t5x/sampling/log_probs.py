"""Log-probabilities of emitted tokens, by T5X's option ``rescale_log_probs``."""

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
    has 0, otherwise under the softmax of the logits. If the largest logit of a position is not
    finite, its token means nothing, and the log-probability is not finite either.
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
