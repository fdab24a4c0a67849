"""Progress of a run: a bar on a terminal, lines of the log elsewhere.

It is shown at the log level INFO, which the commands set; your own program sets it by
``logging.basicConfig(level=logging.INFO)``.
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
def doing(logger: logging.Logger, what: str) -> Iterator[None]:
    """Logs ``what`` once if the code inside takes more than a moment; its time at level DEBUG."""
    timer, started = threading.Timer(A_MOMENT, logger.info, ("%s", what)), time.perf_counter()
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    logger.debug("%s: %.2f s", what, time.perf_counter() - started)


class Progress:
    """A bar, or lines of the log where the stream is no terminal; a context manager.

    The first line comes after a moment, further ones at most every ``every`` seconds.
    """

    def __init__(
        self, unit: str = "", stream: io.TextIOBase | None = None, every: int | float = 30
    ):
        """Starts without an update.

        Args:
          unit: of what is counted ("inputs").
          stream: shows the bar if it is a terminal; None is standard error.
          every: seconds between lines; 0 logs each update.
        """
        self._unit, self._every = unit, every
        stream = stream if stream is not None else sys.stderr
        self._quiet_until = time.monotonic() + min(A_MOMENT, every)
        self._bar = self._task = None
        if stream.isatty() and log.isEnabledFor(logging.INFO):
            # Imported here because lines need none of it.
            import rich.console
            import rich.progress

            self._bar = rich.progress.Progress(
                rich.progress.MofNCompleteColumn(),
                rich.progress.BarColumn(),
                # Names are not markup.
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
                console=rich.console.Console(file=stream),
                # Redirected output must reach its file and not the bar's stream.
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
        """Shows the count that is done, its total if that is known, and a text."""
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
