"""Table 2's section from made-up results, its statements among them, and one real part."""

import json

import pytest

from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.reproduction import compiled_speed, measured_speed, pairs
from spec_t5x.experiments.reproduction.items import Done, Setting
from spec_t5x.experiments.reproduction.measured_rows import measured_rows
from spec_t5x.experiments.reproduction.sections import Origin

QUICK = Setting(quick=True)


def row(**values) -> dict:
    base = {
        "task": "EnDe",
        "draft": "transformer",
        "temperature": 0.0,
        "gamma": 7,
        "alpha": 0.7,
        "c": 0.05,
        "verification_cost": 1.8,
        "block_efficiency": 2.9,
        "accepted_plus_one": 3.1,
        "speed_up": 1.4,
        "expected": 2.3,
        "expected_with_verification": 1.45,
        "stands_for": "EnDe",
        "is_best": False,
        "speed_up_low": 1.3,
        "speed_up_high": 1.5,
        "loop_speed_up": 1.42,
        "plain_rate": 400.0,
        "speculative_rate": 560.0,
        "plain_setup_ms": 3.0,
        "speculative_setup_ms": 3.5,
        "plain_compile_seconds": 4.0,
        "speculative_compile_seconds": 6.0,
        "target_step_ms": 2.2,
        "draft_step_ms": 0.11,
        "identical": True,
        "num_divergences": 0,
    }
    return base | values


def result(*rows, **values) -> Done:
    base = {
        "tokens": 100,
        "num_texts": 8,
        "repeats": 2,
        "expected_best": 3,
        "largest_gamma": 8,
        "confirmed": True,
        "verification_costs": [1.0, 1.3],
        "rows": list(rows),
    }
    return Done(result=base | values, provenance={})


def section(done):
    return measured_speed.TABLE_2.render(QUICK, done)


def test_the_papers_rows_are_all_there_with_nothing_measured():
    shown = section({})
    assert shown.finding == "Nothing was measured here."
    (table,) = shown.content
    assert [line[:3] for line in table.rows] == [
        (r.task, f"T5-{r.draft}", r.temperature) for r in paper_tables.TABLE_2
    ]
    assert [line[5] for line in table.rows] == [r.measured for r in paper_tables.TABLE_2]
    assert all(column.origin != Origin.COMPILED for column in table.columns)


def test_predictions_stand_in_the_papers_own_rows():
    key = ["CNN/DM", "small", 1.0]
    found = {"key": key, "c": 0.01, "verification_cost": 1.02, "speed_up": 1.9}
    shown = section({compiled_speed.NAME: Done(result={"rows": [found]}, provenance={})})
    table = shown.content[0]
    at = {(line[0], line[1], line[2]): line[6:] for line in table.rows}
    assert at["CNN/DM", "T5-small", 1.0] == (0.01, 1.02, 1.9)
    assert at["EnDe", "T5-small", 0.0] == (None, None, None)
    assert [c.origin for c in table.columns[6:]] == [Origin.COMPILED] * 3
    assert table.parts == (compiled_speed.NAME,)


def test_measured_rows_stand_beside_the_paper_where_gamma_and_draft_are_its_own():
    rows = [row(), row(gamma=3, is_best=True), row(draft="copy")]
    done = {"table2/ende/transformer/t0": result(*rows)}
    _, measured, times = section(done).content
    assert [line[-1] for line in measured.rows] == [3.4, None, None]
    assert [line[3] for line in measured.rows] == ["7", "3 (best)", "7"]
    assert all(len(line) == len(measured.columns) for line in measured.rows)
    assert all(len(line) == len(times.columns) for line in times.rows)
    # What Table 4 and the curves read of them.
    assert [r.gamma for r in measured_rows(done)] == [7, 3, 7]


def test_statements_follow_the_figures():
    def said(**values):
        shown = section({"table2/ende/transformer/t0": result(row(**values), row(**values))})
        return shown.finding + " ".join(shown.paragraphs)

    good = said()
    assert "best speed-up measured here is 1.40" in good
    assert "2 of 2 rows gain, and every text at temperature 0 is that of plain" in good
    assert "nearer to the measurement in 2 of 2 rows" in good
    bad = said(speed_up=0.8, expected=0.9, identical=False, num_divergences=1)
    assert "0 of 2 rows gain, and texts at temperature 0 differ in 2 rows" in bad
    assert "nearer to the measurement in 0 of 2 rows" in bad
    assert "nothing was decoded at temperature 0" in said(temperature=1.0, identical=None)


def test_whether_the_best_gamma_of_theory_was_faster_is_read_off():
    def said(paper, best, **values):
        rows = [row(speed_up=paper), row(gamma=3, speed_up=best, is_best=True)]
        return " ".join(section({"table2/x": result(*rows, **values)}).paragraphs)

    assert "the faster one in 1 of 1 comparisons" in said(1.2, 1.4)
    assert "the faster one in 0 of 1 comparisons" in said(1.4, 1.2)
    assert "theory expects none to gain" not in said(1.2, 1.4)
    assert "In 1 of 1 settings theory expects none to gain" in said(0.5, 0.8, expected_best=0)
    assert "A quick run measures the paper's gamma alone in 1 of 1" in said(1, 1, confirmed=False)


def test_parts_are_of_what_the_package_has():
    parts = measured_speed.speed_up_parts(QUICK)
    assert {part.name.split("/")[1] for part in parts} == {
        pair.name for pair in pairs.present(pairs=(pairs.ENDE, pairs.SUMMARIES))
    }
    full = measured_speed.speed_up_parts(Setting())
    assert {part.name for part in parts} < {part.name for part in full}
    assert len({part.name for part in full}) == len(full)
    json.dumps([dict(part.inputs) for part in full])
    both = {part.name: part.inputs for part in full}
    assert all(part.inputs != both[part.name] for part in parts)


def test_a_part_measures(monkeypatch, quick_compilation):
    """The packaged pair, two sentences, at the size of a test."""
    effort = measured_speed._Effort(pool=6, num_texts=2, max_decode_len=8, repeats=1, widths=(1, 4))
    monkeypatch.setattr(measured_speed, "_QUICK", effort)
    parts = {part.name: part for part in measured_speed.speed_up_parts(QUICK)}
    fractions = []
    computed = parts["table2/ende/transformer/t1"].compute(fractions.append)
    assert json.loads(json.dumps(computed)) == computed
    (measured,) = computed["rows"]
    assert (measured["gamma"], measured["temperature"]) == (7, 1.0)
    assert 0 < measured["alpha"] <= 1 <= measured["block_efficiency"]
    assert measured["block_efficiency"] <= measured["accepted_plus_one"] <= 8
    assert measured["speed_up"] == pytest.approx(
        measured["speculative_rate"] / measured["plain_rate"]
    )
    assert len(computed["verification_costs"]) == 4
    assert computed["tokens"] > 8
    assert fractions == sorted(fractions)
    shown = section({"table2/ende/transformer/t1": Done(result=computed, provenance={})})
    assert len(shown.content) == 3
