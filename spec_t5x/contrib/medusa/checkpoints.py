"""Checkpoints of draft heads, each for one target.

config.json          format, version, sizes, fingerprint of the target, stored type
heads.safetensors    wi [heads, 2 embed, hidden] and wo [heads, hidden, embed]
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.native.directory import DraftFormat, read_arrays
from spec_t5x.checkpoints.native.target_drafts import check_belongs, checked_params, read_config
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.contrib.medusa.network import HeadsConfig
from spec_t5x.labs.training.exports import write_for_target
from spec_t5x.types import PyTree

FORMAT = "spec_t5x_heads"
_HEADS = DraftFormat(FORMAT, "heads.safetensors", "heads that spec-t5x train-heads")


def save_heads(directory: str | Path, params: PyTree, target: LoadedModel, **options: Any) -> None:
    """Writes heads (parameters of ``network.Heads``) for a target, completely or not at all.

    ``options`` are ``dtype``, ``extra`` and ``overwrite`` of ``exports.save_model``.
    """
    num_heads, _, hidden_dim = np.shape(params["wi"])
    config = HeadsConfig(target.config.emb_dim, target.config.vocab_size, num_heads, hidden_dim)
    entries = {"heads": dataclasses.asdict(config)}
    write_for_target(directory, _HEADS, entries, params, _shapes(config), target, **options)


def load_heads(directory_or_name: str | Path, target: LoadedModel) -> PyTree:
    """Returns the float32 parameters of heads that ``save_heads`` wrote or that are packaged.

    Raises:
        InputError: the heads are absent, damaged, or trained for another target.
    """
    directory, config = open_heads(directory_or_name, target)
    stored = read_arrays(directory / _HEADS.file)
    return checked_params(stored, _shapes(config), directory, "float32")


def open_heads(directory_or_name: str | Path, target: LoadedModel) -> tuple[Path, HeadsConfig]:
    """Returns directory and sizes of heads; raises ``InputError`` as ``load_heads``."""
    directory, metadata = read_config(directory_or_name, _HEADS)
    with describing(directory / CONFIG_NAME, "heads under 'heads'"):
        config = HeadsConfig(**metadata["heads"])
    sizes = {
        "states of width": (config.emb_dim, target.config.emb_dim),
        "logits of size": (config.vocab_size, target.config.vocab_size),
    }
    check_belongs("heads", directory, metadata, target, sizes)
    return directory, config


def _shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    return {
        "wi": (config.num_heads, 2 * config.emb_dim, config.hidden_dim),
        "wo": (config.num_heads, config.hidden_dim, config.emb_dim),
    }
