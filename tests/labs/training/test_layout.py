"""Training on meshes of simulated devices: the same losses, and every sharded array in parts."""

import jax
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.layout import Layout
from tests.simulated_devices import printed_by


@pytest.fixture(scope="module")
def found():
    return printed_by("labs/training/parallel_program.py", devices=4)


@pytest.mark.parametrize("run", ["adamw", "distill"])
def test_the_losses_are_those_of_one_device(found, run):
    alone, mesh = found[run]
    assert len(alone) == len(mesh) == 4
    # The losses change, so that a wrong step would show in the next one.
    assert len({round(loss, 3) for loss in alone}) == 4
    np.testing.assert_allclose(mesh, alone, rtol=1e-5)


def test_evaluation_is_that_of_one_device(found):
    np.testing.assert_allclose(*found["dev"], rtol=1e-5)
    alone, mesh = found["texts"]
    assert mesh == alone
    # The parameters of a few steps write something, and not the same for every source.
    assert all(alone) and len({tuple(text) for text in alone}) > 1
    # A model that was trained on a mesh is read anywhere.
    assert found["exported"]


def test_parameters_and_averages_are_sharded_by_the_logical_axes(found):
    specs = found["adamw_specs"]
    kernel = "decoder/layers_0/mlp/wi/kernel"
    of_kernel = [axes for path, axes in specs.items() if path.endswith(kernel)]
    # The parameter, and AdamW's averages of the gradient and of its square.
    assert of_kernel == [[None, "model"]] * 3
    whole = {path for path, axes in specs.items() if "model" not in axes}
    assert all(path.endswith(("scale", "step", "count")) for path in whole), whole
    assert found["distill_specs"]["narrow_head/kernel"] == [None, "model"]
    assert found["distill_specs"]["decoder/layers_0/mlp/wo/kernel"] == ["model"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((None, 2), "model_parallel is 2 and does not divide the number of devices, 1: give"),
        ((2, 3), "data_parallel 2 times model_parallel 3 is 6 and the number of devices 1"),
    ],
)
def test_too_few_devices(sizes, message):
    with pytest.raises(InputError, match=message):
        Layout.create(*sizes, lambda mesh: None)


def test_devices_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(InputError, match="the devices are of 4 processes .* or by t5x.train"):
        Layout.create(None, 1)


def test_targets_and_checkpoints_are_loaded_in_shards(tiny_pair):
    found = printed_by("labs/training/spread_models_program.py", tiny_pair, devices=2)
    assert found.keys() == {"shared", "eagle", "checkpoint"}
    for recipe, (alone, mesh) in found.items():
        models = 1 + (recipe == "checkpoint")
        assert (alone["status"], mesh["status"]) == (0, 0)
        assert alone["loaded"] == [[1, []]] * models
        assert mesh["loaded"] == [[2, ["model", None]]] * models
        assert mesh["texts"] == alone["texts"] != []
        np.testing.assert_allclose(mesh["losses"], alone["losses"], rtol=1e-5)
