"""What a checkpoint is, whatever it is called and wherever it lies.

A fingerprint is of the content, so that a checkpoint may be copied or moved between a
kill and the restart. Of a large file it takes in the size and samples from all over it:
weights that were trained on differ everywhere, and 45 GB need not be read. Of a checkpoint
in ``gs://`` it takes in the address and the names there alone.
"""

import hashlib
import re
from pathlib import Path

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.checkpoints.storage.locations import GcsPath, locate
from spec_t5x.checkpoints.t5x.index import find_t5x

_WHOLE = 1 << 20  # bytes; files up to this size are read whole
_SAMPLES = 64
_SAMPLE = 4096  # bytes


def fingerprint(name: str | None, output_dir: str | None = None) -> dict[str, str | None]:
    """Name and content of a checkpoint, or of a draft such as ``cascade:DIR,bigram``.

    Args:
      name: as on the command line.
      output_dir: the run's own, which may lie below the checkpoint and is no part of it.

    Returns:
      ``{"name": as given, "content": the name with a hash (hex) for each place in it}``.
      Two fingerprints are of one thing if their contents are equal.
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
        return _of_bucket(locate(name))
    packaged = PACKAGED_MODELS / name
    path = Path(name).expanduser()
    path = path if path.exists() or not packaged.is_dir() else packaged
    if path.is_dir():
        return _of_directory(path, output)
    return _of_files(path.parent, [path]) if path.is_file() else None


def _of_directory(directory: Path, output: Path | None) -> str:
    # Of a model's directory the checkpoint that is read, not what stands around it.
    directory = (find_t5x(directory) or directory).resolve()
    paths = (path for path in directory.rglob("*") if path.is_file())
    outside = (path for path in paths if output is None or not path.is_relative_to(output))
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


def _of_bucket(location: GcsPath) -> str:
    # What is published in a bucket stays as it is: its address and the names in it do.
    names = [str(location), *(entry.name for entry in location.iterdir())]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
