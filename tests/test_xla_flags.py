"""XLA's flags: known to the installed XLA, and the user's own come first."""

import os
import subprocess
import sys
from pathlib import Path

from spec_t5x import xla_flags

START = "import jax; print(float(jax.numpy.ones(3).sum()))"


def start(flags):
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True
    )


def test_the_installed_xla_knows_them():
    run = start(xla_flags.combined(""))
    assert run.stdout.strip() == "3.0", run.stderr[-300:]
    # XLA looks at the values too.
    assert start("--xla_gpu_enable_command_buffer=+NO_SUCH_THING").returncode != 0


def test_the_users_own_come_first():
    ours = xla_flags.FLAGS["gpu"][0]
    name = ours.partition("=")[0]
    assert xla_flags.combined("") == ours
    assert xla_flags.combined(f"{name}= --xla_dump_to=x") == f"{name}= --xla_dump_to=x"
    assert xla_flags.combined("--xla_dump_to=x") == f"--xla_dump_to=x {ours}"
    assert xla_flags.combined(xla_flags.combined("")) == ours


def test_a_launch_on_a_gpu_sets_the_same():
    script = Path(__file__).parents[1] / "scripts" / "gpu" / "launch.sh"
    line = f'export XLA_FLAGS="{" ".join(xla_flags.FLAGS["gpu"])} ${{XLA_FLAGS:-}}"'
    assert line in script.read_text(encoding="utf-8").splitlines()


def test_the_command_sets_them(monkeypatch, capsys):
    from spec_t5x.cli.main import main

    monkeypatch.setenv("XLA_FLAGS", "")
    # A mistake, so that nothing runs.
    assert main(["convert", "no-such-model", "out", "--to", "huggingface"]) == 2
    assert os.environ["XLA_FLAGS"] == xla_flags.FLAGS["gpu"][0]
    capsys.readouterr()
