"""A run's answers, and what it refuses to mix or to continue."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from pathlib import Path

import jax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.inference import bulk, processes
from spec_t5x.inference.bulk import merge
from spec_t5x.inference.run_directory import Shards
from spec_t5x.inference.signals import Interrupted
from spec_t5x.loops.pace import Costs
from spec_t5x.machine import description
from tests.inference.echo import OPTIONS, Echo, Echoing


def test_a_line_for_each_input_in_order(runner):
    report = runner()
    lines = [json.loads(line) for line in report.merged.read_text().splitlines()]
    texts = runner.source.read_text().splitlines()
    assert [line["index"] for line in lines] == list(range(11))
    assert [line["input"] for line in lines] == texts
    for line, text in zip(lines, texts, strict=True):
        # T5X's fields, then those of ``generate --json``; the best output is the first.
        assert list(line)[:3] == ["index", "inputs", "prediction"]
        assert line["inputs"] == {"inputs_pretokenized": text}
        assert line["prediction"] == line["output"] == line["decodes"][0]["output"]
        assert line["output"].endswith(" 1") and len(line["decodes"]) == 2
        assert "input" not in line["decodes"][0]
        assert {"output_ids", "score", "target_calls", "accepted", "alpha"} <= set(line)
    assert sorted(runner.files()) == [
        "manifest.json",
        *(f"predictions-{n:05}-of-00004.jsonl" for n in range(4)),
        "predictions.jsonl",
    ]
    shards = [content for name, content in runner.files().items() if "-of-" in name]
    assert b"".join(shards) == runner.files()["predictions.jsonl"]
    assert runner.left_over() == []
    # Batches hold inputs of about one length: of 3 in a shard the two longest share one.
    widths = [int(line["output"].split()[-2]) for line in lines]
    assert widths == [16, 32, 32, 32, 32, 16, 32, 16, 32, 16, 16]
    assert (report.inputs, report.errors, report.block_efficiency) == (11, 0, 2.0)


def test_a_draft_that_was_left_out_is_reported(runner, monkeypatch):
    monkeypatch.setattr(Echoing, "verdict", "the draft was left out")
    assert runner().verdict == "the draft was left out"
    # The second run decodes nothing.
    assert runner().verdict is None


def test_what_is_finished_is_not_decoded_again(runner):
    runner()
    before, inodes = runner.files(), runner.inodes()
    report = runner(load=lambda: pytest.fail("there is nothing to decode"))
    assert runner.files() == before and runner.inodes() == inodes
    assert (report.inputs, report.tokens) == (11, 0)
    assert (report.block_efficiency, report.occupancy) == (None, None)
    (runner.output / "predictions-00002-of-00004.jsonl").unlink()
    (runner.output / "predictions.jsonl").unlink()
    runner()
    assert runner.files() == before
    changed = {name for name, inode in runner.inodes().items() if inode != inodes[name]}
    assert changed == {"predictions-00002-of-00004.jsonl"}


def test_bad_lines_are_reported_in_their_places_and_the_others_answered(runner, monkeypatch):
    lines = runner.source.read_bytes().splitlines()
    lines[2], lines[5], lines[10] = b"", b"\xff", b"x" * 40
    runner.source.write_bytes(b"\n".join(lines))
    report = runner()
    found = [json.loads(line) for line in report.merged.read_text().splitlines()]
    assert [line["index"] for line in found] == list(range(11))
    assert {line["line"]: line["error"][:23] for line in found if "error" in line} == {
        3: "the line is empty: give",
        6: "byte 1 is 0xff, not UTF",
        11: "the text has 40 tokens:",
    }
    assert report.errors == 3
    assert [text.split(":")[0] for text in report.named] == ["line 3", "line 6", "line 11"]
    # A run that has nothing left to decode reports them all the same.
    assert runner().named == report.named
    # All are counted, beyond those that are listed.
    monkeypatch.setattr(bulk, "_NAMED", 2)
    assert (runner().named, runner().errors) == (report.named[:2], 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoding": dataclasses.replace(OPTIONS, gamma=7)}, r"gamma was 4 and is 7\)"),
        ({"shard_size": 4}, "shard_size was 3 and is 4"),
        ({"settings": {"more": 1}}, 'target was "echo" and is null; more was null and is 1'),
    ],
)
def test_other_settings_are_refused_by_name(runner, change, message):
    runner()
    before = runner.files()
    with pytest.raises(InputError, match=message) as error:
        runner(**change)
    assert "\n" not in str(error.value)
    assert runner.files() == before
    (runner.output / "notes.txt").write_text("mine")
    runner(**change, overwrite=True)
    now = runner.files()
    assert now["manifest.json"] != before["manifest.json"] and "notes.txt" in now
    counts = {name.split("-of-")[1] for name in now if "-of-" in name}
    assert counts == {"00003.jsonl" if "shard_size" in change else "00004.jsonl"}


def test_another_field_of_the_same_lines_is_refused(runner):
    runner.source.write_text('{"a": "one", "b": "two"}\n' * 4)
    runner(field="a")
    with pytest.raises(InputError, match='field was "a" and is "b"'):
        runner(field="b")


def test_a_smaller_batch_goes_on_after_one_that_was_too_large(runner, caplog):
    runner()
    (runner.output / "predictions.jsonl").unlink()
    (runner.output / "predictions-00002-of-00004.jsonl").unlink()
    before = runner.files()
    runner(decoding=dataclasses.replace(OPTIONS, batch_size=1))
    assert "batch_size was 2 and is 1: scores may differ in last digits" in caplog.text
    assert before.items() < runner.files().items()


def test_inputs_are_not_deleted_as_answers(runner):
    runner()
    own = dataclasses.replace(runner, source=runner.output / "predictions.jsonl")
    with pytest.raises(InputError, match="which overwrite may delete: move it"):
        own(field="prediction", overwrite=True)
    assert own.source.exists()


def test_a_checkpoint_is_known_by_its_content(runner):
    runner(settings={"target": {"name": "here", "content": "aaaa"}})
    runner(settings={"target": {"name": "moved", "content": "aaaa"}})
    with pytest.raises(InputError, match=r"target was here \(aaaa\) and is here \(bbbb\)"):
        runner(settings={"target": {"name": "here", "content": "bbbb"}})
    draft = {"target": {"name": "here", "content": "aaaa"}, "draft": {"name": "d", "content": "cc"}}
    with pytest.raises(InputError, match=r"settings \(draft was null and is d \(cc\)\)"):
        runner(settings=draft)


AUTO = dataclasses.replace(OPTIONS, gamma="auto")


def costly(measured: list[Costs], assumed: list[Costs]):
    """Makes a generator with a draft, which notes the costs that it measures and assumes."""

    class Costly(Echo):
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "draft", "a draft")

        def costs(self, batch, options):
            measured.append(Costs.by_formula(c=0.1 * (1 + len(measured))))
            return measured[-1]

        def assume(self, options, costs):
            assumed.append(costs)

    return Costly


def test_costs_are_those_of_the_first_input_that_can_be_decoded(runner):
    lines = runner.source.read_bytes().splitlines()
    runner.source.write_bytes(b"\n".join([b""] * 4 + lines[4:]))
    measured, assumed = [], []
    runner(decoding=AUTO, load=costly(measured, assumed))
    # The first missing shard is another one when the run is resumed.
    for name in ("predictions.jsonl", "predictions-00003-of-00004.jsonl"):
        (runner.output / name).unlink()
    runner(decoding=AUTO, load=costly(measured, assumed))
    assert len(measured) == 1 and assumed == [*measured, *measured]
    # There are none without a draft, or if no input can be decoded.
    assert runner.elsewhere("plain")(decoding=AUTO).errors == 4
    runner.source.write_text(f"{'x' * 40}\n" * 4)
    report = runner.elsewhere("long")(decoding=AUTO, load=costly(measured, assumed))
    assert report.errors == 4 and len(measured) == 1


def test_a_run_that_starts_anew_measures_anew(runner):
    measured, assumed = [], []
    runner(decoding=AUTO, load=costly(measured, assumed))
    for path in runner.output.glob("predictions*"):
        path.unlink()
    other = dataclasses.replace(AUTO, verifier="token")
    runner(decoding=other, load=costly(measured, assumed))
    assert len(measured) == 2 and assumed == measured


def test_costs_are_measured_once_for_all_of_a_run(runner):
    """Sampled texts depend on gamma, and gamma on the costs."""
    measured, assumed = [], []
    auto, Costly = AUTO, costly(measured, assumed)  # noqa: N806
    runner(decoding=auto, load=Costly)
    (runner.output / "predictions.jsonl").unlink()
    (runner.output / "predictions-00002-of-00004.jsonl").unlink()
    runner(decoding=auto, load=Costly)
    assert len(measured) == 1 and assumed == [*measured, *measured]
    (runner.output / "costs.json").write_text("[]")
    (runner.output / "predictions-00001-of-00004.jsonl").unlink()
    (runner.output / "predictions.jsonl").unlink()
    with pytest.raises(InputError, match="costs.json cannot be read .*: give --overwrite"):
        runner(decoding=auto, load=Costly)


def test_a_stopped_run_says_how_to_resume_it(runner):
    def stop(signal_number=15):
        raise Interrupted(signal_number)

    for overwrite, again in (
        (False, "command again to resume"),
        (True, "command without --overwrite"),
    ):
        with pytest.raises(Interrupted) as stopped:
            runner(load=stop, overwrite=overwrite)
        assert again in stopped.value.how_far


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSYS])
def test_a_finished_run_is_joined_without_a_lock(runner, number, monkeypatch):
    runner()

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert merge(runner.output).inputs == 11
    (runner.output / "predictions.jsonl").unlink()
    refused = rf"cannot lock .* \({os.strerror(number)}\): give a directory that can be written"
    with pytest.raises(InputError, match=refused):
        merge(runner.output)
    with pytest.raises(InputError, match=refused):
        runner()


def test_other_inputs_are_refused(runner):
    runner()
    lines = runner.source.read_text().splitlines(keepends=True)
    for others in ([*lines[:7], "other\n", *lines[8:]], [lines[1], lines[0], *lines[2:]]):
        runner.source.write_text("".join(others))
        with pytest.raises(InputError, match="the 11 inputs of .* are now 11 others of"):
            runner()
    runner.source.write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match="the 11 inputs of .* are now 10 others of"):
        runner()
    moved = runner.source.with_name("moved.txt")
    moved.write_text("".join(lines))
    dataclasses.replace(runner, source=moved)()


def test_a_cpu_with_other_vectors_does_not_continue(runner, monkeypatch):
    processors = ["flags : fpu avx2 fma avx\nmodel name : one", "flags : avx fma avx512f"]
    monkeypatch.setattr(description, "processor_features", lambda: processors[0])
    runner()
    (runner.output / "predictions.jsonl").unlink()
    assert runner().errors == 0
    processors.pop(0)
    message = 'instructions was "avx avx2 fma" and is "avx avx512f fma"'
    with pytest.raises(InputError, match=message):
        runner()


def test_what_decides_the_last_digits_is_in_the_manifest(runner):
    runner()
    found = json.loads(runner.files()["manifest.json"])["settings"]
    names = ("platform", "device_kind", "instructions", "models_and_devices", "kernels", "jax")
    assert set(names) <= set(found)
    assert found["jax"] == jax.__version__


def test_inputs_that_change_under_way_are_refused(runner):
    def load():
        runner.source.write_text(runner.source.read_text().replace("04 ", "44 "))
        return Echo()

    with pytest.raises(InputError, match=r"has changed since the run started \(shard 1\)"):
        runner(load=load)


def test_predictions_of_unknown_origin_are_left_alone(runner):
    runner()
    (runner.output / "manifest.json").unlink()
    with pytest.raises(InputError, match="holds predictions and no manifest.json"):
        runner()
    # The remedy that the error names.
    assert runner(overwrite=True).errors == 0
    later = json.loads(runner.files()["manifest.json"]) | {"version": 2}
    for content in ("[" * 100_000, json.dumps(later)):
        (runner.output / "manifest.json").write_text(content)
        with pytest.raises(InputError, match="manifest.json is not a manifest of this release"):
            runner()


def test_a_directory_below_a_file_is_refused(runner):
    with pytest.raises(InputError, match=r"cannot make .* \(Not a directory\): give another --out"):
        runner(output_dir=str(runner.source / "out"))


def test_shards_beyond_five_digits_are_found(tmp_path):
    shards = Shards(directory=tmp_path, total=100_001, size=1)
    shards.write(100_000, [b"{}\n"])
    assert shards.unfinished() == list(range(100_000))


def test_damaged_files_are_found(runner):
    runner()
    whole = runner.files()["predictions.jsonl"]
    (runner.output / "predictions.jsonl").write_bytes(whole[:-20])
    with pytest.raises(InputError, match="predictions.jsonl has changed since it was written: de"):
        runner()
    (runner.output / "predictions.jsonl").unlink()
    shard = runner.output / "predictions-00001-of-00004.jsonl"
    content = shard.read_bytes()
    lines = content.splitlines(keepends=True)
    for damaged in (lines[:-1], lines[::-1], [*lines, lines[0]]):
        shard.write_bytes(b"".join(damaged))
        with pytest.raises(InputError, match="00001-of-00004.jsonl has changed since it was writ"):
            runner()
    assert not (runner.output / "predictions.jsonl").exists()
    shard.write_bytes(content)
    runner()
    # Once joined the shards may be deleted.
    for path in runner.output.glob("*-of-*"):
        path.unlink()
    report = runner(load=lambda: pytest.fail("there is nothing to decode"))
    assert (report.inputs, report.errors) == (11, 0)
    assert runner.files()["predictions.jsonl"] == whole


def test_each_worker_takes_its_part_and_the_last_joins_all(runner):
    runner()
    before, alone = runner.files(), runner.elsewhere("workers")
    first = alone(shard_index=0, shard_count=2)
    assert (first.merged, first.inputs, first.shards_left) == (None, 6, 2)
    with pytest.raises(InputError, match="gamma was 4 and is 7"):
        alone(dataclasses.replace(OPTIONS, gamma=7), shard_index=1, shard_count=2)
    last = alone(shard_index=1, shard_count=2)
    assert (last.inputs, last.shards_left) == (11, 0)
    assert alone.files() == before


def test_workers_share_the_settings_of_the_first_before_it_has_written_a_shard(runner):
    def stopped():
        raise InputError("no model")

    with pytest.raises(InputError, match="no model"):
        runner(load=stopped, shard_index=0, shard_count=2)
    with pytest.raises(InputError, match="gamma was 4 and is 7"):
        runner(dataclasses.replace(OPTIONS, gamma=7), shard_index=1, shard_count=2)


def test_two_runs_in_one_directory_are_one_too_many(runner, monkeypatch):
    runner.output.mkdir()
    survey = bulk.survey
    # Refused before the inputs are read, which may take long.
    monkeypatch.setattr(bulk, "survey", None)
    for process in (0, 3):
        with (
            processes.locked(runner.output, process),
            pytest.raises(InputError, match=r"out is in use by process \d+ on"),
        ):
            runner()
    monkeypatch.setattr(bulk, "survey", survey)
    # What is left of one that was killed does not matter.
    assert runner().errors == 0


def test_a_lock_that_links_to_another_file_leaves_it_alone(runner, tmp_path):
    runner.output.mkdir()
    (tmp_path / "precious").write_text("text")
    (runner.output / ".lock-00000").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot lock .*lock-00000"):
        runner()
    assert (tmp_path / "precious").read_text() == "text"


def test_a_worker_that_begins_while_inputs_are_read_keeps_its_run(runner, monkeypatch):
    """The worker found the old manifest; a new one would be of other settings than its own."""
    runner()
    before, survey = runner.files(), bulk.survey
    with contextlib.ExitStack() as held:

        def surveyed(*arguments):
            held.enter_context(processes.locked(runner.output, 1))
            return survey(*arguments)

        monkeypatch.setattr(bulk, "survey", surveyed)
        with pytest.raises(InputError, match=r"out is in use by process \d+ on"):
            runner(overwrite=True, settings={"target": "another"})
    assert runner.files() == before


def test_overwriting_that_is_killed_leaves_no_answers_without_their_manifest(runner, monkeypatch):
    runner()
    unlink, another = Path.unlink, {"target": "another"}

    def killed(path, **options):
        if path.name.startswith("predictions-00002"):
            raise SystemExit
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(SystemExit):
            runner(overwrite=True, settings=another)
    with pytest.raises(InputError, match="was started with other settings"):
        runner(settings=another)
    runner(overwrite=True, settings=another)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_dir": None}, "give --output_dir DIR"),
        ({"model_parallel": 3}, "model_parallel is 3 and does not divide"),
    ],
)
def test_options_are_checked_before_anything_is_read(runner, options, message):
    with pytest.raises(InputError, match=message):
        runner(**options)
