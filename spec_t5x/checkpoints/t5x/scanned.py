"""Conversion of parameters between T5X's ``scalable_t5`` (umT5, Pile-T5) and this package.

    encoder/encoder/mlp/wo/kernel                [mlp, layers, embed]          scanned
    encoder/layers_3/mlp/wo/kernel               [mlp, embed]                  ours
    decoder/decoder/self_attention/out/kernel    [heads, layers, kv, embed]    scanned
    decoder/layers_3/self_attention/out/kernel   [heads * kv, embed]           ours

``scalable_t5`` may scan its layers: their parameters are stacked along axis 1 (``param_scan_axis``
in T5X's gin files). Each layer has a relative bias, and attention projections have separate axes
for heads and for the width of a head.
"""

import collections
import dataclasses
import re
import threading

import numpy as np

from spec_t5x.checkpoints.storage.tensors import Index, Tensor, Tensors
from spec_t5x.checkpoints.storage.tensorstore_arrays import COPY_AGAIN
from spec_t5x.errors import InputError

# Axis of stacked layers: T5X's default, and the only one in its gin files.
_AXIS = 1

_SCANNED = re.compile(r"(encoder|decoder)/\1/(.+)")
_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")
_PROJECTION = re.compile(r"attention/(query|key|value|out)/kernel$")
_BIAS = "relpos_bias/rel_embedding"


def ours(tensors: Tensors, source: str) -> dict[str, Tensor]:
    """Returns tensors of single layers in our shapes; refuses layers scanned along another axis."""
    found = {}
    for path, tensor in tensors.items():
        match = _SCANNED.fullmatch(path)
        if not match:
            found[path] = _joined(path, tensor)
            continue
        stack, inner = match.groups()
        layers = _Layers(tensor, _num_layers(tensors, stack, path, source))
        for number in range(layers.num):
            found[f"{stack}/layers_{number}/{inner}"] = _joined(path, layers.tensor(number))
    return found


def scanned(tensors: Tensors, head_dim: int) -> dict[str, Tensor]:
    """Returns tensors with scanned layers, inverting ``ours``; repeats a shared bias by layer."""
    found, stacked = {}, collections.defaultdict(dict)
    for path, tensor in tensors.items():
        if match := _LAYER.fullmatch(path):
            stack, number, inner = match.groups()
            stacked[stack, inner][int(number)] = _split(path, tensor, head_dim)
        elif not path.endswith(_BIAS):
            found[path] = tensor
    for stack in ("encoder", "decoder"):
        if shared := tensors.get(f"{stack}/{_BIAS}"):
            num = max(map(len, (of for (name, _), of in stacked.items() if name == stack)))
            stacked[stack, _BIAS] = dict.fromkeys(range(num), shared)
    for (stack, inner), layers in stacked.items():
        path = f"{stack}/{stack}/{inner}"
        found[path] = _stacked(path, [layers[number] for number in sorted(layers)])
    return found


def _heads_axis(path: str) -> int | None:
    """Returns the axis of heads of an attention projection; None for other tensors."""
    match = _PROJECTION.search(path)
    return None if match is None else int(match[1] != "out")


def _joined(path: str, tensor: Tensor) -> Tensor:
    """Merges the axes of heads and head width of a projection; returns others unchanged."""
    at = _heads_axis(path)
    if at is None or len(tensor.shape) != 3:
        return tensor
    width = tensor.shape[at + 1]

    def read(index: Index) -> np.ndarray:
        part = index[at]
        # Whole heads are read; the parts outside of the slice are cut off below.
        heads = slice(part.start // width, -(-part.stop // width))
        found = tensor.read((*index[:at], heads, slice(0, width), *index[at + 1 :]))
        shape = (*found.shape[:at], -1, *found.shape[at + 2 :])
        start = part.start - heads.start * width
        wanted = slice(start, start + part.stop - part.start)
        return found.reshape(shape)[(*(slice(None),) * at, wanted)]

    shape = (*tensor.shape[:at], tensor.shape[at] * width, *tensor.shape[at + 2 :])
    return dataclasses.replace(tensor, shape=shape, read=read)


def _split(path: str, tensor: Tensor, width: int) -> Tensor:
    """Splits a projection's merged axis in heads of ``width``; returns others unchanged."""
    at = _heads_axis(path)
    if at is None:
        return tensor
    length = tensor.shape[at]
    shape = (*tensor.shape[:at], length // width, width, *tensor.shape[at + 1 :])

    def read(index: Index) -> np.ndarray:
        found = tensor.read((*index[:at], slice(0, length), *index[at + 2 :]))
        split = found.reshape(*found.shape[:at], -1, width, *found.shape[at + 1 :])
        return split[(*(slice(None),) * at, *index[at : at + 2])]

    return dataclasses.replace(tensor, shape=shape, read=read)


def _num_layers(tensors: Tensors, stack: str, path: str, source: str) -> int:
    scale = tensors.get(f"{stack}/{stack}/pre_mlp_layer_norm/scale")
    norm = tensors.get(f"{stack}/{stack}_norm/scale")
    shapes = [() if tensor is None else tensor.shape for tensor in (scale, norm)]
    if list(map(len, shapes)) != [2, 1] or shapes[0][:_AXIS] != shapes[1]:
        raise InputError(
            f"{source}: the scanned layers of the {stack} are not along axis {_AXIS}: give a "
            "checkpoint with T5X's param_scan_axis = 1"
        )
    num, shape = scale.shape[_AXIS], tensors[path].shape
    if len(shape) <= _AXIS or shape[_AXIS] != num:
        raise InputError(
            f"{source}: {path} is {list(shape)} and the {stack} has {num} layers: {COPY_AGAIN}"
        )
    return num


class _Layers:
    """Layers of a scanned tensor, each a tensor; the file is read once for all layers.

    What was read is kept until each layer has taken its part. ``tensors.read_params`` reads layers
    in order, so that one scanned tensor is in memory at a time.
    """

    def __init__(self, tensor: Tensor, num: int):
        self.num = num
        self._whole, self._lock = tensor, threading.Lock()
        # By slice of a layer: that slice of all layers, and the layers that have not read it yet.
        self._read: dict[tuple, tuple[np.ndarray, set[int]]] = {}

    def tensor(self, number: int) -> Tensor:
        """Returns the tensor of layer ``number``, from 0."""
        shape = self._whole.shape
        return dataclasses.replace(
            self._whole,
            name=f"{self._whole.name}[:, {number}]",
            shape=(*shape[:_AXIS], *shape[_AXIS + 1 :]),
            read=lambda index: self._part(number, index),
        )

    def _part(self, number: int, index: Index) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        with self._lock:
            if key not in self._read:
                of_all = (*index[:_AXIS], slice(0, self.num), *index[_AXIS:])
                self._read[key] = self._whole.read(of_all), set(range(self.num))
            parts, left = self._read[key]
            left.discard(number)
            if not left:
                del self._read[key]
        return parts.take(number, axis=_AXIS)


def _stacked(path: str, layers: list[Tensor]) -> Tensor:
    shape = layers[0].shape

    def read(index: Index) -> np.ndarray:
        rest = (*index[:_AXIS], *index[_AXIS + 1 :])
        return np.stack([layer.read(rest) for layer in layers[index[_AXIS]]], axis=_AXIS)

    stacked_shape = (*shape[:_AXIS], len(layers), *shape[_AXIS:])
    return dataclasses.replace(layers[0], name=path, shape=stacked_shape, read=read)
