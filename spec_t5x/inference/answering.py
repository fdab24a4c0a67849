"""A shard's inputs decoded: batches of about one length, a JSON line for each input, in order.

What a batch holds follows from the shard's inputs and the settings alone, and a sampled text
from the seed and its input's position: a shard has the same answers whenever, by whichever
process and after however many interruptions it is decoded.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generation, Generator
from spec_t5x.generation.left_out import Learned
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.sources import Item


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts of what was decoded."""

    inputs: int = 0
    errors: int = 0
    # Generated, end of sequence included.
    tokens: int = 0
    target_calls: int = 0
    # The same with the calls that ended rows were beside in.
    row_calls: int = 0
    # Tokens that these calls gave a sequence, or that they grew a search's hypotheses by.
    advance: float = 0.0

    def add(self, other: "Tally") -> None:
        """Adds another's counts."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def block_efficiency(self) -> float:
        """Generated tokens for each target call, over all sequences; 1 in plain decoding."""
        return self.advance / self.target_calls if self.target_calls else 1.0

    @property
    def occupancy(self) -> float:
        """The share of the rows in all target calls that had not ended."""
        return self.target_calls / self.row_calls if self.row_calls else 1.0


def tally_of(answers: Iterable[Answer], *, searched: bool = False) -> Tally:
    """The counts of some answers; ``searched`` where they are a beam search's."""
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


@dataclasses.dataclass(kw_only=True)
class Answerer:
    """A pair, its settings and its devices: inputs to lines of output."""

    generator: Generator
    options: GenerateOptions
    placement: Placement = Placement()
    # Why the draft was left out of the lines made last, where it mostly was.
    verdict: str | None = dataclasses.field(default=None, init=False)

    def lines(
        self, items: Sequence[Item], progress: Callable[[Tally], None] = lambda tally: None
    ) -> list[bytes]:
        """The line of each input, in order; ``progress`` is called after each batch.

        With gamma "auto" the pace starts again with every shard: its bytes are the same
        whenever it is decoded.

        Raises:
          InputError: a batch does not fit into the devices' memory.
        """
        by_index = {item.index: item for item in items}
        lines, run = {}, self.generator.run(self.options)

        counted = 0

        def record(indices: Iterable[int], answers: list[Answer]) -> None:
            nonlocal counted
            for index, answer in zip(indices, answers, strict=True):
                lines[index] = line_of(by_index[index], answer)
            tally = tally_of(answers, searched=self.options.beams > 0)
            tally.row_calls, counted = run.row_calls - counted, run.row_calls
            progress(tally)

        good, refused = self._prepared(items)
        record(refused.keys(), list(refused.values()))
        with self._on_devices():
            for indices, answers in run.answers([good], self.placement.batch):
                record(indices, answers)
        run.tell()
        self.verdict = run.verdict
        return [lines[item.index] for item in items]

    def learned(self, items: Sequence[Item]) -> Learned | None:
        """What a run of such inputs begins with; None if none of them can be decoded."""
        if self.generator.draft is None:
            return self.generator.memory.learned
        good, _ = self._prepared(items)
        with self._on_devices():
            for _, batch in self.generator.by_length(good, self.options):
                costs = self.generator.costs(self.placement.batch(batch), self.options)
                return Learned(costs=costs)
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
        return self.generator.fit(item.ids, item.text, self.options)

    def _prepared(
        self, items: Sequence[Item]
    ) -> tuple[list[tuple[int, str, list[int]]], dict[int, Answer]]:
        """Index, text and ids of those that can be decoded, and the others' errors by index."""
        good, refused = [], {}
        for item in items:
            try:
                good.append((item.index, item.text, self.ids(item)))
            except InputError as error:
                refused[item.index] = Answer(error=error)
        return good, refused

    @contextlib.contextmanager
    def _on_devices(self) -> Iterator[None]:
        """What is decoded within it is decoded on ``placement``; says what does not fit."""
        try:
            with self.placement.within():
                yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise InputError(
                f"batch_size is {self.options.batch_size}, which does not fit into the devices' "
                "memory: give a smaller one, or a larger model_parallel"
            ) from error


def line_of(item: Item, answer: Answer) -> bytes:
    """The line of JSON for an input.

    Args:
      item: the input.
      answer: its outputs, the best first, or why there are none.

    Returns:
      T5X's fields ``inputs`` (the texts, and what else the input came with) and
      ``prediction``, then those of ``spec-t5x generate --json`` of the best output; with
      several, all of them under ``decodes``. For an error its position and the reason.
    """
    task = {"task": item.task} if item.task else {}
    if answer.error is not None:
        place, number = item.place
        head = {"index": item.index, place: number, "error": str(answer.error)}
        return _encoded(head | task | {"inputs": item.fields})
    best, *others = answer
    values = {"index": item.index, **task, "inputs": item.fields, "prediction": best.output}
    values |= dataclasses.asdict(best)
    if others:
        values["decodes"] = [_without_input(generation) for generation in answer]
    return _encoded(values)


def error_of(line: bytes) -> str | None:
    """The error that a line reports: "line 8: the text is empty ..."; None for an answer."""
    # Cheap for the many lines that are answers: only a report has its error this early.
    if not re.match(rb'\{"index": \d+, "\w+": \d+, "error": ', line):
        return None
    values = json.loads(line)
    place = list(values)[1]
    return f"{place} {values[place]}: {values['error']}"


def _without_input(generation: Generation) -> dict[str, Any]:
    values = dataclasses.asdict(generation)
    del values["input"]
    return values


def _encoded(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot.
        return json.dumps(values).encode() + b"\n"
