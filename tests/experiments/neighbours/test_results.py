"""Figures and tables, from timings that were chosen."""

import pytest

from spec_t5x.experiments.floor import DecodeBytes, Floor
from spec_t5x.experiments.neighbours import tables
from spec_t5x.experiments.neighbours.results import (
    Alone,
    Divergence,
    Group,
    Row,
    Timings,
    quartiles,
)

# Two inputs, 20 tokens in all, three repeats.
PLAIN = Timings(
    decode=[0.040, 0.060, 0.050], first_token=[0.004] * 3, encoder=[0.002] * 3, idle_share=0.0
)
SPECULATIVE = Timings(
    decode=[0.020, 0.020, 0.025], first_token=[0.006] * 3, encoder=[0.002] * 3, idle_share=0.0
)
OTHER = Timings(decode=[0.080, 0.075, 0.100], first_token=[0.008] * 3, encoder=None, idle_share=0.1)


def make_row(name: str, timings: Timings | None, **changes) -> Row:
    values = {
        "name": name,
        "speculative": False,
        "exact": True,
        "version": "1.0",
        "problem": None,
        "alone": Alone(load_seconds=1.0, compile_seconds=2.34, peak_bytes=300 * 2**20),
        "timings": timings,
        "num_tokens": 20,
        "identical": True,
        "divergences": [],
    }
    return Row(**(values | changes))


@pytest.fixture
def group() -> Group:
    part = Divergence(input=1, position=4, plain_token=7, other_token=9, margin=0.05)
    missing = {"version": None, "alone": None, "num_tokens": None, "identical": None}
    return Group(
        title="a pair",
        num_inputs=2,
        source_tokens=11,
        num_tokens=20,
        max_decode_len=16,
        alpha=None,
        floor=Floor(
            reads=DecodeBytes(num_tokens=20, encoder=4_000_000, decoder=20_000_000),
            working_set=1_000_000,
            last_level_cache=2_000_000,
            threads=2,
            bytes_per_second=[1e9],
        ),
        rows=[
            make_row("ours, plain", PLAIN),
            make_row("ours, drafted", SPECULATIVE, speculative=True),
            make_row("theirs", OTHER, exact=False, identical=False, divergences=[part]),
            make_row("absent", None, problem="not installed: no module", **missing),
        ],
    )


def figures(group: Group, index: int) -> dict:
    return group.to_dict()["rows"][index]["figures"]


def test_times_are_medians_over_repeats_for_each_token(group):
    plain = figures(group, 0)
    assert plain["seconds_per_token"] == pytest.approx(0.0025)
    assert plain["seconds_per_token_quartiles"] == pytest.approx([0.00225, 0.00275])
    assert plain["tokens_per_second"] == pytest.approx(400)
    # Of each input.
    assert plain["first_token_seconds"] == pytest.approx(0.002)
    assert plain["encoder_seconds"] == pytest.approx(0.001)
    assert figures(group, 2)["encoder_seconds"] is None
    assert figures(group, 3) is None


def test_ratios_are_medians_of_the_ratios_of_each_repeat(group):
    assert figures(group, 0)["speed_up"] == 1
    # 2, 3 and 2 times as fast.
    assert figures(group, 1)["speed_up"] == pytest.approx(2.0)
    # 0.5, 0.8, 0.5.
    assert figures(group, 2)["speed_up"] == pytest.approx(0.5)


def test_the_floor_is_of_a_whole_decode_and_of_a_step(group):
    # 24 MB for 20 tokens at 1 GB/s, of which 20 MB are the steps'.
    assert figures(group, 0)["times_floor"] == pytest.approx(0.0025 / 0.0012)
    # 18 tokens after the first of each: the median of 36, 56 and 46 ms.
    assert figures(group, 0)["step_seconds"] == pytest.approx(0.046 / 18)
    assert figures(group, 0)["step_times_floor"] == pytest.approx(0.046 / 18 / 0.001)
    assert "step_seconds" not in figures(group, 1)


def test_quartiles():
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_the_full_table(group):
    lines = tables.full([group.to_dict()]).splitlines()
    assert lines[0] == (
        "**a pair**: 2 sources of 5.5 tokens, outputs of 10.0. A step reads 1 MB in the "
        "last-level cache, at 1.0 GB/s."
    )
    assert lines[4] == (
        "| ours, plain | 2.50 | 2.25–2.75 | 400 | 1.00 | 2.08 | 2.56 (2.56) | 2.00 | 1.00 "
        "| 2.3 s | 300 MiB | yes |"
    )
    assert lines[5].startswith("| ours, drafted | 1.00 |") and "| — | 3.00 |" in lines[5]
    assert lines[6].startswith("| theirs⁵ |") and lines[6].endswith("| 1 differ |")
    assert lines[7] == "| absent | not installed: no module |" + "  |" * 10
    assert lines[8] == "| the floor | 1.20 |  |  |  | 1 | 1.00 |  |  |  |  |  |"
    assert len({line.count("|") for line in lines[2:9]}) == 1
    assert "theirs: 1 of 2 outputs part from ours, where the target preferred our token by at "\
        "most 0.05." in lines  # fmt: skip
    assert "⁵ A note" in lines[-1]


def test_the_short_table(group):
    text = tables.short([group.to_dict()], {"processor": "A processor"})
    lines = text.splitlines()
    assert lines[0] == "A processor, 2 threads, float32, batch 1."
    assert "| ours, plain | 2.50 | 1.00 | 2.08 | 2.56 (2.56) | 2.00 | yes |" in lines
    assert "| the floor | 1.20 |  | 1 | 1.00 |  |  |" in lines
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_without_rounded_weights_there_is_no_note_of_them(group):
    values = group.to_dict()
    values["rows"] = values["rows"][:2]
    assert "⁵" not in tables.full([values])
    assert "⁵" not in tables.short([values], {"processor": "A processor"})


def test_drawn_verdicts_and_memory_are_named(group):
    values = group.to_dict()
    values["alpha"] = 0.75
    values["floor"]["in_cache"] = False
    caption = tables.full([values]).splitlines()[0]
    assert "random weights, verdicts drawn with alpha 0.75. A step reads 1 MB in memory" in caption
