"""Tiny T5Gemmas with random parameters."""

import numpy as np

from spec_t5x.contrib.t5gemma.network import T5GemmaConfig
from spec_t5x.models.seq2seq import T5Model
from tests.toy_t5 import random_params

# Fields of a T5Gemma 2's configuration that differ from T5Gemma's.
T5GEMMA2 = {
    "attention_softcap": 0.0,
    "logits_softcap": 0.0,
    "has_head_norms": True,
    "merges_source": True,
    "has_source_embedder": False,
    "image_end_id": 7,
}


def tiny_t5gemma(seed: int, **changes) -> T5Model:
    """Makes a T5Gemma of about 12,000 random parameters that writes varied texts.

    Local layers have a window of four positions; scores are soft-capped. ``changes`` are fields
    of ``T5GemmaConfig``.
    """
    sizes = {
        "vocab_size": 30,
        "emb_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 24,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "query_scalar": 8,
        "window": 4,
        "encoder_reach": (2, 3),
        "global_rotary": (100.0, 2.0),
        "attention_softcap": 3.0,
        "logits_softcap": 6.0,
        "logits_via_embedding": False,
    }
    config = T5GemmaConfig(**{**sizes, **changes})

    def scaled(path, noise):
        if noise.ndim == 1:
            return 0.3 * noise
        if "embedding" in path:
            return noise
        return (0.8 if "logits" in path else 1.5) * noise / np.sqrt(len(noise))

    return T5Model.create(random_params(config, seed, scaled), config)
