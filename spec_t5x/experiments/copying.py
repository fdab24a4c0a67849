"""What copying can bring: acceptance by a target that writes the reference.

For summaries and edits there may be no model at hand, but there are references. Here the
"target" writes each pair's reference, word for word, and ``CopyDraft`` drafts for it from
the source: how often it is right says how much a model that writes such texts would gain.

    python -m spec_t5x.experiments.copying --data debian_dev.tsv.gz --vocabulary ende-target
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.loading import load_vocabulary
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import SentencePieceVocabulary, Vocabulary
from spec_t5x.drafts.copying import CopyDraft, CopyState
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.types import EOS_ID, PAD_ID, Array, Float32, Int, PyTree

_BATCH = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyingRow:
    """Figures of one setting over all pairs."""

    gamma: int
    min_match: int
    # Tokens for each target call, where plain decoding has 1.
    block_efficiency: float
    # Of the tokens proposed, how many were right; and proposed in a call, on average.
    acceptance: float
    proposed_per_call: float


@flax.struct.dataclass
class ReferenceCache:
    """Where each row is in its reference."""

    references: Int[Array, "batch length"]
    lengths: Int[Array, "batch"]


@flax.struct.dataclass
class ReferenceTarget:
    """Writes the reference. Its inputs are ``{"source": …, "reference": …}``."""

    vocab_size: int = flax.struct.field(pytree_node=False)

    def prefill(self, inputs: PyTree, max_length: int) -> ReferenceCache:
        """Room for the reference, and for calls that run beyond it."""
        references = inputs["reference"]
        room = max(max_length + 1 - references.shape[1], 0)
        return ReferenceCache(
            references=jnp.pad(references, ((0, 0), (0, room)), constant_values=EOS_ID),
            lengths=jnp.zeros(references.shape[0], jnp.int32),
        )

    def score(
        self, cache: ReferenceCache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], ReferenceCache]:
        """Certain of the reference's next tokens, whatever it is fed."""
        places = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None, :]
        written = jnp.take_along_axis(cache.references, places, axis=1)
        logits = jax.nn.one_hot(written, self.vocab_size)
        return logits, cache.replace(lengths=cache.lengths + tokens.shape[1])

    def rollback(self, cache: ReferenceCache, lengths: Int[Array, "batch"]) -> ReferenceCache:
        """The cache with each row's length set to ``lengths``."""
        return cache.replace(lengths=lengths)


@flax.struct.dataclass
class _CopyFromSource(CopyDraft):
    """The draft, which knows the source alone."""

    def prefill(self, inputs, prompts, max_length) -> CopyState:
        """Keeps the encoder's tokens."""
        return super().prefill(inputs["source"], prompts, max_length)


def measure(
    pairs: list[tuple[list[int], list[int]]], vocab_size: int, gamma: int, min_match: int
) -> CopyingRow:
    """Decodes all pairs of token ids (end of sequence included)."""
    target = ReferenceTarget(vocab_size)
    draft = _CopyFromSource(vocab_size, min_match)
    longest = max(len(reference) for _, reference in pairs)
    calls = proposed = accepted = tokens = 0
    for start in range(0, len(pairs), _BATCH):
        inputs, steps = _batch(pairs, start)
        decoded = speculative_decode(
            target,
            draft,
            inputs,
            jnp.zeros((_BATCH, 1), jnp.int32),
            jax.random.key(0),
            sampling(0.0),
            gamma=gamma,
            max_decode_len=longest,
            max_decode_steps=steps,
        )
        calls += int(decoded.stats.target_calls.sum())
        proposed += int(decoded.stats.proposed.sum())
        accepted += int(decoded.stats.accepted.sum())
        tokens += int(decoded.stats.appended.sum())
    return CopyingRow(
        gamma=gamma,
        min_match=min_match,
        block_efficiency=tokens / calls,
        acceptance=accepted / max(proposed, 1),
        proposed_per_call=proposed / calls,
    )


def _batch(pairs, start: int) -> tuple[dict[str, Array], Array]:
    """A batch of full shape; rows beyond the last pair generate nothing."""
    widths = [max(len(pair[side]) for pair in pairs) for side in (0, 1)]
    arrays = [np.full((_BATCH, width), PAD_ID, np.int32) for width in widths]
    steps = np.zeros(_BATCH, np.int32)
    for row, pair in enumerate(pairs[start : start + _BATCH]):
        for array, ids in zip(arrays, pair, strict=True):
            array[row, : len(ids)] = ids
        steps[row] = len(pair[1])
    return {"source": jnp.asarray(arrays[0]), "reference": jnp.asarray(arrays[1])}, steps


def _read(args, vocabulary: Vocabulary) -> Iterator[tuple[list[int], list[int]]]:
    for source, reference in read_pairs(args.data, 0, 1, 2):
        ids = [vocabulary.encode(text) for text in (source, reference)]
        yield [*ids[0][: args.max_source_len - 1], EOS_ID], [*ids[1], EOS_ID]


def main(arguments=None) -> int:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.copying")
    parser.add_argument("--data", required=True, help="source and reference; .tsv or .tsv.gz")
    parser.add_argument("--vocabulary", default="ende-target", help="a model, or spiece.model")
    parser.add_argument("--max_source_len", type=int, default=512)
    parser.add_argument("--gamma", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--min_match", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args(arguments)
    vocabulary = (
        SentencePieceVocabulary(Path(args.vocabulary))
        if Path(args.vocabulary).is_file()
        else load_vocabulary(args.vocabulary)
    )
    pairs = list(_read(args, vocabulary))
    print("| gamma | min. match | block efficiency | proposed per call | accepted |")
    print("|---|---|---|---|---|")
    for gamma in args.gamma:
        for min_match in args.min_match:
            row = measure(pairs, vocabulary.vocab_size, gamma, min_match)
            print(
                f"| {gamma} | {min_match} | {row.block_efficiency:.2f} "
                f"| {row.proposed_per_call:.2f} | {row.acceptance:.0%} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
