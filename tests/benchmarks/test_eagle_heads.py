"""benchmarks/eagle_heads.py: variants of an EAGLE head, trained and measured side by side."""

import ast
import json
from pathlib import Path

import gin
import pytest

from benchmarks import eagle_heads, objectives
from spec_t5x.cli.gin_files import parse_gin
from spec_t5x.contrib.medusa import training
from spec_t5x.labs.training import run_distill


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    yield
    gin.clear_config()


def test_variants_differ_in_what_they_say_and_are_measured_together(tmp_path, monkeypatch):
    runs, measured = [], []

    def train(arguments):
        command, file, *flags = arguments
        # Which register what the files name.
        assert {"distill": run_distill, "train-heads": training}[command]
        parse_gin([file.removeprefix("--gin_file=")], flags)
        runs.append(dict(flag.removeprefix("--gin.").split("=", 1) for flag in flags))
        return 0

    def acceptance(arguments):
        measured.extend(arguments)
        drafts = [arguments[i + 1] for i, flag in enumerate(arguments) if flag == "--draft"]
        rows = [{"draft": "draft", "temperature": t} for t in (0.0, 1.0) for _ in drafts]
        Path(arguments[arguments.index("--json") + 1]).write_text(
            json.dumps({"rows": rows, "options": {"gamma": 4}})
        )
        return 0

    monkeypatch.setattr(objectives, "spec_t5x", train)
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
