"""Writes safetensors, tensor by tensor: one is in memory at a time, whatever the model.

The format is eight bytes with the length of a header, the header (JSON: type, shape and
place of every tensor) and the tensors, one after another.
"""

import collections
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.huggingface.names import tensor_names
from spec_t5x.checkpoints.storage.files import write_json
from spec_t5x.checkpoints.storage.weights import Report, Weights, num_bytes, read_tensors
from spec_t5x.models.t5 import T5Config

# What the files of a model may hold at most, as transformers has it.
SHARD_BYTES = 5 * 10**9

_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
_WHOLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"


def write_weights(
    directory: Path,
    weights: Weights,
    config: T5Config,
    dtype: str,
    *,
    report: Report | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``model.safetensors``, or files of ``shard_bytes`` at most and their index.

    Raises:
        InputError: the weights are damaged or not finite.
    """
    names = tensor_names(config)
    shapes = {}
    for path, info in weights.tensors.items():
        name, transposed = names[path]
        shapes[name] = info.shape[::-1] if transposed else info.shape
    files = _files(shapes, dtype, shard_bytes)
    tensors = read_tensors(weights, dtype, report)
    for file, inside in files.items():
        with open(directory / file, "wb") as output:
            output.write(_header({name: shapes[name] for name in inside}, dtype))
            for expected in inside:
                path, tensor = next(tensors)
                name, transposed = names[path]
                assert name == expected, "tensors come in the order of their description"
                stored = np.ascontiguousarray(tensor.T if transposed else tensor)
                # As bytes: bfloat16 is foreign to Python's buffers.
                output.write(stored.reshape(-1).view(np.uint8).data)
    # To its end, where weights that are not finite are refused.
    collections.deque(tensors, maxlen=0)
    if len(files) > 1:
        weight_map = {name: file for file, inside in files.items() for name in inside}
        index = {"metadata": {"total_size": num_bytes(weights, dtype)}, "weight_map": weight_map}
        write_json(directory / _INDEX_NAME, index)


def _files(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, shard_bytes: int
) -> dict[str, list[str]]:
    """Which tensors go into which file, in their order."""
    groups, size = [[]], 0
    for name, shape in shapes.items():
        size += _size(shape, dtype)
        if groups[-1] and size > shard_bytes:
            groups.append([])
            size = _size(shape, dtype)
        groups[-1].append(name)
    if len(groups) == 1:
        return {_WHOLE_NAME: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = place + _size(shape, dtype)
        header[name] = {
            "dtype": _TYPES[dtype][0],
            "shape": list(shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header).encode()
    # Tensors start at a multiple of eight bytes, as readers that map the file like it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return _TYPES[dtype][1] * int(np.prod(shape))
