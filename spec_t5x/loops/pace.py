"""Pace: the rule by which gamma "auto" chooses how many tokens the next iteration drafts.

An iteration pays if it appends more tokens than plain steps would in the same time. With at most g
drafts it appends tokens(g) to a live row (one not ended) on average, and costs, in plain steps,

    tokens(g) = 1 + b_1 + b_1 b_2 + … + b_1 … b_g        cost(g) = costs[longest proposal]

where b_i is the acceptance rate of the i-th draft, given that those before it were accepted; one
that ends its row counts as rejected, since no token follows it. The costs are measured once
(``tuning.costs``). The rates are counted while decoding, over the last few dozen iterations, so
that they follow the output; they start at an optimistic prior. The *limit* of the next iteration
is the g with the largest tokens(g) / cost(g), or 0, a plain step, if that is not above 1 by a
margin, or would not repay a prefill that has yet to run.

A draft that did not pay is tried again in *looks*: after a pause of plain steps the counts are
reset, and the rates are optimistic again. The first pause is short, as one rejected draft may have
caused it. Pauses grow with the time that recent iterations lost: looks at a useless draft take 1
to 4 % of the time, less the longer it is useless. All rows of a batch have the same limit.

The limit depends on tokens already generated and on costs, never on drafts to come. Outputs
therefore keep the target's distribution; greedy and coupled outputs keep every token. Other
sampled outputs are other draws from the same distribution, since the limits, hence the costs and
earlier batches, determine which random numbers are used. Bulk inference, where an output depends
on its input alone, chooses once for a whole run (``best_limit``).
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import MAX_CHAIN
from spec_t5x.types import Array, Bool, Float, Float32, Int

# Plain steps before a look if iterations lost no time; each plain step of lost time adds as many.
REST = 16
# A limit pays if its speed-up is above 1 by this margin, since measured costs are noisy.
_MARGIN = 0.02
# Mean of the prior of the rates; a draft that would not pay at this rate is never tried.
OPTIMISM = 0.8
# Number of observations that a prior is worth.
_WEIGHT = 4.0
# The share by which an iteration reduces the counts of those before it.
_FORGETTING = 1 / 32
# Assumed tokens of a batch's longest output, before a batch has ended.
_TYPICAL_LENGTH = 24.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of speculation with one draft and batch size on one machine, in plain steps."""

    # Entry n is the cost of an iteration whose longest proposal has n drafts; infinite if the
    # draft cannot propose n, as a tree proposes either its whole depth or nothing.
    iteration: tuple[float, ...]
    # Cost of the draft's prefill, which runs once for a batch, before its first proposal.
    prefill: float = 0.0

    def __post_init__(self):
        if len(self.iteration) < 2:
            raise InputError(f"costs are {self.iteration}: give at least those of 0 and 1 drafts")
        for value in (*self.iteration, self.prefill):
            if math.isnan(value) or value < 0:
                raise InputError(f"a cost is {value}: give a number of at least 0, in plain steps")
        if not math.isfinite(self.iteration[-1]) or not math.isfinite(self.prefill):
            raise InputError(f"costs are {self}: give a finite prefill and a finite last iteration")

    @classmethod
    def parse(cls, values: Any) -> "Costs":
        """Returns the costs whose ``dataclasses.asdict`` was written as JSON and read back."""
        return cls(**{**values, "iteration": tuple(map(float, values["iteration"]))})

    @classmethod
    def by_formula(
        cls, *, c: float, position: float = 0.0, largest: int = MAX_CHAIN, whole: bool = False
    ) -> "Costs":
        """Returns the costs of 0 … ``largest`` drafts by section 3.3, for use without measuring.

        A draft step takes ``c`` target steps (Definition 3.7), each further position of a target
        call ``position`` (0 in the paper). If ``whole``, only 0 and ``largest`` have finite costs.
        """
        each = [1 + n * (c + position) for n in range(largest + 1)]
        if whole:
            each[1:-1] = [math.inf] * (largest - 1)
        return cls(iteration=tuple(each))

    @property
    def largest(self) -> int:
        """Largest number of drafts in an iteration."""
        return len(self.iteration) - 1

    @property
    def needed(self) -> float:
        """Least acceptance rate, in steps of 0.01, at which speculation pays; infinite if none.

        The rate is taken to be the same at every position, and the prefill is not counted.
        """
        rates = (percent / 100 for percent in range(101))
        return next((rate for rate in rates if self.best_at(rate)), math.inf)

    @property
    def where_it_pays(self) -> str:
        """Clause for messages: the acceptance rate from which speculation pays, if any does."""
        if math.isfinite(self.needed):
            return f"it pays here from an acceptance rate of about {self.needed:.0%}"
        one = next(cost for cost in self.iteration[1:] if math.isfinite(cost))
        return f"an iteration takes at least {one:.2f} plain steps, which no acceptance pays for"

    def best_at(self, rate: float) -> int:
        """Returns the limit that pays best if all drafts have this ``rate``, 0 if none pays."""
        tokens = np.cumsum([rate**i for i in range(len(self.iteration))])
        return _best(tokens[1:] / self.iteration[1:])


