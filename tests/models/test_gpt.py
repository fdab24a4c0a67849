"""The GPT: one text, one law, however its tokens are fed and whoever drafts."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams.search import beam_search
from spec_t5x.beams.speculative_search import speculative_beam_search
from spec_t5x.drafts.cascade import CascadeDraft
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import BoundedTarget, NodeTarget, PromptTarget, StatefulTarget
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.gpt import GPTConfig, GPTModel
from spec_t5x.sampling.distributions import sampling
from spec_t5x.testing import laws
from spec_t5x.testing.toy_models import PrefixTarget, disturbed, tiny_gpt
from spec_t5x.verifiers import TokenVerifier, verifier

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH, LARGEST_CHUNK, VOCAB = 3, 18, 4, 30
RNG = np.random.default_rng(0)
SOURCES = jnp.ones((BATCH, 1), jnp.int32)
TEXTS = np.pad(RNG.integers(2, VOCAB, (BATCH, LENGTH - 1)), ((0, 0), (1, 0))).astype(np.int32)
REFUSED = RNG.integers(2, VOCAB, (BATCH, LENGTH)).astype(np.int32)
KEY, GREEDY = jax.random.key(3), sampling(0.0)


@functools.cache
def model():
    return tiny_gpt(0)


SCORE = jax.jit(lambda model, cache, tokens: model.score(cache, tokens))


@jax.jit
def teacher_forced(model, texts):
    return model.module.apply({"params": model.params}, texts, enable_dropout=False)


@functools.cache
def expected_logits():
    return np.asarray(teacher_forced(model(), jnp.asarray(TEXTS)))


def test_it_offers_all_that_the_loops_can_use():
    for protocol in (PromptTarget, StatefulTarget, NodeTarget, BoundedTarget):
        assert isinstance(model(), protocol)


def test_the_start_token_is_never_generated():
    probs = jax.nn.softmax(expected_logits(), axis=-1)
    assert np.all(np.asarray(probs)[..., 0] == 0)
    np.testing.assert_allclose(np.sum(probs, axis=-1), 1, rtol=1e-5)


def test_dropout_changes_the_training_logits_alone():
    network, params = model().module, {"params": model().params}
    noisy = network.apply(params, jnp.asarray(TEXTS), rngs={"dropout": KEY})
    assert np.max(np.abs(noisy - expected_logits())) > 0.1


def test_bfloat16_computes_nearly_the_same_and_gives_float32_logits():
    config = dataclasses.replace(model().config, dtype="bfloat16")
    logits = teacher_forced(GPTModel.create(model().params, config), jnp.asarray(TEXTS))
    assert logits.dtype == jnp.float32
    real = np.abs(logits - expected_logits())[..., 1:]
    assert np.max(real) > 0 and np.mean(real) < 0.1


# Speculation


@functools.cache
def writer(seed=0, **changes):
    # One layer: what is asked here is the loops' doing, and compiles sooner.
    return tiny_gpt(seed, num_layers=1, **changes)


@functools.cache
def near():
    return disturbed(writer(), 0.1)


def copying():
    return CopyDraft(VOCAB)


def trailing():
    return TransformerDraft(near())


DRAFTS = {
    "same": lambda: TransformerDraft(writer()),
    "near": lambda: TransformerDraft(near()),
    "mixed": lambda: MixedDraft(copying(), trailing()),
}
PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9]])


@functools.cache
def plain_text():
    return jax.device_get(
        autoregressive_decode(writer(), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=LENGTH)
    )


def speculative(draft, gamma=3, prompts=PROMPTS, **options):
    options = {"max_decode_len": LENGTH, **options}
    sources = SOURCES[: prompts.shape[0]]
    return jax.device_get(
        speculative_decode(writer(), draft, sources, prompts, KEY, GREEDY, gamma=gamma, **options)
    )


@pytest.mark.parametrize("name", DRAFTS)
def test_the_greedy_text_is_that_of_plain_decoding(name):
    decoded = speculative(DRAFTS[name]())
    np.testing.assert_array_equal(decoded.tokens, plain_text().tokens)
    stats = decoded.stats
    assert np.all(stats.accepted <= stats.proposed)
    if name == "same":
        # The last call of a row may be cut short; otherwise every draft is accepted.
        assert np.all(stats.block_efficiency > 3)


def test_a_tree_of_drafts_gives_the_greedy_text():
    tree = verifier("tree", lenience=1.0, widths=(2, 2))
    decoded = speculative(TransformerDraft(near()), 3, verifier=tree)
    np.testing.assert_array_equal(decoded.tokens, plain_text().tokens)


def test_a_speculative_beam_search_finds_what_the_plain_one_does():
    options = {"beams": 2, "max_decode_len": 10}
    plain = beam_search(writer(), SOURCES, PROMPTS, **options)
    found = speculative_beam_search(writer(), near(), SOURCES, PROMPTS, gamma=2, **options)
    np.testing.assert_array_equal(plain.tokens, found.tokens)
    np.testing.assert_allclose(plain.scores, found.scores, rtol=1e-4)


def test_prompts_are_read_as_a_whole_as_they_are_token_by_token():
    @flax.struct.dataclass
    class WithoutPrompts:
        """The same model; of ``PromptTarget`` it lacks the method."""

        inner: GPTModel

        vocab_size = property(lambda self: self.inner.vocab_size)
        prefill = property(lambda self: self.inner.prefill)
        score = property(lambda self: self.inner.score)
        rollback = property(lambda self: self.inner.rollback)

    decoded = autoregressive_decode(
        WithoutPrompts(writer()), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=LENGTH
    )
    np.testing.assert_array_equal(decoded.tokens, plain_text().tokens)


@flax.struct.dataclass
class Exact(PrefixTarget):
    """Logits of whole prefixes by the training path, for ``sequence_law``."""

    model: GPTModel

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def next_logits(self, sources, prefixes):
        return teacher_forced(self.model, prefixes)


@functools.cache
def four_tokens(seed):
    return tiny_gpt(seed, vocab_size=laws.VOCAB_SIZE, max_length=8, num_layers=1)


def test_the_law_is_the_targets():
    draft = TransformerDraft(four_tokens(1))
    decoded = laws.decode_many(draft, 2, sampling(1.0), TokenVerifier(), model=four_tokens(0))
    statistic, threshold = laws.chi_square(decoded, sampling(1.0), Exact(four_tokens(0)))
    assert statistic < threshold
    # The draft is wrong often enough for the law to depend on its being corrected.
    assert 0.2 < np.sum(decoded.stats.accepted) / np.sum(decoded.stats.proposed) < 0.95


# Errors


def test_more_tokens_than_positions_are_refused_before_anything_is_compiled():
    for decode in (
        lambda: speculative(TransformerDraft(near()), max_decode_len=41),
        lambda: autoregressive_decode(writer(), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=41),
        lambda: beam_search(writer(), SOURCES, PROMPTS, beams=2, max_decode_len=41),
    ):
        with pytest.raises(InputError, match="has 40 positions and max_decode_len is 41"):
            decode()


def test_a_draft_with_fewer_positions_is_refused():
    short = TransformerDraft(tiny_gpt(3, max_length=8))
    copy = CopyDraft(short.vocab_size)
    for draft in (short, MixedDraft(copy, short), CascadeDraft(short.model, copy)):
        with pytest.raises(InputError, match="the draft has 8 positions and max_decode_len is 9"):
            speculative(draft, max_decode_len=9)


def test_the_last_position_is_used():
    # 40 tokens after the start token: the last of them is never fed.
    longest = {"max_decode_len": 40}
    plain = autoregressive_decode(writer(), SOURCES, PROMPTS, KEY, GREEDY, **longest, eos_id=-1)
    decoded = speculative(TransformerDraft(near()), **longest, eos_id=-1)
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    np.testing.assert_array_equal(plain.lengths, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "emb_dim is 16 and num_heads 3: the heads must divide it"),
        ({"num_layers": 0}, "num_layers is 0: give at least 1"),
        ({"dtype": "float16"}, "GPTConfig.dtype is 'float16'"),
    ],
)
def test_wrong_sizes_are_one_line(changes, message):
    with pytest.raises(InputError, match=message):
        tiny_gpt(0, **changes)


def test_a_configuration_survives_json_and_an_unknown_name_does_not():
    config = model().config
    assert GPTConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="unknown GPT setting 'depth'"):
        GPTConfig.from_dict({"depth": 3})
