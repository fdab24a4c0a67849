"""Progress of a training run: a bar or log lines, the file ``metrics.jsonl``, and curves."""

import contextlib
import datetime
import io
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.extras import imported
from spec_t5x.machine.progress import Progress


class MetricsFile:
    """The file ``metrics.jsonl``: each line has a ``step``, and no line is repeated.

    A run that was killed resumes from a checkpoint and repeats the steps after it: the lines of
    these steps are removed, and so is a line that a crash cut short. A line of the checkpoint's
    step that is in the file already is not added again.
    """

    def __init__(self, path: Path, start_step: int):
        """Opens the file and removes the lines of steps after ``start_step``.

        Raises:
            InputError: the file cannot be written.
        """
        self._path = path
        with reported(path):
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if _step(line) <= start_step]
            self._written = {line.decode() for line in kept if _step(line) == start_step}
            if kept != lines:
                write_whole(path, kept)

    def add(self, **values: Any) -> None:
        """Appends a line with ``values``, unless the line was in the file at the start.

        Raises:
            InputError: the file cannot be written.
        """
        line = json.dumps(values) + "\n"
        if line not in self._written:
            with reported(self._path), self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)


def _step(line: bytes) -> float:
    """Returns the step of a line; infinity if the line is incomplete or has no step."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, TypeError, KeyError):
        return float("inf")


class TrainingProgress(Progress):
    """Reports of a run's steps, each also a line of ``metrics.jsonl``; a context manager.

    Rates (tokens and pairs per second) are averages since the last report, without ``pause``.
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
        """Reports on steps ``start_step`` to ``steps``, to ``stream`` and files in ``directory``.

        None as ``stream`` is standard error. If ``tensorboard``, curves are written as well.
        """
        super().__init__("steps", stream, every=0)
        self._metrics = MetricsFile(directory / "metrics.jsonl", start_step)
        self._curves = curves_writer()(str(directory / "tensorboard")) if tensorboard else None
        self._steps, self._text = steps, ""
        self._restart()

    def _restart(self) -> None:
        self._started = time.monotonic()
        self._num_steps = self._num_tokens = self._num_pairs = 0

    def __exit__(self, *error):
        super().__exit__(*error)
        if self._curves:
            self._curves.close()

    def count(self, step: int, tokens: int, pairs: int) -> None:
        """Counts a step's tokens and pairs; ``step`` is the number of steps taken."""
        self._num_steps += 1
        self._num_tokens += tokens
        self._num_pairs += pairs
        if self._bar:
            self.update(step, self._steps, self._text)

    def report(self, step: int, *, loss: float, accuracy: float, rate: float) -> None:
        """Shows and records loss (nats per token), accuracy, learning rate ``rate`` and speed."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        values = {
            "loss": loss,
            "accuracy": accuracy,
            "learning_rate": rate,
            "tokens_per_s": self._num_tokens / seconds,
            "pairs_per_s": self._num_pairs / seconds,
        }
        self._text = (
            f"loss {loss:.4f}  acc {accuracy:.3f}  lr {rate:.2e}  "
            f"{values['tokens_per_s']:,.0f} tokens/s  {values['pairs_per_s']:,.0f} pairs/s"
        )
        left = (self._steps - step) * seconds / max(self._num_steps, 1)
        ending = "" if self._bar else f"  {datetime.timedelta(seconds=round(left))} left"
        self.update(step, self._steps, self._text + ending)
        self._record(step, values, values)
        self._restart()

    def note(
        self, step: int, text: str, curves: Mapping[str, float] | None = None, **values: Any
    ) -> None:
        """Shows ``text`` and records ``values``; ``curves`` are TensorBoard's figures by name."""
        self.say(f"step {step}  {text}")
        self._record(step, values, curves or {})

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the ``with`` block from the rates."""
        started = time.monotonic()
        yield
        self._started += time.monotonic() - started

    def _record(self, step: int, values: Mapping[str, Any], curves: Mapping[str, float]) -> None:
        self._metrics.add(step=step, **values)
        if self._curves:
            self._curves.write_scalars(step, curves)
            # Flushed, so that a run that is killed has the curves of its reports.
            self._curves.flush()


def curves_writer() -> type:
    """Returns the class of ``clu`` that writes TensorBoard's files to a directory.

    Raises:
        InputError: clu or TensorFlow is not installed.
    """
    # Imported here because clu imports TensorFlow, which takes seconds.
    writer = imported("clu.metric_writers").SummaryWriter
    import tensorflow as tf

    if tf.config.get_visible_devices("GPU"):
        # TensorFlow would allocate the GPUs' whole memory, which JAX needs.
        tf.config.set_visible_devices([], "GPU")
    return writer
