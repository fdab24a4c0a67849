"""How long a compiled step takes at least, by its operations, its memory and its messages.

The roofline model: a chip computes and reads its memory at the same time, so that a step
takes as long as the slower of the two at the chip's peak; what chips send to each other
comes on top. Latencies (of kernels, of each collective) are in no published figure and
not counted: a step of a small model, or of many chips, takes longer than this.

* operations: the compiler's count. With one row XLA multiplies on the vector units and
  counts the conversions to float32 too: 2.5 operations for one.
* memory traffic: from shapes, what the step reads from the chip's memory once. These are
  the decoder's weights (without the projections of the source, which the cache holds), the
  output layer, and the caches, in whole, since shapes are fixed. The compiler's "bytes
  accessed" stands beside it: it counts what is moved within the chip too.
* messages: the collectives in the compiled program and how much of each one chip sends,
  at the speed of one link.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.stages import Compiled

from spec_t5x.experiments.tpu_chips import Chip
from spec_t5x.models.cache import DecoderCache
from spec_t5x.models.partitioning import bytes_per_device
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.types import PyTree

_COLLECTIVE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
# Who takes part, in the three ways that XLA writes it: {{0,1},{2,3}}, [2,2]<=[4] (groups of
# so many) and mesh['a'=2,'b'=2] {'b'} (along axes of a mesh).
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}"
    r"|\[\d+,(?P<size>\d+)\]"
    r"|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """An operation between chips, as often as it is in the program."""

    kind: str
    count: int
    # Of the results, on each chip, all together.
    result_bytes: int
    # What each chip sends, all together, on a ring.
    sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one call of a model costs each chip."""

    # Tokens that it scores for each row.
    new_tokens: int
    # The compiler's count.
    operations: float
    # Read from the chip's memory.
    weight_bytes: int
    cache_bytes: int
    # The compiler's count, on-chip traffic included.
    compiler_bytes: float
    collectives: tuple[Collective, ...]

    @property
    def bytes_read(self) -> int:
        """Weights and caches."""
        return self.weight_bytes + self.cache_bytes

    def seconds(self, chip: Chip) -> float:
        """At least, at the chip's peak."""
        compute = self.operations / chip.flops
        memory = self.bytes_read / chip.memory_bandwidth
        return max(compute, memory) + self.seconds_of_messages(chip)

    def seconds_of_messages(self, chip: Chip) -> float:
        """Of which for what the chips send to each other."""
        return sum(c.sent_bytes for c in self.collectives) / chip.link_bandwidth


def step_cost(compiled: Compiled, model: T5Model, cache: DecoderCache, new_tokens: int) -> StepCost:
    """The cost of a step.

    Args:
      compiled: the step's program.
      model, cache: what it is called with, as shapes with shardings.
      new_tokens: tokens that it scores for each row.
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
    """The parameters that a step over ``num_tokens`` tokens reads, as shapes."""
    flat = flatten_dict(model.params, sep="/")
    read = {
        path: leaf
        for path, leaf in flat.items()
        if path.startswith("decoder/")
        and not re.search("encoder_decoder_attention/(key|value)/", path)
    }
    embedding = flat["token_embedder/embedding"]
    if not model.config.logits_via_embedding:
        # Of the table only the rows of the tokens.
        spec = NamedSharding(embedding.sharding.mesh, jax.P())
        shape = (num_tokens, embedding.shape[1])
        embedding = jax.ShapeDtypeStruct(shape, embedding.dtype, sharding=spec)
    return {**read, "token_embedder/embedding": embedding}


def collectives(program: str) -> tuple[Collective, ...]:
    """The collectives in the text of a compiled program, by kind.

    A program with a loop has each of the loop's collectives once.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for kind, result, chips in _collectives(program):
        found.setdefault(kind, []).append((result, result * _sent_share(kind, chips)))
    return tuple(
        Collective(
            kind=kind,
            count=len(sizes),
            result_bytes=sum(result for result, _ in sizes),
            sent_bytes=sum(sent for _, sent in sizes),
        )
        for kind, sizes in sorted(found.items())
    )


def _collectives(program: str) -> Iterator[tuple[str, int, int]]:
    """Kind, bytes of the result and number of chips of every collective."""
    for line in program.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        sizes = [_num_bytes(array) for array in _ARRAY.finditer(match["type"])]
        if match["start"] and match["kind"] != "all-reduce":
            # What is sent, what will be received, and the runtime's own.
            sizes = sizes[1:2]
        chips = 2 if match["kind"] == "collective-permute" else _num_chips(line)
        yield match["kind"], sum(sizes), chips


def _num_chips(line: str) -> int:
    """How many chips take part in a collective together."""
    groups = _GROUPS.search(line)
    if groups is None:
        raise ValueError(f"no replica_groups in a known form: {line.strip()[:300]}")
    if groups["first"]:
        return len(groups["first"].split(","))
    if groups["size"]:
        return int(groups["size"])
    sizes = dict(axis.split("=") for axis in groups["mesh"].split(","))
    return math.prod(int(sizes[axis.strip()]) for axis in groups["axes"].split(","))


def _sent_share(kind: str, chips: int) -> float:
    """Bytes that a chip sends for each byte of the result, on a ring."""
    if kind == "collective-permute":
        return 1.0
    if kind == "reduce-scatter":
        return chips - 1.0
    return (2 if kind == "all-reduce" else 1) * (chips - 1) / chips


def _num_bytes(array: re.Match) -> int:
    bits = 8 if array["type"] == "pred" else int(array["bits"])
    sizes = [int(size) for size in array["shape"].split(",") if size]
    return math.prod(sizes) * bits // 8
