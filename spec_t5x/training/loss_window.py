"""The sums that the next log line will show."""

import dataclasses
from collections.abc import Mapping

from spec_t5x.training.losses import LossSums


@dataclasses.dataclass(kw_only=True)
class LossWindow:
    """Sums over the steps since the last log line, in float64.

    They lie in every checkpoint, as ``to_dict`` gives them, so that a run that was killed
    between two log lines goes on to write the same line as an undisturbed one.
    """

    loss: float = 0.0  # nats, what is minimised
    num_correct: float = 0.0
    num_tokens: float = 0.0

    @classmethod
    def of(cls, kept: Mapping[str, float]) -> "LossWindow":
        """The window that ``to_dict`` described; an empty one of nothing."""
        return cls(**kept)

    def to_dict(self) -> dict[str, float]:
        """All of it as JSON can hold it, to the last bit."""
        return dataclasses.asdict(self)

    def add(self, sums: LossSums) -> None:
        """Counts a step in; ``sums`` are fetched."""
        self.loss += float(sums.loss)
        self.num_correct += float(sums.num_correct)
        self.num_tokens += float(sums.num_tokens)

    @property
    def mean_loss(self) -> float:
        """Per token; 0 without tokens."""
        return self.loss / max(self.num_tokens, 1.0)

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were predicted."""
        return self.num_correct / max(self.num_tokens, 1.0)
