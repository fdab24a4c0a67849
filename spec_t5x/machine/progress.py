"""Progress of a run: a bar on a terminal, lines of the log elsewhere.

Progress is shown at the log level INFO, which the commands set; other programs set it by
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

# Seconds after which an operation is announced.
A_MOMENT = 1.0


@contextlib.contextmanager
def doing(logger: logging.Logger, what: str) -> Iterator[None]:
    """Logs ``what`` if the code inside takes over a second; at DEBUG, its time if it succeeds."""
    timer, started = threading.Timer(A_MOMENT, logger.info, ("%s", what)), time.perf_counter()
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    logger.debug("%s: %.2f s", what, time.perf_counter() - started)


class Progress:
    """Context manager that shows a bar, or logs lines if the stream is not a terminal.

    The first line is logged after a second, further ones at least ``every`` seconds apart.
    """

    def __init__(
        self, unit: str = "", stream: io.TextIOBase | None = None, every: int | float = 30
    ):
        """Creates the display; entering the context starts the bar.

        ``unit`` names what is counted ("inputs"); ``stream`` (None is standard error) shows the bar
        if it is a terminal; else lines are ``every`` seconds apart at least, 0 logs each update.
        """
        self._unit, self._every = unit, every
        stream = stream if stream is not None else sys.stderr
        self._quiet_until = time.monotonic() + min(A_MOMENT, every)
        self._bar = self._task = None
        if stream.isatty() and log.isEnabledFor(logging.INFO):
            # Imported here, because only a bar needs rich.
            import rich.console
            import rich.progress

            self._bar = rich.progress.Progress(
                rich.progress.MofNCompleteColumn(),
                rich.progress.BarColumn(),
                # Brackets in texts are not markup.
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
        """Shows ``done`` of ``total`` units (None: unknown) and a text; may skip log lines."""
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(text)
            self._bar.update(self._task, completed=done, total=total, description=text)
        elif time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + self._every
            of = "" if total is None else f" of {total:,}"
            self.say(f"{done:,}{of} {self._unit}, {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar, or logs it if there is no bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            log.info("%s", text)
