"""Item "public": pairs, what is refused before a download, measured stand-ins, and resumption.

The models are those of ``public_stand_ins``, and some in the layout of T5X's legacy checkpoints.
"""

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub import constants

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.huggingface import hub
from spec_t5x.checkpoints.loading import load
from spec_t5x.cli.main import main
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.reproduction import (
    public,
    public_measurements,
    public_pairs,
    public_plan,
    stock_t5x,
)
from spec_t5x.labs.reproduction.contents import Origin, ReproduceOptions
from spec_t5x.labs.reproduction.public_pairs import built_in, paper_draft, read_pairs_file
from spec_t5x.models import weights
from tests import public_stand_ins
from tests.checkpoints.faults import message_of
from tests.checkpoints.hub_server import serving

LEGACY = Path(__file__).parents[2] / "checkpoints" / "data" / "t5x_legacy" / "checkpoint_7"
IS_INSTALLED = stock_t5x.is_installed
# As the built-in pairs are named.
TARGET, DRAFT = "google-t5/t5-base", "google-t5/t5-small"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> Path:
    """Provides the folder of ``public_stand_ins``."""
    return public_stand_ins.write(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture
def pair(stand_ins) -> dict:
    """Provides a pair of the stand-ins, as a file has it."""
    return {
        "target": str(stand_ins / "t5-base"),
        "draft": [str(stand_ins / "t5-small")],
        "task": "EnDe",
        "prefix": "translate English to German: ",
        "data": str(stand_ins / "ende.tsv"),
    }


@pytest.fixture
def pairs_file(tmp_path, pair):
    """Provides ``pairs_file(*pairs)``: a file with these, or with ``pair`` changed."""

    def write(*pairs, **changes) -> Path:
        path = tmp_path / "pairs.json"
        path.write_text(json.dumps(list(pairs) or [pair | changes]), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def no_plan_left():
    public.plan.cache_clear()


@pytest.fixture(autouse=True)
def without_t5x(monkeypatch):
    monkeypatch.setattr(stock_t5x, "is_installed", lambda: False)


# Pairs


@pytest.mark.parametrize(
    ("target", "files", "drafts", "data"),
    [
        (
            "google-t5/t5-11b",
            {},
            ("google-t5/t5-small", "google-t5/t5-base", "google-t5/t5-large", "copy"),
            ["wmt_t2t_ende_v003", "cnn_dailymail_v002"],
        ),
        ("google-t5/t5-base", {"EnDe": "a.tsv"}, ("google-t5/t5-small", "copy"), ["a.tsv"]),
        ("google-t5/t5-small", {"CNN/DM": "b.jsonl"}, ("copy",), ["b.jsonl"]),
    ],
)
def test_a_public_target_has_the_papers_smaller_drafts(target, files, drafts, data):
    pytest.importorskip("seqio")
    found = built_in(target, files, None)
    assert [pair.draft for pair in found] == [drafts] * len(data)
    assert [pair.source.name for pair in found] == data
    prefixes = {"EnDe": "translate English to German: ", "CNN/DM": "summarize: "}
    # A seqio task has its prefix itself.
    assert all(pair.source.prefix == (files and prefixes[pair.task] or "") for pair in found)
    # As T5 reports them; a seqio task has its metrics itself.
    metrics = {"EnDe": "bleu_intl", "CNN/DM": "rouge"}
    assert not files or [pair.source.metric for pair in found] == [metrics[task] for task in files]
    tables = built_in(target, files or {"EnDe": "a.tsv"}, Path("tables"))[0].draft
    assert tables == (*drafts[:-1], "unigram:tables", "bigram:tables", "copy")


def test_the_pairs_of_a_folder(tmp_path, stand_ins):
    """T5X's checkpoints as ``fetch_checkpoints.sh`` leaves them, or the Hub's directories."""
    for name in ("base", "small"):
        folder = tmp_path / f"t5_1_0_{name}" / "checkpoint_1000000"
        convert(stand_ins / "native" / f"t5-{name}", folder, to="t5x")
    vocabulary = tmp_path / "vocabularies" / "cc_all.32000.100extra" / "sentencepiece.model"
    vocabulary.parent.mkdir(parents=True)
    shutil.copy(stand_ins / "t5-base" / "spiece.model", vocabulary)
    data = (f"EnDe={stand_ins}/ende.tsv",)

    (each,) = public.plan(ReproduceOptions(models=tmp_path, data=data))
    assert (each.pair.label, each.pair.vocabulary) == ("t5_1_0_base", str(vocabulary))
    assert each.pair.draft == (f"{tmp_path}/t5_1_0_small", "copy")
    (each,) = public.plan(ReproduceOptions(models=stand_ins, data=data, target="t5_1_0_base"))
    assert (each.pair.name, each.pair.vocabulary) == ("t5-base/EnDe", None)
    assert each.pair.draft == (f"{stand_ins}/t5-small", "copy")


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        (
            "",
            "has no google-t5/t5-3b (t5_1_0_xl): give --target google-t5/t5-small or google-t5/t5-",
        ),
        ("absent", "absent holds no t5_1_0_small, no t5_1_0_base, no "),
    ],
)
def test_what_a_folder_lacks_is_told(stand_ins, models, reason):
    options = ReproduceOptions(models=stand_ins / models, data=("EnDe=a.tsv",), target="t5-3b")
    assert reason in message_of(public.plan, options)


