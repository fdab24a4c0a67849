"""The speculative loop: the target's text and law under every draft."""

import dataclasses
import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import DraftTraits, Proposal
from spec_t5x.labs.testing import laws
from spec_t5x.labs.testing.toy_models import PrefixTarget, TableTarget, conditionals
from spec_t5x.labs.theory.formulas import conditional_acceptance
from spec_t5x.loops import decode_state, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import sampling, values_at
from spec_t5x.sampling.draws import RowStream
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier, TokenVerifier, TreeVerifier, Verifier
from tests.loops.stubs import (
    assert_same_decodes,
    drain,
    no_prompts,
    teacher_forced,
    texts,
    writes_the_source,
)
from tests.toy_drafts import ConstantDraft, StubTarget, TableDraft
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
GREEDY = sampling(0.0)
KEY = jax.random.key(0)


def assert_same_leaves(found, expected, atol=0.0):
    """Asserts that two trees have the same arrays."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def only(stats):
    """Returns the statistics of each row's only decode."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], stats)


# Exact arrays


def errs_at_3_and_7(sources, prefixes):
    """Errs at tokens 3 and 7, where it says 2."""
    logits = writes_the_source(16)(sources, prefixes)
    errs = jnp.isin(jnp.arange(prefixes.shape[1]), jnp.array([2, 6]))
    return jnp.where(errs[None, :, None], 9.0 * jax.nn.one_hot(2, 16), logits)


WRITER = StubTarget(writes_the_source(16), 16)
ERRING = TransformerDraft(StubTarget(errs_at_3_and_7, 16))


def test_three_iterations_by_hand():
    """Target 5 6 7 8 9 4 3 EOS; the draft says 2 at tokens 3 and 7; gamma 3.

    1. Proposed 5 6 2: 5 6 accepted, 2 refused, 7 emitted.   5 6 7           beta 1 1 0
    2. Proposed 8 9 4: all accepted, 3 emitted (where the
       draft errs, unasked).                                 … 8 9 4 3       beta 1 1 1
    3. Proposed EOS 12 12: EOS accepted, the row has ended.  … EOS           beta 1

    3 target calls and 9 proposals; 3 + 2 + 1 of them at positions 1 to 3 are part of
    the text; 7 were verified, 6 of which with beta 1; 8 tokens in 3 calls.
    """
    sources = jnp.array([[5, 6, 7, 8, 9, 4, 3, EOS, 12, 12]])
    arguments = WRITER, ERRING, sources, no_prompts(1), KEY, GREEDY
    options = {"gamma": 3, "max_decode_len": 10, "rescale_log_probs": False}
    decoded = speculative_decode(*arguments, **options)
    np.testing.assert_array_equal(decoded.tokens, [[[5, 6, 7, 8, 9, 4, 3, EOS, 0, 0]]])
    np.testing.assert_array_equal(decoded.lengths, [[8]])
    # log(e^9 / (e^9 + 15)) for each of 8 tokens.
    np.testing.assert_allclose(decoded.scores, [[8 * (9 - np.log(np.exp(9) + 15))]], atol=1e-5)
    row = only(decoded.stats)
    counts = row.target_calls, row.proposed, row.accepted, row.verified, row.beta_sum
    assert np.ravel(counts).tolist() == [3, 9, 6, 7, 6.0]
    np.testing.assert_array_equal(row.accepted_by_position, [[3, 2, 1]])
    np.testing.assert_array_equal(row.verified_by_position, [[3, 2, 2]])
    np.testing.assert_allclose(
        [row.block_efficiency, row.beta_sum / row.verified], [[8 / 3], [6 / 7]]
    )
    # Step by step.
    seen = []
    for step in speculative_steps(*arguments, **options):
        appended = step.appended[0, : step.num_appended[0]].tolist()
        accepted, ended = int(step.num_accepted[0]), bool(step.ended[0])
        seen.append((step.proposed[0].tolist(), accepted, appended, ended))
    assert seen == [
        ([5, 6, 2], 2, [5, 6, 7], False),
        ([8, 9, 4], 3, [8, 9, 4, 3], False),
        ([EOS, 12, 12], 1, [EOS], True),
    ]


