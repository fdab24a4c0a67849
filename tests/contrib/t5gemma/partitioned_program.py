"""``models/partitioned_program.py`` with a T5Gemma 2, run by ``test_partitioning.py``."""

import json

import jax

from spec_t5x.contrib.t5gemma.network import T5GemmaConfig
from tests.models.partitioned_program import main


def gemma(num_decoder_layers: int) -> T5GemmaConfig:
    """Returns a T5Gemma 2's configuration; 4 chips divide its query heads, not its key heads."""
    return T5GemmaConfig(
        vocab_size=64,
        emb_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=num_decoder_layers,
        window=4,
        merges_source=True,
        has_head_norms=True,
        has_source_embedder=False,
        logits_via_embedding=False,
    )


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps({"gemma": main(gemma(2), gemma(1), speculate=True)}))
