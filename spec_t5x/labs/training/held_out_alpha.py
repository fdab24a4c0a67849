"""Alpha of a draft in training, on its target's outputs for held-out sources.

Both models read the outputs teacher-forced. The acceptance probability at a position is
``sum min(p, q)``, and its mean is alpha (Corollary 3.6), from which the expected tokens per
iteration follow (Equation 1).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.labs.training.batching import PairBatch
from spec_t5x.labs.training.losses import LossSums
from spec_t5x.theory import estimates, formulas
from spec_t5x.theory.estimates import Bootstrap, Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutAlpha:
    """A draft's figures on the texts of one temperature."""

    temperature: float
    loss: float  # the objective, per token, without regularizers
    alpha: Estimate
    gamma: int  # drafted tokens per iteration, for the expected tokens

    @classmethod
    def of(
        cls,
        batches: Sequence[PairBatch],
        scores: Sequence[tuple[LossSums, np.ndarray]],
        *,
        temperature: float,
        gamma: int,
    ) -> "HeldOutAlpha":
        """Computes alpha over all tokens, with an interval bootstrapped over texts.

        ``scores`` are, for each batch, the objective's sums and acceptance probabilities
        ``[batch, length]``, 0 at padding.

        Raises:
            InputError: the texts hold no token.
        """
        betas = [betas.sum(axis=1, dtype=np.float64) for _, betas in scores]
        counts = [np.count_nonzero(batch.decoder_target_tokens, axis=1) for batch in batches]
        alpha = estimates.ratio(np.concatenate(betas), np.concatenate(counts), Bootstrap())
        if alpha is None:
            raise InputError("0 tokens to measure alpha on: give a dev file with text")
        loss = sum(float(sums.loss) for sums, _ in scores)
        loss /= sum(float(sums.num_tokens) for sums, _ in scores)
        return cls(temperature=temperature, loss=loss, alpha=alpha, gamma=gamma)

    @property
    def name(self) -> str:
        """The name of ``value`` in messages."""
        return f"alpha at temperature {self.temperature:g}"

    @property
    def value(self) -> float:
        """The mean acceptance probability."""
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

    def record(self) -> dict[str, dict]:
        """Returns the values of a line of ``metrics.jsonl``, all figures."""
        return {"held_out": dataclasses.asdict(self) | {"expected_tokens": self.expected_tokens}}

    def curves(self) -> dict[str, float]:
        """Returns the figures by the names of their curves over the steps."""
        return {
            f"held_out/{name}_T{self.temperature:g}": value
            for name, value in (
                ("loss", self.loss),
                ("alpha", self.alpha.value),
                ("expected_tokens", self.expected_tokens),
            )
        }