def _best(factors: Float[np.ndarray, "gamma"]) -> int:
    best = int(factors.argmax())
    return best + 1 if factors[best] > 1 + _MARGIN else 0


@flax.struct.dataclass(kw_only=True)
class Pace:
    """Pytree of a pace's costs, and of counts that give its rates; ``Pace.start`` makes one."""

    # Most drafts of the batch's next iteration, 0 for a plain step; kept, as it is read repeatedly.
    limit: Int[Array, ""]
    # ``Costs.iteration`` and ``Costs.prefill``, in plain steps.
    costs: Float32[Array, "limits"]
    prefill: Float32[Array, ""]
    # ``REST``, and plain steps since the last iteration or look.
    rest: Int[Array, ""]
    idle: Int[Array, ""]
    # Time of recent iterations and prefills minus the tokens appended, in plain steps, at least 0.
    lost: Float32[Array, ""]
    # For each position: drafts that saved a step, and all that were verified; iterations whose
    # longest proposal included it, and those whose limit did. Older ones count less.
    counts: Float32[Array, "4 gamma"]
    # Expected tokens of a batch's longest output, and those of the current batch so far.
    length: Float32[Array, ""]
    written: Float32[Array, ""]
    # Whether the draft's prefill has run in this batch.
    prefilled: Bool[Array, ""]
    # Totals of all batches: plain steps, iterations, and drafts of their longest proposals.
    plain_steps: Int[Array, ""]
    iterations: Int[Array, ""]
    drafted: Int[Array, ""]

    @classmethod
    def start(cls, costs: Costs, *, rest: int = REST) -> "Pace":
        """Returns the pace before the first batch."""
        # NumPy's arrays, so that nothing is compiled.
        pace = cls(
            limit=np.asarray(costs.best_at(OPTIMISM), np.int32),
            costs=np.asarray(costs.iteration, np.float32),
            prefill=np.asarray(costs.prefill, np.float32),
            rest=np.asarray(rest, np.int32),
            idle=np.zeros((), np.int32),
            lost=np.zeros((), np.float32),
            counts=np.zeros((4, costs.largest), np.float32),
            length=np.asarray(_TYPICAL_LENGTH, np.float32),
            written=np.zeros((), np.float32),
            prefilled=np.ones((), bool),
            plain_steps=np.zeros((), np.int32),
            iterations=np.zeros((), np.int32),
            drafted=np.zeros((), np.int32),
        )
        return jax.tree.map(jnp.asarray, pace)

    @property
    def largest(self) -> int:
        """Largest number of drafts in an iteration."""
        return self.costs.shape[0] - 1

    @property
    def rates(self) -> Float32[Array, "gamma"]:
        """Acceptance rate at each position, shrunk to the overall rate, itself to ``OPTIMISM``.

        Without the overall rate, a rejected first draft would leave the later rates optimistic.
        """
        accepted, reached, *_ = self.counts
        of_all = (jnp.sum(accepted) + _WEIGHT * OPTIMISM) / (jnp.sum(reached) + _WEIGHT)
        return (accepted + _WEIGHT * of_all) / (reached + _WEIGHT)

    @property
    def factors(self) -> Float32[Array, "gamma"]:
        """Expected speed-ups tokens(g) / cost(g) over plain steps, of the limits g = 1, 2, …"""
        # Masked reductions: XLA compiles cumulative ones to several operations.
        until = jnp.tri(self.largest, dtype=bool)
        reached = jnp.prod(jnp.where(until, self.rates, 1.0), axis=-1)
        tokens = 1 + jnp.sum(jnp.where(until, reached, 0.0), axis=-1)
        # A draft may propose fewer tokens than the limit, at less cost.
        offered, asked = jnp.sum(jnp.where(until, self.counts[2:, None], 0.0), axis=-1)
        share = (offered + _WEIGHT) / (asked + _WEIGHT)
        return tokens / (self.costs[0] + share * (self.costs[1:] - self.costs[0]))

    @property
    def best_limit(self) -> int:
        """Limit that pays best at the current rates, 0 if none pays, as a number on the host."""
        return _best(np.asarray(self.factors))

    def new_batch(self) -> "Pace":
        """Returns the pace at a batch's start: no token is written, no prefill has run."""
        return self.replace(
            written=jnp.zeros_like(self.written), prefilled=jnp.zeros_like(self.prefilled)
        )._with_limit()

    def end_batch(self) -> "Pace":
        """Returns the pace after a batch, whose tokens update the expected ``length``."""
        length = self.length + (self.written - self.length) / 4
        # A batch without generated tokens does not inform about lengths.
        length = jnp.where(self.written > 0, length, self.length)
        return self.replace(length=length, prefilled=jnp.ones_like(self.prefilled))

    def made_ready(self) -> "Pace":
        """Returns the pace after the draft's prefill."""
        lost = jnp.where(self.prefilled, self.lost, self.lost + self.prefill)
        return self.replace(lost=lost, prefilled=jnp.ones_like(self.prefilled))

    def plain(self, appended: Int[Array, "batch"]) -> "Pace":
        """Returns the pace after a plain step that ``appended`` a token to each live row."""
        written = self.written + _tokens(appended)
        after = self.replace(idle=self.idle + 1, written=written, plain_steps=self.plain_steps + 1)
        return lax.cond(
            after.idle >= self.rest * (1 + self.lost), Pace._look, lambda pace: pace, after
        )

    def _look(self) -> "Pace":
        return self.replace(idle=0 * self.idle, counts=0 * self.counts)._with_limit()

    def speculative(
        self, appended: Int[Array, "batch"], longest: Int[Array, ""], limit: Int[Array, ""]
    ) -> "Pace":
        """Returns the pace after an iteration that ``appended`` so many tokens to each row.

        The longest proposal had ``longest`` of ``limit`` drafts.
        """
        positions, kept = jnp.arange(self.largest), 1 - _FORGETTING
        tokens = _tokens(appended)
        # The last token saved no step; nor did a draft that was its row's last token.
        saved = appended[:, None] - 1
        accepted = jnp.sum(positions[None] < saved, axis=0)
        # The target's token after the last of ``limit`` drafts rejects none.
        refused = jnp.sum(positions[None] == saved, axis=0)
        reached = accepted + jnp.where(positions < limit, refused, 0)
        new = jnp.stack([accepted, reached, positions < longest, positions < limit])
        return self.replace(
            idle=jnp.zeros_like(self.idle),
            lost=jnp.maximum(kept * self.lost + self.costs[longest] - tokens, 0),
            written=self.written + tokens,
            counts=kept * self.counts + new,
            iterations=self.iterations + 1,
            drafted=self.drafted + longest,
        )._with_limit()

    def _with_limit(self) -> "Pace":
        """Returns the pace with the ``limit`` that its other fields give."""
        factors = self.factors
        best = jnp.argmax(factors).astype(jnp.int32)
        factor = jnp.max(factors)
        gain = (1 - 1 / factor) * jnp.maximum(self.length - self.written, 1)
        pays = (factor > 1 + _MARGIN) & (self.prefilled | (gain > self.prefill))
        return self.replace(limit=jnp.where(pays, best + 1, 0))


def _tokens(appended: Int[Array, "batch"]) -> Float32[Array, ""]:
    """Returns the mean number of tokens of the rows that appended any, which are the live ones."""
    return jnp.sum(appended) / jnp.maximum(jnp.sum(appended > 0), 1).astype(jnp.float32)
