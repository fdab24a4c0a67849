"""What the project's own formats have in common: a config.json that says which one it is."""

from typing import Any

from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.errors import InputError


def check_stored_dtype(dtype: str) -> None:
    """Raises ``InputError`` for a type that weights are not stored in."""
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"stored dtype is {dtype!r}: choose bfloat16 or float32")


def with_extra(metadata: dict[str, Any], extra: dict[str, Any] | None) -> dict[str, Any]:
    """A config.json with entries of the caller's.

    Raises:
        InputError: an extra entry of a name of the format's own.
    """
    extra = extra or {}
    taken = sorted(set(metadata) & set(extra))
    if taken:
        raise InputError(f"extra entry {taken[0]!r} is the format's own: rename it")
    return {**metadata, **extra}


def check_format(
    metadata: dict[str, Any], path: Location, name: str, version: int, remedy: str
) -> None:
    """Refuses a config.json of something else.

    Args:
        metadata: what it says.
        path: where it was read.
        name, version: of the format.
        remedy: what to do about another format.

    Raises:
        InputError: it is of another format or version.
    """
    if metadata.get("format") != name:
        raise InputError(f"{path} has format {metadata.get('format')!r}, not {name!r}: {remedy}")
    if metadata.get("version") != version:
        raise InputError(
            f"{path} has version {metadata.get('version')!r}, this spec_t5x reads "
            f"{version}: install the release that wrote it"
        )
