"""How each text came about with a draft: what a gamma that was not run would have done.

One run with the largest gamma shows where the draft is right. From it follows how many
iterations any smaller gamma takes over the same text:

* The draft's guess for a place depends on the text before it. Where the i-th draft of an
  iteration was accepted, it would have been accepted as the first of an iteration that
  begins there, too. For drafts that look at the text alone, at temperature 0, this is so
  without exception; heads that look ahead are a little better close by.
* What it would have guessed where it had no turn, because all drafts before had been
  accepted and the target's own token followed, is not known. There it is taken to be right
  as often as after any accepted draft.

Rows advance at their own pace, and a batch is done when its last row is: this is simulated,
not averaged, so that batches are predicted as they are.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_t5x.decoding import Iteration
from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.types import Array, Bool, Float, Int

# Of a row that has ended, where others of its batch have not.
ENDED = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence: of each of its tokens, whether it was drafted and what else was."""

    # Whether the draft's guess was accepted there; NaN where it had no turn.
    accepted: Float[np.ndarray, "tokens"]
    # Tokens that the draft proposed from there on.
    proposed: Int[np.ndarray, "tokens"]

    @property
    def length(self) -> int:
        """Tokens generated, end of sequence included: the steps of plain decoding."""
        return len(self.accepted)

    def iterations(
        self, gamma: int, filled: Bool[Array, "tokens"]
    ) -> Int[np.ndarray, "iterations 2"]:
        """Drafts proposed and tokens written in each iteration, were they ``gamma`` at most.

        Args:
          gamma: at least 1, and at most that of the run.
          filled: ``accepted``, with a guess for what is not known.
        """
        # How many guesses in a row are right from each place on.
        wrong = np.where(filled, self.length, np.arange(self.length))
        right = np.minimum.accumulate(wrong[::-1])[::-1] - np.arange(self.length)
        drafted = np.minimum(self.proposed, gamma)
        kept = np.minimum(drafted, right)
        written = np.minimum(kept + 1, self.length - np.arange(self.length)).tolist()
        places, place = [], 0
        while place < self.length:
            places.append(place)
            place += written[place]
        return np.stack([drafted, written], axis=1)[places].astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """How a sample of texts came about with one draft."""

    # Of each input, its sequences.
    rows: list[list[Row]]
    # Of the run: the largest that can be asked for.
    gamma: int

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(row.length for group in self.rows for row in group)

    @property
    def rate(self) -> float:
        """How often a guess is accepted after an accepted one, 0 where there was none."""
        after = [row.accepted[1:][row.accepted[:-1] == 1] for row in self._flat]
        known = np.concatenate(after) if after else np.zeros(0)
        known = known[~np.isnan(known)]
        return float(known.mean()) if known.size else 0.0

    @property
    def _flat(self) -> list[Row]:
        return [row for group in self.rows for row in group]

    def counts(self, seed: int = 0) -> "Counts":
        """The iterations of every gamma from 1, simulated."""
        rng, rate = np.random.default_rng(seed), self.rate
        filled = [_fill(row.accepted, rate, rng) for row in self._flat]
        longest = max(row.length for row in self._flat)
        table = np.full((self.gamma, len(filled), longest, 2), ENDED, np.int64)
        for number, (row, known) in enumerate(zip(self._flat, filled, strict=True)):
            for gamma in range(1, self.gamma + 1):
                iterations = row.iterations(gamma, known)
                table[gamma - 1, number, : len(iterations)] = iterations
        table = table.reshape(self.gamma, len(self.rows), -1, longest, 2)
        lengths = np.asarray([row.length for row in self._flat], np.int64)
        return Counts(
            drafts=table[..., 0],
            written=table[..., 1],
            lengths=lengths.reshape(len(self.rows), -1),
        )

    def by_position(self) -> Float[np.ndarray, "gamma"]:
        """How often the i-th draft is accepted, given that those before it were.

        Over the iterations that the largest gamma takes; 0 where none came so far.
        """
        accepted, stood = np.zeros(self.gamma, np.int64), np.zeros(self.gamma, np.int64)
        for row in self._flat:
            place = 0
            while place < row.length:
                ahead = row.accepted[place : place + int(row.proposed[place])] == 1
                refused = np.flatnonzero(~ahead)
                num = int(refused[0]) if refused.size else len(ahead)
                accepted[:num] += 1
                # What was proposed beyond the end of the text was not looked at.
                stood[: num + bool(refused.size)] += 1
                place += num + 1
        return accepted / np.maximum(stood, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Drafts proposed in each iteration of each row, for each gamma; ``ENDED`` after its end."""

    # The first gamma is 1.
    drafts: Int[np.ndarray, "gammas inputs decodes iterations"]
    # The tokens that it brought.
    written: Int[np.ndarray, "gammas inputs decodes iterations"]
    # Tokens of each row.
    lengths: Int[np.ndarray, "inputs decodes"]

    @property
    def max_gamma(self) -> int:
        """The largest gamma."""
        return self.drafts.shape[0]

    def iterations(self, gamma: int) -> Int[np.ndarray, "inputs decodes"]:
        """How many each row takes."""
        return np.sum(self.drafts[gamma - 1] != ENDED, axis=-1)

    def advances(self, gamma: int) -> Int[np.ndarray, "all_iterations"]:
        """Tokens that each iteration brought, of all rows."""
        written = self.written[gamma - 1]
        return written[written != ENDED]

    def of_batches(
        self, gamma: int, groups: Int[np.ndarray, "*samples batches batch"]
    ) -> Int[np.ndarray, "*samples batches iterations"]:
        """The longest proposal in each iteration of batches, ``ENDED`` after their end.

        Args:
          gamma: drafts at most.
          groups: the inputs of each batch; -1 for none.
        """
        rows = self.drafts[gamma - 1][groups]
        rows = np.where(groups[..., None, None] < 0, ENDED, rows)
        return rows.max(axis=(-3, -2))

    def steps(
        self, groups: Int[np.ndarray, "*samples batches batch"]
    ) -> Int[np.ndarray, "*samples batches"]:
        """Steps of plain decoding for each batch."""
        lengths = np.where(groups[..., None] < 0, 0, self.lengths[groups])
        return lengths.max(axis=(-2, -1))


def measure_trace(
    generator: Generator, batches: Sequence[Batch], options: GenerateOptions, gamma: int
) -> Trace:
    """Decodes with the generator's draft and ``gamma``, and takes notes.

    Args:
      generator: with a draft.
      batches: the sample, in batches of ``options.batch_size``.
      options: how to decode, but for gamma and guard.
      gamma: drafts per iteration, the most that can be asked for later.

    Raises:
      InputError: no text came out.
    """
    options = dataclasses.replace(options, gamma=gamma, guard=False)
    rows = []
    always = None if generator.draft.varies else gamma
    for batch in batches:
        iterations = list(generator.iterations(batch, options))
        num = len(batch.texts) * options.num_decodes
        of_batch = [_row(iterations, number, gamma, always) for number in range(num)]
        grouped = np.arange(num).reshape(len(batch.texts), -1)
        rows += [[of_batch[number] for number in group] for group in grouped]
    if not any(row.length for group in rows for row in group):
        raise InputError("the sample gave no token: raise max_decode_len or give other inputs")
    return Trace(rows=rows, gamma=gamma)


def _row(iterations: Sequence[Iteration], number: int, gamma: int, always: int | None) -> Row:
    """One row's part of the iterations; ``always`` so many are proposed, if it is known."""
    accepted, proposed = [], []
    for iteration in iterations:
        taken, drafted = int(iteration.num_appended[number]), int(iteration.num_proposed[number])
        kept = int(iteration.num_accepted[number])
        for place in range(taken):
            # After the last draft, the draft had no turn.
            accepted.append(1.0 if place < kept else 0.0 if place < drafted else np.nan)
            # A full proposal may have gone on.
            rest = gamma if drafted == gamma else drafted - place
            proposed.append(rest if always is None else always)
    return Row(accepted=np.asarray(accepted, np.float64), proposed=np.asarray(proposed, np.int64))


def _fill(accepted: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """With a guess in place of what is not known."""
    return np.where(np.isnan(accepted), rng.random(len(accepted)) < rate, accepted == 1)


def groups_of(num_inputs: int, batch_size: int) -> Int[np.ndarray, "batches batch"]:
    """The inputs of each batch, in order; -1 where the last one is not full.

    >>> groups_of(3, 2).tolist()
    [[0, 1], [2, -1]]
    """
    num = -(-num_inputs // batch_size)
    groups = np.full(num * batch_size, -1, np.int64)
    groups[:num_inputs] = np.arange(num_inputs)
    return groups.reshape(num, batch_size)
