"""Texts that a target writes for given sources: what a draft is to learn, or is measured on.

Speculative decoding asks a draft about places of the target's own texts, not of references
(Zhou et al. 2023, DistillSpec, arXiv 2310.08461). They are written once, by plain decoding,
and kept on disk in parts, so that a run that was killed goes on with the next part. Text i
of a file follows from the target, the settings and i alone.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.data.batching import (
    Batches,
    Bucket,
    TokenisedPairs,
    load_tokenised,
    make_batch,
    store_tokenised,
)
from spec_t5x.errors import InputError
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, Int, Key

# Bump when the same settings give other texts.
TEXTS_FORMAT = 1

# ``report(done, total)``: texts that are written, and how many there are to be.
Report = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How a target writes."""

    # 0 is argmax.
    temperature: float
    # Tokens of a text at most, end of sequence included; what is longer is cut there.
    max_length: int
    # Padded source tokens of a batch.
    tokens_per_batch: int
    # Padded lengths of sources, increasing.
    buckets: Sequence[int]
    seed: int = 0
    # Texts of a part, all of which are lost by a kill.
    part_size: int = 4096

    def __post_init__(self):
        sampling(self.temperature)
        if self.part_size < 1:
            raise InputError(f"part_size is {self.part_size}: give 1 or more")


def write_texts(
    target: T5Model,
    pairs: TokenisedPairs,
    options: WritingOptions,
    cache_dir: str | Path | None,
    report: Report = lambda done, total: None,
) -> TokenisedPairs:
    """The same sources, each with the text that the target writes for it.

    Args:
        target: writes.
        pairs: their own targets do not matter.
        options: how.
        cache_dir: where the texts are kept, in a folder named by a hash of the target's
            parameters, the sources and the settings; None keeps nothing.
        report: told after each part, also of what was there already.

    Raises:
        InputError: a source fits no bucket.
    """
    folder = cache_dir and Path(cache_dir) / f"texts-{_key(target, pairs, options)}"
    parts = []
    for first in range(0, len(pairs), options.part_size):
        last = min(first + options.part_size, len(pairs))
        path = folder and folder / f"{first:09}.npz"
        if path and path.is_file():
            parts.append(load_tokenised(path))
        else:
            parts.append(_write_part(target, _sources(pairs, first, last), first, options))
            if path:
                store_tokenised(path, parts[-1])
        report(last, len(pairs))
    return dataclasses.replace(_joined(parts), num_dropped=pairs.num_dropped)


@functools.partial(jax.jit, static_argnames="max_length")
def written_tokens(
    model: T5Model,
    sources: Int[Array, "batch source"],
    keys: Key[Array, "batch"],
    settings: Sampling,
    is_row: Bool[Array, "batch"],
    *,
    max_length: int,
) -> Int[Array, "batch length"]:
    """Texts in the form of a batch's targets, padded with 0.

    A text ends with end of sequence, before padding that a model may say, or after
    ``max_length`` tokens.

    Args:
        model: any T5.
        sources: tokens.
        keys: a random key for each row.
        settings: the distribution to sample from.
        is_row: which rows are wanted; the others stay empty.
        max_length: width of the texts.
    """
    # A padding row needs something to attend to.
    sources = sources.at[:, 0].set(jnp.where(sources[:, 0] == PAD_ID, EOS_ID, sources[:, 0]))
    decoded = autoregressive_decode(
        model,
        sources,
        jnp.full((sources.shape[0], 1), PAD_ID, jnp.int32),
        keys,
        settings,
        max_decode_len=max_length,
        max_decode_steps=jnp.where(is_row, max_length, 0),
    )
    tokens = decoded.tokens[:, 0]
    # As training reads a text: padding within it would hide what follows.
    return tokens * jnp.cumprod(tokens != PAD_ID, axis=1)


def _write_part(
    target: T5Model, pairs: TokenisedPairs, first: int, options: WritingOptions
) -> TokenisedPairs:
    """The target's texts for ``pairs``, whose keys count from ``first``."""
    texts = [np.zeros(0, np.int32)] * len(pairs)
    batches = Batches(
        pairs, tokens_per_batch=options.tokens_per_batch, seed=0, buckets=options.buckets
    )
    for bucket in batches.buckets:
        for start in range(0, len(bucket.pairs), bucket.batch_size):
            rows = bucket.pairs[start : start + bucket.batch_size]
            written = _write(target, pairs, bucket, rows, first, options)
            for place, text in zip(rows, written, strict=True):
                texts[place] = text
    return dataclasses.replace(
        pairs,
        target_ids=np.concatenate(texts),
        target_ends=np.cumsum([len(text) for text in texts], dtype=np.int64),
    )


def _write(
    target: T5Model,
    pairs: TokenisedPairs,
    bucket: Bucket,
    rows: np.ndarray,
    first: int,
    options: WritingOptions,
) -> list[np.ndarray]:
    """The texts of one batch."""
    batch = make_batch(pairs, bucket, rows)
    places = np.zeros(bucket.batch_size, np.uint32)
    places[: len(rows)] = first + rows
    tokens = written_tokens(
        target,
        batch.encoder_input_tokens,
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), places),
        sampling(options.temperature),
        np.arange(bucket.batch_size) < len(rows),
        max_length=options.max_length,
    )
    found = np.asarray(tokens)
    lengths = np.count_nonzero(found, axis=1)
    return [found[row, : lengths[row]] for row in range(len(rows))]


def _sources(pairs: TokenisedPairs, first: int, last: int) -> TokenisedPairs:
    """The pairs from ``first`` to before ``last``, without their targets."""
    start = pairs.source_ends[first - 1] if first else 0
    return TokenisedPairs(
        source_ids=pairs.source_ids[start : pairs.source_ends[last - 1]],
        source_ends=pairs.source_ends[first:last] - start,
        target_ids=np.zeros(0, np.int32),
        target_ends=np.zeros(last - first, np.int64),
        num_dropped=0,
    )


def _joined(parts: Sequence[TokenisedPairs]) -> TokenisedPairs:
    def joined(name):
        ids = [getattr(part, f"{name}_ids") for part in parts]
        lengths = [getattr(part, f"{name}_lengths") for part in parts]
        return np.concatenate(ids), np.cumsum(np.concatenate(lengths), dtype=np.int64)

    (source_ids, source_ends), (target_ids, target_ends) = joined("source"), joined("target")
    return TokenisedPairs(
        source_ids=source_ids,
        source_ends=source_ends,
        target_ids=target_ids,
        target_ends=target_ends,
        num_dropped=0,
    )


def _key(target: T5Model, pairs: TokenisedPairs, options: WritingOptions) -> str:
    digest = hashlib.sha256()
    digest.update(repr((TEXTS_FORMAT, target.config, options)).encode())
    for array in (*jax.tree.leaves(target.params), pairs.source_ids, pairs.source_ends):
        # One after the other: the host holds no second copy of a large model.
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:24]
