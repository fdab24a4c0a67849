"""Output layers without a copy of the vocabulary's table, and norms on each platform."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from spec_t5x.machine.operations import XLA
from spec_t5x.models.layers import LayerNorm, RMSNorm
from spec_t5x.models.t5 import Transformer
from spec_t5x.testing.toy_models import tiny_t5

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


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=["rms", "layer"])
def test_norms_take_plain_means_away_from_a_cpu(norm, monkeypatch):
    inputs = jax.random.normal(jax.random.key(0), (2, 3, 40)) * 3 + 1
    variables = norm.init(jax.random.key(1), inputs)
    on_a_cpu = norm.apply(variables, inputs)
    assert "dot_general" in str(jax.make_jaxpr(norm.apply)(variables, inputs))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "dot_general" not in str(
        jax.make_jaxpr(lambda *args: norm.apply(*args))(variables, inputs)
    )
    np.testing.assert_allclose(norm.apply(variables, inputs), on_a_cpu, rtol=1e-5, atol=1e-6)


def test_a_parameter_of_another_shape_is_refused():
    with pytest.raises(ScopeParamShapeError, match=r'"scale".* shape \(5,\)'):
        RMSNorm(dtype="float32").apply({"params": {"scale": jnp.ones(5)}}, jnp.ones((2, 4)))
