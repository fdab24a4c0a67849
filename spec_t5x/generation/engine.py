"""Engine of decoding, which takes batches, returns answers and keeps the device busy.

    submit    starts decoding a batch, or queues it
    collect   returns the answers of all batches under way but the last, which the device decodes
    close     decodes queued batches and returns all remaining answers

Batches of several rows are decoded in slots (``loops/refill.py``); a *burst* decodes until all
inputs of a batch have had a slot. With gamma "auto" a batch continues the pace of earlier ones.
"""

import collections
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation.answers import Answer
from spec_t5x.generation.batches import Batch, bucket, prompt_lengths
from spec_t5x.generation.decoder import BatchDecoder
from spec_t5x.loops import refill
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import OPTIMISM, Costs, Pace
from spec_t5x.loops.speculative import Iteration
from spec_t5x.machine.compilation_cache import user_cache
from spec_t5x.options import GenerateOptions
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.store import Store, code_digest, identity, params_digest
from spec_t5x.verifiers import largest_limit

# Places (indices among all inputs) of inputs that have ended, and their answers.
Answered = tuple[tuple[int, ...], list[Answer]]
# Share of plain steps from which ``verdict`` says that the draft was left out.
_LEFT_OUT = 0.8
# Held by the thread that measures: others would slow it, and most need the same costs.
_MEASURING = threading.Lock()
# Options whose value a step's cost depends on; ``costly`` adds others.
_COSTLY = (
    *("batch_size", "no_repeat_ngram_size", "num_decodes", "rescale_log_probs"),
    *("verifier", "widths"),
)


