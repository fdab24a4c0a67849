"""Versions of what is installed; imports none of it."""

import importlib.metadata
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement


def version(package: str) -> str | None:
    """The installed version; None where there is none, as of a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str, extras: Collection[str] = ()) -> Iterator[Requirement]:
    """Requirements of an installed package here, with those of some of its extras.

    Raises:
      importlib.metadata.PackageNotFoundError: it is not installed.
    """
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if applies and requirement.name != package:
            yield requirement


def unmet(requirement: Requirement) -> str | None:
    """Why what is installed does not meet a requirement, with the remedy; None where it does."""
    found, wanted = version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if found is None:
        return f"{requirement.name} is not installed: pip install '{wanted}'"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}: pip install '{wanted}'"
