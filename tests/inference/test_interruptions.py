"""A run that is stopped between any two of the system's calls, and started again."""

import errno
import io
import os
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest

from spec_t5x.errors import InputError
from spec_t5x.inference.signals import Interrupted, stopping
from tests.child import HANGS
from tests.inference.echo import Echo


def test_a_signal_that_comes_where_python_drops_exceptions_comes_again(capsys):
    class Referent:
        pass

    def interrupt(_):
        signal.raise_signal(signal.SIGTERM)

    def run():
        one = Referent()
        reference = weakref.ref(one, interrupt)
        with stopping():
            del one
            assert reference() is None
            time.sleep(HANGS)

    hook = sys.unraisablehook
    with pytest.raises(Interrupted, match="SIGTERM"):
        run()
    assert sys.unraisablehook is hook and capsys.readouterr().err == ""


class Killed(BaseException):
    """Exception that no code catches."""


class Machine:
    """Counter of the calls that change the disk, which dies at one of them.

    Dead, it answers no call more, so that no cleaning up takes place.
    """

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.calls = 0
        self.dies_at = None
        # What the system has is kept here without waiting for the disk.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        for module, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (Path, "unlink")):
            monkeypatch.setattr(module, name, self.counted(getattr(module, name)))
        # What Path.open calls.
        monkeypatch.setattr(io, "open", self.opened(io.open))

    def call(self):
        self.calls += 1
        if self.dies_at is not None and self.calls >= self.dies_at:
            raise Killed

    def counted(self, function):
        def counted(*args, **kwargs):
            self.call()
            return function(*args, **kwargs)

        return counted

    def opened(self, function):
        def opened(path, mode="r", *args, **kwargs):
            if "w" not in mode or self.directory not in Path(path).parents:
                return function(path, mode, *args, **kwargs)
            self.call()
            return TornFile(self, function(path, mode, *args, **kwargs))

        return opened


class TornFile:
    """File each of whose writes reaches the disk, the last one by half."""

    def __init__(self, machine, file):
        self.machine = machine
        self.file = file

    def write(self, content):
        try:
            self.machine.call()
        except Killed:
            content = content[: len(content) // 2]
            raise
        finally:
            self.file.write(content)
            self.file.flush()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def test_killed_at_every_call_it_ends_with_the_same_bytes(runner, monkeypatch):
    runner()
    undisturbed = runner.files()
    killed = runner.elsewhere("killed")
    machine = Machine(killed.directory, monkeypatch)
    killed()
    total, machine.calls = machine.calls, 0
    assert killed.files() == undisturbed
    assert total > 40
    for dies_at in range(1, total + 1):
        shutil.rmtree(killed.output)
        machine.calls, machine.dies_at = 0, dies_at
        with pytest.raises(Killed):
            killed()
        finished = killed.inodes()
        machine.dies_at = None
        killed()
        assert killed.files() == undisturbed
        assert killed.left_over() == []
        assert finished.items() <= killed.inodes().items()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_one_line_and_costs_nothing(runner, monkeypatch, call):
    runner()
    undisturbed = runner.files()
    full = runner.elsewhere("full")
    number = errno.ENOSPC if call == "fsync" else errno.EIO
    real = getattr(os, call)

    def fails(*args):
        if len(list(full.output.glob("predictions-*"))) == 2:
            raise OSError(number, os.strerror(number))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(InputError) as error:
            full()
    message = str(error.value)
    shard = 2 if call == "replace" else 1  # the second one's directory is synced after it
    assert f"cannot write shard {shard} of 4 (predictions-0000{shard}-of-00004.jsonl)" in message
    assert str(full.output) in message and os.strerror(number) in message
    assert ("free some space" in message) == (number != errno.EIO)
    assert "the same command again" in message and "\n" not in message
    assert len(full.inodes()) == 2 and full.left_over() == []
    finished = full.inodes()
    full()
    assert full.files() == undisturbed
    assert finished.items() <= full.inodes().items()


def test_where_the_shards_do_not_fit_into_one_file_they_are_kept(runner, disk):
    runner()
    full = runner.elsewhere("full")
    disk.fill()
    with pytest.raises(InputError) as error:
        full()
    disk.clear()
    message = str(error.value)
    assert f"cannot write predictions.jsonl, the 4 shards in one file to {full.output}" in message
    assert "(File too large): free some space and give the same command again" in message
    kept = full.inodes()
    assert len(kept) == 4
    full()
    assert full.files() == runner.files() and kept.items() <= full.inodes().items()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly_and_says_how_to_go_on(runner, number):
    class Signalled(Echo):
        def make_batch(self, texts, ids, places, options):
            if texts[0].startswith("06"):
                os.kill(os.getpid(), number)
            return super().make_batch(texts, ids, places, options)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        runner(load=Signalled)
    assert stopped.value.number == number
    # The next shard is begun before the last batch of the one before is waited for.
    assert "1 of 4 shards finished" in stopped.value.how_far
    assert runner.left_over() == [] and len(runner.inodes()) == 1
    assert signal.getsignal(number) is before
    runner()
    assert len(runner.inodes()) == 4


def test_a_signal_that_a_callback_turns_into_another_error_is_a_stop():
    def callback(number):
        try:
            if number:
                signal.raise_signal(number)
        finally:
            raise RuntimeError("error of a callback")

    with pytest.raises(Interrupted, match="SIGTERM"), stopping():
        callback(signal.SIGTERM)
    with pytest.raises(RuntimeError), stopping():
        callback(None)
