"""Versions of installed packages; imports none of them."""

import importlib.metadata
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement


def version(package: str) -> str | None:
    """Returns the installed version, or None if there is none, as for a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str, extras: Collection[str] = ()) -> Iterator[Requirement]:
    """Yields an installed package's requirements on this machine, with those of some extras.

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
    """Returns why no installed version meets a requirement, with the remedy, or None."""
    found, wanted = version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if found is None:
        return f"{requirement.name} is not installed: pip install '{wanted}'"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}: pip install '{wanted}'"
