"""The published sizes, against the published numbers of parameters."""

import math

import pytest

from spec_t5x.contrib.t5gemma.network import FAMILY, GLOBAL, T5GemmaConfig
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.sizes import size
from tests.models import test_sizes

# Numbers of the public checkpoints.
PARAMETERS = {
    "t5gemma_s_s": 312_517_632,
    "t5gemma_b_b": 591_490_560,
    "t5gemma_l_l": 1_241_761_792,
    "t5gemma_ml_ml": 2_200_345_344,
    "t5gemma_xl_xl": 3_766_980_608,
    "t5gemma_2b_2b": 5_596_853_760,
    "t5gemma_9b_2b": 12_292_375_296,
    "t5gemma_9b_9b": 20_333_401_088,
}
# Numbers as the paper rounds them, without the parts for images.
ROUNDED = {
    "t5gemma2_270m": 0.37e9,
    "t5gemma2_1b": 1.7e9,
    "t5gemma2_4b": 7.1e9,
}


def test_every_size_is_checked():
    assert PARAMETERS.keys() | ROUNDED.keys() == FAMILY.sizes.keys()


@pytest.mark.parametrize("name", FAMILY.sizes)
def test_parameters_are_as_many_as_published(name):
    found = sum(map(math.prod, expected_shapes(size(name)).values()))
    expected = PARAMETERS.get(name) or pytest.approx(ROUNDED.get(name), rel=0.02)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "window", "reach", "factor"),
    [("270m", 512, (255, 256), 1), ("1b", 512, (255, 256), 1), ("4b", 1024, (511, 512), 8)],
)
def test_windows_and_rotations_of_t5gemma_2_are_those_of_gemma_3(name, window, reach, factor):
    """No number of parameters tells them (arXiv 2503.19786, table 1 and section 2)."""
    config = size(f"t5gemma2_{name}")
    assert (config.window, tuple(config.encoder_reach)) == (window, reach)
    assert (config.local_rotary, config.global_rotary) == ((1e4, 1), (1e6, factor))
    for kinds in (config.layer_kinds, config.encoder_layer_kinds):
        assert [kind == GLOBAL for kind in kinds] == [False] * 5 + [True]


def test_shapes_are_those_of_the_whole_network_in_its_order():
    config = T5GemmaConfig(vocab_size=32, num_encoder_layers=2, num_decoder_layers=11)
    test_sizes.test_shapes_are_those_of_the_whole_network_in_its_order(config)
