"""How far a run is: a bar on a terminal, lines elsewhere."""

import io
import sys
import time


def say(text: str, stream: io.TextIOBase | None = None) -> None:
    """Prints a line beside the output, on standard error unless told otherwise."""
    print(f"spec-t5x: {text}", file=stream or sys.stderr, flush=True)


class Progress:
    """Shows how far something is; a context manager.

    Where the stream is no terminal, an update is a line, at most one in ``every`` seconds.
    """

    def __init__(
        self, unit: str = "", stream: io.TextIOBase | None = None, every: int | float = 30
    ):
        """Shows it on a stream.

        Args:
          unit: of what is counted ("inputs").
          stream: a terminal or anything else; None is standard error.
          every: seconds between lines; 0 prints each update.
        """
        self._unit, self._every = unit, every
        self._stream = stream if stream is not None else sys.stderr
        self._printed = time.monotonic()
        self._bar = self._task = None
        if self._stream.isatty():
            # Imported here: lines need none of it.
            import rich.console
            import rich.progress

            self._bar = rich.progress.Progress(
                rich.progress.MofNCompleteColumn(),
                rich.progress.BarColumn(),
                # Names are not markup.
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
                console=rich.console.Console(file=self._stream),
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
        elif time.monotonic() - self._printed >= self._every:
            self._printed = time.monotonic()
            of = "" if total is None else f" of {total:,}"
            self.say(f"{done:,}{of} {self._unit}, {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            say(text, self._stream)
