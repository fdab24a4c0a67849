"""Hugging Face's files of weights, opened and read by slices, and written.

Files of safetensors and PyTorch are mapped into memory: a slice that is not needed is not read.
"""

import dataclasses
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

# Imported because it registers bfloat16 with numpy, and so for safetensors.
import ml_dtypes  # noqa: F401
import numpy as np

from spec_t5x.checkpoints.storage.files import (
    check_inside,
    read_json,
    reading_weights,
    save_arrays,
    write_json,
)
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import EXTRAS
from spec_t5x.machine.git_lfs import check_fetched

# Names of the weights in order of preference; an index lists shards.
INDEX_ENDING = ".index.json"
TORCH_WEIGHTS = ("pytorch_model.bin", f"pytorch_model.bin{INDEX_ENDING}")
WEIGHTS = ("model.safetensors", f"model.safetensors{INDEX_ENDING}", *TORCH_WEIGHTS)

# safetensors' names of types, as numpy's.
_SAFETENSORS_TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"},
}

# In earlier releases torch.load runs a file's code in spite of ``weights_only`` (CVE-2025-32434).
_SAFE_TORCH = (2, 6)

# Prefixes that DistributedDataParallel, torch.compile and trainers put before all names.
WRAPPERS = ("module.", "_orig_mod.", "model.")

# Rows compared at a time: a bound on memory.
_ROWS = 4096

# Largest file of a model in bytes: a file is in memory while it is written.
SHARD_BYTES = 10**9


def open_tensors(directory: Path) -> dict[str, Tensor]:
    """Opens every tensor in a directory, by its name there, and reads none."""
    tensors = {}
    for path in weight_files(directory):
        check_fetched(path)
        open_file = _open_safetensors if path.suffix == ".safetensors" else _open_torch
        with reading_weights(path):
            tensors |= open_file(path)
    return tensors


def transposed(tensor: Tensor) -> Tensor:
    """Returns the transpose of a matrix."""
    return dataclasses.replace(
        tensor,
        shape=tensor.shape[::-1],
        read=lambda index: np.ascontiguousarray(tensor.read(index[::-1]).T),
    )


def renumbered(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Returns the matrix whose row i is row ``rows[i]`` of ``tensor``."""

    def read(index):
        ours, columns = index
        return tensor.read((slice(0, tensor.shape[0]), columns))[rows[ours]]

    return dataclasses.replace(tensor, shape=(len(rows), *tensor.shape[1:]), read=read)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Returns a tensor times a number, in float32."""

    def read(index):
        return tensor.read(index).astype(np.float32) * np.float32(factor)

    return dataclasses.replace(tensor, dtype="float32", read=read)


def same_table(one: Tensor, other: Tensor) -> bool:
    """Tells whether two matrices hold the same numbers."""
    if one is other:
        return True
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    rows, width = one.shape
    blocks = [
        (slice(start, min(start + _ROWS, rows)), slice(0, width)) for start in range(0, rows, _ROWS)
    ]
    # NaN equals NaN here: the check for NaN has the better message.
    return all(np.array_equal(one.read(i), other.read(i), equal_nan=True) for i in blocks)


def check_shared(one: Tensor, other: Tensor, directory: Path) -> None:
    """Refuses embeddings of encoder and decoder that differ, where the network has one for both."""
    if not same_table(one, other):
        raise InputError(
            f"{directory}: {one.name} differs from {other.name}, and encoder and decoder have one "
            "embedding here: give a model that was trained with one"
        )


def unwrapped(tensors: dict[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    """Returns tensors without the prefixes that a wrapper put before every name."""
    while prefix := next((p for p in prefixes if all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Lists the files of a directory's weights, all of which exist."""
    present = [directory / name for name in WEIGHTS if (directory / name).is_file()]
    if not present:
        raise InputError(
            f"{directory} holds no weights: copy model.safetensors or "
            "pytorch_model.bin, or the shards and their index, there"
        )
    if not present[0].name.endswith(INDEX_ENDING):
        return present[:1]
    weight_map = read_json(present[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{present[0]} has no weight_map: copy the file again")
    names = sorted(set(map(str, weight_map.values())))
    shards = [directory / check_inside(name, present[0]) for name in names]
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"no file {shard}, which {present[0].name} lists: copy it there")
    return shards


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    file = safe_open(path, framework="numpy")
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    return {
        name: Tensor(
            name=name,
            shape=tuple(part.get_shape()),
            dtype=_SAFETENSORS_TYPES.get(part.get_dtype(), part.get_dtype()),
            read=reading_weights(path)(part.__getitem__),
        )
        for name, part in parts.items()
    }


def check_torch(path: object) -> None:
    """Refuses a file of PyTorch's without a PyTorch that reads it safely."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} needs PyTorch to be read: {EXTRAS['torch'].remedy}, or convert it to "
            "model.safetensors"
        ) from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise InputError(
            f"{path} is a pickle, which PyTorch {torch.__version__} would run code of: "
            f"pip install 'torch>={'.'.join(map(str, _SAFE_TORCH))}', or convert it to "
            "model.safetensors"
        )


def _open_torch(path: Path) -> dict[str, Tensor]:
    check_torch(path)
    import torch

    def read(tensor):
        def part(index):
            found = tensor[index]
            # numpy has no bfloat16 that torch could return; float32 holds it exactly.
            return (found.float() if found.dtype == torch.bfloat16 else found).contiguous().numpy()

        return part

    # weights_only: a pickle from elsewhere must not run code. Files of before 2020 are
    # no archives, and cannot be mapped into memory.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {
        name: Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            read=reading_weights(path)(read(tensor)),
        )
        for name, tensor in state.items()
    }


def write_safetensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes ``model.safetensors``, or files of ``SHARD_BYTES`` at most and their index.

    The tensors of one file are in memory at a time; one that is larger has its own file.
    """
    shards, total, size, pending = [], 0, 0, {}

    def write_shard():
        save_arrays(directory / f"shard-{len(shards)}", pending, {"format": "pt"})
        shards.append(list(pending))

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            write_shard()
            size, pending = 0, {}
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write_shard()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / WEIGHTS[0])
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(
        directory / WEIGHTS[1], {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
