"""The content of a checkpoint, whatever it is called and wherever it is stored.

A digest is of the content, so that a checkpoint may be copied or moved between a
kill and the restart. Of a large file it takes in the size and samples from all over it:
weights that were trained on differ everywhere, and 45 GB need not be read. Of a checkpoint
in ``gs://`` it takes in the address and the names there alone, and of one on the Hugging Face
Hub the commit.
"""

import hashlib
import re
from pathlib import Path

from spec_t5x.checkpoints.loading import PACKAGED_MODELS, find_directory, is_on_hub
from spec_t5x.checkpoints.storage.locations import locate
from spec_t5x.checkpoints.t5x.index import find_t5x

_WHOLE = 1 << 20  # bytes; files up to this size are read whole
_SAMPLES = 64
_SAMPLE = 4096  # bytes


def files_digest(name: str | None, output_dir: str | None = None) -> dict[str, str | None]:
    """Name and content of a checkpoint, or of a draft such as ``cascade:DIR,bigram``.

    Args:
      name: as on the command line.
      output_dir: the run's own, which may lie below the checkpoint and is no part of it.

    Returns:
      ``{"name": as given, "content": the name with a hash (hex) for each place in it}``.
      Two digests are of one thing if their contents are equal.
    """
    if name is None:
        return {"name": None, "content": None}
    output = None if output_dir is None else Path(output_dir).expanduser().resolve()
    whole = _content(name, output)
    if whole is not None:
        return {"name": name, "content": whole}
    parts = re.split("(:(?!//)|,)", name)
    return {"name": name, "content": "".join(_content(part, output) or part for part in parts)}


def _content(name: str, output: Path | None) -> str | None:
    """The hash of what lies at ``name``, None where nothing does."""
    if not name:
        return None
    if name.startswith("gs://"):
        # What is published in a bucket does not change: its address and names identify it.
        location = locate(name)
        names = [str(location), *(entry.name for entry in location.iterdir())]
        return hashlib.sha256("\0".join(names).encode()).hexdigest()
    if is_on_hub(name):
        # What else is in the cache's directory depends on who downloaded it.
        directory = find_directory(name)
        commit = f"{directory.parents[1].name}@{directory.name}"
        return hashlib.sha256(commit.encode()).hexdigest()
    packaged = PACKAGED_MODELS / name
    path = Path(name).expanduser()
    path = path if path.exists() or not packaged.is_dir() else packaged
    if path.is_file():
        return _of_files(path.parent, [path])
    if not path.is_dir():
        return None
    # Of a model's directory the checkpoint that is read, not what is beside it.
    directory = (find_t5x(path) or path).resolve()
    files = (file for file in directory.rglob("*") if file.is_file())
    outside = (file for file in files if output is None or not file.is_relative_to(output))
    return _of_files(directory, sorted(outside))


def _of_files(directory: Path, paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(f"{path.relative_to(directory)}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                total.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
                total.update(file.read(_SAMPLE))
    return total.hexdigest()
