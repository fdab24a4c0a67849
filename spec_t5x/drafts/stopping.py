"""When to stop drafting: gamma that adapts to each row and iteration (section 3.5).

One more draft costs a step of the draft and a position in the target's call, and is
worth something only if all drafts before it are accepted and so is it. ``Stopping``
estimates that chance from the draft's own confidence, calibrated by what became of
earlier drafts of the row, and drafts on while

    P(all so far accepted) * P(next accepted)  >  cost of one more * tokens per unit of time

the rule for the best ratio of tokens to time: an action pays if its gain per cost beats
the rate earned so far. The decision looks at tokens already drawn, never at the one to
come, so the law of the output is untouched.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Outcome
from spec_t5x.sampling.distributions import values_at
from spec_t5x.types import Array, Bool, Float, Float32, Int

# Bins of confidence in which acceptances are counted.
_BINS = 8
# Drafts of one iteration that are observed; more of them are not counted.
_OBSERVED = 32
# What a position of the target's call is taken to cost on a CPU, in target steps.
CPU_POSITION = 0.1
# How many observations the draft's own confidence is worth, before any was made.
_PRIOR = 2.0


@dataclasses.dataclass(frozen=True)
class Stopping:
    """The costs that decide; times are in steps of the target (Definition 3.7)."""

    # One step of the draft.
    c: float = 0.1
    # One more position in the target's call; ``StepTimes.position`` where it was measured.
    # None: ``CPU_POSITION`` on a CPU, which works for every position, and elsewhere nothing,
    # where a call takes as long as reading the weights.
    position: float | None = None

    def __post_init__(self):
        for name in ("c", "position"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InputError(f"Stopping.{name} is {value}: give a finite number from 0")

    @property
    def cost(self) -> float:
        """Of one more draft, in target steps."""
        if self.position is not None:
            return self.c + self.position
        return self.c + (CPU_POSITION if jax.default_backend() == "cpu" else 0.0)


@flax.struct.dataclass(kw_only=True)
class History:
    """What became of each row's drafts so far."""

    # Drafts by bin of confidence: verified, and accepted of these.
    verified: Float32[Array, "batch bins"]
    accepted: Float32[Array, "batch bins"]
    # Tokens of the draft's own iterations, and their time in target steps.
    tokens: Float32[Array, "batch"]
    time: Float32[Array, "batch"]
    # The current iteration: the confidence in each draft, and how many were proposed.
    confidences: Float32[Array, "batch observed"]
    proposed: Int[Array, "batch"]
    lengths: Int[Array, "batch"]


def start(lengths: Int[Array, "batch"]) -> History:
    """Nothing observed; one token a step, as in plain decoding."""
    batch = lengths.shape[0]
    centres = (jnp.arange(_BINS) + 0.5) / _BINS
    verified = jnp.full((batch, _BINS), _PRIOR, jnp.float32)
    return History(
        verified=verified,
        accepted=verified * centres[None, :],
        tokens=jnp.ones(batch, jnp.float32),
        time=jnp.ones(batch, jnp.float32),
        confidences=jnp.zeros((batch, _OBSERVED), jnp.float32),
        proposed=jnp.zeros(batch, jnp.int32),
        lengths=lengths,
    )


def acceptance(history: History, confidences: Float32[Array, "batch"]) -> Float32[Array, "batch"]:
    """Estimated chance that a draft of this confidence is accepted."""
    rates = history.accepted / history.verified
    return values_at(rates, _bins(confidences))


def worth_another(
    history: History, stopping: Stopping, reach: Float32[Array, "batch"]
) -> Bool[Array, "batch"]:
    """Whether each row should draft once more.

    Args:
      history: the rows' histories.
      stopping: the costs.
      reach: estimated chance that all drafts so far are accepted.
    """
    typical = jnp.sum(history.accepted, axis=1) / jnp.sum(history.verified, axis=1)
    rate = history.tokens / history.time
    return reach * typical > stopping.cost * rate


def update(history: History, stopping: Stopping, outcome: Outcome) -> History:
    """Adds what the verifier said of the current iteration."""
    positions = jnp.arange(history.confidences.shape[1])[None, :]
    was_verified = positions < jnp.minimum(outcome.num_accepted + 1, history.proposed)[:, None]
    was_accepted = positions < outcome.num_accepted[:, None]
    in_bin = jax.nn.one_hot(_bins(history.confidences), _BINS)
    # A row that was not asked has no iteration to count.
    asked = history.proposed > 0
    written, cost = outcome.lengths - history.lengths, 1 + stopping.cost * history.proposed
    return history.replace(
        verified=history.verified + jnp.sum(in_bin * was_verified[..., None], axis=1),
        accepted=history.accepted + jnp.sum(in_bin * was_accepted[..., None], axis=1),
        tokens=history.tokens + jnp.where(asked, written, 0),
        time=history.time + jnp.where(asked, cost, 0),
        # Nothing to learn from until the next proposal.
        proposed=jnp.zeros_like(history.proposed),
        lengths=outcome.lengths,
    )


def observe(
    history: History, confidence: Float32[Array, "batch"], offset: Int[Array, ""]
) -> History:
    """Notes the confidence in the draft number ``offset`` of this iteration."""
    # An update that falls outside is dropped.
    return history.replace(
        confidences=history.confidences.at[:, offset].set(confidence, mode="drop")
    )


def _bins(confidences: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    return jnp.minimum((confidences * _BINS).astype(jnp.int32), _BINS - 1)
