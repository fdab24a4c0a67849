"""benchmarks/objectives.py: recipes of distillation side by side."""

import json

import gin
import pytest

from benchmarks import objectives

pytestmark = pytest.mark.usefixtures("quick_compilation")

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
        for line in objectives.table(rows).splitlines()
    ]
    assert lines[0][2:4] == ["alpha, T=0", "expected tokens, gamma 2, T=0"]
    # (1 - alpha^3) / (1 - alpha) tokens (Equation 1).
    assert lines[2][2:] == ["0.500 (0.400–0.600)", "1.75", "0.500 (0.450–0.550)", "1.75"]
    assert lines[3] == [
        *("total variation", "target, 50% the draft's own"),
        *("0.650 (0.550–0.750)", "2.07", "**0.650** (0.600–0.700)", "2.07"),
    ]


def test_recipes_are_trained_alike_and_resumed(tiny_pair, tmp_path, monkeypatch, capsys):
    pairs = [("My sister", "Meine Schwester liest."), ("a bird", "ein Vogel"), ("We go", "Wir")]
    for name, some in {"train": pairs * 4, "dev": pairs}.items():
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in some))
    own = {
        "CHECKPOINT_PATH": str(tiny_pair / "target"),
        "TRAIN_FILE": "train.tsv",
        "DEV_FILE": "dev.tsv",
        "TRAIN_STEPS": 2,
        "MAX_SOURCE_LENGTH": 16,
        "MAX_TARGET_LENGTH": 16,
        "DataOptions.source_column": 0,
        "DataOptions.target_column": 1,
        "DataOptions.num_columns": 2,
        "DataOptions.buckets": (16,),
        "DataOptions.tokens_per_batch": 64,
        "OptimizerOptions.warmup_steps": 1,
        "OptimizerOptions.cooldown_steps": 0,
    }
    monkeypatch.setattr(objectives, "SETTINGS", objectives.SETTINGS | own)
    monkeypatch.setattr(objectives, "RECIPES", RECIPES[1:])
    kept, runs = tmp_path / "figures.json", tmp_path / "runs"
    flags = ["--data_dir", str(tmp_path), "--output_dir", str(runs), "--json", str(kept)]
    objectives.main(flags)
    rows = json.loads(kept.read_text())["rows"]
    assert [(r["objective"], r["outputs"], r["on_policy"]) for r in rows] == [RECIPES[1]]
    assert [r["steps"] for r in rows] == [2]
    assert all([each["temperature"] for each in r["held_out"]] == [0.0, 1.0] for r in rows)
    assert capsys.readouterr().out.endswith(objectives.table(rows) + "\n")
    # What is done is not done again.
    objectives.main(flags)
    assert json.loads(kept.read_text())["rows"] == rows
