"""Tests of coupled verification: the text depends on the seed alone, and is T5X's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import t5x_stream
from spec_t5x.types import EOS_ID, PAD_ID
from spec_t5x.verifiers import CoupledVerifier
from tests.loops.stubs import assert_same_decodes
from tests.toy_drafts import ConstantDraft, TableDraft

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, LENGTH = 7, 12
KEY = jax.random.key(0)
SAMPLED = sampling(1.0)
TARGET = TableTarget.create(seed=0, vocab_size=VOCAB)
# Two or three tokens are often as likely as one another.
TIED = TableTarget(jnp.round(TARGET.table))
SOURCES = jnp.array([[2, 3], [4, 5], [2, 0], [6, 6], [3, 2]])
PROMPTS = jnp.array([[0, 0, 0], [0, 3, 0], [0, 5, 2], [0, 0, 0], [0, EOS_ID, 4]])
DRAFTS = {
    "same": TableDraft(TARGET.table),
    "good": TableDraft(TARGET.table + TableTarget.create(1, VOCAB, scale=1.5).table),
    "bad": TableDraft(-TARGET.table),
}

coupled_decode = functools.partial(
    speculative_decode, verifier=CoupledVerifier(), max_decode_len=LENGTH
)
plain_decode = functools.partial(autoregressive_decode, coupled=True, max_decode_len=LENGTH)


def acceptance(decoded):
    return np.sum(decoded.stats.accepted) / np.sum(decoded.stats.verified)


def test_the_text_is_that_of_plain_decoding_for_every_draft_and_gamma():
    arguments = SOURCES, PROMPTS, KEY, SAMPLED
    plain = plain_decode(TARGET, *arguments)
    assert_same_decodes(coupled_decode(TARGET, DRAFTS["good"], *arguments, gamma=0), plain)
    rates = {}
    for name, draft in DRAFTS.items():
        decoded = coupled_decode(TARGET, draft, *arguments, gamma=2)
        assert_same_decodes(decoded, plain)
        rates[name] = acceptance(decoded)
    assert rates["same"] == 1
    assert rates["bad"] < rates["good"] < 1
    # Rows have different texts, and some of them end.
    assert len(np.unique(plain.tokens[:, 0], axis=0)) == 5
    assert len(np.unique(plain.lengths)) > 1


@pytest.mark.parametrize(
    "draft",
    [
        ConstantDraft(jnp.int32(4), VOCAB),
        TransformerDraft(TARGET, settings=sampling(0.6, top_k=3)),
    ],
    ids=["constant", "own cache, warped"],
)
def test_the_text_does_not_depend_on_how_the_draft_drafts(draft):
    settings = sampling(1.2, top_p=0.9)
    plain = plain_decode(TARGET, SOURCES, PROMPTS, KEY, settings)
    decoded = coupled_decode(TARGET, draft, SOURCES, PROMPTS, KEY, settings, gamma=3)
    assert_same_decodes(decoded, plain)
    assert 0 < acceptance(decoded) < 1


def test_several_decodes_are_those_of_plain_decoding():
    arguments = SOURCES, PROMPTS, KEY, sampling([1.0, 0.7, 0.0, 2.0, 1.0])
    plain = plain_decode(TARGET, *arguments, num_decodes=3)
    decoded = coupled_decode(TARGET, DRAFTS["good"], *arguments, gamma=2, num_decodes=3)
    assert_same_decodes(decoded, plain)
    # The row at temperature 0 writes one text, the others do not.
    assert len(np.unique(plain.tokens[2], axis=0)) == 1
    assert len(np.unique(plain.tokens[0], axis=0)) == 3


# T5X's chain of keys

next_logits = jax.jit(lambda target, prefixes: target.next_logits(SOURCES, prefixes))


def t5x_texts(target, rng, settings, prompts, max_decode_len):
    """Returns the texts of T5X's sampling loop from prefilled prompts, step by step.

    In step k, row b writes the token after its prompt's k-th one; the key is split in every step
    and draws for the whole batch or, with a temperature for each row, for each of them mapped over
    as a batch of one.
    """
    texts = [[PAD_ID, *(token for token in row[1:] if token)] for row in np.asarray(prompts)]
    ended = [False] * len(texts)
    temperature = np.asarray(settings.temperature)
    for _ in range(max_decode_len):
        rng1, rng = jax.random.split(rng)
        padded = np.zeros((len(texts), max_decode_len + 1), np.int32)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        logits = np.asarray(next_logits(target, padded))
        logits = np.stack([logits[row, len(text) - 1] for row, text in enumerate(texts)])
        scaled = logits / temperature.reshape(-1, 1).astype(np.float32)
        if settings.top_k:
            smallest = np.sort(scaled, axis=-1)[:, -int(settings.top_k), None]
            scaled = np.where(scaled >= smallest, scaled, np.float32(-1e7))
        if temperature.ndim:
            draw = functools.partial(jax.random.categorical, rng1)
            tokens = jax.vmap(draw)(jnp.asarray(scaled)[:, None, :])[:, 0]
        else:
            tokens = jax.random.categorical(rng1, jnp.asarray(scaled))
        for row, token in enumerate(tokens.tolist()):
            if not ended[row]:
                texts[row].append(token)
                ended[row] = token == EOS_ID or len(texts[row]) == max_decode_len + 1
        if all(ended):
            break
    return [text[1:] for text in texts]


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (TARGET, sampling([1.0, 0.5, 2.0, 1.0, 0.8], top_k=3)),
        # T5X's default: of logits that tie, the noise chooses.
        (TIED, sampling(1.0, top_k=1)),
    ],
    ids=["each its own", "tied"],
)
def test_with_t5xs_chain_the_text_is_t5xs(target, settings):
    starts = jnp.sum(PROMPTS != PAD_ID, axis=1)
    stream = t5x_stream(KEY, starts, LENGTH, same_for_rows=settings.temperature.ndim == 1)
    expected = t5x_texts(target, KEY, settings, PROMPTS, LENGTH)
    plain = plain_decode(target, SOURCES, PROMPTS, stream, settings)
    found = zip(np.asarray(plain.tokens[:, 0]), plain.lengths[:, 0].tolist(), strict=True)
    assert [row[:length].tolist() for row, length in found] == expected
    for draft in DRAFTS.values():
        decoded = coupled_decode(target, draft, SOURCES, PROMPTS, stream, settings, gamma=2)
        assert_same_decodes(decoded, plain)
    # The rows' own keys give another text.
    assert np.any(plain_decode(target, SOURCES, PROMPTS, KEY, settings).tokens != plain.tokens)


def test_t5xs_chain_serves_coupled_draws_only():
    stream = t5x_stream(KEY, jnp.zeros(5, jnp.int32), LENGTH)
    arguments = SOURCES, PROMPTS, stream, SAMPLED
    with pytest.raises(InputError, match="coupled verifier"):
        speculative_decode(TARGET, DRAFTS["good"], *arguments, gamma=2, max_decode_len=LENGTH)
    with pytest.raises(InputError, match="coupled"):
        autoregressive_decode(TARGET, *arguments, max_decode_len=LENGTH)
    for rows, steps in ((4, LENGTH), (5, LENGTH - 1)):
        other = t5x_stream(KEY, jnp.zeros(rows, jnp.int32), steps)
        message = f"for {rows} rows and {steps} steps: make it for 5 rows and {LENGTH} steps"
        with pytest.raises(InputError, match=message):
            plain_decode(TARGET, SOURCES, PROMPTS, other, SAMPLED)
