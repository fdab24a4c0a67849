"""What a run says on the way: a bar of its estimated time on a terminal, lines elsewhere."""

import io

import rich.console
import rich.progress

from spec_t5x.experiments.reproduction.items import Part
from spec_t5x.experiments.reproduction.runner import duration


class Progress:
    """Shows where a run stands; a context manager."""

    def __init__(self, seconds: float, stream: io.TextIOBase):
        """Shows it on a stream.

        Args:
          seconds: of the whole run, estimated.
          stream: a terminal or anything else.
        """
        self._stream = stream
        self._bar = _make_bar(stream) if stream.isatty() else None
        self._seconds = seconds
        # Of the parts that have ended.
        self._before = 0.0
        self._task = None
        self._part: Part | None = None

    def __enter__(self):
        if self._bar and self._seconds:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._seconds)
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def begin(self, number: int, total: int, part: Part) -> None:
        """As ``runner.Watcher``."""
        self._part = part
        where = f"[{number}/{total}] {part.name}"
        if self._task is None:
            self.say(f"{where}, about {duration(part.seconds)}")
        else:
            self._bar.update(self._task, description=where, completed=self._before)

    def advance(self, fraction: float) -> None:
        """As ``runner.Watcher``."""
        if self._task is not None:
            done = self._before + self._part.seconds * min(1.0, fraction)
            self._bar.update(self._task, completed=done)

    def end(self, part: Part, problem: str | None) -> None:
        """As ``runner.Watcher``."""
        self._before += part.seconds
        if self._task is not None:
            self._bar.update(self._task, completed=self._before)
        if problem:
            self.say(f"not computed: {part.name}: {problem}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(f"spec-t5x: {text}", file=self._stream, flush=True)


def _make_bar(stream: io.TextIOBase) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        # Names are not markup.
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(file=stream),
    )
