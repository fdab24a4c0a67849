"""A model on disk, which a format opens, and a model in memory."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.storage.files import one_line, staged_directory
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.tensors import (
    Report,
    Tensors,
    array_tensors,
    check_tensors,
    read_params,
)
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_choice
from spec_t5x.machine.operations import XLA, usable
from spec_t5x.models.binding import Model, ModelConfig, bind, expected_shapes
from spec_t5x.names import AUTO, STORED_DTYPES
from spec_t5x.types import PyTree

# From the configuration to a tree of shardings like the parameters.
Shardings = Callable[[ModelConfig], PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model read from disk, checked and ready to run."""

    # ``{"token_embedder": {"embedding": [vocab, embed]}, "encoder": ...}``; if it was read for
    # decoding, in the form of this machine's operations (``machine.operations``).
    params: PyTree
    # ``config.dtype`` is the requested type, not the stored one.
    config: ModelConfig
    vocabulary: Vocabulary
    directory: Location
    # Entries of config.json beside the model's, and the step of a T5X checkpoint.
    metadata: dict[str, Any]
    # "int8" or "int4" if the matrices were rounded before they were stored.
    weights: str = AUTO

    def bind(self, weights: str = AUTO) -> Model:
        """Binds the model for decoding, its matrices as stored or rounded to fewer bits."""
        return bind(self.params, self.config, self.weights if weights == AUTO else weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """An opened model; its weights are read later."""

    tensors: Tensors
    config: ModelConfig
    # None if the checkpoint has none, as T5X's.
    vocabulary: Vocabulary | None
    directory: Location
    # As in ``LoadedModel``; a format that writes the model copies the metadata and rounds the
    # matrices to ``weights``.
    metadata: dict[str, Any]
    weights: str = AUTO

    @classmethod
    def of_params(
        cls,
        directory: str | Path,
        params: PyTree,
        config: ModelConfig,
        vocabulary: Vocabulary | None,
        metadata: dict[str, Any] | None = None,
    ) -> "StoredModel":
        """Wraps a model in memory, for a format to write it to ``directory``."""
        return cls(
            tensors=array_tensors(params),
            config=config,
            vocabulary=vocabulary,
            directory=Path(directory),
            metadata=metadata or {},
        )

    def check(self) -> None:
        """Raises ``InputError`` unless vocabulary and weights, unread, fit the configuration."""
        # Every id needs a row in the embedding; more rows are padding.
        if self.vocabulary and self.vocabulary.vocab_size > self.config.vocab_size:
            raise InputError(
                f"{self.directory}: the vocabulary has {self.vocabulary.vocab_size} ids, the model "
                f"embeds {self.config.vocab_size}: give the vocabulary it was trained with, and "
                "its number of extra_ids"
            )
        check_tensors(self.tensors, expected_shapes(self.config), str(self.directory))

    def load(
        self, *, dtype: str, shardings: Shardings | None = None, for_decoding: bool = False
    ) -> LoadedModel:
        """Reads the weights that devices of this process hold; see ``loading.load``."""
        vocabulary = self.known_vocabulary()
        config = dataclasses.replace(self.config, dtype=dtype)
        tree = None if shardings is None else shardings(config)
        operations = usable(dtype) if for_decoding and tree is None else XLA
        return LoadedModel(
            params=self.read_params(dtype=dtype, shardings=tree, packed=operations.packed),
            config=config,
            vocabulary=vocabulary,
            directory=self.directory,
            metadata=self.metadata,
            weights=self.weights,
        )

    def read_params(self, **options) -> PyTree:
        """Checks and reads the weights; the options are those of ``tensors.read_params``."""
        self.check()
        return read_params(self.tensors, str(self.directory), **options)

    def write(
        self,
        directory: str | Path,
        writer: "Writer",
        *,
        dtype: str,
        overwrite: bool = False,
        report: Report | None = None,
    ) -> None:
        """Writes the model and its vocabulary, completely or not at all; see ``convert``."""
        check_choice("stored dtype", dtype, STORED_DTYPES)
        self.check()
        try:
            with staged_directory(directory, overwrite=overwrite) as stage:
                writer(stage, self, dtype, report)
                if self.vocabulary is not None:
                    self.vocabulary.save(stage)
        except InputError:
            raise
        # TensorStore raises ValueError for some of the system's errors.
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot write {directory} ({one_line(error)}): make room there or choose another "
                "directory"
            ) from error

    def known_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary, or raises ``InputError`` without one."""
        if self.vocabulary is None:
            raise InputError(
                f"{self.directory} holds no vocabulary: give one (--vocabulary), a SentencePiece "
                "model's file or 'bytes'"
            )
        return self.vocabulary


# Writes a model to an empty directory, tensor by tensor, as this type, but for its vocabulary.
Writer = Callable[[Path, StoredModel, str, Report | None], None]
