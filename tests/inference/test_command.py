"""``spec-t5x infer``: files, tasks and gin files, messages and exit statuses."""

import itertools
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.digests import files_digest
from spec_t5x.checkpoints.storage.files import SIDECAR_NAME
from spec_t5x.cli.main import main
from spec_t5x.data.vocabulary import SPIECE_NAME, ByteVocabulary
from spec_t5x.generation import Generator
from spec_t5x.inference import processes
from spec_t5x.types import EOS_ID
from tests.inference.echo import Echo

seqio = pytest.importorskip("seqio")

from spec_t5x.inference.task_source import TaskSource  # noqa: E402
from spec_t5x.labs.local_tasks import register_tsv_task  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
_names = (f"infer_test_{n}" for n in itertools.count())


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch):
    """Replaces models by a pair that answers at once."""
    monkeypatch.setattr(Generator, "load", lambda *args, **kwargs: Echo())


@pytest.fixture
def run(tmp_path, tiny_pair, capsys):
    """Provides ``run(*flags)``: exit status, lines of output and of the log."""

    def run_main(*flags, pair=True):
        models = ["--target", tiny_pair / "target", "--draft", tiny_pair / "draft"] * pair
        flags = ["infer", *models, "--output_dir", tmp_path / "out", *flags]
        status = main([str(flag) for flag in flags])
        merged = tmp_path / "out" / "predictions.jsonl"
        lines = merged.read_text().splitlines() if merged.exists() else []
        said = capsys.readouterr()
        # A finished run prints its figures, and nothing else is printed.
        assert (len(said.out.splitlines()) == 1) == (status < 2)
        if said.out and merged.exists():
            assert json.loads(said.out)["errors"] == sum("error" in json.loads(x) for x in lines)
        return status, [json.loads(line) for line in lines], said.err.splitlines()

    return run_main


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("a b\nc\n")
    return path


def test_exit_status_0_and_one_line_if_all_is_well(run, lines, tmp_path):
    status, found, said = run("--input", lines)
    assert status == 0
    assert [line["inputs"] for line in found] == [
        {"inputs_pretokenized": "a b"},
        {"inputs_pretokenized": "c"},
    ]
    (line,) = said
    assert line.startswith("spec-t5x: answered 2 of 2 inputs in ")
    assert "block efficiency 2.00, occupancy 25%" in line
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    # The command's own default.
    assert settings["batch_size"] == 16
    assert run("--input", lines)[2][0].endswith("; nothing was left to decode")


def test_exit_status_1_and_a_clear_report_if_a_line_is_bad(run, lines):
    lines.write_bytes(b"\n" * 12 + b"good\n")
    status, found, said = run("--input", lines)
    assert status == 1
    assert [("error" in line) for line in found] == [True] * 12 + [False]
    assert said[0] == "spec-t5x: line 1: the line is empty: give at least one word"
    assert said[10].startswith("spec-t5x: ... and 2 more")
    assert said[12].startswith("spec-t5x: inputs with an error in place of an answer: 12;")
    # Mended, it is another run.
    lines.write_bytes(b"good\n" * 13)
    status, _, said = run("--input", lines)
    assert status == 2 and "are now 13 others of" in said[0]
    assert run("--input", lines, "--overwrite")[0] == 0


