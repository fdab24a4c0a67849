"""Decoding of shards (numbered runs of consecutive inputs): a JSON line for each input, in order.

An input's line depends on the input, the settings, its position and, with gamma "auto", the rest of
its shard. So a shard's lines do not depend on when it is decoded, by which process, or after how
many interruptions.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from spec_t5x.data.text_files import json_line
from spec_t5x.errors import InputError, is_out_of_memory
from spec_t5x.generation import Answer, GenerateOptions, Generator
from spec_t5x.generation.batches import Batch, Input
from spec_t5x.generation.engine import Engine
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.sources import Item
from spec_t5x.loops.pace import Costs
from spec_t5x.names import AUTO

# Folded into the keys of the inputs that ``learned`` decodes; no length of a text is as large.
_LEARNING = 0x6C656172


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts over inputs; ``errors`` counts the inputs without an answer."""

    inputs: int = 0
    errors: int = 0
    # Generated tokens, end of sequence included.
    tokens: int = 0
    target_calls: int = 0
    # Sum over all target calls of the rows in the batch, ended rows included.
    row_calls: int = 0
    # Tokens that target calls appended to a sequence; in a beam search, steps that they made.
    advance: float = 0.0

    def add(self, other: "Tally") -> None:
        """Adds the counts of another tally."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def block_efficiency(self) -> float:
        """Generated tokens for each target call, over all sequences; 1 in plain decoding."""
        return self.advance / self.target_calls if self.target_calls else 1.0

    @property
    def occupancy(self) -> float:
        """Share of rows that had not ended, over all target calls."""
        return self.target_calls / self.row_calls if self.row_calls else 1.0


def tally_of(answers: Iterable[Answer], *, searched: bool = False, given: int = 0) -> Tally:
    """Counts ``answers``, except ``row_calls``; ``searched`` if a beam search has made them.

    The first ``given`` ids of an output are its prefix.
    """
    tally = Tally()
    for answer in answers:
        tally.inputs += 1
        if answer.error is not None:
            tally.errors += 1
            continue
        tally.tokens += sum(len(generation.output_ids) - given for generation in answer)
        # All hypotheses of a search share its calls, which are counted once.
        for generation in list(answer)[: 1 if searched else None]:
            tally.target_calls += generation.target_calls
            tally.advance += generation.target_calls * (generation.block_efficiency or 1.0)
    return tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """Measurements of a draft, made once for all workers of a run."""

    costs: Costs
    # Tokens to propose in every iteration of the run, if outputs depend on their number; None
    # lets the pace choose it.
    gamma: int | None = None

    @classmethod
    def parse(cls, values: Any) -> "Learned":
        """Makes an object of its ``dataclasses.asdict``, read back from JSON."""
        return cls(**{**values, "costs": Costs.parse(values["costs"])})


@dataclasses.dataclass(kw_only=True)
class Answerer:
    """Decoder of inputs to lines of JSON: the models, the options and the devices."""

    generator: Generator
    options: GenerateOptions
    placement: Placement = Placement()
    # The reason why most steps of the last shards left the draft out; None if they did not.
    verdict: str | None = dataclasses.field(default=None, init=False)

    def shards(
        self,
        shards: Iterable[tuple[int, Sequence[Item]]],
        progress: Callable[[Tally], None] = lambda tally: None,
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Decodes shards; yields each one's number and its inputs' lines, in order.

        Inputs of the next shard, which is read ahead, take over the rows of inputs that have ended;
        ``progress`` is called with the counts of these. With gamma "auto" each shard begins with a
        new pace and batch, so that its lines depend on no other shard. Raises ``InputError`` if a
        batch does not fit into the devices' memory.
        """
        for some in ([one] for one in shards) if self.options.gamma == AUTO else (shards,):
            engine = self.generator.engine(self.options)
            yield from self._decoded(engine, some, progress)
            self.verdict = engine.verdict

    def _decoded(
        self,
        engine: Engine,
        shards: Iterable[tuple[int, Sequence[Item]]],
        progress: Callable[[Tally], None],
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yields the lines of each shard once all of its inputs have ended."""
        # Inputs and finished lines by index, of each shard by number.
        begun: dict[int, tuple[Sequence[Item], dict[int, bytes]]] = {}
        # Shard and input of each index whose line is missing.
        left: dict[int, tuple[int, Item]] = {}
        counted = 0

        def batches() -> Iterator[tuple[tuple[int, ...], Batch]]:
            for shard, items in shards:
                begun[shard] = items, {}
                left.update((item.index, (shard, item)) for item in items)
                good, refused = self._prepared(items)
                record(refused.keys(), list(refused.values()))
                for places, batch in self.generator.by_length(good, self.options):
                    yield places, self.placement.batch(batch)

        def record(indices: Iterable[int], answers: list[Answer]) -> None:
            nonlocal counted
            for index, answer in zip(indices, answers, strict=True):
                shard, item = left.pop(index)
                begun[shard][1][index] = line_of(item, answer)
            given = len(self.generator.prefix_ids(self.options))
            tally = tally_of(answers, searched=self.options.beams > 0, given=given)
            tally.row_calls, counted = engine.row_calls - counted, engine.row_calls
            progress(tally)

        with self._on_devices():
            for indices, answers in engine.answers(batches()):
                record(indices, answers)
                for shard, (items, lines) in list(begun.items()):
                    if len(lines) == len(items):
                        del begun[shard]
                        yield shard, [lines[item.index] for item in items]

    def learned(self, items: Sequence[Item]) -> Learned | None:
        """Measures the costs of speculation on these inputs; None if none can be decoded.

        If outputs depend on the number of proposed tokens, also decodes a batch to find the fastest
        number, which the whole run then keeps. It decodes with other random numbers than the run:
        a number that depended on the run's would change the law of its outputs.
        """
        good, _ = self._prepared(items)
        with self._on_devices():
            for _, batch in self.generator.by_length(good, self.options):
                batch = self.placement.batch(batch)
                engine = self.generator.engine(self.options)
                costs = engine.costs(batch)
                if self.options.repeats:
                    return Learned(costs=costs)
                keys = jax.vmap(jax.random.fold_in, (0, None))(batch.keys, _LEARNING)
                pace = engine.decode(dataclasses.replace(batch, keys=keys)).pace
                return Learned(costs=costs, gamma=0 if pace is None else pace.best_limit)
        return None

    def assume(self, learned: Learned) -> None:
        """Sets the costs, and gamma if it is fixed; gamma 0 also removes the draft."""
        self.generator.assume(self.options, learned.costs)
        if learned.gamma is not None:
            # A pace's limit may exceed an output, and be less than a tree's widths.
            gamma = min(learned.gamma, self.generator.max_decode_len(self.options))
            widths = self.options.widths[: gamma or None]
            self.options = dataclasses.replace(self.options, gamma=gamma, widths=widths)
        if learned.gamma == 0:
            self.generator = self.generator.plain()

    def ids(self, item: Item) -> list[int]:
        """Returns an input's ids as the model takes them; raises ``InputError`` if it cannot."""
        if item.error:
            raise InputError(item.error)
        if item.ids is None:
            return self.generator.tokenize(item.text, self.options)
        if not item.ids:
            raise InputError("the example has no ids: give at least one word")
        if (largest := max(item.ids)) >= (size := self.generator.target.vocab_size):
            raise InputError(
                f"the example has the id {largest} and the model {size} ids: give a task with the "
                "model's vocabulary"
            )
        return self.generator.fit(item.ids, item.text, self.options)

    def _prepared(self, items: Sequence[Item]) -> tuple[list[Input], dict[int, Answer]]:
        """Returns the inputs that can be decoded, and the others' errors by index."""
        good, refused = [], {}
        for item in items:
            try:
                good.append((item.index, item.text, self.ids(item)))
            except InputError as error:
                refused[item.index] = Answer(error=error)
        return good, refused

    @contextlib.contextmanager
    def _on_devices(self) -> Iterator[None]:
        """Uses ``placement`` within the ``with``; turns exhausted memory into an ``InputError``."""
        try:
            with self.placement.within():
                yield
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"batch_size is {self.options.batch_size}, which does not fit into the devices' "
                "memory: give a smaller one, or a larger model_parallel"
            ) from error


def line_of(item: Item, answer: Answer) -> bytes:
    """Returns the line of JSON for an input and its answer, in UTF-8.

    The line has the index, T5X's fields ``inputs`` (``item.fields``) and ``prediction`` (the best
    output), and the fields of the best ``Generation``; several outputs are all in ``decodes``. For
    an error it has the index, the place in the source, ``error`` and ``inputs``.
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
        values["decodes"] = [dataclasses.asdict(generation) for generation in answer]
        for decode in values["decodes"]:
            del decode["input"]
    return _encoded(values)


def error_of(line: bytes) -> str | None:
    """Returns the error in a line, such as "line 8: the text is empty …"; None for an answer."""
    # Most lines are answers, which this regular expression rejects without parsing JSON.
    if not re.match(rb'\{"index": \d+, "\w+": \d+, "error": ', line):
        return None
    values = json.loads(line)
    place = list(values)[1]
    return f"{place} {values[place]}: {values['error']}"


def _encoded(values: dict[str, Any]) -> bytes:
    return json_line(values).encode() + b"\n"
