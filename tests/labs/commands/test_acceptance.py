"""``spec-t5x acceptance``: tables, figures as JSON, and mistakes in one line."""

import json
import re

import pytest

from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark import results

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_several_drafts_are_measured_and_kept(tiny_pair, tmp_path, capsys):
    data, kept = tmp_path / "pairs.tsv", tmp_path / "out" / "figures.json"
    data.write_text("x\tMy sister\ty\nx\tWir gehen morgen.\ty\n", encoding="utf-8")
    file = tmp_path / "acceptance.gin"
    transformer = f"transformer:{tiny_pair / 'draft'}"
    file.write_text(
        f'Models.target = "{tiny_pair / "target"}"\n'
        f'AcceptanceOptions.drafts = ("{transformer}", "copy")\n'
        "AcceptanceOptions.temperatures = (0.0, 1.0)\n"
        "AcceptanceOptions.decoded_texts = 0\n",
        encoding="utf-8",
    )
    arguments = ["acceptance", f"--gin_file={file}", "--data", str(data), "--json", str(kept)]
    # Flags come before gin.
    numbers = ["--num_tokens=60", "--max_decode_len=16", "--batch_size=4"]
    lists = ["--temperature=1", "--top_k=40", "--lenience=1", "--lenience=0.5"]
    assert main([*arguments, *numbers, *lists]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.sub(" +", " ", line) for line in lines if line.startswith("| ")][1:]
    starts = [
        f"| {d} | T = 1, top-k 40 | {n} |" for d in (transformer, "copy") for n in ("1", "0.5")
    ]
    assert [row.startswith(start) for row, start in zip(rows, starts, strict=True)] == [True] * 4
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["source"]["data"] == "pairs.tsv" and report["models"]["target"] == "target"
    network, lenient, copy, _ = report["rows"]
    assert network["num_tokens"] == copy["num_tokens"] == 60
    assert 0 <= network["alpha"]["low"] <= network["alpha"]["value"] <= network["alpha"]["high"]
    assert network["alpha"]["value"] < lenient["alpha"]["value"]
    # alpha is of the places where there was something to copy.
    assert network["share_proposed"] == 1 > copy["share_proposed"]
    counted = copy["alpha"]["count"] if copy["alpha"] else 0
    assert counted == round(60 * copy["share_proposed"])


def test_a_table_that_cannot_be_written_is_shown(tiny_pair, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise InputError("cannot write figures.json: no space left")

    monkeypatch.setattr(results, "save", full)
    models = ["--target", str(tiny_pair / "target"), "--draft", "copy", "--decoded_texts=0"]
    sizes = ["--num_tokens=8", "--max_decode_len=8", "--temperature=1"]
    assert main(["acceptance", "text", *models, *sizes, f"--json={tmp_path / 'x.json'}"]) == 2
    shown = capsys.readouterr()
    assert "| copy" in shown.out and "cannot write figures.json" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no text: give TEXT, --data FILE or --mixture_or_task NAME"),
        (["text", "--split", "test"], "--split is 'test' and there is no --mixture_or_task"),
        (["--data", "absent.tsv"], "absent.tsv"),
        (["text", "--data", "pairs.tsv"], "both TEXT and pairs.tsv were given"),
        (["text", "--draft", "copy", "--draft", "copy"], "give each of them once"),
        (["text", "--draft", "nothing"], "no draft 'nothing'"),
        (["--input", "lines.txt"], "unknown argument '--input': it is '--data' here"),
        (["text", "--lenience", "0"], "lenience is 0.0"),
        (["text", "--max_decode_len", "6"], "--gamma is 7: give at least 1, at most 6"),
        (["--data", "x", "--mixture_or_task", "y"], "--data is 'x' and --mixture_or_task 'y'"),
    ],
)
def test_mistakes_are_one_line(tiny_pair, capsys, monkeypatch, arguments, message):
    # Before the target's weights are read, but for the lines of drafts that need it.
    monkeypatch.setattr(
        Generator, "load_target", lambda *_, **__: pytest.fail("the target was read")
    )
    target = ["--target", str(tiny_pair / "target")]
    draft = [] if "--draft" in arguments else ["--draft", "uniform"]
    assert main(["acceptance", *target, *draft, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
