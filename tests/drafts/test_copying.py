"""Tests of copying: the pointer, the length of copies, and when nothing is copied."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Outcome
from spec_t5x.labs.testing import laws
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.cached_model import by_width
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import Draws, RowStream
from spec_t5x.verifiers import CoupledVerifier
from tests.loops.stubs import writes_the_source
from tests.toy_drafts import StubTarget
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = sampling(0.0)
VOCAB, SOURCE, WIDTH, GAMMA = 12, 10, 31, 4


@functools.partial(jax.jit, static_argnums=4)
def call(draft, state, sequences, lengths, gamma, accepted):
    """Reports the accepted tokens of the last proposal, and makes the next."""
    state = draft.commit(state, Outcome(lengths=lengths, num_accepted=accepted))
    context = Context(
        sequences=sequences,
        lengths=lengths,
        live=lengths >= 0,
        draws=Draws(RowStream(row_keys(jax.random.key(0), lengths.shape[0])), lengths),
        settings=GREEDY,
        target_cache=(),
    )
    return draft.propose(state, context, gamma)


# Even tokens begin a word, and so does the end of sequence.
STARTS = np.arange(VOCAB) % 2 == 0
STARTS[1] = True


def with_words(**options):
    return CopyDraft(VOCAB, word_starts=STARTS.tolist(), **options)


def rows_of(texts, width, start=()):
    return jnp.asarray([[*start, *text, *[0] * (width - len(start) - len(text))] for text in texts])


def calls(draft, sources, outputs, gamma=GAMMA, plain_steps=0):
    """Returns each call's proposal and number accepted while a target writes these outputs.

    After the first call, and every third from there, the target takes ``plain_steps`` alone.
    """
    sources = rows_of(sources, SOURCE)
    state = draft.prefill(sources, jnp.zeros((len(outputs), 1), jnp.int32), WIDTH)
    lengths, accepted = [0] * len(outputs), [0] * len(outputs)
    found = [[] for _ in outputs]
    while any(n < len(output) for n, output in zip(lengths, outputs, strict=True)):
        texts = rows_of([o[:n] for o, n in zip(outputs, lengths, strict=True)], WIDTH, [0])
        proposal, state = call(
            draft, state, texts, jnp.asarray(lengths), gamma, jnp.asarray(accepted)
        )
        for row, output in enumerate(outputs):
            tokens = proposal.tokens[row, : int(proposal.counts[row])].tolist()
            accepted[row] = num_equal(tokens, output[lengths[row] :])
            if lengths[row] < len(output):
                found[row].append((tokens, accepted[row]))
            plain = plain_steps * (len(found[row]) % 3 == 1)
            lengths[row] = min(lengths[row] + accepted[row] + 1 + plain, len(output))
    return found


def num_equal(tokens, others):
    """Counts the leading tokens that are equal."""
    pairs = zip(tokens, others, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


class ByHand:
    """Definition of the draft, for one row."""

    def __init__(self, source, starts, min_match=1, max_match=8):
        self.source, self.starts = source, starts
        self.min_match, self.max_match = min_match, max_match
        self.pointer, self.length, self.misses, self.mean = 0, 0, 0, np.inf

    def matched(self, place, end, text):
        """Counts tokens of ``place`` before ``end`` that are the text's last."""
        number = 0
        while number < min(self.max_match, end, len(text)) and (
            place[end - 1 - number] == text[len(text) - 1 - number]
        ):
            number += 1
        return number

    def move(self, text):
        new, last = text[self.length :], len(self.source) - 1
        agree = num_equal(new, self.source[self.pointer :])
        if agree == len(new):
            self.pointer += agree
            return
        expected, there = self.pointer + len(new), self.pointer + agree
        ends = [end for end in range(1, last + 1) if self.matched(self.source, end, text)]
        if ends:
            self.pointer = min(
                ends, key=lambda e: (-self.matched(self.source, e, text), abs(e - expected), e)
            )
        elif self.starts[self.source[min(there, last)]] and not self.starts[text[-1]]:
            self.pointer = there
        else:
            words = (at for at in range(there + 1, last) if self.starts[self.source[at]])
            self.pointer = next(words, last)

    def propose(self, text, gamma):
        self.move(text)
        self.length, limit = len(text), min(2 * (self.mean + 1), gamma)
        self.mean = min(self.mean, gamma)
        place, start = self.source, self.pointer
        matched = self.matched(place, start, text)
        ends = range(1, len(text))
        end = max(ends, key=lambda e: (self.matched(text, e, text), e), default=0)
        repeated = self.matched(text, end, text) if end else 0
        if repeated > matched and repeated >= self.min_match:
            place, start, matched = text, end, repeated
        if self.misses >= 2 and matched < self.min_match:
            return []
        return place[start:][: int(limit)]

    def commit(self, proposed, accepted):
        if proposed:
            self.mean = (self.mean + accepted) / 2
            self.misses = 0 if accepted else self.misses + 1


