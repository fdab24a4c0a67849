"""Curves for TensorBoard, read back with its own reader."""

import json

import optax
import pytest

from spec_t5x.theory.estimates import Estimate
from spec_t5x.training.held_out_alpha import HeldOutAlpha
from spec_t5x.training.learners import Network
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.training.trainer import TrainOptions, fit
from tests.training.toys import copy_batches, toy_config

pytestmark = pytest.mark.usefixtures("quick_compilation")


def curves(directory):
    """By name: the steps and the values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # All of them: its sample leaves some out.
    found = EventAccumulator(str(directory / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    from tensorboard.util.tensor_util import make_ndarray

    return {
        name: {each.step: float(make_ndarray(each.tensor_proto)) for each in found.Tensors(name)}
        for name in found.Tags()["tensors"]
    }


def test_the_curves_are_those_of_the_log(tmp_path):
    rate = 1e-2
    options = TrainOptions(
        steps=4, log_period=2, eval_period=4, checkpoint_period=0, tensorboard=True
    )
    batches = copy_batches()
    learner = Network(toy_config(), options)
    fit(learner, optax.adam(rate), lambda step: rate, batches, batches, tmp_path)
    expected = {}
    for line in map(json.loads, (tmp_path / "metrics.jsonl").open()):
        step = line.pop("step")
        for name, value in line.items():
            expected.setdefault(name, {})[step] = pytest.approx(value, rel=1e-6)
    assert sorted(expected["loss"]) == [2, 4] and sorted(expected["dev_loss"]) == [4]
    assert {"accuracy", "learning_rate", "tokens_per_s", "dev_accuracy"} < set(expected)
    assert curves(tmp_path) == expected


def test_alpha_by_temperature(tmp_path):
    def measured(temperature, value):
        alpha = Estimate(value=value, count=10, num_texts=2, low=None, high=None)
        return HeldOutAlpha(temperature=temperature, loss=1.5, alpha=alpha, gamma=2)

    with ProgressReporter(tmp_path, start_step=0, steps=9, tensorboard=True) as reporter:
        for each in (measured(0.0, 0.5), measured(1.0, 0.25)):
            reporter.note(3, str(each), each.curves(), held_out=each.to_dict())
    assert curves(tmp_path) == {
        "held_out/alpha_T0": {3: 0.5},
        "held_out/alpha_T1": {3: 0.25},
        "held_out/expected_tokens_T0": {3: 1.75},
        "held_out/expected_tokens_T1": {3: 1.3125},
        "held_out/loss_T0": {3: 1.5},
        "held_out/loss_T1": {3: 1.5},
    }
