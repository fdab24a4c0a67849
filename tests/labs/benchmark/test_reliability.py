"""Timings beside other programs, and impossible ones, are marked wherever times are shown."""

import dataclasses
import types

import pytest

from spec_t5x.cli.trace import print_comparison
from spec_t5x.labs.benchmark import comparison, sweep
from spec_t5x.labs.benchmark.other_programs import MUCH
from spec_t5x.labs.benchmark.reliability import caution, doubt
from tests.labs.benchmark.test_sweep import a_row, made_up, tiny_sizes  # noqa: F401

QUIET, BUSY = {"beside": 0.02, "noise": False}, {"beside": 0.45, "noise": False}
NOISE = {"beside": 0.02, "noise": True}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], None),
        # Of before shares were recorded.
        ([{}], None),
        ([QUIET, {"beside": MUCH}], None),
        ([BUSY], ": other programs used up to 45% of the processors."),
        (
            [QUIET, BUSY, {"beside": 0.7}],
            " (2 of 3 rows): other programs used up to 70% of the processors.",
        ),
        ([QUIET, NOISE], " (1 of 2 rows): a speed-up above the block efficiency is noise."),
    ],
)
def test_a_table_ends_with_what_cannot_be_relied_on(rows, sentence):
    assert caution(rows) == (sentence and f"Not to be relied on{sentence}")
    assert any(map(doubt, rows)) == bool(sentence)


@pytest.mark.parametrize(
    ("seconds", "changes", "noise"),
    [
        # At a block efficiency of 2.5.
        (1.0, {}, False),
        (1.25, {}, False),
        (1.73, {}, True),
        # Three times the tokens share one prefill.
        (1.3, {"plain_tokens": 40}, True),
        (0.45, {"plain_tokens": 40}, False),
        # The longest row decides.
        (1.73, {"batch_size": 8}, False),
    ],
)
def test_no_draft_brings_more_than_the_block_efficiency(made_up, seconds, changes, noise):  # noqa: F811
    """Speculation takes a second here."""
    found = dataclasses.replace(
        made_up, plain_seconds=[2 * seconds], speculative_seconds=[1.0], **changes
    )
    if seconds == 1.25:
        assert found.speed_up == found.block_efficiency == 2.5
    values = found.to_dict()
    assert (found.is_noise, values["noise"]) == (noise, noise)
    assert values["beside"] == 0.0 and values["batch_size"] == found.batch_size


def test_the_table_of_the_benchmark_marks_its_rows():
    rows = [a_row("copy", 1.2, **QUIET), a_row("ngram", 3.5, **BUSY | {"noise": True})]
    _, _, first, second, *_ = str(sweep.table(rows)).splitlines()
    assert "others 45%, noise" in second and "others" not in first
    assert "doubt" not in str(sweep.table(rows[:1]))


def test_a_comparison_ends_with_its_doubts(made_up, capsys):  # noqa: F811
    print_comparison(made_up)
    assert "Not to be relied on" not in capsys.readouterr().out
    print_comparison(dataclasses.replace(made_up, beside=0.45))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == caution([BUSY])


@pytest.mark.usefixtures("quick_compilation", "kept_programs")
@pytest.mark.parametrize("shares", [(0.4, 0.1, 0.1), (0.1, 0.4, 0.1), (0.1, 0.1, 0.4)])
def test_a_row_has_the_share_of_its_busiest_part(shares, tiny_sizes, monkeypatch):  # noqa: F811
    """That of decoding in turn, of the steps alone, or of the parts of an iteration."""
    left = iter(shares)
    for module in (comparison, sweep):
        others = lambda: types.SimpleNamespace(share=next(left))  # noqa: E731
        monkeypatch.setattr(module, "OtherPrograms", others)
    options = sweep.BenchmarkOptions(
        pairs=("random:tiny_draft",), gammas=(2,), temperatures=(0.0,), batch_sizes=(2,),
        alpha=1.0, source_len=5, repeats=1, parts=True,
    )  # fmt: skip
    decoding = sweep.GenerateOptions(max_decode_len=6)
    (row,) = sweep.run(options, models=tiny_sizes, decoding=decoding)
    assert (row["beside"], row["batch_size"], list(left)) == (0.4, 2, [])
