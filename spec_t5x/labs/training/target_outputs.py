"""Outputs of a target for given sources, to train and evaluate a draft on.

Speculative decoding asks a draft about positions of the target's own outputs, not of references
(Zhou et al. 2023, DistillSpec, arXiv 2310.08461). They are sampled once, by plain decoding, and
kept on disk in parts, so that a run that was killed resumes with the next part. Output i of a
file follows from the target, the settings and i alone.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from spec_t5x.generation import GenerateOptions, Generator, all_answered
from spec_t5x.labs.training.batching import (
    Batches,
    TokenisedPairs,
    join_pairs,
    load_tokenised,
    store_tokenised,
)
from spec_t5x.types import PAD_ID

log = logging.getLogger(__name__)

# Bump when the same settings give other outputs.
OUTPUTS_FORMAT = 2
# Outputs of a file, which are lost by a kill.
PART_SIZE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How a target's outputs are sampled."""

    temperature: float  # 0 is argmax
    max_length: int  # in tokens, EOS included; longer outputs are cut
    tokens_per_batch: int  # padded source tokens
    buckets: Sequence[int]  # padded lengths of sources, increasing
    seed: int = 0


def sample_targets(
    target: Generator,
    pairs: TokenisedPairs,
    options: SampleOptions,
    cache_dir: str | Path | None,
    name: str = "",
) -> TokenisedPairs:
    """The same sources, each with the target's output for it.

    Args:
        target: generates, plainly.
        pairs: their own targets are not used.
        options: how.
        cache_dir: where the outputs are kept, in a folder named by a hash of the target's
            parameters, the sources and the settings; None keeps nothing.
        name: of the sources, for the lines that say how far it is.

    Raises:
        InputError: a source fits no bucket, or the target's logits are not finite.
    """
    folder = cache_dir and Path(cache_dir) / f"texts-{_key(target, pairs, options)}"
    sources = np.split(pairs.source_ids, pairs.source_ends[:-1])
    parts = []
    for first in range(0, len(pairs), PART_SIZE):
        path = folder and folder / f"{first:09}.npz"
        if path and path.is_file():
            parts.append(load_tokenised(path))
        else:
            parts.append(_sample_part(target, sources[first : first + PART_SIZE], first, options))
            if path:
                store_tokenised(path, parts[-1])
        done, temperature = min(first + PART_SIZE, len(pairs)), options.temperature
        how_far = f"{done:,} of {len(pairs):,} texts (T={temperature:g})"
        log.info(f"{name}: the target has written {how_far}")
    lengths = np.concatenate([part.target_lengths for part in parts])
    return dataclasses.replace(
        pairs,
        target_ids=np.concatenate([part.target_ids for part in parts]),
        target_ends=np.cumsum(lengths, dtype=np.int64),
    )


def _sample_part(
    target: Generator, sources: Sequence[np.ndarray], first: int, options: SampleOptions
) -> TokenisedPairs:
    """The outputs for ``sources``, whose random keys count from ``first``."""
    outputs = {}
    batches = Batches(
        join_pairs((source, ()) for source in sources),
        tokens_per_batch=options.tokens_per_batch,
        seed=0,
        buckets=options.buckets,
    )
    for bucket in batches.buckets:
        decoding = GenerateOptions(
            batch_size=bucket.batch_size,
            max_source_len=max(bucket.source, 2),
            max_decode_len=options.max_length,
            temperature=options.temperature,
            seed=options.seed,
        )
        plain = target.plain()
        inputs = ((first + row, "", sources[row].tolist()) for row in bucket.pairs.tolist())
        engine, batches = plain.engine(decoding), plain.by_length(inputs, decoding)
        for rows, answers in engine.answers(batches):
            for row, (output,) in zip(rows, all_answered(answers), strict=True):
                outputs[row] = _until_padding(output.output_ids)
    return join_pairs(([], outputs[first + number]) for number in range(len(sources)))


def _until_padding(ids: Sequence[int]) -> Sequence[int]:
    """Training would take all that follows padding for padding."""
    return ids[: ids.index(PAD_ID)] if PAD_ID in ids else ids


def _key(target: Generator, pairs: TokenisedPairs, options: SampleOptions) -> str:
    model, digest = target.target, hashlib.sha256()
    digest.update(repr((OUTPUTS_FORMAT, model.config, options)).encode())
    for array in (*jax.tree.leaves(model.params), pairs.source_ids, pairs.source_ends):
        # One at a time: the host holds no second copy of a large model.
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:24]
