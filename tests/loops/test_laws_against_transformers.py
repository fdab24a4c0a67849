"""Sampled texts of a T5 follow the law that transformers computes of the same weights.

The expected probability of every text of up to three tokens is the product of transformers'
softmaxes, in float64; none of this package's code computes it. Each of thousands of rows is one
draw, with its own key. A control decodes at a temperature that is 6 % off and is found out.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_t5x import registry
from spec_t5x.checkpoints.huggingface import t5
from spec_t5x.checkpoints.make_draft import fitted
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.training.exports import model_in_memory
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.rules import rules
from spec_t5x.types import EOS_ID
from spec_t5x.verifiers import DEFAULT_WIDTHS, verifier
from tests.drafts import test_every_draft as every_draft
from tests.drafts.test_ngram import ngrams
from tests.toy_t5 import tiny_t5

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation", "unchecked", "small_models")

VOCAB = 6
LENGTH = 3
GAMMA = 2
ROWS = 8192
# Decoder layers of a target that some drafts are made of; the other's programs are small.
DEEP = 2
# Two sources of unequal lengths, with tokens to copy; rows of both kinds take turns.
SOURCES = np.array([[3, 5, 2, 3, 5, 1], [4, 4, 1, 0, 0, 0]])
# The random logits are a few units apart: at 1 most texts would be one.
TEMPERATURE = 2.0
# Texts that are expected less often are counted together.
LEAST_EXPECTED = 30

# Drafts that differ from others in size alone, are certain of their tokens as copying is, or are
# tested with coupled draws elsewhere.
MIXED = ("mixed, doubting", "mixed, early exit", "mixed, eagle")
LEFT_OUT = (*MIXED, "parrot", "int8", "shared encoder")
DRAFTS = {n: d for n, d in every_draft.T5_DRAFTS.items() if n not in LEFT_OUT} | {
    "ngram": lambda: ngrams(VOCAB),
}
VERIFIERS = registry.names("verifier")
# Every draft, and every verifier with one that knows much and one that seldom proposes.
PAIRS = [
    *((draft, "block") for draft in DRAFTS),
    *itertools.product(("transformer",), [name for name in VERIFIERS if name != "block"]),
    *itertools.product(
        ("copy",), [name for name in VERIFIERS if name not in ("block", *DEFAULT_WIDTHS)]
    ),
    ("eagle", "tree"),
]
# With the source in int8 each draft and each verifier once, and the loops of trees.
IN_INT8 = [pair for pair in PAIRS if pair[0] != "copy" or pair[1] == "block"]
# Rules of decoding change logits, not verification: every verifier, each with another draft.
RULED = [("transformer", "block"), ("copy", "token"), ("ngram", "coupled"), ("eagle", "tree")]
RULED += [("early exit", "rejection"), ("transformer", "multi")]
# The probability that chance alone fails one of all the tests is 1e-4; their seeds are fixed.
THRESHOLD = 1e-4 / (3 * len(PAIRS))


def num_layers(draft):
    """Returns the target's layers: more than one for drafts that are made of them."""
    return DEEP if draft.startswith(("early exit", "int4", "shared encoder", "eagle")) else 1


@functools.cache
def target(num_layers=1):
    """Makes a target of which some texts end early, and few tell temperatures apart."""
    return tiny_t5(3, num_decoder_layers=num_layers, vocab_size=VOCAB)


