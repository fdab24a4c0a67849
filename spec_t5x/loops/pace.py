"""How many tokens to draft next: as many as pay here and now, none where none pay.

An iteration pays if it brings more tokens than plain steps would in its time. Measured in
plain steps, and averaged over the rows that have not ended, an iteration with at most g drafts
brings and costs

    tokens(g) = 1 + b_1 + b_1 b_2 + … + b_1 … b_g        cost(g) = costs[longest proposal]

where b_i is the acceptance rate of the i-th draft, given that those before it were accepted.
The costs are measured once (``tuning.costs``). The rates are counted while decoding, over the
last few dozen iterations, so that they follow the output; they start out optimistic. The
*limit* of the next iteration is the g with the largest tokens(g) / cost(g), or 0, a plain step,
where none is above 1.

Rates can be wrong or out of date: a draft that was useless may suit the output that follows. A
*balance*, in plain steps, decides when to try again, and bounds the total loss of speculation.
An iteration runs only if the balance covers its largest possible loss. The balance holds

* a small initial sum, worth a few iterations;
* what speculation gained, up to a cap;
* a small share of every token generated, the tolerance.

This gives a bound for any draft and any input: n tokens cost at most ``n + max(start,
tolerance n)`` plain steps, as far as the costs are right. The rows of a batch are judged
together.

The decision depends on tokens already generated and on costs, never on drafts to come.
Outputs therefore keep the target's law; greedy outputs and those of coupled draws keep every
token. Other sampled outputs are other draws from the same law: the decisions, hence the costs
and earlier batches, determine which random numbers are used. Bulk inference, where an output
depends on its input alone, therefore decides once for all of such a run (``best_limit``).
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.interfaces import MAX_CHAIN
from spec_t5x.machine.other_programs import MUCH
from spec_t5x.machine.programs import Kept
from spec_t5x.types import Array, Bool, EndOfSequence, Float32, Int

# Iterations whose loss the initial sum covers: for one row, and for very many, each of which
# shows something of the draft.
_START = 8.0
_START_OF_MANY = 2.0
# What speculation may lose in the long run, as a share of the tokens written.
TOLERANCE = 0.01
# The most that the balance holds, in plain steps.
CAP = 32.0
# Iterations that a new trial begins with.
_LOOK = 3.0
# A limit pays if it is faster by at least this much: costs are measured with noise.
_MARGIN = 0.02
# The prior of the rates: its mean, and the number of observations it is worth.
_OPTIMISM = 0.7
_WEIGHT = 2.0
# The share of the counts that an iteration forgets.
_FORGETTING = 1 / 48
# Tokens of an output, before one has ended.
_TYPICAL_LENGTH = 24.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What speculation costs with one draft and batch size on one machine, in plain steps."""

    # Of an iteration whose longest proposal has 0, 1, … drafts. Infinite where the draft
    # cannot propose so many: a tree has all of its depth, or nothing.
    iteration: tuple[float, ...]
    # What the draft does once for a batch before its first proposal: its encoder.
    prefill: float = 0.0
    # Seconds of a plain step; 0 where nothing was measured.
    step: float = 0.0
    # The share of the processors that other programs used while they were measured.
    beside: float = 0.0

    def __post_init__(self):
        if len(self.iteration) < 2:
            raise InputError(f"costs are {self.iteration}: give those of 0 and of 1 draft at least")
        for value in (*self.iteration, self.prefill, self.step, self.beside):
            if math.isnan(value) or value < 0:
                raise InputError(f"a cost is {value}: give plain steps, from 0")
        if not math.isfinite(self.iteration[-1]) or not math.isfinite(self.prefill):
            raise InputError(f"costs are {self}: those of the longest proposal must be finite")

    @classmethod
    def parse(cls, values: Any) -> "Costs":
        """What ``dataclasses.asdict`` gave, after JSON."""
        return cls(**{**values, "iteration": tuple(map(float, values["iteration"]))})

    @classmethod
    def by_formula(
        cls, *, c: float, position: float = 0.0, largest: int = MAX_CHAIN, whole: bool = False
    ) -> "Costs":
        """Those of section 3.4, for where nothing can be measured.

        Args:
          c: time of a draft step, in target steps (Definition 3.7).
          position: of one more position in the target's call; the paper takes it to be 0.
          largest: the most drafts of an iteration.
          whole: whether it has as many or none, as with a tree.
        """
        between = range(1, largest)
        each = [
            math.inf if whole and n in between else n * (c + position) for n in range(largest + 1)
        ]
        return cls(iteration=tuple(1 + cost for cost in each))

    @property
    def largest(self) -> int:
        """The most drafts of an iteration."""
        return len(self.iteration) - 1

    @property
    def needed(self) -> float:
        """The rate of acceptance at which speculation begins to pay; above 1 where it never does.

        The same at every position; the prefill does not count.
        """
        finite = [(g, cost) for g, cost in enumerate(self.iteration) if g and math.isfinite(cost)]
        for percent in range(101):
            rate = percent / 100
            if any(sum(rate**i for i in range(g + 1)) > (1 + _MARGIN) * cost for g, cost in finite):
                return rate
        return math.inf

    @property
    def where_it_pays(self) -> str:
        """A clause for messages."""
        busy = f" (timed while other programs used {self.beside:.0%} of the processors)"
        timed = busy if self.beside > MUCH else ""
        if math.isfinite(self.needed):
            return f"it pays here from an acceptance rate of about {self.needed:.0%}{timed}"
        one = next(cost for cost in self.iteration[1:] if math.isfinite(cost))
        takes = f"an iteration takes {one:.2f} plain steps and more"
        return f"{takes}, which no acceptance pays for{timed}"