@pytest.mark.parametrize("draft", [TransformerDraft(WRITER), ERRING], ids=["same", "errs"])
def test_every_end_of_sequence_and_every_limit_end_their_row_alone(draft):
    """All pairs of a position of EOS (or none) and a limit, in one batch of unequal rows.

    With gamma 3 they fall on every offset of the first three blocks.
    """
    width = 9
    pairs = list(itertools.product(range(width + 1), range(width + 2)))
    sources = np.full((len(pairs), width), 7)
    for row, (place, _) in enumerate(pairs):
        sources[row, place : place + 1] = EOS
    limits = jnp.asarray([limit for _, limit in pairs])
    options = {"max_decode_len": width, "max_decode_steps": limits}
    decoded = decode(WRITER, draft, 3, sources=jnp.asarray(sources), **options)
    ends = [min(place + 1, limit, width) for place, limit in pairs]
    assert texts(decoded) == [row[:end].tolist() for row, end in zip(sources, ends, strict=True)]
    beyond = np.arange(width)[None, :] >= np.asarray(decoded.lengths)
    assert not np.any(np.asarray(decoded.tokens[:, 0])[beyond])
    row_stats = only(decoded.stats)
    np.testing.assert_array_equal(row_stats.proposed, 3 * row_stats.target_calls)
    np.testing.assert_array_equal(row_stats.appended, ends)
    if draft is not ERRING:
        np.testing.assert_array_equal(row_stats.target_calls, -(-np.asarray(ends) // 4))


# Greedy text, for every draft, gamma and batch: a target known by its prefixes

VOCAB = 7
LENGTH = 16
TABLE_SOURCES = jnp.array([[2, 3], [4, 5], [2, 0], [6, 6], [3, 2]])


def decode(
    target,
    draft,
    gamma,
    settings=GREEDY,
    *,
    sources=TABLE_SOURCES,
    prompts=None,
    rng=KEY,
    **options,
):
    """Decodes, by default the tables' sources without prompts."""
    prompts = no_prompts(len(sources)) if prompts is None else prompts
    options = {"max_decode_len": LENGTH} | options
    return speculative_decode(
        target, draft, sources, prompts, rng, settings, gamma=gamma, **options
    )


def one_token_table(token):
    """Makes a table of drafts that are all one token."""
    return jnp.zeros((211, VOCAB)).at[:, token].set(100.0)


def accepted_if_all_agree(lengths, gamma):
    """Counts, by position, each full block and the rest in the last block."""
    blocks, rest = np.divmod(lengths[:, None], gamma + 1)
    return blocks + (np.arange(gamma)[None, :] < rest)


@pytest.mark.parametrize(("gamma", "batch", "with_cache"), [(1, 1, False), (4, 5, True)])
def test_greedy_text_is_that_of_plain_decoding_under_every_draft(gamma, batch, with_cache):
    """Some drafts have a cache: one with a missed or a refused token in it would be refused.

    All drafts are one kind of object, so that they share a compiled program.
    """
    target, other = (TableTarget.create(seed=seed, vocab_size=VOCAB) for seed in (0, 1))
    is_right = jnp.arange(len(target.table))[:, None] % 4 > 0
    drafts = {
        "same": target.table,
        # Right in three quarters of the contexts: runs of all lengths are accepted.
        "similar": jnp.where(is_right, target.table, other.table),
        "random": other.table,
        "adversarial": -target.table,
        "end of sequence": one_token_table(EOS),
        "padding": one_token_table(0),
    }
    prompts = jnp.array([[0, 0, 0, 0], [0, 3, 0, 0], [0, 3, 4, 0], [0, 5, EOS, 6], [0, 0, 0, 0]])
    sources, prompts = TABLE_SOURCES[:batch], prompts[:batch]
    options = {"max_decode_len": LENGTH, "rescale_log_probs": False}
    plain = autoregressive_decode(target, sources, prompts, KEY, GREEDY, **options)
    generated = np.asarray(plain.lengths[:, 0]) - np.sum(np.asarray(prompts[:, 1:]) != 0, 1)
    # Some rows end by themselves, at different positions, and some do not.
    assert batch == 1 or len(set(plain.lengths[:, 0].tolist())) > 2
    for name, table in drafts.items():
        draft = TransformerDraft(TableTarget(table)) if with_cache else TableDraft(table)
        decoded = decode(target, draft, gamma, sources=sources, prompts=prompts, **options)
        assert_same_decodes(decoded, plain)
        row = only(decoded.stats)
        np.testing.assert_array_equal(row.proposed, gamma * row.target_calls)
        np.testing.assert_array_equal(row.accepted, row.accepted_by_position.sum(1))
        np.testing.assert_allclose(row.block_efficiency, generated / row.target_calls, rtol=1e-6)
        # A draft is accepted where the two argmaxes agree, which is where beta is 1.
        np.testing.assert_array_equal(row.beta_sum, row.accepted)
        if name == "same":
            np.testing.assert_array_equal(row.target_calls, -(-generated // (gamma + 1)))
            by_position = accepted_if_all_agree(generated, gamma)
            np.testing.assert_array_equal(row.accepted_by_position, by_position)
            # Nothing was refused, and drafts beyond the end of a row were not verified.
            np.testing.assert_array_equal(row.verified_by_position, by_position)
        elif name == "similar":
            assert batch == 1 or np.all(row.accepted_by_position.sum(axis=0) > 0)
        elif name == "adversarial":
            np.testing.assert_array_equal(row.target_calls, generated)
            np.testing.assert_array_equal(row.accepted, 0)
            np.testing.assert_array_equal(row.verified, generated)
        elif name == "end of sequence":
            # Right once, in a row that ends so.
            ends = [text[-1] == EOS for text in texts(plain)]
            np.testing.assert_array_equal(row.accepted, ends)
            np.testing.assert_array_equal(row.target_calls, generated)


# Greedy text with T5s

SOURCES = jnp.asarray(np.random.default_rng(0).integers(2, 30, (5, 7)), jnp.int32)
SOURCES = SOURCES.at[1, 4:].set(0).at[4, 2:].set(0)


@functools.cache
def t5s():
    """Makes a T5, and drafts that are all of one kind, by name."""
    model = tiny_t5(0)

    def with_kernel(change):
        decoder = dict(model.params["decoder"])
        decoder["logits_dense"] = {"kernel": change(decoder["logits_dense"]["kernel"])}
        return model.with_params({**model.params, "decoder": decoder})

    models = {
        "same": model,
        "random": tiny_t5(1),
        # The likeliest token is the target's least likely one.
        "adversarial": with_kernel(lambda kernel: -kernel),
        "similar": with_kernel(lambda kernel: kernel + 0.6 * jax.random.normal(KEY, kernel.shape)),
    }
    return model, {name: TransformerDraft(draft) for name, draft in models.items()}


def teacher_forced_scores(model, sources, decoded, prompt_lengths):
    """Computes the log-probability of each row's generated tokens; refuses near-ties."""
    tokens, positions = np.asarray(decoded.tokens[:, 0]), np.arange(LENGTH)[None, :]
    prefixes = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    logits = np.asarray(teacher_forced(model, sources, jnp.asarray(prefixes)), np.float64)
    generated = (positions >= prompt_lengths[:, None]) & (positions < np.asarray(decoded.lengths))
    first, second = np.moveaxis(np.sort(logits, axis=-1)[..., :-3:-1], -1, 0)
    assert np.all((first - second)[generated] > 1e-3), "rounding may decide: change the seed"
    np.testing.assert_array_equal(np.argmax(logits, -1)[generated], tokens[generated])
    return np.sum(first - np.logaddexp.reduce(logits, axis=-1), axis=1, where=generated)


def test_forced_prompts_of_unequal_lengths_and_limits_of_a_t5():
    model, drafts = t5s()
    prompts = jnp.array([[0, 0, 0, 0], [0, 5, 9, 0], [0, EOS, 0, 0], [0, 3, EOS, 4], [0, 7, 0, 0]])
    prompt_lengths = np.array([0, 2, 1, 3, 1])
    options = {
        "max_decode_len": LENGTH,
        "max_decode_steps": jnp.array([9, 16, 7, 0, 12]),
        "rescale_log_probs": False,
    }
    arguments = SOURCES, prompts, KEY, GREEDY
    plain = autoregressive_decode(model, *arguments, **options)
    scores = teacher_forced_scores(model, SOURCES, plain, prompt_lengths)
    for draft in drafts.values():
        decoded = speculative_decode(model, draft, *arguments, gamma=3, **options)
        assert_same_decodes(decoded, plain)
        np.testing.assert_allclose(decoded.scores[:, 0], scores, atol=1e-4)
        assert np.all(np.asarray(decoded.lengths[:, 0]) <= prompt_lengths + [9, 16, 7, 0, 12])
        # The row that may not take a step has no statistics, and no alpha.
        assert decoded.stats.target_calls[3, 0] == 0
        assert decoded.stats.block_efficiency[3, 0] == 0.0
        assert decoded.stats.verified[3, 0] == 0


# Invariances


def t5_rows(sources, keys, temperatures):
    """Decodes rows that mix temperatures: texts, calls and accepted drafts of each."""
    model, drafts = t5s()
    settings = sampling(temperatures)
    decoded = decode(model, drafts["similar"], 3, settings, sources=sources, rng=keys)
    row = only(decoded.stats)
    return list(zip(texts(decoded), row.target_calls.tolist(), row.accepted.tolist(), strict=True))


def test_a_row_depends_on_its_source_key_and_temperature_alone():
    keys, temperatures = jax.random.split(KEY, 5), np.array([0.0, 1.0, 0.5, 1.0, 0.0], np.float32)
    together = t5_rows(SOURCES, keys, temperatures)
    assert len({calls for _, calls, _ in together}) > 1
    order = np.array([4, 2, 0, 3, 1])
    moved = t5_rows(SOURCES[order], keys[order], temperatures[order])
    assert moved == [together[row] for row in order]
    # Alone, where caches are written in another way.
    alone = slice(1, 2)
    assert t5_rows(SOURCES[alone], keys[alone], temperatures[alone]) == together[alone]
    others = t5_rows(SOURCES, jax.random.split(jax.random.key(1), 5), temperatures)
    same = [one[0] == other[0] for one, other in zip(others, together, strict=True)]
    assert same == (temperatures == 0).tolist()


def test_sampled_decodes_come_by_increasing_score_with_their_statistics():
    target = TableTarget.create(seed=0, vocab_size=VOCAB)
    draft = TableDraft.create(seed=1, vocab_size=VOCAB)
    sources, options = TABLE_SOURCES[:2], {"max_decode_len": 8}
    three = decode(
        target, draft, 2, sampling([1.0, 0.7]), sources=sources, num_decodes=3, **options
    )
    assert np.all(np.diff(three.scores, axis=1) >= 0)
    # The same rows one by one, from the keys that the rows take.
    settings, sources = sampling([1.0] * 3 + [0.7] * 3), jnp.repeat(sources, 3, axis=0)
    stream = RowStream(outputs_lib.row_keys(KEY, 2, 3))
    alone = decode(target, draft, 2, settings, sources=sources, rng=stream, **options)
    order = np.argsort(np.asarray(alone.scores).reshape(2, 3), axis=1, kind="stable")
    order = (order + [[0], [3]]).reshape(-1)
    assert np.any(order != np.arange(6))

    expected = jax.tree.map(
        lambda leaf: leaf[order, 0].reshape(2, 3, *leaf.shape[2:]),
        (alone.tokens, alone.lengths, alone.stats),
    )
    assert_same_leaves((three.tokens, three.lengths, three.stats), expected)


def test_gamma_0_is_plain_decoding_seed_for_seed():
    model, drafts = t5s()
    sources, prompts = jnp.array([[2, 3, 4], [5, 2, 0]]), jnp.array([[0, 5], [0, 0]])
    arguments = sources, prompts, KEY, sampling([1.0, 0.5], top_k=3)
    options = {"max_decode_len": LENGTH, "num_decodes": 2}
    plain = autoregressive_decode(model, *arguments, **options)
    decoded = speculative_decode(model, drafts["random"], *arguments, gamma=0, **options)
    assert_same_decodes(decoded, plain, atol=1e-5)
    # Lengths differ by the prompt in one row.
    generated = np.asarray(plain.lengths) - [[1], [0]]
    np.testing.assert_array_equal(decoded.stats.target_calls, generated)
    assert decoded.stats.accepted_by_position.shape == (2, 2, 0)
    np.testing.assert_array_equal(decoded.stats.block_efficiency, 1.0)
    assert not np.any(decoded.stats.verified)


def test_a_draft_that_samples_as_the_target_does_is_always_accepted():
    target = TableTarget.create(seed=0, vocab_size=VOCAB, zeros=0.2)
    decoded = decode(target, TableDraft(target.table), 3, sampling(0.6))
    row, lengths = only(decoded.stats), np.asarray(decoded.lengths[:, 0])
    accepted = row.accepted_by_position
    np.testing.assert_array_equal(accepted, accepted_if_all_agree(lengths, 3))
    rates = conditional_acceptance(accepted.sum(axis=0), row.verified_by_position.sum(axis=0))
    np.testing.assert_array_equal(rates, 1.0)
    np.testing.assert_allclose(row.block_efficiency, lengths / row.target_calls, rtol=1e-6)
    # Less than the 4 of an endless text, and than one token of the target's own for each call.
    assert np.sum(lengths) < np.sum(row.accepted + row.target_calls)
    np.testing.assert_allclose(row.beta_sum, row.verified, atol=1e-5)


# The law of whole texts


@pytest.mark.parametrize(
    ("draft", "settings", "ends"),
    [
        (TransformerDraft(laws.other_model(), GREEDY), sampling(1.0), EOS),
        (TableDraft(laws.other_model().table), sampling(1.3, top_p=0.8), (EOS, 3)),
        (ConstantDraft(jnp.int32(3), laws.VOCAB_SIZE), sampling(0.8), EOS),
    ],
    ids=["argmax", "target warped, two ends", "constant"],
)
def test_the_law_does_not_depend_on_how_the_draft_samples(draft, settings, ends):
    decoded = laws.decode_many(draft, 2, settings, eos_id=ends)
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.verified)
    statistic, threshold = laws.chi_square(decoded, settings, eos_id=ends)
    assert statistic < threshold
    # The law with one end differs.
    assert ends == EOS or laws.chi_square(decoded, settings)[0] == np.inf


def exact_expectations(gamma, source, prompt, max_decode_len):
    """Computes calls, accepted, verified and beta_sum of one row, by recursion over its text."""
    settings = sampling(1.0)
    of_target, of_draft = (
        conditionals(model, source, settings, max_decode_len=max_decode_len, prompt=prompt)
        for model in (laws.target(), laws.other_model())
    )

    def goes_on(text):
        return len(text) < max_decode_len and (text == prompt or text[-1] != EOS)

    def iteration(text):
        if not goes_on(text):
            return np.zeros(4)
        return np.array([1.0, 0, 0, 0]) + position(text, gamma)

    def position(text, left):
        """Computes them from one draft on (or from the bonus token after all drafts)."""
        p = of_target[text]
        if left == 0:
            return sum(p[token] * iteration((*text, token)) for token in np.flatnonzero(p))
        kept = np.minimum(p, of_draft[text])
        total = np.array([0, kept.sum(), 1.0, kept.sum()])
        for token in np.flatnonzero(p):
            longer = (*text, int(token))
            after = position(longer, left - 1) if goes_on(longer) else np.zeros(4)
            total = total + kept[token] * after + (p - kept)[token] * iteration(longer)
        return total

    return iteration(prompt)


def test_texts_follow_the_targets_law_and_statistics_have_their_exact_expectations():
    # Token by token, as the expectations are worked out above.
    gamma, draft = 3, TableDraft(laws.other_model().table)
    decoded = laws.decode_many(draft, gamma, verifier=TokenVerifier())
    statistic, threshold = laws.chi_square(decoded, sampling(1.0))
    assert statistic < threshold
    row = only(decoded.stats)
    found = np.stack([row.target_calls, row.accepted, row.verified, row.beta_sum])
    # Passed by chance once in a million times, for each of 12 means.
    sigmas = stats.norm.ppf(1 - 0.5e-6)
    for kind, (source, prompt, steps) in enumerate(laws.KINDS):
        values = found[:, kind::3].astype(np.float64)
        error = sigmas * values.std(axis=1) / np.sqrt(values.shape[1]) + 1e-5
        expected = exact_expectations(gamma, source, prompt, min(laws.LENGTH, len(prompt) + steps))
        assert np.all(np.abs(values.mean(axis=1) - expected) < error)


# Stepping


def test_stepping_gives_the_text_and_statistics_of_the_compiled_loop():
    target = TableTarget.create(seed=0, vocab_size=VOCAB)
    draft = TransformerDraft(TableTarget(target.table * 0.5))
    keys = jax.random.split(KEY, 5)
    prompts = jnp.array([[0, 0, 0], [0, 3, 0], [0, 5, EOS], [0, 0, 0], [0, 4, 0]])
    settings = sampling(np.array([0.0, 1.0, 1.0, 1.0, 0.0]))
    arguments = target, draft, TABLE_SOURCES, prompts, keys, settings
    options = {
        "gamma": 3,
        "max_decode_len": 12,
        "max_decode_steps": jnp.array([12, 12, 4, 0, 12]),
    }
    expected = speculative_decode(*arguments, **options)
    # Twice, from the same arrays: the loop donates its state, not its arguments.
    for _ in range(2):
        replayed = [row[row != 0].tolist() for row in np.asarray(prompts)]
        ended = np.array([False, False, False, True, False])
        iterations, decoded = drain(speculative_steps(*arguments, **options))
        for iteration in iterations:
            for row, text in enumerate(replayed):
                accepted, count = iteration.num_accepted[row], iteration.num_appended[row]
                taken = iteration.appended[row, :count].tolist()
                assert (count == 0) == (iteration.num_proposed[row] == 0) == ended[row]
                assert accepted in (count - 1, count)
                assert taken[:accepted] == iteration.proposed[row, :accepted].tolist()
                text.extend(taken)
            assert np.all(iteration.ended >= ended)
            ended = iteration.ended
        assert np.all(ended)
        assert replayed == texts(decoded) == texts(expected)
        assert len(iterations) == np.max(expected.stats.target_calls)
        assert_same_leaves(decoded, expected, atol=1e-5)
        # A row without a call.
        assert decoded.stats.block_efficiency[3] == 0


# Rollback


def test_after_refused_drafts_the_cache_is_that_of_a_fresh_prefill():
    model, drafts = t5s()
    prompts = jnp.array([[0, 0, 0], [0, 5, 0], [0, 7, 9], [0, 0, 0], [0, 3, 0]])
    stream = RowStream(outputs_lib.row_keys(KEY, 5))
    loop = speculative.Loop(gamma=4, max_decode_len=LENGTH)
    init = jax.jit(functools.partial(speculative.init, loop=loop))
    step = jax.jit(functools.partial(speculative.step, loop=loop))
    score = jax.jit(lambda model, cache, tokens: model.score(cache, tokens)[0])
    prefill = jax.jit(lambda model, text: model.prefill(SOURCES, LENGTH + 5, text))
    for name in ("adversarial", "similar"):
        state = init(model, drafts[name], SOURCES, prompts, stream)
        for _ in range(4):
            state, _ = step(model, drafts[name], state, GREEDY)
            outputs = state.outputs
            text = outputs.sequences[:, : LENGTH + 1]
            fresh = model.rollback(prefill(model, text), outputs.lengths)
            # Several tokens, which would read refused entries of the cache.
            last = values_at(outputs.sequences, outputs.lengths)
            block = jnp.concatenate([last[:, None], SOURCES[:, :4]], axis=1)
            np.testing.assert_array_equal(state.target_cache.lengths, fresh.lengths)
            logits = (score(model, cache, block) for cache in (state.target_cache, fresh))
            np.testing.assert_allclose(*logits, atol=1e-4)
        assert len(set(outputs.lengths.tolist())) > 1
        accepted, proposed = state.stats.accepted.sum(), state.stats.proposed.sum()
        assert accepted < proposed and (accepted == 0) == (name == "adversarial")


# Errors


@flax.struct.dataclass
class Untouchable(PrefixTarget):
    """A target that has a vocabulary and cannot be called."""

    vocab_size: int = flax.struct.field(pytree_node=False)

    def prefill(self, inputs, max_length, prompts=None):
        raise AssertionError("the arguments should have been refused")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": -1}, "gamma is -1: give at least 0"),
        ({"gamma": "auto"}, "gamma is auto: give a number, and a loops.pace.Pace as pace"),
        ({"gamma": 1.5}, "gamma is 1.5: give a whole number"),
        ({"gamma": True}, "gamma is True: give a whole number"),
        ({"num_decodes": 2.0}, "num_decodes is 2.0: give a whole number"),
        ({"max_decode_len": None}, "max_decode_len is None: give a whole number"),
        ({"settings": 0.5}, r"settings are .*: give distributions.sampling\(temperature\)"),
        ({"settings": None}, "settings are None: give distributions.sampling"),
        ({"draft": ConstantDraft}, "ConstantDraft is a class: give an object"),
        ({"draft": None}, "NoneType has no vocab_size"),
        ({"target": Untouchable(8)}, "the draft has 9 tokens and the target 8"),
        ({"prompts": np.zeros((1, 8), np.int32)}, "7 tokens and max_decode_len is 6"),
        ({"prompts": np.zeros(1, np.int32)}, r"prompts are int32 \(1,\): give int32 \[batch"),
        ({"prompts": np.zeros((1, 0), np.int32)}, r"prompts are int32 \(1, 0\): give int32"),
        (
            dict.fromkeys(("inputs", "prompts"), np.zeros((0, 1), np.int32)),
            r"prompts are int32 \(0, 1\): give int32 \[batch, 1 \+ length\], batch >= 1",
        ),
        (
            {"settings": sampling([0.0, 1.0])},
            r"temperatures are \(2,\) and prompts \(1, 1\): give one temperature, or one for each",
        ),
        ({"prompts": np.zeros((1, 1), np.uint8)}, r"prompts are uint8 \(1, 1\): give int32"),
        ({"prompts": np.zeros((1, 1))}, r"prompts are float\d\d \(1, 1\): give int32 \[batch"),
        ({"prompts": [[0]]}, r"prompts are a list: give an array \[batch, width\]"),
    ],
)
@pytest.mark.parametrize("entry", [speculative_decode, speculative_steps])
def test_unusable_arguments_are_refused_before_anything_is_compiled(
    unchecked, entry, changes, message
):
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    named = {"target": Untouchable(9), "draft": TransformerDraft(Untouchable(9))}
    named |= dict.fromkeys(("inputs", "prompts"), np.zeros((1, 1), np.int32))
    named |= {"rng": KEY, "settings": GREEDY, "gamma": 2, "max_decode_len": 6} | changes
    # JAX 0.7 cannot remove a listener.
    jax.monitoring.register_event_duration_secs_listener(listen)
    with pytest.raises(InputError, match=message):
        entry(**named)
    assert not compiled


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda: TransformerDraft(WRITER, settings=0.5), "settings are 0.5: give distributions"),
        (lambda: MixedDraft(CopyDraft(8), UniformDraft(16)), "the draft has 8 tokens and the targ"),
        (lambda: MixedDraft(None, UniformDraft(16)), "NoneType has no vocab_size"),
    ],
)
def test_unusable_parts_of_drafts_are_refused(unchecked, draft, message):
    with pytest.raises(InputError, match=message):
        decode(WRITER, draft(), 2)


