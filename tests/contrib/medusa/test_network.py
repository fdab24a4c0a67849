"""Heads: what they compute, and that they are the target's own where they have not learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.medusa.network import Heads, HeadsConfig, T5Heads
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import Transformer
from spec_t5x.testing.toy_models import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

VERSIONS = {
    "1.0": {"logits_via_embedding": True, "mlp_activations": ("relu",)},
    "1.1": {"logits_via_embedding": False},
}
SOURCES = jnp.array([[5, 6, 7, 1], [9, 1, 0, 0], [3, 8, 1, 0]])
head_logits = jax.jit(T5Heads.head_logits, static_argnums=3)
PREFIXES = jnp.array([[0, 5, 9, 4, 2], [0, 8, 8, 1, 3], [0, 0, 7, 6, 29]])


def random_params(seed=0, num_heads=3, emb_dim=16, hidden_dim=12):
    rng = np.random.default_rng(seed)
    shapes = {"wi": (num_heads, 2 * emb_dim, hidden_dim), "wo": (num_heads, hidden_dim, emb_dim)}
    return {
        name: jnp.asarray(rng.normal(scale=0.4, size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module", params=VERSIONS)
def target(request):
    return tiny_t5(0, **VERSIONS[request.param])


@pytest.fixture(scope="module")
def scored(target):
    """Logits and states after each token of the prefixes, by the cached path."""
    cache = target.prefill(SOURCES, PREFIXES.shape[1])
    logits, states, _ = jax.jit(type(target).score)(target, cache, PREFIXES)
    return logits, states


def test_new_heads_say_what_the_target_says_at_its_own_position(target, scored):
    config = HeadsConfig(emb_dim=16, vocab_size=30, num_heads=4, hidden_dim=8)
    state = jnp.zeros((1, 1, 16))
    params = Heads(config).init(jax.random.key(0), state, state, 4)["params"]
    assert {name: leaf.shape for name, leaf in params.items()} == {
        "wi": (4, 32, 8),
        "wo": (4, 8, 16),
    }
    heads = T5Heads.create(params, target)
    assert (heads.num_heads, heads.vocab_size) == (4, 30)
    logits, states = scored
    of_heads = head_logits(heads, states[:, 2], PREFIXES[:, 3], 3)
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
    expected = []
    for wi, wo in zip(
        *(np.asarray(params[name], np.float64) for name in ("wi", "wo")), strict=True
    ):
        hidden = inputs @ wi
        expected.append((states + hidden / (1 + np.exp(-hidden)) @ wo) @ kernel)
    heads = T5Heads.create(params, target)
    found = head_logits(heads, scored[1][:, 1], PREFIXES[:, 2], 3)
    np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-3, atol=1e-3)
    # A head is the same whatever the number asked for.
    fewer = head_logits(heads, scored[1][:, 1], PREFIXES[:, 2], 2)
    np.testing.assert_allclose(fewer, found[:, :2], rtol=1e-5, atol=1e-4)
    assert found.dtype == jnp.float32


def test_heads_share_the_arrays_of_their_target(target):
    heads = T5Heads.create(random_params(), target)
    embedding = heads.shared["token_embedder"]["embedding"]
    assert embedding is target.weights["token_embedder"]["embedding"]
    own = sum(leaf.size for leaf in jax.tree.leaves(heads.params))
    assert own == 3 * (32 * 12 + 12 * 16)


def test_states_of_a_whole_text_are_those_of_the_cached_path(target, scored):
    logits, states = scored

    def read(network):
        text = jnp.ones_like(PREFIXES)
        return network.decode_states(network.encode(SOURCES), SOURCES, PREFIXES, text)

    @jax.jit
    def of_whole(params):
        whole = target.module.apply({"params": params}, method=read)
        return whole, target.module.apply({"params": params}, whole, method=Transformer.logits)

    whole, again = of_whole(target.params)
    np.testing.assert_allclose(whole, states, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(again, logits, rtol=1e-3, atol=1e-3)


def test_heads_of_another_width():
    with pytest.raises(InputError, match="states of 20 and the target has states of 16"):
        T5Heads.create(random_params(emb_dim=20), tiny_t5(0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"hidden_dim": 2.5}])
def test_impossible_sizes(sizes):
    (name,) = sizes
    with pytest.raises(InputError, match=f"{name} is {sizes[name]}"):
        HeadsConfig(emb_dim=16, vocab_size=30, **sizes)
