"""Hugging Face's files of weights, opened and read by slices.

safetensors and PyTorch's files are mapped into memory: what is not asked for is not read.
"""

import contextlib
import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Imported for its effect: it teaches numpy, and so safetensors, bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np

from spec_t5x.checkpoints.huggingface.config import rescales_logits
from spec_t5x.checkpoints.huggingface.names import LM_HEAD, SHARED, tensor_names
from spec_t5x.checkpoints.storage.abstract import expected_shapes
from spec_t5x.checkpoints.storage.files import check_inside, one_line, read_json
from spec_t5x.checkpoints.storage.weights import Index, TensorInfo, check_found
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

# Where the weights may be, in order of preference.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# Copies of the embedding under other names.
_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A leftover of the original conversion that no release of transformers uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

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

# Rows compared in one go: bounds the memory that the comparison takes.
_ROWS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor in a file: what it is, and how a part of it is read."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]


class HuggingFaceWeights:
    """Tensors of a directory as our parameters; see ``weights.Weights``."""

    def __init__(self, tensors: Mapping[str, FileTensor], config: T5Config, source: str):
        """Takes opened tensors by Hugging Face's names, those of the output layer settled."""
        self.source = source
        self._tensors = dict(tensors)
        self._names = tensor_names(config)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Those that we have a name for; ``check`` reports the others."""
        infos = {}
        for path, (name, transposed) in self._names.items():
            if name in self._tensors:
                tensor = self._tensors[name]
                shape = tensor.shape[::-1] if transposed else tensor.shape
                infos[path] = TensorInfo(shape=shape, dtype=tensor.dtype, name=name)
        return infos

    def check(self, config: T5Config) -> None:
        """As ``weights.Weights``, in Hugging Face's names and shapes."""
        names, expected = tensor_names(config), {}
        for path, shape in expected_shapes(config).items():
            name, transposed = names[path]
            expected[name] = shape[::-1] if transposed else shape
        found = {
            name: TensorInfo(shape=tensor.shape, dtype=tensor.dtype, name=name)
            for name, tensor in self._tensors.items()
        }
        check_found(found, expected, self.source)

    def read(self, path: str, index: Index) -> np.ndarray:
        """As ``weights.Weights``."""
        name, transposed = self._names[path]
        tensor = self._tensors[name]
        if transposed:
            return np.ascontiguousarray(tensor.read(index[::-1]).T)
        return tensor.read(index)


def open_tensors(directory: Path) -> dict[str, FileTensor]:
    """Every tensor in a directory by its name there; none is read yet.

    Raises:
        InputError: there are no weights, or files of them are missing or damaged.
    """
    tensors = {}
    for path in _weight_files(directory):
        open_file = _open_safetensors if path.suffix == ".safetensors" else _open_torch
        with _damage_named(path):
            tensors |= open_file(path)
    return tensors


def settle_output_layer(
    tensors: dict[str, FileTensor], values: dict[str, Any], directory: Path
) -> bool:
    """Decides what the output layer is: whether the embedding, rescaled (T5 1.0).

    Drops tensors that say nothing new from ``tensors``, after a look at what they hold.

    Args:
        tensors: every tensor of ``directory``; changed.
        values: its config.json.

    Raises:
        InputError: the tensors contradict config.json.
    """
    tensors.pop(_UNUSED, None)
    _merge_aliases(tensors, directory)
    # Absent when the checkpoint is incomplete, which the check of names reports.
    embedding = tensors.get(SHARED)
    rescales = rescales_logits(values)
    if rescales:
        head = tensors.pop(LM_HEAD, embedding)
        if embedding is not None and not same_tensor(head, embedding):
            raise InputError(
                f"{directory}: {LM_HEAD} differs from {SHARED} although config.json "
                "ties them: if this is a T5 1.1, set tie_word_embeddings (and "
                "scale_decoder_outputs, if there) to false"
            )
    elif values.get("tie_word_embeddings") and embedding is not None:
        # Tied but not rescaled, which T5X does not know: two layers of equal weights.
        tensors.setdefault(LM_HEAD, embedding)
    return rescales


def _merge_aliases(tensors: dict[str, FileTensor], directory: Path) -> None:
    """Leaves the embedding under one name; old checkpoints hold it three times."""
    copies = {name: tensors.pop(name) for name in _ALIASES if name in tensors}
    for name, tensor in copies.items():
        if not same_tensor(tensors.setdefault(SHARED, tensor), tensor):
            raise InputError(
                f"{directory}: {name} differs from {SHARED}: give a T5 with one embedding"
            )


def same_tensor(first: FileTensor, second: FileTensor) -> bool:
    """Whether two tensors hold the same."""
    if first is second:
        return True
    if first.shape != second.shape:
        return False
    for start in range(0, first.shape[0], _ROWS):
        index = (slice(start, min(start + _ROWS, first.shape[0])), slice(0, first.shape[1]))
        parts = first.read(index), second.read(index)
        # NaN equals NaN here: the check for it reports it better.
        if not np.array_equal(*parts, equal_nan=True):
            return False
    return True


def _weight_files(directory: Path) -> list[Path]:
    present = [directory / name for name in _WEIGHTS if (directory / name).is_file()]
    if not present:
        raise InputError(
            f"{directory} holds no weights: copy model.safetensors or "
            "pytorch_model.bin, or the shards and their index, there"
        )
    if present[0].suffix != ".json":
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


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): copy the file again"
        ) from error


def _open_safetensors(path: Path) -> dict[str, FileTensor]:
    from safetensors import safe_open

    file = safe_open(path, framework="numpy")
    tensors = {}
    for name in file.keys():  # noqa: SIM118, it is not a dict
        part = file.get_slice(name)
        stored = part.get_dtype()
        tensors[name] = FileTensor(
            shape=tuple(part.get_shape()),
            dtype=_SAFETENSORS_TYPES.get(stored, stored),
            read=_named_reader(path, part.__getitem__),
        )
    return tensors


def _open_torch(path: Path) -> dict[str, FileTensor]:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} needs PyTorch to be read: pip install torch, or convert it to "
            "model.safetensors"
        ) from error

    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise InputError(
            f"{path} is a pickle, which PyTorch {torch.__version__} would run code of: "
            f"pip install 'torch>={'.'.join(map(str, _SAFE_TORCH))}', or convert it to "
            "model.safetensors"
        )

    def part_of(tensor, index):
        part = tensor[index]
        # numpy has no bfloat16 that torch could hand over; float32 holds it exactly.
        return (part.float() if part.dtype == torch.bfloat16 else part).contiguous().numpy()

    # weights_only: a pickle from elsewhere must not run code. Files of before 2020 are
    # no archives, and cannot be mapped into memory.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {
        name: FileTensor(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            read=_named_reader(path, functools.partial(part_of, tensor)),
        )
        for name, tensor in state.items()
    }


def _named_reader(path: Path, read: Callable[[Index], np.ndarray]) -> Callable:
    def read_named(index: Index) -> np.ndarray:
        with _damage_named(path):
            return read(index)

    return read_named
