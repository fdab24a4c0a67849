"""``spec-t5x benchmark``: rows, records and the table."""

import dataclasses
import json
import os
import re

import pytest

from spec_t5x import registry
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark import paper_tables, sweep
from spec_t5x.labs.benchmark.comparison import Comparison
from spec_t5x.labs.benchmark.iteration_parts import overhead
from spec_t5x.labs.benchmark.options import BenchmarkOptions, TextSource, draft_and_verifier
from spec_t5x.labs.benchmark.step_times import StepTimes
from spec_t5x.models import sizes
from tests.labs.benchmark.test_simulated_acceptance import TINY

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

DECODING = GenerateOptions(max_decode_len=12, verifier="token", lenience=0.5)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("x\tMy sister\ty\nx\tWir gehen morgen.\ty\n", encoding="utf-8")
    return path


def cells(printed: str) -> list[str]:
    """Returns the lines of tables, without their padding."""
    return [re.sub(" +", " ", line) for line in printed.splitlines() if line.startswith("| ")]


def test_a_row_for_each_draft_and_verifier(tiny_pair, data, tmp_path, capsys):
    kept, file = tmp_path / "out" / "figures.json", tmp_path / "benchmark.gin"
    file.write_text(
        f'Models.target = "{tiny_pair / "target"}"\n'
        f'BenchmarkOptions.pairs = ("transformer:{tiny_pair / "draft"}/token",)\n'
        "BenchmarkOptions.temperatures = (0.0,)\n"
        "BenchmarkOptions.repeats = 3\n"
        "GenerateOptions.max_decode_len = 12\n",
        encoding="utf-8",
    )
    # Flags override gin.
    flags = ["--gamma", "2", "--gamma", "auto", "--repeats", "1"]
    arguments = ["benchmark", f"--gin_file={file}", "--data", str(data), "--json", str(kept)]
    assert main([*arguments, *flags]) == 0
    rows = [line for line in cells(capsys.readouterr().out) if "| yes |" in line]
    assert [row.split(" | ")[1:6] for row in rows] == [
        ["token", "0", "1", "12", gamma] for gamma in ("2", "auto")
    ]
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["source"]["data"] == "pairs.tsv" and report["models"]["target"] == "target"
    assert report["options"]["repeats"] == 1 and report["decoding"]["max_decode_len"] == 12
    assert [row["draft"] for row in report["rows"]] == ["transformer:draft"] * 2
    for row in report["rows"]:
        assert row["num_inputs"] == 2 and row["identical"] is True
        assert row["plain_tokens"] == row["speculative_tokens"] > 0
        assert len(row["plain_seconds"]) == len(row["speculative_setup_seconds"]) == 1
        assert row["plain_steps"] == 0 or row["gamma"] == "auto"
        assert row["predicted"] == row["predicted_speed_up_with_verification"]
        # Of "auto" the mean over iterations, of which each verifies what it drafts, but the last.
        iterations = row["target_calls"] - row["plain_steps"]
        assert row["gamma_mean"] == pytest.approx(row["verified"] / iterations, abs=1)


def test_drafts_are_checked_with_the_verifier_of_their_row(
    tiny_pair, data, made_up, monkeypatch, capsys
):
    compare = sweep.compare

    def of_trees(pair, texts, row, repeats):
        chain = dataclasses.replace(made_up, identical=True)
        return compare(pair, texts, row, repeats) if row.verifier == "tree" else chain

    # Other tests compare with chains.
    monkeypatch.setattr(sweep, "compare", of_trees)
    pair = ["--target", str(tiny_pair / "target"), "--data", str(data), "--repeats", "1"]
    rows = ["--draft", "copy/block", "--draft", f"{tiny_pair / 'draft'}"]
    tree = ["--gin.GenerateOptions.verifier='tree'", "--gin.GenerateOptions.widths=(2, 1)"]
    limits = ["--gamma", "2", "--gin.GenerateOptions.max_decode_len=8"]
    assert main(["benchmark", *pair, *rows, *tree, *limits]) == 0
    shown = [line for line in cells(capsys.readouterr().out) if "| yes |" in line]
    assert {row.split(" | ")[1] for row in shown} == {"block", "tree"}


