"""The best parameters of a run: kept, found again, and the end by patience."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.training.best_checkpoint import BestCheckpoint


def params(value):
    return {"layer": {"kernel": jnp.full((2, 3), value, jnp.float32)}}


def kept(best):
    return float(best.restore(params(0.0))["layer"]["kernel"][0, 0])


def test_the_best_is_kept_and_found_again(tmp_path):
    with BestCheckpoint(tmp_path / "best") as best:
        assert best.step is None and not best.is_over(1000)
        assert best.offer(0, 0.25, params(0.0))
        assert best.offer(10, 1 / 3, params(1.0))
        assert not best.offer(20, 1 / 3, params(2.0))
        assert not best.offer(30, 0.1, params(3.0))
        assert (best.step, best.value, kept(best)) == (10, 1 / 3, 1.0)
    with BestCheckpoint(tmp_path / "best") as best:
        assert (best.step, best.value, kept(best)) == (10, 1 / 3, 1.0)
        # As after a kill: the steps before the best, and the best, once more.
        assert not best.offer(5, 0.3, params(4.0))
        assert not best.offer(10, 1 / 3, params(1.0))
        assert best.offer(40, 0.5, params(5.0))
        assert (best.step, kept(best)) == (40, 5.0)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["40"]


def test_a_run_that_begins_anew_keeps_nothing_of_one_before(tmp_path):
    with BestCheckpoint(tmp_path) as best:
        best.offer(0, 0.1, params(0.0))
        best.offer(30, 0.9, params(1.0))
    with BestCheckpoint(tmp_path, patience=20) as best:
        assert best.offer(0, 0.2, params(2.0)) and not best.is_over(10)
        assert best.offer(10, 0.3, params(3.0))
        assert (best.step, kept(best)) == (10, 3.0)


def test_patience(tmp_path):
    with BestCheckpoint(tmp_path, patience=20) as best:
        assert not best.is_over(100)
        best.offer(10, 0.5, params(0.0))
        assert [best.is_over(step) for step in (10, 29, 30, 31)] == [False, False, True, True]


def test_nothing_to_restore(tmp_path):
    with BestCheckpoint(tmp_path) as best, pytest.raises(InputError, match="nothing is kept"):
        best.restore(params(0.0))


def test_parameters_of_another_model(tmp_path):
    with BestCheckpoint(tmp_path) as best:
        best.offer(1, 0.5, params(1.0))
        with pytest.raises(InputError, match="step 1 in .* is of another model: give another"):
            best.restore({"layer": {"kernel": np.zeros((3, 3), np.float32)}})
