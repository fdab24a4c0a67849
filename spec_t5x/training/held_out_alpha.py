"""alpha of a draft in training: on texts that its target wrote for held-out sources.

Both models read the texts teacher-forced, and at every place stands ``sum min(p, q)``,
whose mean is alpha (Corollary 3.6). From it follow the tokens that an iteration of
speculative decoding is to be expected to give (Equation 1).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import flax.struct
import jax
import numpy as np

from spec_t5x.data.batching import Batches
from spec_t5x.errors import InputError
from spec_t5x.theory import estimates, formulas
from spec_t5x.theory.estimates import Bootstrap, Estimate
from spec_t5x.training.best_checkpoint import BestCheckpoint
from spec_t5x.training.finite import check_measured
from spec_t5x.training.losses import LossSums
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.training.trainer import Inputs, model_inputs
from spec_t5x.types import Array, Float32, PyTree


@flax.struct.dataclass
class HeldOutScores:
    """Of one batch of texts."""

    # Of what is minimised, without regularisers.
    sums: LossSums
    # How likely the draft is to be accepted at each place; 0 at padding.
    betas: Float32[Array, "batch length"]


# Of the draft's parameters, a batch's arrays and the temperature of its texts.
Score = Callable[[PyTree, Inputs, float], HeldOutScores]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutAlpha:
    """A draft on the texts of one temperature."""

    temperature: float
    loss: float  # of what is minimised, per token
    alpha: Estimate
    gamma: int

    @property
    def expected_tokens(self) -> float:
        """Tokens to be expected of an iteration with ``gamma`` drafts (Equation 1)."""
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

    def curves(self) -> dict[str, float]:
        """Its numbers, by the names of their curves over the steps of a run."""
        values = {
            "loss": self.loss,
            "alpha": self.alpha.value,
            "expected_tokens": self.expected_tokens,
        }
        return {f"held_out/{name}_T{self.temperature:g}": each for name, each in values.items()}


def held_out_alpha(
    score: Callable[[Inputs], HeldOutScores],
    batches: Iterable,
    *,
    temperature: float,
    gamma: int,
) -> HeldOutAlpha:
    """alpha over all tokens of the batches, with an interval bootstrapped over texts.

    Args:
        score: of a batch's arrays.
        batches: of texts that the target wrote at ``temperature``.
        temperature: of texts and both models.
        gamma: drafts of an iteration, for the tokens to be expected of it.

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


class AlphaWatch:
    """Measures alpha in every evaluation, keeps the best draft, and stops by it.

    A ``trainer.Watch``. The first of the temperatures decides.
    """

    def __init__(
        self, score: Score, texts: Mapping[float, Batches], best: BestCheckpoint, *, gamma: int
    ):
        """Measures on ``texts``, by the temperature that the target wrote them at."""
        self._score, self._best, self._gamma = score, best, gamma
        self._texts = {temperature: list(each.one_pass()) for temperature, each in texts.items()}
        # What was found when it last looked.
        self.last: list[HeldOutAlpha] = []

    def measure(self, params: PyTree) -> list[HeldOutAlpha]:
        """At each temperature."""
        return [
            held_out_alpha(
                lambda inputs, temperature=temperature: self._score(params, inputs, temperature),
                batches,
                temperature=temperature,
                gamma=self._gamma,
            )
            for temperature, batches in self._texts.items()
        ]

    def see(self, step: int, params: PyTree, reporter: ProgressReporter) -> None:
        """Measures, tells, and keeps the parameters if they are the best so far."""
        found = self.last = self.measure(params)
        for each in found:
            what = f"alpha at temperature {each.temperature:g}"
            check_measured(each.alpha.value, what, step, self._best.what_stays)
        is_best = self._best.offer(step, found[0].alpha.value, params)
        for each in found:
            mark = "  best" if is_best and each is found[0] else ""
            reporter.note(step, f"{each}{mark}", each.curves(), held_out=each.to_dict())

    def is_over(self, step: int) -> bool:
        """Whether the best is as long ago as patience has it."""
        return self._best.is_over(step)
