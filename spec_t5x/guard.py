"""A guard: where drafts do not pay, plain steps take their place.

Speculation pays only if enough drafts are accepted. In target steps an iteration costs

    gamma c + T(gamma + 1)

and is worth the tokens that it brings, of which a plain step brings one for one. The
guard keeps the balance of the two. Speculation may go on as long as what the next
iteration can lose at worst, should all drafts be refused, is covered:

* by a small sum to start with, from which a draft that is any good earns more;
* by what speculation has gained, up to a limit, so that a text that turns bad is noticed;
* by a share of every token written, the tolerance. It pays for looking again, once in a
  while, whether the drafts have become better.

Hence a bound that holds for any draft: n tokens cost at most ``n + max(start,
tolerance n)`` target steps. It is as good as the costs that the guard was given. The rows
of a batch are judged together, by the mean of those that are still being written: one that
fares worse than the others is not protected from them.

The decision looks at tokens already written and at costs, never at the draft to come, so
texts follow the target's law as before, and greedy texts and those of coupled draws are
the same token for token. Other sampled texts are other draws of the same law: which
draws are made depends on the decisions, hence on the costs, on the other rows of the batch
and on what came before, where the balance is carried on.

    guard = guard(c=0.15, verification=1.3)
    for batch in batches:
        decoded = speculative_decode(..., guard=guard)
        guard = decoded.guard  # what one batch has earned or lost is the next one's start
"""

import math

import flax.struct
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.types import Array, Bool, Float32, Int


@flax.struct.dataclass(kw_only=True)
class Guard:
    """Costs and balance, in target steps; made with ``guard(...)``.

    A pytree of traced numbers: other costs compile nothing.
    """

    # One step of the draft: the paper's c (Definition 3.7).
    draft_step: Float32[Array, ""]
    # T: the target's call over all that it verifies, and whatever comes on top.
    verification: Float32[Array, ""]
    # What the draft does once for each batch before its first proposal: its encoder.
    prefill: Float32[Array, ""]
    # What speculation may lose, as a share of the tokens written.
    tolerance: Float32[Array, ""]
    # The most that the balance can hold.
    limit: Float32[Array, ""]
    # What speculation may still lose.
    balance: Float32[Array, ""]
    # The part of the sum to start with that the tolerance has not earned yet.
    advance: Float32[Array, ""]

    def cost(
        self, gamma: int, drafted: Int[Array, ""] | int, width: Int[Array, ""] | int
    ) -> Float32[Array, ""]:
        """Of an iteration.

        Args:
          gamma: drafts that a full proposal has.
          drafted: drafts of the longest proposal.
          width: tokens of a row that the target was called over, gamma + 1 at most. In
            between, its time is taken to grow in a straight line.
        """
        share = jnp.asarray((width - 1) / max(gamma, 1), jnp.float32)
        return drafted * self.draft_step + 1 + (self.verification - 1) * share

    def allows(self, gamma: int, before: Float32[Array, ""] | float = 0.0) -> Bool[Array, ""]:
        """Whether the next iteration may speculate.

        Args:
          gamma: drafts that it would propose.
          before: what has to be paid before, for the draft to be ready.
        """
        cost = self.cost(gamma, gamma, gamma + 1)
        can_gain = gamma + 1 > cost
        return can_gain & (before + cost - 1 <= self.balance)

    def pay(self, cost: Float32[Array, ""]) -> "Guard":
        """After something that brought no token."""
        return self.replace(balance=self.balance - cost)

    def add(self, tokens: Float32[Array, ""], cost: Float32[Array, ""] | float) -> "Guard":
        """After a target call.

        Args:
          tokens: that each live row got, on average.
          cost: of the call and of the drafts before it; 1 for a plain step.
        """
        earned = self.tolerance * tokens
        paid_back = jnp.minimum(earned, self.advance)
        balance = self.balance + tokens - cost + earned - paid_back
        return self.replace(
            balance=jnp.minimum(balance, self.limit), advance=self.advance - paid_back
        )


def guard(
    *,
    c: float,
    verification: float,
    prefill: float = 0.0,
    tolerance: float = 0.05,
    start: float = 2.0,
    limit: float = 8.0,
) -> Guard:
    """A guard for one draft, gamma and batch size, in its initial state.

    Args:
      c: time of a draft step, in target steps (``tuning.step_times`` measures it).
      verification: time of the target's call over gamma + 1 tokens (of a tree: over its
        nodes), in target steps; better still, of all that an iteration takes beyond its
        drafts, in steps of plain decoding. What is left out here, no bound counts.
      prefill: time of the draft's prefill, its encoder's, in target steps.
      tolerance: how much longer the decoding of a long text may take because of
        speculation that does not pay, as a share.
      start: what may be lost before the tolerance has earned it, in target steps. Short
        texts need it: 20 tokens take at most ``start / 20`` longer. Where a draft is known
        to be good, give more.
      limit: the most that gains are remembered, in target steps.

    Raises:
      InputError: a number that is negative or not finite, or a limit below ``start``.
    """
    values = {
        "c": c,
        "verification": verification,
        "prefill": prefill,
        "tolerance": tolerance,
        "start": start,
        "limit": limit,
    }
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} is {value}: give a finite number from 0")
    if limit < start:
        raise InputError(f"limit is {limit} and start {start}: give a limit of at least start")
    numbers = {name: jnp.float32(value) for name, value in values.items()}
    return Guard(
        draft_step=numbers["c"],
        verification=numbers["verification"],
        prefill=numbers["prefill"],
        tolerance=numbers["tolerance"],
        limit=numbers["limit"],
        balance=numbers["start"],
        advance=numbers["start"],
    )