def by_hand(source, output, starts, gamma=GAMMA, plain_steps=0, **options):
    row, found, length = ByHand(source, starts, **options), [], 0
    while length < len(output):
        tokens = row.propose(output[:length], gamma)
        accepted = num_equal(tokens, output[length:])
        row.commit(tokens, accepted)
        found.append((tokens, accepted))
        length += accepted + 1 + plain_steps * (len(found) % 3 == 1)
    return found


EACH_A_WORD = [True] * VOCAB


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        # The source's start at once, and all of it.
        ([5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 1], [[5, 6, 7, 8], [1]]),
        # One token replaced, inserted, left out: the next call, or the one after, continues.
        ([5, 6, 7, 8, 9, 1], [4, 6, 7, 8, 9, 1], [[5, 6, 7, 8], [6, 7, 8, 9]]),
        ([5, 6, 7, 8, 9, 1], [5, 4, 6, 7, 8, 1], [[5, 6, 7, 8], [7, 8, 9, 1], [7, 8, 9, 1]]),
        ([5, 6, 7, 8, 9, 1], [5, 7, 8, 9, 1], [[5, 6, 7, 8], [8, 9, 1]]),
        # The longer match, though the other one is nearer.
        ([2, 6, 8, 3, 6, 5, 1], [2, 6, 4, 2, 6, 8, 1], [[2, 6, 8, 3], [3, 6, 5, 1], [6, 8, 3, 6]]),
        # The nearer of two.
        ([5, 6, 7, 8, 2, 6, 9, 1], [4, 6, 7], [[5, 6, 7, 8], [6, 7, 8, 2]]),
        # The output's own words where they match for longer.
        ([2, 1], [6, 7, 8, 6, 7, 8], [[2, 1], [1], [], [], [7, 8, 6]]),
        # After two wrong proposals only a match is followed: a name that the source has.
        (
            [2, 3, 4, 10, 11, 7, 1],
            [8, 9, 8, 5, 6, 10, 11, 6, 1],
            [[2, 3, 4, 10], [3, 4, 10, 11], [], [9, 8], [], [], [11, 7, 1], [10, 11, 6]],
        ),
        # A text that continues beyond the source's end may end any time.
        ([5, 1], [5, 1, 9, 9], [[5, 1], [1]]),
    ],
)
def test_what_each_call_proposes(source, output, expected):
    (found,) = calls(CopyDraft(VOCAB), [source], [output])
    assert [tokens for tokens, _ in found] == expected
    assert found == by_hand(source, output, EACH_A_WORD)


def test_after_many_plain_steps_the_nearest_match_is_followed():
    source, output = [2, 6, 3, 6, 4, 1], [*[9] * 28, 6, 1]
    (found,) = calls(CopyDraft(VOCAB), [source], [output], plain_steps=28)
    assert [tokens for tokens, _ in found] == [[2, 6, 3, 6], [4, 1]]
    assert found == by_hand(source, output, EACH_A_WORD, plain_steps=28)


