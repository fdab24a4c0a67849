"""The published sizes, against the published numbers of parameters."""

import math

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.errors import InputError
from spec_t5x.models.binding import abstract_variables, expected_shapes, network_of
from spec_t5x.models.sizes import SIZES, size
from spec_t5x.models.t5 import T5Config

# Of the public checkpoints.
PARAMETERS = {
    "t5_1_0_small": 60_506_624,
    "t5_1_0_base": 222_903_552,
    "t5_1_0_large": 737_668_096,
    "t5_1_0_xl": 2_851_598_336,
    "t5_1_0_xxl": 11_307_321_344,
    "t5_1_1_small": 76_961_152,
    "t5_1_1_base": 247_577_856,
    "t5_1_1_large": 783_150_080,
    "t5_1_1_xl": 2_849_757_184,
    "t5_1_1_xxl": 11_135_332_352,
    "mt5_small": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "umt5_small": 306_601_984,
    "umt5_base": 592_043_520,
    "umt5_xl": 3_768_356_864,
    "umt5_xxl": 12_972_531_712,
    "byt5_small": 299_637_760,
    "byt5_base": 581_653_248,
    "byt5_large": 1_228_183_552,
    "byt5_xl": 3_737_801_728,
    "byt5_xxl": 12_906_899_328,
}
# Of the others, as their papers round them.
ROUNDED = {
    "madlad400_3b": 2.9e9,
    "madlad400_10b": 10.7e9,
}


def test_every_size_is_checked():
    assert PARAMETERS.keys() | ROUNDED.keys() == SIZES.keys()


def num_parameters(config) -> int:
    """By hand: what each layer of T5 holds."""
    joined, emb = config.num_heads * config.head_dim, config.emb_dim
    attention = 4 * emb * joined
    mlp = (len(config.mlp_activations) + 1) * emb * config.mlp_dim
    encoder = config.num_encoder_layers * (attention + mlp + 2 * emb)
    decoder = config.num_decoder_layers * (2 * attention + mlp + 3 * emb)
    tables = config.vocab_size * emb * (1 if config.logits_via_embedding else 2)
    layers = config.num_encoder_layers + config.num_decoder_layers
    biases = layers if config.relpos_per_layer else 2
    bias = config.num_heads * config.relpos_num_buckets
    return encoder + decoder + tables + 2 * emb + biases * bias


@pytest.mark.parametrize("name", PARAMETERS | ROUNDED)
def test_parameters_are_as_many_as_published(name):
    found = num_parameters(size(name))
    if name in ROUNDED:
        assert found == pytest.approx(ROUNDED[name], rel=0.02)
    else:
        assert found == PARAMETERS[name]


def test_the_network_has_as_many_parameters_as_counted_by_hand():
    for name in ("t5_1_0_small", "t5_1_1_small", "byt5_small"):
        shapes = expected_shapes(size(name)).values()
        assert sum(math.prod(shape) for shape in shapes) == PARAMETERS[name]


@pytest.mark.parametrize(
    "config",
    [
        T5Config(vocab_size=32, num_encoder_layers=2, num_decoder_layers=11),
        T5Config(vocab_size=32, mlp_activations=("gelu", "linear"), logits_via_embedding=False),
    ],
)
def test_shapes_are_those_of_the_whole_network_in_its_order(config):
    network, inputs = network_of(config), 3 if config.has_source else 1

    def init(tokens):
        return network.init(jax.random.key(0), *[tokens] * inputs, enable_dropout=False)

    traced = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    assert abstract_variables(config) == traced
    shapes = [leaf.shape for leaf in jax.tree.leaves(traced["params"])]
    assert list(expected_shapes(config).values()) == shapes


def test_an_unknown_size_is_named_with_the_known_ones():
    with pytest.raises(
        InputError, match="'t5_xxxl': the known ones are t5_1_0_small, .*madlad400_10b"
    ):
        size("t5_xxxl")
