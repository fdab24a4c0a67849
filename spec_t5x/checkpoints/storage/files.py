"""Checkpoint directories: JSON that explains its faults, all-or-nothing writes."""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.machine.git_lfs import check_fetched

CONFIG_NAME = "config.json"
# Beside T5X's files, which it does not read: the config.json of our own format.
SIDECAR_NAME = "spec_t5x.json"

# What a directory is called while it is written, and while another takes its place.
_STAGE, _RETIRED = "writing", "old"


def read_json(path: Any) -> dict[str, Any]:
    """The JSON object in a file, a ``Path`` or one in a bucket."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"no file {path}: give a complete checkpoint") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        check_fetched(path)
        raise InputError(
            f"cannot read {path} as JSON ({one_line(error)}): copy the file again"
        ) from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: copy the file again")
    return values


def read_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one without the file."""
    return read_json(path) if path.is_file() else {}


@contextlib.contextmanager
def describing(path: object, what: str) -> Iterator[None]:
    """Around code that makes ``what`` of a JSON file's values.

    Raises:
        InputError: in place of the errors of values that are absent or do not fit.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path} has no {error.args[0]}: copy the file again") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} describes no {what} ({one_line(error)}): copy the file again"
        ) from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON object for people to read."""
    try:
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path.name} cannot hold these values ({one_line(error)}): "
            "give plain numbers, strings, lists and dicts"
        ) from error
    path.write_text(text + "\n", encoding="utf-8")


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file; the library's own function makes one that nobody else may read."""
    # Imported where weights move: the command line starts without it.
    from safetensors.numpy import save

    # Of a transposed array the memory lies in another order.
    in_order = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path.write_bytes(save(in_order, metadata))


@contextlib.contextmanager
def reading_weights(path: Path) -> Iterator[None]:
    """Around code that reads a file of weights: what it raises becomes an ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): copy the file again"
        ) from error


def check_inside(name: str, source: object) -> str:
    """A file's name as a checkpoint gives it, unless it leads out of the checkpoint.

    Raises:
        InputError: it is absolute or goes to a parent; ``source`` is what names it.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InputError(
            f"{source} names {name!r}, which is outside of the checkpoint: use one that you trust"
        )
    return name


def one_line(error: BaseException) -> str:
    """The gist of an error, for a message that must stay on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@contextlib.contextmanager
def staged_directory(directory: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a directory beside ``directory`` that takes its place at the end.

    When the body fails, nothing has changed. With ``overwrite`` an earlier
    checkpoint is removed, once the new one is complete. A process that is killed, wherever, leaves
    the earlier checkpoint or the new one under the name, once ``recover`` was called, as whatever
    reads checkpoints does; what else it leaves goes when the name is written next.

    Raises:
        InputError: something is there already, and it is not an empty directory
            or ``overwrite`` is not set; or it is no checkpoint.
    """
    directory = Path(directory).resolve()
    recover(directory)
    check_destination(directory, overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _stage_of(directory) as stage:
        yield stage
        _replace(directory, stage)


def recover(directory: Path) -> None:
    """Puts back a checkpoint that a killed process had moved aside to write another."""
    directory = directory.resolve()
    if directory.exists() or not _beside(directory, _RETIRED):
        return
    with contextlib.suppress(OSError), _lock(directory.parent):
        # The process may be alive and done by now.
        if not directory.exists():
            os.rename(_beside(directory, _RETIRED)[0], directory)


def check_destination(directory: Path, overwrite: bool) -> None:
    """Refuses what ``staged_directory`` would refuse."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise InputError(f"{directory} is a file: choose another directory")
    if not any(directory.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{directory} exists: choose another directory or set overwrite=True")
    # A wrong path must not cost anybody their files.
    if not any((directory / name).is_file() for name in (CONFIG_NAME, SIDECAR_NAME)):
        raise InputError(
            f"{directory} holds no {CONFIG_NAME} and no {SIDECAR_NAME}, so it is no checkpoint to "
            "overwrite: choose another directory"
        )


@contextlib.contextmanager
def _stage_of(directory: Path) -> Iterator[Path]:
    """A new directory beside ``directory``, removed at the end; so are those left by the dead.

    Living processes hold a lock on theirs, which the system releases when they end.
    """
    stage = _new_beside(directory, _STAGE)
    with contextlib.ExitStack() as held:
        with _lock(directory.parent):
            left = _beside(directory, _STAGE)
            left += _beside(directory, _RETIRED) if directory.exists() else []
            for path in left:
                with _lock(path, wait=False) as is_free:
                    if is_free:
                        shutil.rmtree(path, ignore_errors=True)
            stage.mkdir()
            held.enter_context(_lock(stage, wait=False))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _replace(directory: Path, stage: Path) -> None:
    """Gives ``stage`` the name ``directory``; what had it is gone."""
    if not directory.exists():
        os.rename(stage, directory)
        return
    retired = _new_beside(directory, _RETIRED)
    # Others wait, rather than to find nothing and recover.
    with _lock(directory.parent):
        os.rename(directory, retired)
        try:
            os.rename(stage, directory)
        except OSError:
            os.rename(retired, directory)
            raise
    shutil.rmtree(retired, ignore_errors=True)


def _new_beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}-{uuid.uuid4().hex[:8]}")


def _beside(directory: Path, kind: str) -> list[Path]:
    """What processes have under the names of ``_new_beside``."""
    return sorted(directory.parent.glob(f".{glob.escape(directory.name)}.{kind}-*"))


@contextlib.contextmanager
def _lock(directory: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a directory's lock, or yields False.

    Where another process holds it and ``wait`` is not set, and where the file system keeps none.
    """
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            held = False
        else:
            held = True
        yield held
