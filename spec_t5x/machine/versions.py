"""Versions of what is installed; imports none of it."""

import importlib.metadata


def version(package: str) -> str | None:
    """The installed version; None where there is none, as of a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
