"""Formats of checkpoints: how each is recognized, read and written.

Each format is an entry of the registry, so that folders of ``contrib`` can add formats.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spec_t5x import registry
from spec_t5x.checkpoints.huggingface import t5 as huggingface_t5
from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage.files import CONFIG_NAME
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel, Writer
from spec_t5x.checkpoints.t5x import reading, writing
from spec_t5x.errors import InputError
from spec_t5x.models.binding import family_of
from spec_t5x.models.t5 import NetworkConfig, T5Config

# The content of a directory's config.json; None without the file, as in T5X's directories.
Values = dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Format of checkpoints: functions that recognize, open and write one."""

    # Tells whether a directory with this config.json holds a checkpoint of this format.
    recognizes: Callable[[Location, Values], bool]
    # Opens a checkpoint; its weights are read later. Formats of the Hub take a third argument,
    # False for a model without weights, before they are downloaded.
    open_model: Callable[..., StoredModel]
    # Class of the models' configurations, and writers of such models by the names of ``convert``.
    config: type[NetworkConfig] = NetworkConfig
    writers: Mapping[str, Writer] = dataclasses.field(default_factory=dict)
    # Raises ``InputError`` if config.json, of a model on the Hugging Face Hub, is not supported.
    check_supported: Callable[[dict[str, Any], Location], object] | None = None


def format_of(directory: Location, values: Values) -> Format:
    """Returns the format of a directory with this config.json, or raises ``InputError``."""
    # Native is first: a converted checkpoint keeps its source's entries. contrib's come next.
    for each in (NATIVE, *reversed(registry.find_all("format").values())):
        if each.recognizes(directory, values):
            return each
    drafts = [kind.format for kind in registry.find_all("draft").values() if kind.format]
    if values and values.get("format") in drafts:
        raise InputError(f"{directory} holds a draft, not a whole model: give it as the draft")
    raise InputError(
        f"{directory / CONFIG_NAME} has neither format {model_files.FORMAT!r} nor a model_type: "
        "give a spec_t5x, Hugging Face or T5X checkpoint"
    )


def writers_of(config: NetworkConfig | None = None) -> dict[str, Writer]:
    """Returns the writers for models of ``config``, or all for None, by the names of formats."""
    formats = registry.find_all("format").values()
    # A writer for a class that ``config`` extends would write another network.
    kinds = () if config is None else (NetworkConfig, family_of(config).config)
    fitting = (each for each in formats if not kinds or each.config in kinds)
    return {name: writer for each in fitting for name, writer in each.writers.items()}


T5X = Format(
    recognizes=lambda directory, values: values is None,
    open_model=reading.open_model,
    config=T5Config,
    writers={"t5x": writing.write_model, "t5x_scanned": writing.write_scanned},
)
HUGGINGFACE = Format(
    # Unsupported types of models, too, so that ``open_model`` can refuse them by name.
    recognizes=lambda directory, values: values is not None and "model_type" in values,
    open_model=huggingface_t5.open_model,
    config=T5Config,
    writers={"huggingface": huggingface_t5.write_model},
    check_supported=huggingface_t5.check_supported,
)
NATIVE = Format(
    recognizes=lambda directory, values: (values or {}).get("format") == model_files.FORMAT,
    open_model=model_files.open_model,
    writers={"native": model_files.write_model},
)
