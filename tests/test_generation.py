"""Text in, text out; and the measurements that are made of it."""

import copy
import dataclasses
import functools
import json
import os
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
from flax.traverse_util import flatten_dict

from spec_t5x import errors, names
from spec_t5x.checkpoints.loading import load, open_model
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator, decoder, engine, streaming
from spec_t5x.generation import generator as generator_lib
from spec_t5x.generation.answers import Answers
from spec_t5x.generation.batches import bucket
from spec_t5x.labs.benchmark import comparison as comparison_lib
from spec_t5x.labs.benchmark.comparison import compare, without_open
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.benchmark.step_times import StepTimes
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.loops import refill, speculative
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.decoder_only import DecoderOnlyConfig, DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling
from spec_t5x.types import EOS_ID, PAD_ID
from tests.checkpoints.faults import message_of
from tests.loops.stubs import teacher_forced

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

# Up to 16 tokens each: one program serves them all.
TEXTS = ["My sister", "Wir gehen morgen.", "Der alte Tisch", "a green bird", "It is wet."]
# Ends at once, at temperature 0.
ENDS = "Die Katze"
# Padded to 32.
LONGER = "The children play football after school."


def options(**changes) -> GenerateOptions:
    return GenerateOptions(**{"gamma": 3, "max_decode_len": 16} | changes)


TIMES = StepTimes(target=4.0, draft=1.0, verification=6.0)
GREEDY = options()
SAMPLED = options(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


def texts_of(generations) -> list[str]:
    return [group[0].output for group in generations]


# --- loading and options -----------------------------------------------------


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_with_rounded_weights_the_text_is_that_of_the_rounded_target(tiny_pair, kv):
    options, directories = DraftOptions(weights="int4"), (tiny_pair / "target", tiny_pair / "draft")
    rounded = Generator.load(*directories, options, weights="int4", kv=kv)
    for model in (rounded.target, rounded.draft.model):
        flat = flatten_dict(model.weights, is_leaf=lambda _, node: not isinstance(node, dict))
        leaves = [jax.tree.leaves(leaf)[0] for path, leaf in flat.items() if path[-1] == "kernel"]
        # Two numbers of four bits may be one of eight.
        assert {str(leaf.dtype) for leaf in leaves} <= {"int4", "uint8"}
    # Trees and beams go through other calls of the network.
    for changes in ({}, {"verifier": "tree", "widths": (2, 1)}, {"beams": 2}):
        settings = dataclasses.replace(GREEDY, gamma=2, **changes)
        expected = texts_of(rounded.plain().generate(TEXTS, settings))
        assert texts_of(rounded.generate(TEXTS, settings)) == expected


def test_networks_compute_in_the_dtype_that_was_asked_for(tiny_pair):
    options = DraftOptions(dtype="bfloat16")
    loaded = Generator.load(tiny_pair / "target", tiny_pair / "draft", options)
    for model in (loaded.target, loaded.draft.model):
        assert model.config.dtype == "bfloat16"
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}


def test_a_draft_with_another_vocabulary_is_refused_by_its_first_other_piece(tiny_pair):
    target, draft = (Generator.load(tiny_pair / name) for name in ("target", "other"))
    message = message_of(Generator.load, tiny_pair / "target", tiny_pair / "other")
    pieces = [
        (index, target.vocabulary.piece(index), draft.vocabulary.piece(index))
        for index in range(target.vocabulary.vocab_size)
    ]
    index, ours, theirs = next(entry for entry in pieces if entry[1] != entry[2])
    assert f"id {index} is {ours!r} and {theirs!r}" in message
    assert str(tiny_pair / "other") in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gamma": -1}, "gamma is -1: give a whole number from 0"),
        (
            {"gamma": 9, "max_decode_len": 8},
            "gamma is 9 and max_decode_len 8: give a whole number from 0",
        ),
        ({"num_decodes": 0}, "num_decodes is 0"),
        ({"max_source_len": 1}, "max_source_len is 1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": 1e39}, "temperature is 1e+39: give a number of at most 3e+38"),
        ({"length_penalty": -1e39, "beams": 2}, "length_penalty is -1e+39: give a number of at"),
        ({"top_k": 5, "top_p": 0.9}, "top_k is 5 and top_p is 0.9"),
        ({"verifier": "trust"}, "verifier is 'trust'"),
        ({"beams": -1}, "beams is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give a number above 0"),
        ({"suppress_tokens": (-1,)}, "suppress_tokens has (-1,): give a list of whole numbers"),
        ({"bad_words_ids": ((),)}, "bad_words_ids has an empty list of ids: leave it out"),
        ({"sequence_bias": (((), 1.0),)}, "sequence_bias has an empty list of ids: leave it out"),
        ({"output_prefix": "\udce4"}, "output_prefix '\\udce4' is not UTF-8"),
        ({"stop": "\udce4"}, "stop '\\udce4' is not UTF-8"),
        ({"beam_alpha": float("nan")}, "beam_alpha is nan"),
        ({"beam_alpha": float("inf"), "beams": 2}, "beam_alpha is inf: give a finite number"),
        (
            {"early_stopping": "always", "beams": 2},
            "early_stopping is 'always': choose one of True, False, never",
        ),
        ({"beams": 4, "temperature": 1.0}, "temperature is 1.0 and beams 4"),
        ({"beams": 2, "num_decodes": 3}, "num_decodes is 3 and beams 2"),
        ({"weights": "int3"}, "weights is 'int3': choose one of auto, int8, int4"),
        ({"kv": "int4"}, "kv is 'int4': choose one of auto, int8"),
        (
            {"max_decode_len": 2**31 - 1},
            "max_decode_len is 2147483647: give at least 1, at most",
        ),
        ({"num_decodes": 2**31}, "num_decodes is 2147483648: give at least 1, at most 1073741824"),
        ({"batch_size": 2**40}, "batch_size is 1099511627776: give at least 1, at most 1073741824"),
        # JAX would take it for seed 0.
        ({"seed": 2**32}, "seed is 4294967296: give at least 0, at most 4294967295"),
        (
            {"top_k": 2**63},
            "top_k is 9223372036854775808: give a number of at most 92233720",
        ),
        ({"gamma": 10**400}, "000: give a number of at most 9223372036854775807"),
        ({"temperature": 10**400}, "000: give a number of at most 3e+38"),
        ({"length_penalty": -(10**400), "beams": 2}, "000: give a number of at most 3e+38"),
        ({"sequence_bias": (((1,), 10**400),)}, "sequence_bias has ((1,), 1000"),
    ],
)
def test_options_that_cannot_be_are_refused_with_their_value(changes, expected):
    options = Models if {"weights", "kv"} & set(changes) else GenerateOptions
    assert expected in message_of(options, **changes)