@functools.cache
def other():
    """Makes another model, many of whose drafts are accepted at this temperature."""
    return tiny_t5(0, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def small_models():
    """Makes the drafts of ``test_every_draft`` for this target."""
    ours = {
        "VOCAB": VOCAB,
        "target": functools.partial(target, DEEP),
        "near": other,
        "tiny_t5": functools.partial(tiny_t5, vocab_size=VOCAB),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setattr(every_draft, name, value)
        yield


@pytest.fixture(scope="module")
def laws(tmp_path_factory):
    """Computes the target's law by its number of layers."""
    return {layers: law(target(layers), tmp_path_factory.mktemp("theirs")) for layers in (1, DEEP)}


class FewBytes(ByteVocabulary):
    """A vocabulary of the checkpoint's size; no text is read."""

    vocab_size = VOCAB


def round_source(theirs):
    """Makes transformers' model round the keys and values of a source to int8."""

    def rounded(module, inputs, output):
        heads = output.unflatten(-1, (-1, theirs.config.d_kv))
        scales = heads.abs().amax(-1, keepdim=True) / 127
        return ((heads / scales).round() * scales).flatten(-2)

    for name, module in theirs.named_modules():
        if name.endswith(("EncDecAttention.k", "EncDecAttention.v")):
            module.register_forward_hook(rounded)


def law(model, directory, **options):
    """Writes a T5 for transformers; returns its ``law_of``."""
    stored = model_in_memory(directory, model.params, model.config, FewBytes())
    stored.write(directory, t5.write_model, dtype="float32")
    return law_of(directory, **options)


def law_of(directory, processors=lambda ids, logits: logits, change=lambda theirs: None):
    """Computes the probability of every text ``[sources, first, second, third token]``.

    Tokens after the end of a text are 0, as in the loop's output. ``processors`` are
    transformers' logits processors; ``change`` may change transformers' model.
    """
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).double().eval()
    change(theirs)
    prefixes = torch.tensor([[0, *prefix] for prefix in np.ndindex(VOCAB, VOCAB)])
    texts = np.zeros((len(SOURCES), VOCAB, VOCAB, VOCAB))
    for index, source in enumerate(torch.tensor(SOURCES)):
        inputs = source.expand(len(prefixes), -1)
        masks = {
            "attention_mask": (inputs != 0).long(),
            "decoder_attention_mask": torch.ones_like(prefixes),
        }
        with torch.no_grad():
            logits = theirs(input_ids=inputs, decoder_input_ids=prefixes, **masks).logits
        places = [processors(prefixes[:, : n + 1], logits[:, n].clone()) for n in range(LENGTH)]
        logits = torch.stack(places, dim=1)
        probs = torch.softmax(logits / TEMPERATURE, dim=-1).numpy()
        probs = probs.reshape(VOCAB, VOCAB, LENGTH, VOCAB)
        first, second, third = probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2]
        texts[index] = first[:, None, None] * second[:, :, None] * third
        texts[index, :, EOS_ID] = 0.0
        texts[index, :, EOS_ID, 0] = first * second[:, EOS_ID]
        texts[index, EOS_ID] = 0.0
        texts[index, EOS_ID, 0, 0] = first[EOS_ID]
    np.testing.assert_allclose(texts.sum(axis=(1, 2, 3)), 1.0, rtol=1e-12)
    return texts


@functools.cache
def made(draft):
    return DRAFTS[draft]()


def decode(draft, verifier_name, temperature=TEMPERATURE):
    return decode_with(target(num_layers(draft)), made(draft), verifier_name, temperature)


