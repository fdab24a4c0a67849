"""Hugging Face's files of weights, read by slices and written.

Files are mapped into memory, so that only slices in use are read, except PyTorch's before 1.6.
"""

import dataclasses
import functools
import logging
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage import files
from spec_t5x.checkpoints.storage.tensors import Tensor, listed
from spec_t5x.errors import InputError, as_input_error, one_line
from spec_t5x.machine.extras import EXTRAS
from spec_t5x.machine.git_lfs import check_fetched

# Names of files of weights in order of preference; an index lists shards.
INDEX_ENDING = ".index.json"
TORCH_WEIGHTS = ("pytorch_model.bin", f"pytorch_model.bin{INDEX_ENDING}")
WEIGHTS = ("model.safetensors", f"model.safetensors{INDEX_ENDING}", *TORCH_WEIGHTS)

# safetensors' names of types, as numpy's.
_SAFETENSORS_TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"},
}

# Before this release torch.load may run a file's code despite ``weights_only`` (CVE-2025-32434).
_SAFE_TORCH = (2, 6)

# Modules of heads for other tasks (value heads are TRL's), and files of weights that are not read.
_HEADS = {"v_head", "value_head", "classification_head", "qa_outputs"}
ADAPTER_NAME = "adapter_config.json"
_MERGE = "save the merged model, merge_and_unload().save_pretrained(DIR), and give DIR"
_STEP = re.compile(r"checkpoint-(\d+)")
_UNREAD = re.compile(
    r"(global_step|pytorch_model_fsdp_)\d+|(?!model(-\d|\.safetensors)).+\.safetensors|"
    # Without what trainers write beside the weights.
    r"(?!optimizer|rng_state|scaler|scheduler|training_args|pytorch_model-\d)"
    r".+\.(msgpack|h5|ckpt|gguf|pth?|bin)"
)

# Logs a warning once, as a model may be opened twice: to compare it, and to load it.
_warn = functools.cache(logging.getLogger(__name__).warning)

# Entries of PyTorch's files that hold the tensors, and the remedy for files of other objects.
_NESTS = ("state_dict", "model_state_dict", "module", "model")
_STATE = "save model.state_dict() there"

# Rows that are compared at a time, to bound memory.
_ROWS = 4096

# Bytes of tensors in a file, which is built in memory; a larger tensor has its own file.
SHARD_BYTES = 10**9


def open_tensors(directory: Path) -> dict[str, Tensor]:
    """Opens all tensors of a directory, by their names in its files; values are read later."""
    paths, tensors = find_files(directory), {}
    for path in paths:
        check_fetched(path)
        open_file = _open_safetensors if path.suffix == ".safetensors" else _open_torch
        with files.reading_weights(path):
            tensors |= open_file(path)
    return tensors


def transposed(tensor: Tensor) -> Tensor:
    """Returns the transpose of a matrix, whose slices are read from ``tensor`` on demand."""
    return dataclasses.replace(
        tensor,
        shape=tensor.shape[::-1],
        read=lambda index: np.ascontiguousarray(tensor.read(index[::-1]).T),
    )


def renumbered(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Returns the matrix whose row i is row ``rows[i]`` of ``tensor``; any read reads all rows.

    Raises ``InputError`` unless the largest number in ``rows`` is that of the tensor's last row.
    """
    if tensor.shape[:1] != (size := int(np.max(rows)) + 1,):
        raise InputError(
            f"{tensor.name} is {list(tensor.shape)} and the configuration has vocab_size {size}: "
            "give the configuration that it was saved with"
        )

    def read(index):
        ours, columns = index
        return tensor.read((slice(0, tensor.shape[0]), columns))[rows[ours]]

    return dataclasses.replace(tensor, shape=(len(rows), *tensor.shape[1:]), read=read)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Returns ``tensor`` times ``factor``, multiplied in float32 when it is read."""

    def read(index):
        return tensor.read(index).astype(np.float32) * np.float32(factor)

    return dataclasses.replace(tensor, dtype="float32", read=read)


def same_table(one: Tensor, other: Tensor) -> bool:
    """Tells whether two matrices are equal, which reads both unless they are one object."""
    if one is other:
        return True
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    rows, width = one.shape
    starts = range(0, rows, _ROWS)
    blocks = ((slice(start, min(start + _ROWS, rows)), slice(0, width)) for start in starts)
    # NaN equals NaN here, because the later check for NaN has the better message.
    return all(np.array_equal(one.read(i), other.read(i), equal_nan=True) for i in blocks)


def check_shared(one: Tensor, other: Tensor, directory: Path) -> None:
    """Raises ``InputError`` unless encoder and decoder have equal embeddings, shared here."""
    if not same_table(one, other):
        raise InputError(
            f"{directory}: {one.name} differs from {other.name}, but encoder and decoder share one "
            "embedding here: give a model that was trained with a shared embedding"
        )


def unwrapped(
    tensors: dict[str, Tensor], modules: Collection[str], directory: Path
) -> dict[str, Tensor]:
    """Returns tensors without heads for other tasks and without prefixes that all names have.

    Wrappers and trainers add a prefix, such as ``module.``; ``modules`` are no prefixes.
    """
    if heads := [name for name in tensors if _HEADS & {*name.split(".")}]:
        _warn("%s has a head, which decoding ignores: %s", directory, listed(heads))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in heads}
    if adapter := next((name for name in tensors if ".lora_" in name), None):
        raise InputError(f"{directory} holds an adapter's {one_line(adapter)}: {_MERGE}")
    while (first := next(iter(tensors), "").partition(".")[0]) not in ("", *modules):
        if not all(name.startswith(f"{first}.") for name in tensors):
            break
        tensors = {name.removeprefix(f"{first}."): tensor for name, tensor in tensors.items()}
    return tensors