NUMBERS = [
    (kind, field.name)
    for kind in (GenerateOptions, Models)
    for field in dataclasses.fields(kind)
    if field.type in (int, float, int | str, int | None, float | None)
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), NUMBERS)
@pytest.mark.parametrize("value", [True, False])
def test_no_number_is_true_or_false(kind, name, value):
    assert message_of(kind, **{name: value}).startswith(f"{name} is {value}: give a")


# --- tokens and batches ------------------------------------------------------


def test_a_text_at_the_limit_fits_and_a_longer_one_is_refused_or_cut(generator):
    ids = generator.tokenize("Die Katze", options())
    assert ids == [*generator.vocabulary.encode("Die Katze"), EOS_ID]
    assert generator.tokenize("Die Katze", options(max_source_len=len(ids))) == ids
    message = message_of(generator.tokenize, "Die Katze", options(max_source_len=len(ids) - 1))
    assert f"has {len(ids)} tokens and the encoder takes {len(ids) - 1}" in message
    cut = generator.tokenize("Die Katze", options(max_source_len=4, truncate=True))
    assert cut == [*ids[:3], EOS_ID]


@pytest.mark.usefixtures("unchecked")
def test_a_bad_text_among_good_ones_is_an_error_of_its_own(generator, greedy_alone):
    texts = [TEXTS[0], "", None, TEXTS[1], "x" * 500, TEXTS[2]]
    for size in (1, 2):
        answers = list(generator.generate(texts, options(batch_size=size)))
        sound = [place for place, answer in enumerate(answers) if answer.error is None]
        assert sound == [0, 3, 5]
        assert_same([answers[0], answers[3], answers[5]], [greedy_alone[t] for t in TEXTS[:3]])
        assert "the text is empty" in message_of(answers[1].__getitem__, 0)
        assert "a text is None: give a string" in message_of(answers[2].__getitem__, 0)
        assert answers[1] == []


def test_texts_may_come_one_by_one_and_answers_do_not_wait_for_all(generator, greedy_alone):
    asked = []

    def texts():
        for text in TEXTS:
            asked.append(text)
            yield text

    answers = generator.generate(texts(), GREEDY)
    assert_same([next(answers)], [greedy_alone[TEXTS[0]]])
    assert len(asked) == 2
    assert_same(answers, [greedy_alone[text] for text in TEXTS[1:]])


@pytest.mark.parametrize("size", [1, 2])
def test_answers_to_the_inputs_before_an_error_come_first(generator, greedy_alone, size):
    def texts():
        yield from TEXTS[:3]
        yield ""
        raise OSError("the disk is full")

    answers, got = generator.generate(texts(), options(batch_size=size)), []
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full"):
            got.extend(answers)
    assert_same(got[:3], [greedy_alone[text] for text in TEXTS[:3]])
    assert "the text is empty" in str(got[3].error) and len(got) == 4


@pytest.mark.usefixtures("unchecked")
def test_options_may_be_given_one_by_one(generator):
    given = texts_of(generator.generate(TEXTS[:2], GREEDY, temperature=1.0, seed=3))
    greedy, sampled = (texts_of(generator.generate(TEXTS[:2], o)) for o in (GREEDY, SAMPLED))
    assert given == sampled != greedy
    assert "there is no option 'gama'" in message_of(lambda: generator.generate("a", gama=3))
    assert "give GenerateOptions" in message_of(generator.generate, "a", {"gamma": 3})


def test_with_auto_texts_are_the_same_and_acceptance_is_remembered(generator, greedy_alone):
    auto = options(gamma="auto", batch_size=2)
    assert GenerateOptions().gamma == "auto"
    for _ in range(2):
        assert texts_of(generator.generate(TEXTS, auto)) == [
            greedy_alone[text][0].output for text in TEXTS
        ]
    first = generator._paces[engine.costly(auto)]
    list(generator.generate(TEXTS, auto))
    assert int(generator._paces[engine.costly(auto)].iterations) > int(first.iterations) > 0
    # Where texts are draws, a call depends on nothing that came before it.
    sampled = options(gamma="auto", batch_size=2, temperature=1.0)
    twice = [texts_of(generator.generate(TEXTS, sampled)) for _ in range(2)]
    assert twice[0] == twice[1]


@pytest.mark.usefixtures("unchecked")
def test_a_wider_batch_ends_the_slots_and_begins_new_ones(generator, greedy_alone, monkeypatch):
    made, slots = [], engine._Slots
    monkeypatch.setattr(generator_lib, "_SORTED", 1)
    monkeypatch.setattr(engine, "_Slots", lambda *given: made.append(given) or slots(*given))
    texts = [*TEXTS[:4], LONGER, TEXTS[4], ENDS]
    expected = [greedy_alone[text] for text in texts]
    assert_same(generator.generate(texts, GREEDY, batch_size=2), expected)
    assert len(made) == 2
    auto = generator.generate(texts, GREEDY, batch_size=2, gamma="auto")
    assert texts_of(auto) == texts_of(expected) and len(made) == 4
    # A batch that no other follows needs none.
    assert_same(generator.generate(texts[:2], GREEDY, batch_size=2), expected[:2])
    assert len(made) == 4


def test_slots_take_no_wider_prompts(generator):
    (batch,) = text_batches(generator, TEXTS[:1], options(output_prefix="a"))
    takes = functools.partial(engine._Slots.takes, types.SimpleNamespace(_first=batch))
    wider = np.pad(batch.prompts, ((0, 0), (0, 16)))
    assert takes(batch) and not takes(dataclasses.replace(batch, prompts=wider))


