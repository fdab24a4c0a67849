"""Acceptance rates: three ways to measure them agree, and each draft gets its own."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.acceptance import _Repeated, best, measure, table
from spec_t5x.labs.benchmark.achieved import achieved
from spec_t5x.labs.benchmark.options import AcceptanceOptions
from spec_t5x.labs.estimates import Estimate
from spec_t5x.types import EOS_ID
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["a bc", "de f", "g hij", "klm", "no", "p qr s", "tu", "vw xyz"]
# Intervals resample the sources.
SOURCES = [f"{one} {other}" for one in TEXTS for other in TEXTS]
VOCABULARY = ByteVocabulary(extra_ids=0)


def agree(*estimates: Estimate) -> bool:
    """Returns True if the intervals have a point in common."""
    return max(each.low for each in estimates) <= min(each.high for each in estimates)


@pytest.fixture(scope="module")
def toy() -> Generator:
    """Provides a T5 of some thousand parameters that writes bytes."""
    return Generator(
        target=tiny_t5(0, vocab_size=VOCABULARY.vocab_size),
        vocabulary=VOCABULARY,
        max_source_len=16,
    )


@pytest.fixture(scope="module")
def toy_drafts(toy):
    # Drafts of one shape share their programs.
    return {
        "near": TransformerDraft(disturbed(toy.target, 0.08)),
        "far": TransformerDraft(disturbed(toy.target, 0.3, seed=1)),
    }


@pytest.fixture(scope="module")
def measured(toy, toy_drafts):
    """Provides rows at temperature 1, and what was reported meanwhile."""
    options = AcceptanceOptions(
        num_tokens=5_000,
        temperatures=(1.0,),
        leniences=(1.0, 0.4),
        batch_size=64,
        max_decode_len=24,
        decoded_texts=256,
        gamma=5,
        # At 95 %, one interval in twenty would not overlap by chance, of each pair.
        confidence=0.999,
    )
    told = []
    # As in the tests themselves, which then find the programs compiled.
    with jax.numpy_rank_promotion("raise"):
        return measure(toy, toy_drafts, SOURCES, options, lambda *state: told.append(state)), told


def test_corollary_3_6_the_loops_statistic_and_observed_acceptance_agree(measured):
    rows, _ = measured
    strict, lenient = (
        {row.draft: row for row in rows if row.lenience == lenience} for lenience in (1.0, 0.4)
    )
    for name, row in strict.items():
        assert row.decoded.num_texts == 256 and row.num_texts == len(SOURCES)
        assert row.num_tokens == row.alpha.count == 5_000 and row.share_proposed == 1
        assert agree(row.alpha, row.decoded.alpha, row.decoded.observed), row
        # The intervals are not merely wide.
        assert row.alpha.high - row.alpha.low < 0.1
        assert lenient[name].alpha.value > row.alpha.value and lenient[name].decoded is None
    # Another draft's do not agree with them.
    assert not agree(strict["near"].decoded.observed, strict["far"].alpha)
    assert not agree(strict["near"].alpha, strict["far"].decoded.alpha)


def test_progress_ends_at_the_total_and_tables_and_json_hold_the_rows(measured):
    rows, told = measured
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    *before, last = told
    assert last == (5_000, 5_000, "all measured")
    assert {what.partition(":")[0] for *_, what in before} == {"temperature 1"}
    observed = json.loads(json.dumps(dataclasses.asdict(rows[0])))["decoded"]["observed"]
    assert observed["low"] < observed["high"]
    lines = [re.sub(" +", " ", line) for line in str(table(rows)).splitlines()]
    assert lines[2].startswith(f"| near | T = 1 | 1 | {rows[0].alpha.value:.3f} (")
    assert sum(line.startswith("| ") for line in lines) == 1 + len(rows)
    # Notes are those of the columns.
    alone = str(table([dataclasses.replace(row, decoded=None) for row in rows]))
    assert "⁴ Share" in lines[-1] and "²" in alone and "³" not in alone


def test_argmax_goes_once_through_the_texts(toy, toy_drafts):
    options = AcceptanceOptions(
        temperatures=(0.0,),
        leniences=(1.0, 1e-30),
        batch_size=8,
        max_decode_len=24,
        decoded_texts=64,
        gamma=5,
    )
    strict, lenient = measure(toy, {"near": toy_drafts["near"]}, TEXTS, options)
    assert (strict.lenience, lenient.lenience) == (1.0, 1e-30)
    assert strict.num_texts == strict.decoded.num_texts == len(TEXTS)
    assert strict.num_tokens < options.num_tokens
    # Betas are 0 or 1, and the observed rate is their mean over what was verified (in float32).
    assert strict.decoded.alpha.value == pytest.approx(strict.decoded.observed.value, rel=1e-6)
    assert agree(strict.alpha, strict.decoded.observed)
    # Any token is at least that likely.
    assert lenient.alpha.value == 1 > strict.alpha.value
    assert strict.sampling == "argmax"


def test_sampled_texts_repeat_with_other_keys_and_sources_are_the_units(toy):
    options = GenerateOptions(temperature=1.0, batch_size=3, max_decode_len=8)
    repeated = _Repeated(toy, TEXTS[:4], options)

    def keys(first, limit):
        batches = list(repeated.batches(options, first, limit))
        assert [text for batch in batches for text in batch.texts] == (TEXTS[:4] * 3)[:limit]
        rows = [jax.random.key_data(batch.keys)[: len(batch.texts)] for batch in batches]
        return np.concatenate(rows)

    whole = keys(0, 9)
    assert len(np.unique(whole, axis=0)) == 9
    np.testing.assert_array_equal(keys(4, 5), whole[4:])
    greedy = dataclasses.replace(options, temperature=0.0)
    for limit, expected in ((None, 4), (9, 4), (2, 2)):
        once = list(repeated.batches(greedy, 0, limit))
        assert [text for batch in once for text in batch.texts] == TEXTS[:expected]
    assert repeated.numbers(3, 4).tolist() == [3, 0, 1, 2]
    # Of one source, each output is a unit.
    assert _Repeated(toy, TEXTS[:1], options).numbers(3, 4).tolist() == [3, 4, 5, 6]


@pytest.mark.usefixtures("unchecked")
def test_acceptance_is_pooled_over_outputs_and_resampled_by_source():
    def output(alpha, efficiency, calls, accepted, verified):
        counts = {"accepted_by_position": accepted, "verified_by_position": verified}
        return types.SimpleNamespace(
            alpha=alpha, block_efficiency=efficiency, target_calls=calls, **counts
        )

    # Rounding took the second one's alpha above 1; the third verified no draft.
    outputs = [
        output(0.25, 1.5, 4, [2, 0], [4, 2]),
        output(1.0000001, 3.0, 2, [2, 2], [2, 2]),
        output(None, 1.0, 3, [0, 0], [0, 0]),
    ]
    found = achieved(outputs, np.array([0, 1, 1]))
    assert (found.num_texts, found.target_calls) == (3, 9)
    assert found.block_efficiency.value == pytest.approx((6 + 6 + 3) / 9)
    assert found.alpha.value == pytest.approx((0.25 * 6 + 1.0 * 4) / 10, abs=1e-12)
    assert found.observed.value == pytest.approx(6 / 10)
    assert found.acceptance_by_position == pytest.approx([4 / 6, 2 / 4])
    # The bounds of two sources are their rates, of which each resample holds one or both.
    for estimate, bounds in (
        (found.block_efficiency, (6 / 4, 9 / 5)),
        (found.observed, (2 / 6, 1)),
    ):
        assert (estimate.num_texts, estimate.low, estimate.high) == pytest.approx((2, *bounds))


def test_texts_end_at_the_first_of_several_ids(toy):
    options = {"max_decode_len": 24, "batch_size": 8}

    def written(generator):
        answers = generator.plain().generate(TEXTS, GenerateOptions(**options))
        return [answer[0].output_ids for answer in answers]

    whole = written(toy)
    vocabulary = ByteVocabulary(extra_ids=0)
    # A byte in the midst of the first text.
    vocabulary.eos_ids = (EOS_ID, whole[0][3])
    generator = dataclasses.replace(toy, vocabulary=vocabulary)
    num_tokens = sum(map(len, written(generator)))
    assert num_tokens < sum(map(len, whole))
    measured = AcceptanceOptions(temperatures=(0.0,), **options)
    (row,) = measure(generator, {"copy": CopyDraft(toy.target.vocab_size)}, TEXTS, measured)
    assert row.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"temperatures": ()}, "temperatures is empty"),
        # A value that gin may bind.
        ({"temperatures": 1.0}, r"temperatures is 1.0: give a list, as in \(1.0,\)"),
        ({"temperatures": ("a",)}, "temperature is 'a': give a value of type float"),
        ({"top_ps": ("a",)}, "top_p is 'a': give a value of type float"),
        ({"seed": "a"}, "seed is 'a': give a value of type int"),
        ({"leniences": (0.0,)}, "lenience is 0.0"),
        ({"drafts": ("copy", "copy")}, "give each of them once"),
        (
            {"temperatures": (0.0,), "top_ks": (40,)},
            r"top_ks is \(40,\) and every temperature is 0",
        ),
    ],
)
def test_options_that_cannot_be_measured_are_refused(changes, message, unchecked):
    with pytest.raises(InputError, match=message):
        AcceptanceOptions(**changes)
    assert AcceptanceOptions(temperatures=[1.0]).temperatures == (1.0,)


def test_standardizations_are_each_temperature_with_each_filter():
    options = AcceptanceOptions(temperatures=(0, 0.5, 1), top_ks=(0, 1, 40), top_ps=(0.9,))
    found = [(d.temperature, d.top_k, d.top_p) for d in options.standardizations()]
    # Temperature 0 has one, which top-k 1 is, too.
    assert found == [
        (0.0, 0, 0.0),
        *((t, k, p) for t in (0.5, 1.0) for k, p in ((0, 0.0), (40, 0.0), (0, 0.9))),
    ]


@pytest.mark.parametrize(
    ("draft", "texts", "message"),
    [
        (None, TEXTS, "no draft to measure"),
        (CopyDraft(VOCABULARY.vocab_size), [], "no text to generate from"),
        (
            CopyDraft(VOCABULARY.vocab_size),
            [*TEXTS, "x" * 40],
            "the text has 41 tokens and the encoder takes 16",
        ),
        (UniformDraft(7), TEXTS, "the draft has 7 tokens and the target"),
    ],
)
def test_nothing_to_measure_is_refused(toy, draft, texts, message):
    with pytest.raises(InputError, match=message):
        measure(toy, {"x": draft} if draft else {}, texts)


def test_the_last_sentence_names_the_best_exact_draft(measured):
    near, lenient, far, _ = measured[0]
    shown = best([far, near, lenient])
    assert shown.startswith("Best: near at T = 1, ") and shown.endswith(" tokens a target call.")
    assert best([lenient]) is None
