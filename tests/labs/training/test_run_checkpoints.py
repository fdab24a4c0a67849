"""Checkpoints of a run: what belongs to a step appears with it, and goes with it."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.batching import Batches
from spec_t5x.labs.training.run_checkpoints import RunCheckpoints
from tests.labs.training.toys import assert_identical, copy_batches, train_toy

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def train(directory, steps, batches=None, **options):
    return train_toy(directory, steps, batches=batches, checkpoint_period=3, **options)


class Stream:
    """Batches of a process that cannot be entered at a step: only its own state leads there."""

    def __init__(self, killed_at=None):
        self.killed_at, self.given = killed_at, []

    def save_position(self, directory):
        assert not list(directory.iterdir())
        (directory / "state").write_text(str(self._number))

    def batches(self, start_step=0, position=None):
        self._number = 0 if position is None else int((position / "state").read_text())
        self.resumed = start_step, position
        return self._stream(start_step)

    def _stream(self, step):
        every = list(itertools.islice(copy_batches().batches(), 9))
        while True:
            if step == self.killed_at:
                raise KeyboardInterrupt
            # The batches follow from the numbers of the process, not from the step.
            batch = every[self._number % 9]
            self._number = (self._number * 5 + 7) % 1001
            self.given.append(self._number)
            step += 1
            yield batch


def test_the_position_of_the_data_is_kept_with_each_step(tmp_path):
    undisturbed = Stream()
    expected = train(tmp_path / "undisturbed", 11, undisturbed)
    assert undisturbed.resumed == (0, None)

    killed = Stream(killed_at=8)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", 11, killed)
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (3, 6):
        position = (checkpoints / str(step) / "position" / "state").read_text()
        assert int(position) == undisturbed.given[step - 1]
    resumed = Stream()
    found = train(tmp_path / "run", 11, resumed)
    assert resumed.resumed == (6, checkpoints / "6" / "position")
    assert killed.given[:6] + resumed.given == undisturbed.given
    assert_identical(found.state, expected.state)
    # Only what is kept has one.
    assert sorted(path.parts[-2] for path in checkpoints.glob("*/position")) == ["11", "9"]


def test_a_position_before_the_first_batch(tmp_path):
    train(tmp_path, 2, Stream(), max_minutes=1e-9)
    stream = Stream()
    train(tmp_path, 2, stream)
    assert stream.resumed == (0, tmp_path / "checkpoints" / "0" / "position")


@pytest.mark.parametrize("steps", [12, 8], ids=["before the next", "before the end"])
def test_a_checkpoint_that_finds_no_room_ends_the_run(
    tmp_path, disk, monkeypatch, capfd, caplog, steps
):
    real, checkpoints = Batches._from, tmp_path / "run" / "checkpoints"

    def filled_at_five(self, start_step):
        for step, batch in enumerate(real(self, start_step), start=start_step):
            if step == 5:
                # The one before is on its way still, or there.
                while not (checkpoints / "3").is_dir():
                    time.sleep(0.01)
                disk.fill()
            yield batch

    monkeypatch.setattr(Batches, "_from", filled_at_five)
    with pytest.raises(InputError) as caught:
        train(tmp_path / "run", steps)
    disk.clear()
    monkeypatch.undo()
    message = (
        f"cannot write a checkpoint to {checkpoints}: File too large; the latest checkpoint is of "
        "step 3: free some space and run the same command again to resume"
    )
    assert str(caught.value) == message, str(caught.value)
    # Nothing else is printed.
    assert "rror" not in capfd.readouterr().err
    # The half of a checkpoint is none.
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names[0] == "3" and not any(name.isdigit() for name in names[1:])
    assert (checkpoints / names[-1] / "state.orbax-checkpoint-tmp").is_dir()

    # Elsewhere: threads of a process that would have ended may still write here.
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    caplog.set_level("INFO", logger="spec_t5x")
    resumed = train(moved, steps)
    assert "resumed at step 3" in caplog.text
    assert_identical(resumed.state, train(tmp_path / "undisturbed", steps).state)
    assert all(path.name.isdigit() for path in (moved / "checkpoints").iterdir())


@pytest.mark.parametrize("code", ["os_error_code='28'", "[OS error 28: ENOSPC No space left]"])
def test_a_full_disk_is_named_in_the_words_of_every_tensorstore(tmp_path, code):
    with (
        pytest.raises(InputError, match=f"{tmp_path}: No space left on device; there is no"),
        RunCheckpoints(tmp_path, keep=1)._writing(),
    ):
        raise ValueError(f"UNAVAILABLE: Error writing 'params': {code}")


def test_the_step_after_a_save_leaves_what_is_being_written_alone(tmp_path):
    """Its buffers are donated to a step at once, while the writer still reads."""
    state = {"array": jnp.arange(3_000_000, dtype=jnp.float32)}
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: -leaf, state), donate_argnums=0)
    with RunCheckpoints(tmp_path, 5) as checkpoints:
        for number in range(4):
            checkpoints.save(number, state, {}, lambda directory: None)
            for _ in range(3):
                state = step(state)
    like = jax.tree.map(jnp.zeros_like, state)
    sign = 1.0
    for number in range(4):
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(tmp_path / str(number) / "state", like)
        np.testing.assert_array_equal(found["array"], sign * np.arange(3_000_000))
        sign = -sign


def test_the_best_is_kept_beside_the_newest(tmp_path):
    def save(checkpoints, step, score=None):
        state = {"array": jnp.full(3, step, jnp.float32)}
        checkpoints.save(step, state, {}, lambda directory: None, score)

    like = {"array": jnp.zeros(3)}
    with RunCheckpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.best_step is checkpoints.best_score is None
        for step, score in ((0, 0.25), (1, None), (2, 1 / 3), (3, None), (4, None), (5, None)):
            save(checkpoints, step, score)
        assert (checkpoints.best_step, checkpoints.best_score) == (2, 1 / 3)
    with RunCheckpoints(tmp_path, 2) as checkpoints:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]
        assert (checkpoints.best_step, checkpoints.best_score) == (2, 1 / 3)
        best, newest = (checkpoints.restore(like, step)[0]["array"] for step in (2, None))
        assert (float(best[0]), float(newest[0])) == (2.0, 5.0)
        save(checkpoints, 6)
        # Evaluated later.
        save(checkpoints, 6, 0.5)
    with RunCheckpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.best_step == 6
        assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]
        with pytest.raises(InputError, match="step 6 in .* is of another model or optimizer: give"):
            checkpoints.restore({"array": jnp.zeros(4)})
