"""Rules of decoding in every loop: the text of plain decoding for every draft and verifier."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_t5x.beams.hypotheses import Ranking, TransformersRanking
from spec_t5x.beams.search import beam_search
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.rules import rules
from spec_t5x.types import EOS_ID
from spec_t5x.verifiers import verifier
from tests.drafts import test_every_draft as every_draft
from tests.drafts.test_every_draft import KEY, LENGTH, PROMPTS, SOURCES, T5_DRAFTS, VOCAB, target
from tests.drafts.test_ngram import ngrams
from tests.loops.stubs import drain

pytestmark = pytest.mark.usefixtures("quick_compilation", "unchecked")

RULES = {
    "masks": {
        "suppress_tokens": (8, 22),
        "begin_suppress_tokens": tuple(range(2, 12)),
        "forced_eos_token_id": (EOS_ID,),
        "min_decode_len": 7,
    },
    "history": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": ((9, 9), (3,)),
        "sequence_bias": (((5,), 2.0),),
    },
    "first": {"forced_bos_token_id": 12, "no_repeat_ngram_size": 1},
}
every_rule = pytest.mark.parametrize("name", RULES)
DRAFTS = T5_DRAFTS | {"ngram": lambda: ngrams(VOCAB)}


@functools.cache
def made(name):
    return rules(VOCAB, (EOS_ID,), **RULES[name])


def settings(name, temperature=0.0):
    return sampling(temperature).replace(rules=made(name))


@functools.cache
def plain(name):
    decoded = autoregressive_decode(
        target(), SOURCES, PROMPTS, KEY, settings(name), max_decode_len=LENGTH
    )
    return jax.device_get(decoded)


@every_rule
def test_rules_are_kept_and_change_the_text(name):
    found = plain(name).tokens[:, 0]
    assert not np.array_equal(found, every_draft.plain_text().tokens[:, 0])
    for row, start in zip(found, (0, 1, 2, 0), strict=True):
        text = row[: np.flatnonzero(row)[-1] + 1].tolist()
        new = text[start:]
        if name == "masks":
            assert not {8, 22} & set(new)
            assert not 2 <= new[0] < 12
            assert EOS_ID not in new[:7]
            assert text[-1] == EOS_ID
        elif name == "history":
            pairs = list(zip([0, *text], text, strict=False))
            assert len(set(pairs)) == len(pairs)
            assert 3 not in new
        else:
            assert start or text[0] == 12
            assert len(set(new) - set(text[:start])) == len(new)


# Every draft under one of the rules, in turns, and one draft under all, with all verifiers.
DIAGONAL = [
    *((draft, rule, "block") for draft, rule in zip(DRAFTS, itertools.cycle(RULES), strict=False)),
    *itertools.product(["transformer"], RULES, ["token", "coupled", "rejection", "multi", "tree"]),
]


@pytest.mark.parametrize(("draft", "name", "which"), DIAGONAL)
def test_the_text_is_that_of_plain_decoding(draft, name, which):
    decoded = every_draft.decode(DRAFTS[draft](), settings=settings(name), verifier=verifier(which))
    np.testing.assert_array_equal(decoded.tokens, plain(name).tokens)
    np.testing.assert_allclose(decoded.scores, plain(name).scores, atol=1e-4)


@every_rule
def test_a_draft_that_keeps_the_rules_is_the_target_in_small(name):
    """The target as its own draft has every proposal accepted, since both keep the rules."""
    draft = every_draft.TransformerDraft(target())
    for which in ("block", "tree"):
        stats = every_draft.decode(draft, settings=settings(name), verifier=verifier(which)).stats
        full = 3 * stats.target_calls
        # The last call of a row may end within its proposals.
        assert np.all(stats.accepted >= full - 3), which


@every_rule
def test_at_a_pace_and_step_by_step(name):
    pace = Pace.start(Costs.by_formula(c=0.5, largest=3), rest=2)
    decoded = every_draft.decode(DRAFTS["shared encoder"](), settings=settings(name), pace=pace)
    np.testing.assert_array_equal(decoded.tokens, plain(name).tokens)
    assert np.any(decoded.stats.plain_steps > 0)
    arguments = target(), DRAFTS["transformer"](), SOURCES, PROMPTS, KEY, settings(name)
    _, decoded = drain(speculative_steps(*arguments, gamma=3, max_decode_len=LENGTH))
    np.testing.assert_array_equal(decoded.tokens, plain(name).tokens)


@every_rule
def test_coupled_samples_are_those_of_plain_decoding(name):
    rows = SOURCES, PROMPTS, KEY, settings(name, 1.0)
    options = {"max_decode_len": LENGTH, "num_decodes": 2}
    expected = autoregressive_decode(target(), *rows, coupled=True, **options)
    options |= {"gamma": 3, "verifier": verifier("coupled")}
    found = speculative_decode(target(), DRAFTS["transformer"](), *rows, **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


RANKINGS = {
    "of T5X": Ranking(exponent=0.6),
    "of transformers": TransformersRanking(exponent=2.0, early_stopping=True),
}


@pytest.mark.parametrize("ranking", RANKINGS.values(), ids=RANKINGS)
@every_rule
def test_a_speculative_search_finds_what_the_plain_one_does(name, ranking):
    found = []
    common = {"beams": 3, "max_decode_len": LENGTH, "ranking": ranking, "rules": made(name)}
    for gamma, draft in ((0, None), (3, every_draft.near()), (3, target())):
        drafting = {"draft_model": draft, "gamma": gamma}
        found.append(beam_search(target(), SOURCES, PROMPTS, **drafting, **common))
    unruled = beam_search(target(), SOURCES, PROMPTS, **common | {"rules": None})
    assert not np.array_equal(unruled.tokens, found[0].tokens)
    for speculative in found[1:]:
        np.testing.assert_array_equal(speculative.tokens, found[0].tokens)
        np.testing.assert_allclose(speculative.scores, found[0].scores, rtol=1e-5)
    # The target is its own draft, and keeps the rules.
    assert np.all(found[2].stats.block_efficiency > 2)


def test_rules_of_samples_hold_for_rows_of_all_temperatures():
    mixed = sampling(np.array([0.0, 1.0, 0.0, 2.0], np.float32)).replace(rules=made("masks"))
    decoded = every_draft.decode(DRAFTS["transformer"](), settings=mixed)
    assert not np.isin(decoded.tokens, [8, 22]).any()
    np.testing.assert_array_equal(decoded.tokens[[0, 2]], plain("masks").tokens[[0, 2]])
    assert jnp.all(jnp.isfinite(decoded.scores))


@pytest.mark.parametrize("name", ["block", "token"])
def test_a_text_that_uses_up_all_tokens_keeps_its_law(name):
    """After its end every token is excluded, so that its last logits are not finite."""
    allowed, rows = (3, 7, EOS_ID), 2048
    suppressed = tuple(token for token in range(VOCAB) if token not in allowed)
    found = rules(VOCAB, (EOS_ID,), suppress_tokens=suppressed, no_repeat_ngram_size=1)
    sources, prompts = jnp.tile(SOURCES[:1], (rows, 1)), jnp.zeros((rows, 1), jnp.int32)
    given = sources, prompts, KEY, sampling(4.0).replace(rules=found)
    # Its distributions are finite at each place.
    draft = every_draft.TransformerDraft(every_draft.near(), settings=sampling(0.0))
    limit = {"max_decode_len": 6}
    speculative = speculative_decode(
        target(), draft, *given, gamma=4, verifier=verifier(name), **limit
    )
    assert np.isfinite(speculative.scores).all() and np.any(speculative.stats.accepted)
    texts = [
        one.tokens[:, 0] for one in (autoregressive_decode(target(), *given, **limit), speculative)
    ]
    _, numbers = np.unique(np.concatenate(texts), axis=0, return_inverse=True)
    table = [np.bincount(each, minlength=5) for each in np.split(numbers.ravel(), 2)]
    assert stats.chi2_contingency(table).pvalue > 1e-4