RBG = jax.random.key(0, impl="rbg")


class Hidden(Verifier):
    """A verifier with an attribute that is no field, so that equal ones may differ."""

    def __init__(self, share):
        self.share = share


def test_plain_loops_differ_only_by_the_noise_that_they_draw_with():
    chosen = TokenVerifier(0.5), TreeVerifier((3, 2)), BlockVerifier(), CoupledVerifier()
    plain = [decode_state.Loop(gamma=3, max_decode_len=9, verifier=one).plain for one in chosen]
    assert plain[0] == plain[1] == plain[2] != plain[3]
    assert [one.verifier.coupled for one in plain] == [False, False, False, True]


def test_a_verifier_may_cache_its_properties():
    @dataclasses.dataclass(frozen=True)
    class Cached(TokenVerifier):
        @functools.cached_property
        def doubled(self):
            return 2 * self.lenience

    chosen = Cached()
    assert chosen.doubled == 2
    assert decode_state.Loop(gamma=1, max_decode_len=2, verifier=chosen).plain.gamma == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rng": 7}, "rng is int32: give jax.random.key"),
        ({"rng": jax.random.PRNGKey(0)}, "rng is uint32: give jax.random.key"),
        ({"rng": jax.random.split(KEY, 99)}, "or a key for each input"),
        ({"rng": jax.random.split(RBG, len(TABLE_SOURCES))}, "draws the same numbers"),
        ({"verifier": "block"}, "verifier is 'block': give an object of"),
        ({"verifier": TokenVerifier}, "verifier is <class .*TokenVerifier'>: give an object of"),
        ({"verifier": Hidden(0.5)}, "Hidden.share is no field: make"),
        ({"num_decodes": 0}, "num_decodes is 0"),
    ],
)
def test_keys_and_verifiers_that_would_give_other_texts_are_refused(unchecked, changes, message):
    with pytest.raises(InputError, match=message):
        decode(WRITER, ConstantDraft(jnp.int32(1), 16), 2, **changes)


