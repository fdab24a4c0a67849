"""Reading weights for decoding: packed one by one."""

import weakref

import jax
import numpy as np
import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage import tensors
from spec_t5x.models import weights


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_they_are_arrays_of_the_device_whatever_their_width(stored, tmp_path, tiny_pair):
    convert(tiny_pair / "target", tmp_path / "copy", to="native", dtype=stored)
    params = load(tmp_path / "copy", for_decoding=True).params
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    table = params["token_embedder"]["embedding"]
    assert isinstance(table, jax.Array if stored == "float32" else weights.Table)


def test_weights_for_decoding_are_packed_as_they_are_read(monkeypatch):
    alive, most = [], 0
    packed = weights.packed

    def watched(name, whole):
        nonlocal most
        alive.append(weakref.ref(whole))
        most = max(most, sum(reference() is not None for reference in alive))
        return packed(name, whole)

    monkeypatch.setattr(weights, "packed", watched)
    loaded = load("ende-target", for_decoding=True)
    assert weights.is_packed(loaded.params) and len(alive) > 100
    # Norms and biases by distance are kept as they were read; matrices are not.
    kept = sum(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded.params))
    assert most <= kept + tensors._AHEAD

    bound, whole = loaded.bind(), load("ende-target").bind()
    assert bound.kernels and jax.tree.structure(bound) == jax.tree.structure(whole)
    for pair in zip(jax.tree.leaves(bound), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(*pair)
