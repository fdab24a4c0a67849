"""Acceptance rates: three ways to measure them agree, and each draft gets its own."""

import dataclasses
import json
import re

import jax
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.acceptance import (
    AcceptanceOptions,
    AcceptanceRow,
    Achieved,
    best,
    measure,
    table,
)
from spec_t5x.testing.toy_models import disturbed, tiny_t5
from spec_t5x.theory.estimates import Estimate
from spec_t5x.types import EOS_ID

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["a bc", "de f", "g hij", "klm", "no", "p qr s", "tu", "vw xyz"]
# For intervals: what is drawn again is the source.
SOURCES = [f"{one} {other}" for one in TEXTS for other in TEXTS]
VOCABULARY = ByteVocabulary(extra_ids=0)


def agree(*estimates: Estimate) -> bool:
    """Whether the intervals have a point in common."""
    return max(each.low for each in estimates) <= min(each.high for each in estimates)


@pytest.fixture(scope="module")
def toy() -> Generator:
    """A T5 of some thousand parameters that writes bytes."""
    return Generator(
        target=tiny_t5(0, vocab_size=VOCABULARY.vocab_size),
        vocabulary=VOCABULARY,
        max_source_len=16,
    )


@pytest.fixture(scope="module")
def toy_drafts(toy):
    # Of one shape: they share their programs.
    return {
        "near": TransformerDraft(disturbed(toy.target, 0.08)),
        "far": TransformerDraft(disturbed(toy.target, 0.3, seed=1)),
    }


@pytest.fixture(scope="module")
def rows(toy, toy_drafts):
    """All that is measured of the toy, at temperature 1."""
    options = AcceptanceOptions(
        num_tokens=5_000,
        temperatures=(1.0,),
        leniences=(1.0, 0.4),
        batch_size=64,
        max_decode_len=24,
        decoded_texts=256,
        gamma=5,
        # One interval in twenty would not overlap by chance, of each pair.
        confidence=0.999,
    )
    told = []
    # As in the tests themselves, which then find the programs compiled.
    with jax.numpy_rank_promotion("raise"):
        rows = measure(toy, toy_drafts, SOURCES, options, lambda *state: told.append(state))
    return rows, told


def by_draft(rows, lenience=1.0):
    return {row.draft: row for row in rows if row.lenience == lenience}


def test_corollary_3_6_the_loops_statistic_and_observed_acceptance_agree(rows):
    """At large N on a toy: what issue and paper promise of alpha."""
    found = by_draft(rows[0])
    for row in found.values():
        assert row.decoded.num_texts == 256
        assert agree(row.alpha, row.decoded.alpha, row.decoded.observed), row
        # Not because the intervals are wide.
        assert row.alpha.high - row.alpha.low < 0.1
    # And another draft's do not agree with them.
    assert not agree(found["near"].decoded.observed, found["far"].alpha)
    assert not agree(found["near"].alpha, found["far"].decoded.alpha)


def test_as_many_tokens_as_asked_for_are_counted(rows):
    for row in rows[0]:
        assert row.num_tokens == 5_000
        assert row.share_proposed == 1 and row.alpha.count == 5_000
        # What is drawn again for the intervals is the source.
        assert row.num_texts == len(SOURCES)


def test_lenience_accepts_more(rows):
    strict, lenient = by_draft(rows[0]), by_draft(rows[0], 0.4)
    for name, row in strict.items():
        assert lenient[name].alpha.value > row.alpha.value
        # Which was not decoded with.
        assert lenient[name].decoded is None


def test_progress_ends_at_the_total(rows):
    told = rows[1]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] == 5_000
    *before, (_, _, last) = told
    assert {what.partition(":")[0] for _, _, what in before} == {"temperature 1"}
    assert last == "all measured"


