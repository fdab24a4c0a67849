"""The package's requirements on other packages, read without importing them."""

import importlib.metadata
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement

from spec_t5x.machine.extras import version


def requirements(extras: Collection[str] = ()) -> Iterator[Requirement]:
    """Yields the package's requirements on other packages, those of ``extras`` included.

    Requirements for other machines are left out. Raises ``PackageNotFoundError`` if the package is
    not installed.
    """
    for text in importlib.metadata.requires("spec_t5x") or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if applies and requirement.name != "spec_t5x":
            yield requirement


def unmet(requirement: Requirement) -> str | None:
    """Returns why the requirement is not met, with the remedy; None if it is met."""
    found, wanted = version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if found is None:
        return f"{requirement.name} is not installed: pip install '{wanted}'"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}: pip install '{wanted}'"
