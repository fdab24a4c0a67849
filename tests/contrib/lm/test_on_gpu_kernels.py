"""A GPT with the GPU kernels, run by JAX's interpreter: what they lack stays XLA's."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.machine.operations import XLA
from tests.contrib.lm.toys import tiny_gpt

pytest.importorskip("spec_t5x.contrib.gpu")
from tests.contrib.gpu.test_layers import all_kernels, by_kernels, logits  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("quick_compilation", "all_kernels")


def test_logits_are_those_of_xla():
    model = tiny_gpt(0, vocab_size=64, emb_dim=32, mlp_dim=48)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 64, (2, 5)), jnp.int32)
    plain = model.replace(weights=model.params, operations=XLA)
    ours = by_kernels(plain)
    found, wanted = (logits(each, jnp.zeros((2, 1), jnp.int32), tokens) for each in (ours, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
