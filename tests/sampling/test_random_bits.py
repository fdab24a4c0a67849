"""Tests that the numbers of keys are JAX's, to the bit, with and without kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.machine import operations
from spec_t5x.sampling import random_bits


@pytest.fixture(params=[True, False], ids=["machine", "JAX"])
def keys(request, monkeypatch):
    """Provides keys, with the machine's kernels or without."""
    if not request.param:
        monkeypatch.setattr(operations, "registered", lambda: (operations.XLA,))
    return jax.random.split(jax.random.key(7), 5)


def same_keys(found, expected):
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))


def test_a_number_is_folded_in_as_jax_does(keys):
    numbers = jnp.array([0, 1, 77, 2**31 - 1, -1])
    folded = jax.jit(jax.vmap(random_bits.fold_in))
    same_keys(folded(keys, numbers), jax.vmap(jax.random.fold_in)(keys, numbers))
    same_keys(random_bits.fold_in(keys[0], 3), jax.random.fold_in(keys[0], 3))


@pytest.mark.parametrize("num", [1, 2, 7])
def test_uniform_numbers_are_those_of_jax(keys, num):
    expected = jax.vmap(lambda key: jax.random.uniform(key, (num,)))(keys)
    found = jax.jit(jax.vmap(lambda key: random_bits.uniform(key, num)))(keys)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(random_bits.uniform(keys[2], num), expected[2])


def test_keys_of_another_kind_are_left_to_jax():
    key = jax.random.key(0, impl="rbg")
    same_keys(random_bits.fold_in(key, 3), jax.random.fold_in(key, 3))
    np.testing.assert_array_equal(random_bits.uniform(key, 4), jax.random.uniform(key, (4,)))


def test_a_threefry_key_is_made_of_a_key_of_another_kind():
    key = random_bits.threefry(jax.random.key(0, impl="unsafe_rbg"))
    assert random_bits.is_threefry(key) and random_bits.threefry(key) is key
    # The other kind would draw the same number for all.
    drawn = jax.vmap(lambda n: random_bits.uniform(random_bits.fold_in(key, n), 1))(jnp.arange(8))
    assert len(set(drawn[:, 0].tolist())) == 8
