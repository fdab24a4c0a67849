"""Recipes of distillation, and variants of an EAGLE head, trained and measured side by side."""

import ast
import json
from pathlib import Path

import pytest

from benchmarks import eagle_heads, objectives
from spec_t5x.cli.gin_files import parse_gin
from spec_t5x.contrib.medusa import training
from spec_t5x.labs.training import run_distill

RECIPES = (("cross_entropy", "references", 0.0), ("total_variation", "target", 0.5))


@pytest.fixture(autouse=True)
def runs(monkeypatch, request):
    """Provides the macros of each training, which parses gin and does no more."""
    found = []

    def train(arguments):
        command, file, *flags = arguments
        # These modules register the names of the files.
        assert {"distill": run_distill, "train-heads": training}[command]
        parse_gin([file.removeprefix("--gin_file=")], flags)
        found.append(dict(flag.removeprefix("--gin.").split("=", 1) for flag in flags))
        folder = Path(ast.literal_eval(found[-1]["OUTPUT_DIR"]))
        folder.mkdir(parents=True)
        held_out = [row(RECIPES[0], (0.1 * step, 0.1))["held_out"][0] for step in (4, 5)]
        lines = [{"step": 1, "loss": 2.0}]
        lines += [{"step": step, "held_out": held_out[step - 1]} for step in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        return 0

    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setattr(objectives, "spec_t5x", train)
    return found


def row(recipe, *alphas):
    values = dict(zip(("objective", "outputs", "on_policy"), recipe, strict=True))
    values["held_out"] = [
        {
            "temperature": temperature,
            "alpha": {"value": value, "low": value - width, "high": value + width},
            "gamma": 2,
        }
        for temperature, (value, width) in enumerate(alphas)
    ]
    return values


def test_the_table_marks_what_is_surely_above_the_first():
    rows = [row(RECIPES[0], (0.5, 0.1), (0.5, 0.05)), row(RECIPES[1], (0.65, 0.1), (0.65, 0.05))]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in str(objectives.table(rows)).splitlines()
    ]
    assert lines[0][2:4] == ["alpha, T=0", "expected tokens, gamma 2, T=0"]
    # (1 - alpha^3) / (1 - alpha) tokens (Equation 1).
    assert lines[2][2:] == ["0.500 (0.400–0.600)", "1.75", "0.500 (0.450–0.550)", "1.75"]
    assert lines[3] == [
        *("total variation", "target, 50% the draft's own"),
        *("0.650 (0.550–0.750)", "2.07", "**0.650** (0.600–0.700)", "2.07"),
    ]


def test_recipes_differ_in_objective_and_texts_alone(tmp_path, monkeypatch, runs):
    """The gin file knows what they bind; alpha is that of the last step."""
    monkeypatch.setattr(objectives, "RECIPES", RECIPES)
    kept, output = tmp_path / "figures.json", tmp_path / "runs"
    flags = ["--data_dir", str(tmp_path), "--output_dir", str(output), "--json", str(kept)]
    objectives.main(flags)
    rows = json.loads(kept.read_text())["rows"]
    assert [(r["objective"], r["outputs"], r["on_policy"]) for r in rows] == list(RECIPES)
    assert [(r["steps"], r["held_out"][0]["alpha"]["value"]) for r in rows] == [(2, 0.5)] * 2
    first, second = runs
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"OBJECTIVE", "OUTPUTS", "ON_POLICY", "OUTPUT_DIR"}


def test_variants_differ_in_what_they_name_and_are_measured_together(tmp_path, monkeypatch, runs):
    measured = []

    def acceptance(arguments):
        measured.extend(arguments)
        rows = [{"temperature": t} for t in (0.0, 1.0) for _ in range(arguments.count("--draft"))]
        Path(arguments[arguments.index("--json") + 1]).write_text(
            json.dumps({"rows": rows, "options": {"gamma": 4}})
        )
        return 0

    monkeypatch.setattr(eagle_heads, "spec_t5x", acceptance)
    kept = tmp_path / "figures.json"
    flags = ["--data_dir", "data", "--output_dir", str(tmp_path / "runs"), "--json", str(kept)]
    eagle_heads.main(flags)
    common, *_, transformer, heads = runs
    for run, changes in zip(runs, [*eagle_heads.VARIANTS.values(), {}], strict=False):
        changed = {name for name in run if run[name] != common.get(name)} - {"OUTPUT_DIR"}
        assert changed == set(changes)
        assert f"{ast.literal_eval(run['OUTPUT_DIR'])}/draft" in measured
    assert all(heads[name] == common[name] for name in eagle_heads.SETTINGS)
    assert f"medusa:{ast.literal_eval(heads['OUTPUT_DIR'])}/heads" in measured
    names = [row["draft"] for row in json.loads(kept.read_text())["rows"]]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert len(set(names)) == len(runs) + len(eagle_heads.AT_BEST)
