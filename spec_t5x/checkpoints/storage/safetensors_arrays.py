"""A few arrays in one file, as safetensors has them: the weights of what is no whole model."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.storage.files import one_line
from spec_t5x.errors import InputError


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, as they are."""
    # Imported where weights move, as in ``huggingface/reading.py``.
    from safetensors.numpy import save_file

    # Written is the memory as it lies: that of a transposed array lies otherwise.
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what ``write_arrays`` wrote, in float32.

    Raises:
        InputError: there is no such file, or it is damaged.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise InputError(f"no file {path}: copy the whole checkpoint")
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name).astype(np.float32) for name in names}
    except Exception as error:  # safetensors raises assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): copy the file again"
        ) from error
