"""Tests of heads on a decoder's states, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.medusa.network import Heads, HeadsConfig, T5Heads
from spec_t5x.errors import InputError
from spec_t5x.machine.operations import FULL_PRECISION, XLA
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

VERSIONS = {
    "1.0": {"logits_via_embedding": True, "mlp_activations": ("relu",)},
    "1.1": {"logits_via_embedding": False},
}
SOURCES = jnp.array([[5, 6, 7, 1], [9, 1, 0, 0], [3, 8, 1, 0]])
head_logits = jax.jit(T5Heads.head_logits, static_argnums=3)
PREFIXES = jnp.array([[0, 5, 9, 4, 2], [0, 8, 8, 1, 3], [0, 0, 7, 6, 29]])


def random_params(emb_dim=16):
    rng = np.random.default_rng(0)
    shapes = {"wi": (3, 2 * emb_dim, 12), "wo": (3, 12, emb_dim)}
    return {n: jnp.asarray(rng.normal(scale=0.4, size=s), jnp.float32) for n, s in shapes.items()}


@pytest.fixture(scope="module", params=VERSIONS)
def target(request):
    """Provides a target of either version of T5."""
    return tiny_t5(0, **VERSIONS[request.param])


@pytest.fixture(scope="module")
def scored(target):
    """Provides logits and states after each token of the prefixes, by the cached path."""
    cache = target.prefill(SOURCES, PREFIXES.shape[1])
    logits, states, _ = jax.jit(type(target).score)(target, cache, PREFIXES)
    return logits, states


def test_new_heads_say_what_the_target_says_at_its_own_position(target, scored):
    config = HeadsConfig(emb_dim=16, vocab_size=30, num_heads=4, hidden_dim=8)
    state = jnp.zeros((1, 1, 16))
    params = Heads(config).init(jax.random.key(0), state, state, 4)["params"]
    shapes = {name: leaf.shape for name, leaf in params.items()}
    assert shapes == {"wi": (4, 32, 8), "wo": (4, 8, 16)}
    logits, states = scored
    of_heads = head_logits(T5Heads.create(params, target), states[:, 2], PREFIXES[:, 3], 3)
    assert of_heads.shape == (3, 3, 30)
    for i in range(3):
        np.testing.assert_allclose(of_heads[:, i], logits[:, 2], rtol=1e-5, atol=1e-5)


def test_heads_by_hand(target, scored):
    """``state + wo silu(wi [normed state; normed embedding])``, then the output layer."""
    params = random_params()
    states, tokens = np.asarray(scored[1][:, 1], np.float64), np.asarray(PREFIXES[:, 2])
    embedding = np.asarray(target.params["token_embedder"]["embedding"], np.float64)
    if target.config.logits_via_embedding:
        kernel = embedding.T / np.sqrt(16)
    else:
        kernel = np.asarray(target.params["decoder"]["logits_dense"]["kernel"], np.float64)

    def normed(values):
        return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True))

    inputs = np.concatenate([normed(states), normed(embedding[tokens])], axis=-1)
    hidden = np.einsum("be,neh->bnh", inputs, params["wi"])
    added = np.einsum("bnh,nhe->bne", hidden / (1 + np.exp(-hidden)), params["wo"])
    expected = (states[:, None] + added) @ kernel
    heads = T5Heads.create(params, target)
    found = head_logits(heads, scored[1][:, 1], PREFIXES[:, 2], 3)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    # A head does not depend on the number of heads.
    fewer = head_logits(heads, scored[1][:, 1], PREFIXES[:, 2], 2)
    np.testing.assert_allclose(fewer, found[:, :2], rtol=1e-5, atol=1e-4)
    assert found.dtype == jnp.float32
    # The target's arrays are shared.
    embedding = heads.shared["token_embedder"]["embedding"]
    assert embedding is target.weights["token_embedder"]["embedding"]


@pytest.mark.parametrize("operations", [XLA, FULL_PRECISION])
def test_heads_have_the_precision_of_their_target(target, scored, operations):
    model = target.replace(weights=target.params, operations=operations)
    heads = T5Heads.create(random_params(), model)
    program = head_logits.lower(heads, scored[1][:, 1], PREFIXES[:, 2], 3).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    full = ["precision = [HIGHEST, HIGHEST]" in line for line in products]
    # Two of the heads, and the output layer.
    assert full == [operations is FULL_PRECISION] * 3


def test_heads_of_another_width():
    with pytest.raises(InputError, match="states of 20 and the target has states of 16"):
        T5Heads.create(random_params(emb_dim=20), tiny_t5(0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "size"), [("num_heads", 0), ("hidden_dim", 2.5)])
def test_impossible_sizes(name, size):
    with pytest.raises(InputError, match=f"{name} is {size}"):
        HeadsConfig(emb_dim=16, vocab_size=30, **{name: size})
