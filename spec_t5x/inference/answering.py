"""A shard's inputs decoded: batches of about one length, answers in order of input.

What a batch holds is settled by the shard's inputs and the settings alone, and a sampled
text by the seed and its input's place: a shard has the same answers whenever, by whichever
process and after however many interruptions it is decoded.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import (
    Answer,
    Batch,
    GenerateOptions,
    Generation,
    Generator,
    one_ahead,
)
from spec_t5x.inference.inputs import Item
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.records import answer, refusal
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
                lines[item.index] = refusal(item, str(error))
        progress(Tally(inputs=len(lines), errors=len(lines)))
        for batch_items, outputs in self._decode(self._batches(prepared)):
            failed = 0
            for item, found in zip(batch_items, outputs, strict=True):
                if isinstance(found, InputError):
                    failed += 1
                    lines[item.index] = refusal(item, str(found))
                else:
                    lines[item.index] = answer(item, found)
            progress(self._tally([found for found in outputs if isinstance(found, list)]))
            progress(Tally(inputs=failed, errors=failed))
        return [lines[item.index] for item in items]

    def _tally(self, outputs: Sequence[Sequence[Generation]]) -> Tally:
        tally = Tally(inputs=len(outputs))
        for generations in outputs:
            tally.tokens += sum(len(g.output_ids) for g in generations)
            # A search's calls are for all of its hypotheses.
            for generation in generations[:1] if self.options.beams else generations:
                tally.target_calls += generation.target_calls
                tally.advance += generation.target_calls * (generation.block_efficiency or 1.0)
        return tally

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
        # As many keys for every batch: their number is part of the program.
        places = np.zeros(self.options.batch_size, np.uint32)
        places[: len(items)] = [item.index for item in items]
        keys = _keys(np.uint32(self.options.seed), places)[: len(items)]
        return self.generator.make_batch([item.text for item in items], ids, keys, self.options)

    def _decode(
        self, batches: Iterator[tuple[list[Item], Batch]]
    ) -> Iterator[tuple[list[Item], list[Answer]]]:
        """Outputs of each batch. The device works on the next while one is written down."""
        for items, waiting in one_ahead((items, self._start(batch)) for items, batch in batches):
            yield items, self._finish(waiting)

    def _start(self, batch: Batch) -> Callable[[], Iterator[Answer]]:
        """Sets the device to work; the result is waited for by calling."""
        generator, options = self.generator, self.options
        with self.placement.within(), _memory(options):
            if options.beams:
                found = generator.search(batch, options)
                return lambda: generator.collect_beams(batch, found, options)
            decoded = generator.decode(batch, options)
            return lambda: generator.collect(batch, decoded)

    def _finish(self, waiting: Callable[[], Iterator[Answer]]) -> list[Answer]:
        with _memory(self.options):
            return list(waiting())


@jax.jit
def _keys(seed, places):
    """A random key for each input, by its place among all."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(places))


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
