"""A grown network computes what the small one does, and its copies are trained apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.errors import InputError
from spec_t5x.labs.training.growth import check_growth, grown
from spec_t5x.labs.training.learners import network_logits
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.decoder_only import DecoderOnlyConfig
from tests.labs.training.toys import toy_config
from tests.toy_t5 import random_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

GATED = {"mlp_activations": ("gelu", "linear")}
TIED = {"logits_via_embedding": True}


def _random(config):
    """Makes parameters without zeros or ones, which would hide a mistake."""
    return random_params(config, 3, lambda path, draws: 0.4 * draws)


def _inputs():
    source = jnp.asarray([[3, 4, 5, 6, 1], [7, 8, 1, 0, 0]])
    text = jnp.asarray([[5, 4, 3, 1], [9, 1, 0, 0]])
    return source, jnp.pad(text[:, :-1], ((0, 0), (1, 0))), text


@pytest.mark.parametrize("traits", [{}, GATED, TIED, GATED | TIED])
@pytest.mark.parametrize(
    "sizes",
    [
        {"emb_dim": 24},
        {"num_heads": 4},
        {"mlp_dim": 48},
        {"num_encoder_layers": 2, "num_decoder_layers": 5},
        {"emb_dim": 16, "num_heads": 6, "mlp_dim": 32, "num_decoder_layers": 3},
    ],
)
def test_the_larger_network_computes_the_same(traits, sizes):
    old = toy_config(**traits, num_decoder_layers=2)
    new = dataclasses.replace(old, **sizes)
    params = _random(old)
    large = grown(params, old, new)
    assert {p: a.shape for p, a in flatten_dict(large, sep="/").items()} == expected_shapes(new)
    with jax.default_matmul_precision("highest"):
        expected = network_logits(old, params, _inputs())
        found = network_logits(new, large, _inputs())
    assert float(jnp.std(expected)) > 0.1
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_added_layers_are_spread_and_copies_of_the_layers_before_them():
    old = toy_config(num_decoder_layers=2)
    new = dataclasses.replace(old, num_decoder_layers=5)
    params = _random(old)
    small, large = (each["decoder"] for each in (params, grown(params, old, new)))
    for layer, (source, is_added) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1), (1, 1))):
        ours, theirs = large[f"layers_{layer}"], small[f"layers_{source}"]
        np.testing.assert_array_equal(ours["mlp"]["wi"]["kernel"], theirs["mlp"]["wi"]["kernel"])
        assert np.any(ours["mlp"]["wo"]["kernel"]) != is_added


def test_copies_of_rows_differ_by_random_numbers_as_large_as_the_rows():
    """Each copy is its share of the small network's row plus a number; the copies sum to it."""
    old = toy_config(emb_dim=64)
    new = dataclasses.replace(old, emb_dim=192)
    params = _random(old)
    small, large = (flatten_dict(each, sep="/") for each in (params, grown(params, old, new)))
    for path in ("encoder/layers_0/mlp/wi/kernel", "decoder/layers_0/self_attention/key/kernel"):
        copies = np.stack(np.split(np.asarray(large[path]), 3))
        np.testing.assert_allclose(copies.sum(axis=0), small[path], atol=1e-5)
        share = np.asarray(small[path]) / 3
        # The sum of three is 0, which leaves two thirds of the variance.
        sizes = np.std(copies - share, axis=(1, 2)) / np.std(share)
        np.testing.assert_allclose(sizes, np.sqrt(2 / 3), rtol=0.15)


def test_copies_are_trained_apart():
    old = toy_config()
    new = dataclasses.replace(old, emb_dim=16, mlp_dim=32)

    def loss(params):
        logits = network_logits(new, params, _inputs())
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 5])

    # Jitted, since the gradient's operations one by one are compiled one by one.
    gradients = flatten_dict(jax.jit(jax.grad(loss))(grown(_random(old), old, new)), sep="/")
    for path in ("token_embedder/embedding", "decoder/layers_0/mlp/wi/kernel"):
        copies = np.split(np.asarray(gradients[path]), 2, axis=-1)
        size = np.abs(copies[0]).max()
        assert np.abs(copies[0] - copies[1]).max() > 0.1 * size > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emb_dim": 12}, "has emb_dim 8, and the model to train 12: make T5Config.emb_dim a mult"),
        ({"num_heads": 1}, "has num_heads 2, and the model to train 1: make T5Config.num_heads a"),
        ({"num_decoder_layers": 1}, "make T5Config.num_decoder_layers at least 2"),
    ],
)
def test_what_cannot_grow(changes, message):
    old = toy_config(num_decoder_layers=2)
    with pytest.raises(InputError, match=message):
        check_growth("small", old, dataclasses.replace(old, **changes))


def test_only_t5_grows():
    config = DecoderOnlyConfig(vocab_size=9)
    with pytest.raises(InputError, match="lm is a DecoderOnly, and only a T5 can grow"):
        check_growth("lm", config, config)