def test_requests_of_many_seeds_and_stops_share_costs_and_one_pace(generator):
    """A service keeps nothing for each request, and what one has learned serves the next."""
    which, coupled = dataclasses.replace(generator), options(gamma="auto", verifier="coupled")
    steps = []
    for seed, temperature in enumerate((0.7, 1.0, 1.3)):
        own = {"seed": seed, "temperature": temperature, "stop": f"{seed}"}
        list(which.generate(TEXTS[:1], coupled, **own))
        (pace,) = which._paces.values()
        steps.append(int(pace.plain_steps + pace.iterations))
    assert steps == sorted(set(steps)) and len(which._costs) == 1
    # The pace is of gamma "auto" alone.
    (answer,) = which.generate(TEXTS[:1], coupled, gamma=3, temperature=1.0)
    (alone,) = dataclasses.replace(generator).generate(TEXTS[:1], coupled, gamma=3, temperature=1.0)
    assert list(answer) == list(alone)
    assert which.verdict(dataclasses.replace(coupled, gamma=3, temperature=1.0)) is None


def test_where_no_acceptance_pays_the_draft_is_left_out(generator):
    which = dataclasses.replace(generator)
    auto = without_open(options(gamma="auto", batch_size=2), which.defaults)
    which.assume(auto, Costs.by_formula(c=1.0, position=0.1))
    comparison = compare(which, TEXTS[:3], auto, repeats=1)
    assert (comparison.gamma, comparison.alpha, comparison.acceptance_rate) == (0, None, None)
    assert comparison.block_efficiency == comparison.predicted == 1.0
    assert comparison.identical and not comparison.divergences
    assert comparison.outputs == list(which.plain().generate(TEXTS[:3], auto))
    assert comparison.outputs == list(which.generate(TEXTS[:3], auto))
    for said in (comparison.left_out, which.verdict(auto)):
        assert "which no acceptance pays for" in said
    # A draft that was asked for is not left out.
    assert which.verdict(dataclasses.replace(auto, gamma=3)) is None
    json.dumps(comparison.to_dict())


@pytest.mark.parametrize(
    ("plain_steps", "iterations", "first_drafts", "said"),
    [
        (79, 21, (0, 20), None),
        (80, 20, (7, 20), " of 80% of the steps: {pays}"),
        (80, 20, (6, 20), " of 80% of the steps: {pays}, and 30% of its first tokens saved a step"),
        (90, 10, (0, 0), " of 90% of the steps: {pays}"),
        (9, 0, (0, 0), ": {pays}"),
    ],
)
def test_a_draft_that_was_left_out_of_most_steps_is_told(
    generator, plain_steps, iterations, first_drafts, said
):
    auto, own = options(gamma="auto", batch_size=2), dataclasses.replace(generator)
    assert own.verdict(auto) is None
    # At gamma 1 an iteration costs 1.3, which (1 + 0.33) tokens pay for by the margin of 2 %.
    own.assume(auto, costs := Costs.by_formula(c=0.3))
    pays = "it pays here from an acceptance rate of about 33%"
    decoding, pace = own.engine(auto), Pace.start(costs)
    assert decoding.verdict is None
    decoding.pace = pace.replace(
        plain_steps=jnp.int32(plain_steps),
        iterations=jnp.int32(iterations),
        counts=pace.counts.at[:2, 0].set(jnp.array(first_drafts, jnp.float32)),
    )
    expected = said and "the draft was left out" + said.format(pays=pays)
    assert decoding.verdict == expected


def test_batches_hold_the_inputs_in_order_and_padding_rows_that_end_at_once(generator):
    batches = text_batches(generator, TEXTS, options(batch_size=2))
    assert [batch.texts for batch in batches] == [TEXTS[:2], TEXTS[2:4], TEXTS[4:]]
    for batch in batches:
        assert batch.tokens.shape == (2, 16)
        for row, text in enumerate(batch.texts):
            ids = generator.tokenize(text, GREEDY)
            np.testing.assert_array_equal(batch.tokens[row], np.pad(ids, (0, 16 - len(ids))))
    assert [batch.max_decode_steps.tolist() for batch in batches] == [[16, 16], [16, 16], [16, 0]]
    # Something to attend to, or the softmax would average over padding.
    assert batches[-1].tokens[1].tolist() == [EOS_ID] + [PAD_ID] * 15


def test_prefixes_share_a_program_and_padding_changes_no_text(generator, monkeypatch):
    prefixes, search = ("a", "Der alte T"), {"gamma": 0, "beams": 2}

    def decoded():
        return [
            [(one.output, one.output_ids, one.target_calls) for one in answer]
            for prefix in prefixes
            for changes in ({}, {"batch_size": 2}, {"temperature": 1.0, "seed": 4}, search)
            for answer in generator.generate(TEXTS[:3], GREEDY, output_prefix=prefix, **changes)
        ]

    def widths(**limits):
        given = (options(output_prefix=prefix, **limits) for prefix in prefixes)
        batches = (text_batches(generator, TEXTS[:1], one) for one in given)
        return [batch.prompts.shape for (batch,) in batches]

    shared = decoded()
    for prefix in prefixes:
        ((plain,),) = generator.generate(TEXTS[:1], GREEDY, gamma=0, output_prefix=prefix)
        given = len(generator.vocabulary.encode(prefix))
        assert plain.target_calls == len(plain.output_ids) - given
    # The limit of sources is none of prefixes.
    assert widths() == widths(max_source_len=8, truncate=True) == [(1, 17), (1, 17)]
    # Without padding.
    monkeypatch.setattr(Generator, "_longest_prompt", lambda self, options: 0)
    ids = map(generator.vocabulary.encode, prefixes)
    assert widths() == [(1, 1 + len(each)) for each in ids] and decoded() == shared


def test_a_decoder_alone_without_a_limit_of_positions_takes_a_prompt_of_any_length():
    target = DecoderOnlyModel({}, DecoderOnlyTransformer(DecoderOnlyConfig()))
    decodes = Generator(target=target, vocabulary=ByteVocabulary(), max_source_len=16)
    assert len(decodes.tokenize("a" * 900, GREEDY)) == 900
    short = options(max_source_len=5)
    with pytest.raises(InputError, match="the prompt has 9 tokens and there is room for 5"):
        decodes.tokenize("a" * 9, short)
    # What is to be continued stays.
    cut = decodes.tokenize("abcdefghi", dataclasses.replace(short, truncate=True))
    assert cut == decodes.tokenize("efghi", short)
    assert decodes._checked_ids([], short) == decodes.tokenize("", short) == []