def test_rows_are_json_and_tables_hold_them(rows):
    kept = json.loads(json.dumps([dataclasses.asdict(row) for row in rows[0]]))
    assert kept[0]["draft"] == "near"
    assert kept[0]["decoded"]["observed"]["low"] < kept[0]["decoded"]["observed"]["high"]
    lines = [re.sub(" +", " ", line) for line in str(table(rows[0])).splitlines()]
    assert lines[2].startswith(f"| near | T = 1 | 1 | {rows[0][0].alpha.value:.3f} (")
    assert sum(line.startswith("| ") for line in lines) == 1 + len(rows[0])


def test_argmax_goes_once_through_the_texts(toy, toy_drafts):
    options = AcceptanceOptions(
        temperatures=(0.0,),
        # Which change nothing at argmax: it is measured once.
        top_ks=(0, 40),
        leniences=(1.0, 1e-30),
        batch_size=8,
        max_decode_len=24,
        decoded_texts=64,
        gamma=5,
    )
    rows = measure(toy, {"near": toy_drafts["near"]}, TEXTS, options)
    assert [row.lenience for row in rows] == [1.0, 1e-30]
    strict, lenient = rows
    assert strict.num_texts == strict.decoded.num_texts == len(TEXTS)
    assert strict.num_tokens < options.num_tokens
    # Betas are 0 or 1, and what was observed is their mean over what was verified (in float32).
    assert strict.decoded.alpha.value == pytest.approx(strict.decoded.observed.value, rel=1e-6)
    assert agree(strict.alpha, strict.decoded.observed)
    # Anything is at least that likely.
    assert lenient.alpha.value == 1 > strict.alpha.value
    assert strict.sampling == "argmax"


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
        ({"num_tokens": 1.5}, "num_tokens is 1.5: give a whole number of at least 1"),
        ({"temperatures": ()}, "temperatures is empty"),
        # As gin may bind it.
        ({"temperatures": 1.0}, r"temperatures is 1.0: give a list, as in \(1.0,\)"),
        ({"leniences": (0.0,)}, "lenience is 0.0"),
        ({"drafts": ("copy", "copy")}, "give each of them once"),
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


def test_nothing_to_measure_is_refused(toy):
    with pytest.raises(InputError, match="no draft to measure"):
        measure(toy, {}, TEXTS)
    with pytest.raises(InputError, match="no text to generate from"):
        measure(toy, {"copy": CopyDraft(toy.target.vocab_size)}, [])
    with pytest.raises(InputError, match="the text has 41 tokens and the encoder takes 16"):
        measure(toy, {"copy": CopyDraft(toy.target.vocab_size)}, [*TEXTS, "x" * 40])
    with pytest.raises(InputError, match="the draft has 7 tokens and the target"):
        measure(toy, {"uniform": UniformDraft(7)}, TEXTS)


def a_row(draft, alpha, efficiency=None, **values) -> AcceptanceRow:
    """``efficiency`` None was not decoded."""
    estimate = Estimate(value=alpha, low=None, high=None, count=10, num_texts=1)
    decoded = efficiency and Achieved(
        num_texts=1,
        target_calls=10,
        block_efficiency=dataclasses.replace(estimate, value=efficiency),
        alpha=estimate,
        observed=estimate,
        acceptance_by_position=[],
    )
    fields = {"temperature": 0.0, "top_k": 0, "top_p": 0.0, "lenience": 1.0, "gamma": 2}
    fields |= {"num_tokens": 10, "num_texts": 1, "share_proposed": 1.0}
    return AcceptanceRow(
        **fields | values | {"draft": draft, "alpha": estimate, "decoded": decoded}
    )


def test_the_last_sentence_names_the_best_exact_draft():
    rows = [
        a_row("copy", 1.0, 1.1),
        a_row("transformer", 0.69, 2.6),
        a_row("ngram", 0.5),
        a_row("copy", 1.0, 3.0, temperature=1.0, lenience=0.5),
    ]
    assert best(rows) == "Best: transformer at argmax, 2.60 tokens a target call."
    assert best(rows[2:]) is None
