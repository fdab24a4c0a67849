"""Real processes, killed and at the same time."""

import dataclasses
import json
import logging.handlers
import multiprocessing
import queue
import random
import signal
import time
from pathlib import Path

import jax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.inference.infer_options import HostOptions
from spec_t5x.inference.processes import join
from tests.child import HANGS, meeting_point
from tests.inference import child
from tests.quick_compilation import FLAGS

WORDS = ("cat", "table", "my", "sister", "a", "green", "book")
SHARD_SIZE, NUM_INPUTS = 4, 78


@dataclasses.dataclass(frozen=True)
class Command:
    """``spec-t5x infer`` over one file, into one directory."""

    folder: Path
    pair: Path
    output: Path

    def start(self, *flags, log="log", compiled="compiled", most=None):
        """Starts a process that runs it; ``compiled`` is the folder of compiled programs.

        Once the process has written ``most`` shards, it waits for a signal.
        """
        arguments = {
            "--input": self.folder / "lines.jsonl",
            "--output_dir": self.output,
            "--target": self.pair / "target",
            "--draft": self.pair / "draft",
            "--shard_size": SHARD_SIZE,
            "--batch_size": 4,
            "--max_decode_len": 16,
            "--gamma": 3,
            "--temperature": 1,
            "--seed": 3,
        }
        given = [pair for pair in arguments.items() if pair[0] not in flags]
        arguments = [str(part) for pair in given for part in pair]
        arguments = ["infer", *arguments, *map(str, flags)]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / compiled)}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["spec_t5x.cli.main", "spec_t5x.generation"])
        given = arguments, str(self.folder / log), cache | {"XLA_FLAGS": FLAGS}, most
        # A daemon, because pytest ends daemons at its exit and waits for other processes.
        process = context.Process(target=child.run, args=given, daemon=True)
        process.start()
        return process

    def run(self, *flags) -> int:
        """Runs it and returns its exit status."""
        process = self.start(*flags)
        process.join()
        return process.exitcode

    def said(self, log="log") -> list[str]:
        """Returns the log of the last process without its figures."""
        lines = (self.folder / log).read_text().splitlines()
        return [line for line in lines if not line.startswith('{"merged"')]

    def shards(self) -> dict[str, tuple]:
        """Returns the identity of each finished shard."""
        found = self.output.glob("predictions-*")
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}

    def files(self) -> dict[str, bytes]:
        """Reads the files for the user."""
        return {path.name: path.read_bytes() for path in self.output.glob("[!.]*")}

    def wait_for_shards(self, process, count) -> None:
        """Waits until ``count`` shards are there, or the process has ended."""
        while process.is_alive() and len(self.shards()) < count:
            time.sleep(0.001)

    def into(self, name: str) -> "Command":
        """Returns the same into another directory."""
        return dataclasses.replace(self, output=self.folder / name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_pair) -> Command:
    """Provides a run that was left alone."""
    folder = tmp_path_factory.mktemp("infer")
    rng = random.Random(0)
    lines = [
        {"id": n, "text": " ".join(rng.choices(WORDS, k=rng.randrange(1, 5)))}
        for n in range(NUM_INPUTS)
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = Command(folder, tiny_pair, folder / "undisturbed")
    assert command.run() == 0, command.said()
    return command


@pytest.fixture
def coordinator():
    """Provides flags for two processes that meet."""
    with meeting_point() as address:
        yield ["--coordinator_address", address, "--process_count", "2"]


def test_what_a_run_leaves(undisturbed):
    lines = (undisturbed.output / "predictions.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["index"] for line in found] == list(range(NUM_INPUTS))
    assert [line["inputs"]["id"] for line in found] == list(range(NUM_INPUTS))
    assert len(undisturbed.shards()) == -(-NUM_INPUTS // SHARD_SIZE)
    assert len({line["output"] for line in found}) > NUM_INPUTS / 3
    # Progress is logged before.
    *_, said = undisturbed.said()
    assert f"answered {NUM_INPUTS} of {NUM_INPUTS} inputs in {undisturbed.output}" in said


def test_killed_at_random_moments_it_ends_with_the_same_bytes(undisturbed):
    killed, rng = undisturbed.into("killed"), random.Random(1)
    kept = {}
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        # The four write at most 20 shards in all, so that none finishes the run.
        count = rng.randrange(1, 4)
        process = killed.start(most=count + 2)
        killed.wait_for_shards(process, len(kept) + count)
        time.sleep(0.01 * rng.random())
        process.kill() if number == signal.SIGKILL else process.terminate()
        process.join()
        if number == signal.SIGTERM:
            assert process.exitcode == 128 + signal.SIGTERM, killed.said()
            assert "stopped by SIGTERM with" in killed.said()[-1]
        else:
            assert process.exitcode == -signal.SIGKILL, killed.said()
        now = killed.shards()
        assert kept.items() <= now.items()
        kept = now
    assert killed.run() == 0, killed.said()
    assert killed.files() == undisturbed.files()
    assert kept.items() <= killed.shards().items()
    assert {path.name for path in killed.output.glob(".*")} == {".lock-00000", ".lock-step"}


def test_two_processes_that_meet_are_workers(undisturbed, coordinator):
    shared = undisturbed.into("shared")
    flags = (*coordinator, "--process_index")
    caches = ["compiled", "compiled on another host"]
    processes = [
        shared.start(*flags, n, log=f"log{n}", compiled=cache) for n, cache in enumerate(caches)
    ]
    for process in processes:
        process.join()
    said = [shared.said(f"log{n}")[-1] for n in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], said
    assert shared.files() == undisturbed.files()
    assert any(f"answered {NUM_INPUTS} of {NUM_INPUTS} inputs in" in text for text in said)
    # The second process compiles nothing again at its next start.
    assert any(path.stat().st_size for path in (shared.folder / caches[1]).glob("*burst*-cache"))


def test_it_says_for_whom_it_waits(monkeypatch, caplog):
    said = queue.Queue()

    def initialize(*_):
        raise RuntimeError(said.get(timeout=HANGS).getMessage())

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr("spec_t5x.machine.progress.A_MOMENT", 0)
    logger = logging.getLogger("spec_t5x.inference.processes")
    monkeypatch.setattr(logger, "handlers", [logging.handlers.QueueHandler(said)])
    caplog.set_level(logging.INFO, logger.name)
    with pytest.raises(InputError, match=r"\(waiting for the other processes at node0:1\): give"):
        join(HostOptions(coordinator_address="node0:1", process_count=2, process_index=1))


def test_independent_workers(undisturbed):
    """Three workers, as a scheduler starts them, of which one is killed and started again."""
    apart, count = undisturbed.into("apart"), 3

    def start(n):
        flags = ("--shard_index", n, "--shard_count", count)
        return apart.start(*flags, log=f"worker{n}")

    processes = [start(n) for n in range(count)]
    apart.wait_for_shards(processes[1], 2)
    processes[1].kill()
    processes[1].join()
    processes[1] = start(1)
    for process in processes:
        process.join()
    said = [apart.said(f"worker{n}")[-1] for n in range(count)]
    assert [process.exitcode for process in processes] == [0] * count, said
    assert apart.files() == undisturbed.files()
    assert sum(f"answered {NUM_INPUTS} of {NUM_INPUTS} inputs in" in text for text in said) >= 1


def test_merge_joins_the_shards_of_workers(undisturbed):
    parts = undisturbed.into("parts")
    assert parts.run("--shard_index", 1, "--shard_count", 2) == 0
    assert parts.said()[-1] == (
        "spec-t5x: shards left: 10; the worker that finishes last joins all shards"
    )
    assert parts.run("--merge") == 2
    assert "10 of 20 shards are missing, the first is 0" in parts.said()[-1]
    for path in undisturbed.output.glob("predictions-*"):
        if not (parts.output / path.name).exists():
            (parts.output / path.name).write_bytes(path.read_bytes())
    assert parts.run("--merge") == 0
    assert parts.files() == undisturbed.files()
