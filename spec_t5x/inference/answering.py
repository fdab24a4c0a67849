"""A shard's inputs decoded: batches of about one length, answers in order of input.

What a batch holds is settled by the shard's inputs and the settings alone, and a sampled
text by the seed and its input's place: a shard has the same answers whenever, by whichever
process and after however many interruptions it is decoded.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from spec_t5x.errors import InputError
from spec_t5x.generation import (
    Answer,
    Batch,
    GenerateOptions,
    Generator,
    Run,
    one_ahead,
)
from spec_t5x.inference import records
from spec_t5x.inference.inputs import Item
from spec_t5x.inference.placement import Placement
from spec_t5x.loops.pace import Costs
from spec_t5x.types import EOS_ID


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts of what was decoded."""

    inputs: int = 0
    errors: int = 0
    # Generated, end of sequence included.
    tokens: int = 0
    target_calls: int = 0
    # What these calls brought: tokens of each sequence, or that a search's hypotheses grew by.
    advance: float = 0.0

    def add(self, other: "Tally") -> None:
        """Counts another's too."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def block_efficiency(self) -> float:
        """Generated tokens for each target call, over all sequences; 1 in plain decoding."""
        return self.advance / self.target_calls if self.target_calls else 1.0


def tally_of(answers: Iterable[Answer], *, searched: bool = False) -> Tally:
    """What some answers come to; ``searched`` where they are a beam search's."""
    tally = Tally()
    for answer in answers:
        tally.inputs += 1
        tally.errors += answer.error is not None
        tally.tokens += sum(len(generation.output_ids) for generation in answer)
        # A search's calls are for all of its hypotheses.
        for generation in list(answer)[: 1 if searched else None]:
            tally.target_calls += generation.target_calls
            tally.advance += generation.target_calls * (generation.block_efficiency or 1.0)
    return tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer:
    """A pair, its settings and its devices: inputs to lines of output."""

    generator: Generator
    options: GenerateOptions
    placement: Placement = Placement()

    def lines(
        self, items: Sequence[Item], progress: Callable[[Tally], None] = lambda tally: None
    ) -> list[bytes]:
        """The line of each input, in order; ``progress`` hears of each batch.

        Raises:
          InputError: a batch does not fit into the devices' memory.
        """
        lines: dict[int, bytes] = {}
        prepared = []
        for item in items:
            try:
                prepared.append((item, self.ids(item)))
            except InputError as error:
                lines[item.index] = records.refusal(item, str(error))
        progress(Tally(inputs=len(lines), errors=len(lines)))
        for batch_items, outputs in self._decode(self._batches(prepared)):
            for item, found in zip(batch_items, outputs, strict=True):
                if found.error is not None:
                    lines[item.index] = records.refusal(item, str(found.error))
                else:
                    lines[item.index] = records.answer(item, found)
            progress(tally_of(outputs, searched=self.options.beams > 0))
        return [lines[item.index] for item in items]

    def costs(self, items: Sequence[Item]) -> Costs | None:
        """What speculation costs for such inputs; None if none of them can be decoded."""
        prepared = []
        for item in items:
            with contextlib.suppress(InputError):
                prepared.append((item, self.ids(item)))
        for _, batch in self._batches(prepared):
            with self.placement.within(), _memory(self.options):
                return self.generator.costs(batch, self.options)
        return None

    def ids(self, item: Item) -> list[int]:
        """An input's ids, end of sequence included.

        Raises:
          InputError: why it cannot be decoded.
        """
        if item.error:
            raise InputError(item.error)
        if item.ids is None:
            return self.generator.tokenize(item.text, self.options)
        if not item.ids:
            raise InputError("the example has no ids: give at least one word")
        limit = self.options.max_source_len or self.generator.max_source_len
        if len(item.ids) <= limit:
            return item.ids
        if self.options.truncate:
            return [*item.ids[: limit - 1], EOS_ID]
        raise InputError(
            f"the example has {len(item.ids)} tokens and the encoder takes {limit} "
            f"({item.text[:40]!r}…): raise max_source_len, or pass truncate"
        )

    def _batches(
        self, prepared: list[tuple[Item, list[int]]]
    ) -> Iterator[tuple[list[Item], Batch]]:
        # The longest first: what does not fit into memory says so soon.
        prepared = sorted(prepared, key=lambda pair: (-len(pair[1]), pair[0].index))
        size = self.options.batch_size
        for start in range(0, len(prepared), size):
            items, ids = zip(*prepared[start : start + size], strict=True)
            yield list(items), self.placement.batch(self._batch(items, ids))

    def _batch(self, items: Sequence[Item], ids: Sequence[list[int]]) -> Batch:
        texts, places = [item.text for item in items], [item.index for item in items]
        return self.generator.make_batch(texts, ids, places, self.options)

    def _decode(
        self, batches: Iterator[tuple[list[Item], Batch]]
    ) -> Iterator[tuple[list[Item], list[Answer]]]:
        """Outputs of each batch. The device works on the next while one is written down.

        With gamma "auto" the pace of every shard starts anew: its bytes are the same
        whenever it is decoded.
        """
        run = self.generator.run(self.options)
        for items, waiting in one_ahead((items, self._start(run, b)) for items, b in batches):
            yield items, self._finish(waiting)

    def _start(self, run: Run, batch: Batch) -> Callable[[], Iterator[Answer]]:
        """Sets the device to work; the result is waited for by calling."""
        with self.placement.within(), _memory(self.options):
            return run.start(batch)

    def _finish(self, waiting: Callable[[], Iterator[Answer]]) -> list[Answer]:
        with _memory(self.options):
            return list(waiting())


@contextlib.contextmanager
def _memory(options: GenerateOptions) -> Iterator[None]:
    """Says in one line that a batch does not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"batch_size is {options.batch_size} and the devices' memory is too small for it: "
            "give a smaller one, or a larger model_parallel"
        ) from error
