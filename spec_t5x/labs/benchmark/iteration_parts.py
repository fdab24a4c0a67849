"""The parts of an iteration: its drafts, its verification, and the overhead beyond them.

Theorem 3.8 takes an iteration to last gamma draft steps and one target call. On top come
standardizing logits, verifying, appending, statistics and rolling back. A draft step includes
its sampling, as in c; verification is the target call over gamma + 1 tokens, logits included.

All parts are timed as loops on the device over the same state, in turn. The overhead is an
iteration less a loop of both networks in alternation: where their weights exceed the
processor's cache, each evicts the other's, and both are faster alone than in decoding.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops import autoregressive, speculative
from spec_t5x.loops.autoregressive import AutoregressiveState
from spec_t5x.loops.decode_state import Loop
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning.interleaving import interleaved
from spec_t5x.tuning.step_times import draft_calls, state_half_way, target_calls, with_last
from spec_t5x.types import Array, Int, PyTree
from spec_t5x.verifiers import Verifier

# No token ends a row: all iterations are alike.
_NO_EOS = -1


def measure_parts(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    settings: Sampling,
    *,
    gamma: int,
    max_decode_len: int,
    verifier: Verifier,
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds of each part in every round, half way through the output.

    ``iteration``; ``networks``, gamma draft steps and a verification; ``proposal`` and
    ``verification``, either alone; of plain decoding ``plain_step`` and its ``target_call``.

    Raises:
      InputError: a verifier of trees.
    """
    state = state_half_way(
        target, draft, inputs, gamma=gamma, max_decode_len=max_decode_len, verifier=verifier
    )
    plain = AutoregressiveState(
        outputs=state.outputs, cache=state.target_cache, stream=state.stream
    )
    options = {"gamma": gamma, "verifier": verifier}
    loop = Loop(max_decode_len=max_decode_len, eos_id=_NO_EOS, **options)
    programs = {
        "iteration": lambda calls: _iterate(target, draft, state, settings, calls, loop),
        "networks": draft_calls(draft, state, settings, target=target, **options),
        "proposal": draft_calls(draft, state, settings, **options),
        "verification": target_calls(target, state.target_cache, new=gamma + 1),
        "plain_step": lambda calls: _step_plainly(target, plain, settings, calls),
        "target_call": target_calls(target, state.target_cache, new=1),
    }
    rounds = 1e3 * interleaved(list(programs.values()), repeats)
    return dict(zip(programs, rounds.T.tolist(), strict=True))


def overhead(parts: dict[str, list[float]]) -> dict[str, float | list[float]]:
    """What ``measure_parts`` says of the overhead, in milliseconds and as shares.

    ``overhead`` of an iteration; ``overhead_share`` of it, with the quartiles of the rounds'
    own shares; ``plain_share``, of a plain step what is not the target call.
    """
    iteration, networks = (np.array(parts[name]) for name in ("iteration", "networks"))
    median = {name: statistics.median(times) for name, times in parts.items()}
    beyond = median["iteration"] - median["networks"]
    quartiles = np.quantile((iteration - networks) / iteration, [0.25, 0.75])
    return {
        "overhead": beyond,
        "overhead_share": beyond / median["iteration"],
        "overhead_quartiles": quartiles.tolist(),
        "plain_overhead_share": 1 - median["target_call"] / median["plain_step"],
    }


@functools.partial(jax.jit, static_argnames="loop")
def _iterate(target, draft, state, settings, calls, loop: Loop):
    """Iterations in a row, each at the state's lengths."""
    lengths = state.outputs.lengths

    def call(_, state):
        state, _ = speculative.step(target, draft, state, settings, loop)
        outputs = _back_to(state.outputs, lengths)
        return state.replace(
            outputs=outputs, target_cache=target.rollback(state.target_cache, outputs.lengths)
        )

    # The whole state is carried: XLA would remove what is unused.
    return jax.lax.fori_loop(0, calls, call, state)


@jax.jit
def _step_plainly(target, state, settings, calls):
    """Steps of plain decoding in a row, each at the state's lengths."""
    lengths = state.outputs.lengths

    def call(_, state):
        state = autoregressive.step(target, state, settings, eos_id=_NO_EOS)
        outputs = _back_to(state.outputs, lengths)
        return state.replace(outputs=outputs, cache=target.rollback(state.cache, outputs.lengths))

    return jax.lax.fori_loop(0, calls, call, state)


def _back_to(outputs, lengths: Int[Array, "batch"]):
    """Rows of these lengths, whose last token is the first one that was appended."""
    tokens = outputs.sequences[jnp.arange(lengths.shape[0]), lengths + 1]
    outputs = outputs.replace(lengths=lengths, ended=jnp.zeros_like(outputs.ended))
    return with_last(outputs, tokens)
