"""Beam search: what T5X finds, and the same in fewer target calls."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams import cache_slots, hypotheses
from spec_t5x.beams.hypotheses import Ranking
from spec_t5x.beams.search import beam_search
from spec_t5x.errors import InputError
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.rules import Places, rules
from tests.loops.stubs import assert_same_decodes, teacher_forced
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1

# --- an independent search, over texts -----------------------------------------


def search_texts(log_probs, prompt, *, beams, alpha, limit, max_decode_len, eos_id=EOS):
    """Searches by T5X's rules over tuples of tokens, for one input.

    ``log_probs`` maps a text to the log-probabilities ``[vocab]`` of its next token. Returns texts
    and their scores, by increasing score, and the number of steps.
    """

    def penalty(length):
        return ((5 + length) / 6) ** alpha

    ends = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    live, finished, steps = {tuple(prompt): 0.0}, {}, 0
    while live and len(next(iter(live))) < limit:
        if len(finished) == beams:
            # T5X counts the start token here.
            within_reach = max(live.values()) / penalty(max_decode_len + 1)
            if min(finished.values()) > within_reach:
                break
        candidates = {
            (*text, token): total + log_prob
            for text, total in live.items()
            for token, log_prob in enumerate(log_probs(text))
            if log_prob > -math.inf
        }
        best = sorted(candidates, key=candidates.get, reverse=True)[: (1 + len(ends)) * beams]
        ended = {text: candidates[text] / penalty(len(text)) for text in best if text[-1] in ends}
        finished |= ended
        kept = sorted(finished, key=finished.get, reverse=True)[:beams]
        finished = {text: finished[text] for text in kept}
        going_on = [text for text in best if text[-1] not in ends][:beams]
        live = {text: candidates[text] for text in going_on}
        steps += 1
    found = finished or live
    return sorted(found.items(), key=lambda item: item[1]), steps


@jax.jit
def table_log_probs(target, source, prefix):
    return jax.nn.log_softmax(target.next_logits(source[None], prefix[None])[0])


@jax.jit
def t5_log_probs(model, source, prefix):
    return jax.nn.log_softmax(teacher_forced(model, source[None], prefix[None])[0])


def after_each_text(model, source, max_decode_len):
    """Makes ``log_probs`` for ``search_texts``."""
    of_prefix = t5_log_probs if isinstance(model, T5Model) else table_log_probs

    @functools.cache
    def log_probs(text):
        prefix = np.zeros(max_decode_len + 1, np.int32)
        prefix[1 : 1 + len(text)] = text
        return np.asarray(of_prefix(model, source, prefix)[len(text)], np.float64)

    return log_probs


def assert_finds(result, row, expected, atol=1e-4):
    """Asserts that one row of a result holds these texts and scores, and nothing else."""
    texts_scores, steps = expected
    num_empty = result.tokens.shape[1] - len(texts_scores)
    for place, length in enumerate(result.lengths[row].tolist()):
        tokens = result.tokens[row, place].tolist()
        if place < num_empty:
            assert (length, float(result.scores[row, place])) == (0, hypotheses.EMPTY_SCORE)
            text = ()
        else:
            text, score = texts_scores[place - num_empty]
            assert float(result.scores[row, place]) == pytest.approx(score, abs=atol)
            assert length == len(text)
        assert tokens == [*text] + [0] * (len(tokens) - len(text))
    assert int(result.stats.steps[row]) == steps


# --- rules -----------------------------------------------------------------------


def test_hypotheses_that_share_a_lineage_see_the_same_slots():
    """The example of ``cache_slots.py``."""
    tokens, positions = jnp.array([[[7, 8]], [[3, 3]]])
    # Position 4 is not written yet.
    lineages = jnp.array([[[0, 0, 1, 0, 1], [0, 0, 1, 1, 1]]])
    nodes = cache_slots.nodes(tokens, positions, lineages, width=2)
    np.testing.assert_array_equal(nodes.slots, [[6, 7]])
    np.testing.assert_array_equal(nodes.slot_positions, [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]])
    seen = [np.flatnonzero(row).tolist() for row in nodes.visible[0]]
    assert seen == [[0, 2, 5, 6], [0, 2, 5, 7]]


def test_an_empty_place_has_no_candidates():
    following = hypotheses.Continuations(
        tokens=jnp.array([[[3, 1], [4, 5]]]), log_probs=jnp.array([[[jnp.nan, 0.0], [-1.0, -2.0]]])
    )
    found = hypotheses.candidates(jnp.array([[-jnp.inf, -0.5]]), following)
    np.testing.assert_array_equal(found.tokens, [[4, 5]])
    np.testing.assert_array_equal(found.parents, [[1, 1]])
    np.testing.assert_allclose(found.log_probs, [[-1.5, -2.5]])


@pytest.mark.parametrize(
    ("exponent", "early_stopping", "worst", "settled"),
    [
        (1.0, False, -0.5, True),
        (1.0, False, -1.5, False),
        # At the limit, with 9 generated tokens, a live hypothesis may score -2 / 9.
        (1.0, "never", -0.5, False),
        (1.0, "never", -0.21, True),
        # The longer, the worse: it scores best at its present length, -2 * 2.
        (-1.0, "never", -10.0, False),
        (-1.0, "never", -3.0, True),
        (1.0, True, -9.0, True),
    ],
)
def test_a_search_settles_by_the_rules_of_transformers(exponent, early_stopping, worst, settled):
    started = hypotheses.start(jnp.array([[0, 5]]), 2, 10, None)
    beams = started.replace(
        lengths=started.starts + 2,
        live_log_probs=jnp.array([[-7.0, -2.0]]),
        finished_scores=jnp.array([[worst, 0.0]]),
        finished_lengths=jnp.array([[2, 3]]),
    )
    ranking = hypotheses.TransformersRanking(exponent=exponent, early_stopping=early_stopping)
    assert ranking.is_settled(beams).tolist() == [settled]
    # Not while an entry is empty.
    assert not ranking.is_settled(beams.replace(finished_lengths=jnp.array([[0, 3]])))[0]


@pytest.mark.parametrize("excluded", [(), (0, 3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_that_are_not_finite_come_first_whatever_their_sign(sign, excluded):
    nan = np.copysign(np.float32(np.nan), np.float32(sign))
    places = jnp.zeros((1, 2), jnp.int32)
    places = Places(
        tokens=places[..., None], lengths=places, starts=places[:, 0], limits=places[:, 0] + 9
    )
    ruled = rules(5, (4,), suppress_tokens=excluded)
    for logits in (np.full(5, nan), np.float32([1, 0, nan, 2, 3])):
        following = hypotheses.continuations(jnp.asarray([[logits] * 2]), 4, ruled, places)
        # The first hypothesis is an empty place.
        found = hypotheses.candidates(jnp.array([[-jnp.inf, -0.5]]), following)
        assert np.isnan(hypotheses.live_candidates(found, 2, eos_id=4).log_probs[0, -1])


# --- the plain search ------------------------------------------------------------

VOCAB = 17
MAX_LEN = 9


def ending(table, bonus):
    """Adds to the table's logits of the end of sequence."""
    return TableTarget(table.table.at[:, EOS].add(bonus))


