"""Progress of a training run: a bar on a terminal, plain lines elsewhere, JSON lines."""

import contextlib
import dataclasses
import datetime
import io
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

from spec_t5x.training.metrics_file import MetricsFile


def say(text: str) -> None:
    """Prints a line on standard error, before or after the steps of a run."""
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(kw_only=True)
class _Window:
    """Counts since the last report."""

    started: float
    steps: int = 0
    tokens: int = 0
    pairs: int = 0


class ProgressReporter:
    """Reports the steps of a run; a context manager.

    Every report is also a line of ``metrics.jsonl``. Rates are those since the last report,
    without evaluation and checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        *,
        start_step: int,
        steps: int,
        stream: io.TextIOBase | None = None,
        tensorboard: bool = False,
    ):
        """Reports on steps ``start_step`` .. ``steps`` to ``stream`` (stderr).

        Lines of ``metrics.jsonl`` about later steps than ``start_step`` are removed: those
        steps are taken again. With ``tensorboard`` the same figures go to ``tensorboard/``.
        """
        self._stream = stream if stream is not None else sys.stderr
        self._metrics = MetricsFile(directory / "metrics.jsonl", start_step)
        self._curves = _curves(directory / "tensorboard") if tensorboard else None
        self._steps = steps
        self._bar = _make_bar(self._stream) if self._stream.isatty() else None
        if self._bar:
            self._task = self._bar.add_task("", total=steps, completed=start_step)
        self._window = _Window(started=time.monotonic())

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()
        if self._curves:
            self._curves.close()

    def count(self, step: int, tokens: int, pairs: int) -> None:
        """Counts a step; ``step`` is the number of steps now taken."""
        self._window.steps += 1
        self._window.tokens += tokens
        self._window.pairs += pairs
        if self._bar:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, *, loss: float, accuracy: float, rate: float) -> None:
        """Shows loss (nats per token), accuracy, learning rate and speed."""
        window, now = self._window, time.monotonic()
        seconds = max(now - window.started, 1e-9)
        self._window = _Window(started=now)
        step_seconds = seconds / max(window.steps, 1)
        tokens_per_s, pairs_per_s = window.tokens / seconds, window.pairs / seconds
        text = (
            f"loss {loss:.4f}  acc {accuracy:.3f}  lr {rate:.2e}  "
            f"{tokens_per_s:,.0f} tokens/s  {pairs_per_s:,.0f} pairs/s"
        )
        if self._bar:
            self._bar.update(self._task, description=text)
        else:
            left = datetime.timedelta(seconds=round((self._steps - step) * step_seconds))
            self.say(f"step {step}/{self._steps}  {text}  {left} left")
        values = {
            "loss": loss,
            "accuracy": accuracy,
            "learning_rate": rate,
            "tokens_per_s": tokens_per_s,
            "pairs_per_s": pairs_per_s,
        }
        self._record(step, values, values)

    def note(
        self, step: int, text: str, curves: Mapping[str, float] | None = None, **values: Any
    ) -> None:
        """Shows another result and records ``values``; ``curves`` are its figures by name."""
        self.say(f"step {step}  {text}")
        self._record(step, values, curves or {})

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose duration does not count for the rates."""
        started = time.monotonic()
        yield
        self._window.started += time.monotonic() - started

    def _record(self, step: int, values: Mapping[str, Any], curves: Mapping[str, float]) -> None:
        self._metrics.add(step=step, **values)
        if self._curves:
            self._curves.write_scalars(step, curves)
            # A run that is killed has written the curves of what it reported.
            self._curves.flush()


def _curves(directory: Path):
    """A ``clu`` writer of TensorBoard's files."""
    # It imports TensorFlow, which takes seconds.
    import tensorflow as tf
    from clu.metric_writers import SummaryWriter

    if tf.config.get_visible_devices("GPU"):
        # All of whose memory TensorFlow would take.
        tf.config.set_visible_devices([], "GPU")
    return SummaryWriter(str(directory))


def _make_bar(stream: io.TextIOBase) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(compact=True),
        console=rich.console.Console(file=stream),
    )