def unread(directory: Path, names: Collection[str] | None = None) -> str | None:
    """Returns what is in place of weights among ``names`` or a directory's files, with a remedy."""
    if names is None:
        # Links of the Hub's cache may lead nowhere.
        names = [path.name for path in directory.iterdir() if path.exists()]
    if ADAPTER_NAME in names:
        base = files.read_if_there(directory / ADAPTER_NAME).get("base_model_name_or_path")
        return f"holds an adapter of {base or 'a model'}, which is not read: {_MERGE}"
    if {*WEIGHTS} & {*names}:
        return f"has weights but no {files.CONFIG_NAME}: copy their model's there"
    # Folders that trainings write.
    for folder in ("model", "draft"):
        if (directory / folder / files.CONFIG_NAME).is_file():
            return f"has its weights in a folder: give {directory / folder}"
    if steps := [int(match[1]) for match in map(_STEP.fullmatch, names) if match]:
        return f"has its weights in folders: give the latest, {directory}/checkpoint-{max(steps)}"
    found = next(filter(_UNREAD.fullmatch, sorted(names)), None)
    return found and f"has weights in {found}, which is not read: save them by save_pretrained(DIR)"


def check_weights(values: dict[str, Any], path: Path) -> None:
    """Raises ``InputError`` if weights are quantized, in another file or beside an adapter."""
    if (path.parent / ADAPTER_NAME).is_file():
        raise InputError(f"{path.parent} {unread(path.parent)}")
    if values.get("quantization_config") is not None:
        raise InputError(f"{path} is quantized: give float32, float16 or bfloat16 weights")
    if (name := values.get("transformers_weights")) not in (None, *WEIGHTS[:1]):
        raise InputError(f"{path} has transformers_weights {name!r}: rename both to {WEIGHTS[0]}")


def find_files(directory: Path) -> list[Path]:
    """Returns a directory's files of weights; raises ``InputError`` if any are missing."""
    present = [directory / name for name in WEIGHTS if (directory / name).is_file()]
    if not present:
        remedy = "holds no weights: copy model.safetensors or shards, and their index, there"
        raise InputError(f"{directory} {unread(directory) or remedy}")
    if not present[0].name.endswith(INDEX_ENDING):
        return present[:1]
    shards = [directory / name for name in shard_names(present[0])]
    if lost := [shard for shard in shards if not shard.is_file()]:
        raise InputError(f"no file {lost[0]}, which {present[0].name} lists: copy it there")
    return shards


def shard_names(index: Path) -> list[str]:
    """Returns the names of the files that an index lists, which are inside of the checkpoint."""
    weight_map = files.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map: copy the file again")
    return [files.check_inside(name, index) for name in sorted(set(map(str, weight_map.values())))]


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    file = safe_open(path, framework="numpy")
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    return {
        name: Tensor(
            name=name,
            shape=tuple(part.get_shape()),
            dtype=_SAFETENSORS_TYPES.get(part.get_dtype(), part.get_dtype()),
            read=files.reading_weights(path)(part.__getitem__),
        )
        for name, part in parts.items()
    }


def check_torch(path: object) -> None:
    """Raises ``InputError`` unless a PyTorch is installed that does not run a pickle's code."""
    remedy = f"{EXTRAS['torch'].remedy}, or convert it to {WEIGHTS[0]}"
    with as_input_error(f"{path} needs PyTorch to be read", remedy, ImportError):
        import torch
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        what = f"{path} is a pickle, whose code PyTorch {torch.__version__} would run"
        raise InputError(f"{what}: {remedy}")


def _open_torch(path: Path) -> dict[str, Tensor]:
    check_torch(path)
    import torch

    def read(tensor, index):
        found = tensor[index].detach()
        # numpy has no bfloat16 that torch could return; float32 holds it exactly.
        return (found.float() if found.dtype == torch.bfloat16 else found).contiguous().numpy()

    try:
        # weights_only: a pickle from elsewhere must not run code. Files from before PyTorch 1.6 are
        # no archives, and cannot be mapped into memory.
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # PyTorch's message has many lines, so it is left out.
        raise InputError(f"cannot read the weights in {path}: {_STATE} or copy it again") from error
    # Trainers nest the tensors; a dict may also hold itself.
    for _ in _NESTS:
        key = next((key for key in _NESTS if isinstance(state.get(key), dict)), None)
        if key is None:
            break
        inner = state[key]
        for other, each in state.items():
            # A second model, such as an average of the first, has tensors of the same names.
            same = {*inner} & {*each} if other != key and isinstance(each, dict) else ()
            if any(isinstance(each[name], torch.Tensor) for name in same):
                raise InputError(f"{path} has weights in {key!r} and in {other!r}: {_STATE}")
        state = inner
    for name, tensor in state.items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise InputError(f"{path} has {name!r}, which is no tensor: {_STATE}")
    return {
        name: Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            read=files.reading_weights(path)(functools.partial(read, tensor)),
        )
        for name, tensor in state.items()
    }


def write_safetensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes (name, array) pairs to ``model.safetensors``, or to several files and their index.

    A file has at most ``SHARD_BYTES`` of arrays, or one larger array, and is built in memory.
    """
    shards, total, size, pending = [], 0, 0, {}

    def write_shard():
        files.save_arrays(directory / f"shard-{len(shards)}", pending, {"format": "pt"})
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
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files.write_json(directory / WEIGHTS[1], index)