def test_a_replaced_word_of_several_pieces_is_passed_over():
    """Even tokens begin words: 4 takes the place of 6 5 7, and 10 11 of 10 9 3."""
    source, output = [2, 6, 5, 7, 8, 10, 9, 3, 1], [2, 4, 8, 10, 11, 1]
    (found,) = calls(with_words(), [source], [output])
    assert [tokens for tokens, _ in found] == [[2, 6, 5, 7], [8, 10, 9, 3], [1]]
    # A replacement of two pieces: the second one does not use up another word.
    (found,) = calls(with_words(), [[2, 6, 8, 10, 1]], [[2, 4, 11, 8, 10, 1]])
    assert [tokens for tokens, _ in found] == [[2, 6, 8, 10], [8, 10, 1], [8, 10, 1]]


tokens = st.integers(2, 6)
# Some tokenizers end a source without the end of sequence.
ends = st.sampled_from([1, 1, 3])
texts = st.builds(lambda text, end: [*text, end], st.lists(tokens, max_size=SOURCE - 1), ends)


@settings(max_examples=150)
@given(
    texts,
    st.lists(tokens, max_size=WIDTH - SOURCE - 1),
    st.integers(0, SOURCE - 1),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([0, *range(5, 10)]),
)
def test_any_output_is_copied_by_the_definition(
    source, output, copied, words, min_match, plain_steps
):
    starts = STARTS if words else EACH_A_WORD
    draft = (with_words if words else functools.partial(CopyDraft, VOCAB))(
        min_match=min_match, max_match=3
    )
    output = [*source[:-1][:copied], *output, 1]
    (found,) = calls(draft, [source], [output], plain_steps=plain_steps)
    options = {"plain_steps": plain_steps, "min_match": min_match, "max_match": 3}
    assert found == by_hand(source, output, starts, **options)
    for proposed, _ in found:
        assert len(proposed) <= GAMMA and 0 not in proposed
        assert set(proposed) <= {*source, *output}