# --- outputs -----------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy_alone(generator) -> dict[str, list]:
    """Decodes each text by itself at temperature 0."""
    return {text: next(generator.generate([text], GREEDY)) for text in [*TEXTS, ENDS, LONGER]}


def assert_same(generations, expected):
    """Compares all of it, and scores to rounding: the shapes of the products differ."""
    for ours, theirs in zip(generations, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-3)
            same_score = dataclasses.replace(other, score=one.score)
            if one.alpha is not None:
                assert one.alpha == pytest.approx(other.alpha, abs=1e-3)
                same_score = dataclasses.replace(same_score, alpha=one.alpha)
            assert one == same_score


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


def token_logits(model: T5Model, source: list[int], output: list[int]) -> np.ndarray:
    """Returns the logits before each token of an output, teacher-forced ``[length, vocab]``."""
    texts = [*source, *[PAD_ID] * (16 - len(source))], [PAD_ID, *output, *[PAD_ID] * 16][:16]
    logits = teacher_forced(model, *(jnp.asarray([text]) for text in texts))
    return np.asarray(logits[0, : len(output)], np.float64)


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


def test_a_batch_is_read_once_the_next_one_is_under_way(generator, monkeypatch):
    happened, decode, answer = [], Generator.decode, Generator.answer

    def noted(name, function):
        def call(self, what, *rest):
            happened.append((name, what if isinstance(what, str) else what.texts[0]))
            return function(self, what, *rest)

        return call

    monkeypatch.setattr(Generator, "decode", noted("decode", decode))
    monkeypatch.setattr(Generator, "answer", noted("answer", answer))
    list(generator.generate(TEXTS[:3], GREEDY))
    order = [
        ("decode", 0),
        ("decode", 1),
        ("answer", 0),
        ("decode", 2),
        ("answer", 1),
        ("answer", 2),
    ]
    assert happened == [(name, TEXTS[n]) for name, n in order]


# --- streaming ---------------------------------------------------------------


def events_of(generator, text, settings, place=0):
    """Checks that a stream gives what ``generate`` gives, and is consistent in itself."""
    # Each has its own pace.
    one, other = (generator.with_draft(generator.draft) for _ in range(2))
    events = list(one.stream(text, settings, place=place))
    (expected,) = other.generate(text, settings, first=place)
    ids = [token for event in events for token in event.appended]
    *before, last = events
    assert [event.generation for event in before] == [None] * len(before)
    assert_same([[last.generation]], [expected])
    assert ids == last.generation.output_ids
    assert last.text == last.generation.output
    assert [event.target_calls for event in events] == [*range(1, len(events) + 1)]
    assert last.target_calls == last.generation.target_calls
    seconds = [event.seconds for event in events]
    assert 0 < last.prefill_seconds < seconds[0] and seconds == sorted(seconds)
    assert all(last.text.startswith(event.text) for event in events)
    return events


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gamma", [3, "auto"])
def test_a_stream_is_what_generate_gives(generator, settings, gamma):
    settings = dataclasses.replace(settings, gamma=gamma)
    for place, text in enumerate(TEXTS[:3]):
        events = events_of(generator, text, settings, place)
        generation = events[-1].generation
        assert sum(event.num_accepted for event in events) == generation.accepted
        assert sum(len(event.proposed) for event in events) == generation.proposed
        refused = [event for event in events if event.rejected]
        assert refused and generation.accepted
        for event in refused:
            assert event.accepted + event.rejected == event.proposed
            assert settings.temperature or event.own != event.rejected[0]


@pytest.mark.parametrize(
    ("temperature", "verifier"), [(0.0, "block"), (1.0, "coupled"), (1.0, "tree")]
)
def test_without_a_draft_tokens_come_one_by_one(generator, temperature, verifier):
    settings = options(temperature=temperature, seed=3, verifier=verifier)
    for place, text in enumerate(TEXTS[:2]):
        events = events_of(generator.plain(), text, settings, place)
        assert [len(event.appended) for event in events] == [1] * len(events)
        assert not any(event.proposed for event in events)


def test_streams_without_a_draft_share_a_program(generator):
    missed = []
    for verifier in ("block", "token", "tree"):
        settings = options(temperature=1.0, seed=3, verifier=verifier)
        list(events_of(generator.plain(), TEXTS[0], settings, 0))
        missed.append(speculative._compiled.cache_info().misses)
    assert missed[0] == missed[1] == missed[2]


def test_a_stream_holds_back_words_whose_spaces_may_go(generator, monkeypatch):
    vocabulary = copy.copy(generator.vocabulary)
    monkeypatch.setattr(vocabulary, "cleans_up", True)
    words = ["It", "is", "n't", "wet", ".", "We", "'re", ","] * 2
    decode = lambda ids: vocabulary.cleaned(" ".join(words[: len(ids)]))  # noqa: E731
    monkeypatch.setattr(vocabulary, "decode", decode)
    spaced = dataclasses.replace(generator, vocabulary=vocabulary)
    *before, last = spaced.plain().stream(TEXTS[0], GREEDY)
    assert last.text.startswith("It isn't wet. We're,") and len(before) > 8
    assert all(last.text.startswith(event.text) for event in before)


