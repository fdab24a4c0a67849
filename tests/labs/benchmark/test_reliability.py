"""Timings beside other programs, and impossible ones, are marked where times are shown."""

import dataclasses
import time
import types

import psutil
import pytest

from spec_t5x.labs.benchmark import comparison, sweep
from spec_t5x.labs.benchmark.console import print_comparison
from spec_t5x.labs.benchmark.reliability import MUCH, OtherPrograms, caution, doubt
from spec_t5x.labs.benchmark.step_times import StepTimes
from tests.labs.benchmark.test_sweep import a_row, drawn_row, made_up, tiny_sizes  # noqa: F401

QUIET, BUSY = {"beside": 0.02, "noise": False}, {"beside": 0.45, "noise": False}
NOISE = {"beside": 0.02, "noise": True}


def test_what_others_use_counts_and_what_this_one_uses_does_not(monkeypatch):
    now = types.SimpleNamespace(wall=100.0, own=7.0, user=50.0, system=20.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(
        psutil, "cpu_times", lambda: types.SimpleNamespace(user=now.user, system=now.system)
    )
    monkeypatch.setattr(time, "monotonic", lambda: now.wall)
    monkeypatch.setattr(time, "process_time", lambda: now.own)
    others = OtherPrograms()
    now.wall, now.own, now.user, now.system = 105.0, 11.0, 58.0, 22.0
    # Of 10 seconds of two processors 10 were used, 4 of them by this process.
    assert others.share == pytest.approx(0.6)
    now.own = 25.0
    assert others.share == 0


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], None),
        # A row from before shares were recorded.
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
        # The block efficiency is 2.5.
        (1.25, {}, False),
        (1.73, {}, True),
        # Three times the tokens share one prefill.
        (1.3, {"plain_tokens": 40}, True),
        (0.45, {"plain_tokens": 40}, False),
        # The longest row decides.
        (1.73, {"batch_size": 8}, False),
        # Both ways were plain.
        (1.73, {"left_out": "no acceptance pays"}, False),
    ],
)
def test_no_draft_exceeds_the_block_efficiency(made_up, seconds, changes, noise):  # noqa: F811
    """Speculation takes a second here."""
    found = dataclasses.replace(
        made_up, plain_seconds=[2 * seconds], speculative_seconds=[1.0], **changes
    )
    assert found.is_noise == found.to_dict()["noise"] == noise


def test_tables_and_comparisons_show_doubts(made_up, capsys):  # noqa: F811
    rows = [a_row("copy", 1.2, **QUIET), a_row("ngram", 3.5, **BUSY | {"noise": True})]
    _, _, first, second, *_ = str(sweep.table(rows)).splitlines()
    assert "others 45%, noise" in second and "others" not in first
    assert "doubt" not in str(sweep.table(rows[:1]))
    print_comparison(made_up)
    assert "Not to be relied on" not in capsys.readouterr().out
    sampled = dataclasses.replace(made_up, identical=None)
    for lossy, said in ((False, "two draws from one"), (True, "draws from two distributions")):
        print_comparison(dataclasses.replace(sampled, lossy=lossy))
        assert said in capsys.readouterr().out
    print_comparison(dataclasses.replace(made_up, identical=False, divergences=[], lossy=True))
    assert "differ (the verifier is lossy)" in capsys.readouterr().out
    print_comparison(dataclasses.replace(made_up, beside=0.45))
    assert capsys.readouterr().out.splitlines()[-1] == caution([BUSY])


def test_figures_that_were_not_measured_are_absent(made_up, capsys):  # noqa: F811
    # The prefills alone took longer than the whole; nothing was drafted.
    slow = dataclasses.replace(made_up, plain_setup_seconds=[9.0], alpha=None, verified=0.0)
    assert slow.loop_speed_up is slow.to_dict()["loop_speed_up"] is None
    print_comparison(slow)
    shown = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    absent = {name.strip() for name, value in shown if value.strip() == "—"}
    assert absent == {"speed-up of the loop alone", "alpha"}


@pytest.mark.usefixtures("quick_compilation", "kept_programs")
@pytest.mark.parametrize("shares", [(0.4, 0.1, 0.1), (0.1, 0.4, 0.1), (0.1, 0.1, 0.4)])
def test_a_row_has_the_share_of_its_busiest_part(shares, drawn_row, monkeypatch):  # noqa: F811
    """The parts are decoding in turn, the steps alone, and those of an iteration."""
    left, step = iter(shares), StepTimes(target=1.0, draft=1.0, verification=1.0)
    names = ("iteration", "networks", "plain_step", "target_call")
    # Not measured: they are compiled in seconds.
    monkeypatch.setattr(comparison, "measure_step_times", lambda *_, **__: step)
    monkeypatch.setattr(sweep, "measure_parts", lambda *_: {name: [1.0] for name in names})
    for module in (comparison, sweep):
        others = lambda: types.SimpleNamespace(share=next(left))  # noqa: E731
        monkeypatch.setattr(module, "OtherPrograms", others)
    row = drawn_row("random:tiny_draft", 2, max_decode_len=6, source_len=5, parts=True)
    assert (row["beside"], row["batch_size"], list(left)) == (0.4, 2, [])
