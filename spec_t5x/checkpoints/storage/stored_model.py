"""A model that is on disk: all is known of it but its weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.weights import Weights, read_params
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig
from spec_t5x.types import PyTree

# Where each parameter of a model is to lie.
Shardings = Callable[[ModelConfig], PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model opened but not yet read."""

    weights: Weights
    config: ModelConfig
    # None where a T5X checkpoint came without one.
    vocabulary: Vocabulary | None
    directory: Location
    # config.json as it stands there; of a T5X checkpoint its format, version and step.
    metadata: dict[str, Any]

    def load(
        self, *, dtype: str, on_host: bool = False, shardings: Shardings | None = None
    ) -> LoadedModel:
        """Reads the weights, and no more of them than this process's devices hold.

        Raises:
            InputError: weights that do not fit the configuration or are damaged, no
                vocabulary, or both ``on_host`` and ``shardings``.
        """
        vocabulary = self.known_vocabulary()
        if on_host and shardings is not None:
            raise InputError("on_host is True and shardings are given: leave one of them out")
        config = dataclasses.replace(self.config, dtype=dtype)
        params = read_params(
            self.weights,
            config,
            dtype=dtype,
            on_host=on_host,
            shardings=None if shardings is None else shardings(config),
        )
        return LoadedModel(
            params=params,
            config=config,
            vocabulary=vocabulary,
            directory=self.directory,
            metadata=self.metadata,
        )

    def known_vocabulary(self) -> Vocabulary:
        """The vocabulary.

        Raises:
            InputError: there is none.
        """
        if self.vocabulary is None:
            raise InputError(
                f"{self.directory} holds no vocabulary: give one (--vocabulary), a SentencePiece "
                "model's file or 'bytes'"
            )
        return self.vocabulary