def test_rows_are_kept_as_they_come(data, tmp_path, monkeypatch):
    kept, found = tmp_path / "figures.json", []

    def run(*_, **__):
        for draft in ("first", "second", "third"):
            if kept.is_file():
                found.append([row["draft"] for row in json.loads(kept.read_text())["rows"]])
            yield a_row(draft, 1.5)

    monkeypatch.setattr(sweep, "run", run)
    assert main(["benchmark", "--data", str(data), "--json", str(kept)]) == 0
    assert found == [["first"], ["first", "second"]]


def test_a_draft_that_cannot_pay_gets_no_row_with_auto(tiny_pair, data, monkeypatch, caplog):
    monkeypatch.setattr(sweep, "pays", lambda generator, batch, options: False)
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    options = BenchmarkOptions(gammas=("auto",), temperatures=(0.0,))
    caplog.set_level("INFO")
    source, told = TextSource(data=str(data)), []
    report = lambda *how_far: told.append(how_far)  # noqa: E731
    assert not list(sweep.run(options, report, models=models, decoding=DECODING, source=source))
    assert told[-1] == (1, 1, "all measured")
    assert "the draft pays at no likely acceptance rate" in caplog.text


def test_settings_are_all_combinations_or_one_list_at_a_time():
    options = BenchmarkOptions(
        pairs=("copy", "draft/block", "draft/own"), gammas=(2, "auto"), temperatures=(0.0,)
    )
    every = options.settings(DECODING)
    assert [(s.draft, s.decoding.verifier, s.decoding.gamma) for s in every] == [
        (draft, verifier, gamma)
        for draft, verifier in (("copy", "token"), ("draft", "block"), ("draft", "token"))
        for gamma in (2, "auto")
    ]
    # Settings of the run's own verifier are not for another.
    assert [s.decoding.lenience for s in every] == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5]
    options = dataclasses.replace(
        options, pairs=("copy",), batch_sizes=(1, 8, 32), every_combination=False
    )
    points = [(s.decoding.batch_size, s.decoding.gamma) for s in options.settings(DECODING)]
    assert points == [(1, 2), (8, 2), (32, 2), (1, "auto")]


def test_parts_are_not_timed_with_a_verifier_of_trees_of_any_name(monkeypatch):
    places = registry._PLACES["verifier"] | {"wide": "tests.test_verifiers:Wide"}
    monkeypatch.setitem(registry._PLACES, "verifier", places)
    options = BenchmarkOptions(pairs=("copy", "copy/wide"), parts=True)
    with pytest.raises(InputError, match="the verifier is wide: to time parts, choose one of ch"):
        options.settings(GenerateOptions())


@pytest.fixture
def tiny_sizes(monkeypatch):
    """Provides ``random:tiny_target`` and, for the paper's small draft, ``random:tiny_draft``."""
    draft = dataclasses.replace(TINY, emb_dim=8, num_decoder_layers=1)
    for name, config in {"tiny_target": TINY, "tiny_draft": draft}.items():
        monkeypatch.setitem(sizes.SIZES, name, config)
    monkeypatch.setitem(paper_tables.DRAFTS, "small", "tiny_draft")
    return Models(target="random:tiny_target")


@pytest.fixture
def drawn_row(tiny_sizes):
    """Provides ``drawn_row(draft, gamma, max_decode_len=12)``: two rows whose drafts are right."""

    def run(draft, gamma, *, max_decode_len=12, **options):
        lists = {"pairs": (draft,), "gammas": (gamma,), "temperatures": (1.0,), "batch_sizes": (2,)}
        options = BenchmarkOptions(alpha=1.0, repeats=2, **lists, **options)
        decoding = GenerateOptions(max_decode_len=max_decode_len)
        (row,) = sweep.run(options, models=tiny_sizes, decoding=decoding)
        return row

    return run


