"""Speculative execution of two functions: the law of the outcome, and the order of the calls."""

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
from tests.child import HANGS

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


def squared(x, y):
    return x, y * y


def execute(key, f=lambda x: PROBS, g=squared, approximate_f=lambda x: GUESSED, executor=None):
    return execute_speculatively(key, "x", f, g, approximate_f, executor or Inline())


def executions(draws=DRAWS, **functions):
    return [execute(key, **functions) for key in jax.random.split(jax.random.key(0), draws)]


def chi_square(found):
    """Returns the statistic, and the threshold that chance passes once in a million times."""
    counts, probs = np.bincount([one.draw for one in found], minlength=4), np.asarray(PROBS)
    if counts[probs == 0].any():
        return np.inf, 0.0
    counts, expected = counts[probs > 0], counts.sum() * probs[probs > 0]
    threshold = stats.chi2.ppf(1 - 1e-6, len(expected) - 1)
    return np.sum((counts - expected) ** 2 / expected), threshold


def test_the_draw_follows_fs_distribution_and_g_is_of_the_draw():
    found = executions()
    statistic, threshold = chi_square(found)
    assert statistic < threshold
    assert all(one.result == ("x", one.draw**2) for one in found)
    # alpha = sum min(p, q) = 0.1 + 0.3.
    assert stats.binomtest(sum(one.accepted for one in found), DRAWS, 0.4).pvalue > 1e-6
    # An accepted draw was proposed, and the others are where f has more than its guess.
    assert {one.draw for one in found if one.accepted} == {0, 1}
    assert {one.draw for one in found if not one.accepted} == {1, 2}


def test_a_correction_from_f_itself_fails_the_check(monkeypatch):
    """Drawing from p in place of norm(max(0, p - q)) after a refusal is wrong."""

    def emit_from_the_target(accept_key, emit_key, guess, guessed, probs):
        verdict = verify_one(accept_key, emit_key, guess, guessed, probs)
        return verdict.replace(next_token=speculative_execution._sample(emit_key, probs))

    verify_one = speculative_execution._verify_one
    monkeypatch.setattr(speculative_execution, "_verify_one", emit_from_the_target)
    statistic, threshold = chi_square(executions())
    assert statistic > threshold


def test_a_right_guess_is_always_accepted():
    assert all(one.accepted for one in executions(100, approximate_f=lambda x: PROBS))


@pytest.fixture(scope="module")
def keys():
    """Provides a key under which the guess is accepted, and one under which it is not."""
    by_kind = {}
    for key in jax.random.split(jax.random.key(1), 100):
        by_kind.setdefault(execute(key).accepted, key)
    return by_kind[True], by_kind[False]


def test_g_runs_once_for_an_accepted_guess_and_twice_for_a_refused_one(keys):
    seen, begun = [], threading.Event()

    def f(x):
        # ``g`` has begun: a refused guess is cancelled if its call has not.
        assert begun.wait(HANGS)
        return PROBS

    def g(x, y):
        seen.append((threading.current_thread(), y))
        begun.set()
        return y

    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        accepted = execute(keys[0], f=f, g=g, executor=executor)
        assert [y for _, y in seen] == [accepted.draw] == [accepted.result]
        seen.clear()
        begun.clear()
        refused = execute(keys[1], f=f, g=g, executor=executor)
    assert (accepted.accepted, refused.accepted) == (True, False)
    (_, guess), (thread, draw) = seen
    assert guess != draw == refused.draw == refused.result
    assert thread is threading.current_thread()


def test_f_and_g_run_at_the_same_time():
    """Each waits for the other to have begun: one after the other, they would not end."""
    both = threading.Barrier(2, timeout=HANGS)

    def f(x):
        both.wait()
        return GUESSED

    def g(x, y):
        both.wait()
        return y

    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        execution = execute(jax.random.key(0), f, g, executor=executor)
    assert execution.accepted and execution.result == execution.draw


def test_errors_of_f_and_of_g_for_the_final_draw_are_raised(keys):
    def fails(x, y=None):
        raise ArithmeticError(f"of {y}")

    with pytest.raises(ArithmeticError, match="of None"):
        execute(keys[0], f=fails)
    for key in keys:
        with pytest.raises(ArithmeticError, match=f"of {execute(key).draw}"):
            execute(key, g=fails)


def test_an_error_of_g_for_a_refused_guess_is_dropped(keys):
    called = []

    def g(x, y):
        called.append(y)
        if len(called) == 1:
            raise ArithmeticError("of a draw that was not wanted")
        return y

    draw = execute(keys[1]).draw
    assert execute(keys[1], g=g).result == draw
    assert len(called) == 2


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"approximate_f": lambda x: jnp.full(2, 0.5)}, r"f gives \(4,\).*\(2,\).*same outcomes"),
        ({"f": lambda x: PROBS.astype(jnp.bfloat16)}, "are bfloat16: compute them in float32"),
        (
            {"approximate_f": lambda x: GUESSED.astype(jnp.bfloat16)},
            "are bfloat16: compute them in float32",
        ),
    ],
)
def test_distributions_that_cannot_be_used(functions, message, unchecked):
    with pytest.raises(InputError, match=message):
        execute(jax.random.key(0), **functions)
