"""``measure.sh``: which stages run, what is kept of them, and what a failed one leaves."""

import json

import pytest

from tests.child import finished

STAGES = [
    *("laws_sampling", "laws_loops", "laws_drafts", "laws_models", "pairs"),
    *("steps_small", "steps_base", "steps_large"),
    *("table_2_small", "table_2_base", "table_2_large"),
    *("xl_plain", "xl_drafted", "xl_int8", "xl_kv8", "closed_8", "closed_32", "closed_64"),
]
ON_A_GPU = ["flags", "laws_kernels", "pairs_by_kernels", "table_2_small_by_kernels"]
# Notes the command, and does what a benchmark or pytest does: it writes its file at the end. The
# status of a program that ``timeout`` stops is 124.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *machine.accelerators) echo "${DEVICES:-jax.devices() is [CudaDevice(id=0)]}"; exit ;;
  "-c import "*) case "$*" in *"${ABSENT:-no such module}"*) exit 1 ;; *) exit ;; esac ;;
esac
ran=$*
echo "$* KERNELS=${SPEC_T5X_GPU_KERNELS:-} XLA_FLAGS=${XLA_FLAGS:-}" >> "$NOTES"
case "$*" in *"${FAILING:-no such stage}"*) echo "error: too little memory" >&2; exit 1 ;; esac
while [ $# -gt 0 ]; do
  case $1 in
    --json | --junitxml) case ${2:-} in /*) echo '{"rows": []}' > "$2" ;; esac ;;
    --compare) same=false ;;
    --dtype) [ "$2" != "${SAME_IN:-float32}" ] || same=true ;;
  esac
  shift
done
[ -z "${same:-}" ] || echo "{\\"comparison\\": {\\"identical\\": $same}}"
case "$ran" in *"${STOPPED:-no such stage}"*) exit 124 ;; esac
"""


@pytest.fixture
def measure(tmp_path):
    """Provides ``measure(*arguments)``: status, the commands that ran, errors."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments, machine="gpu", **variables):
        notes.unlink(missing_ok=True)
        variables |= {"PYTHON": str(python), "NOTES": str(notes)}
        result = finished("bash", f"scripts/{machine}/measure.sh", *arguments, **variables)
        ran = notes.read_text().splitlines() if notes.exists() else []
        return result.returncode, ran, result.stderr

    return run


@pytest.mark.parametrize("machine", ["gpu", "tpu"])
def test_every_stage_runs_once_and_leaves_its_file(measure, tmp_path, machine):
    output = tmp_path / "new" / "output"
    status, ran, error = measure(str(output), machine=machine)
    assert status == 0, error
    stages = STAGES + (ON_A_GPU if machine == "gpu" else [])
    assert {path.stem for path in output.glob("*.json")} == set(stages)
    by_kernels = [line for line in ran if "KERNELS=1" in line]
    assert sum("--table_2" in line for line in ran if line not in by_kernels) == 3
    assert sum("--table_2" in line for line in by_kernels) == (machine == "gpu")
    decoding = [line for line in ran if "benchmarks.decoding" in line]
    assert len(decoding) == 7
    assert all(("--by XLA" in line) == (machine == "tpu") for line in decoding)
    for options in ("--batch 32 64 128 ", "--gamma 0 4 ", "--weights int8 ", "--kv int8 "):
        assert sum(options in line for line in decoding) == 1
    tests = [line for line in ran if "-m pytest" in line]
    assert all(("--numprocesses" in line) == (machine == "gpu") for line in tests)
    assert [line for line in ran if "benchmarks.closed_loop" in line and "--concurrency 32" in line]
    status, ran, error = measure(str(output), machine=machine)
    assert (status, ran) == (0, [])
    assert error.count("is done") == len(stages)


def test_each_flag_is_tried_alone_and_its_status_kept(measure, tmp_path):
    status, ran, _ = measure(str(tmp_path / "output"), "flags", FAILING="--batch_size 1024")
    found = json.loads((tmp_path / "output" / "flags.json").read_text())
    assert (status, len(ran)) == (0, 4)
    assert {each["status"] for each in found.values()} == {1}
    assert {line.rpartition("XLA_FLAGS=")[2] for line in ran} == {
        each["flags"] for each in found.values()
    }


def test_a_stage_that_fails_is_named_and_the_others_run(measure, tmp_path):
    given = str(tmp_path / "output"), "xl_int8", "xl_kv8"
    status, ran, error = measure(*given, FAILING="--weights int8")
    assert (status, len(ran)) == (1, 2)
    assert "stage xl_int8 failed: error: too little memory" in error
    # It is tried again, after those that were not.
    status, (first, last), _ = measure(*given, "xl_plain")
    assert status == 0 and "--batch 32 64 128 " in first and "--weights int8" in last


def test_a_stage_that_takes_all_minutes_is_named_and_the_others_come_first(measure, tmp_path):
    output = tmp_path / "output"
    given = ("--minutes", "8", str(output), "xl_int8", "xl_kv8", "xl_plain")
    status, ran, error = measure(*given, STOPPED="--weights int8")
    assert (status, len(ran)) == (75, 1)
    assert "stage xl_int8 takes longer than 8 minutes: give more" in error
    # One that is stopped behind others may need no more minutes, and comes first.
    status, ran, error = measure(*given, STOPPED="--batch 32 64 128 ")
    assert (status, len(ran)) == (75, 2)
    assert "8 minutes are over: the same command continues with xl_plain" in error
    status, ran, error = measure(*given, STOPPED="--weights int8")
    assert status == 75 and "--batch 32 64 128 " in ran[0] and "--weights int8" in ran[1]
    assert measure(*given)[0] == 0
    # Rows so far are kept beside those of the whole stage.
    kept = {path.name for path in output.glob("xl_int8.*")}
    assert {"xl_int8.json", "xl_int8.part.old", "xl_int8.part.old.~1~"} <= kept


def test_a_text_in_float32_that_is_not_that_of_plain_decoding_is_a_failure(measure, tmp_path):
    output = tmp_path / "output"
    status, ran, error = measure(str(output), "pairs", SAME_IN="bfloat16")
    assert (status, sum("--compare" in line for line in ran)) == (1, 4)
    assert "stage pairs failed: texts in float32 are not those of plain decoding" in error
    assert error.splitlines()[-1].endswith("with the drafts transformer copy")
    # In bfloat16 two logits may tie.
    assert measure(str(output), "pairs", SAME_IN="float32")[0] == 0
    lines = list(map(json.loads, (output / "pairs.json").read_text().splitlines()))
    assert [line["comparison"]["identical"] for line in lines] == [True, False, True, False]


def test_laws_are_interrupted_so_that_they_keep_their_results(tmp_path):
    """Pytest writes nothing when it is terminated."""
    command = ["bash", "scripts/gpu/measure.sh", "--dry-run", tmp_path]
    shown = finished(*command, "laws_loops", "xl_plain")
    laws, plain = (line for line in shown.stdout.splitlines() if line.startswith("timeout"))
    assert "--signal=INT" in laws and "-m pytest" in laws
    assert "--signal=TERM" in plain


def test_after_its_minutes_it_stops_and_continues_later(measure, tmp_path):
    given = str(tmp_path / "output"), "xl_plain", "xl_kv8"
    status, ran, error = measure("--minutes", "0", *given)
    assert (status, ran) == (75, [])
    assert "0 minutes are over: the same command continues with xl_plain" in error
    assert len(measure(*given)[1]) == 2


def test_packages_of_the_laws_that_are_absent(measure, tmp_path):
    remedy = "-m pip install pytest beartype hypothesis pytest-xdist"
    given = str(tmp_path / "output"), "laws_models"
    status, ran, error = measure(*given, ABSENT="beartype")
    assert (status, ran) == (2, []) and remedy in error
    # Only some files of tests import it.
    status, ran, error = measure(*given, ABSENT="hypothesis")
    assert (status, len(ran)) == (0, 1) and remedy in error
    # One process computes what eight would.
    given = str(tmp_path / "other"), "laws_models"
    status, (line,), error = measure(*given, ABSENT="xdist")
    assert status == 0 and "--numprocesses" not in line
    assert "one process in place of eight" in error and remedy in error
    assert "no hypothesis" not in error


@pytest.mark.parametrize(
    "devices",
    [
        "jax.devices() is [CpuDevice(id=0)]",
        "jax-cuda12-plugin is 0.9.1 and jaxlib 0.10.2: pip install 'jax[cuda12]==0.10.2', and "
        "restart Python",
        "RuntimeError: Unable to initialize backend 'tpu': No jellyfish device found.",
    ],
)
def test_without_an_accelerator_nothing_runs(measure, tmp_path, devices):
    status, ran, error = measure(str(tmp_path / "output"), DEVICES=devices)
    assert (status, ran) == (2, [])
    assert error.splitlines() == [f"measure.sh: no accelerator: {devices}"]
    # A dry run and a test of the script need none.
    for flag in ("--dry-run", "--tiny"):
        assert measure(flag, str(tmp_path / "output"), "xl_plain", DEVICES=devices)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no output: give a folder"),
        (["out", "xl_2"], "no stage 'xl_2': choose of flags laws_sampling"),
        (["--minutes", "x", "out"], "--minutes is 'x': give a whole number"),
        (["--tinny", "out"], "unknown argument '--tinny'"),
    ],
)
def test_mistakes_are_a_line_before_anything_runs(measure, arguments, message):
    status, ran, error = measure(*arguments)
    assert (status, ran) == (2, [])
    assert message in error.splitlines()[-1]
