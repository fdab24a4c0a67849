"""A model on disk, a model in memory, and what a format implements to get from one to the other."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.checkpoints.storage.weights import Report, Weights, array_weights, read_params
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig
from spec_t5x.types import PyTree

# From the configuration to a tree of shardings like the parameters.
Shardings = Callable[[ModelConfig], PyTree]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model that is opened; its weights are read later."""

    weights: Weights
    config: ModelConfig
    # None where a T5X checkpoint has none.
    vocabulary: Vocabulary | None
    directory: Location
    # As in ``LoadedModel``.
    metadata: dict[str, Any]

    @classmethod
    def of_params(
        cls,
        directory: str | Path,
        params: PyTree,
        config: ModelConfig,
        vocabulary: Vocabulary | None,
        metadata: dict[str, Any] | None = None,
    ) -> "StoredModel":
        """A model in memory that a format is to write to ``directory``."""
        return cls(
            weights=array_weights(params, f"parameters for {directory}"),
            config=config,
            vocabulary=vocabulary,
            directory=Path(directory),
            metadata=metadata or {},
        )

    def load(
        self, *, dtype: str, on_host: bool = False, shardings: Shardings | None = None
    ) -> LoadedModel:
        """Reads the weights, only those that devices of this process hold.

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


@runtime_checkable
class Format(Protocol):
    """The functions of a format's module; ``loading.FORMATS`` lists the modules.

    ``values`` is the directory's config.json, None where there is none, as of T5X. Each
    function raises ``InputError`` for files that are absent or damaged.
    """

    def recognizes(self, values: dict[str, Any] | None) -> bool:
        """Whether a directory with this config.json is of the format."""

    def open_model(
        self,
        directory: Location,
        values: dict[str, Any] | None,
        *,
        vocabulary: VocabularyLike | None = None,
        config: ModelConfig | None = None,
    ) -> StoredModel:
        """Reads all but the weights.

        ``vocabulary`` is for a checkpoint without one; a different one is refused. ``config``
        is for a format that does not store the network's.
        """

    def has_vocabulary(self, directory: Location, values: dict[str, Any] | None) -> bool:
        """Whether the checkpoint has a vocabulary."""

    def read_vocabulary(self, directory: Location, values: dict[str, Any] | None) -> Vocabulary:
        """The vocabulary alone."""


@runtime_checkable
class Writer(Protocol):
    """``write_model`` of a format's module; ``convert.WRITERS`` lists them."""

    def __call__(
        self,
        directory: str | Path,
        stored: StoredModel,
        *,
        dtype: str,
        extra: dict[str, Any] | None = None,
        overwrite: bool = False,
        report: Report | None = None,
    ) -> None:
        """Writes a model, tensor by tensor, completely or not at all.

        ``dtype`` is that of the stored weights ("float32" or "bfloat16"), ``extra`` has more
        entries for the format's description of the model, ``overwrite`` permits to replace an
        earlier checkpoint, and ``report`` is called with the bytes written so far and in all.
        """
