"""Cases of Medusa heads for ``tests.named_drafts``."""

import numpy as np

from spec_t5x.contrib.medusa.checkpoints import save_heads

CASES = ["{}/heads"]


def write(directory, target):
    """Writes two random heads for the target to ``directory/heads``."""
    rng, width = np.random.default_rng(0), target.config.emb_dim
    shapes = {"wi": (2, 2 * width, 8), "wo": (2, 8, width)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_heads(directory / "heads", params, target)