def test_simulated_acceptances_need_no_text_and_parts_are_timed(drawn_row):
    row = drawn_row("random:tiny_draft", 2, source_len=5, parts=True)
    # All accepted: three tokens an iteration, in both rows.
    assert (row["block_efficiency"], row["acceptance_rate"], row["target_calls"]) == (3, 1, 8)
    assert row["plain_tokens"] == row["speculative_tokens"] == 24
    # The prediction is until the batch's last row is done; both rows are alike.
    assert row["predicted"] == pytest.approx(3 / (2 * row["c"] + row["verification_cost"]))
    # On a busy machine the subtraction may leave nothing of one timing of a toy.
    assert all(len(times) == 5 and max(times) > 0 for times in row["parts"].values())
    (line,) = [line for line in cells(str(sweep.table([row]))) if "simulated" in line]
    assert line.startswith("| random:tiny_draft | simulated | 1 | 2 | 12 | 2 | 1.000 | 3.00 |")


def test_copies_of_random_sources_need_no_draft_model(drawn_row):
    row = drawn_row("copy", 3, source_len=20)
    assert row["acceptance_rate"] == 1 and 2 < row["block_efficiency"] <= 4


def test_table_2_is_timed_with_the_papers_settings(tiny_sizes, made_up, monkeypatch, capsys):
    monkeypatch.setattr(paper_tables, "TABLE_2", paper_tables.TABLE_2[:2])
    timed = []

    def compare_simulated(target, draft, options, *, alpha, **_):
        timed.append((options.gamma, options.temperature, options.verifier, alpha))
        return made_up

    monkeypatch.setattr(sweep, "compare_simulated", compare_simulated)
    flags = ["--target", tiny_sizes.target, "--draft", "random:tiny_draft", "--table_2"]
    assert main(["benchmark", *flags, "--repeats", "1", "--max_decode_len", "20"]) == 0
    # The second row has another draft.
    assert timed == [(7, 0.0, "token", 0.75)]
    (line,) = [line for line in cells(capsys.readouterr().out) if "EnDe" in line]
    assert line.startswith("| EnDe | random:tiny_draft | simulated | 0 | 1 | 20 | 7 |")
    assert "| 3.2 | 3.4 |" in line


def a_row(draft, speed_up, **values):
    settings = {"verifier": "block", "temperature": 0.0, "batch_size": 1, "max_decode_len": 128}
    spread = [speed_up - 0.1, speed_up + 0.1]
    measured = {"speed_up": speed_up, "speed_up_range": spread, "gamma": 4}
    return {"draft": draft, **settings, **measured, **values}


def test_the_last_sentence_names_the_best_row():
    rows = [a_row("copy", 1.2), a_row("transformer", 1.31, gamma=3), a_row("ngram", 0.9)]
    found = "transformer with verifier block at gamma 3, 1.31 times plain decoding (1.21–1.41)."
    assert sweep.best(rows) == f"Best: {found}"
    assert sweep.best([]) == "Best: plain decoding; no draft pays at a likely acceptance rate."


def test_cells_of_a_row():
    row = a_row("copy", 1.2, gamma="auto", plain_steps=2, target_calls=8, paper={"measured": 3.4})
    row |= {"identical": False, "divergences": [1, 2, 3], "overhead_quartiles": [0.025, 0.5]}
    found = sweep.table([row]).columns
    expected = {
        "speed-up": "1.20",
        "lowest–highest": "1.10–1.30",
        "gamma": "auto",
        "plain steps": "25%",
        "same text": "3 differ",
        "EMP": 3.4,
        "quartiles": "2.5%–50.0%",
    }
    assert {title: column for title, (column,) in found.items() if title in expected} == expected
    # Of numbers that no row has there is no column.
    assert "alpha" not in found and "doubt" not in found
    settled = sweep.table([row | {"gamma": 3, "identical": True}]).columns
    assert "plain steps" not in settled and settled["same text"] == ["yes"]


