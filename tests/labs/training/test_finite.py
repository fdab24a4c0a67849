"""A run that diverges stops at once and says where; it can be resumed."""

import functools
import re

import jax.numpy as jnp
import optax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.finite import describe
from tests.labs.training.toys import Copier, assert_identical, copy_batches, train_toy

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


@functools.cache
def learns_until(at, rate):
    return lambda step: jnp.where(jnp.asarray(step) < at, 1e-2, rate)


def diverge(directory, at, rate=1e30, steps=40, **options):
    """Learns well for ``at`` steps, and then by a rate that is a slip of the pen."""
    options = {"checkpoint_period": 4, "schedule": learns_until(at, rate)} | options
    return train_toy(directory, steps, **options)


def checkpoints(directory):
    return [path.name for path in (directory / "checkpoints").iterdir()]


def test_the_message_says_where(tmp_path):
    with pytest.raises(InputError) as caught:
        diverge(tmp_path, at=5)
    message = str(caught.value)
    assert "\n" not in message
    # Steps 1 to 5 are good; the sixth throws the parameters away, the seventh shows it.
    assert re.match(
        r"step 7 has a loss of \S+ and a gradient of norm nan \(learning rate 1e\+30, batch 6 of 4 "
        r"rows of 8 source and 8 target tokens; \d+ of \d+ parameters not finite: decoder/\S+, "
        r"decoder/\S+, decoder/\S+, \.\.\.\); the latest checkpoint is of step 4: lower "
        r"OptimizerOptions.learning_rate",
        message,
    ), message
    assert checkpoints(tmp_path) == ["4"]
    # The rate put right, it ends as if nothing had happened.
    resumed = diverge(tmp_path, at=100, steps=8).state
    assert_identical(resumed, diverge(tmp_path / "undisturbed", at=100, steps=8).state)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("", "all parameters finite"),
        ("ca", "2 of 5 parameters not finite: a, c"),
        ("abc", "3 of 5 parameters not finite: a, b, c"),
        ("abcd", "4 of 5 parameters not finite: a, b, c, ..."),
    ],
)
def test_three_parameters_are_named_at_most(bad, text):
    params = {name: jnp.array([1.0, jnp.inf if name in bad else 0.0]) for name in "abcde"}
    assert describe(params) == text


class Unmeasured(Copier):
    """A network whose held-out loss is no number."""

    def loss(self, params, inputs, key, target_params=None):
        sums = super().loss(params, inputs, key, target_params)
        return sums if key is not None else sums.replace(cross_entropy=jnp.nan)


NAN_AT_4 = "step 4 has a loss of nan and a gradient of norm nan"


@pytest.mark.parametrize(
    ("at", "options", "message", "kept"),
    [
        # The step is the same whenever a result is due.
        (2, {"rate": jnp.inf, "checkpoint_period": 0, "log_period": 4}, NAN_AT_4, []),
        (2, {"rate": jnp.inf, "checkpoint_period": 0, "eval_period": 4}, NAN_AT_4, []),
        # The last step's loss is finite: its update alone is not.
        (
            3,
            {"rate": jnp.inf, "steps": 4, "optimizer": optax.sgd, "checkpoint_period": 2},
            r"parameters not finite: .* after step 4; the latest",
            ["2"],
        ),
        # Parameters that are numbers.
        (
            100,
            {"steps": 4, "learner": Unmeasured, "checkpoint_period": 2, "eval_period": 4},
            "the dev loss after step 4 is nan; the latest checkpoint",
            ["2"],
        ),
    ],
    ids=["log", "evaluation", "update", "held-out loss"],
)
def test_nothing_is_kept_that_is_not_finite(tmp_path, at, options, message, kept):
    dev = copy_batches() if "learner" in options else None
    with pytest.raises(InputError, match=message):
        diverge(tmp_path, at, dev=dev, **options)
    assert checkpoints(tmp_path) == kept
