"""The checkpoints of a run, each written atomically: it is complete, or it does not exist.

A step's directory holds the training state, the *window* (the loss sums since the last log line)
and the *position* in the data: a stream's state, or a hash of the pairs, of which the step is the
position. Orbax writes the directory under a temporary name and renames it at the end. The newest
checkpoints are kept, and the one with the highest score.
"""

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from spec_t5x.errors import InputError
from spec_t5x.types import PyTree

# Names of a checkpoint's items.
STATE, WINDOW, POSITION = "state", "window", "position"
# Their folder in a run's directory.
FOLDER = "checkpoints"


def has_checkpoints(directory: Path) -> bool:
    """Returns True if the run in ``directory`` has a complete checkpoint."""
    return bool(_steps(directory / FOLDER))


def _steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints; names of unfinished ones are no numbers."""
    return [int(path.name) for path in directory.glob("*") if path.name.isdigit()]


class RunCheckpoints:
    """The checkpoints in a run's directory, to save and restore; a context manager."""

    def __init__(self, directory: str | Path, keep: int):
        """Opens or creates ``directory``; keeps the ``keep`` newest checkpoints and the best."""

        def score(metrics):
            return metrics["score"]

        self._directory = Path(directory).absolute()
        best = BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                best_fn=score,
                preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
                create=True,
                # Deletes unfinished checkpoints of a killed run, which only take space.
                cleanup_tmp_directories=True,
                # ``_PositionHandler`` writes before ``save`` returns, and needs the directory.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )
        # Step and score of the best checkpoint; None before the first score.
        self.best_step: int | None = self._manager.best_step()
        self.best_score: float | None = None
        if self.best_step is not None:
            self.best_score = score(self._manager.metrics(self.best_step))

    def __enter__(self) -> "RunCheckpoints":
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_quiet_orbax())
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._quiet:
            try:
                self.finish()
            except InputError:
                # If the run failed, its own error is the one to report.
                if kind is None:
                    raise
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None before the first."""
        return self._manager.latest_step()

    def describe_latest(self) -> str:
        """Returns a clause, for messages, on the checkpoint that a run would resume from."""
        with contextlib.suppress(InputError):
            # The newest checkpoint may not be complete yet.
            self.finish()
        return self._newest_there()

    def _newest_there(self) -> str:
        steps = _steps(self._directory)
        if not steps:
            return "there is no checkpoint"
        return f"the latest checkpoint is of step {max(steps)}"

    def save(
        self,
        step: int,
        state: PyTree,
        window: Mapping[str, float],
        save_position: Callable[[Path], None],
        score: float | None = None,
    ) -> None:
        """Starts to write a checkpoint in the background, after the previous one is complete.

        At return the position is written and the state copied, so that its buffers may be donated.
        A checkpoint with a ``score`` is kept until one with a larger score is saved.

        Raises:
            InputError: this checkpoint or the previous one cannot be written.
        """
        items = {
            STATE: ocp.args.StandardSave(state),
            WINDOW: ocp.args.JsonSave(dict(window)),
            POSITION: _SavePosition(save_position),
        }
        metrics = None if score is None else {"score": score}
        # A checkpoint that is not complete yet cannot be deleted.
        self.finish()
        with self._writing():
            if step == self.latest_step:
                # Orbax does not overwrite the step's checkpoint, which has no score.
                self._manager.delete(step)
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        if score is not None:
            self.best_step, self.best_score = step, score

    def finish(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            InputError: the checkpoint cannot be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def restore(
        self, like: PyTree, step: int | None = None
    ) -> tuple[PyTree, dict[str, float], Path]:
        """Returns the state, window and position's directory of ``step``, by default the newest.

        ``like`` is a state with the shapes, dtypes and shardings to restore.

        Raises:
            InputError: the checkpoint is of another model or optimizer.
        """
        step = self.latest_step if step is None else step
        items = {STATE: ocp.args.StandardRestore(like), WINDOW: ocp.args.JsonRestore()}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except ValueError as error:
            raise InputError(
                f"the checkpoint of step {step} in {self._directory} is of another "
                "model or optimizer: give another output directory"
            ) from error
        return found[STATE], found[WINDOW], self._directory / str(step) / POSITION

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Converts errors of the operating system, for example a full disk, to ``InputError``."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
            elif code := re.search(r"(?:os_error_code='|OS error )(\d+)", str(error)):
                # TensorStore's error, whose code is in the message only, in words of its version.
                reason = os.strerror(int(code[1]))
            else:
                raise
            raise InputError(
                f"cannot write a checkpoint to {self._directory}: {reason}; "
                f"{self._newest_there()}: free some space and run the same command "
                "again to resume"
            ) from error


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Silences messages of Orbax's threads about failed writes, which ``finish`` raises anyway.

    Orbax logs each error several times, and Python reports the writes that end after a failure.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook

    def is_not_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    def report_others(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    logger.addFilter(is_not_orbax)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logger.removeFilter(is_not_orbax)


class _PositionHandler(ocp.CheckpointHandler):
    """The Orbax handler of the position, which it writes before ``save`` returns.

    Batches drawn while the state is written in the background thus leave the position as it was.
    """

    def save(self, directory, args: "_SavePosition"):
        args.save_position(Path(directory))

    def restore(self, directory, args):
        raise NotImplementedError


@ocp.args.register_with_handler(_PositionHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SavePosition(ocp.args.CheckpointArgs):
    save_position: Callable[[Path], None]
