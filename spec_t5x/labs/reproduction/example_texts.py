"""Texts that the measurements decode: the package's examples, or the first of a user's files."""

import itertools
import json
from pathlib import Path

from spec_t5x.errors import InputError
from spec_t5x.labs.text_pairs import read_pairs

_EXAMPLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# English sentences, everyday language first; long descriptions of software packages.
SENTENCES = tuple(_EXAMPLES["sentences"])
DESCRIPTIONS = tuple(_EXAMPLES["descriptions"])

# Where ``data_dir`` has texts of each kind: file, column and number of columns.
_FILES = {
    SENTENCES: ("ende/dev.tsv.gz", 1, 3),
    DESCRIPTIONS: ("summarize/debian_dev.tsv.gz", 0, 2),
}


def read(examples: tuple[str, ...], data_dir: Path | None, count: int) -> list[str]:
    """Reads the first ``count`` texts that are not empty, or as many as there are.

    Args:
      examples: ``SENTENCES`` or ``DESCRIPTIONS``: the texts themselves if ``data_dir`` is None,
        or else the kind of texts to read from it.
      data_dir: has ``ende/dev.tsv.gz`` and ``summarize/debian_dev.tsv.gz``.
      count: at least 1.

    Raises:
      InputError: the file in ``data_dir`` cannot be read.
    """
    if data_dir is None:
        return list(examples[:count])
    name, column, num_columns = _FILES[examples]
    pairs = read_pairs(data_dir / name, column, column, num_columns)
    return list(itertools.islice((text for text, _ in pairs if text), count))


def check(data_dir: Path | None) -> None:
    """Raises ``InputError`` unless ``data_dir`` is None, or a directory with both files."""
    if data_dir is None:
        return
    if not data_dir.is_dir():
        raise InputError(f"data_dir is {data_dir}, which is not a directory: give one")
    for name, *_ in _FILES.values():
        if not (data_dir / name).is_file():
            raise InputError(
                f"data_dir is {data_dir}, which holds no {name}: give one that does, or leave it "
                "out for the texts of the package"
            )