@functools.cache
def tables():
    """Makes targets of one shape: texts that end late, early and often; impossible tokens."""
    table = TableTarget.create(0, VOCAB)
    return {
        "late": table,
        "early": ending(TableTarget.create(1, VOCAB), 2.0),
        "peaked": ending(TableTarget.create(2, VOCAB, scale=4.0), 3.0),
        "impossible tokens": TableTarget.create(3, VOCAB, zeros=0.8),
    }


def rows():
    """Makes sources, prompts and limits that differ by row; the last row may write nothing."""
    rng = np.random.default_rng(5)
    sources = jnp.asarray(rng.integers(2, VOCAB, (6, 3)), jnp.int32)
    # The fourth has the end of sequence in its prompt.
    prompts = [[0, 0, 0, 0], [0, 4, 0, 0], [0, 5, 6, 7], [0, 3, 1, 0], [0, 0, 0, 0], [0, 8, 0, 0]]
    steps = [99, 99, 99, 99, 4, 0]
    return sources, jnp.asarray(prompts, jnp.int32), jnp.asarray(steps, jnp.int32)


def search_tables(target, width, alpha=0.6, draft=None, **options):
    sources, prompts, steps = rows()
    common = {"max_decode_len": MAX_LEN, "max_decode_steps": steps, "draft_model": draft}
    common |= {"beams": width, "ranking": Ranking(exponent=alpha)} | options
    return jax.device_get(beam_search(target, sources, prompts, **common))


