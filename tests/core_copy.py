"""Copies the package and its tests without contrib: ``python -m tests.core_copy DIR``."""

import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_FOLDERS = ("spec_t5x", "tests", "gin_configs", "benchmarks", "examples")
_LEFT_OUT = shutil.ignore_patterns("contrib", "__pycache__", "pretrained")


# Runs at Python's start: an editable installation's import hook would find the omitted folders.
_SITE = """import sys

def is_editable(finder):
    return "editable" in getattr(finder, "__module__", "")


sys.meta_path = [finder for finder in sys.meta_path if not is_editable(finder)]
"""


def write(directory: Path) -> None:
    """Writes the copy to an existing directory, with a link to the packaged models."""
    (directory / "sitecustomize.py").write_text(_SITE)
    for name in _FOLDERS:
        shutil.copytree(REPOSITORY / name, directory / name, ignore=_LEFT_OUT)
    shutil.copy(REPOSITORY / "pytest.ini", directory)
    models = REPOSITORY / "spec_t5x" / "pretrained"
    (directory / "spec_t5x" / "pretrained").symlink_to(models, target_is_directory=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
