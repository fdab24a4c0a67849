"""Files of checkpoints: JSON with clear errors, and directories written whole or not at all."""

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.errors import InputError, as_input_error, check_unicode
from spec_t5x.machine.atomic import check_can_be_made
from spec_t5x.machine.git_lfs import check_fetched
from spec_t5x.machine.paths import expanded

CONFIG_NAME = "config.json"
# The config.json of the native format beside T5X's files, which T5X does not read.
SIDECAR_NAME = "spec_t5x.json"

# Marks in the names of a directory that is being written, and of one that is being replaced.
_STAGE, _RETIRED = "writing", "old"


def read_json(path: Any) -> dict[str, Any]:
    """Returns the JSON object in a ``Path`` or ``GcsPath``, or raises ``InputError``."""
    kinds = OSError, ValueError, RecursionError
    with as_input_error(f"cannot read {path} as JSON", "copy the file again", *kinds):
        check_fetched(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"no file {path}: give a complete checkpoint") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: copy the file again")
    return values


def read_if_there(path: Any) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty dict if the file does not exist."""
    return read_json(path) if path.is_file() else {}


@contextlib.contextmanager
def describing(path: object, what: str, names: Mapping[str, str] = {}) -> Iterator[None]:
    """Turns errors of the code inside, which makes ``what`` of JSON, into an ``InputError``."""
    kinds = ValueError, TypeError, AttributeError, OverflowError, RecursionError
    remedy = "copy the file again"
    try:
        with as_input_error(f"{path} describes no {what}", remedy, *kinds):
            yield
    except InputError as error:
        if str(InputError(path)) in str(error):
            raise
        # ``names`` maps our names of entries to the file's; a word in quotes is a value.
        text = re.sub(r"(?<!['\w])\w+(?!['\w])", lambda w: names.get(w[0], w[0]), str(error))
        raise InputError(f"{path}: {text}") from error
    except KeyError as error:
        raise InputError(f"{path} has no {error.args[0]}: {remedy}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes an indented JSON object; raises ``InputError`` for values that JSON lacks."""
    remedy = "give plain numbers, strings, lists and dicts"
    with as_input_error(f"{path.name} cannot hold these values", remedy, TypeError, ValueError):
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file with default permissions; the library's ``save_file`` sets 0600."""
    # Imported here, because most commands do not need the package.
    from safetensors.numpy import save

    # ``save`` writes memory as it is, and that of a transposed array is in another order.
    in_order = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path.write_bytes(save(in_order, metadata))


def reading_weights(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns all errors of the code inside, which reads weights, into an ``InputError``."""
    return as_input_error(f"cannot read the weights in {path}", "copy the file again", Exception)


def check_inside(name: str, source: object) -> str:
    """Returns ``name``; raises ``InputError`` if this path leads out of the checkpoint."""
    check_unicode(f"{source} names", name)
    if name.startswith("/") or {"..", "\0"} & {*name.split("/"), *name}:
        raise InputError(
            f"{source} names {name!r}, which is outside of the checkpoint: give one that you trust"
        )
    return name


@contextlib.contextmanager
def staged_directory(directory: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory, which is renamed to ``directory`` if the body succeeds.

    If the body fails, ``directory`` is unchanged. With ``overwrite`` an earlier checkpoint is
    removed once the new one is complete. If the process is killed, ``recover``, which readers call,
    restores the earlier checkpoint unless the new one is there; the next write removes leftovers.

    Raises ``InputError`` if ``directory`` is a file or cannot be made or written, or if it has
    files and ``overwrite`` is False or the files are no checkpoint.
    """
    what, remedy = f"cannot write {directory}", "make room there or choose another directory"
    # TensorStore raises ValueError for some of the system's errors.
    with as_input_error(what, remedy, OSError, ValueError), contextlib.ExitStack() as held:
        directory = expanded(directory).resolve()
        recover(directory)
        check_destination(directory, overwrite)
        directory.parent.mkdir(parents=True, exist_ok=True)
        stage = _new_beside(directory, _STAGE)
        with _lock(directory.parent):
            _remove_left(directory)
            stage.mkdir()
            # The lock shows that this process is alive: the system releases it at the end.
            held.enter_context(_lock(stage, wait=False))
        try:
            yield stage
            _replace(directory, stage)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def recover(directory: Path) -> None:
    """Renames back a checkpoint that a killed process moved aside, if ``directory`` is absent."""
    directory = directory.resolve()
    if directory.exists() or not _beside(directory, _RETIRED):
        return
    with contextlib.suppress(OSError), _lock(directory.parent):
        # Checked again under the lock: the other process may be alive and have finished.
        if not directory.exists():
            os.rename(_beside(directory, _RETIRED)[0], directory)


def check_destination(directory: Path, overwrite: bool) -> None:
    """Raises ``InputError`` for a directory that ``staged_directory`` would refuse."""
    if not directory.exists():
        check_can_be_made(directory)
        return
    if not directory.is_dir():
        raise InputError(f"{directory} is a file: choose another directory")
    if not any(directory.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{directory} exists: choose another directory or set overwrite=True")
    # A wrong path must not delete other files of the user, such as checkpoints of a training.
    is_model = {"format", "model_type"} & read_if_there(directory / CONFIG_NAME).keys()
    if not (is_model or (directory / SIDECAR_NAME).is_file()):
        raise InputError(
            f"{directory} holds no {SIDECAR_NAME} and no {CONFIG_NAME} of a model, so it is no "
            "checkpoint to overwrite: choose another directory"
        )
    if steps := sorted(path.name for path in directory.glob("checkpoint*") if path.is_dir()):
        raise InputError(f"{directory} holds {steps[-1]}, which would be deleted: choose another")


def _remove_left(directory: Path) -> None:
    """Removes what dead processes left beside ``directory``, unless ``recover`` needs it."""
    retired = _beside(directory, _RETIRED) if directory.exists() else []
    for path in [*_beside(directory, _STAGE), *retired]:
        with _lock(path, wait=False) as is_free:
            if is_free:
                shutil.rmtree(path, ignore_errors=True)


def _replace(directory: Path, stage: Path) -> None:
    """Renames ``stage`` to ``directory``, and removes the directory that it replaces."""
    if not directory.exists():
        os.rename(stage, directory)
        return
    retired = _new_beside(directory, _RETIRED)
    # Under the lock: ``recover`` in another process must not run between the two renames.
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
    """Lists the directories that ``_new_beside`` named."""
    return sorted(directory.parent.glob(f".{glob.escape(directory.name)}.{kind}-*"))


@contextlib.contextmanager
def _lock(directory: Path, wait: bool = True) -> Iterator[bool]:
    """Yields True with a directory locked, or False if another has the lock or locking fails."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = False
        yield held
