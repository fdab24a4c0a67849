"""A tiny T5 and batches of copies, for runs whose text does not matter."""

import numpy as np

from spec_t5x.data.batching import Batches, TokenisedPairs
from spec_t5x.models.t5 import T5Config


def toy_config(vocab_size: int = 16, emb_dim: int = 8, **changes) -> T5Config:
    """One layer on each side."""
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=2,
        head_dim=emb_dim // 2,
        mlp_dim=2 * emb_dim,
        num_encoder_layers=1,
        num_decoder_layers=1,
        **changes,
    )


def copy_batches(vocab_size: int = 16, *, rows: int = 4, kind: type[Batches] = Batches) -> Batches:
    """40 sources of 3 to 8 tokens, each its own target."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, 40)
    ids = np.concatenate([[*rng.integers(2, vocab_size, n - 1), 1] for n in lengths])
    ids, ends = ids.astype(np.int32), np.cumsum(lengths)
    pairs = TokenisedPairs(
        source_ids=ids, source_ends=ends, target_ids=ids, target_ends=ends, num_dropped=0
    )
    return kind(pairs, tokens_per_batch=8 * rows, seed=0, buckets=(8,))
