"""The checkpoints of a run: each appears whole, with all that belongs to its step, or not.

A step's directory holds the state, the sums of the unfinished log line, and the position of the
data: a stream's state, or a hash of the pairs that the step counts through. Orbax writes it under
another name, which is no checkpoint, and renames it in the end. The newest checkpoints are kept,
and the one with the highest score.
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

# The items of a step.
STATE, WINDOW, POSITION = "state", "window", "position"


class RunCheckpoints:
    """The newest checkpoints of a run and its best, in a directory; a context manager."""

    def __init__(self, directory: str | Path, keep: int):
        """Opens ``directory``, which is made if absent; keeps the ``keep`` newest and the best."""

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
                # The half of a checkpoint that a killed run left takes room and is of no use.
                cleanup_tmp_directories=True,
                # A position is written at once, so that its directory must be there.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )
        # None before the first score.
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
                # A run that failed ends with its own error.
                if kind is None:
                    raise
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None before the first."""
        return self._manager.latest_step()

    def describe_latest(self) -> str:
        """Names the checkpoint that a run would resume from."""
        with contextlib.suppress(InputError):
            # One may be on its way.
            self.finish()
        return self._newest_there()

    def _newest_there(self) -> str:
        # Those that are being written have other names.
        steps = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
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
        """Begins to write a checkpoint, once the one before is written.

        The state has been copied when this returns: the next step may take over its buffers. A
        ``score`` keeps the checkpoint until one with a larger score is saved.

        Raises:
            InputError: this checkpoint or the one before cannot be written.
        """
        items = {
            STATE: ocp.args.StandardSave(state),
            WINDOW: ocp.args.JsonSave(dict(window)),
            POSITION: _SavePosition(save_position),
        }
        metrics = None if score is None else {"score": score}
        # A checkpoint that is still being written cannot be deleted.
        self.finish()
        with self._writing():
            if step == self.latest_step:
                # The checkpoint there has no score.
                self._manager.delete(step)
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        if score is not None:
            self.best_step, self.best_score = step, score

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            InputError: it cannot be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def restore(
        self, like: PyTree, step: int | None = None
    ) -> tuple[PyTree, dict[str, float], Path]:
        """Returns state, window and the position's directory of a step, None for the newest.

        ``like`` is a state of the same shapes and types.

        Raises:
            InputError: the checkpoint is of another model.
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
        """Converts errors of the operating system, such as a full disk, to ``InputError``."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
            elif code := re.search(r"os_error_code='(\d+)'", str(error)):
                # TensorStore's errors, of which Python has the text only.
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
    """Silences messages of Orbax's threads about errors that ``finish`` raises anyway.

    Each is logged several times; and Python reports writes that end after one that failed.
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
    """A handler that writes a position before ``save`` returns.

    Batches that are drawn while the rest is written do not move it.
    """

    def save(self, directory, args: "_SavePosition"):
        args.save_position(Path(directory))

    def restore(self, directory, args):
        raise NotImplementedError


@ocp.args.register_with_handler(_PositionHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SavePosition(ocp.args.CheckpointArgs):
    save_position: Callable[[Path], None]
