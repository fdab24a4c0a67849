"""Growth of a T5: the parameters of a larger network that computes what the smaller one does.

Width grows by copies: every feature of the small network has ``times`` copies in the large one, and
the weights that read them are divided among the copies (Chen et al. 2016, Net2Net, section 3.2).
Depth grows by layers that add nothing to their input (section 3.3). Training then starts with
the small network's loss.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.errors import InputError
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.types import PyTree

# Fields that grow to multiples, and fields that grow to any larger number.
WIDTHS = ("emb_dim", "num_heads", "mlp_dim")
DEPTHS = ("num_encoder_layers", "num_decoder_layers")
GROWING = (*WIDTHS, *DEPTHS)

_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(.*)")
# The last maps of a layer's blocks: with zeros there, a layer adds nothing.
_LAST = re.compile(r".*/(out|wo)/kernel")


def check_growth(name: str, old: NetworkConfig, new: NetworkConfig) -> None:
    """Checks that the model ``name`` can grow to the sizes of ``new``.

    Raises:
        InputError: it is not a T5, a width is no multiple, or a stack has fewer layers.
    """
    if type(old) is not T5Config or type(new) is not T5Config:
        kind = type(old).__name__.removesuffix("Config")
        raise InputError(f"{name} is a {kind}, and only a T5 can grow: leave train.grow out")
    for field in GROWING:
        small, large = getattr(old, field), getattr(new, field)
        if large < small or (field in WIDTHS and large % small):
            least = "a multiple of" if field in WIDTHS else "at least"
            raise InputError(
                f"{name} has {field} {small}, and the model to train {large}: make "
                f"T5Config.{field} {least} {small}"
            )


def grown(params: PyTree, old: T5Config, new: T5Config) -> PyTree:
    """Returns float32 parameters of ``new`` that compute the function of ``params``.

    Equal copies would have equal gradients and remain equal: to the weights that read the copies of
    a feature are added random numbers, as large as the weights, whose sum over the copies is 0.

    Args:
      params: parameters of ``old``, in float32.
      old: configuration of the small network.
      new: configuration of the large one, which ``check_growth`` has accepted.
    """
    random, shapes = np.random.default_rng(0), expected_shapes(new)
    small = {path: np.asarray(array) for path, array in flatten_dict(params, sep="/").items()}
    large = {}
    for path, source, is_identity in _sources(shapes, old, new):
        array, shape = small[source], shapes[path]
        if is_identity and _LAST.fullmatch(path):
            large[path] = np.zeros(shape, np.float32)
        elif path.endswith("/kernel"):
            large[path] = _divided(array, shape, random)
        else:
            large[path] = _copied(array, shape)
    if new.logits_via_embedding:
        # Each copy of a feature adds the same to the logits, which are scaled by the width.
        times = new.emb_dim // old.emb_dim
        large["decoder/decoder_norm/scale"] *= old.output_scale / (times * new.output_scale)
    return unflatten_dict(large, sep="/")


def _sources(paths: Iterable[str], old: T5Config, new: T5Config) -> Iterator[tuple[str, str, bool]]:
    """Yields each path of ``new`` with its path in ``old``, and whether its layer is an added one.

    The added layers are spread over a stack, each behind the layer whose weights it gets.
    """
    stacks = {}
    for field in DEPTHS:
        few, more = getattr(old, field), getattr(new, field) - getattr(old, field)
        layers = sorted([*range(few), *(few * (i + 1) // (more + 1) for i in range(more))])
        stacks[field.split("_")[1]] = layers
    for path in paths:
        match = _LAYER.fullmatch(path)
        if match is None:
            yield path, path, False
            continue
        stack, number, rest = match[1], int(match[2]), match[3]
        layers = stacks[stack]
        is_identity = number > 0 and layers[number - 1] == layers[number]
        yield path, f"{stack}/layers_{layers[number]}/{rest}", is_identity


def _copied(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.tile(array, [large // small for large, small in zip(shape, array.shape, strict=True)])


def _divided(kernel: np.ndarray, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Copies the columns of a kernel and divides each row among its copies."""
    times = shape[0] // kernel.shape[0]
    equal = _copied(kernel, shape) / times
    if times == 1:
        return equal
    size = np.sqrt(np.mean(np.square(equal)))
    noise = random.normal(scale=size, size=(times, kernel.shape[0], shape[1]))
    noise -= noise.mean(axis=0)
    return (equal + noise.reshape(shape)).astype(np.float32)