def test_a_streams_clock_leaves_out_the_callers_time(generator, monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(streaming, "time", clock)
    for event in generator.stream(TEXTS[0], GREEDY):
        assert event.seconds == event.prefill_seconds == 0
        now[0] += 100


def test_a_stream_is_of_one_decode_that_is_no_search(generator):
    assert "num_decodes is 2" in message_of(generator.stream, "Die Katze", num_decodes=2)
    assert "a stream decodes one output" in message_of(generator.stream, TEXTS[0], options(beams=2))
    assert "the text is empty" in message_of(generator.stream, " ")


# --- what is not finite ------------------------------------------------------

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
    assert message_of(list, ill.stream(UNSOUND, options(temperature=1.0))).startswith(message)
    # At temperature 0 the draft decides nothing.
    plain = generator.plain().generate(texts, GREEDY)
    assert texts_of(ill.generate(texts, GREEDY)) == texts_of(plain)


# --- comparison --------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison(generator):
    return compare(generator, TEXTS[:3], options(batch_size=2), repeats=2)


def test_comparison_finds_the_texts_identical_and_counts_them(comparison, greedy_alone):
    assert comparison.identical is True
    assert comparison.divergences == []
    assert_same(comparison.outputs, [greedy_alone[text] for text in TEXTS[:3]])
    outputs = [greedy_alone[text][0] for text in TEXTS[:3]]
    assert (comparison.num_inputs, comparison.gamma, comparison.temperature) == (3, 3, 0.0)
    num_tokens = sum(len(g.output_ids) for g in outputs)
    assert comparison.plain_tokens == comparison.speculative_tokens == num_tokens
    calls = sum(g.target_calls for g in outputs)
    assert comparison.target_calls == calls
    assert comparison.block_efficiency == pytest.approx(num_tokens / calls)
    assert 0 < comparison.alpha < 1


def test_a_divergence_is_reported_with_its_place_and_margin(generator, greedy_alone, monkeypatch):
    """Plain decoding that cannot say one of the tokens replaces a broken loop."""
    ids = {text: greedy_alone[text][0].output_ids for text in TEXTS}
    token = ids["My sister"][4]
    expected = {text: ids[text].index(token) for text in TEXTS if token in ids[text]}
    assert 0 < len(expected) < len(TEXTS)
    params = jax.tree.map(lambda leaf: leaf, generator.target.params)
    kernel = params["decoder"]["logits_dense"]["kernel"]
    params["decoder"]["logits_dense"]["kernel"] = kernel.at[:, token].set(0.0)
    target = generator.target.with_params(params)
    plain = dataclasses.replace(generator, target=target, draft=None)

    monkeypatch.setattr(Generator, "plain", lambda self: plain)
    monkeypatch.setattr(comparison_lib, "measure_step_times", lambda *_, **__: TIMES)
    comparison = compare(generator, TEXTS, options(batch_size=2), repeats=1)
    assert comparison.identical is False
    assert {d.input: d.position for d in comparison.divergences} == expected
    for divergence in comparison.divergences:
        assert divergence.speculative_token == token
        prefix = ids[divergence.input][: divergence.position]
        source = generator.tokenize(divergence.input, GREEDY)
        logits = token_logits(target, source, [*prefix, token])[-1]
        assert divergence.plain_token == logits.argmax()
        margin = logits.max() - logits[token]
        assert margin > 0
        assert divergence.margin == pytest.approx(margin, abs=1e-3)


# --- evaluation --------------------------------------------------------------

SKIPPED = [("", "nichts"), ("Es regnet. " * 20, "zu lang")]


class SpacedVocabulary(SentencePieceVocabulary):
    """Vocabulary of words, because the tiny pair's texts have too few for BLEU."""

    def decode(self, ids):
        return " ".join(str(i) for i in ids if i != EOS_ID)


def test_evaluation_scores_each_output_against_its_own_reference(generator, greedy_alone):
    """The order of batches does not matter; unusable pairs are counted."""
    spaced = SpacedVocabulary(generator.vocabulary.path)
    generator = dataclasses.replace(generator, vocabulary=spaced)
    outputs = [greedy_alone[text][0] for text in TEXTS]
    texts = [spaced.decode(g.output_ids) for g in outputs]
    # One of them wrong: another order would make all of them so.
    references = [*texts[:-1], "another text altogether"]
    pairs = list(zip(TEXTS, references, strict=True))
    assert sorted(pairs, key=lambda pair: len(pair[0])) != pairs
    seen = []
    evaluation = evaluate(
        generator,
        TextPairs(pairs=[SKIPPED[0], *pairs, SKIPPED[1]]),
        options(batch_size=2),
        lambda done, total: seen.append((done, total)),
    )
    assert (evaluation.num_pairs, evaluation.num_skipped) == (5, 2)
    expected = sacrebleu.corpus_bleu(texts, [references]).score
    assert 0 < expected < 100
    assert evaluation.metrics["bleu"] == pytest.approx(expected)
    assert "tok:13a" in evaluation.bleu_signature
    assert evaluation.num_tokens == sum(len(g.output_ids) for g in outputs)
    assert seen == [(done, 5) for done in range(1, 6)]


def test_evaluation_pools_acceptance_over_all_sequences(generator, greedy_alone):
    outputs, batched = [greedy_alone[text][0] for text in TEXTS], options(batch_size=2)
    pairs = [(text, "x") for text in TEXTS]
    evaluation = evaluate(generator, TextPairs(pairs=pairs), batched)
    calls = sum(g.target_calls for g in outputs)
    efficiency = sum(len(g.output_ids) for g in outputs) / calls
    assert evaluation.target_calls == calls
    accepted, verified = (
        np.sum([getattr(g, f"{name}_by_position") for g in outputs], axis=0)
        for name in ("accepted", "verified")
    )
    np.testing.assert_allclose(evaluation.acceptance_by_position, accepted / verified, rtol=1e-6)
    # The mean over positions, not the mean of the sequences' means.
    mean = sum(g.alpha * sum(g.verified_by_position) for g in outputs) / verified.sum()
    assert evaluation.alpha == pytest.approx(mean, abs=1e-5)
    for name, value in (("alpha", mean), ("block_efficiency", efficiency)):
        low, high = evaluation.intervals[name]
        assert low < value < high
        assert getattr(evaluation, name) == pytest.approx(value, abs=1e-5)
    # One text says nothing of others.
    assert evaluate(generator, TextPairs(pairs=pairs[2:3]), batched).intervals == {}


def test_evaluation_needs_a_usable_pair_and_one_decode(generator):
    unusable, none = TextPairs(pairs=SKIPPED), TextPairs(pairs=[])
    assert "the text is empty" in message_of(evaluate, generator, unusable, options())
    assert "there are no sources" in message_of(evaluate, generator, none, options())
    pairs = TextPairs(pairs=[("Die Katze", "the cat")])
    message = message_of(evaluate, generator, pairs, options(beams=2))
    assert "beams is 2" in message
    sampled = options(num_decodes=2, temperature=1.0)
    message = message_of(evaluate, generator, pairs, sampled)
    assert "num_decodes is 2" in message


# --- verifiers and beams -----------------------------------------------------


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


# --- what comes out, as a sequence and one by one --------------------------------


def test_answers_have_an_index_and_come_one_by_one(generator, greedy_alone):
    def answers(texts=TEXTS):
        return generator.generate(texts, GREEDY)

    expected = [greedy_alone[text] for text in TEXTS]
    assert answers()[0] == expected[0] and answers()[-2:] == expected[-2:]
    assert list(answers()) == [*answers()] == expected
    kept = answers()
    assert repr(kept) == "Answers(decoded by an index, or by one iteration)"
    assert kept[1] == expected[1] and list(kept) == list(kept) == expected
    assert repr(kept) == f"Answers({expected})"
    # As a notebook's user asks first.
    with pytest.raises(AttributeError, match=r"is a list of outputs: try answer\[0\]\.output$"):
        print(kept[0].output)
    assert [next(kept) for _ in TEXTS] == expected
    coming = answers(iter(TEXTS))
    assert next(coming) == expected[0] and list(coming) == expected[1:]
    assert list(answers([])) == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda coming: (next(coming), coming[0]), "answer 0 is indexed while iterating"),
        (lambda coming: (list(coming), list(coming)), "were iterated over before and are not kept"),
    ],
)
def test_answers_that_are_not_kept_are_named(generator, ask, message):
    assert message in message_of(ask, generator.generate(iter(TEXTS[:2]), GREEDY))


