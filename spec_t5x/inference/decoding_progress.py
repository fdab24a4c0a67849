"""Progress of bulk inference: inputs, tokens a second, block efficiency, occupancy."""

import datetime
import io
import time

from spec_t5x.inference.answering import Tally
from spec_t5x.machine.progress import Progress


class DecodingProgress(Progress):
    """Shows how far a run is, and counts what it decodes."""

    def __init__(self, stream: io.TextIOBase | None = None):
        super().__init__("inputs", stream)
        self.tally = Tally()
        self._total = 0
        self._started = time.monotonic()

    def reading(self, count: int) -> None:
        """Shows how many inputs are counted."""
        self.update(count, None, "reading")

    def decoding(self, total: int, finished: int = 0) -> None:
        """Starts with ``total`` inputs; ``finished`` more have their answers."""
        self._total, self._started = total, time.monotonic()
        if finished:
            self.say(f"resuming: {finished:,} inputs have answers, {total:,} are left")
        if self._bar:
            self.update(0, total, "compiling")

    def count(self, tally: Tally) -> None:
        """Adds inputs that have answers."""
        self.tally.add(tally)
        rate = self.tally.tokens / max(self.seconds, 1e-9)
        text = f"{rate:,.0f} tokens/s, block efficiency {self.tally.block_efficiency:.2f}"
        text += f", occupancy {self.tally.occupancy:.0%}"
        if not self._bar:
            # A bar has its own.
            left = self.seconds * (self._total / max(self.tally.inputs, 1) - 1)
            text += f", {datetime.timedelta(seconds=round(max(left, 0)))} left"
        self.update(self.tally.inputs, self._total, text)

    @property
    def seconds(self) -> float:
        """Time since decoding started, compilation included."""
        return time.monotonic() - self._started