def decode_with(target, draft, verifier_name, temperature=TEMPERATURE, rules=None):
    sources = jnp.asarray(np.tile(SOURCES, (ROWS // len(SOURCES), 1)))
    settings = sampling(temperature).replace(rules=rules)
    arguments = sources, jnp.zeros((ROWS, 1), jnp.int32), jax.random.key(11), settings
    options = {"gamma": GAMMA, "max_decode_len": LENGTH, "verifier": verifier(verifier_name)}
    return jax.device_get(speculative_decode(target, draft, *arguments, **options))


def p_value(law, decoded):
    """Computes the p-value of texts under the law (Pearson's test)."""
    observed = np.zeros(law.shape)
    np.add.at(observed, (np.arange(ROWS) % len(SOURCES), *decoded.tokens[:, 0].T), 1)
    expected = law * ROWS / len(SOURCES)
    if np.any(observed[expected == 0]):
        return 0.0
    rare = expected < LEAST_EXPECTED
    observed, expected = (
        np.append(values[~rare], values[rare].sum()) for values in (observed, expected)
    )
    # The number of rows of each source is known, not only that of all rows.
    return stats.chisquare(observed, expected, ddof=len(SOURCES) - 1).pvalue


@pytest.mark.parametrize(("draft", "verifier_name"), PAIRS)
def test_texts_follow_the_law_of_transformers(laws, draft, verifier_name):
    decoded = decode(draft, verifier_name)
    accepted = np.sum(decoded.stats.accepted)
    # Rejection sampling accepts nothing where a draft is sure of one token.
    assert accepted > 0 or (draft, verifier_name) == ("copy", "rejection")
    assert accepted < np.sum(decoded.stats.proposed)
    assert p_value(laws[num_layers(draft)], decoded) > THRESHOLD


@pytest.fixture(scope="module")
def laws_in_int8(tmp_path_factory):
    """Computes the laws of targets with keys and values of the source in int8."""
    return {
        layers: law(target(layers), tmp_path_factory.mktemp("int8"), change=round_source)
        for layers in (1, DEEP)
    }


@pytest.mark.parametrize(("draft", "verifier_name"), IN_INT8)
def test_texts_follow_the_law_of_a_source_in_int8(laws_in_int8, draft, verifier_name):
    layers = num_layers(draft)
    decoded = decode_with(target(layers).with_kv("int8"), made(draft), verifier_name)
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.proposed)
    assert p_value(laws_in_int8[layers], decoded) > THRESHOLD


@pytest.fixture(scope="module")
def ruled_laws(tmp_path_factory):
    """Computes the laws under transformers' logits processors."""
    processors = transformers.LogitsProcessorList(
        [
            transformers.SequenceBiasLogitsProcessor([[[4], 1.0], [[3, 3], -2.0]]),
            transformers.RepetitionPenaltyLogitsProcessor(1.5),
            transformers.NoRepeatNGramLogitsProcessor(2),
            transformers.NoBadWordsLogitsProcessor([[5, 4]]),
            transformers.MinLengthLogitsProcessor(2, EOS_ID),
            transformers.SuppressTokensAtBeginLogitsProcessor([3], 1),
        ]
    )
    return {
        layers: law(target(layers), tmp_path_factory.mktemp("ruled"), processors=processors)
        for layers in (1, DEEP)
    }


def ruled():
    """Makes the same rules of this package."""
    return rules(
        VOCAB,
        (EOS_ID,),
        sequence_bias=(((4,), 1.0), ((3, 3), -2.0)),
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
        bad_words_ids=((5, 4),),
        min_decode_len=1,
        begin_suppress_tokens=(3,),
    )


@pytest.mark.parametrize(("draft", "verifier_name"), RULED)
def test_texts_follow_the_law_under_rules_of_decoding(laws, ruled_laws, draft, verifier_name):
    layers = num_layers(draft)
    decoded = decode_with(target(layers), made(draft), verifier_name, rules=ruled())
    assert np.sum(decoded.stats.accepted) > 0
    assert p_value(ruled_laws[layers], decoded) > THRESHOLD
    # The rules change the law.
    assert p_value(laws[layers], decoded) < THRESHOLD


def test_a_temperature_that_is_off_by_six_percent_is_found_out(laws):
    """Each of twenty seeds finds it, and sixteen of them find 5 %."""
    assert p_value(laws[1], decode("transformer", "block", 1.06 * TEMPERATURE)) < THRESHOLD


class FewerBytes(FewBytes):
    """A vocabulary of the smaller of two models."""

    vocab_size = VOCAB - 1


@pytest.mark.parametrize("rows", [VOCAB - 1, VOCAB + 3])
def test_texts_with_a_draft_that_embeds_another_number_of_ids(laws, tmp_path, rows):
    """The draft's law changes, and the texts' law does not."""
    model, smaller = target(), tiny_t5(0, vocab_size=rows)
    of_target = {"directory": tmp_path, "vocabulary": FewerBytes(), "metadata": {}}
    loaded = LoadedModel(params=model.params, config=model.config, **of_target)
    stored = model_in_memory(tmp_path, smaller.params, smaller.config, FewerBytes())
    draft = fitted(stored, loaded).load(dtype="float32")
    assert draft.config.vocab_size == VOCAB
    decoded = decode_with(model, TransformerDraft(draft.bind()), "block")
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.proposed)
    assert p_value(laws[1], decoded) > THRESHOLD
