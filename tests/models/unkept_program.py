"""Program that ``test_partitioning.py`` runs with 2 simulated devices.

It prints as JSON whether JAX's cache is read or written for programs with and without a mesh.
"""

import contextlib
import json
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from spec_t5x.models.partitioning import batch_sharding, make_mesh, partitioned

ROWS = np.ones((2, 3), np.float32)


def total(rows: jax.Array) -> jax.Array:
    return jax.numpy.tanh(rows).sum()


def run(mesh: Mesh, context: contextlib.AbstractContextManager) -> str:
    """Returns "read" or "written" if the compilation cache was used for a program, or "neither"."""
    hits = []

    def look(event: str, **_) -> None:
        if event.endswith("cache_hits"):
            hits.append(event)

    rows, before = jax.device_put(ROWS, batch_sharding(mesh)), number_kept()
    jax.clear_caches()
    jax.monitoring.register_event_listener(look)
    with context:
        jax.block_until_ready(jax.jit(total)(rows))
    return "read" if hits else "written" if number_kept() > before else "neither"


def number_kept() -> int:
    return len(list(Path(jax.config.jax_compilation_cache_dir).glob("*total*-cache")))


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    two, one = make_mesh(), make_mesh(devices=jax.devices()[:1])
    cases = {
        "on the mesh": (two, partitioned(two)),
        "outside": (two, jax.set_mesh(two)),
        "on the mesh, kept": (two, partitioned(two)),
        "outside, kept": (two, jax.set_mesh(two)),
        "on a mesh of one device": (one, partitioned(one)),
        "on a mesh of one device, kept": (one, partitioned(one)),
    }
    print(json.dumps({name: run(*case) for name, case in cases.items()}))
