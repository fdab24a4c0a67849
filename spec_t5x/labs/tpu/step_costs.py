"""Costs of a step, read from its compiled program and from the shapes of its arguments.

The time of a step follows the roofline model: a chip computes and reads its memory at the same
time, so that a step takes as long as the slower of the two at the chip's peak, plus the time of the
messages between chips. Latencies of kernels and collectives are in no published figure and not
counted: a step of a small model, or of many chips, takes longer.

* operations: the compiler's count. With one row XLA computes on the vector units and counts
  the conversions to float32 too: 2.5 operations for one.
* memory traffic: from shapes, each byte read from the chip's memory once: the decoder's weights
  (without the projections of the source, which the cache holds), the output layer, and the
  caches. The compiler's "bytes accessed" include traffic within the chip.
* messages: the collectives in the compiled program and the bytes of each that one chip sends, at
  the speed of one link.
"""

import dataclasses
import math
import re

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.stages import Compiled

from spec_t5x.labs.tpu.chips import Chip
from spec_t5x.models.cache import KVCache
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.weights import TiedTable
from spec_t5x.types import PyTree

_COLLECTIVE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
# Groups of chips, in the three ways that XLA writes them: {{0,1},{2,3}}, [2,2]<=[4] (number and
# size) and mesh['a'=2,'b'=2] {'b'} (along axes of a mesh).
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}"
    r"|\[\d+,(?P<size>\d+)\]"
    r"|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Sums over all collective operations of one kind in a program."""

    kind: str
    count: int
    # Bytes of all results on each chip.
    result_bytes: int
    # Bytes that each chip sends, on a ring.
    sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Costs of one call of a model on each chip."""

    # Tokens scored in each row.
    new_tokens: int
    # Arithmetic operations, by the compiler's count.
    operations: float
    # Bytes of weights and of caches that are read from the chip's memory, each once.
    weight_bytes: int
    cache_bytes: int
    # Bytes accessed by the compiler's count, which includes traffic within the chip.
    compiler_bytes: float
    collectives: tuple[Collective, ...]

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and caches that are read."""
        return self.weight_bytes + self.cache_bytes

    def seconds(self, chip: Chip) -> float:
        """Returns the roofline time: the longer of arithmetic and memory, plus messages."""
        compute = self.operations / chip.flops
        memory = self.bytes_read / chip.memory_bandwidth
        messages = sum(c.sent_bytes for c in self.collectives) / chip.link_bandwidth
        return max(compute, memory) + messages


def step_cost(compiled: Compiled, model: T5Model, cache: KVCache, new_tokens: int) -> StepCost:
    """Returns the cost on each chip of a step over ``new_tokens`` tokens.

    Args:
      compiled: the step's program.
      model, cache: the program's arguments, as shapes with shardings.
      new_tokens: tokens that the step scores in each row.
    """
    analysis = compiled.cost_analysis()
    return StepCost(
        new_tokens=new_tokens,
        operations=analysis["flops"],
        weight_bytes=bytes_per_device(weights_read(model, cache.lengths.size * new_tokens)),
        cache_bytes=bytes_per_device(cache.layers),
        compiler_bytes=analysis["bytes accessed"],
        collectives=collectives(compiled.as_text()),
    )


def weights_read(model: T5Model, num_tokens: int) -> PyTree:
    """Returns the shapes of the parameters that a step over ``num_tokens`` tokens in all reads."""
    flat = flatten_dict(model.weights, sep="/")
    embedding = flat["token_embedder/embedding"]
    if isinstance(embedding, TiedTable):
        embedding = embedding.output
    elif not model.config.logits_via_embedding:
        # A look-up reads only the rows of the tokens.
        spec = NamedSharding(embedding.sharding.mesh, jax.P())
        shape = (num_tokens, embedding.shape[1])
        embedding = jax.ShapeDtypeStruct(shape, embedding.dtype, sharding=spec)
    of_source = re.compile("encoder_decoder_attention/(key|value)/")
    read = {
        path: leaf
        for path, leaf in flat.items()
        if path.startswith(("decoder/", "fusion/")) and not of_source.search(path)
    }
    return {**read, "token_embedder/embedding": embedding}


def collectives(program: str) -> tuple[Collective, ...]:
    """Sums up the collectives in a compiled program, given as HLO text, by kind.

    A collective inside a loop counts once, not once an iteration.
    """
    # Bytes of each result and bytes sent, by kind.
    found: dict[str, list[tuple[int, float]]] = {}
    for line in program.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        kind = match["kind"]
        sizes = [_num_bytes(array) for array in _ARRAY.finditer(match["type"])]
        if match["start"] and kind != "all-reduce":
            # A start has the operand, the result, and buffers of the runtime.
            sizes = sizes[1:2]
        sent = sum(sizes) * _sent_share(kind, line)
        found.setdefault(kind, []).append((sum(sizes), sent))
    return tuple(
        Collective(
            kind=kind,
            count=len(sizes),
            result_bytes=sum(result for result, _ in sizes),
            sent_bytes=sum(sent for _, sent in sizes),
        )
        for kind, sizes in sorted(found.items())
    )


def _num_chips(line: str) -> int:
    """Returns the number of chips in a group of the collective on a line of HLO."""
    groups = _GROUPS.search(line)
    if groups is None:
        raise ValueError(f"no replica_groups in a known form: {line.strip()[:300]}")
    if groups["first"]:
        return len(groups["first"].split(","))
    if groups["size"]:
        return int(groups["size"])
    sizes = dict(axis.split("=") for axis in groups["mesh"].split(","))
    return math.prod(int(sizes[axis.strip()]) for axis in groups["axes"].split(","))


def _sent_share(kind: str, line: str) -> float:
    """Returns the bytes that each chip sends for each byte of its result, on a ring."""
    if kind == "collective-permute":
        return 1.0
    chips = _num_chips(line)
    if kind == "reduce-scatter":
        return chips - 1.0
    return (2 if kind == "all-reduce" else 1) * (chips - 1) / chips


def _num_bytes(array: re.Match) -> int:
    bits = 8 if array["type"] == "pred" else int(array["bits"])
    sizes = [int(size) for size in array["shape"].split(",") if size]
    return math.prod(sizes) * bits // 8


def bytes_per_device(tree: PyTree) -> int:
    """Returns the bytes that sharded arrays, or shapes with shardings, take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jax.dtypes.itemsize_bits(leaf.dtype) // 8
        for leaf in jax.tree.leaves(tree)
    )