class Engine:
    """Decoding of batch after batch with the same options."""

    def __init__(
        self,
        decoder: BatchDecoder,
        options: GenerateOptions,
        costs: dict[tuple, Costs],
        paces: dict[tuple, Pace | None] | None = None,
    ):
        """Makes an engine without batches.

        Args:
          costs: costs of speculation by ``costly`` options; method ``costs`` adds measured ones.
          paces: with gamma "auto" those of earlier batches, by ``costly`` options; used and
            updated unless outputs depend on the pace.
        """
        self.decoder, self.options = decoder, options
        resumes = paces is not None and decoder.follows_pace(options) and options.repeats
        self._paces = paces if resumes else {}
        self._costly = costly(options)
        self.pace = self._paces.get(self._costly)
        # True if batches are decoded in slots. A beam search has none, and a single row makes no
        # other row wait.
        self.in_slots = options.batch_size > 1 and not options.beams
        # Rows of all target calls so far, ended ones and padding included.
        self.row_calls = 0
        self._costs = costs
        # Functions that wait for a batch or burst on the device and return its answers.
        self.under_way: collections.deque[Callable[[], Answered]] = collections.deque()
        # Queued until the next batch is submitted: a batch that no other follows needs no slots.
        self._waiting: tuple[tuple[int, ...], Batch] | None = None
        self._slots: _Slots | None = None

    def submit(self, places: tuple[int, ...], batch: Batch) -> None:
        """Starts decoding a batch, or queues it; ``places`` are its inputs' indices among all."""
        if self.in_slots:
            if self._waiting is not None:
                decoder = self._for(self._waiting[1])
                self._slots = _Slots(decoder, self.options, self.pace, *self._waiting)
                self._waiting = None
            if self._slots is not None and self._slots.takes(batch):
                self._start_burst(places, batch)
                return
            if self._slots is not None:
                self._start_burst()
            self._slots, self._waiting = None, (places, batch)
            return
        if self.options.beams:
            found = self.decoder.search(batch, self.options)
            answers = self.decoder.collect_beams(batch, found, self.options)
        else:
            answers = self.decoder.collect(batch, self.decode(batch), self.options)
        self.under_way.append(functools.partial(self._counted, places, answers))

    def collect(self) -> list[Answered]:
        """Waits for all batches and bursts under way but the last, and returns their answers."""
        return [self.under_way.popleft()() for _ in range(len(self.under_way) - 1)]

    def close(self) -> Iterator[Answered]:
        """Decodes a queued batch, and yields all remaining answers."""
        if self._slots is not None:
            self._start_burst()
        elif self._waiting is not None:
            self.in_slots = False
            self.submit(*self._waiting)
        self._slots = self._waiting = None
        while self.under_way:
            yield self.under_way.popleft()()
        self._paces[self._costly] = self.pace

    def answers(self, batches: Iterable[tuple[tuple[int, ...], Batch]]) -> Iterator[Answered]:
        """Yields the answers to batches; a batch is submitted before the one before is awaited.

        The last group is empty, for a caller whose last inputs have errors.
        """
        for places, batch in batches:
            self.submit(places, batch)
            yield from self.collect()
        yield from self.close()
        yield (), []

    def decode(self, batch: Batch) -> Decoded:
        """Starts decoding a batch, without slots, and returns arrays that the device will fill."""
        decoded = self._for(batch).decode(batch, self.options, self.pace)
        self.pace = decoded.pace
        return decoded

    def steps(self, batch: Batch) -> Generator[Iteration, bool, Answer]:
        """Decodes one input from the host: yields its iterations and returns the answer.

        The prefill has run when the call returns. If True is sent, the input ends there.
        """
        decoder = self._for(batch)
        steps = decoder.steps(batch, self.options, self.pace)

        def run() -> Generator[Iteration, bool, Answer]:
            decoded = yield from steps
            self.pace = self._paces[self._costly] = decoded.pace
            if decoder.draft is None:
                decoded = decoded.replace(stats=None)
            (answer,) = decoder.collect(batch, decoded, self.options)
            return answer

        return run()

    def _counted(self, places: tuple[int, ...], answers: Iterable[Answer]) -> Answered:
        """Waits for a batch's answers, and adds its calls, times all rows, to ``row_calls``."""
        answers = list(answers)
        good = itertools.chain.from_iterable(a for a in answers if a.error is None)
        # A search's calls are for all hypotheses of an input.
        each = 1 if self.options.beams else self.options.num_decodes
        calls = max((one.target_calls for one in good), default=0)
        self.row_calls += calls * self.options.batch_size * each
        return places, answers

    def _start_burst(self, places: tuple[int, ...] = (), batch: Batch | None = None) -> None:
        """Starts a burst of the slots with a batch or, without one, the last."""
        slots = self._slots
        ended = slots.burst(places, batch)
        self.pace = slots.pace

        def counted() -> Answered:
            calls, places, answers = slots.collected(ended)
            self.row_calls += calls * self.options.batch_size * self.options.num_decodes
            return places, answers

        self.under_way.append(counted)

    # The draft's costs

    def costs(self, batch: Batch) -> Costs:
        """Returns the costs of speculation with these options, stored or timed with ``batch``.

        Raises ``InputError`` if there is no draft, or the batch cannot be decoded.
        """
        if self.decoder.draft is None:
            raise InputError("there is no draft whose costs could be measured: give one")
        with _MEASURING:
            if self._costly not in self._costs:
                self._costs[self._costly] = self._measured(batch, dict(self._costly))
        return self._costs[self._costly]

    def _measured(self, batch: Batch, settings: dict[str, object]) -> Costs:
        decoder, verifier = self.decoder, self.options.make_verifier()
        models = decoder.target, decoder.draft
        largest = largest_limit(verifier, decoder.draft.traits.max_worthwhile)
        loop = decoder.loop(batch, self.options, largest)
        given = *models, batch.tokens, decoder.sampling(self.options), loop
        key = identity(
            target=params_digest(decoder.target),
            draft=params_digest(decoder.draft),
            code=code_digest(*models, verifier),
            settings={**settings, "max_source_len": decoder.max_source_len},
        )
        store = Store(user_cache() / "costs")
        return costs_lib.remembered(key, lambda: costs_lib.measure(*given), store)

    def first_pace(self, batch: Batch) -> Pace | None:
        """Returns the pace of a first batch with gamma "auto"; None if the draft cannot pay."""
        costs = self.costs(batch)
        return Pace.start(costs) if costs.needed <= OPTIMISM else None

    def _for(self, batch: Batch) -> BatchDecoder:
        """Returns the models for a batch; gamma "auto" starts a pace or omits a useless draft."""
        if not self.decoder.follows_pace(self.options):
            return self.decoder
        if self.pace is None:
            self.pace = self.first_pace(batch)
        return self.decoder.plain() if self.pace is None else self.decoder

    @property
    def verdict(self) -> str | None:
        """The reason why most steps had no draft, for a message; None if they had one."""
        if not self.decoder.follows_pace(self.options):
            return None
        if self.options.beams:
            return "the draft was left out: a beam search drafts if gamma is a number"
        costs = self._costs.get(self._costly)
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
        message = f"the draft was left out of {share:.0%} of the steps: {costs.where_it_pays}"
        accepted, reached = pace.counts[:2, 0]
        # The counts are those since the last look, and ``needed`` does not include the prefill.
        if not reached or accepted / reached >= costs.needed:
            return message
        return f"{message}, and {accepted / reached:.0%} of its first tokens saved a step"


