"""Options of decoding: values, names and what has no effect."""

import copy
import dataclasses
import functools
import pickle

import pytest

from spec_t5x import names
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.generation import GenerateOptions
from spec_t5x.labs.benchmark.options import AcceptanceOptions
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.options import _NUMBERS
from tests.checkpoints.faults import message_of
from tests.generation.cases import GREEDY, options


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gamma": -1}, "gamma is -1: give a whole number from 0"),
        (
            {"gamma": 9, "max_decode_len": 8},
            "gamma is 9 and max_decode_len 8: give a whole number from 0",
        ),
        (
            {"min_decode_len": 9, "max_decode_len": 8},
            "min_decode_len is 9 and outputs have at most 8 tokens: give a larger max_decode_len",
        ),
        ({"num_decodes": 0}, "num_decodes is 0"),
        ({"max_source_len": 1}, "max_source_len is 1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": 1e39}, "temperature is 1e+39: give a number of at most 3e+38"),
        ({"length_penalty": -1e39, "beams": 2}, "length_penalty is -1e+39: give a number of at"),
        ({"top_k": 5, "top_p": 0.9}, "top_k is 5 and top_p is 0.9"),
        ({"verifier": "trust"}, "verifier is 'trust'"),
        ({"beams": -1}, "beams is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give 1e-30 to 1e30"),
        # Logits that are divided by it leave the range of float32.
        ({"repetition_penalty": 1e-38}, "repetition_penalty is 1e-38: give 1e-30 to 1e30"),
        ({"repetition_penalty": 2e38}, "repetition_penalty is 2e+38: give 1e-30 to 1e30"),
        # Twice as much is infinite.
        (
            {"sequence_bias": (((2,), 2e38),)},
            "sequence_bias has ((2,), 2e+38): give pairs (ids, num",
        ),
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


@pytest.mark.parametrize(
    "make",
    [
        GenerateOptions,
        ReproduceOptions,
        functools.partial(TrainOptions, steps=1),
        functools.partial(AcceptanceOptions, drafts=("copy",)),
    ],
    ids=["generate", "reproduce", "train", "acceptance"],
)
def test_seeds_have_32_bits(make):
    make(seed=2**32 - 1)
    # JAX would take 2**32 for 0.
    for seed in (-1, 2**32, 2**63):
        expected = f"seed is {seed}: give at least 0, at most 4294967295"
        assert message_of(make, seed=seed) == expected


NUMBERS = [
    (kind, field.name)
    for kind in (GenerateOptions, Models)
    for field in dataclasses.fields(kind)
    if field.type in _NUMBERS
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), NUMBERS)
@pytest.mark.parametrize("value", [True, False])
def test_no_number_is_true_or_false(kind, name, value):
    remedy = "give a whole number from 0" if name == "gamma" else "give a value of type "
    message = message_of(kind, **{name: value})
    assert message.startswith(f"{name} is {value}") and remedy in message


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


def test_outputs_of_lenient_verification_depend_on_gamma_even_at_temperature_0():
    assert GenerateOptions(verifier="token").repeats
    assert not GenerateOptions(verifier="token", lenience=0.5).repeats
    assert not GenerateOptions(temperature=1.0).repeats
    assert GenerateOptions(temperature=1.0, verifier="coupled").repeats
