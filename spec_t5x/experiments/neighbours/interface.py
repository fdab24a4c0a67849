"""What is asked of an implementation that is to be compared."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spec_t5x.types import EOS_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What every implementation is given. Made of what JSON can hold: it crosses processes."""

    # The target as ``loading.load`` takes it, and its vocabulary if it brings none.
    target: str
    vocabulary: str | None = None
    # The target's float32 weights in Hugging Face's format: the same numbers.
    target_copy: str
    # The draft, by the name that ``checkpoints.make_draft`` knows, and its weights likewise.
    # None without one, and the copy where the draft is no T5.
    draft: str | None = None
    draft_copy: str | None = None
    # A folder for what an implementation makes of the copies.
    scratch: str
    # Longest source in tokens, and tokens generated at most.
    max_source_len: int
    max_decode_len: int
    threads: int
    # Of drawn verdicts, for random weights; None verifies.
    alpha: float | None = None

    def made(self, name: str) -> Path:
        """Where an implementation keeps what it made."""
        return Path(self.scratch) / name


@runtime_checkable
class Decoder(Protocol):
    """One way of decoding greedily at batch 1, ready to be timed."""

    def decode(self, ids: list[int], max_tokens: int) -> list[int]:
        """The tokens of the output, end of sequence included, when all work is done.

        Args:
          ids: the source, end of sequence included.
          max_tokens: tokens generated at most; what is allocated and compiled must not depend
            on it where it does not in ordinary use.
        """

    def encode(self, ids: list[int]) -> bool:
        """Runs the encoder alone and waits for it; False where that cannot be done."""


@runtime_checkable
class Implementation(Protocol):
    """A module of this package. Importing it imports the library, or fails to.

    One whose methods say so (``methods.Method.prepares``) has a function ``prepare(job)``,
    too, which makes of the copies what it needs, in a process that then ends.
    """

    def version(self) -> str:
        """Names and versions, as the table shows them."""

    def make(self, job: Job, **arguments: Any) -> Decoder:
        """Loads, once in a process for all of its decoders."""


def until_end(ids: list[int]) -> list[int]:
    """Without what comes after the end of sequence.

    >>> until_end([5, 7, 1, 0, 0])
    [5, 7, 1]
    """
    return ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids
