"""Many inputs of some options: at gamma "auto" each batch at the pace of those before it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from spec_t5x.generation.answers import Answer, all_answered
from spec_t5x.generation.batches import Batch, prompt_lengths
from spec_t5x.generation.bursts import Answered, Bursts
from spec_t5x.generation.generate_options import GenerateOptions
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import OPTIMISM, Pace
from spec_t5x.machine.programs import Kept
from spec_t5x.names import AUTO

# Place among all inputs (which random numbers depend on), text and ids.
Input = tuple[int, str, list[int]]
# A batch that the device was set to work on.
Started = TypeVar("Started")
# Share of plain steps from which the draft counts as left out.
_LEFT_OUT = 0.8


@dataclasses.dataclass
class Run:
    """Batches of some options, decoded one after the other."""

    # A ``Generator``, which makes runs.
    generator: Any
    options: GenerateOptions
    # With gamma "auto": of the batch decoded last, on the device; None before the first one,
    # and where no draft can pay.
    pace: Pace | None = None
    # Of the sources that were decoded at a pace: each has a program of its own.
    _shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set, init=False)
    # The pace that was last looked at, and whether it takes plain steps.
    _judged: tuple[Pace | None, bool] = dataclasses.field(default=(None, False), init=False)
    # Target calls, times the rows that each was for.
    row_calls: int = dataclasses.field(default=0, init=False)
    # Plain steps that are not in the pace yet.
    _uncredited: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        if self.pace is None and self.options.repeats:
            self.pace = self.generator._paces.get(self.options)

    def start(self, batch: Batch) -> Callable[[], Iterator[Answer]]:
        """Sets the device to work; the answers are waited for by calling."""
        if self.options.beams:
            found = self.generator.search(batch, self.options)
            return functools.partial(self.generator.collect_beams, batch, found, self.options)
        if not self._drafts(batch):
            decoded = self.generator.plain().decode(batch, self.options)
            return functools.partial(self._credit, batch, decoded)
        return functools.partial(self.generator.collect, batch, self.decode(batch), self.options)

    def decoder(self, batch: Batch) -> Any:
        """The ``Generator`` for a batch: without its draft where that does not pay."""
        return self.generator if self._drafts(batch) else self.generator.plain()

    def finish(self, batch: Batch, decoded: Decoded) -> Answer:
        """The answer to the one input of a batch that ``decoder`` has decoded; ``remember``s."""
        if decoded.stats is None:
            answers = self._credit(batch, decoded)
        else:
            self.pace = decoded.pace
            answers = self.generator.collect(batch, decoded, self.options)
        (answer,) = all_answered(answers)
        self.remember()
        return answer

    @property
    def in_slots(self) -> bool:
        """Whether an input that has ended makes room for the next one.

        A search has no slots, and of one row nobody waits for another.
        """
        return self.options.batch_size > 1 and not self.options.beams

    def answers(
        self,
        windows: Iterable[Iterable[Input]],
        placed: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> Iterator[tuple[tuple[int, ...], list[Answer]]]:
        """The places and answers of inputs that have ended, while others are under way.

        Args:
          windows: inputs for ``Generator.by_length``, which sorts each window by itself.
          placed: puts a batch onto devices.
        """
        for finish in _one_ahead(self.started(windows, placed)):
            yield finish()

    def started(
        self,
        windows: Iterable[Iterable[Input]],
        placed: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> Iterator[Callable[[], Answered]]:
        """``answers``, each set going by the iterator and waited for by calling."""
        batches = (
            (places, placed(batch))
            for window in windows
            for places, batch in self.generator.by_length(window, self.options)
        )
        return self._bursts(batches) if self.in_slots else itertools.starmap(self._alone, batches)

    def _alone(self, places: tuple[int, ...], batch: Batch) -> Callable[[], Answered]:
        """A batch that runs until its last row has ended."""
        finish = self.start(batch)

        def counted() -> Answered:
            answers = list(finish())
            good = itertools.chain.from_iterable(a for a in answers if a.error is None)
            calls = max((one.target_calls for one in good), default=0)
            self._count(calls)
            return places, answers

        return counted

    def _count(self, calls: int) -> None:
        # A search's calls are for all hypotheses of an input.
        each = 1 if self.options.beams else self.options.num_decodes
        self.row_calls += calls * self.options.batch_size * each

    def _bursts(
        self, batches: Iterable[tuple[tuple[int, ...], Batch]]
    ) -> Iterator[Callable[[], Answered]]:
        """What ends in each burst. A batch that no other follows needs no slots."""
        bursts, waiting = None, None
        for places, batch in batches:
            if bursts is None and waiting is not None:
                bursts, waiting = self._begun(*waiting), None
            if bursts is None:
                waiting = places, batch
            elif bursts.takes(batch) and not (bursts.is_plain and self._drafts(batch)):
                yield self._counted(bursts, bursts.add(places, batch))
            else:
                yield self._counted(bursts, bursts.drain())
                bursts, waiting = None, (places, batch)
        if bursts is not None:
            yield self._counted(bursts, bursts.drain())
        elif waiting is not None:
            yield self._alone(*waiting)

    def _begun(self, places: tuple[int, ...], batch: Batch) -> Bursts:
        """Slots of the first inputs, with the draft unless it does not pay."""
        if self._drafts(batch):
            return Bursts(self.generator, self.options, places, batch, self.pace)
        return Bursts(self.generator.plain(), self.options, places, batch)

    def _drafts(self, batch: Batch) -> bool:
        """Whether inputs that are to be decoded now are decoded with the draft."""
        if self.generator.draft is None:
            return False
        if self.options.gamma != AUTO:
            return True
        if self._leaves_out_the_draft(batch):
            return False
        if self.pace is None:
            self.pace = self.generator.pace(batch, self.options)
        return self.pace is not None

    def _counted(self, bursts: Bursts, finish: Callable[[], Answered]) -> Callable[[], Answered]:
        """A burst whose plain steps pay for looking at the draft."""
        if not bursts.is_plain:
            self.pace = bursts.pace

        def counted() -> Answered:
            before = bursts.calls
            answered = finish()
            calls = bursts.calls - before
            self._count(calls)
            if bursts.is_plain:
                self._uncredited += calls
            return answered

        return counted

    def _leaves_out_the_draft(self, batch: Batch) -> bool:
        """Whether plain decoding is what the pace would do, in a program still to be made.

        To make or load one with the draft takes longer than one without.
        """
        shape = batch.tokens.shape
        if self.pace is not None and shape not in self._shapes:
            if self._uncredited:
                self.pace = _without_the_draft(self.pace, np.int32(self._uncredited))
                self._uncredited = 0
            if self._is_plain():
                return True
        self._shapes.add(shape)
        return False

    def _credit(self, batch: Batch, decoded: Decoded) -> Iterator[Answer]:
        """``Generator.collect`` of plain decoding, whose steps pay for looking at the draft."""
        decoded = jax.device_get(decoded)
        self._uncredited += int(np.max(decoded.lengths)) - min(prompt_lengths(batch))
        yield from self.generator.collect(batch, decoded, self.options)

    def _is_plain(self) -> bool:
        """Whether the pace would take a plain step; waits for the batch that it is of."""
        if self._judged[0] is not self.pace:
            self._judged = self.pace, not _limit(self.pace)
        return self._judged[1]

    def decode(self, batch: Batch) -> Decoded:
        """``Generator.decode`` at this run's pace."""
        decoded = self.generator.decode(batch, self.options, self.pace)
        self.pace = decoded.pace
        return decoded

    def remember(self) -> None:
        """Begins the generator's next run of these options at the pace of this one."""
        if self.pace is not None and self.options.repeats:
            self.generator._paces[self.options] = self.pace

    @property
    def verdict(self) -> str | None:
        """Why the draft was left out, where it mostly was."""
        costs = self.generator._costs.get(self.options)
        if costs is None:
            return None
        if costs.needed > OPTIMISM:
            at = f"at batch size {self.options.batch_size} {costs.where_it_pays}"
            return f"the draft was left out: {at}"
        if self.pace is None:
            return None
        pace = jax.device_get(self.pace)
        share = pace.plain_steps / max(pace.plain_steps + pace.iterations, 1)
        if share < _LEFT_OUT:
            return None
        if not pace.iterations:
            return f"the draft was left out: {costs.where_it_pays}"
        return (
            f"the draft was left out of {share:.0%} of the steps: {costs.where_it_pays}, and "
            f"{float(pace.rates[0]):.0%} of its first tokens were accepted"
        )


def _one_ahead(started: Iterable[Started]) -> Iterator[Started]:
    """Yields each once the next one is started, so that the device is never idle."""
    waiting: list[Started] = []
    for batch in started:
        yield from waiting
        waiting = [batch]
    yield from waiting


_limit = Kept(jax.jit(Pace.limit), ())
_without_the_draft = Kept(jax.jit(Pace.without_the_draft), ())
