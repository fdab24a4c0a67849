"""What every reader of checkpoints returns."""

import dataclasses
from typing import Any

import jax

from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.models.binding import ModelConfig
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model read from disk, checked and ready to run."""

    # ``{"token_embedder": {"embedding": [vocab, embed]}, "encoder": ...}``.
    params: PyTree
    # ``config.dtype`` is the type that was asked for, not the stored one.
    config: ModelConfig
    vocabulary: Vocabulary
    # Where the model was read from.
    directory: Location
    # config.json as it stands there; of a T5X checkpoint its format, version and step.
    metadata: dict[str, Any]

    @property
    def num_params(self) -> int:
        """Number of weights; an embedding that is also the output counts once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))
