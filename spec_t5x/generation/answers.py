"""Outputs of an input with their scores and counts, or the error in their place."""

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
    """Outputs of an input, the best first.

    If the input cannot be decoded, ``error`` says why, and an index or iteration raises it.
    """

    def __init__(self, outputs: Iterable[Generation] = (), error: InputError | None = None):
        super().__init__(outputs)
        self.error = error

    def __getitem__(self, index):
        if self.error is not None:
            raise self.error
        return super().__getitem__(index)

    def __iter__(self):
        if self.error is not None:
            raise self.error
        return super().__iter__()

    def __repr__(self) -> str:
        return super().__repr__() if self.error is None else f"Answer(error={self.error!r})"

    def __reduce__(self):
        # A list is pickled by iterating over it.
        return type(self), (list(super().__iter__()), self.error)


class Answers(Iterator[Answer]):
    """Answers to some inputs, in order.

    Inputs are decoded, and answers forgotten, while they are iterated over. An index decodes all
    inputs and keeps their answers.
    """

    def __init__(self, coming: Iterator[Answer]):
        self._coming = coming
        self._kept: list[Answer] | None = None
        self._begun = self._over = False

    def __iter__(self) -> Iterator[Answer]:
        if self._kept is not None:
            return iter(self._kept)
        if self._over:
            raise _not_kept("these answers were iterated over before and are not kept")
        return self

    def __next__(self) -> Answer:
        self._begun = True
        for answer in self._coming:
            return answer
        self._over = True
        raise StopIteration

    def __getitem__(self, index):
        if self._kept is None:
            if self._begun:
                raise _not_kept(f"answer {index!r} is indexed while iterating, which keeps none")
            self._kept = list(self._coming)
            self._coming = iter(self._kept)
        return self._kept[index]


def _not_kept(reason: str) -> InputError:
    return InputError(f"{reason}: make a list of them, as in list(generator.generate(texts))")


def all_answered(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Yields the outputs of each input; raises the first ``InputError`` among them."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        yield answer