@pytest.mark.parametrize(
    ("draft", "theirs"),
    [
        ("google-t5/t5-small", "T5-small"),
        ("transformer:/there/flan_t5_large", "T5-large"),
        ("unigram:/there/tables-small", "unigram"),
        ("copy", None),
        ("someone/smallish", None),
        # Of two sizes, either may be meant.
        ("someone/t5-base-from-small", None),
    ],
)
def test_drafts_are_beside_the_papers(draft, theirs):
    assert paper_draft(draft) == theirs


@pytest.mark.parametrize(
    ("task", "draft", "temperature", "gamma"),
    [
        ("CNN/DM", "t5-large", 1.0, 3),
        ("CNN/DM", "copy", 0.0, 5),
        ("EnDe", "copy", 0.0, 7),
        ("mine", "t5-base", 1.0, 5),
    ],
)
def test_gammas_are_the_papers(task, draft, temperature, gamma):
    assert public_measurements.paper_gamma(task, draft, temperature) == gamma


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafts": "x"}, "pair 1 has an unknown field 'drafts', did you mean 'draft'?: remove it"),
        ({"limit": 3}, "pair 1 has an unknown field 'limit'"),
        ({"target": ""}, "pair 1 has no target: give one"),
        ({"draft": [3]}, "pair 1: give texts, and a text or a list of texts for draft"),
        ({"prefix": 3}, "pair 1: give texts, and a text or a list of texts for draft"),
        ({"draft": ["a/x", "b/x"]}, "give each once, in folders of different names"),
        ({"weights": "int9"}, "pair 1: weights is 'int9': choose one of auto, int8, int4"),
        ({"metric": "chrf"}, "pair 1: metric is 'chrf': choose one of bleu, bleu_intl, rouge"),
        ({"data": None}, "pair 1: data is None: give a file of pairs, or mixture_or_task"),
    ],
)
def test_mistakes_in_a_pairs_file(pairs_file, changes, reason):
    assert reason in message_of(read_pairs_file, pairs_file(**changes))


def test_a_pairs_file_is_a_list_of_distinct_pairs(pairs_file, pair):
    assert "is no list of pairs" in message_of(read_pairs_file, _written(pairs_file(), "{}"))
    assert "Expecting value" in message_of(read_pairs_file, _written(pairs_file(), "[target"))
    assert "pair 1 is 3: give an object" in message_of(read_pairs_file, pairs_file(3))
    twice = message_of(read_pairs_file, pairs_file(pair, pair | {"draft": "copy"}))
    assert "pairs 1 and 2 are both t5-base/EnDe: give one" in twice
    first, second = read_pairs_file(pairs_file(pair, pair | {"draft": "copy", "task": "x/y"}))
    assert (first.name, second.name, second.draft) == ("t5-base/EnDe", "t5-base/x-y", ("copy",))


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# The device

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "target"),
    [
        # Twice what bfloat16 takes.
        (64 * GIB, "google-t5/t5-11b"),
        (32 * GIB, "google-t5/t5-3b"),
        (6 * GIB, "google-t5/t5-large"),
        (GIB // 2, "google-t5/t5-small"),
        (None, "google-t5/t5-11b"),
    ],
)
def test_the_largest_target_that_fits_is_chosen(monkeypatch, free, target):
    monkeypatch.setattr(public_plan.description, "free_memory", lambda: free)
    assert public_plan.automatic_target()[:2] == (target, "auto")


