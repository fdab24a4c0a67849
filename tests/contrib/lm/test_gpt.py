"""The GPT: one text and one law for any draft and any way to feed its tokens."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams.search import beam_search
from spec_t5x.contrib.lm.gpt import GPTConfig, GPTModel, LayerNorm
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.testing import laws
from spec_t5x.labs.testing.toy_models import PrefixTarget
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import BlockVerifier, TokenVerifier, TreeVerifier
from tests.contrib.lm.toys import tiny_gpt
from tests.models import test_layers, test_sizes
from tests.toy_t5 import disturbed

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, VOCAB = 3, 30
# All positions; the last token is never fed.
LENGTH = 40
SOURCES = jnp.ones((BATCH, 1), jnp.int32)
PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9]])
TEXTS = np.random.default_rng(0).integers(2, VOCAB, (BATCH, 18)).astype(np.int32)
TEXTS[:, 0] = 0
KEY, GREEDY = jax.random.key(3), sampling(0.0)


@functools.cache
def model():
    # One layer: these tests are of the loops, and a small model compiles sooner.
    return tiny_gpt(0, num_layers=1)


@functools.cache
def near():
    return disturbed(model(), 0.1)


@jax.jit
def teacher_forced(model, texts):
    return model.module.apply({"params": model.params}, texts, enable_dropout=False)


def test_dropout_changes_the_training_logits():
    @jax.jit
    def training(params):
        return model().module.apply(params, TEXTS, rngs={"dropout": KEY})

    noisy = training({"params": model().params})
    assert np.max(np.abs(noisy - teacher_forced(model(), TEXTS))) > 0.1


def test_bfloat16_computes_nearly_the_same_and_gives_float32_logits():
    config = dataclasses.replace(model().config, dtype="bfloat16")
    logits = teacher_forced(GPTModel.create(model().params, config), TEXTS)
    assert logits.dtype == jnp.float32
    real = np.abs(logits - teacher_forced(model(), TEXTS))[..., 1:]
    assert np.max(real) > 0 and np.mean(real) < 0.1


def speculative(draft, gamma=3, **options):
    options = {"max_decode_len": LENGTH, "eos_id": -1, **options}
    arguments = SOURCES, PROMPTS, KEY, GREEDY
    return speculative_decode(model(), draft, *arguments, gamma=gamma, **options)


def test_the_greedy_text_is_that_of_plain_decoding_up_to_the_last_position():
    plain = autoregressive_decode(
        model(), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=LENGTH, eos_id=-1
    )
    np.testing.assert_array_equal(plain.lengths, LENGTH)
    for verifier in (BlockVerifier(), TreeVerifier((2, 2))):
        decoded = speculative(TransformerDraft(near()), verifier=verifier)
        np.testing.assert_array_equal(decoded.tokens, plain.tokens)
        assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.proposed)


def test_a_speculative_beam_search_finds_what_the_plain_one_does():
    options = {"beams": 2, "max_decode_len": 10}
    plain = beam_search(model(), SOURCES, PROMPTS, **options)
    drafting = {"draft_model": near(), "gamma": 2}
    found = beam_search(model(), SOURCES, PROMPTS, **drafting, **options)
    np.testing.assert_array_equal(plain.tokens, found.tokens)
    np.testing.assert_allclose(plain.scores, found.scores, rtol=1e-4)


@flax.struct.dataclass
class Exact(PrefixTarget):
    """Target of whole prefixes by the training path, for ``sequence_law``."""

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
    # The draft is rejected often enough for the law to depend on corrections.
    assert 0.2 < np.sum(decoded.stats.accepted) / np.sum(decoded.stats.proposed) < 0.95


def test_more_tokens_than_positions_are_refused_before_anything_is_compiled():
    for decode in (
        lambda: speculative(TransformerDraft(near()), max_decode_len=41),
        lambda: autoregressive_decode(model(), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=41),
        lambda: beam_search(model(), SOURCES, PROMPTS, beams=2, max_decode_len=41),
    ):
        with pytest.raises(InputError, match="has 40 positions and max_decode_len is 41"):
            decode()
    short = TransformerDraft(tiny_gpt(3, max_length=8))
    for draft in (short, MixedDraft(CopyDraft(short.vocab_size), short)):
        with pytest.raises(InputError, match="the draft has 8 positions and max_decode_len is 9"):
            speculative(draft, max_decode_len=9)
    drafting = {"draft_model": short.model, "gamma": 2}
    with pytest.raises(InputError, match="the draft has 8 positions and max_decode_len is 9"):
        beam_search(model(), SOURCES, PROMPTS, beams=2, max_decode_len=9, **drafting)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "emb_dim is 16 and num_heads 3: give an emb_dim that num_heads divides"),
        ({"num_layers": 0}, "num_layers is 0: give at least 1"),
        ({"dtype": "float16"}, "GPTConfig.dtype is 'float16'"),
    ],
)
def test_wrong_sizes_are_one_line(changes, message):
    with pytest.raises(InputError, match=message):
        tiny_gpt(0, **changes)


@pytest.mark.parametrize("changes", [{"num_layers": 11}, {"logits_via_embedding": False}])
def test_shapes_are_those_of_the_whole_network_in_its_order(changes):
    config = GPTConfig(vocab_size=32, **changes)
    test_sizes.test_shapes_are_those_of_the_whole_network_in_its_order(config)


def test_its_norms_take_plain_means_away_from_a_cpu(monkeypatch):
    test_layers.test_norms_take_plain_means_away_from_a_cpu(LayerNorm(), monkeypatch)
