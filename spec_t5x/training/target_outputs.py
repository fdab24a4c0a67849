"""Outputs of a target for given sources, to train and evaluate a draft on.

Speculative decoding asks a draft about positions of the target's own outputs, not of references
(Zhou et al. 2023, DistillSpec, arXiv 2310.08461). They are sampled once, by plain decoding, and
kept on disk in parts, so that a run that was killed resumes with the next part. Output i of a
file follows from the target, the settings and i alone.
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

# Bump when the same settings give other outputs.
OUTPUTS_FORMAT = 1

# ``report(done, total)``: outputs sampled so far, and in all.
Report = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How a target's outputs are sampled."""

    temperature: float  # 0 is argmax
    max_length: int  # in tokens, EOS included; longer outputs are cut
    tokens_per_batch: int  # padded source tokens
    buckets: Sequence[int]  # padded lengths of sources, increasing
    seed: int = 0
    part_size: int = 4096  # outputs of a file, which are lost by a kill

    def __post_init__(self):
        sampling(self.temperature)
        if self.part_size < 1:
            raise InputError(f"part_size is {self.part_size}: give 1 or more")


def sample_targets(
    target: T5Model,
    pairs: TokenisedPairs,
    options: SampleOptions,
    cache_dir: str | Path | None,
    report: Report = lambda done, total: None,
) -> TokenisedPairs:
    """The same sources, each with the target's output for it.

    Args:
        target: generates.
        pairs: their own targets are not used.
        options: how.
        cache_dir: where the outputs are kept, in a folder named by a hash of the target's
            parameters, the sources and the settings; None keeps nothing.
        report: called after each part, also one that was cached.

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
            parts.append(_sample_part(target, _sources(pairs, first, last), first, options))
            if path:
                store_tokenised(path, parts[-1])
        report(last, len(pairs))
    lengths = np.concatenate([part.target_lengths for part in parts])
    return dataclasses.replace(
        pairs,
        target_ids=np.concatenate([part.target_ids for part in parts]),
        target_ends=np.cumsum(lengths, dtype=np.int64),
    )


@functools.partial(jax.jit, static_argnames="max_length")
def sample_outputs(
    model: T5Model,
    sources: Int[Array, "batch source"],
    keys: Key[Array, "batch"],
    settings: Sampling,
    is_row: Bool[Array, "batch"],
    *,
    max_length: int,
) -> Int[Array, "batch length"]:
    """Outputs in the form of a batch's targets, padded with 0.

    An output ends with end of sequence, before padding that a model may generate, or after
    ``max_length`` tokens.

    Args:
        model: any T5.
        sources: tokens.
        keys: a random key for each row.
        settings: the distribution to sample from.
        is_row: which rows are wanted; the others stay empty.
        max_length: width of the outputs.
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
    # Training would take all that follows padding for padding.
    return tokens * jnp.cumprod(tokens != PAD_ID, axis=1)


def _sample_part(
    target: T5Model, pairs: TokenisedPairs, first: int, options: SampleOptions
) -> TokenisedPairs:
    """The target's outputs for ``pairs``, whose keys count from ``first``."""
    outputs = [np.zeros(0, np.int32)] * len(pairs)
    batches = Batches(
        pairs, tokens_per_batch=options.tokens_per_batch, seed=0, buckets=options.buckets
    )
    for bucket in batches.buckets:
        for start in range(0, len(bucket.pairs), bucket.batch_size):
            rows = bucket.pairs[start : start + bucket.batch_size]
            tokens = _sample_batch(target, pairs, bucket, rows, first, options)
            for row, index in enumerate(rows):
                outputs[index] = tokens[row, : np.count_nonzero(tokens[row])]
    return dataclasses.replace(
        pairs,
        target_ids=np.concatenate(outputs),
        target_ends=np.cumsum([len(output) for output in outputs], dtype=np.int64),
    )


def _sample_batch(
    target: T5Model,
    pairs: TokenisedPairs,
    bucket: Bucket,
    rows: np.ndarray,
    first: int,
    options: SampleOptions,
) -> np.ndarray:
    batch = make_batch(pairs, bucket, rows)
    indices = np.zeros(bucket.batch_size, np.uint32)
    indices[: len(rows)] = first + rows
    tokens = sample_outputs(
        target,
        batch.encoder_input_tokens,
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), indices),
        sampling(options.temperature),
        np.arange(bucket.batch_size) < len(rows),
        max_length=options.max_length,
    )
    return np.asarray(tokens)


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


def _key(target: T5Model, pairs: TokenisedPairs, options: SampleOptions) -> str:
    digest = hashlib.sha256()
    digest.update(repr((OUTPUTS_FORMAT, target.config, options)).encode())
    for array in (*jax.tree.leaves(target.params), pairs.source_ids, pairs.source_ends):
        # One at a time: the host holds no second copy of a large model.
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:24]
