"""What comes out: an input's outputs with their scores and counts, or why there are none."""

import dataclasses
from collections.abc import Iterable, Iterator

from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One output. Counts are of this sequence alone; ``None`` in plain decoding."""

    input: str
    output: str
    # Generated token ids, end of sequence included, without a prompt's.
    output_ids: list[int]
    # Log-probability (natural logarithm); in a beam search over its brevity penalty.
    score: float
    # Calls for this sequence; in a beam search, for all hypotheses of the input.
    target_calls: int
    proposed: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] | None = None
    # Iterations in which a draft was verified at the position.
    verified_by_position: list[int] | None = None
    # Generated tokens for each target call; in a speculative beam search, tokens that the
    # hypotheses grow by.
    block_efficiency: float | None = None
    # Mean of sum min(p, q) over verified positions; None if there were none.
    alpha: float | None = None


class Answer(list[Generation]):
    """An input's outputs, the best first; or why there are none.

    Of an input that cannot be decoded it is empty, ``error`` says why, and asking for an
    output raises that.
    """

    def __init__(self, outputs: Iterable[Generation] = (), error: InputError | None = None):
        super().__init__(outputs)
        self.error = error

    def __getitem__(self, index):
        if self.error is not None:
            raise self.error
        return super().__getitem__(index)


def all_answered(answers: Iterable[Answer]) -> Iterator[Answer]:
    """The outputs of each input; raises the first ``InputError`` among them."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        yield answer
