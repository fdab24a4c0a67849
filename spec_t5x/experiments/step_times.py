"""How long one call of a model takes: the measured c and verification cost."""

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Target
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds per call, medians over repetitions."""

    # The target over one new token for each row.
    target: float
    # The draft over one new token.
    draft: float
    # The target over gamma + 1 new tokens.
    verification: float

    @property
    def c(self) -> float:
        """The paper's cost coefficient (Definition 3.7)."""
        return self.draft / self.target

    @property
    def verification_cost(self) -> float:
        """Time of a verification in target steps; the paper assumes 1."""
        return self.verification / self.target


def measure_step_times(
    target: Target,
    draft: Target,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    repeats: int = 9,
    calls: int = 40,
) -> StepTimes:
    """Measures on this device, with caches of the size that decoding uses.

    The three calls are timed in turn, ``repeats`` times over, so that a change of
    the machine's mood falls on all of them.

    Args:
      target, draft: models with the same inputs.
      inputs: what both ``prefill`` take.
      gamma: drafts per iteration.
      max_decode_len: room for tokens, as in decoding.
      repeats: timings of each call, of which the median is taken.
      calls: calls in one timing.
    """
    max_length = max_decode_len + gamma + 1
    programs = []
    for model, new in ((target, 1), (draft, 1), (target, gamma + 1)):
        cache = jax.jit(type(model).prefill, static_argnums=2)(model, inputs, max_length)
        program = functools.partial(_run, model, cache, new=new, calls=calls)
        jax.block_until_ready(program())
        programs.append(program)
    times = [[_milliseconds(program) / calls for program in programs] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return StepTimes(target=medians[0], draft=medians[1], verification=medians[2])


@functools.partial(jax.jit, static_argnames=("new", "calls"))
def _run(model, cache, new: int, calls: int):
    """``calls`` calls in a row, each fed with what the one before it predicted."""

    def call(_, carry):
        cache, tokens = carry
        logits, longer = model.score(cache, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return model.rollback(longer, cache.lengths), tokens

    tokens = jnp.zeros((cache.lengths.shape[0], new), jnp.int32)
    return jax.lax.fori_loop(0, calls, call, (cache, tokens))[1]


def _milliseconds(program) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return 1e3 * (time.perf_counter() - start)
