"""Copying: which match is taken, how far it is copied, and when there is none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.drafts.copying import CopyDraft, CopyState
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import Draws, RowStream
from spec_t5x.testing.toy_models import StubTarget
from tests.loops.stubs import writes_the_source

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = sampling(0.0)
VOCAB, SOURCE, WIDTH, GAMMA = 12, 10, 12, 4


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, sources, sequences, lengths):
    context = Context(
        sequences=sequences,
        lengths=lengths,
        live=lengths >= 0,
        draws=Draws(RowStream(row_keys(jax.random.key(0), lengths.shape[0])), lengths),
        settings=GREEDY,
        target_cache=(),
    )
    return draft.propose(CopyState(sources), context, GAMMA)[0]


def proposed(source, text, **options):
    """The proposal for one row, whose text begins after the start token."""
    draft = CopyDraft(VOCAB, **options)
    sources = jnp.asarray([source + [0] * (SOURCE - len(source))])
    sequences = jnp.asarray([[0, *text] + [0] * (WIDTH - 1 - len(text))])
    found = propose(draft, sources, sequences, jnp.asarray([len(text)]))
    return found.tokens[0, : int(found.counts[0])].tolist()


def by_hand(source, text, min_match=1, max_match=8):
    """The definition, written out: longest match, the text's before the source's, last."""
    best = (0, [])
    for place in (source, text):
        for end in range(1, len(place)):
            length = 0
            while (
                length < min(max_match, end, len(text))
                and place[end - 1 - length] == text[len(text) - 1 - length]
            ):
                length += 1
            if length >= min_match and length >= best[0]:
                best = (length, place[end:][:GAMMA])
    return best[1]


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ([5, 6, 7, 8, 1], [5], [6, 7, 8, 1]),
        ([5, 6, 7, 8, 9, 4, 1], [3, 6], [7, 8, 9, 4]),
        # The longer match, though the other one is later.
        ([5, 6, 7, 9, 6, 8, 1], [5, 6], [7, 9, 6, 8]),
        # The later of two.
        ([6, 7, 9, 6, 8, 1], [6], [8, 1]),
        # The output's own words before the source's.
        ([6, 7, 1], [6, 9, 6], [9, 6]),
        # Nothing follows the source's end, and nothing matches.
        ([5, 6, 1], [1], []),
        ([5, 6, 1], [7], []),
        ([5, 6, 1], [], []),
    ],
)
def test_what_follows_the_longest_match_is_proposed(source, text, expected):
    assert proposed(source, text) == expected
    assert by_hand(source, text) == expected


def test_shorter_matches_than_the_least_are_ignored():
    assert proposed([5, 6, 7, 1], [9, 6], min_match=2) == []
    assert proposed([5, 6, 7, 1], [5, 6], min_match=2) == [7, 1]


def test_no_more_than_the_most_is_compared():
    """With one token compared, both places match alike, and the later one counts."""
    assert proposed([5, 6, 7, 9, 6, 8, 1], [5, 6], max_match=1) == [8, 1]


tokens = st.integers(2, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=9), st.lists(tokens, max_size=11))
def test_any_text_is_copied_by_the_definition(source, text):
    assert proposed([*source, 1], text) == by_hand([*source, 1], text)


def test_a_row_proposes_the_same_whatever_is_beside_it():
    sources = jnp.asarray([[5, 6, 7, 1, 0], [9, 8, 1, 0, 0], [4, 4, 4, 4, 1]])
    sequences = jnp.asarray([[0, 5, 0, 0], [0, 3, 9, 0], [0, 4, 4, 4]])
    lengths = jnp.asarray([1, 2, 3])
    draft = CopyDraft(VOCAB)
    together = propose(draft, sources, sequences, lengths)
    for row in range(3):
        alone = propose(draft, *(x[row : row + 1] for x in (sources, sequences, lengths)))
        assert int(alone.counts[0]) == int(together.counts[row])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


WORDS = [5, 6, 7, 8, 9, 10, 11, 4, 1]


def decode(target, draft, source, gamma):
    """Of one row, as many tokens as its source has."""
    prompts, options = jnp.zeros((1, 1), jnp.int32), {"gamma": gamma, "max_decode_len": len(source)}
    sources = jnp.asarray([source])
    return speculative_decode(target, draft, sources, prompts, jax.random.key(0), GREEDY, **options)


def test_copying_a_copier_takes_few_calls():
    """One call finds the first word, each of the others accepts all that is proposed."""
    decoded = decode(StubTarget(writes_the_source(VOCAB), VOCAB), CopyDraft(VOCAB), WORDS, gamma=4)
    assert decoded.tokens[0, 0].tolist() == WORDS
    # 5 alone, then 6 7 8 9 and 10, then 11 4 1.
    stats = decoded.stats
    counts = (int(leaf[0, 0]) for leaf in (stats.target_calls, stats.proposed, stats.accepted))
    assert tuple(counts) == (3, 7, 7)


def test_no_proposal_costs_no_position_of_the_target():
    """The widths that the target was traced with, and the one that was run."""
    widths = []

    def record(sources, prefixes):
        return writes_the_source(VOCAB)(sources, prefixes)

    class Recorder(StubTarget):
        def score(self, cache, tokens):
            jax.debug.callback(lambda: widths.append(tokens.shape[1]))
            return super().score(cache, tokens)

    jax.tree_util.register_dataclass(Recorder, [], ["function", "vocab_size"])
    decode(Recorder(record, VOCAB), CopyDraft(VOCAB, min_match=8), [5, 6, 7, 1], gamma=4)
    jax.effects_barrier()
    assert widths == [1, 1, 1, 1]


def test_the_target_is_compiled_for_no_more_than_the_draft_ever_proposes():
    widths = set()

    class Recorder(StubTarget):
        def score(self, cache, tokens):
            widths.add(tokens.shape[1])
            return super().score(cache, tokens)

    class Short(CopyDraft):
        max_proposal = 2

    for kind in (Recorder, Short):
        static = [field.name for field in dataclasses.fields(kind)]
        jax.tree_util.register_dataclass(kind, [], static)
    decoded = decode(Recorder(writes_the_source(VOCAB), VOCAB), Short(VOCAB), WORDS, gamma=6)
    assert widths == {1, 2, 3}
    # 5 alone, then two copies and a token each time.
    assert decoded.tokens[0, 0].tolist() == WORDS
    assert int(decoded.stats.target_calls[0, 0]) == 4


@pytest.mark.parametrize(("least", "most"), [(0, 4), (3, 2)])
def test_impossible_matches_are_refused(least, most):
    with pytest.raises(InputError, match="1 <= min_match <= max_match"):
        CopyDraft(VOCAB, least, most)
