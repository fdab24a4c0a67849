"""The checkpoints of a run: each appears whole, with all that belongs to its step, or not.

A step's directory holds the state, the sums of the log line that is being added up, and
the position of the data: where a stream stands, or which pairs the step counts through. Orbax
writes it under another name, which is no checkpoint, and renames it in the end.
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

from spec_t5x.errors import InputError
from spec_t5x.types import PyTree

# The items of a step.
STATE, WINDOW, POSITION = "state", "window", "position"
# As Orbax calls an only item, of runs that began before there were others.
ONLY = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    state: PyTree
    window: Mapping[str, float]  # empty between two log lines
    position: Path | None  # a directory; None of runs that began before it was kept


class RunCheckpoints:
    """The newest checkpoints of a run, in a directory; a context manager."""

    def __init__(self, directory: str | Path, keep: int):
        """Opens ``directory``, which is made if absent; ``keep`` checkpoints stay in it."""
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                # What a killed run left half written takes room and is of no use.
                cleanup_tmp_directories=True,
                # A position is written at once, so that its directory must be there.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def __enter__(self) -> "RunCheckpoints":
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_without_tales_of_threads())
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._quiet:
            if kind is None:
                self.finish()
            else:
                # What is already on its way may still arrive; the run ends by its own error.
                with contextlib.suppress(InputError):
                    self.finish()
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's; None before the first."""
        return self._manager.latest_step()

    def what_stays(self) -> str:
        """Which checkpoint a run would go on from, in words."""
        with contextlib.suppress(InputError):
            # Perhaps one is on its way.
            self.finish()
        return what_stays(self._directory)

    def save(
        self,
        step: int,
        state: PyTree,
        window: Mapping[str, float],
        save_position: Callable[[Path], None],
    ) -> None:
        """Begins to write a checkpoint, once the one before is written.

        What is to be written has been copied when this returns, so that the next step may
        take over the state's buffers. On a CPU, where the copy is the buffer itself, XLA
        leaves alone what is still looked at.

        Args:
            step: its number.
            state: arrays.
            window: what JSON can hold.
            save_position: writes into a directory where the data stands, or what it is.

        Raises:
            InputError: this one or the one before cannot be written.
        """
        items = {
            STATE: ocp.args.StandardSave(state),
            WINDOW: ocp.args.JsonSave(dict(window)),
            POSITION: _PositionSave(save_position),
        }
        with writing_to(self._directory):
            self._manager.save(step, args=ocp.args.Composite(**items))

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            InputError: it cannot be written.
        """
        with writing_to(self._directory):
            self._manager.wait_until_finished()

    def restore(self, like: PyTree) -> Restored | None:
        """The newest checkpoint, or None if there is none.

        Args:
            like: a state of the same shapes and types.

        Raises:
            InputError: the checkpoint is of another model.
        """
        step = self.latest_step
        if step is None:
            return None
        directory = self._directory / str(step)
        try:
            found = self._read(directory, like)
        except ValueError as error:
            raise InputError(
                f"the checkpoint of step {step} in {self._directory} is of another "
                "model or optimizer: give another output directory"
            ) from error
        position = directory / POSITION
        return Restored(
            state=found[STATE],
            window=found[WINDOW],
            position=position if position.is_dir() else None,
        )

    def _read(self, directory: Path, like: PyTree) -> Mapping:
        if (directory / ONLY).is_dir():
            with ocp.StandardCheckpointer() as reader:
                return {STATE: reader.restore(directory / ONLY, like), WINDOW: {}}
        items = {STATE: ocp.args.StandardRestore(like), WINDOW: ocp.args.JsonRestore()}
        return self._manager.restore(int(directory.name), args=ocp.args.Composite(**items))


@contextlib.contextmanager
def writing_to(directory: str | Path) -> Iterator[None]:
    """Around what writes checkpoints: a full disk ends the run in one line.

    Raises:
        InputError: what is inside could not write.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise InputError(
            f"a checkpoint cannot be written to {directory}: {reason}; {what_stays(directory)}: "
            "make room, and run the same command again to go on"
        ) from error


def what_stays(directory: str | Path) -> str:
    """Which checkpoint a run would go on from, in words."""
    # Those that are being written are called otherwise.
    steps = [int(path.name) for path in Path(directory).iterdir() if path.name.isdigit()]
    return f"that of step {max(steps)} stays" if steps else "there is none yet"


def _reason(error: OSError | ValueError) -> str | None:
    """What the operating system said; None where it said nothing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # TensorStore's, of which Python sees but the text.
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return code and os.strerror(int(code[1]))


@contextlib.contextmanager
def _without_tales_of_threads() -> Iterator[None]:
    """Silences what Orbax's threads say of errors that it raises where one waits for it.

    They log each many times over; and writes that end after one that failed find nobody who
    waits for them, of which Python tells.
    """
    logger, tell = logging.getLogger("absl"), sys.unraisablehook

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    def tell_others(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            tell(unraisable)

    logger.addFilter(is_of_others)
    sys.unraisablehook = tell_others
    try:
        yield
    finally:
        sys.unraisablehook = tell
        logger.removeFilter(is_of_others)


class _PositionHandler(ocp.CheckpointHandler):
    """Has a position written among a checkpoint's items, before ``save`` returns.

    Batches that are drawn while the rest is written do not move it.
    """

    def save(self, directory, args: "_PositionSave"):
        args.save_position(Path(directory))

    def restore(self, directory, args: "_PositionRestore"):
        return Path(directory)


@ocp.args.register_with_handler(_PositionHandler, for_save=True)
@dataclasses.dataclass
class _PositionSave(ocp.args.CheckpointArgs):
    save_position: Callable[[Path], None]


@ocp.args.register_with_handler(_PositionHandler, for_restore=True)
@dataclasses.dataclass
class _PositionRestore(ocp.args.CheckpointArgs):
    """Orbax wants one for every handler."""
