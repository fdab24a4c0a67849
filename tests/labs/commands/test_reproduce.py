"""``spec-t5x reproduce``: what it makes, and how it refuses."""

import json

import pytest

from spec_t5x.cli.main import main
from spec_t5x.labs.reproduction import run as running
from spec_t5x.labs.reproduction.contents import Exhibit


@pytest.fixture
def reproduce(capsys):
    """Provides ``reproduce(*arguments)``: exit status, standard output, standard error."""

    def run(*arguments):
        status = main(["reproduce", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def only(monkeypatch):
    """Provides ``only(name=item)``, which makes these the only known items."""

    def replace(**items):
        monkeypatch.setattr(running, "ITEMS", items)

    return replace


def item(seen=None):
    def content(options, results):
        if seen is not None:
            seen.append(options)
        results("part", {}, dict)
        return []

    return Exhibit("title", content)


def test_closed_forms_by_name(reproduce, tmp_path):
    status, out, err = reproduce("factors", "table1", "--output", tmp_path / "new" / "results")
    assert (status, out) == (0, "")
    output = tmp_path / "new" / "results"
    assert f"the report is {output / 'report.html'}" in err
    names = {path.name for path in output.iterdir()}
    assert names == {"figures", "report.html", "results.json"}
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    # In the report's order, not the command's.
    assert list(results["items"]) == ["table1", "factors"]


def test_settings_come_from_flags_and_gin(reproduce, only, tmp_path):
    seen = []
    only(one=item(seen))
    gin_file = tmp_path / "run.gin"
    gin_file.write_text("ReproduceOptions.quick = True\nReproduceOptions.seed = 5\n")
    for flags in ((), ("--seed", 7)):
        assert reproduce("all", "--output", tmp_path, "--gin_file", gin_file, *flags)[0] == 0
    assert [(each.quick, each.seed) for each in seen] == [(True, 5), (True, 7)]
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["run"]["seed"] == 7
    assert reproduce("all", "--output", tmp_path, "--quick")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table9", "--output", "x"), "no item 'table9': give all, or some of one, two"),
        ((), "nothing to reproduce: give all, or names that --list shows"),
        (("one",), "no --output was given: give a directory for the report"),
        (
            ("one", "--output", "x", "--data_dir", "absent"),
            "--data_dir is absent, which is not a directory: give one",
        ),
        (
            ("one", "--output", "x", "--data_dir", "."),
            "--data_dir is ., which holds no ende/dev.tsv.gz: give one that does, or leave it out "
            "for the texts of the package",
        ),
        (("one", "--output", "file"), "{}/file cannot be written to: give another folder"),
    ],
)
def test_mistakes_are_told_in_a_line_before_anything_is_computed(
    reproduce, only, tmp_path, monkeypatch, arguments, message
):
    def fail(options, results):
        raise AssertionError("nothing is to be computed")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    one = Exhibit("title", fail)
    only(one=one, two=one)
    assert reproduce(*arguments) == (2, "", f"spec-t5x: error: {message.format(tmp_path)}\n")
    assert not (tmp_path / "x").exists()
