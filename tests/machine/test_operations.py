"""Precision of float32 products: the models' operations by type, platform and JAX's setting."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.machine import operations as operations_lib
from spec_t5x.machine.operations import FULL_PRECISION, XLA, usable
from spec_t5x.models.binding import bind, expected_shapes
from spec_t5x.sampling.distributions import sampling
from tests.toy_t5 import tiny_t5


@pytest.mark.parametrize(
    ("dtype", "platform", "setting", "operations"),
    [
        ("float32", "gpu", None, FULL_PRECISION),
        ("float32", "tpu", None, FULL_PRECISION),
        ("float32", "cpu", None, XLA),
        ("bfloat16", "gpu", None, XLA),
        ("bfloat16", "tpu", None, XLA),
        # A setting of the user's is kept.
        ("float32", "gpu", "tensorfloat32", XLA),
        ("float32", "tpu", "bfloat16", XLA),
        ("float32", "gpu", "highest", XLA),
    ],
)
def test_float32_is_multiplied_in_float32_on_every_platform(
    dtype, platform, setting, operations, monkeypatch
):
    monkeypatch.setattr(operations_lib, "registered", lambda: (FULL_PRECISION, XLA))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    model = tiny_t5(0)
    config = dataclasses.replace(model.config, dtype=dtype)
    inputs = jnp.asarray([[5, 6, 7, 1]]), jnp.zeros((1, 1), jnp.int32), jax.random.key(0)[None]
    with jax.default_matmul_precision(setting):
        assert usable(expected_shapes(config), dtype) is operations
        bound = bind(model.params, config)
        assert bound.operations is operations

        def decode(bound):
            return autoregressive_decode(bound, *inputs, sampling(0), max_decode_len=4).tokens

        program = jax.jit(decode).lower(bound).as_text().splitlines()
    products = [line for line in program if "dot_general" in line]
    full = ["precision = [HIGHEST, HIGHEST]" in line for line in products]
    assert len(full) > 20
    assert all(full) == (operations is FULL_PRECISION or setting == "highest")
