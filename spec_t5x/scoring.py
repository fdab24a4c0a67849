"""Log-probabilities of emitted tokens, with T5X's ``rescale_log_probs`` meaning."""

import jax.numpy as jnp

from spec_t5x.distributions import MIN_TEMPERATURE, Sampling, log_sum_exp
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
    """

    def of_tokens(values):
        return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]

    if not rescale_log_probs:
        return of_tokens(logits) - log_sum_exp(logits)
    if settings.greedy:
        return jnp.zeros(tokens.shape, jnp.float32)
    log_probs = jnp.log(of_tokens(probs))
    if settings.temperature.ndim == 0:
        return log_probs
    # As where all rows are at temperature 0: also for a token that lenience let pass.
    at_argmax = settings.temperature <= MIN_TEMPERATURE
    return jnp.where(at_argmax[:, None], 0.0, log_probs)
