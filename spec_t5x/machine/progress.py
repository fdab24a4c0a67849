"""How far a run is: a bar on a terminal, lines elsewhere.

All of it is shown where the package's log shows information: by the commands, and by a program of
your own after ``logging.basicConfig(level=logging.INFO)``.
"""

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

# Seconds that need no message.
A_MOMENT = 1.0


@contextlib.contextmanager
def doing(of: logging.Logger, what: str) -> Iterator[None]:
    """Logs what is done inside once that takes more than a moment, and how long it took.

    The time is for debugging. Nothing more is said of what fails.
    """
    timer, started = threading.Timer(A_MOMENT, of.info, ("%s", what)), time.perf_counter()
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    of.debug("%s: %.2f s", what, time.perf_counter() - started)


class Progress:
    """Shows how far something is; a context manager.

    Where the stream is no terminal, an update is a line of the log: the first after a moment, and
    then at most one in ``every`` seconds.
    """

    def __init__(
        self, unit: str = "", stream: io.TextIOBase | None = None, every: int | float = 30
    ):
        """Shows it on a stream.

        Args:
          unit: of what is counted ("inputs").
          stream: a terminal or anything else; None is standard error.
          every: seconds between lines; 0 logs each update.
        """
        self._unit, self._every = unit, every
        stream = stream if stream is not None else sys.stderr
        self._quiet_until = time.monotonic() + min(A_MOMENT, every)
        self._bar = self._task = None
        if stream.isatty() and log.isEnabledFor(logging.INFO):
            # Imported here: lines need none of it.
            import rich.console
            import rich.progress

            self._bar = rich.progress.Progress(
                rich.progress.MofNCompleteColumn(),
                rich.progress.BarColumn(),
                # Names are not markup.
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
                console=rich.console.Console(file=stream),
                # What is printed above the bar would leave the file that it is meant for.
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def update(self, done: int | float, total: int | float | None, text: str) -> None:
        """So much is done, of ``total`` if that is known."""
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(text)
            self._bar.update(self._task, completed=done, total=total, description=text)
        elif time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + self._every
            of = "" if total is None else f" of {total:,}"
            self.say(f"{done:,}{of} {self._unit}, {text}")

    def say(self, text: str) -> None:
        """Logs a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            log.info("%s", text)
