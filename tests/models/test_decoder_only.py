"""The decoder-only network: its calls agree, and the loops decode with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams.search import beam_search
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.testing.laws import check_target
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import prefill
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.models.decoder_only import (
    DecoderOnlyConfig,
    DecoderOnlyModel,
    DecoderOnlyTransformer,
    init_variables,
)
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import CoupledVerifier

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH = 3, 12
CONFIG = DecoderOnlyConfig(
    vocab_size=30,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=24,
    num_layers=2,
    mlp_activations=("gelu", "linear"),
)
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 2, 30).at[:, 0].set(0)


@functools.cache
def model(prefix_lm=False, scale=2.5, num_layers=2):
    module = DecoderOnlyTransformer(dataclasses.replace(CONFIG, num_layers=num_layers))
    params = jax.jit(functools.partial(init_variables, module))(jax.random.key(0))["params"]
    # Logits wide enough apart to make texts that differ.
    params = jax.tree.map(lambda leaf: scale * leaf, params)
    return DecoderOnlyModel.create(params, module.config).replace(prefix_lm=prefix_lm)


def test_its_calls_agree_with_one_another():
    """Calls are in pieces and at once, after rollbacks, in trees, and from prompts."""
    check_target(model(num_layers=1), TOKENS)


PROMPTS = jnp.where(jnp.arange(6) <= jnp.array([[5], [0], [3]]), TOKENS[:, :6], 0)


def test_a_prefix_sees_itself_in_both_directions():
    lengths = jnp.sum(PROMPTS[:, 1:] != 0, axis=1)
    last = PROMPTS[jnp.arange(ROWS), lengths][:, None]

    @functools.partial(jax.jit, static_argnames="room")
    def next_logits_and_keys(target, prompts, room=LENGTH):
        cache = prefill(target, prompts, prompts, room)
        return target.score(cache, last)[0][:, 0], cache.layers[1].keys

    def next_logits(*args):
        return next_logits_and_keys(*args)[0]

    # Scores so close together that each token has some weight.
    prefix_lm, causal_lm = model(True, scale=1.0), model(scale=1.0)
    both, keys = next_logits_and_keys(prefix_lm, PROMPTS)
    causal, causal_keys = next_logits_and_keys(causal_lm, PROMPTS)
    # All tokens but the last, from the start token on, see later ones.
    differ = jnp.max(jnp.abs(keys - causal_keys)[0], axis=(0, 2)) > 1e-3
    np.testing.assert_array_equal(differ[:6], [True] * 5 + [False])
    # The room after a prompt is not part of it.
    np.testing.assert_allclose(next_logits(prefix_lm, PROMPTS, LENGTH + 5), both, atol=1e-5)
    by_xla = prefix_lm.replace(weights=prefix_lm.params, operations=XLA)
    np.testing.assert_allclose(next_logits(by_xla, PROMPTS), both, atol=1e-4)
    # Nothing to see in an empty prompt; padding is not part of any.
    np.testing.assert_allclose(both[1], causal[1], atol=1e-5)
    assert jnp.max(jnp.abs(both[0] - causal[0])) > 1e-2
    alone = next_logits(prefix_lm, PROMPTS.at[0].set(PROMPTS[2])[:, :4])
    np.testing.assert_allclose(both[2], alone[2], atol=1e-5)


def test_speculative_text_is_the_plain_text():
    target, near = model(prefix_lm=True), model(prefix_lm=True, scale=2.2)
    options = {"max_decode_len": LENGTH, "num_decodes": 2, "rescale_log_probs": False}
    arguments = (PROMPTS, PROMPTS, jax.random.key(3), sampling(1.0))
    plain = autoregressive_decode(target, *arguments, coupled=True, **options)
    found = speculative_decode(
        target, TransformerDraft(near), *arguments, gamma=3, verifier=CoupledVerifier(), **options
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.scores, plain.scores, atol=1e-3)
    assert len(np.unique(np.asarray(plain.tokens).reshape(-1, LENGTH), axis=0)) > 2


@pytest.mark.parametrize("prefix_lm", [False, True])
def test_a_draft_of_the_targets_own_weights_is_always_accepted(prefix_lm):
    """The draft reads prompts as the target does, and leaves what it has read as it is."""
    target = model(prefix_lm=prefix_lm)
    prompts = jax.random.randint(jax.random.key(1), (16, 6), 2, 30).at[:, 0].set(0)
    arguments = (prompts, prompts, jax.random.key(3), sampling(1.0))
    stats = speculative_decode(
        target, TransformerDraft(target), *arguments, gamma=3, max_decode_len=LENGTH
    ).stats
    np.testing.assert_allclose(stats.beta_sum, stats.verified, rtol=1e-5)


def test_a_search_does_not_read_a_prefix_causally():
    with pytest.raises(InputError, match="prefix_lm is True: a search reads prompts causally"):
        beam_search(model(prefix_lm=True), PROMPTS, PROMPTS, beams=2, max_decode_len=LENGTH)


def test_it_has_no_source_whose_keys_could_be_rounded():
    with pytest.raises(InputError, match="kv is 'int8' and the model has no source: leave kv out"):
        model(num_layers=1).with_kv("int8")
