"""Batches in, answers out, and the device never idle.

    submit    sets the device to work on a batch
    collect   yields the answers that are there while what came last is under way
    close     decodes what is left

A batch of several rows goes into slots (``loops/refill.py``), where an input that has ended makes
room for the next one. With gamma "auto" each batch is decoded at the pace of those before it.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import programs
from spec_t5x.generation.answers import Answer, all_answered
from spec_t5x.generation.batches import Batch, prompt_lengths
from spec_t5x.generation.decoder import BatchDecoder
from spec_t5x.generation.generate_options import GenerateOptions
from spec_t5x.loops import refill
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import OPTIMISM, Costs, Pace
from spec_t5x.loops.speculative import Iteration
from spec_t5x.names import AUTO
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.identity import identity, params_digest
from spec_t5x.tuning.store import Store

# The places of inputs that have ended, and their answers.
Answered = tuple[tuple[int, ...], list[Answer]]
# Share of plain steps from which the draft counts as left out.
_LEFT_OUT = 0.8


class Engine:
    """Decodes batches of some options, one after the other."""

    def __init__(
        self,
        decoder: BatchDecoder,
        options: GenerateOptions,
        costs: dict[GenerateOptions, Costs],
        pace: Pace | None = None,
    ):
        """Begins with nothing under way.

        Args:
          decoder: the models.
          options: how to decode.
          costs: of speculation with some options; measured ones are added.
          pace: with gamma "auto" that of earlier batches; None starts a new one.
        """
        self.decoder, self.options, self.pace = decoder, options, pace
        # Whether an input that has ended makes room for the next one: a search has no slots, and of
        # one row nobody waits for another.
        self.in_slots = options.batch_size > 1 and not options.beams
        # Target calls, times the rows that each was for.
        self.row_calls = 0
        self._costs = costs
        # What is waited for by calling.
        self.under_way: collections.deque[Callable[[], Answered]] = collections.deque()
        # A batch that no other follows needs no slots.
        self._waiting: tuple[tuple[int, ...], Batch] | None = None
        self._slots: _Slots | None = None
        # Sources that were decoded at a pace: each shape has a program of its own.
        self._shapes: set[tuple[int, ...]] = set()
        # Plain steps, by programs without the draft, that the pace does not know of yet.
        self._uncredited = 0
        # The pace that was last looked at, and whether it takes plain steps.
        self._judged: tuple[Pace | None, bool] = (None, False)

    def submit(self, places: tuple[int, ...], batch: Batch) -> None:
        """Sets the device to work on a batch; ``places`` are those of its inputs among all."""
        if self.in_slots:
            if self._slots is None and self._waiting is not None:
                decoder = self._decoder(self._waiting[1])
                self._slots = _Slots(decoder, self.options, *self._waiting, self.pace)
                self._waiting = None
            if self._slots is None:
                self._waiting = places, batch
            elif self._slots.takes(batch) and not (self._slots.is_plain and self._drafts(batch)):
                self._keep(self._slots, self._slots.burst(places, batch))
            else:
                self._keep(self._slots, self._slots.burst())
                self._slots, self._waiting = None, (places, batch)
        elif self.options.beams:
            found = self.decoder.search(batch, self.options)
            answers = self.decoder.collect_beams(batch, found, self.options)
            self.under_way.append(functools.partial(self._counted, places, answers))
        else:
            answers = self._answers(batch, self.decode(batch))
            self.under_way.append(functools.partial(self._counted, places, answers))

    def collect(self) -> list[Answered]:
        """Gives what was submitted before the last batch, which stays under way."""
        return [self.under_way.popleft()() for _ in range(len(self.under_way) - 1)]

    def close(self) -> Iterator[Answered]:
        """Decodes what waits, and yields all that is left."""
        if self._slots is not None:
            self._keep(self._slots, self._slots.burst())
        elif self._waiting is not None:
            self.in_slots = False
            self.submit(*self._waiting)
        self._slots = self._waiting = None
        while self.under_way:
            yield self.under_way.popleft()()

    def answers(self, batches: Iterable[tuple[tuple[int, ...], Batch]]) -> Iterator[Answered]:
        """Yields the answers to batches; each batch is under way before the last one is awaited."""
        for places, batch in batches:
            self.submit(places, batch)
            yield from self.collect()
        yield from self.close()

    def decode(self, batch: Batch) -> Decoded:
        """Decodes a batch on the device until its last row has ended; returns at once."""
        decoder = self._decoder(batch)
        decoded = decoder.decode(batch, self.options, self.pace)
        self._took(decoder, decoded)
        return decoded

    def steps(self, batch: Batch) -> Generator[Iteration, bool, Answer]:
        """``decode`` of one input, driven from the host; the return value is the answer.

        The prefill has run when the call returns. Sent True, it ends the input where it is.
        """
        decoder = self._decoder(batch)
        steps = decoder.steps(batch, self.options, self.pace)

        def run() -> Generator[Iteration, bool, Answer]:
            decoded = yield from steps
            self._took(decoder, decoded)
            if decoder.draft is None:
                decoded = decoded.replace(stats=None)
            (answer,) = all_answered(self._answers(batch, decoded))
            return answer

        return run()

    def _decoder(self, batch: Batch) -> BatchDecoder:
        """Gives the models for a batch: without the draft where it does not pay."""
        return self.decoder if self._drafts(batch) else self.decoder.plain()

    def _took(self, decoder: BatchDecoder, decoded: Decoded) -> None:
        """Takes the pace that a batch ended at."""
        if decoder.draft is not None:
            self.pace = decoded.pace

    def _answers(self, batch: Batch, decoded: Decoded) -> Iterator[Answer]:
        """Yields the answers; plain steps are kept for the pace."""
        if decoded.stats is None:
            decoded = jax.device_get(decoded)
            self._uncredited += int(np.max(decoded.lengths)) - min(prompt_lengths(batch))
        yield from self.decoder.collect(batch, decoded, self.options)

    def _counted(self, places: tuple[int, ...], answers: Iterable[Answer]) -> Answered:
        """Waits for a batch that has run until its last row had ended."""
        answers = list(answers)
        good = itertools.chain.from_iterable(a for a in answers if a.error is None)
        # A search's calls are for all hypotheses of an input.
        each = 1 if self.options.beams else self.options.num_decodes
        calls = max((one.target_calls for one in good), default=0)
        self.row_calls += calls * self.options.batch_size * each
        return places, answers

    def _keep(self, held: "_Slots", ended: refill.Ended) -> None:
        """Keeps a burst that has begun under way."""
        if not held.is_plain:
            self.pace = held.pace

        def counted() -> Answered:
            calls, places, answers = held.collected(ended)
            self.row_calls += calls * self.options.batch_size * self.options.num_decodes
            if held.is_plain:
                self._uncredited += calls
            return places, answers

        self.under_way.append(counted)

    # What pays

    def costs(self, batch: Batch) -> Costs:
        """Gives the costs of speculation for batches like this one: measured once, and remembered.

        Raises:
          InputError: there is no draft, or the batch cannot be decoded.
        """
        if self.decoder.draft is None:
            raise InputError("there is no draft whose costs could be measured: give one")
        if self.options not in self._costs:
            self._costs[self.options] = self._measured_costs(batch)
        return self._costs[self.options]

    def _measured_costs(self, batch: Batch) -> Costs:
        decoder, options = self.decoder, self.options
        largest = costs_lib.largest_limit(decoder.draft, options.make_verifier())
        measure = functools.partial(
            costs_lib.measure,
            decoder.target,
            decoder.draft,
            batch.tokens,
            decoder.sampling(options),
            decoder.loop(batch, options, largest),
        )
        key = identity(
            target=params_digest(decoder.target),
            draft=params_digest(decoder.draft),
            settings={**options.costly, "max_source_len": decoder.max_source_len},
        )
        return costs_lib.remembered(key, measure, Store.of_user())

    def first_pace(self, batch: Batch) -> Pace | None:
        """Gives the pace to begin with where gamma is "auto"; None where the draft cannot pay."""
        costs = self.costs(batch)
        return Pace.start(costs) if costs.needed <= OPTIMISM else None

    def _drafts(self, batch: Batch) -> bool:
        """Tells whether inputs that are to be decoded now are decoded with the draft."""
        if self.decoder.draft is None or self.options.gamma != AUTO:
            return self.decoder.draft is not None
        if self._leaves_out_the_draft(batch):
            return False
        if self.pace is None:
            self.pace = self.first_pace(batch)
        return self.pace is not None

    def _leaves_out_the_draft(self, batch: Batch) -> bool:
        """Tells whether the pace would decode plainly, in a program still to be made.

        To make or load one with the draft takes longer than one without.
        """
        shape = batch.tokens.shape
        if self.pace is not None and shape not in self._shapes:
            if self._uncredited:
                steps, self._uncredited = np.int32(self._uncredited), 0
                self.pace = programs.without_the_draft(self.pace, steps)
            if self._judged[0] is not self.pace:
                # Waits for the batch that the pace is of.
                self._judged = self.pace, not programs.limit(self.pace)
            if self._judged[1]:
                return True
        self._shapes.add(shape)
        return False

    @property
    def verdict(self) -> str | None:
        """The reason why the draft was left out, where it mostly was."""
        costs = self._costs.get(self.options)
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


class _Slots:
    """Inputs in slots (``loops/refill.py``), to which groups of others are added."""

    def __init__(
        self,
        decoder: BatchDecoder,
        options: GenerateOptions,
        places: Sequence[int],
        batch: Batch,
        pace: Pace | None = None,
    ):
        """Puts the first inputs, which have the longest sources and prompts, into slots.

        ``pace`` is what a draft is asked at; None is ``options.gamma`` in every iteration.
        """
        self._decoder, self._options = decoder, options
        self.pace = None if decoder.draft is None else pace
        gamma = 0 if self.is_plain else options.gamma
        self._loop = decoder.loop(batch, options, gamma if self.pace is None else self.pace.largest)
        # The text of each input that has not ended, and the tokens of its prompt.
        self._inputs: dict[int, tuple[str, int]] = {}
        self._first = batch
        self._slots = refill.fill(self._prepared(places, batch, waits=False), self.pace)
        self._group: refill.Members | None = None

    @property
    def is_plain(self) -> bool:
        """The absence of a draft."""
        return self._decoder.draft is None

    def takes(self, batch: Batch) -> bool:
        """Tells whether no input of the batch is longer than those that were the first."""
        first = self._first
        return (
            batch.tokens.shape[1] <= first.tokens.shape[1]
            and batch.prompts.shape[1] <= first.prompts.shape[1]
        )

    def burst(self, places: Sequence[int] = (), batch: Batch | None = None) -> refill.Ended:
        """Sets the device to decode until all of a batch have slots; without one, to the end."""
        if batch is not None or self._group is None:
            self._group = self._prepared(places, batch or self._first, waits=True)
        if batch is None:
            nobody = np.full_like(self._group.places, refill.EMPTY_SLOT)
            self._group = self._group.replace(places=nobody)
        self._slots, ended = programs.burst(
            *(self._decoder.target, self._decoder.draft),
            self._slots,
            self._group,
            self._decoder.sampling(self._options),
            np.bool_(batch is None),
            loop=self._loop,
        )
        if self.pace is not None:
            self.pace = ended.decoded.pace
        return ended

    def _prepared(self, places: Sequence[int], batch: Batch, *, waits: bool) -> refill.Members:
        for place, text, skipped in zip(places, batch.texts, prompt_lengths(batch), strict=False):
            self._inputs[place] = text, skipped
        numbers = np.full(batch.tokens.shape[0], refill.EMPTY_SLOT, np.int32)
        numbers[: len(places)] = places
        members = programs.prepare_slots(
            *(self._decoder.target, self._decoder.draft),
            *(batch.tokens, batch.prompts, batch.keys, batch.max_decode_steps, numbers),
            loop=self._loop,
            paced=self.pace is not None,
            waits=waits,
        )
        # Of the host, as those of ``drain``: for another sharding a burst is compiled again.
        return members.replace(places=numbers) if waits else members

    def collected(self, ended: refill.Ended) -> tuple[int, tuple[int, ...], list[Answer]]:
        """Waits for a burst: its target calls, and the places and answers of what has ended."""
        # The pace stays on the device.
        ended = jax.device_get(ended.replace(decoded=ended.decoded.replace(pace=None)))
        rows = [row for row, place in enumerate(ended.places) if place != refill.EMPTY_SLOT]
        places = tuple(int(ended.places[row]) for row in rows)
        answers = [
            self._decoder.answer(*self._inputs.pop(place), ended.decoded, row, self._options)
            for place, row in zip(places, rows, strict=True)
        ]
        return int(ended.calls), places, answers


def bytes_needed(decoder: BatchDecoder, options: GenerateOptions, batch: Batch) -> int:
    """Counts the bytes of slots and a group of this size, and of a call's logits; weights apart."""
    gamma = 0
    if decoder.draft is not None:
        gamma = decoder.draft.traits.max_worthwhile if options.gamma == AUTO else options.gamma
    places = np.zeros(len(batch.tokens), np.int32)
    inputs = batch.tokens, batch.prompts, batch.keys, batch.max_decode_steps, places
    loop = decoder.loop(batch, options, gamma)

    def hold(target, draft, *inputs) -> list[jax.Array]:
        prepare = functools.partial(refill.prepare, target, draft, *inputs, loop=loop)
        return jax.tree.leaves([prepare(waits=False), prepare(waits=True)])

    held = jax.eval_shape(hold, decoder.target, decoder.draft, *inputs)
    rows = len(batch.tokens) * options.num_decodes
    logits = 4 * rows * loop.num_nodes * decoder.target.vocab_size
    # And what is sampled from, of either model.
    logits *= 1 if options.sampling().greedy else 3
    return logits + sum(leaf.size * leaf.dtype.itemsize for leaf in held)
