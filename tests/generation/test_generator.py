"""Text in, text out: loading, inputs and what is refused."""

import dataclasses
import functools
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x import errors
from spec_t5x.checkpoints.loading import open_model
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.faults import message_of
from tests.generation.cases import GREEDY, SAMPLED, TEXTS, assert_same, options, texts_of

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


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


def test_threads_share_a_generator(generator, greedy_alone):
    def decode(text):
        (answer,) = generator.generate(text, GREEDY)
        (*_, event) = generator.stream(text, GREEDY)
        return answer, event.generation

    with ThreadPoolExecutor(4) as threads:
        for text, (answer, generation) in zip(TEXTS, threads.map(decode, TEXTS), strict=True):
            assert answer == greedy_alone[text] and generation == answer[0]


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
        ([5] * 600, "the text has 600 tokens and the encoder takes 48"),
    ]
    *bad, good = generator.generate_ids([*(row for row, _ in cases), [5, 1]], GREEDY)
    for answer, (_, message) in zip(bad, cases, strict=True):
        assert message in str(answer.error)
    assert good[0].output_ids


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
