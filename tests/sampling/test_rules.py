"""Tests of the rules of decoding, place by place against transformers' processors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.sampling.rules import Places, rules

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES = {"d_model": 2, "d_kv": 1, "d_ff": 1, "num_heads": 1, "num_layers": 1, "vocab_size": 7}
MODEL = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES))
VOCAB = 7
EOS = (1,)
# Places of each text: so many that n-grams, phrases and repeated tokens occur.
WIDTH, ROWS = 12, 7
# Tokens of each row's prompt, and where the row ends at the latest; the last row has one token.
STARTS, LIMITS = (0, 0, 2, 0, 3, 1, 0), (11, 6, 11, 9, 8, 10, 1)


def texts(seed=0):
    """Draws tokens of few kinds behind the start token."""
    drawn = np.random.default_rng(seed).integers(2, VOCAB, (ROWS, WIDTH)).astype(np.int32)
    drawn[:, 0] = 0
    return drawn


# Arguments of ``rules`` and of transformers' GenerationConfig.
CASES = {
    "suppressed": {"suppress_tokens": (3, 5)},
    "suppressed at the beginning": {"begin_suppress_tokens": (2, 1)},
    "forced first": {"forced_bos_token_id": 4},
    "the start token forced first": {"forced_bos_token_id": 0},
    "forced first and last": {"forced_bos_token_id": 4, "forced_eos_token_id": (1,)},
    "forced first, suppressed after it": {
        "forced_bos_token_id": 4,
        "begin_suppress_tokens": (2, 4),
    },
    "forced last": {"forced_eos_token_id": (1,)},
    "one of several last": {"forced_eos_token_id": (1, 3)},
    "one of several last, another suppressed": {
        "forced_eos_token_id": (1, 3),
        "suppress_tokens": (1, 5),
    },
    "forced bad words": {"forced_bos_token_id": 4, "bad_words_ids": ((4,), (3,))},
    "a bad word that may be last": {"forced_eos_token_id": (1, 3), "bad_words_ids": ((3,),)},
    "a bad word": {"bad_words_ids": ((3,),)},
    "the end is no bad word": {"bad_words_ids": ((1,), (4,))},
    "none of several ends is a bad word": {"bad_words_ids": ((1,), (5,), (4,)), "eos": (1, 5)},
    "an end after another token is one": {"bad_words_ids": ((3, 1), (1,))},
    "bad words of several tokens": {"bad_words_ids": ((3, 4), (2, 2, 2), (5,))},
    "a phrase that begins with the start token": {
        "bad_words_ids": (tuple(texts()[3, :5].tolist()),)
    },
    "phrases with the start token that begin before a text": {
        "bad_words_ids": ((3, 0, 5), (0, 0, 6), (0, 2))
    },
    "penalty": {"repetition_penalty": 1.7},
    "bonus": {"repetition_penalty": 0.6},
    "no token twice": {"no_repeat_ngram_size": 1},
    "no pair twice": {"no_repeat_ngram_size": 2},
    "no triple twice": {"no_repeat_ngram_size": 3},
    "n-grams longer than any text": {"no_repeat_ngram_size": 40},
    "five bad words": {"bad_words_ids": ((3, 4), (2, 2, 2), (4, 3), (5, 2), (2, 3))},
    "biases": {"sequence_bias": (((3,), -2.5), ((2, 4), 3.0), ((0, 5), 1.5))},
    "biases of a phrase that is given twice": {
        "sequence_bias": (((3,), -2.5), ((3,), 1.0), ((2, 4), 3.0), ((2, 4), -1.0))
    },
    "bad words that are given twice": {"bad_words_ids": ((3, 4), (5,), (3, 4), (5,))},
    "a bias of a bad word": {"bad_words_ids": ((3, 4),), "sequence_bias": (((3, 4), 9.0),)},
    "at least so many": {"min_decode_len": 4},
    "ends that are several": {"min_decode_len": 3, "eos": (1, 5)},
    "everything": {
        "min_decode_len": 5,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": (6,),
        "begin_suppress_tokens": (3,),
        "forced_eos_token_id": (1,),
        "bad_words_ids": ((5, 5), (4,)),
        "sequence_bias": (((2,), 1.25),),
    },
}


def lists(value):
    """Makes lists of tuples, and of those in them."""
    return [lists(each) for each in value] if isinstance(value, tuple) else value


def theirs(logits, tokens, start, limit, case):
    """Returns the logits after ``tokens`` by transformers' processors."""
    values = {name: lists(value) for name, value in case.items() if name != "eos"}
    values["min_new_tokens"] = values.pop("min_decode_len", None)
    config = transformers.GenerationConfig(**values, max_length=limit + 1)
    config._eos_token_tensor = torch.tensor(case.get("eos", EOS))
    processors = MODEL._get_logits_processor(config, input_ids_seq_length=start + 1)
    given = torch.tensor(np.array(tokens)[None]).long()
    return processors(given, torch.tensor(logits[None])).numpy()[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_place_has_the_logits_of_transformers(case):
    made = rules(VOCAB, case.get("eos", EOS), **{n: v for n, v in case.items() if n != "eos"})
    tokens = texts()
    starts, limits = np.array(STARTS, np.int32), np.array(LIMITS, np.int32)
    # Places of a block that begins elsewhere in each row.
    lengths = starts[:, None] + np.arange(7, dtype=np.int32)[None, :]
    lengths = np.minimum(lengths, limits[:, None] - 1)
    logits = np.random.default_rng(1).normal(0, 3, (*lengths.shape, VOCAB)).astype(np.float32)
    places = Places(tokens=tokens[:, None], lengths=lengths, starts=starts, limits=limits)
    found = np.asarray(made(jnp.asarray(logits), places))
    changed = 0
    for row, place in np.ndindex(lengths.shape):
        given = tokens[row, : lengths[row, place] + 1]
        expected = theirs(logits[row, place], given, STARTS[row], LIMITS[row], case)
        # PyTorch multiplies by the inverse of a penalty.
        message = f"{row}, {place}"
        np.testing.assert_allclose(found[row, place], expected, rtol=2e-7, err_msg=message)
        changed += not np.array_equal(expected, logits[row, place])
    assert changed or case in (CASES["n-grams longer than any text"],)


def place_after(tokens, lengths):
    """Makes places of one row, whose limit is the next token."""
    lengths, starts = np.array([lengths]), np.array([0])
    return Places(tokens=tokens, lengths=lengths, starts=starts, limits=np.array([4]))


def test_each_place_of_a_tree_has_its_own_text():
    made = rules(VOCAB, EOS, no_repeat_ngram_size=2)
    tokens = np.array([[[0, 3, 4, 3, 9], [0, 3, 5, 3, 9]]], np.int32)
    # The result is in float32 for logits of any type.
    found = made(jnp.zeros((1, 2, VOCAB), jnp.bfloat16), place_after(tokens, [3, 3]))
    assert np.isinf(found[0]).nonzero()[1].tolist() == [4, 5]


def test_the_start_token_may_be_the_token_that_ends_a_text():
    """A padding token is not the start token, which is the end here."""
    made = rules(VOCAB, EOS, repetition_penalty=2.0, bad_words_ids=((1, 0, 3),), start_id=1)
    places = place_after(np.zeros((1, 1, 3), np.int32), [0, 1])
    found = made(jnp.ones((1, 2, VOCAB)), places)
    np.testing.assert_array_equal(found[0, 0], [1, 0.5, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(found[0, 1], [0.5, 0.5, 1, -np.inf, 1, 1, 1])


def test_phrases_of_similar_sizes_share_programs():
    def compiled_for(*words):
        return [leaf.shape for leaf in jax.tree.leaves(rules(VOCAB, EOS, bad_words_ids=words))]

    pairs = list(itertools.product(range(2, VOCAB), repeat=2))
    two = compiled_for((3, 4, 2), (2, 3))
    assert two == compiled_for((3, 4, 2, 5), *pairs[:15])
    assert two != compiled_for((3, 4, 2, 5, 5), (2, 3)) and two != compiled_for(*pairs[:17])


def test_neutral_values_are_no_rules():
    assert (
        rules(VOCAB, EOS, min_decode_len=0, repetition_penalty=1.0, bad_words_ids=((1,),)) is None
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suppress_tokens": (VOCAB,)}, "suppress_tokens has token 7 and the model 7 tokens"),
        ({"begin_suppress_tokens": (2, 7)}, "begin_suppress_tokens has token 7"),
        ({"forced_bos_token_id": 7}, "forced_bos_token_id has token 7"),
        ({"forced_eos_token_id": (1, 7)}, "forced_eos_token_id has token 7"),
        ({"sequence_bias": (((2, 7), 1.5),)}, "sequence_bias has token 7"),
        ({"bad_words_ids": ((2, -1),)}, "bad_words_ids has token -1"),
        ({"bad_words_ids": ((),)}, "an empty list of ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give 1e-30 to 1e30"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1: give at least 0"),
        ({"min_decode_len": -2}, "min_decode_len is -2: give at least 0"),
        (
            {"forced_bos_token_id": 5, "suppress_tokens": (3, 5)},
            r"^forced_bos_token_id and suppress_tokens have \[5\]: leave one out",
        ),
        (
            {"forced_eos_token_id": (1, 3), "suppress_tokens": (3, 1, 2)},
            r"^forced_eos_token_id and suppress_tokens have \[1, 3\]: leave one out",
        ),
    ],
)
def test_impossible_values_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        rules(VOCAB, EOS, **given)
