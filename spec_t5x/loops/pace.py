"""The number of tokens to draft next: as many as pay at the time, and none where none pay.

An iteration pays if it brings more tokens than plain steps would in its time. Measured in plain
steps, and averaged over the rows that have not ended, an iteration with at most g drafts brings
and costs

    tokens(g) = 1 + b_1 + b_1 b_2 + … + b_1 … b_g        cost(g) = costs[longest proposal]

where b_i is the acceptance rate of the i-th draft, given that those before it were accepted. The
costs are measured once (``tuning.costs``). The rates are counted while decoding, over the last
few dozen iterations, so that they follow the output; they start out optimistic. The *limit* of
the next iteration is the g with the largest tokens(g) / cost(g), or 0, a plain step, where none
is above 1.

A fixed schedule gives the draft further chances, *looks*: after ``pause`` plain steps the rates
start out optimistic once more. The pause is so long that looks at a useless draft take about
``TOLERANCE`` of the time. The rows of a batch are judged together.

The decision depends on tokens already generated and on costs, never on drafts to come. Outputs
therefore keep the target's law; greedy outputs and those of coupled draws keep every token.
Other sampled outputs are other draws from the same law, since the decisions, hence the costs and
earlier batches, determine which random numbers are used. Bulk inference, where an output depends
on its input alone, decides once for a whole run (``best_limit``).
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
from spec_t5x.types import Array, Bool, Float32, Int

# The share of the time that looks at a useless draft may take.
TOLERANCE = 0.01
# Iterations of a look, about.
_LOOK = 6
# A limit pays if it is faster by at least this much, since costs are measured with noise.
_MARGIN = 0.02
# The prior of the rates: its mean, and the number of observations it is worth. A draft that would
# not pay at this mean is never tried.
OPTIMISM = 0.8
_WEIGHT = 2.0
# The share of the counts that an iteration forgets.
_FORGETTING = 1 / 32
# Tokens of an output, before one has ended.
_TYPICAL_LENGTH = 24.0
# The counts that a look resets.
_COUNTS = ("accepted", "reached", "offered", "asked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of speculation with one draft and batch size on one machine, in plain steps."""

    # Costs of an iteration by its longest proposal, of 0, 1, … drafts. Infinite where the draft
    # cannot propose so many: a tree has all of its depth, or nothing.
    iteration: tuple[float, ...]
    # Cost of the draft's encoder, which runs once for a batch, before its first proposal.
    prefill: float = 0.0

    def __post_init__(self):
        if len(self.iteration) < 2:
            raise InputError(f"costs are {self.iteration}: give those of 0 and of 1 draft at least")
        for value in (*self.iteration, self.prefill):
            if math.isnan(value) or value < 0:
                raise InputError(f"a cost is {value}: give plain steps, from 0")
        if not math.isfinite(self.iteration[-1]) or not math.isfinite(self.prefill):
            raise InputError(f"costs are {self}: those of the longest proposal must be finite")

    @classmethod
    def parse(cls, values: Any) -> "Costs":
        """Reads the result of ``dataclasses.asdict``, after JSON."""
        return cls(**{**values, "iteration": tuple(map(float, values["iteration"]))})

    @classmethod
    def by_formula(
        cls, *, c: float, position: float = 0.0, largest: int = MAX_CHAIN, whole: bool = False
    ) -> "Costs":
        """Returns the costs of section 3.4, where nothing can be measured.

        A draft step takes ``c`` target steps (Definition 3.7), one more position of the target's
        call ``position`` (0 in the paper). ``whole`` iterations have ``largest`` drafts or none.
        """
        each = [1 + n * (c + position) for n in range(largest + 1)]
        if whole:
            each[1:-1] = [math.inf] * (largest - 1)
        return cls(iteration=tuple(each))

    @property
    def largest(self) -> int:
        """The most drafts of an iteration."""
        return len(self.iteration) - 1

    @property
    def needed(self) -> float:
        """The acceptance rate at which speculation begins to pay; infinite where it never does.

        The rate is the same at every position; the prefill does not count.
        """
        rates = (percent / 100 for percent in range(101))
        return next((rate for rate in rates if self._best_at(rate)[1] > 1 + _MARGIN), math.inf)

    @property
    def pause(self) -> int:
        """Plain steps between two looks at a draft that does not pay."""
        limit, _ = self._best_at(OPTIMISM)
        look = self.prefill + _LOOK * (self.iteration[limit] - 1)
        return max(math.ceil(look / TOLERANCE), 1)

    @property
    def where_it_pays(self) -> str:
        """A clause for messages."""
        if math.isfinite(self.needed):
            return f"it pays here from an acceptance rate of about {self.needed:.0%}"
        one = next(cost for cost in self.iteration[1:] if math.isfinite(cost))
        return f"an iteration takes {one:.2f} plain steps and more, which no acceptance pays for"

    def _best_at(self, rate: float) -> tuple[int, float]:
        """Returns the limit from 1 that gains most at one rate of all drafts, and its factor."""
        factors = [
            sum(rate**i for i in range(g + 1)) / cost for g, cost in enumerate(self.iteration) if g
        ]
        best = max(factors)
        return 1 + factors.index(best), best