def test_an_answer_that_is_an_error_is_never_empty_in_silence(generator):
    (answer,) = generator.generate("", GREEDY)
    looks = (list, iter, lambda answer: answer[0], lambda answer: answer[:1])
    for look in (*looks, lambda answer: [output for (output,) in [answer]]):
        with pytest.raises(InputError, match="the text is empty"):
            look(answer)
    assert repr(answer).startswith("Answer(error=InputError('the text is empty")
    for again in (copy.copy(answer), pickle.loads(pickle.dumps(answer))):
        assert str(again.error) == str(answer.error)
    (good,) = generator.generate(TEXTS[0], GREEDY)
    assert pickle.loads(pickle.dumps(good)) == copy.copy(good) == good == list(good)


def test_a_fork_is_refused_and_a_process_with_a_copy_is_not(generator, monkeypatch):
    again = pickle.loads(pickle.dumps(generator))
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    message = f"process {here + 1} is a fork of {here}, which used JAX: start it by 'spawn'"
    for decode in (lambda *given: list(generator.generate(*given)), generator.stream):
        assert message_of(decode, TEXTS[0], GREEDY) == message
    assert message_of(Generator.load, "t5-target") == message
    # A process that was spawned has not used JAX before.
    monkeypatch.setattr(errors, "_first_process", lambda: here + 1)
    assert again.generate(TEXTS[0], GREEDY)[0][0] == generator.generate(TEXTS[0], GREEDY)[0][0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("transfer_guard_host_to_device", "disallow"),
        ("transfer_guard_host_to_device", "disallow_explicit"),
        ("enable_x64", True),
    ],
)
def test_settings_of_jax_that_stop_decoding_are_named_before_loading(generator, setting, value):
    before = jax.config.values[f"jax_{setting}"]
    jax.config.update(f"jax_{setting}", value)
    try:
        for call in (lambda: Generator.load("no/model"), lambda: generator.generate("a", GREEDY)):
            assert message_of(lambda call=call: list(call())).startswith(
                f"jax_{setting} is {value!r} and texts are "
            )
        assert "texts are" in message_of(lambda: options(temperature=0.125).sampling())
    finally:
        jax.config.update(f"jax_{setting}", before)


def test_settings_of_jax_for_the_users_own_code_do_not_matter(generator, greedy_alone):
    with jax.numpy_dtype_promotion("strict"), jax.transfer_guard_device_to_host("disallow"):
        answers = list(generator.generate(TEXTS[:2], GREEDY))
        *_, last = generator.stream(TEXTS[0], GREEDY)
    assert_same(answers, [greedy_alone[text] for text in TEXTS[:2]])
    assert last.generation.output_ids == answers[0][0].output_ids


def test_whole_numbers_may_be_exponents_of_searches(generator):
    for changes in ({"beam_alpha": 2**31}, {"length_penalty": -(2**31)}):
        (answer,) = generator.generate(ENDS, options(beams=2, gamma="auto", **changes))
        assert answer.error is None


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_text_and_no_list_is_refused_at_the_call(generator):
    for texts in (3, None, b"My sister", {"text": "My sister"}, np.array("My sister")):
        assert "give a string, or a list" in message_of(generator.generate, texts)
    for ids in (5, None, b"My sister", "My sister", np.array(3), jnp.array(3)):
        assert "a list with the ids of each" in message_of(generator.generate_ids, ids)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("place", [-1, 2**31, 1.5, "1", True, None])
def test_a_place_that_is_no_index_is_refused_at_the_call(generator, place):
    message = f"is {place!r}: give"
    assert f"first {message}" in message_of(lambda: generator.generate("a", first=place))
    assert f"first {message}" in message_of(lambda: generator.generate_ids([[3]], first=place))
    assert f"place {message}" in message_of(lambda: generator.stream("a", place=place))


def test_the_last_places_have_slots(generator, greedy_alone):
    answers = generator.generate(TEXTS[:3], options(batch_size=2), first=2**31 - 3)
    assert_same(answers, [greedy_alone[text] for text in TEXTS[:3]])


@pytest.mark.usefixtures("unchecked")
def test_a_model_in_place_of_its_name_is_refused(generator, tiny_pair):
    names = {"target": tiny_pair / "target", "draft": tiny_pair / "draft"}
    for name in names:
        message = message_of(Generator.load, **names | {name: generator.target})
        assert message.startswith(
            f"{name} is a {type(generator.target).__name__}: give a directory"
        )
        # Else the current folder, or the packaged draft.
        message = message_of(Generator.load, **names | {name: ""})
        assert message.startswith("a directory or model is named '': give")


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