@pytest.mark.parametrize(("width", "ends"), [(1, EOS), (3, EOS), (8, EOS), (3, (EOS, 4))])
def test_plain_search_finds_what_a_search_over_texts_finds(width, ends):
    sources, prompts, max_steps = (np.asarray(leaf) for leaf in rows())
    num_finished = num_early = 0
    alphas = {"late": [0.6], "early": [0.0, 1.5], "peaked": [0.6], "impossible tokens": [0.6]}
    for name, alpha in ((name, alpha) for name, each in alphas.items() for alpha in each):
        target = tables()[name]
        result = search_tables(target, width, alpha, eos_id=ends)
        for row, prompt in enumerate(prompts):
            text = prompt[1:][prompt[1:] > 0].tolist()
            log_probs = after_each_text(target, sources[row], MAX_LEN)
            limit = min(MAX_LEN, len(text) + max_steps[row])
            options = {"beams": width, "alpha": alpha, "limit": limit, "max_decode_len": MAX_LEN}
            expected = search_texts(log_probs, text, eos_id=ends, **options)
            assert_finds(result, row, expected)
            num_finished += sum(text[-1:] == (EOS,) for text, _ in expected[0])
            num_early += len(text) + expected[1] < limit
        np.testing.assert_array_equal(result.stats.target_calls, result.stats.steps)
        assert np.all(np.diff(result.scores, axis=1) >= 0)
    # Both ways to end were taken.
    assert num_finished > 10
    assert num_early > 3


def test_results_equal_those_of_t5x():
    """T5X forces prompts, which has the same result."""
    t5x_decoding = pytest.importorskip("t5x.decoding", reason="needs T5X")
    sources, prompts, _ = rows()
    # An end of sequence inside a forced prompt ends it there.
    prompts = prompts.at[3].set(0)
    num_finished = 0
    for name, width, alpha in (("late", 2, 0.6), ("early", 4, 0.0), ("peaked", 8, 1.5)):
        target = tables()[name]

        def tokens_to_logits(state, target=target, width=width):
            repeated = jnp.repeat(sources, width, axis=0)
            logits = target.next_logits(repeated, state.sequences)
            return logits[:, state.cur_index], state.cache

        padded = jnp.pad(prompts, ((0, 0), (0, MAX_LEN + 1 - prompts.shape[1])))
        expected_tokens, expected_scores = t5x_decoding.beam_search(
            padded,
            {},
            tokens_to_logits,
            EOS,
            num_decodes=width,
            alpha=alpha,
            max_decode_len=MAX_LEN,
        )
        options = {"ranking": Ranking(exponent=alpha), "max_decode_len": MAX_LEN}
        found = beam_search(target, sources, prompts, beams=width, **options)
        np.testing.assert_array_equal(found.tokens, expected_tokens)
        np.testing.assert_allclose(found.scores, expected_scores, rtol=1e-6, atol=1e-4)
        num_finished += int(np.sum(np.asarray(found.tokens) == EOS))
    assert num_finished > 20


