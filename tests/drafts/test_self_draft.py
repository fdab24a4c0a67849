"""Tests of the target as its own draft, with coarser weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.errors import InputError
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.models.decoder_only import (
    DecoderOnlyConfig,
    DecoderOnlyModel,
    DecoderOnlyTransformer,
    init_variables,
)
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling.distributions import sampling
from tests.toy_t5 import tiny_t5


@pytest.mark.parametrize("layers", [0, 2, 1.5, "a", True, None])
@pytest.mark.usefixtures("unchecked")
def test_layers_that_the_target_has_not(layers):
    with pytest.raises(InputError, match=f"early exit after {layers} of 2 decoder layers: give 1"):
        SelfDraft.early_exit(tiny_t5(0, num_decoder_layers=2), layers)
    with pytest.raises(InputError, match="of 1 decoder layers: give another draft"):
        SelfDraft.early_exit(tiny_t5(0, num_decoder_layers=1), layers)


@pytest.mark.usefixtures("unchecked")
def test_bits_that_there_are_not():
    with pytest.raises(InputError, match="bits is 7: choose one of 8, 4"):
        SelfDraft.rounded(tiny_t5(0), 7)


@pytest.mark.usefixtures("unchecked")
def test_a_target_without_an_encoder_has_no_early_exit():
    """The draft of a target with an encoder does not fit it either."""
    config = DecoderOnlyConfig(30, 16, 2, 8, 24, 2, ("gelu", "linear"))
    params = init_variables(DecoderOnlyTransformer(config), jax.random.key(0))["params"]
    target = DecoderOnlyModel.create(params, config)
    with pytest.raises(InputError, match="the target is a DecoderOnlyModel: give a T5Model"):
        SelfDraft.early_exit(target, 1)
    draft = SelfDraft.early_exit(tiny_t5(0, num_decoder_layers=2), 1)
    arguments = jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    with pytest.raises(InputError, match="SelfDraft is of a T5Model and the target a Decoder"):
        speculative_decode(target, draft, *arguments, sampling(), gamma=2, max_decode_len=4)


@pytest.mark.parametrize("make", [tiny_t5])
def test_nearly_all_drafts_of_rounded_weights_are_accepted(make, quick_compilation):
    target = make(0)
    sources = jnp.asarray(np.random.default_rng(0).integers(3, 30, (8, 9)), jnp.int32)
    arguments = sources, jnp.zeros((8, 1), jnp.int32), jax.random.key(0), sampling()
    options = {"gamma": 4, "max_decode_len": 30}
    stats = speculative_decode(target, SelfDraft.rounded(target), *arguments, **options).stats
    verified = int(np.sum(stats.verified))
    assert verified > 40 and 0.9 * verified < int(np.sum(stats.accepted))


def test_a_rounded_draft_holds_its_own_matrices_and_no_encoder():
    target = tiny_t5(0)
    weights = SelfDraft.rounded(target).model.weights
    assert set(weights) == {"token_embedder", "decoder"}
    kernel = weights["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert jax.tree.leaves(kernel)[0].dtype == jnp.int8
    embedding = target.weights["token_embedder"]["embedding"]
    assert weights["token_embedder"]["embedding"] is embedding
    # XLA computes this model.
    plain = target.replace(weights=target.params, operations=XLA)
    kernel = SelfDraft.rounded(plain).model.weights["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert isinstance(kernel, Rounded) and kernel.values.dtype == jnp.int8
