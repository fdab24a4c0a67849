"""Digests of checkpoints, by which a resumed run recognizes its checkpoints even if they moved.

The digest of a large file covers its size and samples spread over it: training changes weights
everywhere, so that 45 GB need not be read. For a checkpoint in ``gs://`` the digest covers the
address and the names of its files, and for one on the Hugging Face Hub the repository and commit.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

from spec_t5x.checkpoints.loading import PACKAGED_MODELS, find_directory, is_on_hub, open_model
from spec_t5x.checkpoints.storage.files import CONFIG_NAME
from spec_t5x.checkpoints.storage.locations import locate
from spec_t5x.checkpoints.storage.vocabularies import vocabulary_folders
from spec_t5x.checkpoints.t5x.index import find_t5x
from spec_t5x.errors import InputError
from spec_t5x.machine.paths import expanded

_WHOLE = 1 << 20  # bytes; files up to this size are read whole
_SAMPLES = 64
_SAMPLE = 4096  # bytes


def files_digest(name: str | None, output_dir: str | None = None) -> dict[str, str | None]:
    """Returns ``{"name": name, "content": digest}`` of a checkpoint or a draft (``cascade:DIR``).

    The digest is ``name`` with a hash (hex) for each checkpoint in it; None if ``name`` is None.
    Files in ``output_dir``, which the run writes and which may be in the checkpoint, are excluded.
    """
    if name is None:
        return {"name": None, "content": None}
    output = None if output_dir is None else expanded(output_dir).resolve()
    parts = re.split("(:(?!//)|,)", name)
    found = _content(name, output) or "".join(_content(part, output) or part for part in parts)
    return {"name": name, "content": found}


def _content(name: str, output: Path | None) -> str | None:
    """Returns the hash (hex) of the checkpoint or file at ``name``; None if there is neither."""
    if not name:
        return None
    if name.startswith("gs://"):
        # A published bucket does not change: its address and names identify it.
        location = locate(name)
        names = [str(location), *(entry.name for entry in location.iterdir())]
        return hashlib.sha256("\0".join(names).encode()).hexdigest()
    if is_on_hub(name):
        # A commit identifies all files; those in the cache depend on what was downloaded.
        directory = find_directory(name)
        commit = f"{directory.parents[1].name}@{directory.name}"
        return hashlib.sha256(commit.encode()).hexdigest()
    path = next(filter(Path.exists, (expanded(name), PACKAGED_MODELS / name)), None)
    if path is not None and path.is_file():
        return _of_files(path.parent, [path])
    if path is None or not path.is_dir():
        return None
    # Only the latest checkpoint of a T5X model's directory is read, and hashed.
    found = None if (path / CONFIG_NAME).is_file() else find_t5x(path)
    directory = (found or path).resolve()
    files = (file for file in sorted(directory.rglob("*")) if os.path.isfile(file))
    is_of_training = found is not None or len(vocabulary_folders(directory)) > 1
    beside = _settings(path) if is_of_training else ""
    return _of_files(directory, [file for file in files if output not in file.parents], beside)


def _settings(directory: Path) -> str:
    """Describes what a training's weights are read with, which may be beside its checkpoint."""
    try:
        model = open_model(directory, downloads=False)
    except InputError:
        return ""
    return f"{model.config} {model.vocabulary and model.vocabulary.fingerprint()}"


def _of_files(directory: Path, paths: list[Path], beside: str = "") -> str:
    total = hashlib.sha256(beside.encode())
    for path in paths:
        size = path.stat().st_size
        total.update(f"{path.relative_to(directory)}\0{size}\0".encode())
        # One that may not be read, such as another user's optimizer state, counts by name and size.
        with contextlib.suppress(PermissionError), path.open("rb") as file:
            if size <= _WHOLE:
                total.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
                total.update(file.read(_SAMPLE))
    return total.hexdigest()
