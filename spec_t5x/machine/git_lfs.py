"""Detection of Git LFS pointers, which a clone without ``git lfs pull`` has in place of files."""

from pathlib import Path

from spec_t5x.errors import InputError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: object) -> None:
    """Raises ``InputError`` if a file of this machine exists and is a Git LFS pointer."""
    if not (isinstance(path, Path) and path.is_file()):
        return
    with path.open("rb") as file:
        if file.read(len(_BEGINNING)) == _BEGINNING:
            what = f"{path} is a pointer of Git LFS, not the file itself"
            raise InputError(f"{what}: run `git lfs pull` in its repository")