def test_the_overhead_is_what_drafts_and_verification_leave():
    """Medians 2.2 and 2 leave .2; a plain step of 1.25 has .25 beside its call."""
    parts = {"iteration": [2.0, 2.2, 9.0], "networks": [1.9, 2.0, 9.0]}
    found = overhead(parts | {"plain_step": [1.25] * 3, "target_call": [1.0] * 3})
    assert found["overhead"] == pytest.approx(0.2)
    assert found["overhead_share"] == pytest.approx(0.2 / 2.2)
    assert found["plain_overhead_share"] == pytest.approx(0.2)
    assert found["overhead_quartiles"] == pytest.approx([0.025, (0.05 + 0.2 / 2.2) / 2])


@pytest.fixture
def made_up() -> Comparison:
    """Provides a comparison whose figures are easily computed."""
    return Comparison(
        num_inputs=1,
        gamma=3,
        temperature=0.0,
        verifier="token",
        plain_tokens=120,
        speculative_tokens=120,
        plain_seconds=[3.0, 2.0, 4.0],
        speculative_seconds=[1.0, 2.0, 1.5],
        plain_setup_seconds=[1.0, 1.0, 1.0],
        speculative_setup_seconds=[0.5, 0.5, 0.5],
        plain_compile_seconds=0.0,
        speculative_compile_seconds=0.0,
        target_calls=48.0,
        plain_steps=0.0,
        accepted=72.0,
        verified=90.0,
        alpha=0.7,
        step_times=StepTimes(target=2.0, draft=0.2, verification=3.0),
        identical=None,
        divergences=[],
        outputs=[],
    )


def test_speed_ups_and_expectations_are_of_the_figures(made_up):
    made, times = made_up, made_up.step_times
    assert (made.block_efficiency, made.acceptance_rate) == (2.5, 0.8)
    assert made.speed_up == made.loop_speed_up == 2.0
    assert made.speed_up_range == (1.0, 3.0)
    fewer = dataclasses.replace(made, plain_tokens=30)
    values = json.loads(json.dumps(fewer.to_dict()))
    assert (fewer.plain_rate, fewer.speculative_rate, values["speed_up"]) == (10.0, 80.0, 8.0)
    assert (values["c"], values["verification_cost"]) == (0.1, 1.5) and "outputs" not in values
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert made.predicted == pytest.approx(tokens / 1.3)
    assert made.predicted_with_verification == pytest.approx(tokens / 1.8)
    # Gamma "auto" takes plain steps, which the theorem does not draft in.
    paced = dataclasses.replace(made, plain_steps=made.target_calls / 4)
    assert paced.predicted == pytest.approx((1 + 3 * tokens) / (1 + 3 * 1.3))
    # Of a tree, the tokens follow from the acceptance of all children, not from alpha.
    of_tree = dataclasses.replace(made, acceptance_by_position=[0.9, 0.5, 0.0])
    assert of_tree.predicted == pytest.approx((1 + 0.9 + 0.45) / 1.3)
    assert of_tree.predicted_with_verification == pytest.approx((1 + 0.9 + 0.45) / 1.8)
    # A long text of one row takes what the theorem says, a batch its slowest row's time.
    alone = times.batch_speed_up(0.7, 3, rows=1, length=4096)
    assert alone == pytest.approx(tokens / 1.8, rel=2e-3)
    assert times.batch_speed_up(0.7, 3, rows=32, length=4096) < alone


