"""Weights in the kernels' form: products by XLA, rounding, and what is packed."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.gpu.kernels import SWITCH
from spec_t5x.contrib.gpu.operations import GPU, GpuOperations
from spec_t5x.contrib.gpu.transposed import Transposed, pack, packed
from spec_t5x.machine.operations import XLA
from spec_t5x.models.weights import Rounded
from tests.checkpoints import test_rounded

MATRIX = jnp.asarray(np.random.default_rng(0).normal(size=(32, 48)), jnp.float32)
INPUTS = jnp.asarray(np.random.default_rng(1).normal(size=(3, 32)), jnp.float32)


def test_a_matrix_keeps_its_values_and_products():
    transposed = Transposed.of(MATRIX)
    assert transposed.values.shape == (48, 32) and transposed.shape == (32, 48)
    np.testing.assert_array_equal(transposed.unpacked(), MATRIX)
    np.testing.assert_allclose(transposed.times(INPUTS), INPUTS @ MATRIX, rtol=1e-5, atol=1e-5)


def test_a_rounded_matrix_keeps_its_values_and_products():
    rounded = Rounded.of(MATRIX)
    transposed = Transposed.of(rounded)
    np.testing.assert_array_equal(transposed.unpacked().values, rounded.values)
    np.testing.assert_array_equal(transposed.times(INPUTS), rounded.times(INPUTS))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("first", [None, 8])
def test_rounding_is_that_of_the_matrix(bits, first):
    plain = MATRIX if first is None else Rounded.of(MATRIX, first)
    found = Transposed.of(plain).rounded(bits)
    assert isinstance(found, Transposed) == (bits == 8)
    expected = Rounded.of(MATRIX if first is None else plain.matrix(), bits)
    matrix = found.unpacked()
    np.testing.assert_array_equal(matrix.values, expected.values)
    np.testing.assert_array_equal(matrix.scales, expected.scales)


def test_matrices_are_packed_once_and_other_parameters_kept():
    table, int4 = {"embedding": MATRIX}, {"kernel": Rounded.of(MATRIX, 4)}
    params = {"dense": {"kernel": MATRIX, "bias": MATRIX[0]}, "embed": table, "int4": int4}
    found = pack(params)
    assert isinstance(found["dense"]["kernel"], Transposed)
    assert found["dense"]["bias"] is params["dense"]["bias"]
    assert found["embed"]["embedding"] is MATRIX
    assert found["int4"]["kernel"] is int4["kernel"]
    assert pack(found)["dense"]["kernel"] is found["dense"]["kernel"]
    assert isinstance(packed("kernel", Rounded.of(MATRIX)), Transposed)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_matrices_are_rounded_one_by_one_as_they_are_read(weights, tied, monkeypatch):
    monkeypatch.setattr(GpuOperations, "state", lambda self: (True, ""))
    monkeypatch.setenv(SWITCH, "1")
    test_rounded.test_matrices_are_rounded_one_by_one_as_they_are_read(
        weights, tied, (GPU, XLA), monkeypatch
    )
