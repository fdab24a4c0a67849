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
    """Natural log-probability of each token.

    Args:
      logits: the target's.
      probs: the same after ``standardize``.
      tokens: one for each position.
      settings: what ``probs`` were made with.
      rescale_log_probs: under the sampled distribution (where an argmax token
        scores 0) or, if false, under the model's own softmax.

    Returns:
      Not finite where the logits are not numbers or infinitely large: there no token follows
      the model's distribution.
    """
    if not rescale_log_probs:
        return values_at(logits, tokens) - log_sum_exp(logits)
    # Argmax finds a token among any numbers, and scores it 0.
    is_sound = jnp.isfinite(jnp.max(logits, axis=-1))
    if settings.greedy:
        rescaled = jnp.float32(0.0)
    else:
        rescaled = jnp.log(values_at(probs, tokens))
        if settings.temperature.ndim:
            # As where all rows are at temperature 0: also for a token that lenience let pass.
            at_argmax = settings.temperature <= MIN_TEMPERATURE
            rescaled = jnp.where(at_argmax[:, None], 0.0, rescaled)
    return jnp.where(is_sound, rescaled, jnp.nan)
