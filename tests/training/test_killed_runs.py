"""Runs that are killed, and killed again, end like one that nobody disturbed."""

import json
import multiprocessing
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.training import killed_program

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """``start(kind, directory)``: a process of its own, and the step that it has begun."""
    # Forked from a process that has imported everything and computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([killed_program.__name__])
    cache = tmp_path_factory.mktemp("programs")

    def start_one(kind, directory):
        begun = context.Value("i", -1)
        directory.mkdir(exist_ok=True)
        arguments = (kind, directory, cache, begun)
        process = context.Process(target=killed_program.run, args=arguments)
        with pytest.MonkeyPatch.context() as patch:
            # Of the process that is forked from, which the first of these starts.
            patch.setenv("PYTHONPATH", str(REPOSITORY))
            process.start()
        return process, begun

    return start_one


def curve(directory):
    """All that was found, but how fast."""
    lines = map(json.loads, (directory / "metrics.jsonl").open())
    rates = ("tokens_per_s", "pairs_per_s")
    return [{name: line[name] for name in line if name not in rates} for line in lines]


@pytest.mark.parametrize(("kind", "kills"), [("train", 2), ("distill", 1)])
def test_a_run_killed_at_any_time_ends_like_an_undisturbed_one(start, tmp_path, kind, kills):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    process, _ = start(kind, undisturbed)
    process.join()
    assert process.exitcode == 0

    chance = random.Random(kind)
    for part in range(kills):
        process, begun = start(kind, killed)
        # Somewhere in each part of the run but its end, and at any time of the step: while a
        # checkpoint is written, too.
        step = chance.uniform(part, part + 0.8) * killed_program.STEPS / kills
        while begun.value < step:
            assert process.is_alive()
            time.sleep(1e-4)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (killed / "end.json").exists()
    process, _ = start(kind, killed)
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
    # Nothing is left of what the kills cut short.
    best = {json.loads((killed / "end.json").read_text())[0]} if kind == "distill" else set()
    kept = {path.name for path in (killed / "checkpoints").iterdir()}
    assert kept == {str(step) for step in {21, 24} | best}
