"""Answers to inputs: outputs with their scores and counts, or an error."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One output and its counts. Those that need a draft are None if the decoder has no draft."""

    input: str
    output: str
    # Ids of the output, with its prefix and end of sequence, without a decoder's prompt.
    output_ids: list[int]
    # Natural logarithm of the probability; in a beam search over the brevity or length penalty.
    score: float
    # Target calls for this output; in a beam search, for all hypotheses of the input.
    target_calls: int
    # Drafted tokens that were proposed, and accepted; the latter also by position in the block.
    proposed: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] | None = None
    # Iterations in which a draft was verified, by position in the block.
    verified_by_position: list[int] | None = None
    # Generated tokens, or steps of a beam search, for each target call.
    block_efficiency: float | None = None
    # Mean of ``sum min(p, q)`` over verified positions; None if there were none.
    alpha: float | None = None


class Answer(list[Generation]):
    """Outputs of an input, by decreasing score.

    If the input cannot be decoded, ``error`` says why; indexing and iterating raise this error.
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

    def __getattr__(self, name: str):
        raise AttributeError(f"an answer is a list of outputs: try answer[0].{name}")

    def __repr__(self) -> str:
        return super().__repr__() if self.error is None else f"Answer(error={self.error!r})"

    def __reduce__(self):
        # A list is pickled by iterating over it.
        return type(self), (list(super().__iter__()), self.error)


class Answers(Iterator[Answer]):
    """Answers to inputs, in order, which one thread alone may read.

    Iteration decodes the inputs as it proceeds and keeps no answers, so that it works once. An
    index decodes all inputs and keeps the answers for later indices and iterations.
    """

    def __init__(self, coming: Iterator[Answer]):
        self._coming = coming
        self._kept: list[Answer] | None = None
        # What stopped the decoding; later accesses raise it in place of answers.
        self._error: Exception | None = None
        self._begun = self._over = False

    def __iter__(self) -> Iterator[Answer]:
        if self._kept is not None:
            return iter(self._kept)
        if self._over:
            raise _not_kept("these answers were iterated over before and are not kept")
        return self

    def __repr__(self) -> str:
        kept = "not kept: index them, or iterate once" if self._kept is None else self._kept
        return f"Answers({kept})"

    def __next__(self) -> Answer:
        self._begun = True
        with self._kept_error():
            for answer in self._coming:
                return answer
        self._over = True
        raise StopIteration

    def __getitem__(self, index):
        if self._kept is None:
            if self._begun and self._error is None:
                raise _not_kept(f"answer {index!r} is indexed while iterating, which keeps none")
            with self._kept_error():
                self._kept = list(self._coming)
            self._coming = iter(self._kept)
        return self._kept[index]

    @contextlib.contextmanager
    def _kept_error(self) -> Iterator[None]:
        """Raises the error that stopped the decoding before, or keeps one for later accesses."""
        if self._error is not None:
            raise self._error
        try:
            yield
        except BaseException as error:
            stopped = InputError("decoding was interrupted: call generate again")
            self._error = error if isinstance(error, Exception) else stopped
            raise


def _not_kept(reason: str) -> InputError:
    return InputError(f"{reason}: make a list of them, as in list(generator.generate(texts))")
