"""Draft heads on disk, and whether they belong to a target.

    config.json          format, version, sizes, the target's marks, stored type
    heads.safetensors    wi [heads, 2 embed, hidden] and wo [heads, hidden, embed]

Embedding and output layer are the target's, and stay with it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.own.directory import (
    check_belongs,
    check_format,
    read_arrays,
    write_target_draft,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.validate import check_finite, check_tensors
from spec_t5x.models.heads import HeadsConfig
from spec_t5x.types import PyTree

FORMAT = "spec_t5x_heads"
VERSION = 1
WEIGHTS_NAME = "heads.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedHeads:
    """Heads read from disk, checked against their target."""

    # ``{"wi": [heads, 2 embed, hidden], "wo": [heads, hidden, embed]}``, float32.
    params: PyTree
    config: HeadsConfig
    # config.json as it stands there.
    metadata: dict[str, Any]


def save_heads(
    directory: str | Path,
    params: PyTree,
    target: LoadedModel,
    *,
    dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes heads, completely or not at all.

    Args:
        directory: where; its parents are made.
        params: the tree of ``models.heads.Heads``.
        target: the model they were trained for.
        dtype: "bfloat16" or "float32", of the stored weights.
        extra: more entries for config.json (training steps, scores, ...).
        overwrite: whether an earlier checkpoint may be replaced.

    Raises:
        InputError: the directory is taken, the parameters do not fit the target or are
            not finite, or an argument is none of the above.
    """
    num_heads, _, hidden_dim = np.shape(params["wi"])
    config = HeadsConfig(target.config.emb_dim, target.config.vocab_size, num_heads, hidden_dim)
    _check_params(params, config, f"parameters for {directory}")
    metadata = {"format": FORMAT, "version": VERSION, "heads": dataclasses.asdict(config)}
    options = {"dtype": dtype, "extra": extra, "overwrite": overwrite}
    write_target_draft(directory, metadata, WEIGHTS_NAME, params, target, **options)


def load_heads(directory_or_name: str | Path, target: LoadedModel) -> LoadedHeads:
    """Reads heads that ``save_heads`` wrote, for the target that they belong to.

    Args:
        directory_or_name: a directory, or the name of heads that ship with the package.
        target: the model that will verify them.

    Raises:
        InputError: the directory holds no heads or damaged ones, or the heads are for
            another width, vocabulary or target.
    """
    directory = find_directory(directory_or_name)
    metadata = read_json(directory / CONFIG_NAME)
    path = directory / CONFIG_NAME
    check_format(metadata, path, FORMAT, VERSION, "give heads that spec-t5x train-heads wrote")
    with describing(path, "heads under 'heads'"):
        config = HeadsConfig(**metadata["heads"])
    sizes = {
        "states of width": (config.emb_dim, target.config.emb_dim),
        "logits of size": (config.vocab_size, target.config.vocab_size),
    }
    check_belongs("heads", directory, metadata, target, sizes)
    stored = read_arrays(directory / WEIGHTS_NAME)
    params = {name: array.astype(np.float32) for name, array in stored.items()}
    _check_params(params, config, str(directory / WEIGHTS_NAME))
    return LoadedHeads(params=jax.device_put(params), config=config, metadata=metadata)


def _check_params(params: PyTree, config: HeadsConfig, source: str) -> None:
    shapes = {
        "wi": (config.num_heads, 2 * config.emb_dim, config.hidden_dim),
        "wo": (config.num_heads, config.hidden_dim, config.emb_dim),
    }
    check_tensors(params, shapes, source)
    check_finite(params, source)
