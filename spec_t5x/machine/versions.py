"""Versions of installed packages, read without importing the packages."""

import importlib.metadata


def version(package: str) -> str | None:
    """Returns a package's version; None if it is not installed, as in a source checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
