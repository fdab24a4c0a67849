"""Times of decoding at a simulated acceptance rate, without text.

A draft with random weights (``random_models``) is never right. The number of accepted tokens is
therefore drawn at random: each token is accepted with probability alpha. Drafting, the target
call, verification, appending and rolling back are those of decoding. The times are those of a
trained pair of these sizes and this alpha, if acceptances are i.i.d. as in Theorem 3.8.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError, is_number
from spec_t5x.generation import Batch, GenerateOptions
from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark.comparison import Comparison, comparison_of, time_in_turn
from spec_t5x.labs.benchmark.random_models import random_sources
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import Decoded, row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.draws import purpose_keys
from spec_t5x.sampling.random_bits import uniform
from spec_t5x.sampling.verification import Verdict
from spec_t5x.tuning.timed_calls import NO_EOS
from spec_t5x.verifiers import TokenVerifier


@dataclasses.dataclass(frozen=True)
class SimulatedVerifier(TokenVerifier):
    """Verifier that accepts each drafted token with probability ``alpha``, up to a rejection.

    Algorithm 1 is computed, so that its time counts, and gives the next token; only the
    number of accepted drafts is drawn. The output has no meaning.
    """

    alpha: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not (is_number(self.alpha) and 0 <= self.alpha <= 1):
            raise InputError(f"alpha is {self.alpha!r}: give an acceptance rate from 0 to 1")

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """Returns ``TokenVerifier``'s verdict of the arguments, with a drawn ``num_accepted``."""
        real = super().__call__(stream, lengths, proposal, target_logits, target_probs, settings)
        _, keys, _ = purpose_keys(stream, lengths)
        gamma = proposal.tokens.shape[1]
        uniforms = jax.vmap(lambda key: uniform(key, gamma))(keys)
        proposed = jnp.arange(gamma)[None, :] < proposal.num_proposed[:, None]
        kept = jnp.cumprod((proposed & (uniforms < self.alpha)).astype(jnp.int32), axis=1)
        return real.replace(num_accepted=jnp.sum(kept, axis=1, dtype=jnp.int32))


def compare_simulated(
    target: Target,
    draft: Draft,
    options: GenerateOptions,
    *,
    alpha: float,
    source_len: int,
    repeats: int,
) -> Comparison:
    """Compares plain with speculative decoding of random sources at a simulated acceptance rate.

    Args:
      target, draft: any weights.
      options: gamma, temperature, batch size, and ``max_decode_len``, the tokens of each row.
      alpha: probability that a drafted token is accepted.
      source_len: tokens of each source, none of them padding.
      repeats: rounds of both ways in turn, each with other random keys.
    """
    length, rows = options.max_decode_len, options.batch_size
    sources = random_sources(target, rows, source_len, options.seed)
    batches = [
        Batch(
            texts=[""] * rows,
            tokens=sources,
            prompts=np.zeros((rows, 1), np.int32),
            keys=row_keys(jax.random.key(options.seed + repeat), rows),
            max_decode_steps=np.full(rows, length, np.int32),
        )
        for repeat in range(repeats)
    ]

    def decode(loop, models, batch: Batch, **how) -> Decoded:
        how |= {"max_decode_len": length, "max_decode_steps": batch.max_decode_steps}
        settings = options.sampling()
        return loop(
            *models, batch.tokens, batch.prompts, batch.keys, settings, eos_id=NO_EOS, **how
        )

    drafting = {"gamma": options.gamma, "verifier": SimulatedVerifier(alpha=alpha)}
    plain = functools.partial(decode, autoregressive_decode, (target,))
    drafted = functools.partial(decode, speculative_decode, (target, draft), **drafting)
    times, decoded = time_in_turn(lambda: plain, lambda: drafted, [[batch] for batch in batches])
    return comparison_of(
        times,
        decoded,
        target,
        draft,
        jnp.asarray(sources),
        options,
        gamma=options.gamma,
        num_inputs=rows,
        plain_tokens=rows * length,
        alpha=alpha,
        identical=None,
        divergences=[],
        outputs=[],
    )
