"""XLA's flags: it knows them, the user's come first, and libtpu needs a TPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.machine import xla_flags
from tests.child import printed

START = "import jax; print(float(jax.numpy.ones(3).sum()))"


def test_the_installed_xla_knows_them():
    """XLA ends a process for an unknown flag or value."""
    environment = {"XLA_FLAGS": xla_flags.combined(""), "JAX_PLATFORMS": "cpu"}
    assert printed("-c", START, **environment).strip() == "3.0"


def test_the_users_own_come_first():
    ours = xla_flags.GPU_FLAG
    name = ours.partition("=")[0]
    assert xla_flags.combined("") == ours
    assert xla_flags.combined(f"{name}= --xla_dump_to=x") == f"{name}= --xla_dump_to=x"
    assert xla_flags.combined("--xla_dump_to=x") == f"--xla_dump_to=x {ours}"
    assert xla_flags.combined(xla_flags.combined("")) == ours
    # A file, and a value with blanks that mean something.
    assert xla_flags.combined("/etc/flags.txt") == "/etc/flags.txt"
    assert xla_flags.combined("--a='b  c'") == f"--a='b  c' {ours}"


def test_a_launch_on_a_gpu_sets_the_same():
    script = Path(__file__).parents[2] / "scripts" / "gpu" / "launch.sh"
    line = f'export XLA_FLAGS="{xla_flags.GPU_FLAG} ${{XLA_FLAGS:-}}"'
    assert line in script.read_text(encoding="utf-8").splitlines()


def test_the_command_sets_them(monkeypatch, capsys):
    from spec_t5x.cli.main import main

    monkeypatch.setenv("XLA_FLAGS", "")
    # A mistake, so that nothing runs.
    assert main(["convert", "no-such-model", "out", "--to", "huggingface"]) == 2
    assert os.environ["XLA_FLAGS"] == xla_flags.GPU_FLAG
    capsys.readouterr()


ASK_FOR_A_TPU = """
from spec_t5x.machine import xla_flags
xla_flags.apply()
import jax
print(jax.default_backend(), flush=True)
try:
    jax.devices("tpu")
except RuntimeError as error:
    print(error)
"""


def run_like_a_user(*command, **environment):
    """Runs Python without the suite's choice of platforms; returns standard output and error."""
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    run = subprocess.run(
        [sys.executable, *command], env=kept | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


@pytest.fixture
def no_tpu():
    pytest.importorskip("libtpu", reason="needs libtpu, which PyPI has for Linux only")
    if xla_flags._tpu_is_likely():
        pytest.skip("needs a machine without a TPU")


def test_without_a_tpu_libtpu_is_not_started(no_tpu):
    said, errors = run_like_a_user("-c", ASK_FOR_A_TPU)
    assert errors == ""
    assert "this machine has no TPU: set JAX_PLATFORMS=tpu" in said


@pytest.mark.parametrize("name", ["TPU_NAME", "JAX_PLATFORMS"])
def test_where_a_tpu_was_asked_for_jax_decides(no_tpu, name):
    ask = ASK_FOR_A_TPU.replace("jax.default_backend()", "1")
    said, _ = run_like_a_user("-c", ask, **{name: "tpu"})
    assert "TPU initialization failed" in said and "has no TPU" not in said


def test_commands_print_their_own_lines_alone(no_tpu, tiny_pair, tmp_path):
    # Other tests cover kernels and decoding: one token is enough.
    brief = ["--target", str(tiny_pair / "target"), "--draft", "none", "--max_decode_len", "1"]
    environment = {"SPEC_T5X_CPU_KERNELS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    (tmp_path / "inputs.txt").write_text("My sister\n", encoding="utf-8")
    where = ["--input", str(tmp_path / "inputs.txt"), "--output_dir", str(tmp_path / "out")]
    where += ["--batch_size", "1"]
    _, errors = run_like_a_user("-m", "spec_t5x.infer", *where, *brief, **environment)
    assert errors and all(line.startswith("spec-t5x: ") for line in errors.splitlines())
