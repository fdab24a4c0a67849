"""Tiny GPTs with random parameters."""

import numpy as np

from spec_t5x.contrib.lm.gpt import GPTConfig, GPTModel
from tests.toy_t5 import random_params


def tiny_gpt(seed: int, **changes) -> GPTModel:
    """Makes a GPT of about 5,000 random parameters whose texts vary.

    ``changes`` are fields of ``GPTConfig``.
    """
    sizes = {
        "vocab_size": 30,
        "emb_dim": 16,
        "num_heads": 2,
        "num_layers": 2,
        "mlp_dim": 24,
        "max_length": 40,
        "logits_via_embedding": False,
    }
    config = GPTConfig(**{**sizes, **changes})

    def scaled(path, noise):
        if path.endswith("scale"):
            return 1 + 0.2 * noise
        if path.endswith("bias"):
            return 0.2 * noise
        if "embedding" in path:
            return noise
        return (0.8 if "logits" in path else 1.5) * noise / np.sqrt(len(noise))

    return GPTModel.create(random_params(config, seed, scaled), config)