@pytest.mark.parametrize(
    ("free", "target", "weights"),
    [
        (28 * GIB, "google-t5/t5-11b", "auto"),
        # A v5e chip; an L4 less what JAX leaves and other programs take.
        (15.7 * GIB, "google-t5/t5-11b", "int8"),
        (11 * GIB, "google-t5/t5-3b", "auto"),
        (7 * GIB, "google-t5/t5-3b", "int8"),
    ],
)
def test_a_larger_target_in_int8_is_preferred(monkeypatch, free, target, weights):
    monkeypatch.setattr(public_plan, "DraftOptions", partial(DraftOptions, dtype="bfloat16"))
    monkeypatch.setattr(public_plan.description, "free_memory", lambda: round(free))
    chosen = public_plan.automatic_target()
    assert chosen[:2] == (target, weights)
    (pair,) = built_in(chosen.name, {"EnDe": "a.tsv"}, None, weights=chosen.weights)
    assert pair.label == target.partition("/")[2] + (" int8" if weights == "int8" else "")
    planned = public_plan.Planned(pair=pair, needs=chosen.needs, target_bytes=1, batch_size=1)
    (line,) = public_plan.describe([planned], [1])
    assert (" with the target's matrices in int8, a rounded model;" in line) == (weights == "int8")


def test_a_rounded_target_has_the_bytes_that_were_planned(stand_ins, pairs_file):
    (pair,) = read_pairs_file(pairs_file(weights="int8"))
    generator = public_measurements.ModelsInMemory().generator(pair)
    ours, theirs = (
        jax.tree.leaves(each.target.weights)
        for each in (generator, Generator.load(pair.target, weights="int8"))
    )
    assert all(map(np.array_equal, ours, theirs))
    # Kernels of this CPU pad small matrices, so that the bytes are those of XLA's.
    rounded = weights.rounded(load(pair.target).params, 8, tied=True)
    needs = public_plan.check_pair(pair).target_bytes
    assert needs == sum(leaf.nbytes for leaf in jax.tree.leaves(rounded))


def test_a_tenth_of_weights_and_caches_is_for_temporary_arrays():
    assert public_plan.Needs(weights=1000, row=50).total(2) == 1210


def test_a_device_for_no_public_target_is_told(monkeypatch):
    monkeypatch.setattr(public_plan.description, "free_memory", lambda: 2**24)
    reason = "the device has 16 MiB and google-t5/t5-small takes more: use a larger device, or --"
    assert message_of(public_plan.automatic_target).startswith(reason)


def test_the_memory_is_that_of_the_weights_and_caches(stand_ins, pairs_file):
    (pair,) = read_pairs_file(pairs_file())
    found = public_plan.check_pair(pair)
    sizes = [
        sum(leaf.stat().st_size for leaf in (stand_ins / name).glob("*.safetensors"))
        for name in ("t5-base", "t5-small")
    ]
    # The files have the float32 weights behind a header.
    assert found.needs.weights == pytest.approx(sum(sizes), rel=0.1)
    # Keys and values of source and text, of 3 layers in both.
    assert found.needs.row >= 3 * 2 * 2 * 8 * 4 * (512 + public_plan.MAX_DECODE_LEN)
    assert found.batch_size == 16


# Refused before weights are downloaded