@settings(max_examples=150)
@given(
    st.permutations(range(2, 10)),
    st.integers(0, 7),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_two_calls_after_any_edit_the_source_goes_on(words, start, removed, inserted, pieces):
    """Tokens that occur once: some are removed, new ones inserted, and the rest is unchanged."""
    source, rest = [*words, 1], [*words, 1][start + removed :]
    output = [*words[:start], *[10, 11][:inserted], *rest]
    draft = with_words() if pieces else CopyDraft(VOCAB)
    (found,) = calls(draft, [source], [output])
    # Tokens written before each call; those of the rest begin after the edit.
    edited = len(output) - len(rest)
    written = [0, *itertools.accumulate(accepted + 1 for _, accepted in found)][: len(found)]
    after = [(n, tokens) for n, (tokens, _) in zip(written, found, strict=True) if n >= edited]
    for length, tokens in after[2:]:
        assert tokens[:1] == output[length : length + 1], found


def test_without_a_source_the_output_alone_is_repeated():
    """The inputs of a decoder-only model are padding."""
    (found,) = calls(CopyDraft(VOCAB), [[]], [[5, 6, 7, 5, 6, 7, 5]])
    assert [proposed for proposed, _ in found] == [[], [], [], [], [6, 7, 5]]


def test_a_row_proposes_the_same_whatever_is_beside_it():
    sources = [[5, 6, 7, 1], [9, 8, 1], [4, 4, 4, 4, 1], [1], [2, 1]]
    outputs = [[5, 7, 1], [3, 9, 8, 8, 1], [4, 4, 4, 4, 4, 4, 1], [5, 1], [2, 1]]
    draft = with_words()
    together = calls(draft, sources, outputs)
    for source, output, found in zip(sources, outputs, together, strict=True):
        assert calls(draft, [source], [output]) == [found]


WORDS = [5, 6, 7, 8, 9, 10, 11, 4, 1]


def test_a_proposal_is_counted_once():
    """A cascade commits what the middle model accepted, and then what the target did."""
    draft, nothing = CopyDraft(VOCAB), jnp.zeros(1, jnp.int32)
    state = draft.prefill(jnp.asarray([WORDS]), nothing[:, None], WIDTH)
    _, state = call(draft, state, np.zeros((1, WIDTH), np.int32), nothing, GAMMA, nothing)
    once = draft.commit(state, Outcome(lengths=nothing + 3, num_accepted=nothing + 2))
    twice = draft.commit(once, Outcome(lengths=nothing + 1, num_accepted=nothing))
    for found, expected in zip(jax.tree.leaves(twice), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert once.mean == (GAMMA + 2) / 2


def decode(target, draft, source, gamma):
    """Decodes one row, as many tokens as its source has."""
    prompts, options = jnp.zeros((1, 1), jnp.int32), {"gamma": gamma, "max_decode_len": len(source)}
    sources = jnp.asarray([source])
    return speculative_decode(target, draft, sources, prompts, jax.random.key(0), GREEDY, **options)


def test_copying_a_copier_takes_few_calls():
    """Each call accepts all that is proposed, from the first word on."""
    decoded = decode(StubTarget(writes_the_source(VOCAB), VOCAB), CopyDraft(VOCAB), WORDS, gamma=4)
    assert decoded.tokens[0, 0].tolist() == WORDS
    # 5 6 7 8 and 9, then 10 11 4 1.
    stats = decoded.stats
    counts = stats.target_calls, stats.proposed, stats.accepted
    assert np.ravel(counts).tolist() == [2, 8, 8]


def test_no_proposal_costs_no_position_of_the_target():
    """The target records the widths that it is run with."""
    widths = []

    def record(sources, prefixes):
        """Writes a token that is not in the source."""
        return 9.0 * jax.nn.one_hot(jnp.full_like(prefixes, 9), VOCAB)

    class Recorder(StubTarget):
        def score(self, cache, tokens, num=None):
            def record(cache, tokens):
                jax.debug.callback(lambda: widths.append(tokens.shape[1]))
                return super(Recorder, self).score(cache, tokens)

            return record(cache, tokens) if num is None else by_width(record, cache, tokens, num)

    jax.tree_util.register_dataclass(Recorder, [], ["function", "vocab_size"])
    decode(Recorder(record, VOCAB), CopyDraft(VOCAB, min_match=8), [5, 6, 7, 1], gamma=4)
    jax.effects_barrier()
    # Two proposals of which nothing is right, and no more.
    assert widths == [5, 4, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edges_of_sources_leave_the_text_as_it_is(temperature):
    """An empty text, one token, one token throughout, all that fits; with and without prompt."""
    target, key = tiny_t5(0), jax.random.key(1)
    sources = rows_of([[1], [5, 1], [5] * 9 + [1], [5, 6] * 4 + [1], [5, 1]], 10)
    prompts = jnp.asarray([[0, 0, 0], [0, 0, 0], [0, 5, 5], [0, 6, 0], [0, 5, 1]])
    arguments = (sources, prompts, key, sampling(temperature))
    plain = autoregressive_decode(target, *arguments, coupled=True, max_decode_len=14)
    words = np.arange(target.vocab_size) % 2 == 0
    for starts in (None, words):
        draft = CopyDraft(target.vocab_size, word_starts=starts)
        options = {"gamma": 15, "max_decode_len": 14, "verifier": CoupledVerifier()}
        decoded = speculative_decode(target, draft, *arguments, **options)
        np.testing.assert_array_equal(decoded.tokens, plain.tokens)


def test_sampled_texts_follow_the_targets_law():
    laws.check_draft(CopyDraft(laws.target().vocab_size), gamma=4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ((0, 4), "min_match is 0"),
        ((3, 2), "max_match is 2: give at least 3"),
        (("a",), "min_match is 'a'"),
        ((1, 8.5), "max_match is 8.5"),
        ((1, 8, None, -1), "patience is -1"),
        ((1, 8, []), "size of word_starts is 0: give at least 1"),
    ],
)
def test_impossible_matches_are_refused(settings, named):
    with pytest.raises(InputError, match=named):
        CopyDraft(VOCAB, *settings)
