"""Alpha of a draft in training, on its target's outputs for held-out sources.

Both models score the outputs teacher-forced. The acceptance probability at a position is
``sum min(p, q)``. Its mean over positions is alpha (Corollary 3.6), and alpha gives the expected
tokens per iteration (Equation 1).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.labs import estimates
from spec_t5x.labs.estimates import Bootstrap, Estimate
from spec_t5x.labs.theory import formulas
from spec_t5x.labs.training.batching import PairBatch
from spec_t5x.labs.training.losses import LossSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutAlpha:
    """A draft's loss and alpha on the target's outputs of one temperature."""

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
        """Computes loss and alpha over all tokens; texts are resampled for alpha's 95 % interval.

        ``scores`` has, for each batch, the objective's sums and the acceptance probabilities,
        [batch, length], which are 0 at padding.

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
        """Name of ``value`` in messages."""
        return f"alpha at temperature {self.temperature:g}"

    @property
    def value(self) -> float:
        """Alpha, the mean acceptance probability; the best draft has the largest."""
        return self.alpha.value

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per iteration with ``gamma`` drafted tokens (Equation 1)."""
        return float(formulas.expected_tokens(self.alpha.value, self.gamma))

    def __str__(self) -> str:
        return (
            f"T={self.temperature:g}: loss {self.loss:.4f}  alpha {self.alpha:.4f}  "
            f"expected tokens {self.expected_tokens:.3f} (gamma {self.gamma})"
        )

    def record(self) -> dict[str, dict]:
        """Returns ``{"held_out": figures}``, which a line of ``metrics.jsonl`` stores."""
        return {"held_out": dataclasses.asdict(self) | {"expected_tokens": self.expected_tokens}}

    def curves(self) -> dict[str, float]:
        """Returns the figures by the names of their TensorBoard curves."""
        figures = {"loss": self.loss, "alpha": self.value, "expected_tokens": self.expected_tokens}
        return {f"held_out/{n}_T{self.temperature:g}": value for n, value in figures.items()}