@pytest.mark.parametrize(
    ("changes", "free", "reason"),
    [
        ({"draft": "other"}, None, "have different vocabularies (id "),
        ({}, 3000, "with its drafts and the device has 0 MiB: give a smaller target, or fewer"),
        ({"target": "absent"}, None, "no directory absent: give the path of a checkpoint"),
        ({"draft": "copi"}, None, "no draft 'copi', did you mean 'copy'?: give the dir"),
        ({"target": str(LEGACY), "draft": "copy"}, None, "holds no vocabulary: give one"),
    ],
)
def test_what_does_not_fit_is_told(monkeypatch, stand_ins, pairs_file, changes, free, reason):
    monkeypatch.chdir(stand_ins)
    if free is not None:
        monkeypatch.setattr(public_plan.description, "free_memory", lambda: free)
    (pair,) = read_pairs_file(pairs_file(**changes))
    assert reason in message_of(public_plan.check_pair, pair)


def test_absent_data_are_told_once_all_models_fit(pairs_file, pair):
    absent = pair | {"data": "absent.tsv"}
    both = pairs_file(absent, pair | {"task": "mine", "draft": "absent"})
    assert "no draft 'absent'" in message_of(public.plan, ReproduceOptions(pairs=both))
    assert "absent.tsv" in message_of(public.plan, ReproduceOptions(pairs=pairs_file(absent)))


@pytest.mark.parametrize("lost", ["weights", "half", "array"])
def test_a_half_copied_checkpoint_is_told(tmp_path, stand_ins, pairs_file, lost):
    copy = tmp_path / "copied"
    shutil.copytree(LEGACY if lost == "array" else stand_ins / "t5-base", copy)
    changes = {"target": str(copy)}
    if lost == "weights":
        (copy / "model.safetensors").unlink()
    elif lost == "half":
        os.truncate(copy / "model.safetensors", 5000)
    else:
        shutil.rmtree(next(copy.glob("target.*")))
        changes |= {"vocabulary": "bytes", "draft": "copy"}
    (pair,) = read_pairs_file(pairs_file(**changes))
    assert str(copy) in message_of(public_plan.check_pair, pair)


