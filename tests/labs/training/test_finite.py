"""A run that diverges stops at once and says where; it can be resumed."""

import functools
import re

import jax.numpy as jnp
import optax
import pytest

from spec_t5x.errors import InputError
from tests.labs.training.toys import Copier, assert_identical, copy_batches, train_toy

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


@functools.cache
def learns_until(at, rate):
    def schedule(step):
        return jnp.where(jnp.asarray(step) < at, 1e-2, rate)

    return schedule


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
    undisturbed = diverge(tmp_path / "undisturbed", at=100, steps=8).state
    assert_identical(resumed, undisturbed)


@pytest.mark.parametrize("period", ["log_period", "eval_period"])
def test_the_step_is_the_same_whenever_it_is_looked_at(tmp_path, period):
    with pytest.raises(InputError, match="step 4 has a loss of nan and a gradient of norm nan"):
        diverge(tmp_path, at=2, rate=jnp.inf, **{"checkpoint_period": 0, period: 4})
    assert not checkpoints(tmp_path)


def test_parameters_that_are_not_finite_are_never_written(tmp_path):
    """The last step's loss is finite still: its update alone is not."""
    with pytest.raises(InputError, match=r"parameters not finite: .* after step 4; the latest"):
        diverge(tmp_path, 3, jnp.inf, steps=4, optimizer=optax.sgd, checkpoint_period=2)
    assert checkpoints(tmp_path) == ["2"]


def test_what_cannot_be_measured_is_not_kept(tmp_path):
    """Parameters that are numbers, and a held-out loss that is none."""

    class Diverging(Copier):
        def loss(self, params, inputs, key, target_params=None):
            sums = super().loss(params, inputs, key, target_params)
            return sums if key is not None else sums.replace(cross_entropy=jnp.nan)

    periods = {"checkpoint_period": 2, "eval_period": 4}
    with pytest.raises(InputError, match="the dev loss after step 4 is nan; the latest checkpoint"):
        train_toy(tmp_path, 4, learner=Diverging, dev=copy_batches(), **periods)
    assert checkpoints(tmp_path) == ["2"]
