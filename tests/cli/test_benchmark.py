"""``spec-t5x benchmark``: which subject is measured, with which settings, kept where."""

import dataclasses
import importlib
import json
import sys
import types

import gin
import pytest

from spec_t5x.cli import benchmark
from spec_t5x.cli.benchmark import ABOUT, DEFAULT_SUBJECT, SUBJECTS
from spec_t5x.cli.main import _parser, main
from spec_t5x.cli.settings import Models
from spec_t5x.experiments import growth
from spec_t5x.generation import GenerateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandInOptions:
    """Of a subject that measures nothing."""

    data: str | None = None
    repeats: int = 3


@pytest.fixture
def stand_in(monkeypatch):
    """``stand_in(run)``: a subject with this ``run``, instead of the default one."""
    module = types.ModuleType("a_subject_that_stands_in")
    module.HELP, module.Options = "nothing", StandInOptions
    module.table = lambda result: f"table of {result}"
    module.to_dict = lambda result: {"result": result}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(benchmark.SUBJECTS, DEFAULT_SUBJECT, module.__name__)

    def install(run):
        module.run = run

    gin.clear_config()
    yield install
    gin.clear_config()


def test_drafts_are_the_default():
    parse = _parser().parse_args
    assert parse(["benchmark"]).subject == DEFAULT_SUBJECT == "drafts"
    assert parse(["benchmark", "overhead", "--repeats", "2"]).subject == "overhead"


def test_a_subject_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["benchmark", "overheads"])
    assert "did you mean 'overhead'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_every_subject_has_what_the_command_calls(name):
    module = importlib.import_module(SUBJECTS[name])
    assert ABOUT[name] == module.HELP
    assert dataclasses.is_dataclass(module.Options)
    # gin binds it under this name.
    assert module.Options.__name__ != "Options"
    assert all(callable(getattr(module, call)) for call in ("run", "table", "to_dict"))


def test_settings_come_from_flags_and_gin(stand_in, capsys, tmp_path):
    seen = []

    def run(options, report=None, *, models, decoding):
        report(0, 2, "something")
        seen.append((options, models.target, decoding.max_decode_len))
        return 7

    stand_in(run)
    kept = tmp_path / "new" / "figures.json"
    bindings = {"StandInOptions.repeats": 5, "GenerateOptions.max_decode_len": 9}
    flags = [f"--gin.{name}={value!r}" for name, value in bindings.items()]
    data = tmp_path / "pairs.tsv"
    assert main(["benchmark", "--data", str(data), "--json", str(kept), *flags]) == 0
    assert seen == [(StandInOptions(data=str(data), repeats=5), "ende-target", 9)]
    assert capsys.readouterr().out == "table of 7\n"
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["result"] == 7
    # Not where it was.
    assert report["options"] == {
        "data": "pairs.tsv",
        "repeats": 5,
        "target": "ende-target",
        "draft": None,
    }
    assert report["decoding"]["max_decode_len"] == 9
    assert {"processor", "python", "jax"} <= set(report["machine"])


def test_rows_are_kept_as_they_come(stand_in, capsys, tmp_path):
    kept, found = tmp_path / "figures.json", []

    def run(options, report=None, *, models, decoding):
        for row in range(3):
            if row:
                found.append(json.loads(kept.read_text(encoding="utf-8"))["result"])
            yield row

    stand_in(run)
    assert main(["benchmark", "--json", str(kept)]) == 0
    assert found == [[0], [0, 1]]
    assert capsys.readouterr().out == "table of [0, 1, 2]\n"


def test_a_flag_that_the_subject_has_not_is_refused(stand_in, capsys):
    stand_in(lambda *_, **__: None)
    assert main(["benchmark", "--num_inputs", "3"]) == 2
    assert "--num_inputs is 3: the benchmark of drafts has no such" in capsys.readouterr().err


def test_where_files_were_is_not_kept():
    options = growth.GrowthOptions(figure="somewhere/curves.svg")
    kept = benchmark._settings(options, Models(target="somewhere/target"), GenerateOptions())
    assert kept["options"]["figure"] == "curves.svg"
    assert kept["options"]["target"] == "target"
