"""Runs that are killed, and killed again, end like an undisturbed one."""

import json
import math
import multiprocessing
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests import quick_compilation
from tests.labs.training import killed_program

REPOSITORY = Path(__file__).parents[2]
KILLS = 3


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Provides ``start(directory, last)``: a process, and the number of the step that it has begun.

    The process waits to be killed at step ``last``.
    """
    # Forked from a process that has imported everything and computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([killed_program.__name__])
    # For that process, which the first of these starts.
    for name, value in {"PYTHONPATH": str(REPOSITORY), **quick_compilation.ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)

    def start_one(directory, last=None):
        begun = context.Value("i", -1)
        directory.mkdir(exist_ok=True)
        arguments = (directory, tmp_path / "programs", begun, last)
        # A daemon, because pytest ends daemons at its exit and waits for other processes.
        process = context.Process(target=killed_program.run, args=arguments, daemon=True)
        process.start()
        return process, begun

    return start_one


def curve(directory):
    """Reads all that was logged but the rates."""
    lines = map(json.loads, (directory / "metrics.jsonl").open())
    rates = ("tokens_per_s", "pairs_per_s")
    return [{name: line[name] for name in line if name not in rates} for line in lines]


def test_a_run_killed_at_any_time_ends_like_an_undisturbed_one(start, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    process, _ = start(undisturbed)
    process.join()
    assert process.exitcode == 0

    chance = random.Random(0)
    for part in range(KILLS):
        # Somewhere in each part of the run but its end, and at any time of the step: while a
        # checkpoint is written, too.
        step = chance.uniform(part, part + 0.7) * killed_program.STEPS / KILLS
        process, begun = start(killed, min(math.ceil(step) + 2, killed_program.STEPS - 1))
        while begun.value < step:
            assert process.is_alive()
            time.sleep(1e-4)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (killed / "end.json").exists()
    process, _ = start(killed)
    process.join()
    assert process.exitcode == 0

    lines = curve(undisturbed)
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 12, 16, 20, 24]
    assert curve(killed) == lines
    assert (killed / "end.json").read_text() == (undisturbed / "end.json").read_text()
    with np.load(undisturbed / "end.npz") as theirs, np.load(killed / "end.npz") as ours:
        assert ours.files == theirs.files
        for name in ours.files:
            assert ours[name].tobytes() == theirs[name].tobytes()
    # Nothing is left of checkpoints that the kills cut short.
    best = json.loads((killed / "end.json").read_text())["best"]
    kept = {path.name for path in (killed / "checkpoints").iterdir()}
    assert kept == {str(step) for step in (21, 24, best)}
