"""A run that diverges stops at once, and says where; what it wrote can be gone on from."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.training.learners import Network
from spec_t5x.training.trainer import TrainOptions, fit
from tests.training.toys import copy_batches, toy_config

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def diverge(directory, at, rate=1e30, **options):
    """Learns well for ``at`` steps, and then by a rate that is a slip of the pen."""

    def schedule(step):
        return jnp.where(jnp.asarray(step) < at, 1e-2, rate)

    defaults = {"log_period": 0, "eval_period": 0, "checkpoint_period": 4}
    learner = Network(toy_config(), TrainOptions(**{"steps": 40} | defaults | options))
    return fit(learner, optax.adam(schedule), schedule, copy_batches(), None, directory)


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
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    # The rate put right, it ends as if nothing had happened.
    resumed = diverge(tmp_path, at=100, steps=8).state
    undisturbed = diverge(tmp_path / "undisturbed", at=100, steps=8).state
    jax.tree.map(np.testing.assert_array_equal, resumed, undisturbed)


@pytest.mark.parametrize("period", ["log_period", "checkpoint_period", "eval_period"])
def test_the_step_is_the_same_whenever_it_is_looked_at(tmp_path, period):
    with pytest.raises(InputError, match="step 4 has a loss of nan and a gradient of norm nan"):
        diverge(tmp_path, at=2, rate=jnp.inf, **{"checkpoint_period": 0, period: 4})
    assert not list((tmp_path / "checkpoints").iterdir())


def test_parameters_that_are_not_finite_are_never_written(tmp_path):
    """The last step's loss is finite still: its update alone is not."""

    def schedule(step):
        return jnp.where(jnp.asarray(step) < 3, 1e-2, jnp.inf)

    options = TrainOptions(steps=4, log_period=0, eval_period=0, checkpoint_period=2)
    learner = Network(toy_config(), options)
    with pytest.raises(InputError, match=r"parameters not finite: .* after step 4; the latest"):
        fit(learner, optax.sgd(schedule), schedule, copy_batches(), None, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_what_cannot_be_measured_is_not_kept(tmp_path):
    """Parameters that are numbers, and a held-out loss that is none."""

    class Diverging(Network):
        def loss(self, params, inputs, key, target_params=None):
            sums = super().loss(params, inputs, key, target_params)
            return sums if key is not None else sums.replace(cross_entropy=jnp.nan)

    learner = Diverging(toy_config(), TrainOptions(steps=4, checkpoint_period=2, eval_period=4))
    batches, rate = copy_batches(), 1e-2
    with pytest.raises(InputError, match="the dev loss after step 4 is nan; the latest checkpoint"):
        fit(learner, optax.sgd(rate), lambda step: rate, batches, batches, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
