"""What the measurements decode: the user's data, or the texts that come with the package."""

import dataclasses
import hashlib
import itertools
from pathlib import Path

from spec_t5x.data.tsv import read_pairs
from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction.example_texts import DESCRIPTIONS, SENTENCES
from spec_t5x.experiments.reproduction.items import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Sources to decode."""

    # For the report: which they are.
    name: str
    texts: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Of the texts themselves, in their order (hex): what a result depends on."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """Where texts of one kind are found."""

    # In ``Setting.data_dir``.
    file: str
    column: int
    num_columns: int
    # Without a ``data_dir``.
    examples: tuple[str, ...]
    kind: str


_ENGLISH = _Source(
    file="ende/dev.tsv.gz", column=1, num_columns=3, examples=SENTENCES, kind="English sentences"
)
_PACKAGES = _Source(
    file="summarize/debian_dev.tsv.gz",
    column=0,
    num_columns=2,
    examples=DESCRIPTIONS,
    kind="package descriptions",
)


def sentences(setting: Setting, count: int) -> Texts:
    """The first ``count`` English sentences, or as many as there are.

    Raises:
      InputError: the file in ``data_dir`` cannot be read.
    """
    return _read(_ENGLISH, setting, count)


def descriptions(setting: Setting, count: int) -> Texts:
    """The first ``count`` long descriptions of packages, or as many as there are.

    Raises:
      InputError: the file in ``data_dir`` cannot be read.
    """
    return _read(_PACKAGES, setting, count)


def check(setting: Setting) -> None:
    """Before anything is computed: the data is where the setting says.

    Raises:
      InputError: ``data_dir`` is no directory, or lacks a file.
    """
    if setting.data_dir is None:
        return
    if not setting.data_dir.is_dir():
        raise InputError(f"data_dir is {setting.data_dir}, which is no directory: give one")
    for source in (_ENGLISH, _PACKAGES):
        if not (setting.data_dir / source.file).is_file():
            raise InputError(
                f"data_dir is {setting.data_dir}, which holds no {source.file}: give one that "
                "does, or leave it out for the texts of the package"
            )


def _read(source: _Source, setting: Setting, count: int) -> Texts:
    if count < 1:
        raise InputError(f"count is {count}: give at least 1")
    if setting.data_dir is None:
        texts = source.examples[:count]
        return Texts(name=f"{len(texts)} {source.kind} that come with the package", texts=texts)
    texts = tuple(itertools.islice(_lines(setting.data_dir / source.file, source), count))
    return Texts(name=f"the first {len(texts)} {source.kind} of {source.file}", texts=texts)


def _lines(path: Path, source: _Source):
    columns = (source.column, source.column, source.num_columns)
    return (text for text, _ in read_pairs(path, *columns) if text)
