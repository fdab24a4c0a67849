"""Program that ``test_refill.py`` runs with two simulated devices.

It prints as JSON the number of cache arrays in a waiting group, and of a burst's all-gathers.
"""

import json
import re

import jax
import numpy as np

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.loops import refill
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.outputs import row_keys
from spec_t5x.models.partitioning import batch_sharding, make_mesh, partitioned
from spec_t5x.sampling.distributions import sampling
from tests.toy_t5 import tiny_t5

ROWS = 2
# An all-gather of keys or values, which have four axes.
CACHED = re.compile(r"\w+\[\d+,\d+,\d+,\d+\]\S* all-gather\(")


def gathered(text: str) -> dict[str, int]:
    """Counts all-gathers of cache arrays in HLO's entry ("outside") and other computations."""
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    outside = len(CACHED.findall(entry))
    return {"outside": outside, "in loops": len(CACHED.findall(text)) - outside}


def main() -> dict[str, int]:
    target = tiny_t5(0, num_decoder_layers=2)
    models = target, TransformerDraft(tiny_t5(1))
    loop = Loop(gamma=2, max_decode_len=8)
    mesh = make_mesh()
    sources = np.full((ROWS, 5), 3, np.int32)
    prompts, places = np.zeros((ROWS, 1), np.int32), np.arange(ROWS, dtype=np.int32)
    rows = sources, prompts, row_keys(jax.random.key(0), ROWS), np.full(ROWS, 8, np.int32), places
    with partitioned(mesh):
        rows = jax.device_put(rows, batch_sharding(mesh))
        first, group = (refill.prepare(*models, *rows, loop=loop, waits=w) for w in (False, True))
        settings, drain = sampling(0.0), np.bool_(False)
        burst = refill.burst.lower(*models, refill.fill(first), group, settings, drain, loop=loop)
        text = burst.compile().as_text()
    cached = sum(leaf.ndim == 4 for leaf in jax.tree.leaves(group))
    return {"cached": cached, **gathered(text)}


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps(main()))
