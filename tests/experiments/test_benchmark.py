"""The benchmark of drafts: what it measures is what it says, and it is kept."""

import json

import gin
import pytest

from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.experiments.benchmark import BenchmarkOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def no_bindings():
    gin.clear_config()
    yield
    gin.clear_config()


def test_a_row_for_each_draft_and_verifier(tiny_pair, tmp_path, capsys):
    data, kept = tmp_path / "pairs.tsv", tmp_path / "out" / "figures.json"
    data.write_text("x\tMy sister\ty\nx\tWir gehen morgen.\ty\n", encoding="utf-8")
    file = tmp_path / "benchmark.gin"
    file.write_text(
        f'Models.target = "{tiny_pair / "target"}"\n'
        f'BenchmarkOptions.pairs = ("transformer:{tiny_pair / "draft"}/token", "copy/block")\n'
        "BenchmarkOptions.temperatures = (0.0,)\n"
        "BenchmarkOptions.gammas = (2,)\n"
        "BenchmarkOptions.repeats = 1\n"
        "GenerateOptions.max_decode_len = 12\n",
        encoding="utf-8",
    )
    arguments = ["benchmark", f"--gin_file={file}", "--data", str(data), "--json", str(kept)]
    assert main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "| yes |" in line]
    assert len(rows) == 2
    assert f"| transformer:{tiny_pair / 'draft'} | token | 0 | 2 |" in rows[0]
    assert "| copy | block | 0 | 2 |" in rows[1]
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["options"]["data"] == "pairs.tsv"
    for row in report["rows"]:
        assert row["num_inputs"] == 2 and row["identical"] is True
        assert row["plain_tokens"] == row["speculative_tokens"] > 0
        assert 1 <= row["block_efficiency"] <= 3
        assert len(row["plain_seconds"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "data is None"),
        ({"data": "x", "num_inputs": 0}, "num_inputs is 0"),
        ({"data": "x", "repeats": -3}, "repeats is -3"),
        ({"data": "x", "pairs": ("transformer",)}, "pair 'transformer'"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        BenchmarkOptions(**changes)
