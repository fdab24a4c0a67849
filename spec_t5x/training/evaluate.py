"""Loss on held-out pairs."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from spec_t5x.data.batching import Batch
from spec_t5x.errors import InputError
from spec_t5x.training.losses import LossSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevMetrics:
    """Means over the target tokens of a held-out set."""

    cross_entropy: float  # nats per token, EOS included
    accuracy: float  # share of tokens predicted given the right ones before
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(cross_entropy)``: 2.0 nats are 7.39."""
        return float(np.exp(self.cross_entropy))


def dev_metrics(loss_fn: Callable[[Batch], LossSums], batches: Iterable[Batch]) -> DevMetrics:
    """Sums ``loss_fn`` over the batches, every one counted by its tokens.

    Raises:
        InputError: the batches hold no token.
    """
    totals = np.zeros(3)
    # The device works ahead; the sums are fetched at the end.
    sums = [loss_fn(batch) for batch in batches]
    for part in sums:
        totals += [part.cross_entropy, part.num_correct, part.num_tokens]
    if not totals[2]:
        raise InputError("0 tokens to evaluate on: give a dev file with text")
    return DevMetrics(
        cross_entropy=float(totals[0] / totals[2]),
        accuracy=float(totals[1] / totals[2]),
        num_tokens=int(totals[2]),
    )
