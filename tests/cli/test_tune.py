"""``spec-t5x tune``, ``--gamma auto`` and ``--guard``: from flags to files and back."""

import dataclasses
import json
from types import SimpleNamespace

import gin
import pytest

from spec_t5x.cli import settings
from spec_t5x.cli.main import _parser, main
from spec_t5x.experiments import tune_run
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.tuning import auto
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.prediction import best_of, choose, predict
from tests.tuning.figures import made_up, random_texts, rows_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["My sister", "Der alte Tisch", "a green bird"]
GOOD = {"good": (rows_of(random_texts(0.8, num=9, length=40)), 0.1)}
HOPELESS = {"bad": (rows_of(["0" * 40] * 9), 0.1)}


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    """No binding of another test, no cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def pair(tiny_pair) -> list[str]:
    return ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]


def result_of(figures, **changes) -> tune_run.TuneResult:
    """What a run would have come to."""
    measurement = made_up(figures, **changes)
    predictions = predict(measurement, TuningOptions(resamples=40))
    return tune_run.TuneResult(
        predictions=predictions,
        chosen=choose(predictions, 0.05),
        measured={},
        by_position={name: [0.5] for name in figures},
        num_inputs=9,
        num_tokens=360,
        confidence=0.95,
        compile_seconds=1.0,
    )


def test_a_run_prints_tables_and_writes_a_gin_file_that_generate_takes(
    pair, tmp_path, monkeypatch, capsys
):
    data, kept = tmp_path / "pairs.tsv", tmp_path / "out" / "figures.json"
    data.write_text("".join(f"x\t{text}\ty\n" for text in TEXTS), encoding="utf-8")
    written = tmp_path / "out" / "tuned.gin"
    draft = pair[-1]
    seen = []

    def measure(generator, drafts, texts, options, *, batch_sizes, tuning, report):
        seen.append((list(drafts), texts, options, tuning))
        figures = zip(drafts, (*GOOD.values(), *HOPELESS.values()), strict=True)
        return made_up(dict(figures), batch_sizes=batch_sizes)

    def compare(generator, texts, options, repeats):
        return SimpleNamespace(speed_up=1.5)

    monkeypatch.setattr(tune_run, "measure", measure)
    monkeypatch.setattr(tune_run, "compare", compare)
    arguments = ["tune", *pair, "--draft", "copy", "--data", str(data), "--max_decode_len=8"]
    arguments += ["--batch_size=2", "--budget=0.05", "--repeats=1", "--measure"]
    assert main([*arguments, f"--output={written}", f"--json={kept}"]) == 0
    ((drafts, texts, options, tuning),) = seen
    assert (drafts, texts, tuning.budget) == ([draft, "copy"], TEXTS, 0.05)
    assert options.max_decode_len == 8
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    head = next(row for row in rows if "measured" in row)
    names = [row[0].removeprefix("| ") for row in rows if len(row) == len(head)]
    assert sorted(names) == sorted(["draft", "---", draft, "copy"])
    assert any(line.startswith("Best: ") for line in lines)
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert (report["chosen"]["draft"], report["chosen"]["batch_size"]) == ("draft", 2)
    assert {p["gamma"] for p in report["predictions"]} == set(range(16))
    tried = [p for p in report["predictions"] if p["measured"] is not None]
    assert {p["draft"] for p in tried} == {"draft", "copy"}
    assert str(tmp_path) not in kept.read_text(encoding="utf-8")

    # Back in: the same settings, and text comes out.
    args = _parser().parse_args(["generate", f"--gin_file={written}"])
    args.gin_bindings = []
    gin.clear_config()
    models, options = settings.read(args)
    assert models.target == pair[1]
    assert models.draft_name() == draft
    assert (options.gamma, options.batch_size) == (report["chosen"]["gamma"], 2)
    assert options.max_decode_len == 8


def read_back(text, tmp_path):
    path = tmp_path / "tuned.gin"
    path.write_text(text, encoding="utf-8")
    args = _parser().parse_args(["infer", f"--gin_file={path}"])
    args.gin_bindings = []
    gin.clear_config()
    return settings.read(args)


def test_the_gin_file_holds_the_choice_and_how_it_was_found(tmp_path):
    options = GenerateOptions(temperature=1.0, top_k=5, widths=(2, 2), verifier="tree", gamma=1)
    models = {"target": "ende-target", "draft": "none", "dtype": "float32"}
    result = result_of(GOOD, batch_sizes=(1, 4))
    text = tune_run.gin_text(result, models, options)
    read_models, read_options = read_back(text, tmp_path)
    p = result.chosen
    assert (read_models.target, read_models.draft, read_models.dtype) == (
        "ende-target",
        "good",
        "float32",
    )
    expected = dataclasses.replace(options, gamma=p.gamma, batch_size=p.batch_size)
    assert read_options == expected and p.gamma > 0 and p.batch_size == 4
    assert f"{p.speed_up:.2f} times plain decoding" in text and "Required macros: none." in text

    hopeless = tune_run.gin_text(result_of(HOPELESS), models, options)
    read_models, read_options = read_back(hopeless, tmp_path)
    assert (read_models.draft_name(), read_options.gamma) == (None, 0)
    assert "no draft is sure to be faster" in hopeless


def test_tables_put_what_was_predicted_beside_what_was_measured():
    result = result_of(GOOD | HOPELESS, batch_sizes=(1,))
    good, bad = best_of(result.predictions)
    measured = {(p.draft, p.gamma, p.batch_size): p.speed_up / 1.1 for p in (good, bad)}
    lines = tune_run.table(dataclasses.replace(result, measured=measured)).splitlines()
    row = next(line for line in lines if line.startswith("| good |"))
    assert f"| {good.speed_up:.2f} |" in row and f"| {good.speed_up / 1.1:.2f} | +10% |" in row
    assert "measured" not in tune_run.table(result)
    shown = tune_run.curves(result).splitlines()
    assert shown[0].count("gamma") == 15 and len(shown) == 4


class Quick:
    """``auto`` with measurements that are made up, as the command calls it."""

    def __init__(self, monkeypatch, figures):
        self.count = 0
        ours = {"measure": self._measure, "confirm": lambda *args, **kwargs: 1.25}
        (self.figures,) = figures.values()
        tuned, guarded = auto.tuned, auto.guarded
        monkeypatch.setattr(auto, "tuned", lambda *a, **k: tuned(*a, **k, **ours))
        monkeypatch.setattr(
            auto, "guarded", lambda *a, **k: guarded(*a, **k, measure=self._measure)
        )

    def _measure(self, generator, drafts, texts, options, *, batch_sizes, **kwargs):
        self.count += 1
        ((name, _),) = drafts.items()
        return made_up({name: self.figures}, batch_sizes=batch_sizes)


@pytest.mark.parametrize(("figures", "gamma"), [(GOOD, "3"), (HOPELESS, "0, plain decoding")])
def test_gamma_auto_says_what_it_chose_and_remembers_it(pair, monkeypatch, capsys, figures, gamma):
    quick = Quick(monkeypatch, figures)
    plain = Generator.load(pair[1]).generate(TEXTS, GenerateOptions(max_decode_len=8))
    expected = [group[0].output for group in plain]
    for turn in range(2):
        assert main(["generate", *pair, "--gamma=auto", "--max_decode_len=8", *TEXTS]) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines() == expected
        *before, last = shown.err.splitlines()
        assert last.startswith("spec-t5x: gamma ") and " times plain decoding (" in last
        assert ("measuring which gamma" in "".join(before)) == (turn == 0)
        assert ("from an earlier run" in last) == (turn == 1)
        assert figures is GOOD or last.startswith(f"spec-t5x: gamma {gamma}")
    assert quick.count == 1


def test_auto_is_for_evaluate_and_infer_too(pair, monkeypatch, tmp_path, capsys):
    quick = Quick(monkeypatch, GOOD)
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{text}\ty z\n" for text in TEXTS), encoding="utf-8")
    common = [*pair, "--gamma=auto", "--max_decode_len=8", "--batch_size=1"]
    assert main(["evaluate", *common, "--data", str(data)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["block_efficiency"] > 0
    assert "spec-t5x: gamma " in shown.err
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    run = ["infer", *common, f"--input={texts}", f"--output_dir={tmp_path / 'answers'}"]
    assert main(run) == 0
    manifest = json.loads((tmp_path / "answers" / "manifest.json").read_text())
    gamma = manifest["settings"]["gamma"]
    assert gamma > 0 and manifest["settings"]["guard"] is True
    assert quick.count == 1
    # Given again, it goes on with what it began with, whatever would be found now.
    for path in (tmp_path / "cache" / "spec_t5x" / "tuning").iterdir():
        path.unlink()
    quick.figures = HOPELESS["bad"]
    assert main(run) == 0
    assert "nothing was left to decode" in capsys.readouterr().err


def test_a_guard_is_given_the_costs_of_its_gamma(pair, monkeypatch, capsys):
    quick = Quick(monkeypatch, GOOD)
    gamma = result_of(GOOD).chosen.gamma
    options = GenerateOptions(max_decode_len=8)
    plain = [group[0].output for group in Generator.load(pair[1]).generate(TEXTS, options)]
    command = ["generate", *pair, f"--gamma={gamma}", "--max_decode_len=8", *TEXTS]
    assert main([*command, "--guard"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == plain
    assert f"measuring what gamma {gamma} costs here" in shown.err
    assert quick.count == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--gamma=fast", "x"], "give a whole number from 0, or auto"),
        (["generate", "--gin.GenerateOptions.gamma='fast'", "x"], "gamma is 'fast': give a whole"),
        (["generate", "--gamma=auto", "--beams=2", "x"], "a beam search is not tuned"),
        (["generate", "--guard", "--beams=2", "x"], "a beam search has no guard"),
        (["generate", "--gamma=auto", "--adaptive=0.1", "x"], "gamma is auto and adaptive 0.1"),
        (["generate", "--guard", "--adaptive=0.1", "x"], "the guard is on and adaptive 0.1"),
        (
            ["infer", "--guard", "--temperature=1", "--input=x", "--output_dir=y"],
            "the guard is on and temperature 1",
        ),
        (["tune"], "data is None: give a file of pairs"),
        (["tune", "--data=absent.tsv"], "absent.tsv"),
        (["tune", "x", "--data=absent.tsv"], "both TEXT and absent.tsv"),
        (["tune", "--draft=copy", "--draft=copy", "x"], "drafts are copy, copy: give each"),
        (["tune", "--batch_size=0", "x"], "batch_size is 0"),
        (["tune", "--budget=0", "x"], "budget is 0.0"),
        (["tune", "--temperature=-1", "x"], "temperature is -1"),
        (["tune", "--draft=nothing", "x"], "no draft 'nothing'"),
        (["tune", "--output=.", "x"], "--output . is a folder"),
        (["tune", "--gin.Models.adaptive=0.1", "x"], "adaptive is 0.1"),
        (["tune", "--gin.Models.draft='none'", "x"], "the draft is none"),
        (["tune", "--gin.GenerateOptions.beams=2", "x"], "a beam search is not tuned"),
    ],
)
def test_mistakes_are_one_line(tiny_pair, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    target = ["--target", str(tiny_pair / "target")]
    drafted = any(text.startswith(("--draft", "--gin.Models.draft")) for text in arguments)
    draft = [] if drafted else ["--draft", "uniform"]
    try:
        status = main([arguments[0], *target, *draft, *arguments[1:]])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
