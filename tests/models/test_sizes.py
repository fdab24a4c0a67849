"""The published sizes, against the published numbers of parameters."""

import math

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.errors import InputError
from spec_t5x.models.binding import abstract_variables, expected_shapes, network_of
from spec_t5x.models.sizes import SIZES, size
from spec_t5x.models.t5 import T5Config

# Numbers of the public checkpoints.
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
# Numbers of the others, as their papers round them.
ROUNDED = {"madlad400_3b": 2.9e9, "madlad400_10b": 10.7e9}


def test_every_size_is_checked():
    assert PARAMETERS.keys() | ROUNDED.keys() == SIZES.keys()


@pytest.mark.parametrize("name", PARAMETERS | ROUNDED)
def test_parameters_are_as_many_as_published(name):
    found = sum(map(math.prod, expected_shapes(size(name)).values()))
    assert found == (PARAMETERS.get(name) or pytest.approx(ROUNDED.get(name), rel=0.02))


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
    with pytest.raises(InputError, match="'t5_xxxl': choose one of t5_1_0_small, .*madlad400_10b"):
        size("t5_xxxl")
