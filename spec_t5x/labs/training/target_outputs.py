"""Outputs of a target for given sources, to train and evaluate a draft on.

Speculative decoding runs a draft at positions of the target's outputs, not of references (Zhou et
al. 2023, DistillSpec, arXiv 2310.08461). Plain decoding samples the outputs once and stores them
in parts, so that a run that was killed resumes with the next part. Output i depends on the target,
source i, the settings and i alone.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training.batching import Batches, Texts, TokenisedPairs, join_pairs
from spec_t5x.labs.training.same_run import digest
from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import whole_file
from spec_t5x.types import PAD_ID

log = logging.getLogger(__name__)

# Part of the folder's hash: raise it if equal settings give other outputs, or files change form.
OUTPUTS_FORMAT = 4
# Number of outputs in a file, which is the most that a killed run loses.
PART_SIZE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Settings with which a target's outputs are sampled."""

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
    """Returns ``pairs`` with each target text replaced by the model's output for the source.

    Outputs are read from and written to a folder in ``cache_dir``, named by a hash of the target's
    parameters, the sources and the settings; None stores nothing. ``name`` is for the log.

    Raises:
        InputError: a source fits no bucket, or the target's logits are not finite.
    """
    folder = cache_dir and Path(cache_dir) / f"texts-{_key(target, pairs, options)}"
    sources, parts = pairs.source.split(), []
    for first in range(0, len(pairs), PART_SIZE):
        path = folder and folder / f"{first:09}.npz"
        if path and path.is_file():
            with np.load(path) as stored:
                parts.append(Texts(stored["ids"], stored["ends"]))
        else:
            parts.append(_sample_part(target, sources[first : first + PART_SIZE], first, options))
            if path:
                _store(path, parts[-1])
        done = f"{min(first + PART_SIZE, len(pairs)):,} of {len(pairs):,} texts"
        log.info(f"{name}: the target has written {done} (T={options.temperature:g})")
    ids = np.concatenate([part.ids for part in parts])
    ends = np.cumsum(np.concatenate([part.lengths for part in parts]), dtype=np.int64)
    return dataclasses.replace(pairs, target=Texts(ids, ends))


def _store(path: Path, texts: Texts) -> None:
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as stream:
            np.savez(stream, **dataclasses.asdict(texts))


def _sample_part(
    target: Generator, sources: Sequence[np.ndarray], first: int, options: SampleOptions
) -> Texts:
    """Samples an output for each source; ``sources[i]`` has the random key of input first + i."""
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
        engine, groups = plain.engine(decoding), plain.by_length(inputs, decoding)
        for rows, answers in engine.answers(groups):
            for row, (output,) in zip(rows, answers, strict=True):
                ids = output.output_ids
                # Training would take a generated padding id for the end of the text.
                outputs[row] = ids[: ids.index(PAD_ID)] if PAD_ID in ids else ids
    return join_pairs(((), outputs[first + row]) for row in range(len(sources))).target


def _key(target: Generator, pairs: TokenisedPairs, options: SampleOptions) -> str:
    model, source = target.target, pairs.source
    # Outputs do not depend on their batch.
    settings = options.temperature, options.max_length, options.seed
    given = OUTPUTS_FORMAT, model.config, model.operations, settings
    return digest(given, model.params, source.ids, source.ends)[:24]
