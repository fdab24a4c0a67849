"""What a run was begun with, so that its answers are never mixed with another's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.inference.inputs import Survey

NAME = "manifest.json"
FORMAT = "spec_t5x predictions"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A run's inputs and settings."""

    # Where the inputs were read from; not compared: a file may be moved.
    source: str
    # Number of inputs, and the SHA-256 (hex) of each shard's.
    count: int
    digests: list[str]
    # All that decides what is answered, as JSON holds it; a checkpoint is
    # {"name": ..., "content": ...}, of which the content is compared.
    settings: dict[str, Any]

    @classmethod
    def create(cls, source: str, survey: Survey, settings: dict[str, Any]) -> "Manifest":
        """The manifest of a run that begins."""
        plain = json.loads(json.dumps(settings))
        return cls(source=source, count=survey.count, digests=survey.digests, settings=plain)

    def content(self) -> bytes:
        """What ``manifest.json`` holds."""
        values = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        return json.dumps(values, indent=1).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of the run in a directory, None where none was begun.

    Raises:
      InputError: it is not one that this release writes.
    """
    path = directory / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if (values.pop("format"), values.pop("version")) != (FORMAT, VERSION):
            raise ValueError("of another format")
        return Manifest(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} is no manifest of this release's ({error}): give another --output_dir, or "
            "--overwrite"
        ) from error


def check_same(before: Manifest, now: Manifest, directory: Path) -> None:
    """What a directory was begun with is what it is now to go on with.

    Raises:
      InputError: something differs; all that does is named.
    """
    different = _settings_that_differ(before.settings, now.settings)
    if not different and (before.count, before.digests) != (now.count, now.digests):
        different = [_inputs_that_differ(before, now)]
    if different:
        raise InputError(
            f"{directory} was begun with something else ({'; '.join(different)}): give the same "
            "again, another --output_dir, or --overwrite to start anew"
        )


def _settings_that_differ(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {_show(before.get(name))} and is {_show(now.get(name))}"
        for name in dict.fromkeys([*before, *now])
        if _compared(before.get(name)) != _compared(now.get(name))
    ]


def _compared(value: Any) -> Any:
    return value["content"] if _is_checkpoint(value) else value


def _show(value: Any) -> str:
    if not _is_checkpoint(value):
        return json.dumps(value, ensure_ascii=False)
    return f"{value['name']} ({value['content'] and value['content'][:12]})"


def _is_checkpoint(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"name", "content"}


def _inputs_that_differ(before: Manifest, now: Manifest) -> str:
    if before.count != now.count:
        return f"{before.count} inputs of {before.source} are now {now.count} of {now.source}"
    pairs = enumerate(zip(before.digests, now.digests, strict=True))
    shard = next(number for number, (old, new) in pairs if old != new)
    return f"the inputs of shard {shard} of {len(now.digests)} are now others in {now.source}"
