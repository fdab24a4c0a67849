"""Tests of the target as its own draft, with coarser weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling.distributions import sampling
from tests.toy_t5 import tiny_t5


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
