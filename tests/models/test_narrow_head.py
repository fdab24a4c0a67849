"""An output layer of some tokens, whose logits are those of the whole layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.interfaces import NodeTarget
from spec_t5x.labs.training.kept_layers import narrowed_params
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.machine.operations import FULL_PRECISION, XLA
from spec_t5x.models.narrow_head import UNKNOWN, NarrowHead, NarrowT5
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling.distributions import sampling, standardize
from spec_t5x.sampling.tree_shapes import Tree
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

IDS = np.array([1, 3, 4, 8, 9, 20, 29], np.int32)
KNOWN = np.isin(np.arange(30), IDS)
SOURCES = jnp.array([[5, 6, 7, 8, 5, 1], [9, 9, 4, 1, 0, 0]])
TOKENS = jnp.array([[0, 4, 7], [0, 8, 3]])


def make_narrow(tied):
    """Returns a model, and the same with a narrow output layer instead."""
    model = tiny_t5(0, num_decoder_layers=2, logits_via_embedding=tied)
    own = narrowed_params(own_params(model.params), model.params, model.config, IDS)
    assert "logits_dense" not in own["decoder"]
    decoder = {k: v for k, v in model.params["decoder"].items() if k != "logits_dense"}
    without = T5Model.create({**model.params, "decoder": decoder}, model.config)
    head = NarrowHead.create(IDS, 30)
    np.testing.assert_array_equal(head.knows, KNOWN)
    return model, NarrowT5.narrowed(without, head, own["narrow_head"]["kernel"])


@pytest.mark.parametrize("tied", [False, True], ids=["1.1", "1.0"])
def test_known_tokens_have_the_logits_of_the_whole_layer(tied):
    whole, narrow = make_narrow(tied)
    assert isinstance(narrow, NodeTarget)
    assert narrow.vocab_size == 30

    @functools.partial(jax.jit, static_argnames="method")
    def logits_of(model, method):
        cache = model.prefill(SOURCES, 8)
        if method == "score_nodes":
            nodes = tree_nodes(Tree((1, 1)), TOKENS, cache.lengths, model.num_slots(cache))
            return model.score_nodes(cache, nodes)[0]
        return model.score(cache, TOKENS)[0]

    for method in ("score", "score_nodes"):
        ours, theirs = logits_of(narrow, method), logits_of(whole, method)
        np.testing.assert_allclose(ours[..., IDS], theirs[..., IDS], rtol=1e-5, atol=1e-5)
        assert np.all(ours[..., ~KNOWN] == UNKNOWN)
        # With no known token left, it is a distribution still.
        probs = standardize(ours.at[..., IDS].set(-np.inf), sampling(1e-3))
        np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-5)
        # Sampled, by any settings, are known tokens alone.
        for settings in (sampling(1.0, 9), sampling(0.7, 0, 0.99)):
            probs = standardize(ours, settings)
            np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-5)
            assert not np.any(probs[..., ~KNOWN])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_narrow_layer_is_rounded_with_the_model(bits):
    whole, narrow = make_narrow(False)
    model = whole.replace(weights=whole.params, operations=XLA)
    kernel = jax.random.normal(jax.random.key(0), (16, len(IDS)))
    coarse = NarrowT5.narrowed(model, narrow.head, kernel).rounded(bits)
    np.testing.assert_array_equal(coarse.kernel.matrix(), Rounded.of(kernel, bits).matrix())


@pytest.mark.parametrize("operations", [XLA, FULL_PRECISION])
def test_a_narrow_layer_has_the_precision_of_the_whole_one(operations):
    whole, narrow = make_narrow(False)
    model = whole.replace(weights=whole.params, operations=operations)
    narrow = NarrowT5.narrowed(model, narrow.head, np.ones((16, len(IDS)), np.float32))
    with jax.default_matmul_precision(None):
        text = jax.jit(narrow.logits).lower(jnp.ones((2, 3, 16))).as_text()
    assert text.count("dot_general") == 1
    assert ("precision = [HIGHEST, HIGHEST]" in text) == (operations is FULL_PRECISION)


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 2], [2, 30]])
def test_ids_that_are_none(ids):
    with pytest.raises(InputError, match="of a vocabulary of 30: give one or more, increas"):
        NarrowHead.create(np.array(ids, np.int32), 30)