# --- the speculative search --------------------------------------------------------


def assert_same_result(found, plain):
    assert_same_decodes(found, plain)
    np.testing.assert_array_equal(found.stats.steps, plain.stats.steps)


@functools.cache
def table_drafts(name):
    """Makes drafts of one shape for a target of ``tables``, by name."""
    target = tables()[name]
    noise = np.random.default_rng(8).normal(scale=0.3, size=target.table.shape)
    constant = jnp.full_like(target.table, -9.0)
    return {
        "same": target,
        "similar": TableTarget(target.table + noise.astype(np.float32)),
        "random": TableTarget.create(11, VOCAB),
        "impossible tokens": TableTarget.create(12, VOCAB, zeros=0.8),
        "adversarial": TableTarget(jnp.nan_to_num(-target.table, posinf=9.0)),
        "one token": TableTarget(constant.at[:, 5].set(9.0)),
        "end of sequence": TableTarget(constant.at[:, EOS].set(9.0)),
    }


@functools.cache
def plain_of_tables(name, width, ends):
    return search_tables(tables()[name], width, eos_id=ends)


@pytest.mark.parametrize(
    ("width", "gamma", "ends"),
    [(1, 3, EOS), (4, 1, EOS), (2, 4, (EOS, 4))],
)
def test_speculative_search_finds_what_the_plain_one_finds_under_every_draft(width, gamma, ends):
    accepted = collections.Counter()
    for name, target in tables().items():
        plain = plain_of_tables(name, width, ends)
        for draft_name, draft in table_drafts(name).items():
            found = search_tables(target, width, draft=draft, gamma=gamma, eos_id=ends)
            assert_same_result(found, plain)
            calls = np.asarray(found.stats.target_calls)
            assert np.all(calls <= plain.stats.steps)
            assert np.all(calls * (gamma + 1) >= plain.stats.steps)
            if draft_name == "same":
                # gamma + 1 steps in every call but the last.
                np.testing.assert_array_equal(calls, -(-plain.stats.steps // (gamma + 1)))
            accepted[draft_name] += int(np.sum(plain.stats.steps) - np.sum(calls))
    # Steps that cost no call: some that a similar draft foresaw, few of a useless one's.
    assert 0 < accepted["similar"] < accepted["same"]
    assert max(accepted["one token"], accepted["end of sequence"]) < accepted["similar"]


def test_more_draft_beams_cover_more_steps():
    """``top_w(M_p)`` is easier to have in a larger ``top_u(M_q)`` (A.4)."""
    calls = collections.Counter()
    for name in ("early", "impossible tokens"):
        for draft_name in ("similar", "impossible tokens"):
            draft = table_drafts(name)[draft_name]
            for more in (None, 6):
                found = search_tables(tables()[name], 2, draft=draft, gamma=3, draft_beams=more)
                assert_same_result(found, plain_of_tables(name, 2, EOS))
                calls[more] += int(np.sum(found.stats.target_calls))
    assert calls[6] < calls[None]


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Rows advance at their own pace; neither results nor statistics change."""
    target, draft = tables()["early"], table_drafts("early")["similar"]
    options = {"beams": 2, "draft_model": draft, "gamma": 2, "max_decode_len": MAX_LEN}

    def search(sources, prompts, steps):
        return beam_search(target, sources, prompts, max_decode_steps=steps, **options)

    together = search(*rows())
    paces = set(np.asarray(together.stats.block_efficiency[:5]).round(3).tolist())
    assert len(paces) > 2
    for row in range(len(rows()[0])):
        alone = search(*(leaf[row : row + 1] for leaf in rows()))
        for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(one[0], other[row], rtol=1e-6)


def test_searches_with_a_t5_find_what_a_search_over_texts_finds():
    """The oracle's log-probabilities are teacher-forced, without a cache."""
    model, max_decode_len, width, gamma = tiny_t5(0), 11, 3, 3
    kernel = model.params["decoder"]["logits_dense"]["kernel"]
    noise = 0.15 * jax.random.normal(jax.random.key(0), kernel.shape)
    decoder = {**model.params["decoder"], "logits_dense": {"kernel": kernel + noise}}
    similar = model.with_params({**model.params, "decoder": decoder})
    sources = np.random.default_rng(1).integers(2, 30, (4, 7)).astype(np.int32)
    sources[1, 4:] = 0
    prompts = np.array([[0, 0, 0], [0, 7, 0], [0, 8, 9], [0, 0, 0]], np.int32)
    options = {"beams": width, "max_decode_len": max_decode_len}
    plain = jax.device_get(beam_search(model, sources, prompts, **options))
    for row, prompt in enumerate(prompts):
        log_probs = after_each_text(model, sources[row], max_decode_len)
        text, limits = prompt[prompt > 0].tolist(), {"alpha": 0.6, "limit": max_decode_len}
        assert_finds(plain, row, search_texts(log_probs, text, **limits, **options))
    calls = {}
    for name, draft in {"same": model, "similar": similar, "random": tiny_t5(1)}.items():
        drafting = {"draft_model": draft, "gamma": gamma}
        found = beam_search(model, sources, prompts, **drafting, **options)
        assert_same_result(found, plain)
        calls[name] = np.asarray(found.stats.target_calls)
    np.testing.assert_array_equal(calls["same"], -(-plain.stats.steps // (gamma + 1)))
    assert calls["same"].sum() < calls["similar"].sum() < plain.stats.steps.sum()


# --- refusals ----------------------------------------------------------------------


class CannotScoreNodes:
    """A target of the other loops."""

    vocab_size, state_size, max_positions = VOCAB, 0, None

    def prefill(self, inputs, max_length, prompts=None):
        raise AssertionError("refused before anything is run")

    score = rollback = prefill


jax.tree_util.register_pytree_node(
    CannotScoreNodes, lambda model: ((), None), lambda *_: CannotScoreNodes()
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 0}, "beams is 0: give at least 1"),
        ({"beams": 9}, "beams is 9: give at least 1, at most 8"),
        ({"beams": 1.5}, "beams is 1.5: give a whole number of at least 1"),
        ({"gamma": -1}, "gamma is -1: give at least 0"),
        ({"gamma": "auto"}, "gamma is 'auto': give a whole number of at least 0"),
        ({"max_decode_len": 3.5}, "max_decode_len is 3.5: give a whole number"),
        ({"prompts": [[0], [0]]}, "prompts are a list: give an array [batch, width]"),
        ({"draft_model": None}, "gamma is 2 and there is no draft_model"),
        ({"gamma": 0}, "gamma is 0, which uses no draft_model or draft_beams: leave"),
        ({"gamma": 0, "draft_model": None, "draft_beams": 3}, "gamma is 0, which uses no"),
        ({"draft_beams": 1}, "draft_beams is 1: give at least 2, at most 8"),
        ({"draft_beams": 9}, "draft_beams is 9: give at least 2, at most 8"),
        ({"max_decode_len": 2}, "prompts hold 3 tokens and max_decode_len is 2"),
        ({"target": CannotScoreNodes()}, "CannotScoreNodes has no num_slots, score_nodes, move"),
        (
            {"draft_model": CannotScoreNodes()},
            "CannotScoreNodes has no num_slots, score_nodes, move",
        ),
        ({"draft_model": TableTarget.create(0, 18)}, "the draft has 18 tokens and the target 17"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unusable_arguments_are_refused(unchecked, changes, message):
    sources, prompts, _ = rows()
    target = tables()["late"]
    arguments = {"target": target, "draft_model": target, "inputs": sources, "prompts": prompts}
    options = {"beams": 2, "gamma": 2, "max_decode_len": MAX_LEN}
    with pytest.raises(InputError) as raised:
        beam_search(**arguments | options | changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
