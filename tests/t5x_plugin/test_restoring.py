"""The paths that T5X's checkpoint manager reads target and draft from, without checkpoints."""

import pytest

pytest.importorskip("t5x.checkpoints", reason="needs T5X")

import flax.core
import jax
import jax.numpy as jnp
from t5x import checkpoints, train_state

from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.restoring import SpeculativeCheckpointManager, checked_path

pytestmark = pytest.mark.usefixtures("unchecked")


class Reader:
    """Replaces T5X's manager: parameters are the number in the last part of the path."""

    def __init__(self, directory, train_state, partitioner):
        self.state = train_state

    def restore(self, path, fallback_state=None):
        held = fallback_state or {"target": self.state.params}
        assert jax.tree.structure(flax.core.freeze(held["target"])) == jax.tree.structure(
            self.state.params
        )
        number = jnp.array(float(path.rpartition("_")[2]))
        return self.state.replace(params=jax.tree.map(lambda _: number, self.state.params))

    restore_from_tf_checkpoint = restore


def test_the_draft_is_that_of_its_own_folders_latest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "OrbaxCheckpointManagerInterface", Reader)
    for step in (9, 12):
        (tmp_path / "draft" / f"checkpoint_{step}").mkdir(parents=True)
        (tmp_path / "draft" / f"checkpoint_{step}" / "checkpoint").touch()
    leaf = jnp.zeros(())
    params = flax.core.freeze({"decoder": leaf, "draft": {"encoder": leaf}})
    state = train_state.InferenceState(step=leaf, params=params)
    for path, expected in (("draft", 12.0), ("draft/checkpoint_9", 9.0)):
        manager = SpeculativeCheckpointManager("", state, None, str(tmp_path / path))
        fallback = {"target": dict(params)}
        for restored in (
            manager.restore("target_7", fallback_state=fallback),
            manager.restore_from_tf_checkpoint("target_7"),
        ):
            found = jax.tree.map(float, flax.core.unfreeze(restored.params))
            assert found == {"decoder": 7.0, "draft": {"encoder": expected}}


def test_a_path_is_needed_by_a_model_alone(tmp_path):
    path = str(tmp_path)
    assert checked_path(path, has_draft=True, by_name=False) == path
    for has_draft, by_name, why in (
        (True, True, "the draft comes by name"),
        (False, False, "the draft has no parameters"),
    ):
        assert checked_path(None, has_draft, by_name) is None
        with pytest.raises(InputError, match=f"{why}: leave it None"):
            checked_path(path, has_draft, by_name)
    (tmp_path / "model.ckpt-5.index").touch()
    with pytest.raises(InputError, match="ckpt-5 is Mesh TensorFlow's: convert it with T5X's"):
        checked_path(f"{path}/model.ckpt-5", has_draft=True, by_name=False)
