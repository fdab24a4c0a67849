"""What a run says on the way: a bar on a terminal, now and then a line elsewhere."""

import collections
import io
import sys
import time

import rich.console
import rich.progress

from spec_t5x.inference.answering import Tally

_WINDOW = 30.0  # seconds that the shown rate is of
_EVERY = 30.0  # seconds between lines


class Progress:
    """Shows where a run stands; a context manager."""

    def __init__(self, stream: io.TextIOBase | None = None):
        self._stream = stream if stream is not None else sys.stderr
        self._bar = _make_bar(self._stream) if self._stream.isatty() else None
        self._task = None
        self._total = 0
        self._started = self._said = time.monotonic()
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self.tally = Tally()

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def reading(self, count: int) -> None:
        """The first reading has come so far."""
        self._show(f"reading: {count:,} inputs")

    def decoding(self, total: int, finished: int) -> None:
        """Decoding begins, of ``total`` inputs; ``finished`` more have their answers."""
        self._total = total
        self._started = time.monotonic()
        if finished:
            self.say(f"going on: {finished:,} inputs are answered, {total:,} are left")
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task("compiling", total=total)

    def count(self, tally: Tally) -> None:
        """Some more inputs are answered."""
        self.tally.add(tally)
        now = time.monotonic()
        self._recent.append((now, tally.tokens))
        while now - self._recent[0][0] > _WINDOW:
            self._recent.popleft()
        text = (
            f"{self._rate(now):,.0f} tokens/s, block efficiency {self.tally.block_efficiency:.2f}"
        )
        if self._bar:
            self._bar.update(self._task, completed=self.tally.inputs, description=text)
        else:
            self._show(f"{self.tally.inputs:,} of {self._total:,} inputs, {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(f"spec-t5x: {text}", file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        """Since decoding began, compilation included."""
        return time.monotonic() - self._started

    def _rate(self, now: float) -> float:
        """Tokens a second of late."""
        begun = max(self._started, now - _WINDOW)
        return sum(tokens for _, tokens in self._recent) / max(now - begun, 1e-9)

    def _show(self, text: str) -> None:
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(text, total=None)
            self._bar.update(self._task, description=text)
        elif time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            self.say(text)


def _make_bar(stream: io.TextIOBase) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(compact=True),
        console=rich.console.Console(file=stream),
    )
