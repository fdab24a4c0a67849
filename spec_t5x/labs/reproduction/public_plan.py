"""Plan of a run on public weights: whether its pairs fit together, the device and the data.

Only configurations and vocabularies are read: of names on the Hugging Face Hub, whose weights are
downloaded after all pairs are known to fit, and of directories, whose weights are listed.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec_t5x.checkpoints.loading import check_same_vocabulary, open_model
from spec_t5x.checkpoints.make_draft import TRANSFORMER, find_models, kind_of
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.errors import InputError
from spec_t5x.generation.generator import DEFAULT_MAX_SOURCE_LENGTH
from spec_t5x.labs.benchmark.text_source import read_sets
from spec_t5x.labs.reproduction.public_pairs import PUBLIC, PublicPair, model_drafts, short_name
from spec_t5x.machine import description
from spec_t5x.models.binding import abstract_params, bind
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS, rounded
from spec_t5x.names import AUTO, INT8
from spec_t5x.tuning.interleaving import elapsed

# Tokens generated at most for a text.
MAX_DECODE_LEN = 128
# Batch sizes, of which the largest that fits in memory is used.
_BATCH_SIZES = (16, 8, 4, 2, 1)
# Memory beside weights and caches, for temporary arrays, as a share of both.
_TEMPORARY = 0.1
# Bytes that are read to measure the memory's speed, and repetitions.
_READ, _REPEATS = 1 << 28, 5


class Needs(NamedTuple):
    """Bytes of memory that a target and its drafts take together."""

    weights: int
    # The caches of one row.
    row: int

    def total(self, batch_size: int) -> int:
        """Returns the bytes with the caches of a batch and with temporary arrays."""
        return round((1 + _TEMPORARY) * (self.weights + batch_size * self.row))

    def are_met(self, batch_size: int) -> bool:
        """Returns True if the device's free memory holds ``total``, or is unknown."""
        free = description.free_memory()
        return free is None or self.total(batch_size) <= free


class Choice(NamedTuple):
    """Public target as a device may hold it."""

    # A key of ``PUBLIC``.
    name: str
    # "int8", or "auto" for the type that the device computes in.
    weights: str
    # With its drafts.
    needs: Needs

    @property
    def fits(self) -> bool:
        """True if the device's free memory holds target, drafts and the caches of one row."""
        return self.needs.are_met(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """Pair that fits the device, and how it is measured there."""

    pair: PublicPair
    needs: Needs
    # Bytes of the target's weights.
    target_bytes: int
    # Rows decoded together where no time is measured.
    batch_size: int


def choices(names: Collection[str] = tuple(PUBLIC)) -> list[Choice]:
    """Returns the forms in which this device may hold public T5 1.0, the preferred ones last.

    If the device computes in bfloat16, each size also comes with matrices in int8; this rounded
    model is preferred only to smaller sizes.
    """
    smaller = (INT8,) if DraftOptions().dtype == "bfloat16" else ()
    found = []
    for name in names:
        target, *drafts = (size(PUBLIC[each]) for each in (name, *model_drafts(name, names)))
        of_drafts = [(draft, AUTO) for draft in drafts]
        for weights in (*smaller, AUTO):
            found.append(Choice(name, weights, _needs([(target, weights), *of_drafts])))
    return found


def automatic_target(names: Collection[str] = tuple(PUBLIC)) -> Choice:
    """Returns the preferred one of ``choices`` that the device's memory holds with its drafts.

    Raises:
      InputError: not even the smallest fits.
    """
    if fitting := [choice for choice in choices(names) if choice.fits]:
        return fitting[-1]
    raise InputError(
        f"the device has {_size(description.free_memory())} and {next(iter(names))} takes more: "
        "use a larger device, or --pairs FILE with a smaller target"
    )


def check_data(pair: PublicPair) -> None:
    """Reads a text of a pair; is called last, because a seqio task may be downloaded for it.

    Raises:
      InputError: the file or the task cannot be read.
    """
    vocabulary = _opened(pair.target, pair.vocabulary).known_vocabulary()
    read_sets(dataclasses.replace(pair.source, limit=1), vocabulary)


def check_pair(pair: PublicPair) -> Planned:
    """Checks the models of a pair, but for weights on the Hub, and plans its measurements.

    Raises:
      InputError: a model cannot be read, a draft has another vocabulary than the target, or the
        device's memory is too small.
    """
    pair.source.check_scored()
    target = _opened(pair.target, pair.vocabulary).unread()
    models = [(target.config, pair.weights)]
    for draft in pair.draft:
        if kind_of(draft) == TRANSFORMER:
            opened = _opened(draft.removeprefix(f"{TRANSFORMER}:"), None)
            if opened.vocabulary is not None:
                check_same_vocabulary(target, opened)
            models.append((opened.config, AUTO))
    needs, target_bytes = _needs(models), _needs(models[:1]).weights
    batch_size = _batch_size(pair, needs)
    return Planned(pair=pair, needs=needs, target_bytes=target_bytes, batch_size=batch_size)


def _opened(name: str, vocabulary: str | None) -> StoredModel:
    """Opens a model and checks it; the weights of one on the Hub are not downloaded."""
    stored = open_model(name, vocabulary=vocabulary, downloads=False)
    stored.check()
    return stored


def _needs(models: Sequence[tuple[NetworkConfig, str]]) -> Needs:
    """Computes the memory of models from the shapes of their weights and caches.

    ``models`` are the configurations, each with the precision of its matrices.
    """
    dtype = DraftOptions().dtype
    each = (_of_model(config, dtype, weights) for config, weights in models)
    return Needs(*map(sum, zip(*each, strict=True)))


@functools.lru_cache(maxsize=32)
def _of_model(config: NetworkConfig, dtype: str, weights: str) -> tuple[int, int]:
    """Returns the bytes of a model's weights, and of the caches of one row."""
    config = dataclasses.replace(config, dtype=dtype)
    # The caches depend on the decoder alone, so that less is traced.
    shallow = dataclasses.replace(config, **{"num_encoder_layers": 1} if config.has_source else {})
    source = jax.ShapeDtypeStruct((1, DEFAULT_MAX_SOURCE_LENGTH), jnp.int32)

    def cached(params, tokens):
        return jax.tree.leaves(bind(params, shallow).prefill(tokens, MAX_DECODE_LEN))

    def num_bytes(tree):
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), abstract_params(config)
    )
    if weights != AUTO:
        params = rounded(params, BITS[weights], tied=config.logits_via_embedding)
    return num_bytes(params), num_bytes(jax.eval_shape(cached, abstract_params(shallow), source))


