"""Output layers without a copy of the vocabulary's table, and norms on each platform."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from spec_t5x.machine.operations import XLA
from spec_t5x.models.layers import Dense, RMSNorm
from spec_t5x.models.t5 import Transformer
from spec_t5x.models.weights import Rounded
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")


def with_dtype(model, dtype):
    """Returns the model with parameters and layers of a type."""
    config = dataclasses.replace(model.config, dtype=dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    return model.replace(weights=params, module=type(model.module)(config), operations=XLA)


@pytest.mark.parametrize(
    ("model", "method"),
    [(tiny_t5(0, logits_via_embedding=tied), Transformer.logits) for tied in (True, False)],
)
def test_logits_of_bfloat16_are_float32_without_a_copy_of_the_table(model, method):
    vocab, width = model.config.vocab_size, model.config.emb_dim
    copies = [f"tensor<{vocab}x{width}xf32>", f"tensor<{width}x{vocab}xf32>"]
    model = with_dtype(model, "bfloat16")

    @jax.jit
    def logits(params, states):
        return model.module.apply({"params": params}, states, method=method)

    states = jax.random.normal(jax.random.key(0), (2, 3, width)).astype(jnp.bfloat16)
    program = logits.lower(model.params, states).as_text()
    assert not any(copy in program for copy in copies)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    expected = logits(wide, states)
    assert any(copy in logits.lower(wide, states).as_text() for copy in copies)
    found = logits(model.params, states)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_in_bfloat16_are_not_rounded_again_for_a_tied_output_layer(bits, monkeypatch):
    """A GPU or TPU may round factors of a float32 product, and so rescaled states."""
    model = with_dtype(tiny_t5(0, logits_via_embedding=True, emb_dim=24), "bfloat16")
    states = jax.random.normal(jax.random.key(0), (2, 3, 24)).astype(jnp.bfloat16)
    given, times = [], Rounded.times
    monkeypatch.setattr(Rounded, "times", lambda *args: given.append(args[1]) or times(*args))
    coarse = model.rounded(bits)
    logits = coarse.logits(states)
    (factor,) = given
    np.testing.assert_array_equal(factor, states.astype(jnp.float32))
    matrix = coarse.weights["token_embedder"]["embedding"].output.matrix()
    np.testing.assert_allclose(logits, factor @ matrix * 24**-0.5, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [RMSNorm()])
def test_norms_take_plain_means_away_from_a_cpu(norm, monkeypatch):
    inputs = jax.random.normal(jax.random.key(0), (2, 3, 40)) * 3 + 1
    variables = norm.init(jax.random.key(1), inputs)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    on_a_cpu = norm.apply(variables, inputs)
    assert "dot_general" in str(jax.make_jaxpr(norm.apply)(variables, inputs))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "dot_general" not in str(
        jax.make_jaxpr(lambda *args: norm.apply(*args))(variables, inputs)
    )
    np.testing.assert_allclose(norm.apply(variables, inputs), on_a_cpu, rtol=1e-5, atol=1e-6)


def test_a_norm_in_bfloat16_is_rounded_before_it_is_scaled():
    """T5X and transformers multiply rounded numbers by a rounded scale."""
    inputs, scale = (np.random.default_rng(0).normal(size=(1, n, 40)) for n in (6, 1))
    params = {"params": {"scale": jnp.asarray(scale[0, 0], jnp.float32)}}
    found = RMSNorm(dtype="bfloat16").apply(params, jnp.asarray(inputs, jnp.float32))
    normed = inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True) + 1e-6)
    normed, scale = jnp.asarray(normed, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16)
    np.testing.assert_array_equal(found, normed * scale)


def test_a_parameter_of_another_shape_is_refused():
    with pytest.raises(ScopeParamShapeError, match=r'"scale".* shape \(5,\)'):
        RMSNorm(dtype="float32").apply({"params": {"scale": jnp.ones(5)}}, jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("platform", "shape", "features", "dtype", "expected"),
    [
        ("gpu", (1, 1, 64), 32, "bfloat16", 8),
        ("gpu", (64,), 32, "bfloat16", 8),
        ("gpu", (1, 3, 64), 32, "bfloat16", 3),
        # A product of float32 may be rounded on a GPU, a sum of products is not.
        ("gpu", (1, 1, 64), 32, "float32", 1),
        # XLA multiplies by so large a matrix as it is.
        ("gpu", (1, 1, 64), 10**7 // 64, "bfloat16", 1),
        ("cpu", (1, 1, 64), 32, "bfloat16", 1),
    ],
)
def test_one_row_is_multiplied_as_eight_on_a_gpu(platform, shape, features, dtype, expected):
    generator = np.random.default_rng(0)
    inputs, kernel = (
        jnp.asarray(generator.normal(size=each), dtype) for each in (shape, (64, features))
    )
    dense = Dense(features, ("embed", "mlp"), dtype, parent=None)

    # A function of this case alone: JAX keeps what it traced for another platform.
    def compute(inputs, kernel):
        return dense.apply({"params": {"kernel": kernel}}, inputs)

    with mock.patch("jax.default_backend", return_value=platform):
        traced = jax.make_jaxpr(compute)(inputs, kernel)
        found = compute(inputs, kernel)
    (dot,) = (each for each in traced.eqns if each.primitive.name == "dot_general")
    assert dot.invars[0].aval.size == expected * 64
    assert found.shape == (*shape[:-1], features)
    wanted = np.asarray(inputs, np.float32) @ np.asarray(kernel, np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("capability", "rows", "features", "dtype", "count"),
    [
        ("7.5", 5, 8, "float32", 1),
        # Sums of products, which XLA merges without a copy, unless there are too many.
        ("7.5", 1, 8, "float32", 0),
        ("7.5", 1, 10**7 // 16, "float32", 1),
        ("7.5", 5, 8, "bfloat16", 0),
        ("8.0", 5, 8, "float32", 0),
        (None, 5, 8, "float32", 0),
    ],
)
def test_float32_products_of_the_same_rows_stay_apart_on_an_old_gpu(
    capability, rows, features, dtype, count
):
    """XLA would copy their matrices into one in each call."""
    shapes = (16, features), (1, rows, 16)
    kernel, inputs = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    dense = Dense(features, ("embed", "mlp"), dtype, parent=None)
    device = SimpleNamespace(**{} if capability is None else {"compute_capability": capability})
    with mock.patch("jax.devices", return_value=[device]):
        traced = jax.make_jaxpr(lambda *args: dense.apply({"params": {"kernel": args[0]}}, args[1]))
        assert str(traced(kernel, inputs)).count("optimization_barrier") == count
