"""The floor under decoding: the time that it takes to read what a step must read.

A step of a decoder multiplies each of its weights once for each row. At batch 1 that is less
work than fetching the weights, so that no implementation takes less time a step than one pass
over the weights and the part of the caches in use, at the machine's read bandwidth (section
3.4 of the paper counts the same memory accesses). Only fewer steps go below it, which is what
speculation does.

The bandwidth is measured where it is used: with the threads that decoding has, and over as
many bytes as the step reads. A small model stays in the last-level cache, which is several
times faster than memory; a large one does not.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.models.costs import decoder_step, encoder_call
from spec_t5x.models.t5 import T5Config

# One timing lasts at least so long: shorter than a scheduler's slice, a clock says little.
_SECONDS = 0.05
_TIMINGS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBytes:
    """What one decode must read: every weight once a call, caches as far as they are in use."""

    num_tokens: int
    # Of the encoder, with the keys and values of the source.
    encoder: int
    # Of all steps of the decoder.
    decoder: int

    @property
    def step(self) -> int:
        """Of one step, on average."""
        return round(self.decoder / self.num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """The measured bandwidth, and what follows from it."""

    # Summed over all inputs.
    reads: DecodeBytes
    # Bytes that the bandwidth was measured over: those of a step.
    working_set: int
    # None where the system does not say.
    last_level_cache: int | None
    threads: int
    # Of every timing.
    bytes_per_second: list[float]

    @property
    def bandwidth(self) -> float:
        """Bytes per second, of the best timing: a floor is what cannot be beaten."""
        return max(self.bytes_per_second)

    @property
    def step_seconds(self) -> float:
        """Least time of a step."""
        return self.reads.step / self.bandwidth

    @property
    def token_seconds(self) -> float:
        """Least time of plain decoding for each token, with the encoder's share."""
        everything = self.reads.encoder + self.reads.decoder
        return everything / self.reads.num_tokens / self.bandwidth

    @property
    def in_cache(self) -> bool | None:
        """Whether the working set fits into the last-level cache, if that is known."""
        return None if self.last_level_cache is None else self.working_set < self.last_level_cache

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return dataclasses.asdict(self) | {
            "bandwidth": self.bandwidth,
            "step_seconds": self.step_seconds,
            "token_seconds": self.token_seconds,
            "in_cache": self.in_cache,
        }


def decode_bytes(config: T5Config, lengths: list[tuple[int, int]]) -> DecodeBytes:
    """What plain decoding at batch 1 must read.

    Args:
      config: the network.
      lengths: of each input its tokens and those of the output, end of sequence included.

    Raises:
      InputError: no input, or one without a token.
    """
    if not lengths:
        raise InputError("no lengths: give those of at least one input")
    encoder = sum(encoder_call(config, source).bytes_read for source, _ in lengths)
    decoder = sum(
        decoder_step(config, cache_length=position, source_length=source).bytes_read
        for source, tokens in lengths
        for position in range(1, tokens + 1)
    )
    num_tokens = sum(tokens for _, tokens in lengths)
    if not num_tokens:
        raise InputError("no output has a token: there is no step to count")
    return DecodeBytes(num_tokens=num_tokens, encoder=encoder, decoder=decoder)


def _in_a_row(part: np.ndarray) -> None:
    """One stream, from beginning to end."""
    np.maximum.reduce(part)


def _side_by_side(part: np.ndarray) -> None:
    """Two streams, which some processors fetch faster than one."""
    half = part.size // 2
    np.einsum("i,i->", part[:half], part[half : 2 * half])


class ReadMeter:
    """Reads the same memory again and again, each thread a part of its own.

    What the threads make of the numbers takes less time than to fetch them.
    """

    def __init__(self, num_bytes: int, threads: int):
        """Takes ``num_bytes`` of memory.

        Raises:
          InputError: fewer than 1 thread, or too few bytes to part among them.
        """
        if threads < 1:
            raise InputError(f"threads is {threads}: give at least 1")
        if num_bytes < 4096 * threads:
            raise InputError(f"num_bytes is {num_bytes}: give at least 4096 for each thread")
        # Written, so that every page is a page of its own and not the one of zeros. Of even
        # size, so that both ways of reading read all of it.
        size = num_bytes // (8 * threads) * 2
        self._parts = [np.ones(size, np.float32) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self.num_bytes = sum(part.nbytes for part in self._parts)
        self._passes = 1
        # The first pass is the warm-up.
        self._time(_in_a_row)
        self._passes = max(1, round(_SECONDS / self._time(_in_a_row)))

    def bytes_per_second(self) -> float:
        """The better of two ways of reading, each timed ``_TIMINGS`` times."""
        ways = (_in_a_row, _side_by_side)
        fastest = min(self._time(read) for _ in range(_TIMINGS) for read in ways)
        return self._passes * self.num_bytes / fastest

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _time(self, read: Callable[[np.ndarray], None]) -> float:
        """Seconds from the first thread's start to the last one's end."""
        together = threading.Barrier(len(self._parts))

        def pass_over(part):
            together.wait()
            start = time.perf_counter()
            for _ in range(self._passes):
                read(part)
            return start, time.perf_counter()

        starts, ends = zip(*self._pool.map(pass_over, self._parts), strict=True)
        return max(ends) - min(starts)


def usable_threads() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache() -> int | None:
    """Bytes of the first processor's largest cache, as Linux tells it; None elsewhere."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    found = [_bytes(path.read_text(encoding="ascii").strip()) for path in sizes]
    return max(found, default=None)


def _bytes(text: str) -> int:
    """
    >>> _bytes("266240K")
    272629760
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