def test_a_draft_that_proposes_more_than_gamma_tokens_is_refused():
    @flax.struct.dataclass
    class Wide(ConstantDraft):
        def propose(self, state, context, gamma):
            return ConstantDraft.propose(self, state, context, gamma + 2)

    with pytest.raises(InputError, match=r"int32 \[5, 3\] as tokens: give integer \[5, 1\]"):
        decode(WRITER, Wide(jnp.int32(1), 16), 1)


DRAFTS = jnp.ones((3, 2), jnp.int32)
PROBS = jnp.full((3, 2, 16), 1 / 16, jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": jnp.zeros((3, 2))}, "float32 [3, 2] as tokens: give integer [3, 2]"),
        ({"tokens": jnp.zeros(2, jnp.int32)}, "int32 [2] as tokens: give integer [3, 2]"),
        ({"tokens": jnp.zeros((1, 2), jnp.int32)}, "int32 [1, 2] as tokens: give integer [3, 2]"),
        ({"tokens": [[1, 2]]}, "[[1, 2]] as tokens: give integer [3, 2]"),
        ({"counts": 2}, "2 as counts: give integer [3]"),
        ({"counts": [1, 2, 0]}, "[1, 2, 0] as counts: give integer [3]"),
        ({"counts": jnp.ones((3, 1), jnp.int32)}, "int32 [3, 1] as counts: give integer [3]"),
        ({"counts": jnp.ones(3)}, "float32 [3] as counts: give integer [3]"),
        ({"probs": PROBS[:, :1]}, "float32 [3, 1, 16] as probs: give float32 [3, 2, 16]"),
        ({"probs": PROBS[..., 1:]}, "float32 [3, 2, 15] as probs: give float32 [3, 2, 16]"),
        (
            {"probs": PROBS.astype(jnp.bfloat16)},
            "bfloat16 [3, 2, 16] as probs: give float32 [3, 2, 16]",
        ),
    ],
)
def test_proposals_of_another_shape_or_type_are_refused(unchecked, changes, message):
    @flax.struct.dataclass
    class Odd(ConstantDraft):
        def propose(self, state, context, gamma):
            proposal, state = super().propose(state, context, gamma)
            return proposal.replace(**changes), state

    with pytest.raises(InputError) as raised:
        decode(WRITER, Odd(jnp.int32(1), 16), 2, sources=TABLE_SOURCES[:3])
    assert str(raised.value) == f"Odd proposes {message}"