def test_random_drafts_fit_the_target_before_anything_is_measured(
    tiny_pair, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Generator, "load_target", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "pairs.tsv").write_text("My sister\tMeine Schwester\n")
    given = ["--target", str(tiny_pair / "target"), "--data", str(tmp_path / "pairs.tsv")]
    for size, message in (
        ("t5_1_1_xl", "draft random:t5_1_1_xl has 32128 tokens and target"),
        ("x", "size is 'x'"),
    ):
        assert main(["benchmark", *given, "--draft", "copy", "--draft", f"random:{size}"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "no --data was given: give a file of pairs"),
        ("--num_inputs 0", "--num_inputs is 0: give at least 1"),
        ("--gamma 0 --alpha 0.5", "--gamma is 0"),
        ("--gin.BenchmarkOptions.gammas=()", "--gamma is empty: give at least one"),
        ("--gin.BenchmarkOptions.table_2='no'", "--table_2 is 'no': give a value of type bool"),
        ("--alpha 1.5", "--alpha is 1.5"),
        ("--alpha 0.5 --data x", "--data is 'x' and acceptances are simulated for random"),
        ("--alpha 0.5 --gamma auto", "give numbers to simulate acceptances"),
        ("--alpha 0.5 --temperature -1", "temperature is -1"),
        ("--target random:t5_1_1_xl", "reads no text: give an alpha"),
        (
            "--target random:t5_1_1_xl --draft copy --alpha 0.5 --task foo",
            "task is 'foo' and the target has random weights",
        ),
        (
            "--target random:t5_1_1_xl --draft copy --alpha 0.5 --draft_weights int8",
            "draft 'copy' has no weights of a model: leave --draft_weights out",
        ),
        (
            "--target random:t5_1_1_xl --draft copy --alpha 0.5 --draft_temperature 0.5",
            "draft 'copy' takes no temperature: leave --draft_temperature out",
        ),
        ("--target random:t5_9 --draft random:t5_9 --alpha 0.5", "size is 't5_9'"),
        ("--target random:t5_1_1_xl --draft random:byt5_small --alpha 0.5", "has 384 tokens"),
        (
            "--target random:t5_1_1_xl --draft random:byt5_small --table_2",
            "random:byt5_small is not in Table 2",
        ),
        (
            "--target random:t5_1_1_xxl --table_2 --gamma 3",
            "--gamma is (3,) and the rows of --table_2 have their own",
        ),
        ("--table_2", "Table 2 is timed with random:t5_1_1_xxl"),
        (
            "--target random:t5_1_1_xxl --table_2 --draft random:t5_1_1_small --draft int8",
            "draft int8 is not in Table 2: give some of random:",
        ),
        (
            "--target random:t5_1_1_xxl --table_2 --max_decode_len 8 --max_decode_len 9",
            "max_decode_lens are (8, 9): --table_2 takes one",
        ),
        ("--data x.tsv --parts --draft copy/tree", "the verifier is tree: to time parts, choose"),
        ("--data x.tsv --draft copy/trees", "the verifier of copy is 'trees': choose one of token"),
        ("--alpha 0.5 --draft copy/tree", "copy/tree and acceptances are simulated: give the dr"),
        ("--alpha 0.5 --prefix a", "--prefix is 'a' and acceptances are simulated without texts"),
        ("--alpha 0.5 --num_inputs 9", "--num_inputs is 9 and acceptances are simulated for one"),
        ("--data x.tsv --source_len 3", "--source_len is 3 and sources are texts"),
        (
            "--data x.tsv --gin.GenerateOptions.gamma=8",
            "GenerateOptions.gamma is 8 and gammas (4,): give --gamma alone",
        ),
        (
            "--alpha 0.5 --gin.GenerateOptions.repetition_penalty=2.0",
            "repetition_penalty is 2.0 and acceptances are simulated without rules",
        ),
        ("--alpha 0.5 --gin.GenerateOptions.beams=2", "beams is 2"),
        ("--alpha 0.5 --verifier x", "unknown argument '--verifier'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "compare_simulated", None)
    assert main(["benchmark", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_may_have_a_drafts_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eagle" / "draft").mkdir(parents=True)
    assert draft_and_verifier("eagle/draft") == ("eagle/draft", "own")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "argument --json: . is a folder: give a file"),
        ("setup.py/x", "setup.py cannot be written to: give another folder"),
    ],
)
def test_a_file_for_the_figures_is_checked_first(path, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["benchmark", "--alpha", "0.5", "--json", path])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_device_takes_the_figures(monkeypatch):
    monkeypatch.setattr(sweep, "run", lambda *_, **__: iter([a_row("copy", 1.5)]))
    assert main(["benchmark", "--alpha", "0.5", "--json", os.devnull]) == 0
    assert not os.path.isfile(os.devnull)
