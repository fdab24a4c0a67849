"""The gain of copying: the command on a tiny pair, and the table of its figures."""

import json

import measure
import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_figures_of_each_text_and_gamma(tiny_pair, tmp_path, capsys):
    lines = ["a green brid sings\ta green bird sings", "cat tabel\tcat table", "it is\tit is"]
    data, kept = tmp_path / "errors.tsv", tmp_path / "copying.json"
    data.write_text("".join(f"{line}\n" for line in lines))
    command = ["--target", str(tiny_pair / "target"), "--data", str(data), "--gamma", "2", "3"]
    assert measure.main([*command, "--json", str(kept)]) == 0
    values = json.loads(kept.read_text())
    assert str(tmp_path) not in kept.read_text()
    assert [row["gamma"] for row in values["rows"]] == [2, 3]
    for row in values["rows"]:
        assert (row["text"], row["num_pairs"]) == ("errors.tsv", 3)
        calls, tokens = row["target_calls"], row["num_tokens"]
        assert row["block_efficiency"] == pytest.approx(tokens / calls)
        assert "exact_match" in row
    printed = capsys.readouterr().out.strip()
    assert printed == str(measure.table(values))
    assert "| errors | 3 " in printed.replace("  ", "")

    # A file that cannot be written costs no table.
    command = [*command[:-1], "--json", str(data / "copying.json")]
    assert measure.main(command) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("measure: error: cannot write ") and "| errors | 3 " in shown.out


def test_a_mistake_is_told_in_a_line(tmp_path, capsys):
    assert measure.main(["--data", str(tmp_path / "none.tsv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("measure: error: ") and "none.tsv" in line


def test_verification_costs_a_step_until_arithmetic_counts():
    assert measure.verification_cost(1) == measure.verification_cost(16) == 1.0
    assert measure.verification_cost(1000) > 5
