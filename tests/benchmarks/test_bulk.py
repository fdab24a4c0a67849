"""Slots in bulk inference: the command on a tiny pair, and the simulation beside it."""

import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bulk

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_static_batches_and_slots_in_turn(tiny_pair, tmp_path, capsys, monkeypatch):
    # Warm runs do not count; of two repeats the busier one does.
    shares = iter([0.9, 0.9, 0.1, 0.1, 0.2, 0.1])
    others = types.SimpleNamespace
    monkeypatch.setattr(bulk, "OtherPrograms", lambda: others(share=next(shares, None)))
    texts = ["a green bird sings", "My sister reads", "Es regnet", "cat table", "a", "We are"]
    data, kept = tmp_path / "lines.txt", tmp_path / "bulk.json"
    data.write_text("".join(f"{text}\n" for text in texts))
    models = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    flags = ["--data", str(data), "--batch_size", "2", "--gamma", "0", "2", "--repeats", "2"]
    assert bulk.main([*models, *flags, "--json", str(kept)]) == 0
    values = json.loads(kept.read_text())
    assert str(tmp_path) not in kept.read_text()
    assert (values["num_inputs"], values["others"]) == (6, [])
    for row, gamma in zip(values["rows"], (0, 2), strict=True):
        assert (row["gamma"], row["batch_size"]) == (gamma, 2)
        assert row["same_answers"] and row["same_text"]
        assert all(len(seconds) == 2 for seconds in row["seconds"].values())
        assert row["occupancy"]["batches"] == pytest.approx(row["simulated"]["batches"])
        assert row["occupancy"]["slots"] == pytest.approx(row["simulated"]["slots"])
        assert row["occupancy"]["slots"] >= row["occupancy"]["batches"]
    assert [row["beside"] for row in values["rows"]] == [0.2, 0.1]
    shown = capsys.readouterr().out.strip()
    assert shown == str(bulk.table(values))
    assert "| others 20% |" in shown
    assert "(1 of 2 rows): other programs used up to 20% of the processors" in shown


def test_a_file_that_cannot_be_written_costs_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bulk, "measure", lambda args: {})
    monkeypatch.setattr(bulk, "table", lambda values: "a table")
    (tmp_path / "file").touch()
    assert bulk.main(["--data", "lines.txt", "--json", str(tmp_path / "file" / "x.json")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "a table\n" and shown.err.startswith("bulk: error: cannot write ")


def test_a_mistake_is_told_in_a_line(tmp_path, capsys):
    assert bulk.main(["--data", str(tmp_path / "none.tsv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bulk: error: ") and "none.tsv" in line


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 9))
def test_slots_are_never_emptier_than_batches(calls, rows):
    slots, batches = (
        simulate(calls, rows) for simulate in (bulk.simulated_slots, bulk.simulated_batches)
    )
    assert batches <= slots + 1e-12 and slots <= 1