@pytest.mark.parametrize("returned", [None, Proposal(DRAFTS), ((), Proposal(DRAFTS)), (DRAFTS, ())])
def test_what_is_no_proposal_and_state_is_refused(unchecked, returned):
    @flax.struct.dataclass
    class Odd(ConstantDraft):
        def propose(self, state, context, gamma):
            return returned

    message = f"Odd.propose returns a {type(returned).__name__}: return a Proposal and a state"
    with pytest.raises(InputError, match=message):
        decode(WRITER, Odd(jnp.int32(1), 16), 2, sources=TABLE_SOURCES[:3])


def test_tokens_that_were_not_drawn_are_not_proposed():
    proposal = Proposal(jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3, 4), 0.25))
    counts = jnp.array([1, 3])
    for drawn, given, expected in (
        (jnp.int32(2), None, [2, 2]),
        (jnp.int32(2), counts, [1, 2]),
        (2, counts, [1, 2]),
        (jnp.int32(7), None, [3, 3]),
    ):
        checked = proposal.replace(drawn=drawn, counts=given).checked()
        np.testing.assert_array_equal(checked.num_proposed, expected)


def test_a_draft_needs_a_worthwhile_number_of_tokens():
    with pytest.raises(InputError, match="max_worthwhile is 0: give at least 1"):
        DraftTraits(max_worthwhile=0)


def test_a_model_that_lacks_what_the_loops_call_is_refused(unchecked):
    @flax.struct.dataclass
    class Bare:
        vocab_size: int = flax.struct.field(pytree_node=False, default=VOCAB)

        def propose(self, state, context, gamma):
            raise AssertionError("the arguments should have been refused")

    with pytest.raises(InputError, match="Bare has no traits, .*prefill.*catch_up.*Draft"):
        decode(WRITER, Bare(), 2)
    with pytest.raises(InputError, match="Bare has no state_size, max_positions, prefill"):
        decode(Bare(), ConstantDraft(jnp.int32(1), VOCAB), 2)

    @flax.struct.dataclass
    class Deep(ConstantDraft):
        traits = DraftTraits(depths=(0,))

    with pytest.raises(
        InputError,
        match=r"layers \[0\], and StubTarget lacks them \(state_size, method showing\): use",
    ):
        decode(WRITER, Deep(jnp.int32(1), 16), 2)
