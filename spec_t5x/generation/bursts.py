"""A generator's slots: groups of inputs in, answers out as they end."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_t5x.generation.answers import Answer
from spec_t5x.generation.batches import Batch, prompt_lengths
from spec_t5x.generation.generate_options import GenerateOptions
from spec_t5x.loops import slots
from spec_t5x.loops.pace import Pace
from spec_t5x.machine.programs import Kept
from spec_t5x.names import AUTO

# The places of inputs that have ended, and their answers.
Answered = tuple[tuple[int, ...], list[Answer]]


class Bursts:
    """Inputs in slots (``loops/slots.py``), to which groups of others are added."""

    def __init__(
        self,
        generator: Any,
        options: GenerateOptions,
        places: Sequence[int],
        batch: Batch,
        pace: Pace | None = None,
    ):
        """Puts the first inputs into slots.

        Args:
          generator: a ``Generator``; what it has for a draft is used.
          options: how to decode.
          places: of the batch's inputs among all.
          batch: the first inputs, with the longest sources and prompts.
          pace: what to draft at; None is ``options.gamma`` in every iteration.
        """
        self._generator, self._options, self._pace = generator, options, pace
        gamma = 0 if generator.draft is None else options.gamma
        self._loop = generator.loop(batch, options, gamma if pace is None else pace.largest)
        # The text of each input that has not ended, and the tokens of its prompt.
        self._inputs: dict[int, tuple[str, int]] = {}
        self._widths = batch.tokens.shape[1], batch.prompts.shape[1]
        self._batch = batch
        members = self._prepared(places, batch, waits=False)
        self._slots = slots.fill(members, pace)
        self._group: slots.Members | None = None
        # Target calls that have been counted.
        self.calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is no draft."""
        return self._generator.draft is None

    @property
    def pace(self) -> Pace | None:
        """As it is after the last burst, which may be under way."""
        return self._pace

    def takes(self, batch: Batch) -> bool:
        """Whether no input of the batch is longer than those that were the first."""
        widths = batch.tokens.shape[1], batch.prompts.shape[1]
        return all(width <= room for width, room in zip(widths, self._widths, strict=True))

    def add(self, places: Sequence[int], batch: Batch) -> Callable[[], Answered]:
        """Sets the device to decode until all of these have slots; what ends, by calling."""
        self._group = self._prepared(places, batch, waits=True)
        return self._burst(drain=False)

    def drain(self) -> Callable[[], Answered]:
        """Sets the device to decode all that is left."""
        if self._group is None:
            self._group = self._prepared((), self._batch, waits=True)
        nobody = np.full_like(self._group.places, slots.NOBODY)
        self._group = self._group.replace(places=nobody)
        return self._burst(drain=True)

    def _prepared(self, places: Sequence[int], batch: Batch, *, waits: bool) -> slots.Members:
        for place, text, skipped in zip(places, batch.texts, prompt_lengths(batch), strict=False):
            self._inputs[place] = text, skipped
        numbers = np.full(batch.tokens.shape[0], slots.NOBODY, np.int32)
        numbers[: len(places)] = places
        members = _prepare(
            *self._models,
            *(batch.tokens, batch.prompts, batch.keys, batch.max_decode_steps, numbers),
            loop=self._loop,
            paced=self._pace is not None,
            waits=waits,
        )
        # Of the host, as those of ``drain``: for another sharding a burst is compiled again.
        return members.replace(places=numbers) if waits else members

    def _burst(self, *, drain: bool) -> Callable[[], Answered]:
        self._slots, ended = _burst(
            *self._models,
            self._slots,
            self._group,
            self._generator.sampling(self._options),
            np.bool_(drain),
            loop=self._loop,
        )
        if self._pace is not None:
            self._pace = ended.decoded.pace
        return lambda: self._collected(ended)

    @property
    def _models(self) -> tuple:
        return self._generator.target, self._generator.draft

    def _collected(self, ended: slots.Ended) -> Answered:
        # The pace stays on the device.
        ended = jax.device_get(ended.replace(decoded=ended.decoded.replace(pace=None)))
        rows = [row for row, place in enumerate(ended.places) if place != slots.NOBODY]
        places = tuple(int(ended.places[row]) for row in rows)
        answers = [
            self._generator.answer(*self._inputs.pop(place), ended.decoded, row, self._options)
            for place, row in zip(places, rows, strict=True)
        ]
        self.calls += int(ended.calls)
        return places, answers


def bytes_needed(generator: Any, options: GenerateOptions, batch: Batch) -> int:
    """What slots and a group of this size hold, and the logits of a call; weights apart."""
    gamma = 0
    if generator.draft is not None:
        gamma = generator.draft.traits.max_worthwhile if options.gamma == AUTO else options.gamma
    places = np.zeros(len(batch.tokens), np.int32)
    inputs = batch.tokens, batch.prompts, batch.keys, batch.max_decode_steps, places
    loop = generator.loop(batch, options, gamma)

    def hold(target, draft, *inputs) -> list[jax.Array]:
        prepare = functools.partial(slots.prepare, target, draft, *inputs, loop=loop)
        return jax.tree.leaves([prepare(waits=False), prepare(waits=True)])

    held = jax.eval_shape(hold, generator.target, generator.draft, *inputs)
    rows = len(batch.tokens) * options.num_decodes
    logits = 4 * rows * loop.num_nodes * generator.target.vocab_size
    # And what is sampled from, of either model.
    logits *= 1 if options.sampling().greedy else 3
    return logits + sum(leaf.size * leaf.dtype.itemsize for leaf in held)


_prepare = Kept(slots.prepare, ("loop", "paced", "waits"))
# The slots are updated in place.
_burst = Kept(slots.burst, ("loop",), donated=2)