def test_threads_share_a_generator(generator, greedy_alone):
    def decode(text):
        (answer,) = generator.generate(text, GREEDY)
        (*_, event) = generator.stream(text, GREEDY)
        return answer, event.generation

    with ThreadPoolExecutor(4) as threads:
        for text, (answer, generation) in zip(TEXTS, threads.map(decode, TEXTS), strict=True):
            assert answer == greedy_alone[text] and generation == answer[0]


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
    rows, text = generator.target.vocab_size, "¿"
    other = dataclasses.replace(generator, vocabulary=ByteVocabulary())
    most = max(ByteVocabulary().encode(text))
    said = f"has id {most} and the target has {rows} ids: give the target's vocabulary"
    assert str(other.generate([text])[0].error) == f"the text {said}"
    with pytest.raises(InputError, match=f"the output_prefix {said}"):
        list(other.generate(["a"], options(output_prefix=text)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "int16"}, "weights is 'int16'"),
        ({"kv": "fp8"}, "kv is 'fp8'"),
        ({"options": GREEDY}, "options is GenerateOptions: give DraftOptions"),
        ({"shardings": 5}, "shardings are 5: give a function"),
    ],
)
def test_arguments_are_checked_before_a_model_is_looked_for(arguments, message):
    assert message in message_of(Generator.load, "no/model", **arguments)
    assert "give distributions.sampling" in message_of(DraftOptions, settings=0.7)


@pytest.mark.usefixtures("unchecked")
def test_an_open_target_has_its_vocabulary_and_a_draft_has_a_name(tiny_pair):
    target = open_model(tiny_pair / "target")
    message = message_of(Generator.load, target, vocabulary="bytes")
    assert message == "vocabulary is bytes and the model is open: give it to open_model"
    assert message_of(Generator.load, target, target).startswith("draft is a StoredModel: give a")


def test_models_are_shown_without_their_weights(generator, tiny_pair):
    loaded = load(tiny_pair / "target")
    assert "weights is 'int16'" in message_of(loaded.bind, "int16")
    for model in (loaded, loaded.bind(), generator.target, generator.draft, generator):
        assert len(repr(model)) < 200


def test_ids_are_decoded_as_the_texts_they_are_of(generator, greedy_alone):
    ids = [generator.tokenize(text, GREEDY) for text in TEXTS]
    for rows in (ids, map(np.asarray, ids), map(jnp.asarray, ids), iter(ids)):
        answers = generator.generate_ids(rows, gamma=3, max_decode_len=16)
        assert [answer[0].output for answer in answers] == [
            greedy_alone[text][0].output for text in TEXTS
        ]


def test_numbers_of_numpy_are_options_too(generator, greedy_alone):
    given = {"gamma": "auto", "batch_size": np.int64(2), "max_decode_len": np.int32(16)}
    given |= {"top_p": np.float32(0), "widths": (), "suppress_tokens": [np.int64(3)]}
    made = GenerateOptions(**given)
    assert [type(getattr(made, name)) for name in ("batch_size", "top_p")] == [int, float]
    assert type(made.suppress_tokens[0]) is int
    answers = generator.generate(TEXTS, made, suppress_tokens=None)
    assert texts_of(answers) == [greedy_alone[text][0].output for text in TEXTS]


@pytest.mark.parametrize(
    ("error", "message"),
    [(InputError("no memory"), "no memory"), (KeyboardInterrupt(), "decoding was interrupted")],
    ids=["error", "interrupt"],
)
@pytest.mark.parametrize("ask", [lambda answers: answers[0], list], ids=["index", "iteration"])
def test_a_failure_is_raised_again(error, message, ask):
    """A notebook's cell that is run again would else see no answers, and no error."""

    def failing():
        raise error
        yield

    answers = Answers(failing())
    with pytest.raises(type(error)):
        ask(answers)
    for _ in range(2):
        assert message_of(ask, answers).startswith(message)


@pytest.mark.parametrize(
    ("of_checkpoint", "given"), [({"length_penalty": 1.0}, {}), ({}, {"length_penalty": 0.0})]
)
def test_a_length_penalty_leaves_beam_alpha_without_effect(generator, of_checkpoint, given):
    own = dataclasses.replace(generator.plain(), defaults=of_checkpoint)
    answers = own.generate(TEXTS[0], beams=2, beam_alpha=1.0, max_decode_len=8, **given)
    assert message_of(lambda: list(answers)).startswith("beam_alpha is 1.0 and a length_penalty r")


def test_assumed_costs_replace_those_of_earlier_calls(generator):
    own, options = dataclasses.replace(generator), dataclasses.replace(GREEDY, gamma="auto")
    proposed = []
    for c in (0.01, 3.0):
        own.assume(options, Costs.by_formula(c=c))
        proposed.append(sum(answer[0].proposed or 0 for answer in own.generate(TEXTS, options)))
    assert proposed[0] > 0 and proposed[1] == 0
    (batch,) = text_batches(own, TEXTS[:1], options)
    message = message_of(own.plain().engine(options).costs, batch)
    assert message == "there is no draft whose costs could be measured: give one"


