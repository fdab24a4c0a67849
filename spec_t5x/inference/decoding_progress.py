"""Progress of bulk inference: inputs, tokens a second, block efficiency, occupancy."""

import datetime
import io
import time

from spec_t5x.inference.answering import Tally
from spec_t5x.machine.progress import Progress


class DecodingProgress(Progress):
    """Progress bar (or lines) of a run, with the counts of what the run has decoded."""

    def __init__(self, stream: io.TextIOBase | None = None):
        super().__init__("inputs", stream)
        self.tally = Tally()
        self._total, self._started = 0, time.monotonic()

    def reading(self, count: int) -> None:
        """Shows the number of inputs that have been read, before any is decoded."""
        self.update(count, None, "reading")

    def decoding(self, total: int, finished: int = 0) -> None:
        """Starts the clock, with ``total`` inputs to decode; ``finished`` others have answers."""
        self._total, self._started = total, time.monotonic()
        if finished:
            self.say(f"resuming: {finished:,} answered, {total:,} left")
        if self._bar:
            self.update(0, total, "compiling")

    def count(self, tally: Tally) -> None:
        """Adds the counts of newly decoded inputs, and shows rates over all."""
        self.tally.add(tally)
        if not self.tally.tokens:
            self.update(self.tally.inputs, self._total, "compiling")
            return
        rate = self.tally.tokens / max(self.seconds, 1e-9)
        text = f"{rate:,.0f} tokens/s, block efficiency {self.tally.block_efficiency:.2f}"
        text += f", occupancy {self.tally.occupancy:.0%}"
        if not self._bar:
            # A bar shows the remaining time itself.
            left = self.seconds * (self._total / max(self.tally.inputs, 1) - 1)
            text += f", {datetime.timedelta(seconds=round(max(left, 0)))} left"
        self.update(self.tally.inputs, self._total, text)

    @property
    def seconds(self) -> float:
        """Seconds since decoding started, compilation included."""
        return time.monotonic() - self._started