def costly(options: GenerateOptions) -> tuple[tuple[str, object], ...]:
    """Returns names and values of the options that the time of a step depends on."""
    values, sampling = {name: getattr(options, name) for name in _COSTLY}, options.sampling()
    # Only whether these are set: measuring the costs of each new number would take seconds.
    values |= {"top_k": sampling.top_k is not None, "top_p": sampling.top_p is not None}
    values["repetition_penalty"] = options.repetition_penalty and options.repetition_penalty != 1
    # Rounded as in ``BatchDecoder.room``: similar limits share a program.
    room = options.max_decode_len and bucket(options.max_decode_len, sys.maxsize)
    values |= {"greedy": sampling.greedy, "max_decode_len": room}
    return tuple(values.items())


class _Slots:
    """Inputs in slots (``loops/refill.py``), to which groups of further inputs are added."""

    def __init__(
        self,
        decoder: BatchDecoder,
        options: GenerateOptions,
        pace: Pace | None,
        places: Sequence[int],
        batch: Batch,
    ):
        """Puts the inputs of a first batch, whose sources and prompts are longest, into slots."""
        self._decoder, self._options, self._first = decoder, options, batch
        self.pace = pace
        # The text of each input that has not ended, and the tokens of its prompt.
        self._inputs: dict[int, tuple[str, int]] = {}
        self._group: refill.Members | None = None
        self._loop = decoder.loop(batch, options, decoder.most_drafts(options, pace))
        self._slots = refill.fill(self._prepared(places, batch, waits=False), pace)

    def takes(self, batch: Batch) -> bool:
        """Returns whether the batch's padded sources and prompts fit the first batch's shapes."""
        pairs = (batch.tokens, self._first.tokens), (batch.prompts, self._first.prompts)
        return all(new.shape[1] <= first.shape[1] for new, first in pairs)

    def burst(self, places: Sequence[int] = (), batch: Batch | None = None) -> refill.Ended:
        """Starts a burst until all inputs of ``batch`` have slots or, without one, to the end."""
        if batch is not None or self._group is None:
            self._group = self._prepared(places, batch or self._first, waits=True)
        if batch is None:
            empty = np.full_like(self._group.places, refill.EMPTY_SLOT)
            self._group = self._group.replace(places=empty)
        self._slots, ended = refill.burst(
            *(self._decoder.target, self._decoder.draft),
            self._slots,
            self._group,
            self._decoder.sampling(self._options),
            np.bool_(batch is None),
            loop=self._loop,
        )
        self.pace = ended.decoded.pace
        return ended

    def _prepared(self, places: Sequence[int], batch: Batch, *, waits: bool) -> refill.Members:
        for place, text, skipped in zip(places, batch.texts, prompt_lengths(batch), strict=False):
            self._inputs[place] = text, skipped
        numbers = np.full(batch.tokens.shape[0], refill.EMPTY_SLOT, np.int32)
        numbers[: len(places)] = places
        members = refill.prepare(
            *(self._decoder.target, self._decoder.draft),
            *(batch.tokens, batch.prompts, batch.keys, batch.max_decode_steps, numbers),
            loop=self._loop,
            paced=self.pace is not None,
            waits=waits,
        )
        # Places stay on the host, as in ``burst``: another sharding would be another program.
        return members.replace(places=numbers) if waits else members

    def collected(self, ended: refill.Ended) -> tuple[int, tuple[int, ...], list[Answer]]:
        """Waits for a burst; returns its target calls, and ended inputs' places and answers."""
        # The pace stays on the device.
        ended = jax.device_get(ended.replace(decoded=ended.decoded.replace(pace=None)))
        rows = {int(p): row for row, p in enumerate(ended.places) if p != refill.EMPTY_SLOT}
        answers = [
            self._decoder.answer(*self._inputs.pop(place), ended.decoded, row, self._options)
            for place, row in rows.items()
        ]
        return int(ended.calls), tuple(rows), answers
