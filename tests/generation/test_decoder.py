"""Texts to tokens, outputs with their scores and counts, searches and limits."""

import copy
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator, decoder, engine
from spec_t5x.generation.batches import bucket
from spec_t5x.labs.benchmark.comparison import compare
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.loops import refill
from spec_t5x.loops.pace import Costs
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.decoder_only import DecoderOnlyConfig, DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling
from spec_t5x.types import EOS_ID
from tests.checkpoints.faults import message_of
from tests.generation.cases import (
    ENDS,
    GREEDY,
    SAMPLED,
    TEXTS,
    assert_same,
    options,
    texts_of,
    token_logits,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_a_text_at_the_limit_fits_and_a_longer_one_is_refused_or_cut(generator):
    ids = generator.tokenize("Die Katze", options())
    assert ids == [*generator.vocabulary.encode("Die Katze"), EOS_ID]
    assert generator.tokenize("Die Katze", options(max_source_len=len(ids))) == ids
    message = message_of(generator.tokenize, "Die Katze", options(max_source_len=len(ids) - 1))
    assert f"has {len(ids)} tokens and the encoder takes {len(ids) - 1}" in message
    cut = generator.tokenize("Die Katze", options(max_source_len=4, truncate=True))
    assert cut == [*ids[:3], EOS_ID]


@pytest.fixture
def decodes() -> Generator:
    """Provides a generator of a decoder alone, without a limit of positions."""
    target = DecoderOnlyModel({}, DecoderOnlyTransformer(DecoderOnlyConfig()))
    return Generator(target=target, vocabulary=ByteVocabulary(), max_source_len=16)


def test_a_decoder_alone_without_a_limit_of_positions_takes_a_prompt_of_any_length(decodes):
    assert len(decodes.tokenize("a" * 900, GREEDY)) == 900
    short = options(max_source_len=5)
    with pytest.raises(InputError, match="the prompt has 9 tokens and there is room for 5"):
        decodes.tokenize("a" * 9, short)
    # What is to be continued stays.
    cut = decodes.tokenize("abcdefghi", dataclasses.replace(short, truncate=True))
    assert cut == decodes.tokenize("efghi", short)
    assert decodes._checked_ids([], short) == decodes.tokenize("", short) == []


def test_a_prompt_takes_the_place_of_forced_tokens(decodes):
    with pytest.raises(InputError, match="output_prefix is 'a' and a decoder-only model's prompt"):
        decodes.check(options(output_prefix="a"))
    # A token may be forced only after an empty prompt.
    forced = options(forced_bos_token_id=5)
    assert decodes.tokenize("", forced) == []
    with pytest.raises(InputError, match="forced_bos_token_id is 5 and the prompt comes first"):
        decodes.tokenize("a", forced)


def test_a_prompt_has_the_positions_that_outputs_leave(decodes, monkeypatch):
    # Of 20 positions, outputs take 16.
    monkeypatch.setattr(DecoderOnlyModel, "max_positions", 20)
    for limits in ({}, {"max_source_len": 5}):
        with pytest.raises(InputError, match="there is room for 4 .* lower max_decode_len, or"):
            decodes.tokenize("a" * 9, options(**limits))


def test_sampled_outputs_depend_on_place_and_seed_alone(generator):
    alone = list(generator.generate(TEXTS, SAMPLED))
    exchanged = ["It is wet.", TEXTS[1], "It is wet.", TEXTS[3]]
    others = list(generator.generate(exchanged, SAMPLED, batch_size=2))
    assert_same([others[1], others[3]], [alone[1], alone[3]])
    # Two places are two draws, and so are two seeds.
    assert others[0][0].output_ids != others[2][0].output_ids
    for seed in (4, 3 + 2**31):
        assert texts_of(generator.generate(TEXTS, SAMPLED, seed=seed)) != texts_of(alone)
    # Nor on JAX's default generator, which may draw the same for all rows.
    with jax.default_prng_impl("unsafe_rbg"):
        assert_same(generator.generate(TEXTS[:2], SAMPLED, batch_size=2), alone[:2])


def test_scores_are_the_targets_log_probabilities(generator, greedy_alone):
    (generation,) = greedy_alone["My sister"]
    ids = generation.output_ids
    logits = token_logits(generator.target, generator.tokenize("My sister", GREEDY), ids)
    np.testing.assert_array_equal(logits.argmax(axis=-1), ids)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = log_probs[np.arange(len(ids)), ids].sum()
    assert generation.score == pytest.approx(expected, abs=1e-3)
    # Rescaled, they are of the distribution that is sampled from.
    settings = dataclasses.replace(SAMPLED, temperature=2.0, rescale_log_probs=True)
    ((generation,),) = generator.generate(["My sister"], settings)
    ids = generation.output_ids
    logits = token_logits(generator.target, generator.tokenize("My sister", GREEDY), ids) / 2
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = log_probs[np.arange(len(ids)), ids].sum()
    assert generation.score == pytest.approx(expected, abs=1e-3)


def test_counts_are_of_each_sequence(greedy_alone):
    for text, (g,) in greedy_alone.items():
        assert g.input == text
        assert g.proposed == 3 * g.target_calls
        assert g.accepted == sum(g.accepted_by_position)
        assert g.accepted_by_position == sorted(g.accepted_by_position, reverse=True)
        assert g.verified_by_position == sorted(g.verified_by_position, reverse=True)
        assert g.accepted_by_position[0] <= g.verified_by_position[0] == g.target_calls
        # All but the last iteration append a token of the target's own.
        assert len(g.output_ids) - g.target_calls <= g.accepted <= len(g.output_ids)
        assert g.block_efficiency == pytest.approx(len(g.output_ids) / g.target_calls)
        assert 0 <= g.alpha <= 1


def test_counts_of_several_decodes_are_each_its_own(generator):
    ask = dataclasses.replace(SAMPLED, num_decodes=2, batch_size=2)
    (batch,) = text_batches(generator, TEXTS[:2], ask)
    decoded = generator.decode(batch, ask)
    stats = jax.device_get(decoded.stats)
    for row, answer in enumerate(generator.collect(batch, decoded, ask)):
        for name in ("target_calls", "proposed", "accepted", "accepted_by_position"):
            # The best is first.
            expected = getattr(stats, name)[row, ::-1].tolist()
            assert [getattr(one, name) for one in answer] == expected
    assert np.any(stats.proposed[:, 0] != stats.proposed[:, 1])


# Only the second has a word of this piece.
SOUND, UNSOUND = "My sister", "a green bird"


def poisoned(generator, model: CachedModel) -> CachedModel:
    """Returns the model with an embedding of NaN for a word of ``UNSOUND``."""
    encode = generator.vocabulary.encode
    (first, *_) = set(encode(UNSOUND)) - set(encode(SOUND))
    embedding = model.params["token_embedder"]["embedding"].at[first].set(jnp.nan)
    return model.with_params(model.params | {"token_embedder": {"embedding": embedding}})


@pytest.fixture(scope="module")
def with_poisoned_target(generator) -> Generator:
    return dataclasses.replace(generator, target=poisoned(generator, generator.target))


@pytest.mark.parametrize(
    ("drafted", "change"),
    [(True, {}), (False, {"temperature": 1.0}), (True, {"beams": 3, "num_decodes": 2})],
    ids=["greedy", "sampled", "beams"],
)
def test_logits_that_are_not_finite_are_an_error_of_their_input(
    generator, with_poisoned_target, change, drafted
):
    settings = options(batch_size=2, **change)
    sound, ill = (
        which if drafted else which.plain() for which in (generator, with_poisoned_target)
    )
    texts = [SOUND, UNSOUND, SOUND]
    first, second, third = ill.generate(texts, settings)
    expected = list(sound.generate(texts, settings))
    assert_same([first, third], [expected[0], expected[2]])
    assert second == [] and str(second.error) == (
        f"the target's logits are not finite for {UNSOUND!r}: check the weights, compute in "
        "float32, or loosen rules that exclude every token"
    )
    assert "not finite" in message_of(second.__getitem__, 0)


@pytest.mark.usefixtures("unchecked")
def test_a_stream_yields_no_event_of_logits_that_are_not_finite(with_poisoned_target):
    for which in (with_poisoned_target, with_poisoned_target.plain()):
        assert "the target's logits are not finite in row 0" in message_of(
            next, which.stream(UNSOUND, GREEDY)
        )


def test_a_drafts_logits_that_are_not_finite_are_an_error_where_they_decide(generator):
    model = poisoned(generator, generator.draft.model)
    ill = generator.with_draft(generator.draft.replace(model=model))
    texts = [SOUND, UNSOUND]
    first, second = ill.generate(texts, options(batch_size=2, temperature=1.0))
    assert first.error is None
    message = "the draft's logits are not finite for 'a green bird'"
    assert str(second.error).startswith(message)
    with pytest.raises(InputError, match=f"^{message}") as caught:
        list(ill.stream(UNSOUND, options(temperature=1.0)))
    assert caught.value.__context__ is None
    # At temperature 0 the draft decides nothing.
    plain = generator.plain().generate(texts, GREEDY)
    assert texts_of(ill.generate(texts, GREEDY)) == texts_of(plain)


def test_coupled_the_text_is_that_of_plain_decoding(generator):
    coupled = dataclasses.replace(SAMPLED, verifier="coupled", batch_size=2)
    plain = texts_of(generator.plain().generate(TEXTS, coupled))
    assert texts_of(generator.generate(TEXTS, coupled)) == plain
    assert texts_of(generator.generate(TEXTS, dataclasses.replace(coupled, gamma="auto"))) == plain
    independent = dataclasses.replace(coupled, verifier="block")
    assert texts_of(generator.generate(TEXTS, independent)) != plain


def test_a_beam_search_gives_its_best_hypotheses(generator):
    settings = options(beams=3, num_decodes=2, batch_size=2)
    found = list(generator.generate(TEXTS[:3], settings))
    plain = list(generator.plain().generate(TEXTS[:3], settings))
    for group, expected in zip(found, plain, strict=True):
        assert [g.output_ids for g in group] == [g.output_ids for g in expected]
        assert group[1].score <= group[0].score == pytest.approx(expected[0].score, abs=1e-4)
        assert group[0].target_calls <= expected[0].target_calls
        assert group[0].block_efficiency >= 1 and expected[0].block_efficiency is None
    every = list(generator.generate(TEXTS[:3], settings, num_decodes=3))
    for group, whole in zip(found, every, strict=True):
        assert [g.output_ids for g in group] == [g.output_ids for g in whole[:2]]


def test_a_beam_search_needs_a_model_to_draft(generator):
    copying = generator.with_draft(CopyDraft(generator.target.vocab_size))
    message = message_of(lambda: list(copying.generate(TEXTS[:1], options(beams=2))))
    assert "beams is 2 and gamma" in message and "give a separate one, or gamma 0" in message
    warm = generator.with_draft(generator.draft.replace(settings=sampling(0.5)))
    message = message_of(lambda: list(warm.generate(TEXTS[:1], options(beams=2))))
    assert "only a model without draft_temperature drafts: give a separate one" in message
    assert "not compared" in message_of(compare, generator, TEXTS, options(beams=2))


@pytest.mark.parametrize("value", [True, False, "never"])
def test_the_end_of_a_search_needs_the_ranking_that_has_it(generator, value):
    ask = options(beams=2, early_stopping=value)
    message = message_of(lambda: list(generator.generate(TEXTS[:1], ask)))
    assert f"early_stopping is {value!r}, which T5X's ranking does not use" in message


def test_whole_numbers_may_be_exponents_of_searches(generator):
    for changes in ({"beam_alpha": 2**31}, {"length_penalty": -(2**31)}):
        (answer,) = generator.generate(ENDS, options(beams=2, gamma="auto", **changes))
        assert answer.error is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("how", ["with_draft", "constructor"])
def test_other_objects_are_refused_as_drafts(generator, how):
    def make(draft):
        models = {"target": generator.target, "draft": draft}
        Generator(**models, vocabulary=generator.vocabulary, max_source_len=16)

    make = make if how == "constructor" else generator.with_draft
    assert "or a name to Generator.load" in message_of(make, "copy")
    for one, message in (
        (generator.target, "T5Model has no traits, check, propose, "),
        (object(), "object is no pytree: give an object of a flax.struct.dataclass"),
        (CopyDraft, "CopyDraft is a class: give an object of a flax.struct.dataclass"),
        (type("Undecorated", (CopyDraft,), {})(9), "Undecorated is no pytree: give an object"),
    ):
        assert message in message_of(make, one)
    assert "the draft has 9 tokens" in message_of(make, CopyDraft(9))


@flax.struct.dataclass
class Without:
    """A rule of decoding that excludes one id."""

    banned: jax.Array

    def __call__(self, logits, places):
        return logits.at[..., self.banned].set(-jnp.inf)


def test_a_subclass_has_rules_of_decoding(generator, greedy_alone):
    def ruled(found):
        kind = type("Ruled", (Generator,), {"rules": lambda self, options: found})
        models = {name: getattr(generator, name) for name in ("target", "draft", "vocabulary")}
        return kind(**models, max_source_len=generator.max_source_len)

    banned = greedy_alone[TEXTS[0]][0].output_ids[0]
    without = ruled(Without(jnp.array(banned)))
    texts = TEXTS[:2]
    ids = [answer[0].output_ids for answer in without.generate(texts, GREEDY)]
    assert all(banned not in found for found in ids)
    assert ids == [answer[0].output_ids for answer in without.plain().generate(texts, GREEDY)]
    (*_, event) = without.stream(texts[0], GREEDY)
    assert event.generation.output_ids == ids[0]
    # JAX would take these for arrays.
    for other in (lambda logits, places: logits, Without, object()):
        message = message_of(ruled(other).stream, texts[0], GREEDY)
        assert message.startswith("rules are <") and "a flax.struct.dataclass" in message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("other", [None, "bytes"])
def test_other_objects_are_refused_as_vocabularies(generator, other):
    message = message_of(dataclasses.replace, generator, vocabulary=other)
    assert message == f"vocabulary is {other!r}: give a Vocabulary"


@pytest.mark.usefixtures("unchecked")
def test_gamma_is_limited_by_the_checkpoints_length(generator):
    """By 128 tokens only if neither options nor checkpoint set another limit."""
    for limit in (4, 128, 512):
        of_checkpoint = {} if limit == 128 else {"max_decode_len": limit}
        limited = dataclasses.replace(generator, defaults=of_checkpoint)
        limited.check(GenerateOptions(gamma=limit))
        message = message_of(limited.check, GenerateOptions(gamma=limit + 1))
        assert f"gamma is {limit + 1} and max_decode_len {limit}: give a whole" in message


@pytest.mark.usefixtures("unchecked")
def test_ids_that_the_target_does_not_embed_are_refused(generator):
    # The first id that the target does not have.
    rows, text = generator.target.vocab_size, "}"
    other = dataclasses.replace(generator, vocabulary=ByteVocabulary())
    (most,) = ByteVocabulary().encode(text)
    assert most == rows
    said = f"has id {most} and the target has {rows} ids: give the target's vocabulary"
    assert str(other.generate([text])[0].error) == f"the text {said}"
    with pytest.raises(InputError, match=f"the output_prefix {said}"):
        list(other.generate(["a"], options(output_prefix=text)))


def test_models_are_shown_without_their_weights(generator, tiny_pair):
    loaded = load(tiny_pair / "target")
    assert "weights is 'int16'" in message_of(loaded.bind, "int16")
    for model in (loaded, loaded.bind(), generator.target, generator.draft, generator):
        assert len(repr(model)) < 200


@pytest.mark.parametrize(
    ("of_checkpoint", "given"), [({"length_penalty": 1.0}, {}), ({}, {"length_penalty": 0.0})]
)
def test_a_length_penalty_leaves_beam_alpha_without_effect(generator, of_checkpoint, given):
    own = dataclasses.replace(generator.plain(), defaults=of_checkpoint)
    answers = own.generate(TEXTS[0], beams=2, beam_alpha=1.0, max_decode_len=8, **given)
    assert message_of(lambda: list(answers)).startswith("beam_alpha is 1.0 and a length_penalty r")


_MANY = {
    "token": {"verifier": "token"},
    "coupled": {"temperature": 1.0, "seed": 3, "verifier": "coupled"},
    "tree": {"temperature": 1.0, "seed": 3, "verifier": "tree", "gamma": 2},
    "slots": {"batch_size": 2},
    "auto": {"gamma": "auto"},
    "search of transformers": {
        **{"gamma": 0, "beams": 3, "length_penalty": 2.0},
        "early_stopping": "never",
    },
    "rules": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_decode_len": 4},
}


@pytest.fixture
def rooms(monkeypatch):
    """Collects the room of each program that is called."""
    found = []
    places = [(refill, "prepare"), (refill, "burst")]
    names = ("autoregressive_decode", "speculative_decode", "beam_search")
    places += [(decoder, name) for name in names]

    def noted(function, *args, **named):
        found.append(
            named["max_decode_len"] if "loop" not in named else named["loop"].max_decode_len
        )
        return function(*args, **named)

    for module, name in places:
        monkeypatch.setattr(module, name, functools.partial(noted, getattr(module, name)))
    return found


def test_a_minimum_above_the_usual_limit_needs_a_limit(generator):
    with pytest.raises(InputError, match="min_decode_len is 200 and outputs have at most 128"):
        list(generator.generate(TEXTS[:1], min_decode_len=200))


@pytest.mark.parametrize("which", _MANY)
def test_near_limits_share_a_program_and_change_no_text(generator, which, rooms, monkeypatch):
    """A limit cuts the longest text, and the room of a program changes nothing else."""

    def decoded(length):
        alone, decoding = dataclasses.replace(generator), options(max_decode_len=length)
        decoding = dataclasses.replace(decoding, **_MANY[which])
        if decoding.gamma == "auto":
            alone.assume(decoding, Costs.by_formula(c=0.0, largest=3))
        return [
            [(one.output_ids, one.score, one.target_calls) for one in answer]
            for answer in alone.generate(TEXTS, decoding)
        ]

    lengths = (5, 16)
    shared = [decoded(length) for length in lengths]
    assert set(rooms) == {16}
    assert max(len(ids) for answer in shared[0] for ids, *_ in answer) == 5
    rooms.clear()
    # Of the encoder-decoder the prompt is the start token alone.
    monkeypatch.setattr(Generator, "room", lambda self, batch, options: options.max_decode_len)
    assert [decoded(length) for length in lengths] == shared
    assert set(rooms) == set(lengths)


def test_limits_share_what_speculation_costs_and_searches_are_exact(generator, rooms, monkeypatch):
    costs = [engine.costly(options(max_decode_len=length)) for length in (9, 16, 17, 32)]
    assert costs[0] == costs[1] != costs[2] == costs[3]
    (batch,) = text_batches(generator, TEXTS[:1], GREEDY)
    assert generator.room(batch, options(max_decode_len=17)) == 32
    assert generator.room(batch, options(max_decode_len=np.int64(17))) == 32
    # A limit below the smallest bucket.
    assert bucket(5, 8) == 8 and bucket(16, 96) == 16
    list(generator.generate(TEXTS[:1], gamma=0, beams=2, max_decode_len=9))
    # With the padded prefix.
    list(generator.generate(TEXTS[:1], gamma=0, beams=2, max_decode_len=9, output_prefix="a"))
    assert rooms == [9, 16 + 9]
    # A model with fewer positions than the rounded limit.
    monkeypatch.setattr(CopyDraft, "check", _fits_20)
    copying = generator.with_draft(CopyDraft(generator.target.vocab_size))
    assert copying.room(batch, options(max_decode_len=17)) == 17
    monkeypatch.setattr(T5Model, "max_positions", 20)
    for one in (generator, generator.plain()):
        assert one.room(batch, options(max_decode_len=17)) == 17


def _fits_20(draft, target, max_decode_len):
    if max_decode_len > 20:
        raise InputError("there are 20 positions")


def test_rules_are_of_all_ids_that_end_a_text_and_of_its_start(generator, monkeypatch):
    vocabulary = copy.copy(generator.vocabulary)
    monkeypatch.setattr(vocabulary, "eos_ids", (EOS_ID, 7))
    monkeypatch.setattr(vocabulary, "start_in_text", 9)
    found = dataclasses.replace(generator, vocabulary=vocabulary).rules(options(min_decode_len=2))
    assert np.flatnonzero(found.ends).tolist() == [EOS_ID, 7] and found.start_id == 9


@pytest.mark.usefixtures("unchecked")
def test_a_search_gets_the_options_of_searches(generator, monkeypatch):
    given = []
    monkeypatch.setattr(decoder, "beam_search", lambda *args, **named: given.append(named))

    def asked(**changes):
        ask = options(gamma=0, beams=2, suppress_tokens=(5,), **changes)
        (batch,) = text_batches(generator, TEXTS[:1], ask)
        generator.search(batch, ask)
        return given.pop()

    named = asked(beam_alpha=0.3, output_prefix="Der")
    prefix = len(generator.vocabulary.encode("Der"))
    # Start token, prefix and text: the padding of the prefix is no part of a hypothesis.
    assert named["ranking"].longest.tolist() == [1 + prefix + 16]
    assert named["ranking"].exponent == 0.3
    assert named["rules"] is not None and named["max_decode_steps"].tolist() == [16]
    ranking = asked(length_penalty=2.0, early_stopping="never")["ranking"]
    assert (ranking.exponent, ranking.early_stopping) == (2.0, "never")