@flax.struct.dataclass(kw_only=True)
class Pace:
    """Costs, rates and balance; made with ``Pace.start``. A pytree of traced numbers."""

    # By the drafts of the longest proposal, from 0.
    costs: Float32[Array, "limits"]
    prefill: Float32[Array, ""]
    # What speculation may lose in the long run, as a share of the tokens written.
    tolerance: Float32[Array, ""]
    # How often the draft at a position was accepted, and how often all before it were.
    accepted: Float32[Array, "gamma"]
    reached: Float32[Array, "gamma"]
    # How often the longest proposal reached a position, and how often it might have.
    offered: Float32[Array, "gamma"]
    asked: Float32[Array, "gamma"]
    # Tokens of a batch's longest output, and of this batch so far.
    length: Float32[Array, ""]
    written: Float32[Array, ""]
    # What speculation may still lose, in plain steps; and the part of the sum to start with
    # that the tolerance has not earned yet.
    balance: Float32[Array, ""]
    advance: Float32[Array, ""]
    # tokens(g) / cost(g) of the limits from 1.
    factors: Float32[Array, "gamma"]
    # What one more trial of a draft that did not pay may lose, in plain steps; 0 outside a trial.
    stake: Float32[Array, ""]
    # Whether the draft's prefill has run, the plain steps whose tokens it has not been fed, and
    # the cost of feeding it a block of them; see ``before``.
    prefilled: Bool[Array, ""]
    behind: Int[Array, ""]
    feeding: Float32[Array, ""]
    # A limit that ignores what pays, to measure costs: no output then ends before its maximum
    # length. -1 for none.
    forced: Int[Array, ""]
    # Of all that was decoded: plain steps, iterations, and drafts of their longest proposals.
    plain_steps: Int[Array, ""]
    iterations: Int[Array, ""]
    drafted: Int[Array, ""]

    @classmethod
    def start(
        cls,
        costs: Costs,
        *,
        rows: int = 1,
        looks: float | None = None,
        tolerance: float = TOLERANCE,
        forced: int | None = None,
    ) -> "Pace":
        """The pace before anything is decoded.

        Args:
          costs: of the draft.
          rows: sequences that are decoded together.
          looks: iterations whose loss the initial sum covers; None takes 8 for one row and 2 for
            very many, which is little where a pace goes on from batch to batch.
          tolerance: what trials may cost, as a share of the tokens.
          forced: the limit of every iteration, whatever pays: to measure costs.
        """
        if looks is None:
            looks = _START_OF_MANY + (_START - _START_OF_MANY) / rows
        return _start(
            np.asarray(costs.iteration, np.float32),
            np.float32(costs.prefill),
            np.float32(looks),
            np.float32(tolerance),
            np.int32(-1 if forced is None else forced),
        )

    @property
    def largest(self) -> int:
        """The most drafts of an iteration."""
        return self.costs.shape[0] - 1

    @property
    def rates(self) -> Float32[Array, "gamma"]:
        """b, by position: as counted, and optimistic where little was counted."""
        return (self.accepted + _WEIGHT * _OPTIMISM) / (self.reached + _WEIGHT)

    @property
    def is_forced(self) -> Bool[Array, ""]:
        """Whether the limit ignores what pays."""
        return self.forced >= 0

    def eos_id(self, eos_id: EndOfSequence) -> EndOfSequence:
        """The token that ends a row, or several, if any does."""
        return jax.tree.map(lambda one: jnp.where(self.is_forced, -1, one), eos_id)

    @property
    def typical_limit(self) -> int:
        """Drafts of an iteration on average, rounded; at least 1. On the host."""
        return max(round(int(self.drafted) / max(int(self.iterations), 1)), 1)

    @property
    def best_limit(self) -> int:
        """Drafts that pay best at the rates counted so far; 0 where none pay. On the host."""
        factors = np.asarray(self.factors)
        best = int(factors.argmax())
        return best + 1 if factors[best] > 1 + _MARGIN else 0

    @property
    def before(self) -> Float32[Array, ""]:
        """The cost of making the draft ready: its prefill, and the tokens it was not fed."""
        calls = -(-self.behind // (self.largest + 1))
        return jnp.where(self.prefilled, 0.0, self.prefill) + calls * self.feeding

    def limit(self) -> Int[Array, ""]:
        """Drafts of the next iteration at most; 0 is a plain step."""
        before = self.before
        losses = before + self.costs[1:] - 1
        # With little left, fewer drafts than are best.
        best, factor = self._best(losses <= self.balance)
        gain = (1 - 1 / jnp.maximum(factor, 1e-3)) * jnp.maximum(self.length - self.written, 1)
        pays = (factor > 1 + _MARGIN) & (gain > before)
        looked, factor = self._best(losses <= self.stake)
        limit = jnp.where(pays, best, jnp.where(factor > 0, looked, 0))
        return jnp.where(self.is_forced, self.forced, limit)

    def new_batch(self, keeps_text: bool) -> "Pace":
        """Before the first step of a batch; ``keeps_text`` is the draft's."""
        # One more draft at least costs a step of the draft and a position of the target's;
        # the draft is fed a block in about two steps' time.
        block = 2 * (self.costs[-1] - self.costs[0]) / self.largest
        return self.replace(
            written=jnp.zeros_like(self.written),
            prefilled=jnp.asarray(False),
            feeding=block if keeps_text else jnp.zeros_like(block),
        )

    def end_batch(self) -> "Pace":
        """After the last step of a batch."""
        length = self.length + (self.written - self.length) / 4
        return self.replace(
            # An empty batch shows nothing.
            length=jnp.where(self.written > 0, length, self.length),
            prefilled=jnp.asarray(True),
            behind=jnp.zeros_like(self.behind),
        )

    def made_ready(self) -> "Pace":
        """After the draft's prefill, and after it was fed the text."""
        return self.replace(
            balance=self.balance - self.before,
            stake=self.stake - self.before,
            prefilled=jnp.asarray(True),
            behind=jnp.zeros_like(self.behind),
        )

    def plain(self, tokens: Float32[Array, ""]) -> "Pace":
        """After a plain step; ``tokens`` is what each live row got, on average."""
        pace = self._charged(tokens, jnp.float32(1.0))
        return pace.replace(behind=self.behind + 1)._after_plain(1)

    def without_the_draft(self, steps: Int[Array, ""]) -> "Pace":
        """After a batch of so many plain steps, decoded by a program without the draft."""
        written = steps.astype(jnp.float32)
        # The next batch begins with a prefill.
        pace = self.new_batch(keeps_text=False)._charged(written, written)
        return pace._after_plain(steps).end_batch()

    def speculative(
        self,
        tokens: Float32[Array, ""],
        longest: Int[Array, ""],
        limit: Int[Array, ""],
        accepted: Int[Array, "gamma"],
        refused: Int[Array, "gamma"],
        varies: bool,
    ) -> "Pace":
        """After an iteration.

        Args:
          tokens: that each live row got, on average.
          longest: drafts of the longest proposal.
          limit: drafts that there could have been.
          accepted: rows whose draft at the position was accepted.
          refused: rows that got the target's own token at the position.
          varies: whether the draft may propose less than it is asked for.
        """
        positions, kept = jnp.arange(self.largest), 1 - _FORGETTING
        pace = self._charged(tokens, self.costs[longest])
        pace = pace.replace(
            accepted=kept * self.accepted + accepted,
            reached=kept * self.reached + accepted + jnp.where(positions < limit, refused, 0),
            offered=kept * self.offered + (positions < longest),
            asked=kept * self.asked + (positions < limit),
            iterations=self.iterations + 1,
            drafted=self.drafted + longest,
        )
        pace = pace._decided(varies)
        # A look that finds it to pay is over.
        pays = jnp.max(pace.factors) > 1 + _MARGIN
        return pace.replace(stake=jnp.where(pays, 0.0, pace.stake))

    def _after_plain(self, steps) -> "Pace":
        # Enough for several iterations, if that can ever be.
        enough = jnp.minimum(self.before + _LOOK * self._worst, CAP)
        looks = (self.balance >= enough) & self._can_pay
        return self.replace(
            plain_steps=self.plain_steps + steps, stake=jnp.where(looks, enough, 0.0)
        )

    def _best(self, affordable: Bool[Array, "gamma"]) -> tuple[Int[Array, ""], Float32[Array, ""]]:
        """The limit of the largest factor among some, and the factor: 0 where there is none."""
        factors = jnp.where(affordable, self.factors, 0.0)
        best = jnp.argmax(factors)
        return best.astype(jnp.int32) + 1, factors[best]

    def _charged(self, tokens: Float32[Array, ""], cost: Float32[Array, ""]) -> "Pace":
        earned = self.tolerance * tokens
        paid_back = jnp.minimum(earned, self.advance)
        gained = tokens - cost
        balance = jnp.minimum(self.balance + gained + earned - paid_back, CAP)
        return self.replace(
            balance=balance,
            stake=jnp.minimum(self.stake + gained, balance),
            advance=self.advance - paid_back,
            written=self.written + tokens,
        )

    def _decided(self, varies: bool = False) -> "Pace":
        """With the limit that the rates and costs speak for."""
        tokens = 1 + jnp.sum(_products(self.rates), axis=1)
        cost = self.costs[1:]
        if varies:
            often = (self.offered + _WEIGHT) / (self.asked + _WEIGHT)
            cost = self.costs[0] + jnp.cumsum(often * jnp.diff(self.costs))
        return self.replace(factors=tokens / cost)

    @property
    def _worst(self) -> Float32[Array, ""]:
        """What an iteration of the best limit loses, should all drafts be refused."""
        return self.costs[1 + jnp.argmax(self.factors)] - 1

    @property
    def _can_pay(self) -> Bool[Array, ""]:
        """Whether any draft could pay."""
        return jnp.any(jnp.arange(1, self.largest + 2) > (1 + _MARGIN) * self.costs)


def _products(rates: Float32[Array, "gamma"]) -> Float32[Array, "gamma gamma"]:
    """``[g, j]`` is the chance that the drafts 0 … j are accepted, where j is up to g; else 0."""
    positions = jnp.arange(rates.shape[0])
    up_to = positions[None, :] <= positions[:, None]
    reach = jnp.prod(jnp.where(up_to, rates[None, :], 1.0), axis=1)
    return jnp.where(up_to, reach[None, :], 0.0)


# One program: each of its operations would be one otherwise.
def _make(
    costs: Float32[Array, "limits"],
    prefill: Float32[Array, ""],
    looks: Float32[Array, ""],
    tolerance: Float32[Array, ""],
    forced: Int[Array, ""],
) -> Pace:
    zeros, zero = jnp.zeros(costs.shape[0] - 1, jnp.float32), jnp.float32(0)
    pace = Pace(
        costs=costs,
        prefill=prefill,
        tolerance=tolerance,
        accepted=zeros,
        reached=zeros,
        offered=zeros,
        asked=zeros,
        length=jnp.float32(_TYPICAL_LENGTH),
        written=zero,
        balance=zero,
        advance=zero,
        factors=zeros,
        stake=zero,
        prefilled=jnp.asarray(True),
        behind=jnp.int32(0),
        feeding=zero,
        forced=forced,
        plain_steps=jnp.int32(0),
        iterations=jnp.int32(0),
        drafted=jnp.int32(0),
    )._decided()
    start = jnp.minimum(pace.prefill + looks * pace._worst, CAP)
    # Whatever is expected, a few iterations show what is so.
    stake = jnp.where(pace._can_pay, start, 0.0)
    return pace.replace(balance=start, advance=start, stake=stake)


_start = Kept(jax.jit(_make), ())
