"""What the project's own formats share: config.json and, of drafts, one safetensors file.

A draft that builds on a target's parameters keeps *marks* of it, by which it knows it again.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    one_line,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.errors import InputError


def check_stored_dtype(dtype: str) -> None:
    """Raises ``InputError`` for a type that weights are not stored in."""
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"stored dtype is {dtype!r}: choose bfloat16 or float32")


def with_extra(metadata: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
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
    """Refuses the config.json ``path`` of another format or version; ``remedy`` is for the former.

    Raises:
        InputError: always then.
    """
    if metadata.get("format") != name:
        raise InputError(f"{path} has format {metadata.get('format')!r}, not {name!r}: {remedy}")
    if metadata.get("version") != version:
        raise InputError(
            f"{path} has version {metadata.get('version')!r}, this spec_t5x reads "
            f"{version}: install the release that wrote it"
        )


def write_draft(
    directory: str | Path,
    metadata: dict[str, Any],
    file: str,
    arrays: Mapping[str, np.ndarray],
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes config.json and, to ``file``, arrays by name, completely or not at all.

    Raises:
        InputError: the directory is taken, or an extra entry has a name of the format's own.
    """
    # Imported where weights move: the command line starts without it.
    from safetensors.numpy import save

    metadata = with_extra(metadata, extra)
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, metadata)
        # Of a transposed array the memory lies in another order. ``save_file`` would make a
        # file that nobody else may read.
        in_order = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        (stage / file).write_bytes(save(in_order))


def write_target_draft(
    directory: str | Path,
    metadata: dict[str, Any],
    file: str,
    params: Mapping[str, Any],
    target: LoadedModel,
    *,
    dtype: str,
    exact: Mapping[str, np.ndarray] | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """``write_draft`` of parameters, stored as ``dtype``, with the marks of their target.

    ``exact`` are more arrays, which are stored as they are.
    """
    check_stored_dtype(dtype)
    marks = {
        "vocabulary": target.vocabulary.fingerprint(),
        "fingerprint": target_fingerprint(target),
    }
    stored = {name: np.asarray(leaf).astype(jnp.dtype(dtype)) for name, leaf in params.items()}
    write_draft(
        directory,
        {**metadata, "target": marks, "stored_dtype": dtype},
        file,
        {**stored, **(exact or {})},
        extra=extra,
        overwrite=overwrite,
    )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a file that ``write_draft`` wrote, as they are stored.

    Raises:
        InputError: there is no such file, or it is damaged.
    """
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors raises assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): copy the file again"
        ) from error


def target_fingerprint(target: LoadedModel) -> str:
    """A hash that tells trained targets apart, whatever type they were loaded as.

    Of the scale of the decoder's last norm, which all training changes; in bfloat16, the
    coarsest type that models are stored and loaded in.
    """
    scale = np.asarray(_last_scale(target))
    return hashlib.sha256(scale.astype(jnp.bfloat16).tobytes()).hexdigest()


def check_belongs(
    what: str,
    directory: Location,
    metadata: dict[str, Any],
    target: LoadedModel,
    sizes: dict[str, tuple[int, int]],
) -> None:
    """Refuses a draft of another target.

    Args:
        what: what the draft is, such as "heads".
        directory: where it was read from.
        metadata: its config.json.
        target: the model that will verify it. Its parameters are compared where they can be
            read: a program's trace has none.
        sizes: by what they are of, the draft's number and the target's.

    Raises:
        InputError: they differ, or vocabulary or target are not those of the marks.
    """
    marks = metadata.get("target")
    marks = marks if isinstance(marks, dict) else {}
    pairs = sizes | {"vocabulary": (marks.get("vocabulary"), target.vocabulary.fingerprint())}
    if _is_known(_last_scale(target)):
        pairs["decoder"] = (marks.get("fingerprint"), target_fingerprint(target))
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise InputError(
                f"{what} {directory} are for {name} {str(ours)[:12]} and target "
                f"{target.directory} has {str(theirs)[:12]}: give {what} that were trained for "
                "this target"
            )


def _last_scale(target: LoadedModel) -> Any:
    return target.params["decoder"]["decoder_norm"]["scale"]


def _is_known(values: Any) -> bool:
    """Whether this process can read them: no shapes, not traced, not on other hosts."""
    if isinstance(values, jax.ShapeDtypeStruct | jax.core.Tracer):
        return False
    if isinstance(values, jax.Array):
        return values.is_fully_addressable or values.is_fully_replicated
    return True
