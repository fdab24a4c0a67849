"""Copies the package and its tests without a ring: ``python -m tests.core_copy DIR``."""

import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_FOLDERS = ("spec_t5x", "tests", "gin_configs", "benchmarks", "examples")

# Runs at Python's start: an editable installation's import hook would find the omitted folders.
_SITE = """import sys

def is_editable(finder):
    return "editable" in getattr(finder, "__module__", "")


sys.meta_path = [finder for finder in sys.meta_path if not is_editable(finder)]
"""


def write(directory: Path, *rings: str) -> None:
    """Writes the copy without ``rings`` to an existing directory, and links the packaged models."""
    left_out = shutil.ignore_patterns(*rings, "__pycache__", "pretrained")
    (directory / "sitecustomize.py").write_text(_SITE)
    for name in _FOLDERS:
        shutil.copytree(REPOSITORY / name, directory / name, ignore=left_out)
    shutil.copy(REPOSITORY / "pytest.ini", directory)
    models = REPOSITORY / "spec_t5x" / "pretrained"
    (directory / "spec_t5x" / "pretrained").symlink_to(models, target_is_directory=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), "contrib")
