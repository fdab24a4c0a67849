"""States of a checkpoint from which a training starts."""

import pytest

pytest.importorskip("t5x.state_utils", reason="needs T5X")

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.initial_weights import weights_alone

ARRAY = {"driver": "zarr", "kvstore": {}, "metadata": {"shape": [2, 3]}}
CHECKPOINT = {"target": {"a": {"kernel": ARRAY}, "b": np.ones(4)}, "state": {"step": 7}}
TRAINING = {
    "target": {"a": {"kernel": np.ones((2, 3))}, "b": np.ones(4)},
    "state": {"step": 0, "param_states": {}},
}


def test_the_optimizer_is_left_out():
    assert weights_alone(CHECKPOINT, TRAINING) == {"target": CHECKPOINT["target"]}


def test_a_run_that_was_begun_resumes():
    assert weights_alone(CHECKPOINT, TRAINING, is_resuming=True) is CHECKPOINT


@pytest.mark.parametrize(
    "weights",
    [
        {"a": {"kernel": np.ones((2, 3))}},
        {**TRAINING["target"], "c": np.ones(1)},
        {"a": {"kernel": np.ones((3, 2))}, "b": np.ones(4)},
    ],
    ids=["more", "fewer", "other shape"],
)
def test_weights_of_another_network_are_refused(weights):
    with pytest.raises(InputError, match="1 of . weights of the initial checkpoint are not"):
        weights_alone(CHECKPOINT, {**TRAINING, "target": weights})