def _batch_size(pair: PublicPair, needs: Needs) -> int:
    for rows in _BATCH_SIZES:
        if needs.are_met(rows):
            return rows
    fitting = [choice.name for choice in choices() if choice.fits and choice.weights == AUTO]
    remedy = f"--target {fitting[-1]}, which fits" if fitting else "a smaller target"
    raise InputError(
        f"target {pair.label} takes {_size(needs.total(1))} with its drafts and the "
        f"device has {_size(description.free_memory())}: give {remedy}, or fewer drafts"
    )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{math.ceil(seconds / 60)} min"


def download(pairs: Sequence[PublicPair]) -> None:
    """Downloads what pairs need of the Hub, and checks that the weights are whole.

    Raises:
      InputError: a model cannot be downloaded, or lacks weights.
    """
    for pair in pairs:
        find_models(pair.target, pair.draft, vocabulary=pair.vocabulary).check()


def describe(planned: Sequence[Planned], target_calls: Sequence[int]) -> Iterator[str]:
    """Yields a line for each pair: the memory that it takes, and the time of the target's calls.

    ``target_calls`` are each target's calls at most. A call reads all of the target's weights.
    """
    free, speed = description.free_memory(), bytes_per_second()
    for each, calls in zip(planned, target_calls, strict=True):
        memory = _size(each.needs.total(each.batch_size))
        if free is not None:
            memory += f" of the device's {_size(free)}"
        if each.pair.weights != AUTO:
            memory += f" with the target's matrices in {each.pair.weights}, a rounded model"
        names = ", ".join(map(short_name, each.pair.draft))
        yield (
            f"{each.pair.name} with {names}: {memory}; the target's {calls:,} calls at most take "
            f"{_duration(calls * each.target_bytes / speed)} at this memory's speed"
        )


def bytes_per_second() -> float:
    """Measures how fast this device reads its memory."""
    total = functools.partial(jax.jit(jnp.sum), jnp.ones(_READ // 4, jnp.float32))
    # The first call compiles, and so is not the fastest.
    return _READ / min(elapsed(total)[0] for _ in range(_REPEATS + 1))
