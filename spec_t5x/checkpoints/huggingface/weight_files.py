"""Hugging Face's files of weights, opened and read by slices, and written.

safetensors and PyTorch's files are mapped into memory: what is not asked for is not read.
"""

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# Imported for its effect: it teaches numpy, and so safetensors, bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np

from spec_t5x.checkpoints.storage.files import (
    check_inside,
    read_json,
    reading_weights,
    save_arrays,
    write_json,
)
from spec_t5x.checkpoints.storage.tensors import Index, Tensor
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import EXTRAS
from spec_t5x.machine.git_lfs import check_fetched

# Where the weights may be, in order of preference; an index lists shards.
INDEX_ENDING = ".index.json"
TORCH_WEIGHTS = ("pytorch_model.bin", f"pytorch_model.bin{INDEX_ENDING}")
WEIGHTS = ("model.safetensors", f"model.safetensors{INDEX_ENDING}", *TORCH_WEIGHTS)

# safetensors' names of types, as numpy's.
_SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}

# Before it torch.load runs code that a file holds even where it is told to take weights alone
# (CVE-2025-32434).
_SAFE_TORCH = (2, 6)

# What DistributedDataParallel, torch.compile and trainers put before the names of weights.
WRAPPERS = ("module.", "_orig_mod.", "model.")

# Rows compared in one go: bounds the memory that the comparison takes.
_ROWS = 4096

# What a file of a model holds at most; so much is in memory while it is written.
SHARD_BYTES = 10**9


def open_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor in a directory by its name there; none is read yet."""
    tensors = {}
    for path in weight_files(directory):
        check_fetched(path)
        open_file = _open_safetensors if path.suffix == ".safetensors" else _open_torch
        with reading_weights(path):
            tensors |= open_file(path)
    return tensors


def transposed(tensor: Tensor) -> Tensor:
    """A matrix as its transpose."""
    return dataclasses.replace(
        tensor,
        shape=tensor.shape[::-1],
        read=lambda index: np.ascontiguousarray(tensor.read(index[::-1]).T),
    )


def renumbered(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """A matrix that has a row for each of their ids, by our ids; ``rows`` are their ids of ours."""

    def read(index):
        ours, columns = index
        return tensor.read((slice(0, tensor.shape[0]), columns))[rows[ours]]

    return dataclasses.replace(tensor, shape=(len(rows), *tensor.shape[1:]), read=read)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a number, in float32."""

    def read(index):
        return tensor.read(index).astype(np.float32) * np.float32(factor)

    return dataclasses.replace(tensor, dtype="float32", read=read)


def same_table(one: Tensor, other: Tensor) -> bool:
    """Says whether two matrices hold the same numbers."""
    if one is other:
        return True
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    rows, width = one.shape
    for start in range(0, rows, _ROWS):
        index = (slice(start, min(start + _ROWS, rows)), slice(0, width))
        # NaN equals NaN here: the check for it reports it better.
        if not np.array_equal(one.read(index), other.read(index), equal_nan=True):
            return False
    return True


def check_shared(one: Tensor, other: Tensor, directory: Path) -> None:
    """Refuses two embeddings that differ, of a network that has one for encoder and decoder."""
    if not same_table(one, other):
        raise InputError(
            f"{directory}: {one.name} differs from {other.name}, and encoder and decoder have one "
            "embedding here: give a model that was trained with one"
        )


def unwrapped(tensors: dict[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    """Tensors without the prefixes that a wrapper put before every name."""
    while prefix := next((p for p in prefixes if all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a directory's weights; all of them are there."""
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
    tensors = {}
    for name in file.keys():  # noqa: SIM118, it is not a dict
        part = file.get_slice(name)
        stored = part.get_dtype()
        tensors[name] = Tensor(
            name=name,
            shape=tuple(part.get_shape()),
            dtype=_SAFETENSORS_TYPES.get(stored, stored),
            read=_named_reader(path, part.__getitem__),
        )
    return tensors


def check_torch(path: object) -> None:
    """Refuses a file of PyTorch's where there is none that reads it safely."""
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

    def part_of(tensor, index):
        part = tensor[index]
        # numpy has no bfloat16 that torch could hand over; float32 holds it exactly.
        return (part.float() if part.dtype == torch.bfloat16 else part).contiguous().numpy()

    # weights_only: a pickle from elsewhere must not run code. Files of before 2020 are
    # no archives, and cannot be mapped into memory.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {
        name: Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            read=_named_reader(path, functools.partial(part_of, tensor)),
        )
        for name, tensor in state.items()
    }


def _named_reader(path: Path, read: Callable[[Index], np.ndarray]) -> Callable:
    def read_named(index: Index) -> np.ndarray:
        with reading_weights(path):
            return read(index)

    return read_named


def write_safetensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes ``model.safetensors``, or files of ``SHARD_BYTES`` at most and their index.

    Tensors come by name, those of one file are in memory at a time; one that is larger has a file
    of its own.
    """
    shards: list[list[str]] = []
    total, size, pending = 0, 0, {}
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            shards.append(_write_shard(directory, len(shards), pending))
            size, pending = 0, {}
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    shards.append(_write_shard(directory, len(shards), pending))
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def _write_shard(directory: Path, number: int, tensors: dict[str, np.ndarray]) -> list[str]:
    save_arrays(directory / f"shard-{number}", tensors, {"format": "pt"})
    return list(tensors)
