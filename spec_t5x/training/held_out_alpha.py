"""alpha of a draft in training, on its target's outputs for held-out sources.

Both models read the outputs teacher-forced. The acceptance probability at a position is
``sum min(p, q)``, and its mean is alpha (Corollary 3.6), from which the expected tokens per
iteration follow (Equation 1).
"""

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import numpy as np

from spec_t5x.data.batching import Batch
from spec_t5x.errors import InputError
from spec_t5x.theory import estimates, formulas
from spec_t5x.theory.estimates import Bootstrap, Estimate
from spec_t5x.training.losses import LossSums
from spec_t5x.training.trainer import Inputs, model_inputs
from spec_t5x.types import Array, Float32


@flax.struct.dataclass
class HeldOutScores:
    """Of one batch of texts."""

    sums: LossSums  # of the objective, without regularizers
    betas: Float32[Array, "batch length"]  # acceptance probabilities; 0 at padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutAlpha:
    """A draft on the texts of one temperature."""

    temperature: float
    loss: float  # the objective, per token
    alpha: Estimate
    gamma: int

    @property
    def name(self) -> str:
        """Of ``value``."""
        return f"alpha at temperature {self.temperature:g}"

    @property
    def value(self) -> float:
        """alpha."""
        return self.alpha.value

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per iteration with ``gamma`` drafted tokens (Equation 1)."""
        return float(formulas.expected_tokens(self.alpha.value, self.gamma))

    def __str__(self) -> str:
        alpha = self.alpha
        interval = "" if alpha.low is None else f" ({alpha.low:.4f}-{alpha.high:.4f})"
        return (
            f"T={self.temperature:g}: loss {self.loss:.4f}  alpha {alpha.value:.4f}{interval}  "
            f"expected tokens {self.expected_tokens:.3f} (gamma {self.gamma})"
        )

    def to_dict(self) -> dict:
        """All of it as JSON can hold it."""
        return dataclasses.asdict(self) | {"expected_tokens": self.expected_tokens}

    def record(self) -> dict[str, dict]:
        """A line of ``metrics.jsonl``."""
        return {"held_out": self.to_dict()}

    def curves(self) -> dict[str, float]:
        """The figures, by the names of their curves over the steps."""
        values = {
            "loss": self.loss,
            "alpha": self.alpha.value,
            "expected_tokens": self.expected_tokens,
        }
        return {f"held_out/{name}_T{self.temperature:g}": each for name, each in values.items()}


def held_out_alpha(
    score: Callable[[Inputs], HeldOutScores],
    batches: Sequence[Batch],
    *,
    temperature: float,
    gamma: int,
) -> HeldOutAlpha:
    """alpha over all tokens of the batches, with an interval bootstrapped over texts.

    Args:
        score: of a batch's arrays.
        batches: of texts that the target wrote at ``temperature``.
        temperature: of texts and both models.
        gamma: drafted tokens per iteration, for the expected tokens.

    Raises:
        InputError: the texts hold no token.
    """
    # The device works ahead; the scores are fetched at the end.
    scores = jax.device_get([score(model_inputs(batch)) for batch in batches])
    betas, counts, loss, tokens = [], [], 0.0, 0.0
    for batch, scored in zip(batches, scores, strict=True):
        betas.append(scored.betas.sum(axis=1, dtype=np.float64))
        counts.append(np.count_nonzero(batch.decoder_target_tokens, axis=1))
        loss += float(scored.sums.loss)
        tokens += float(scored.sums.num_tokens)
    alpha = estimates.ratio(np.concatenate(betas), np.concatenate(counts), Bootstrap())
    if alpha is None:
        raise InputError("0 tokens to measure alpha on: give a dev file with text")
    return HeldOutAlpha(temperature=temperature, loss=loss / tokens, alpha=alpha, gamma=gamma)
