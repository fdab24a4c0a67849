"""Rounded weights, and embeddings that are the output layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.machine.operations import XLA
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.weights import Rounded, TiedTable, rounded, rows
from tests.toy_t5 import tiny_t5


def draws(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("bits", "group", "largest"), [(8, 130, 127), (4, 64, 7)])
def test_rounded_a_value_is_off_by_half_a_step_at_most(bits, group, largest):
    matrix = draws(130, 70)
    # A group without scale, and of four bits a last one of two rows.
    matrix[:64, 3] = 0.0
    weight = Rounded.of(matrix, bits)
    values = np.asarray(weight.values, np.int32)
    for begin in range(0, 130, group):
        rows = slice(begin, begin + group)
        steps = np.abs(matrix[rows]).max(axis=0) / largest
        assert np.all(np.abs(weight.matrix()[rows] - matrix[rows]) <= steps * 0.5001)
        assert np.array_equal(np.abs(values[rows]).max(axis=0), np.where(steps > 0, largest, 0))
    # Exact products, from which rounding again gives the same values.
    scales = np.repeat(np.asarray(weight.scales, np.float64), group, axis=0)[:130]
    np.testing.assert_array_equal(weight.matrix(), values * scales)
    inputs = draws(3, 5, 130)
    np.testing.assert_allclose(weight.times(inputs), inputs @ weight.matrix(), atol=1e-4)
    if bits == 8:
        # In bfloat16 products are rounded once, after they are scaled.
        narrow = jnp.asarray(inputs, jnp.bfloat16)
        exact = np.asarray(narrow, np.float64) @ np.asarray(weight.matrix(), np.float64)
        assert np.mean(weight.times(narrow) == exact.astype(jnp.bfloat16)) > 0.99


def tied_output(model) -> TiedTable:
    """Returns the embeddings of a T5, which are its output layer."""
    return model.weights["token_embedder"]["embedding"]


@pytest.mark.parametrize("bits", [8, 4])
def test_tied_embeddings_are_rounded_as_the_output_layer_alone(bits):
    model = tiny_t5(0, logits_via_embedding=True)
    embedding = model.params["token_embedder"]["embedding"]
    expected = Rounded.of(embedding.T, bits).matrix()
    by_xla = model.replace(weights=model.params, operations=XLA)
    states = jnp.asarray(draws(2, 3, 16))
    for each in (model, by_xla):
        coarse = each.rounded(bits)
        assert tied_output(coarse).table is tied_output(each)
        np.testing.assert_array_equal(tied_output(coarse).output.matrix(), expected)
        logits = coarse.apply(states, method="logits")
        np.testing.assert_allclose(logits, states @ expected * 16**-0.5, atol=1e-5)
        # Of what is looked up, so that a coarser output layer is not rounded twice.
        np.testing.assert_array_equal(
            tied_output(each.rounded(8).rounded(bits)).output.matrix(), expected
        )
        tokens = jnp.asarray([[5, 1]])
        np.testing.assert_array_equal(rows(tied_output(coarse), tokens), embedding[tokens])


def test_a_rounded_output_layer_lies_across_devices_as_the_embeddings_do():
    mesh = make_mesh(model=1)
    shape = jax.ShapeDtypeStruct(
        (130, 70), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("model"))
    )
    tied = rounded({"embedding": shape}, tied=True)["embedding"]
    assert tied.table is shape and tied.output.values.shape == (70, 130)
    assert tied.output.values.sharding.spec == jax.P(None, "model")
    assert rounded({"embedding": shape}, tied=False)["embedding"] is shape
