"""Plain and speculative decoding timed in turn, and the counts of a comparison."""

import itertools
import types

import jax
import numpy as np
import pytest

from spec_t5x.generation import Batch, GenerateOptions
from spec_t5x.labs.benchmark import comparison, simulated_acceptance
from spec_t5x.labs.benchmark.comparison import comparison_of, time_in_turn
from spec_t5x.labs.benchmark.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("unchecked_module")


def batch_of(length):
    """Returns a batch of one row, whose prompt has ``length`` tokens."""
    return Batch(
        texts=[""],
        tokens=np.zeros((1, 1), np.int32),
        prompts=np.zeros((1, length), np.int32),
        keys=jax.random.split(jax.random.key(0), 1),
        max_decode_steps=np.ones(1, np.int32),
    )


def test_each_shape_of_prompts_is_compiled_before_it_is_timed():
    """A language model's batches differ in their prompts alone."""
    batches, lengths = list(map(batch_of, (3, 5, 3))), []

    def decode(batch):
        lengths.append(batch.prompts.shape[1])
        return batch.prompts

    time_in_turn(lambda: decode, lambda: decode, [batches])
    # Each way decodes a batch of each shape twice, to compile, before the first round.
    assert lengths[:8] == [3, 5] * 4 and lengths[8:11] == [3, 5, 3]


def test_rounds_begin_with_either_way_and_prefills_are_timed_apart(monkeypatch):
    calls, seconds = [], iter([9.0, 4.0, 8.0, 2.0, *range(10, 18)])
    monkeypatch.setattr(comparison, "elapsed", lambda call: (next(seconds), call()))

    def way(name):
        def decode(batch):
            calls.append((name, int(batch.max_decode_steps[0])))
            return f"{name} {len(calls)}"

        return lambda: decode

    times, decoded = time_in_turn(way("plain"), way("speculative"), [[batch_of(1)]] * 2)
    compiling = [(name, 1) for name in ("plain", "plain", "speculative", "speculative")]
    first, second = ([(name, steps) for steps in (1, 0)] for name in ("plain", "speculative"))
    # No step to take is the prefill alone.
    assert calls == compiling + first + second + second + first
    assert times | {"beside": 0.0} == {
        "plain_compile_seconds": 5.0,
        "plain_seconds": [10, 16],
        "plain_setup_seconds": [11, 17],
        "speculative_compile_seconds": 6.0,
        "speculative_seconds": [12, 14],
        "speculative_setup_seconds": [13, 15],
        "beside": 0.0,
    }
    assert decoded == [
        {"plain": ["plain 5"], "speculative": ["speculative 7"]},
        {"plain": ["plain 11"], "speculative": ["speculative 9"]},
    ]


@pytest.mark.parametrize("gamma", [0, 3])
def test_counts_are_means_over_rounds_of_sums_over_batches(gamma, monkeypatch):
    steps = StepTimes(target=2.0, draft=0.2, verification=3.0)
    measured = []
    monkeypatch.setattr(
        comparison, "measure_step_times", lambda *_, **given: measured.append(given) or steps
    )
    names = ("appended", "target_calls", "plain_steps", "accepted", "verified")
    numbers = itertools.count(1)

    def decoded():
        stats = {name: np.array([next(numbers), 0]) for name in names}
        return types.SimpleNamespace(stats=types.SimpleNamespace(**stats))

    # Of the first round 1 + 6 appended, of the second 11 + 16.
    rounds = [{"speculative": [decoded(), decoded()]} for _ in range(2)]
    monkeypatch.setattr(jax, "device_get", lambda tree: tree)
    names = ("plain_seconds", "speculative_seconds", "plain_setup_seconds")
    names += ("speculative_setup_seconds",)
    times = {name: [1.0] for name in names}
    times |= {"plain_compile_seconds": 0.0, "speculative_compile_seconds": 0.0, "beside": 0.5}
    options = GenerateOptions(batch_size=4, verifier="token", lenience=0.5)
    rest = {"num_inputs": 2, "plain_tokens": 20, "alpha": 0.5, "identical": None}
    rest |= {"divergences": [], "outputs": []}
    found = comparison_of(times, rounds, None, None, None, options, gamma=gamma, **rest)
    # A verification has a draft at least.
    assert measured[0]["gamma"] == max(gamma, 1)
    assert (found.lossy, found.batch_size, found.beside) == (True, 4, 0.5)
    counts = (
        *(found.speculative_tokens, found.target_calls, found.plain_steps),
        *(found.accepted, found.verified),
    )
    if gamma:
        assert counts == (17, 19, 21, 23, 25) and found.step_times is steps
    else:
        # Both ways were plain: every token is a step, and a verification is one.
        assert counts == (20, 20, 20, 0, 0)
        assert found.step_times == StepTimes(target=2.0, draft=0.2, verification=2.0)


def test_simulated_rounds_differ_in_their_keys(monkeypatch):
    timed = []

    def time_rounds(plain, speculative, rounds):
        timed.extend(rounds)
        return {}, []

    monkeypatch.setattr(simulated_acceptance, "time_in_turn", time_rounds)
    monkeypatch.setattr(simulated_acceptance, "comparison_of", lambda *_, **values: values)
    target = types.SimpleNamespace(vocab_size=64)
    options = GenerateOptions(max_decode_len=7, batch_size=2, seed=5)
    given = {"alpha": 0.5, "source_len": 3, "repeats": 2}
    found = simulated_acceptance.compare_simulated(target, None, options, **given)
    assert (found["plain_tokens"], found["num_inputs"], found["alpha"]) == (14, 2, 0.5)
    ((first,), (second,)) = timed
    assert first.tokens is second.tokens and first.tokens.shape == (2, 3)
    assert first.max_decode_steps.tolist() == [7, 7]
    first, second = (np.asarray(jax.random.key_data(batch.keys)) for batch in (first, second))
    assert not np.any((first == second).all(axis=-1))
