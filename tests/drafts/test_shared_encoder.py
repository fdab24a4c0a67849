"""Tests of a draft with its target's encoder, against a whole model of the same parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.training.kept_layers import keep_layers, with_shared
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import FULL_PRECISION, XLA, Operations
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import verifier
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCES = jnp.array(
    [[5, 6, 7, 8, 5, 1], [9, 9, 4, 1, 0, 0], [3, 1, 0, 0, 0, 0], [7, 6, 5, 4, 3, 1]]
)
PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9], [0, 0, 0]])
LAYERS = (1,)


@functools.cache
def made(tied=False):
    """Returns a target, and a function that makes its drafts.

    The function makes a draft with the target's encoder, and one of the same parameters with a
    separate encoder.
    """
    target = tiny_t5(0, num_decoder_layers=2, logits_via_embedding=tied)
    params, config = keep_layers(target.params, target.config, encoder=(0,), decoder=LAYERS)
    own = own_params(disturbed(T5Model.create(params, config), 0.1).params)
    whole = T5Model.create(with_shared(own, target.params, LAYERS), config)

    def make(**options):
        shared = SharedEncoderDraft.create(own, config, LAYERS, target, **options)
        return shared, TransformerDraft(whole, **options)

    return target, make


def decode(target, draft, settings, **options):
    options = {"max_decode_len": 18, "gamma": 3, **options}
    return jax.device_get(
        speculative_decode(target, draft, SOURCES, PROMPTS, jax.random.key(3), settings, **options)
    )


@pytest.mark.parametrize(
    ("tied", "options", "decoding"),
    [
        # T5 1.0's output layer is the shared embedding.
        (True, {}, {}),
        (False, {"settings": sampling(0.5)}, {"verifier": verifier("tree", widths=(2, 1))}),
    ],
    ids=["tied", "tree"],
)
def test_it_proposes_what_a_whole_model_would(tied, options, decoding):
    """The random numbers are the same."""
    target, make = made(tied)
    shared, whole = (decode(target, draft, sampling(1.0), **decoding) for draft in make(**options))
    np.testing.assert_array_equal(shared.tokens, whole.tokens)
    for field in ("target_calls", "proposed", "accepted", "accepted_by_position"):
        np.testing.assert_array_equal(getattr(shared.stats, field), getattr(whole.stats, field))
    assert 0 < shared.stats.accepted.sum() < shared.stats.proposed.sum()


def test_it_holds_no_encoder_and_encodes_nothing():
    target, make = made()
    shared, whole = make()
    assert set(shared.model.params) == {"token_embedder", "decoder"}
    embedding = target.params["token_embedder"]["embedding"]
    assert shared.model.params["token_embedder"]["embedding"] is embedding

    def num_operations(draft):
        lowered = jax.jit(draft.prefill, static_argnums=2).lower(SOURCES, PROMPTS, 20)
        return lowered.cost_analysis().get("flops", 0)

    assert num_operations(shared) == 0 < num_operations(whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_a_target_of_other_operations_its_precision_is_kept(dtype, monkeypatch):
    """Kernels that suit the draft alone cannot read the shared embedding."""

    def usable(self, shapes, dtype):
        return dtype == "float32"

    monkeypatch.setattr(type(FULL_PRECISION), "usable", usable)
    target, make = made()
    draft = make()[0].model
    config, other = dataclasses.replace(draft.config, dtype=dtype), Operations()
    given = own_params(draft.params), config, LAYERS, target.replace(operations=other)
    expected = FULL_PRECISION if dtype == "float32" else XLA
    assert SharedEncoderDraft.create(*given).model.operations is expected


@pytest.mark.parametrize("layers", [(0, 1), (2,), (-1,)])
def test_layers_that_the_target_does_not_have(layers):
    target, make = made()
    draft = make()[0].model
    with pytest.raises(InputError, match="of a target of 2: give one target layer for each layer"):
        SharedEncoderDraft.create(draft.params, draft.config, layers, target)