@pytest.mark.usefixtures("unchecked")
def test_ids_that_the_target_does_not_have_are_their_inputs_error(generator):
    cases = [
        ([], "has no ids"),
        ([5, 128, 1], "an input's id is 128: give at least 1, at most 127"),
        ([5, 0, 1], "id is 0: give at least 1"),
        ([2.0], "id is 2.0: give a whole number"),
        ("My sister", "id is 'M'"),
        (7, "an input is 7: give a list of ids"),
        (b"My sister", "an input is b'My sister': give"),
        ([True, False], "id is True"),
        ([5] * 600, "the text has 600 tokens and the encoder takes"),
    ]
    *bad, good = generator.generate_ids([*(row for row, _ in cases), [5, 1]], GREEDY)
    for answer, (_, message) in zip(bad, cases, strict=True):
        assert message in str(answer.error)
    assert good[0].output_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_alpha": 1.0}, "beam_alpha is 1.0 and beams 0, which does not search: leave it out"),
        ({"length_penalty": 1.0}, "length_penalty is 1.0 and beams 0"),
        ({"early_stopping": False}, "early_stopping is False and beams 0"),
        (
            {"beams": 2, "stop": "a"},
            "stop is ('a',) and beams 2, a search that ignores it: leave it",
        ),
        ({"beams": 2, "rescale_log_probs": True}, "rescale_log_probs is True and beams 2"),
        ({"beams": 2, "verifier": "coupled"}, "verifier is 'coupled' and beams 2"),
        ({"beams": 2, "verifier": "token", "lenience": 0.5}, "verifier is 'token' and beams 2"),
        ({"num_decodes": 2}, "num_decodes is 2, temperature 0.0 and top_k 0, which gives one text"),
        ({"num_decodes": 2, "temperature": 1.0, "top_k": 1}, "temperature 1.0 and top_k 1"),
        (
            {"output_prefix": "Das", "forced_bos_token_id": 5},
            "forced_bos_token_id is 5 and an output_prefix comes first: leave it out",
        ),
        (
            {"verifier": "tree", "widths": (2, 2, 2, 2)},
            "gamma is 3 and widths are (2, 2, 2, 2): give at most 3",
        ),
        ({"verifier": "tree", "widths": (2, 2), "gamma": 1}, "gamma is 1 and widths are (2, 2)"),
        ({"top_k": 3}, "top_k is 3 and temperature 0, which takes the likeliest token: leave it"),
        ({"top_p": 0.9}, "top_p is 0.9 and temperature 0"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(changes, message):
    assert message in message_of(options, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", (3,)),
        ("bad_words_ids", ((1.5, 2),)),
        ("suppress_tokens", ("a",)),
        ("begin_suppress_tokens", (None,)),
        ("forced_eos_token_id", (1.5,)),
        ("forced_bos_token_id", -7),
        ("sequence_bias", ((2, 1.0),)),
        ("sequence_bias", (((2,),),)),
        ("sequence_bias", (((2,), "x"),)),
        ("sequence_bias", (((2,), float("nan")),)),
        ("widths", ("2",)),
        ("widths", (True,)),
        ("sequence_bias", (((2,), True),)),
        ("length_penalty", float("inf")),
    ],
)
def test_values_within_options_are_checked(name, value):
    assert message_of(options, **{name: value}).startswith(f"{name} ")


@pytest.mark.parametrize(
    "changes",
    [
        {"gamma": 16, "min_decode_len": 16},
        {"beams": 3, "num_decodes": 3},
        {"verifier": "tree", "widths": (2, 2, 2)},
        {"suppress_tokens": (0,), "forced_bos_token_id": 0},
        {"output_prefix": "Das", "forced_bos_token_id": -1},
        {"suppress_tokens": range(3, 5)},
        {"max_source_len": 2**63 - 1, "top_k": 2**63 - 1, "temperature": 1.0},
    ],
)
def test_values_at_their_limits_are_accepted(changes):
    assert options(**changes)


def test_an_option_that_is_set_comes_before_the_checkpoints_even_if_it_is_0():
    of_checkpoint = {"min_decode_len": 5, "suppress_tokens": (3,), "length_penalty": 2.0}
    settled = options(min_decode_len=0, suppress_tokens=[]).settled(of_checkpoint)
    assert (settled["min_decode_len"], settled["suppress_tokens"]) == (0, ())
    assert settled["length_penalty"] == 2.0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_draft_that_does_not_fit_is_refused_with_and_without_slots(generator, batch_size):
    ask = options(batch_size=batch_size, verifier="tree")
    answers = generator.with_draft(CopyDraft(generator.target.vocab_size)).generate(TEXTS, ask)
    assert "CopyDraft has no propose_tree" in message_of(list, answers)


def test_what_a_search_leaves_out_is_said(generator):
    assert "a beam search drafts if gamma is a number" in generator.verdict(
        options(beams=2, gamma="auto")
    )
    # A checkpoint's settings of searches are no options of other decoding.
    assert without_open(options(), {"length_penalty": 2.0}).length_penalty is None
    assert without_open(options(beams=2), {"length_penalty": 2.0}).length_penalty == 2.0


def test_a_checkpoints_settings_that_the_options_exclude_are_not_made_options():
    of_checkpoint = {"max_decode_len": 5, "min_decode_len": 7}
    shorter = without_open(options(max_decode_len=None, gamma=5), of_checkpoint)
    assert (shorter.max_decode_len, shorter.min_decode_len) == (5, 5)
    with pytest.raises(InputError, match="gamma is 9 and max_decode_len 5: give"):
        without_open(options(max_decode_len=None, gamma=9), of_checkpoint)
    prefixed = without_open(options(output_prefix="a"), {"forced_bos_token_id": 7})
    assert prefixed.rules({"forced_bos_token_id": 7})["forced_bos_token_id"] == 7


# --- names that other programs have ----------------------------------------------


def test_an_option_under_anothers_name_is_refused_with_ours(generator):
    expected = "there is no option 'max_length': it is 'max_decode_len' here"
    for refuse in (
        GenerateOptions,
        functools.partial(generator.generate, TEXTS),
        functools.partial(generator.generate_ids, [[1]]),
        functools.partial(generator.stream, TEXTS[0]),
        functools.partial(dataclasses.replace, GREEDY),
    ):
        assert message_of(refuse, max_length=2) == expected


def test_other_names_are_answered_too_and_none_is_one_of_ours():
    cases = {
        "num_beams": "there is no option 'num_beams': it is 'beams' here",
        "do_sample": "there is no option 'do_sample': it is 'temperature' here",
        "output_scores": "there is no option 'output_scores': an output has one score",
        "temprature": "there is no option 'temprature', did you mean 'temperature'?",
        "zzz": "there is no option 'zzz': choose from gamma, temperature,",
    }
    for name, message in cases.items():
        assert message_of(GenerateOptions, **{name: 2}).startswith(message)
    fields = {field.name for field in dataclasses.fields(GenerateOptions)}
    assert not fields & {*names._OURS, *names._ABSENT}
    assert pickle.loads(pickle.dumps(GREEDY)) == copy.deepcopy(GREEDY) == GREEDY


# --- limits that share programs ----------------------------------------------------

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


def test_outputs_of_lenient_verification_depend_on_gamma_even_at_temperature_0():
    assert GenerateOptions(verifier="token").repeats
    assert not GenerateOptions(verifier="token", lenience=0.5).repeats
    assert not GenerateOptions(temperature=1.0).repeats
    assert GenerateOptions(temperature=1.0, verifier="coupled").repeats


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
    assert generator.room(batch, options(max_decode_len=17)) == 17


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
