"""Opening a T5X checkpoint, of its legacy format or its Orbax one, without T5X."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.own import native
from spec_t5x.checkpoints.storage.files import read_json
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensorstore_arrays import TensorStoreWeights, open_arrays
from spec_t5x.checkpoints.storage.validate import check_vocabulary_fits, compress
from spec_t5x.checkpoints.storage.vocabularies import (
    VocabularyLike,
    choose_vocabulary,
    make_vocabulary,
)
from spec_t5x.checkpoints.t5x.config import infer_config
from spec_t5x.checkpoints.t5x.index import T5XIndex, find_t5x, read_index
from spec_t5x.data.vocabulary import SPIECE_NAME, Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

# Beside T5X's files, which it does not read: the config.json of our own format. With it a
# checkpoint that ``save_t5x`` wrote needs neither guess nor vocabulary.
SIDECAR_NAME = "spec_t5x.json"

_COPY_AGAIN = "copy the whole checkpoint again"


def open_t5x(
    location: Location,
    *,
    vocabulary: VocabularyLike | None = None,
    config: T5Config | None = None,
) -> StoredModel:
    """Opens a checkpoint that T5X saved (T5 1.0, 1.1, Flan, mT5, ByT5), or ``save_t5x``.

    Args:
        location: a checkpoint's directory (``…/checkpoint_1000000``), or a model's with
            such directories, of which the latest is taken; on this machine or in a bucket.
        vocabulary: what the checkpoint was trained with (see ``vocabularies``). T5X's
            hold none; without it ``spiece.model`` is looked for, in the directory and in
            the one above, and if there is none the model is opened without one.
        config: the network; told from the shapes of the parameters when it is left out.

    Raises:
        InputError: there is no such checkpoint, it is damaged, or of another network.
    """
    found = find_t5x(location)
    if found is None:
        raise InputError(
            f"{location} holds no T5X checkpoint: give a directory such as …/checkpoint_1000000"
        )
    index = read_index(found)
    directory = found.parent if found.name == "state" else found
    opened = open_arrays(index.entries, str(directory))
    sidecar = _read_sidecar(directory)
    if config is None and sidecar:
        config = native.read_config(sidecar, directory / SIDECAR_NAME)
    config = config or _infer_config(index, opened, str(directory))
    chosen = _vocabulary(directory, sidecar, vocabulary, config.vocab_size)
    if chosen is not None:
        check_vocabulary_fits(chosen, config, str(directory))
    own = {"format": index.format, "version": index.version, "step": _read_step(index)}
    return StoredModel(
        weights=TensorStoreWeights(opened, str(directory), remedy=_COPY_AGAIN),
        config=config,
        vocabulary=chosen,
        directory=directory,
        metadata={**native.extra_entries(sidecar or {}), **own},
    )


def _read_sidecar(directory: Location) -> dict[str, Any] | None:
    path = directory / SIDECAR_NAME
    return read_json(path) if path.is_file() else None


def _infer_config(index: T5XIndex, opened: Mapping[str, Any], source: str) -> T5Config:
    absent = [path for path in index.entries if path not in opened]
    if len(absent) == len(index.entries):
        raise InputError(
            f"{source}: none of the {len(absent)} arrays that it lists is there: {_COPY_AGAIN}"
        )
    shapes = {path: entry.shape for path, entry in index.entries.items() if entry.shape is not None}
    shapes |= {path: array.shape for path, array in opened.items() if path not in shapes}
    try:
        return infer_config(shapes, source)
    except InputError as error:
        if not absent:
            raise
        raise InputError(
            f"{source}: {len(absent)} of {len(index.entries)} arrays are not there "
            f"({', '.join(compress(absent))}): {_COPY_AGAIN}"
        ) from error


def _vocabulary(
    directory: Location,
    sidecar: dict[str, Any] | None,
    given: VocabularyLike | None,
    num_rows: int,
) -> Vocabulary | None:
    if sidecar and sidecar.get("vocabulary") is not None:
        own = native.read_vocabulary(sidecar, directory)
        return choose_vocabulary(given, own, directory, num_rows)
    if given is None and isinstance(directory, Path):
        # Resolved: the directory above "." is its parent.
        places = (directory, directory.resolve().parent)
        given = next((p / SPIECE_NAME for p in places if (p / SPIECE_NAME).is_file()), None)
    return None if given is None else make_vocabulary(given, num_rows)


def _read_step(index: T5XIndex) -> int | None:
    source = str(index.location)
    opened = open_arrays({"step": index.step}, source) if index.step else {}
    if "step" not in opened:
        return None
    return int(TensorStoreWeights(opened, source).read("step", ()))
