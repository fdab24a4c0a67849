"""Workers in processes of their own: what they are given, how they fail, how they end."""

import os
import time

import pytest

from spec_t5x.experiments.neighbours import worker
from spec_t5x.experiments.neighbours.process import Process, environment
from spec_t5x.experiments.neighbours.worker import Worker, peak_memory


def test_a_process_answers_and_ends():
    with Process(threads=1) as process:
        peak = process.ask("peak")["bytes"]
        # Python with JAX, and not what this process holds.
        assert peak > 20 * 2**20
        assert "error" in process.ask("decode", name="absent", ids=[1], max_tokens=1)
        assert process.ask("peak")["bytes"] >= peak
        assert process.processor_seconds() is None or process.processor_seconds() > 0
        if hasattr(os, "sched_getaffinity"):
            assert len(os.sched_getaffinity(process._process.pid)) == 1
        process._process.kill()
        reply = process.ask("peak")
        assert reply["error"].startswith("ended with status -9")
    assert process._process.returncode == -9


def test_libraries_are_told_how_many_threads_there_are(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    values = environment(3)
    assert values["OMP_NUM_THREADS"] == values["MKL_NUM_THREADS"] == "3"
    assert values["JAX_PLATFORMS"] == "cpu"
    # Compile times are measured: nothing comes from a cache.
    assert values["JAX_COMPILATION_CACHE_DIR"] == ""
    assert values["PYTHONPATH"].endswith(f"{os.pathsep}somewhere")


def test_a_library_that_is_not_there_is_missing(monkeypatch):
    def not_there(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(worker.importlib, "import_module", not_there)
    reply = Worker().answer({"do": "open", "name": "x", "module": "y", "job": {}, "arguments": {}})
    assert reply == {
        "missing": "ModuleNotFoundError: No module named 'spec_t5x.experiments.neighbours.y'"
    }


def test_an_error_is_one_line(capsys):
    worker = Worker()
    worker._decoders["x"] = Broken()
    reply = worker.answer({"do": "decode", "name": "x", "ids": [1], "max_tokens": 1})
    assert reply == {"error": "RuntimeError: a message of two lines"}
    assert "Traceback" in capsys.readouterr().err


class Broken:
    """A decoder that fails, and whose encoder cannot be called."""

    def decode(self, ids, max_tokens):
        raise RuntimeError("a message\n of two lines")

    def encode(self, ids):
        time.sleep(0.01)
        return False


def test_an_encoder_that_cannot_be_called_has_no_time():
    worker = Worker()
    worker._decoders["x"] = Broken()
    assert worker.answer({"do": "encode", "name": "x", "ids": [1]}) == {"seconds": None}
    monkeyed = type("Encodes", (Broken,), {"encode": lambda self, ids: time.sleep(0.01) or True})
    worker._decoders["x"] = monkeyed()
    assert worker.answer({"do": "encode", "name": "x", "ids": [1]})["seconds"] >= 0.01


def test_peak_memory_counts_what_is_touched():
    before = peak_memory()
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    after = peak_memory()
    assert after >= before
    # More than this process had before it was taken, unless an earlier test took more.
    assert after >= 200 * 2**20


@pytest.mark.parametrize("name", ["peak", "margin"])
def test_the_answers_are_of_the_protocol(name):
    assert f'"do": "{name}"' in worker.__doc__
