"""T5Gemmas with the GPU kernels, run by JAX's interpreter: what they lack stays XLA's."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.machine.operations import XLA
from tests.contrib.t5gemma.toys import T5GEMMA2, tiny_t5gemma

pytest.importorskip("spec_t5x.contrib.gpu")
from tests.contrib.gpu.test_layers import all_kernels, by_kernels, logits  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("quick_compilation", "all_kernels")


@pytest.mark.parametrize("sizes", [{}, T5GEMMA2], ids=["t5gemma", "t5gemma2"])
def test_logits_are_those_of_xla(sizes):
    model = tiny_t5gemma(0, **sizes, vocab_size=64, emb_dim=32, head_dim=16, mlp_dim=48)
    tokens = jnp.asarray(np.random.default_rng(0).integers(8, 64, (2, 5)), jnp.int32)
    plain = model.replace(weights=model.params, operations=XLA)
    ours = by_kernels(plain)
    found, wanted = (logits(each, tokens, tokens) for each in (ours, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
