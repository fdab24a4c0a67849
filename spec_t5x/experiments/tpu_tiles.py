"""How a compiled loop lays its caches out: a TPU's memory holds whole tiles.

The two axes that change fastest are padded to a tile, of 8 x 128 numbers as a rule. Which
axes these are is the compiler's choice: of keys ``[batch, heads, 136, 64]`` it mostly puts
the slots along the 128, and pads them to 256; or the width of a head, and pads that.
"""

import dataclasses
import math
import re

_LOOP = re.compile(r"= (\(.*\)) while\(")
# "bf16[1,64,136,64]{2,3,1,0:T(8,128)…": the sizes, the axes from the fastest on, the tile.
_KEYS_OR_VALUES = re.compile(r"bf16\[(\d+,\d+,\d+,\d+)\]\{([\d,]+):T\((\d+),(\d+)\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caches:
    """What a loop has cached of texts on one chip, without the source's keys and values."""

    # As their shapes have it, and in whole tiles.
    num_bytes: int
    tiled_bytes: int
    # A text's slots are padded to a multiple of this.
    slot_multiple: int


def loop_caches(program: str, slots: int) -> Caches | None:
    """The caches, of ``slots`` slots, of a program's outermost loop; None if it shows none.

    Args:
      program: optimized HLO for a TPU.
      slots: which no other axis of keys and values has.
    """
    loops = (_carried(carried, slots) for carried in _LOOP.findall(program))
    arrays = max(loops, key=len, default=[])
    if not arrays:
        return None
    return Caches(
        num_bytes=sum(2 * math.prod(sizes) for sizes, _ in arrays),
        tiled_bytes=sum(
            2 * math.prod(map(_whole, sizes, multiples)) for sizes, multiples in arrays
        ),
        slot_multiple=max(multiples[2] for _, multiples in arrays),
    )


def unpadded_lengths(max_decode_len: int, extra: int, multiple: int) -> tuple[int, ...]:
    """The nearest lengths of a text that leave no padding.

    Args:
      max_decode_len: tokens that there is to be room for.
      extra: slots beyond them, gamma + 1.
      multiple: what slots are padded to.

    >>> unpadded_lengths(128, 8, 128)
    (120, 248)
    >>> unpadded_lengths(120, 8, 128)
    (120,)
    """
    slots = max_decode_len + extra
    near = {slots // multiple * multiple, _whole(slots, multiple)}
    return tuple(sorted(each - extra for each in near if each > extra))


def _carried(carried: str, slots: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes of keys and values among what a loop carries, and what each is padded to."""
    arrays = []
    for *axes, rows, columns in _KEYS_OR_VALUES.findall(carried):
        sizes, order = (tuple(map(int, text.split(","))) for text in axes)
        if sizes[2] == slots:
            multiples = {order[0]: int(columns), order[1]: int(rows)}
            arrays.append((sizes, tuple(multiples.get(axis, 1) for axis in range(4))))
    return arrays


def _whole(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
