"""Speculative execution of two functions: the law of the outcome, and who runs when."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import speculative_execution
from scipy import stats
from speculative_execution import execute_speculatively

from spec_t5x.errors import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROBS = jnp.array([0.1, 0.6, 0.3, 0.0])
GUESSED = jnp.array([0.5, 0.3, 0.0, 0.2])
DRAWS = 1500


class Inline(concurrent.futures.Executor):
    """Runs what is submitted at once, on the caller's thread."""

    def submit(self, function, /, *args):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def true_probs(x):
    return PROBS


def guessed_probs(x):
    return GUESSED


def squared(x, y):
    return x, y * y


def execute(key, f=true_probs, g=squared, approximate_f=guessed_probs, executor=None):
    return execute_speculatively(key, "x", f, g, approximate_f, executor or Inline())


@pytest.mark.parametrize("which", ["f", "approximate_f"])
def test_fewer_bits_than_float32_are_refused(which, unchecked):
    with pytest.raises(InputError, match="gives? are bfloat16: work them out in float32"):
        execute(jax.random.key(0), **{which: lambda x: PROBS.astype(jnp.bfloat16)})


def executions(approximate_f=guessed_probs, draws=DRAWS):
    return [
        execute(key, approximate_f=approximate_f)
        for key in jax.random.split(jax.random.key(0), draws)
    ]


def chi_square(counts, probs):
    """The statistic, and the threshold that is passed by chance once in a million times."""
    counts, probs = np.asarray(counts), np.asarray(probs, np.float64)
    if counts[probs == 0].any():
        return np.inf, 0.0
    counts, expected = counts[probs > 0], counts.sum() * probs[probs > 0]
    threshold = stats.chi2.ppf(1 - 1e-6, len(expected) - 1)
    return np.sum((counts - expected) ** 2 / expected), threshold


def count(draws):
    return np.bincount(draws, minlength=4)


def test_the_draw_follows_fs_distribution_and_g_is_of_the_draw():
    found = executions()
    statistic, threshold = chi_square(count([one.draw for one in found]), PROBS)
    assert statistic < threshold
    assert all(one.result == ("x", one.draw**2) for one in found)
    # alpha = sum min(p, q) = 0.1 + 0.3.
    accepted = sum(one.accepted for one in found)
    assert stats.binomtest(accepted, DRAWS, 0.4).pvalue > 1e-6
    # What was accepted was proposed, and the rest is where f has more than its guess.
    assert {one.draw for one in found if one.accepted} == {0, 1}
    assert {one.draw for one in found if not one.accepted} == {1, 2}


def test_a_correction_from_f_itself_fails_the_check(monkeypatch):
    """Drawing from p in place of norm(max(0, p - q)) after a refusal is wrong."""

    def emit_from_the_target(accept_key, emit_key, guess, guessed, probs):
        verdict = verify_one(accept_key, emit_key, guess, guessed, probs)
        return verdict.replace(next_token=speculative_execution._sample(emit_key, probs))

    verify_one = speculative_execution._verify_one
    monkeypatch.setattr(speculative_execution, "_verify_one", emit_from_the_target)
    statistic, threshold = chi_square(count([one.draw for one in executions()]), PROBS)
    assert statistic > threshold


def test_a_right_guess_is_always_accepted():
    assert all(one.accepted for one in executions(true_probs, draws=100))


@pytest.fixture
def calls():
    """A g that notes what it is called with."""

    def g(x, y):
        g.seen.append((threading.current_thread(), y))
        return y

    g.seen = []
    return g


def keys_of_both_kinds():
    """A key under which the guess is accepted, and one under which it is not."""
    by_kind = {}
    for key in jax.random.split(jax.random.key(1), 100):
        by_kind.setdefault(execute(key).accepted, key)
    return by_kind[True], by_kind[False]


def test_g_runs_once_for_an_accepted_guess_and_twice_for_a_refused_one(calls):
    accepted, refused = keys_of_both_kinds()
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        execution = execute(accepted, g=calls, executor=executor)
        assert execution.accepted
        assert [y for _, y in calls.seen] == [execution.draw] == [execution.result]

        calls.seen.clear()
        execution = execute(refused, g=calls, executor=executor)
    assert not execution.accepted
    (_, guess), (thread, draw) = calls.seen
    assert draw == execution.draw == execution.result
    assert guess != draw
    assert thread is threading.current_thread()


def test_f_and_g_run_at_the_same_time():
    """Each waits for the other to have begun: one after the other, they would not end."""
    both = threading.Barrier(2, timeout=30)

    def f(x):
        both.wait()
        return GUESSED

    def g(x, y):
        both.wait()
        return y

    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        execution = execute(jax.random.key(0), f, g, executor=executor)
    assert execution.accepted and execution.result == execution.draw


def test_what_f_raises_is_raised():
    def f(x):
        raise ArithmeticError("f of x")

    with pytest.raises(ArithmeticError, match="f of x"):
        execute(jax.random.key(0), f=f)


def test_what_g_raises_for_the_draw_that_stands_is_raised():
    def g(x, y):
        raise ArithmeticError(f"g of {y}")

    for key in keys_of_both_kinds():
        draw = execute(key).draw
        with pytest.raises(ArithmeticError, match=f"g of {draw}"):
            execute(key, g=g)


def test_what_g_raises_for_a_refused_guess_is_nobodys_concern():
    _, refused = keys_of_both_kinds()
    draw, called = execute(refused).draw, []

    def g(x, y):
        called.append(y)
        if len(called) == 1:
            raise ArithmeticError("of a draw that was not wanted")
        return y

    assert execute(refused, g=g).result == draw
    assert len(called) == 2


def test_distributions_over_different_outcomes_are_refused():
    with pytest.raises(InputError, match=r"f gives \(4,\).*\(2,\).*same outcomes"):
        execute(jax.random.key(0), approximate_f=lambda x: jnp.array([0.5, 0.5]))