def test_a_worker_has_done_its_work_whatever_its_inputs_are(run, lines):
    """A scheduler takes another status for work to be done again; the joining worker reports."""
    lines.write_text("good\n\n" + "long " * 20 + "\ngood\n")
    flags = ("--input", lines, "--shard_size", "1", "--shard_count", "2", "--shard_index")
    status, found, said = run(*flags, "1")
    assert (status, found) == (0, [])
    assert said[0].startswith("spec-t5x: worker 1 answered 1 of 2 inputs")
    status, found, said = run(*flags, "0")
    assert status == 0 and ["error" in line for line in found] == [False, True, True, False]
    assert said[-1].startswith("spec-t5x: inputs with an error in place of an answer: 2;")
    status, found, said = run("--merge", pair=False)
    assert status == 1 and said[-1].startswith("spec-t5x: inputs with an error in")
    # Alone, it tells by itself.
    assert run("--input", lines, "--overwrite")[0] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("inputs_pretokenized", "text"), ("prediction", "text"), ("error", "theirs"), ("index", "x")],
)
def test_no_field_of_an_input_replaces_what_its_answer_says(run, tmp_path, name, text):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({name: "theirs, and long", text: "the text"}) + "\n")
    status, (line,), _ = run("--input", path, "--field", text)
    assert status == 0 and line["index"] == 0 and "error" not in line
    assert line["inputs"]["inputs_pretokenized"] == line["input"] == "the text"
    assert next(iter(line["inputs"])) == "inputs_pretokenized"
    assert line["prediction"] == line["output"]
    if name != "inputs_pretokenized":
        assert line["inputs"][name] == "theirs, and long"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no --input was given and --mixture_or_task None: give one"),
        (("--input", "-"), "input is standard input, which cannot be read again"),
        (("--mixture_or_task", "no_such_task"), "no task or mixture 'no_such_task'"),
        (("--input", "x", "--process_count", "2"), "process_index None: give all three"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(run, flags, message):
    status, found, said = run(*flags)
    assert (status, found) == (2, [])
    (line,) = said
    assert line.startswith("spec-t5x: error: ") and message in line


def register(tmp_path, tiny_pair, name=None) -> str:
    pairs = [f"{n} {'long ' * n}cat\tx{n}\n" for n in range(5)]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    files = [str(tmp_path / "pairs.tsv")] * 2
    name = name or next(_names)
    register_tsv_task(name, *files, str(tiny_pair / "target" / "spiece.model"))
    return name


def test_a_seqio_task_comes_with_its_own_ids_and_fields(run, tmp_path, tiny_pair, monkeypatch):
    seen = []
    collect = Echo.collect
    monkeypatch.setattr(
        Echo, "collect", lambda self, *batch: seen.append(batch[0]) or collect(self, *batch)
    )
    name = register(tmp_path, tiny_pair)
    status, found, _ = run("--mixture_or_task", name, "--split", "validation")
    assert status == 0
    assert [line["inputs"] for line in found] == [
        {"inputs_pretokenized": f"{n} {'long ' * n}cat", "targets_pretokenized": f"x{n}"}
        for n in range(5)
    ]
    assert {line["task"] for line in found} == {name}
    (batch,) = seen
    texts = sorted((line["input"] for line in found), key=len, reverse=True)
    assert batch.texts == texts
    task = seqio.get_mixture_or_task(name)
    for row, text in enumerate(texts):
        ids = [*task.output_features["inputs"].vocabulary.encode(text), 1]
        assert batch.tokens[row, : len(ids)].tolist() == ids


def test_an_example_without_a_text_has_that_of_its_ids():
    words = ByteVocabulary()
    source = TaskSource(tasks=[], split="train", lengths=None, vocabulary=words)
    example = {"task": "its task", "ids": [*words.encode("cat"), EOS_ID], "fields": {}}
    item = source.item(4, json.dumps(example).encode())
    assert (item.text, item.ids, item.task) == ("cat", example["ids"], "its task")
    assert (item.index, item.place) == (4, ("example", 4))


def test_a_mixture_is_its_tasks_in_order_cut_to_their_lengths(run, tmp_path, tiny_pair):
    names = [register(tmp_path, tiny_pair) for _ in range(2)]
    mixture = next(_names)
    seqio.MixtureRegistry.add(mixture, names, default_rate=1.0)
    flags = ("--mixture_or_task", mixture, "--task_feature_lengths", "{'inputs':9,'targets':7}")
    status, found, _ = run(*flags)
    assert status == 0
    assert [line["task"] for line in found] == [names[0]] * 5 + [names[1]] * 5
    assert [line["index"] for line in found] == list(range(10))
    # 9 tokens are padded to no more.
    assert found[4]["output"].split()[-2] == "9"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["max_decode_len"] == 7
    assert manifest["settings"]["tasks"] == names
    status, _, said = run("--mixture_or_task", mixture)
    assert status == 2 and "task_feature_lengths was {" in said[0]


def test_the_gin_file_takes_the_macros_of_a_t5x_launch(run, tmp_path, tiny_pair):
    name = register(tmp_path, tiny_pair)
    macros = {
        "CHECKPOINT_PATH": str(tiny_pair / "target"),
        "DRAFT_CHECKPOINT_PATH": str(tiny_pair / "draft"),
        "MIXTURE_OR_TASK_NAME": name,
        "MIXTURE_OR_TASK_MODULE": "spec_t5x.labs.local_tasks",
        "TASK_FEATURE_LENGTHS": {"inputs": 20, "targets": 9},
        "INFER_OUTPUT_DIR": str(tmp_path / "out"),
        "SPLIT": "validation",
    }
    flags = [f"--gin.{key}={value!r}" for key, value in macros.items()]
    file = REPOSITORY / "gin_configs" / "runs" / "infer.gin"
    status, found, said = run("--gin_file", file, *flags, pair=False)
    assert status == 0, said
    assert len(found) == 5
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    expected = {"max_decode_len": 9, "max_source_len": 20, "gamma": "auto", "batch_size": 32}
    assert expected.items() <= settings.items()
    assert settings["draft"]["name"] == str(tiny_pair / "draft")


def content_of(*place) -> str:
    return files_digest(*map(str, place))["content"]


def test_a_file_that_may_not_be_read_counts_by_its_size(tmp_path, monkeypatch):
    """Others of a shared folder may keep one to themselves."""

    def refuse(path, *_):
        raise PermissionError(path)

    found = []
    for text in ("x", "y", "yy"):
        (tmp_path / "optimizer.pt").write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            found.append(content_of(tmp_path))
    assert found[0] == found[1] != found[2]


def test_a_copied_checkpoint_is_the_same_and_a_trained_one_is_not(tiny_pair, tmp_path):
    copied, name = tmp_path / "copied", str(tiny_pair / "target")
    shutil.copytree(name, copied)
    before = content_of(copied)
    assert files_digest(name) == {"name": name, "content": before}
    assert content_of(f"mixed:{copied}") == f"mixed:{before}"
    assert content_of("copy:3") == "copy:3" and content_of("t5-draft") != "t5-draft"
    # The run's directory may be below a checkpoint.
    (copied / "answers").mkdir()
    (copied / "answers" / "manifest.json").write_text("{}")
    assert content_of(copied, copied / "answers") == before
    largest = max(copied.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert content_of(copied, copied / "answers") != before


def test_a_digest_is_of_t5xs_latest_checkpoint_and_of_all_parts_of_a_file(tmp_path):
    for step in (5, 10):
        (tmp_path / "t5x" / f"checkpoint_{step}").mkdir(parents=True)
        (tmp_path / "t5x" / f"checkpoint_{step}" / "checkpoint").write_bytes(bytes(5 << 20))
    before = content_of(tmp_path / "t5x")
    (tmp_path / "t5x" / "events.out").write_text("x")
    (tmp_path / "t5x" / "checkpoint_5" / "checkpoint").write_text("x")
    assert content_of(tmp_path / "t5x") == before
    for place in (0, (5 << 20) - 1):
        content = bytearray(5 << 20)
        content[place] = 1
        (tmp_path / "t5x" / "checkpoint_10" / "checkpoint").write_bytes(content)
        assert content_of(tmp_path / "t5x") != before


def test_a_digest_is_of_what_is_read_beside_a_checkpoint(tiny_pair, tmp_path):
    """T5X's activations and a vocabulary may be there; with config.json nothing is read."""
    checkpoint = tmp_path / "t5x" / "checkpoint_10"
    convert(tiny_pair / "target", checkpoint, to="t5x")
    (checkpoint / SIDECAR_NAME).unlink()
    spiece = checkpoint.joinpath(SPIECE_NAME).read_bytes()
    checkpoint.joinpath(SPIECE_NAME).unlink()
    found = [content_of(checkpoint)]
    for name, content in (
        ("config.gin", b"TRAIN_STEPS = 8"),
        ("tokenizer.json", b"{}"),
        ("config.gin", b"network.T5Config.mlp_activations = ('relu', 'linear')"),
        ("spiece.model", spiece),
    ):
        (tmp_path / "t5x" / name).write_bytes(content)
        found.append(content_of(tmp_path / "t5x"))
    assert found[0] == found[1] == found[2] and len(set(found)) == 3

    trained = tmp_path / "trained" / "checkpoint-500"
    convert(tiny_pair / "target", trained, to="huggingface")
    for file in (SPIECE_NAME, "tokenizer_config.json"):
        (trained / file).rename(trained.parent / file)
    before = content_of(trained)
    (trained.parent / "trainer_state.json").write_text("{}")
    assert content_of(trained) == before
    (trained.parent / "added_tokens.json").write_text('{"<new>": 120}')
    assert content_of(trained) != before

    model = tmp_path / "model"
    shutil.copytree(tiny_pair / "target", model)
    before = content_of(model)
    (model / "checkpoint_10").mkdir()
    (tmp_path / "spiece.model").write_bytes(spiece)
    assert content_of(model) == before


def test_processes_that_cannot_meet_are_one_line(run, lines, monkeypatch):
    def refuse(*args):
        raise ValueError("process_id must be given\nmore")

    monkeypatch.setattr(processes.jax.distributed, "initialize", refuse)
    status, _, said = run("--input", lines, "--multiprocess")
    assert status == 2
    assert "cannot connect to the other processes (process_id must be given)" in said[0]


def test_a_tpu_of_another_process_does_not_look_like_a_lost_one(run, lines, monkeypatch):
    def taken():
        raise RuntimeError("Unable to initialize backend 'tpu': it is in use (set JAX_PLATFORMS)")

    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *_: None)
    monkeypatch.setattr(processes.jax, "process_index", taken)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    status, _, said = run("--input", lines, "--multiprocess")
    assert status == 2
    assert "error: Unable to initialize backend 'tpu': it is in use: " in said[0]


def test_the_module_runs_as_t5x_programs_do(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["infer", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("spec_t5x.infer", run_name="__main__")
    assert ended.value.code == 0
    assert "usage: spec-t5x infer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--split", "train"),
            "--split is 'train' and there is no --mixture_or_task: leave it out",
        ),
        (("--task_module", "absent"), "--task_module is ('absent',) and there is no"),
    ],
)
def test_flags_of_tasks_beside_a_file_are_refused_and_bindings_are_not(
    run, tmp_path, flags, message
):
    path = tmp_path / "in.txt"
    path.write_text("a text\n")
    status, _, (line,) = run("--input", path, *flags)
    assert status == 2 and message in line
    assert run("--input", path, "--gin.InferOptions.split='train'")[0] == 0