@flax.struct.dataclass(kw_only=True)
class Pace:
    """Costs and rates; made with ``Pace.start``. A pytree of traced numbers."""

    # As of ``Costs``, by the drafts of the longest proposal.
    costs: Float32[Array, "limits"]
    prefill: Float32[Array, ""]
    # Plain steps between two looks, and those since the last iteration or look.
    pause: Int[Array, ""]
    idle: Int[Array, ""]
    # Counts of drafts accepted at each position, and of those that came so far.
    accepted: Float32[Array, "gamma"]
    reached: Float32[Array, "gamma"]
    # Iterations whose longest proposal reached a position, and those that allowed it.
    offered: Float32[Array, "gamma"]
    asked: Float32[Array, "gamma"]
    # Tokens of a batch's longest output, and of this batch so far.
    length: Float32[Array, ""]
    written: Float32[Array, ""]
    # Whether the draft's prefill has run.
    prefilled: Bool[Array, ""]
    # Totals of all batches: plain steps, iterations, and drafts of their longest proposals.
    plain_steps: Int[Array, ""]
    iterations: Int[Array, ""]
    drafted: Int[Array, ""]

    @classmethod
    def start(cls, costs: Costs, *, pause: int | None = None) -> "Pace":
        """Returns the pace before anything is decoded, with the costs' own ``pause`` if None."""
        pause = costs.pause if pause is None else pause
        numbers = {"costs": costs.iteration, "prefill": costs.prefill, "length": _TYPICAL_LENGTH}
        numbers |= {"written": 0, **{name: [0] * costs.largest for name in _COUNTS}}
        totals = {"pause": pause, "idle": 0, "plain_steps": 0, "iterations": 0, "drafted": 0}
        # Arrays of NumPy's: nothing is compiled.
        values = {name: np.asarray(each, np.float32) for name, each in numbers.items()}
        values |= {name: np.asarray(each, np.int32) for name, each in totals.items()}
        return cls(**jax.tree.map(jnp.asarray, values | {"prefilled": np.asarray(True)}))

    @property
    def largest(self) -> int:
        """The most drafts of an iteration."""
        return self.costs.shape[0] - 1

    @property
    def rates(self) -> Float32[Array, "gamma"]:
        """The acceptance rates by position: as counted, and optimistic where little was."""
        return (self.accepted + _WEIGHT * OPTIMISM) / (self.reached + _WEIGHT)

    @property
    def factors(self) -> Float32[Array, "gamma"]:
        """The gains tokens(g) / cost(g) of the limits from 1."""
        tokens = 1 + jnp.cumsum(jnp.cumprod(self.rates))
        # A draft may propose fewer than the limit.
        share = (jnp.cumsum(self.offered) + _WEIGHT) / (jnp.cumsum(self.asked) + _WEIGHT)
        return tokens / (self.costs[0] + share * (self.costs[1:] - self.costs[0]))

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

    def limit(self) -> Int[Array, ""]:
        """Returns the most drafts of the next iteration; 0 is a plain step."""
        factors = self.factors
        best = jnp.argmax(factors)
        gain = (1 - 1 / factors[best]) * jnp.maximum(self.length - self.written, 1)
        pays = (factors[best] > 1 + _MARGIN) & (self.prefilled | (gain > self.prefill))
        return jnp.where(pays, best.astype(jnp.int32) + 1, 0)

    def new_batch(self) -> "Pace":
        """Returns the pace before the first step of a batch."""
        return self.replace(
            written=jnp.zeros_like(self.written), prefilled=jnp.zeros_like(self.prefilled)
        )

    def end_batch(self) -> "Pace":
        """Returns the pace after the last step of a batch."""
        length = self.length + (self.written - self.length) / 4
        # An empty batch shows nothing.
        length = jnp.where(self.written > 0, length, self.length)
        return self.made_ready().replace(length=length)

    def made_ready(self) -> "Pace":
        """Returns the pace after the draft's prefill."""
        return self.replace(prefilled=jnp.ones_like(self.prefilled))

    def plain(self, tokens: Float32[Array, ""]) -> "Pace":
        """Returns the pace after a plain step of ``tokens`` for each live row, on average."""
        idle = self.idle + 1
        looks = idle >= self.pause
        return self.replace(
            idle=jnp.where(looks, 0, idle),
            written=self.written + tokens,
            plain_steps=self.plain_steps + 1,
            **{name: jnp.where(looks, 0.0, getattr(self, name)) for name in _COUNTS},
        )

    def speculative(
        self,
        tokens: Float32[Array, ""],
        longest: Int[Array, ""],
        limit: Int[Array, ""],
        accepted: Int[Array, "gamma"],
        refused: Int[Array, "gamma"],
    ) -> "Pace":
        """Returns the pace after an iteration that brought ``tokens`` for each live row.

        Its longest proposal had ``longest`` of ``limit`` drafts. ``accepted`` counts, by position,
        rows whose draft was accepted, ``refused`` those that got the target's own token.
        """
        positions, kept = jnp.arange(self.largest), 1 - _FORGETTING
        return self.replace(
            idle=jnp.zeros_like(self.idle),
            written=self.written + tokens,
            accepted=kept * self.accepted + accepted,
            reached=kept * self.reached + accepted + jnp.where(positions < limit, refused, 0),
            offered=kept * self.offered + (positions < longest),
            asked=kept * self.asked + (positions < limit),
            iterations=self.iterations + 1,
            drafted=self.drafted + longest,
        )
