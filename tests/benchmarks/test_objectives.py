"""benchmarks/objectives.py: recipes of distillation side by side."""

import ast
import json
from pathlib import Path

import gin
import pytest

from benchmarks import objectives
from spec_t5x.cli.gin_files import parse_gin
from spec_t5x.labs.training import run_distill

RECIPES = (("cross_entropy", "references", 0.0), ("total_variation", "target", 0.5))


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    yield
    gin.clear_config()


def row(recipe, *alphas):
    objective, outputs, on_policy = recipe
    held_out = [
        {
            "temperature": temperature,
            "alpha": {"value": value, "low": value - width, "high": value + width},
            "gamma": 2,
        }
        for temperature, (value, width) in enumerate(alphas)
    ]
    return {
        "objective": objective, "outputs": outputs, "on_policy": on_policy, "held_out": held_out
    }  # fmt: skip


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


def test_recipes_differ_in_objective_and_texts_alone(tmp_path, monkeypatch):
    """What they bind is known to the gin file; alpha is that of the last step."""
    runs = []

    def distill(arguments):
        command, file, *flags = arguments
        assert command == "distill" and run_distill.distill
        parse_gin([file.removeprefix("--gin_file=")], flags)
        runs.append(dict(flag.removeprefix("--gin.").split("=", 1) for flag in flags))
        folder = Path(ast.literal_eval(runs[-1]["OUTPUT_DIR"]))
        folder.mkdir(parents=True)
        held_out = [row(RECIPES[0], (0.1 * step, 0.1))["held_out"][0] for step in (4, 5)]
        lines = [{"step": step, "held_out": held_out[step - 1]} for step in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in ({"step": 1, "loss": 2.0}, *lines))
        (folder / "metrics.jsonl").write_text(text)
        return 0

    monkeypatch.setattr(objectives, "spec_t5x", distill)
    monkeypatch.setattr(objectives, "RECIPES", RECIPES)
    kept, output = tmp_path / "figures.json", tmp_path / "runs"
    flags = ["--data_dir", str(tmp_path), "--output_dir", str(output), "--json", str(kept)]
    objectives.main(flags)
    rows = json.loads(kept.read_text())["rows"]
    assert [(r["objective"], r["outputs"], r["on_policy"]) for r in rows] == list(RECIPES)
    assert [(r["steps"], r["held_out"][0]["alpha"]["value"]) for r in rows] == [(2, 0.5)] * 2
    first, second = runs
    assert {name for name in first if first[name] != second[name]} == {
        "OBJECTIVE", "OUTPUTS", "ON_POLICY", "OUTPUT_DIR"
    }  # fmt: skip