@pytest.fixture
def served(stand_ins, tmp_path, monkeypatch):
    """Provides a Hub with the stand-ins under the built-in names, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.snapshot.cache_clear()
    with serving() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        running.repositories = {
            TARGET: stand_ins / "t5-base",
            DRAFT: stand_ins / "t5-small",
        }
        yield running
    hub.snapshot.cache_clear()


@pytest.fixture
def options(stand_ins):
    """Provides the options of a built-in pair on a file."""
    return ReproduceOptions(quick=True, target="t5-base", data=(f"EnDe={stand_ins}/ende.tsv",))


def weights_of(running) -> set[str]:
    return {name for name in running.sent if name.endswith(".safetensors")}


def test_a_built_in_pair_is_checked_and_then_downloaded(served, options, caplog):
    pytest.importorskip("sacrebleu")
    public.plan(options)
    assert served.sent and not weights_of(served)
    caplog.set_level("INFO", logger="spec_t5x")
    public.check(options)
    assert weights_of(served) == {f"{name}/model.safetensors" for name in (TARGET, DRAFT)}
    plans = [
        line for line in caplog.messages if line.startswith("t5-base/EnDe with t5-small, copy")
    ]
    assert len(plans) == 1 and "of the device's" in plans[0]


def test_another_vocabulary_on_the_hub_is_told_before_the_download(served, stand_ins, options):
    served.repositories[DRAFT] = stand_ins / "other"
    assert "have different vocabularies" in message_of(public.check, options)
    assert not weights_of(served)


def test_without_a_network_the_reason_and_the_command_are_told(served, options, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"{TARGET} is no directory here and not " in message_of(public.check, options)
    # The configurations alone are in the cache.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    public.plan(options)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"run `hf download {TARGET}`" in message_of(public.check, options)


# The command


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("public", "--target", "t5-4b"), "target 't5-4b' is no public T5 1.0: give auto, one of"),
        (("public", "--data", "news.tsv"), "--data is 'news.tsv': give TASK=FILE, with EnDe or "),
        (("public", "--data", "EnDe=a", "--data", "EnDe=b"), "data has a and b for EnDe: give one"),
        (
            ("public", "--pairs", "p.json", "--target", "t5-3b"),
            "--target is for the built-in pairs, and --pairs p.json has its own: give one of th",
        ),
        (("public", "--pairs", "absent"), "cannot read --pairs absent (No such file or directory)"),
        (("table1", "--pairs", "p.json"), "--pairs is for the item public: name it, or leave it"),
    ],
)
def test_mistakes_of_the_command(capsys, tmp_path, arguments, reason):
    assert main(["reproduce", *arguments, "--output", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"spec-t5x: error: {reason}") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


SMALL = {
    "num_texts": 1,
    "pool": 2,
    "repeats": 1,
    "num_tokens": 12,
    "scored_texts": 2,
    "judged_texts": 2,
}


@pytest.fixture
def little(monkeypatch):
    """Decodes a few tokens, so that the item takes seconds."""
    monkeypatch.setattr(public_measurements, "_QUICK", SMALL)
    for module in (public_plan, public_measurements):
        monkeypatch.setattr(module, "MAX_DECODE_LEN", 8)


@pytest.mark.usefixtures("little", "quick_compilation", "kept_programs")
@pytest.mark.parametrize(("layout", "temperature"), [("huggingface", 0.0), ("t5x", 1.0)])
def test_stand_ins_are_measured_and_kept(monkeypatch, tmp_path, pairs_file, layout, temperature):
    pytest.importorskip("sacrebleu")
    changes = {}
    for module in (public, public_measurements):
        monkeypatch.setattr(module, "TEMPERATURES", (temperature,))
    if layout == "t5x":
        shutil.copytree(LEGACY, tmp_path / "t5-small")
        changes = {"target": str(LEGACY), "draft": f"{tmp_path}/t5-small", "vocabulary": "bytes"}
    command = ["reproduce", "public", "--quick", "--pairs", str(pairs_file(**changes))]
    command += ["--output", str(tmp_path / "out")]
    assert main(command) == 0
    written = (tmp_path / "out" / "results.json").read_text(encoding="utf-8")
    # Folders are private.
    assert str(tmp_path) not in written
    speed_ups, rates, leniences, quality = json.loads(written)["items"]["public"]["content"]
    _check_speed_ups(speed_ups, temperature)
    for table in (rates, leniences):
        alpha = [column["title"] for column in table["columns"]].index("our draft") + 1
        assert all(0 <= row[alpha] <= 1 for row in table["rows"])
    assert {row[5] for row in quality["rows"]} == {"bleu"}
    assert {row[2] for row in quality["rows"]} == {"none", "t5-small"}
    if temperature == 0:
        assert len({row[6] for row in quality["rows"]}) == 1

    # Everything is kept: no model is loaded again.
    monkeypatch.setattr(Generator, "load_target", None)
    assert main(command) == 0
    again = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert again["items"] == json.loads(written)["items"]


def _check_speed_ups(table, temperature):
    titles = [(column["origin"], column["title"]) for column in table["columns"]]
    rows = [dict(zip(titles, row, strict=True)) for row in table["rows"]]
    printed = next(
        row
        for row in paper_tables.TABLE_2
        if (row.task, row.draft, row.temperature) == ("EnDe", "small", temperature)
    )
    first, automatic = rows
    assert first[Origin.PAPER, "speed-up"] == printed.measured
    assert (first[Origin.LABEL, "γ"], first[Origin.PAPER, "γ"]) == ("7", 7)
    assert automatic[Origin.LABEL, "γ"].startswith("auto: ")
    assert automatic[Origin.PAPER, "α"] is None
    assert all(row[Origin.MEASURED, "speed-up"] > 0 for row in rows)
    # At temperature 1 the texts are different draws.
    assert {row[Origin.MEASURED, "same text"] for row in rows} == {None if temperature else "yes"}


STAGES = [
    "public/t5-base/EnDe/acceptance",
    *(
        f"public/t5-base/EnDe/{part}/t{temperature}"
        for temperature in (0, 1)
        for part in ("quality/none", "t5-small", "quality/t5-small")
    ),
]


@pytest.mark.parametrize("deadly", STAGES)
def test_a_kill_in_any_stage_loses_that_stage_alone(
    monkeypatch, tmp_path, pairs_file, capsys, deadly
):
    pytest.importorskip("sacrebleu")
    number = STAGES.index(deadly)
    left, begun = [None] * number + ["kill"], "spec-t5x: measuring "

    def stage(*_):
        if left and left.pop(0):
            os.kill(os.getpid(), signal.SIGTERM)
        return {"tokens": 1, "rows": []}

    def run(status):
        command = ["reproduce", "public", "--quick", "--pairs", str(pairs_file())]
        assert main([*command, "--output", str(tmp_path / "out")]) == status
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(begun)]
        return [line.removeprefix(begun) for line in lines]

    for name in ("_rates", "_speed_ups", "_quality"):
        monkeypatch.setattr(public_measurements, name, stage)
    assert run(128 + signal.SIGTERM) == STAGES[: number + 1]
    assert run(0) == STAGES[number:]
    assert run(0) == []


@pytest.fixture
def baseline_alone(monkeypatch, tmp_path, pairs_file):
    """Provides ``run()``: the item with the baseline alone; returns status and section."""
    for name in ("_rates", "_speed_ups", "_quality"):
        monkeypatch.setattr(public_measurements, name, lambda *_: {"tokens": 0, "rows": []})

    def run() -> tuple[int, dict]:
        command = ["reproduce", "public", "--quick", "--pairs", str(pairs_file())]
        status = main([*command, "--output", str(tmp_path / "out")])
        found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
        return status, found["items"]["public"]

    return run


BASELINES = {f"public/t5-base/EnDe/baseline/t5x/t{t}": t for t in (0, 1)}


def test_the_baseline_has_rows_where_t5x_is(monkeypatch, tmp_path, baseline_alone):
    def stock(planned, draft, temperature, *_):
        row = {"draft": stock_t5x.NAME, "task": "EnDe", "target": "t5-base", "is_auto": False}
        row |= {"temperature": temperature, "speed_up": 0.625, "range": "0.60–0.64"}
        same = None if temperature else "yes"
        return {"tokens": 9, "rows": [row | {"plain_tokens_per_second": 40.0, "same_text": same}]}

    monkeypatch.setattr(public_measurements, "_stock", stock)
    status, section = baseline_alone()
    assert status == 0 and section["content"] == []
    assert not BASELINES.keys() & section["measured"].keys()

    monkeypatch.setattr(stock_t5x, "is_installed", lambda: True)
    assert baseline_alone()[0] == 0
    # Kept: nothing is measured again, which would fail.
    monkeypatch.setattr(public_measurements, "_stock", lambda *_: 1 / 0)
    status, section = baseline_alone()
    assert status == 0 and BASELINES.keys() <= section["measured"].keys()
    (table,) = section["content"]
    titles = [(column["origin"], column["title"]) for column in table["columns"]]
    for row, temperature in zip(table["rows"], BASELINES.values(), strict=True):
        cells = dict(zip(titles, row, strict=True))
        assert cells[Origin.LABEL, "temp."] == temperature
        assert cells[Origin.MEASURED, "speed-up"] == 0.625
        assert cells[Origin.MEASURED, "same text"] == (None if temperature else "yes")
        # The paper has no such row.
        assert cells[Origin.PAPER, "speed-up"] is None
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert report.count(f">{stock_t5x.NAME}</td>") == 2 and stock_t5x.NOTE in report


def test_a_broken_t5x_is_a_line_of_the_report(monkeypatch, tmp_path, baseline_alone):
    (tmp_path / "broken" / "t5x").mkdir(parents=True)
    source = 'raise AttributeError("jax has no attribute xla")'
    (tmp_path / "broken" / "t5x" / "__init__.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, "t5x", raising=False)
    monkeypatch.setattr(stock_t5x, "is_installed", IS_INSTALLED)
    status, section = baseline_alone()
    assert status == 1
    reason = "t5x cannot be imported (jax has no attribute xla): pip install 'spec_t5x[t5x]'"
    assert [line.partition(": ")[0] for line in section["not_computed"]] == list(BASELINES)
    assert all(reason in line and "\n" not in line for line in section["not_computed"])


def test_items_that_download_are_not_among_all():
    from spec_t5x.labs.reproduction import run as running

    assert "public" not in running.select(["all"])
    assert list(running.select(["public", "table1"])) == ["table1", "public"]
    assert set(public_pairs.TASKS) == {row.task for row in paper_tables.TABLE_2}
