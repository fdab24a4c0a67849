"""Models as formats of checkpoints open them (``StoredModel``), and as read (``LoadedModel``)."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.storage.files import staged_directory
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.tensors import Report, Tensors, check_tensors, read_params
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_choice, either
from spec_t5x.machine.description import free_memory
from spec_t5x.machine.operations import XLA, usable
from spec_t5x.models.binding import bind, expected_shapes
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS, placed, rounded_weight
from spec_t5x.names import AUTO, NATIVE_DTYPES
from spec_t5x.types import PyTree

# Function from a configuration to a tree of shardings with the structure of the parameters.
Shardings = Callable[[NetworkConfig], PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model read from disk, checked and ready to run."""

    # ``{"token_embedder": {"embedding": [vocab, embed]}, "encoder": ...}``; if read with
    # ``for_decoding``, packed for this machine's operations (``machine.operations``).
    params: PyTree
    # ``config.dtype`` is the requested type, not the stored one.
    config: NetworkConfig
    vocabulary: Vocabulary
    directory: Location
    # Entries of config.json other than the configuration, and the step of a T5X checkpoint.
    metadata: dict[str, Any]
    # "int8" or "int4" if ``bind`` is to round the matrices, else "auto".
    weights: str = AUTO
    # As in ``StoredModel``.
    drafts: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LoadedModel({self.directory})"

    def bind(self, weights: str = AUTO, kv: str = AUTO) -> CachedModel:
        """Returns the network with its parameters; arguments as for ``models.binding.bind``."""
        return bind(self.params, self.config, self.weights if weights == AUTO else weights, kv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model whose files are open; its weights are read later."""

    # None before they are downloaded.
    tensors: Tensors | None
    config: NetworkConfig
    # None if the checkpoint has no vocabulary and none was given, as for T5X's.
    vocabulary: Vocabulary | None
    directory: Location
    # As in ``LoadedModel``; writers store it, and Hugging Face's what transformers reads of it.
    metadata: dict[str, Any]
    # "int8" or "int4" if the stored matrices are rounded, or are to be written so, else "auto".
    weights: str = AUTO
    # The checkpoint's names of parameters, by path, for messages.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # What its drafts' kinds opened, by kind and argument; models are taken out when they are read.
    drafts: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Raises ``InputError`` unless vocabulary and shapes of weights fit the configuration."""
        # Every id needs a row of the embedding; further rows are padding.
        if self.vocabulary and self.vocabulary.vocab_size > self.config.vocab_size:
            raise InputError(
                f"{self.directory}: the vocabulary has {self.vocabulary.vocab_size} ids, the model "
                f"embeds {self.config.vocab_size}: give the vocabulary it was trained with, and "
                "the number of its extra ids"
            )
        if self.tensors is not None:
            shapes = expected_shapes(self.config)
            check_tensors(self.tensors, shapes, str(self.directory), self.names)

    def unread(self, *paths: str) -> LoadedModel:
        """Returns the model without its weights, except for those at ``paths`` that it has."""
        few = {path: self.tensors[path] for path in {*paths} & {*(self.tensors or ())}}
        params = read_params(few, str(self.directory), dtype="float32")
        named = {"config": self.config, "directory": self.directory, "metadata": self.metadata}
        return LoadedModel(params=params, vocabulary=self.known_vocabulary(), **named)

    def load(
        self,
        *,
        dtype: str,
        shardings: Shardings | None = None,
        for_decoding: bool = False,
        weights: str = AUTO,
        option: str = "weights",
    ) -> LoadedModel:
        """Reads the weights, as ``loading.load``, with a vocabulary; ``option`` is for messages."""
        vocabulary = self.known_vocabulary()
        config = dataclasses.replace(self.config, dtype=dtype)
        chosen = self.weights if weights == AUTO else weights
        tree = None if shardings is None else shardings(config)
        flat = {} if tree is None else flatten_dict(tree, sep="/")
        is_packed = for_decoding and tree is None
        operations = usable(expected_shapes(config), dtype) if is_packed else XLA
        bits = BITS[chosen] if for_decoding and chosen != AUTO else None
        self._check_room(dtype, bits, flat, option)

        def packed(path: str, param: np.ndarray | jax.Array) -> Any:
            names = path.split("/")
            weight = operations.packed(names[-1], param)
            if bits is None:
                return weight
            # One by one, so that a device holds one matrix that is not rounded.
            weight = rounded_weight(names, weight, bits, tied=config.logits_via_embedding)
            return placed(weight, flat[path], jax.device_put) if flat else weight

        return LoadedModel(
            params=self.read_params(dtype=dtype, shardings=tree, packed=packed),
            config=config,
            vocabulary=vocabulary,
            directory=self.directory,
            metadata=self.metadata,
            weights=chosen if bits is None else AUTO,
            drafts=self.drafts,
        )

    def _check_room(
        self, dtype: str, bits: int | None, shardings: Mapping[str, Any], option: str
    ) -> None:
        """Raises ``InputError`` if JAX's GPU or TPU has less free memory than the weights take."""
        device, free = jax.local_devices()[0], free_memory()
        # Weights may be read to the host, by ``jax.default_device``.
        if device.platform == "cpu" or free is None or jax.config.jax_default_device is not None:
            return
        needed = 0
        for path, shape in expected_shapes(self.config).items():
            held = shardings[path].shard_shape(shape) if shardings else shape
            is_rounded = bits is not None and path.endswith("/kernel")
            needed += math.prod(held) * (bits if is_rounded else 8 * jnp.dtype(dtype).itemsize) // 8
        if needed <= free:
            return
        each = " of each device" if shardings else ""
        text = (
            f"{self.directory} takes {needed / 2**30:.1f} GiB{each} and the {device.device_kind} "
            f"has {free / 2**30:.1f} free"
        )
        used = device.memory_stats().get("bytes_in_use", 0)
        # A target may use the memory that its draft needs.
        if option == "weights" and needed <= free + used:
            raise InputError(
                f"{text}, {used / 2**30:.1f} are in use: delete the models loaded before, or "
                "restart Python"
            )
        ways = {
            f"{option} int8": bits is None,
            "dtype bfloat16": dtype == "float32",
            "a larger model_parallel": bool(shardings),
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 before JAX starts": device.platform == "gpu",
            "a smaller model": True,
        }
        raise InputError(f"{text}: give {either([way for way, helps in ways.items() if helps])}")

    def read_params(self, **options) -> PyTree:
        """Checks the model and reads its weights; ``options`` are of ``tensors.read_params``."""
        self.check()
        if self.tensors is None:
            raise InputError(f"{self.directory} was opened without weights: open it with downloads")
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
        """Writes model and vocabulary, completely or not at all; arguments as for ``convert``."""
        check_choice("stored dtype", dtype, NATIVE_DTYPES)
        self.check()
        with staged_directory(directory, overwrite=overwrite) as stage:
            writer(stage, self, dtype, report)
            if self.vocabulary is not None:
                self.vocabulary.save(stage)

    def known_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary; raises ``InputError`` if there is none."""
        if self.vocabulary is None:
            raise InputError(
                f"{self.directory} holds no vocabulary: give one (--vocabulary), a tokenizer.json "
                "or spiece.model, the model it was tuned from, or 'bytes'"
            )
        return self.vocabulary


# Writes all of a model but the vocabulary to an empty directory: directory, model, dtype, report.
Writer = Callable[[Path, StoredModel, str, Report | None], None]
