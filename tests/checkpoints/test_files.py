"""Checkpoints written whole or not at all, whenever the process is killed."""

import fcntl
import json
import os

import pytest

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.storage import files
from spec_t5x.errors import InputError


class Killed(BaseException):
    """No code catches it."""


class Machine:
    """Counts the calls that change the disk, and dies at one: dead, it answers none more."""

    def __init__(self, monkeypatch):
        self.calls = 0
        self.dies_at = None
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, function):
        def counted(*args, **kwargs):
            self.calls += 1
            if self.dies_at is not None and self.calls >= self.dies_at:
                raise Killed
            return function(*args, **kwargs)

        return counted


def write(directory, content, overwrite=True):
    with files.staged_directory(directory, overwrite=overwrite) as stage:
        files.write_json(stage / files.CONFIG_NAME, {"format": "any", "content": content})
        (stage / "params").mkdir()
        (stage / "params" / "d").write_text(content)


def content(directory):
    found = find_directory(directory)
    whole = json.loads((found / files.CONFIG_NAME).read_text())["content"]
    assert (found / "params" / "d").read_text() == whole
    return whole


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_killed_at_every_call_the_old_or_the_new_one_loads(tmp_path, machine):
    directory = tmp_path / "model[1]"
    write(directory, "old")
    machine.calls = 0
    write(directory, "new")
    total, seen = machine.calls, []
    assert total > 5
    for dies_at in range(1, total + 1):
        machine.dies_at = None
        write(directory, "old")
        machine.calls, machine.dies_at = 0, dies_at
        with pytest.raises(Killed):
            write(directory, "new")
        machine.dies_at = None
        seen.append(content(directory))
        # What is left goes when the name is written again.
        write(directory, "newer")
        assert content(directory) == "newer"
        assert os.listdir(tmp_path) == ["model[1]"]
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}


def test_a_checkpoint_that_was_moved_aside_counts_as_there(tmp_path, machine):
    write(tmp_path / "model", "old")
    os.rename(tmp_path / "model", tmp_path / ".model.old-0a1b2c3d")
    with pytest.raises(InputError, match="model exists"):
        write(tmp_path / "model", "new", overwrite=False)
    assert content(tmp_path / "model") == "old"


def test_the_old_one_stays_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write(tmp_path / "model", "old")
    rename = os.rename

    def refusing(source, target):
        if ".writing-" in source.name:
            raise OSError("no more entries")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(InputError, match="^cannot write .*no more entries"):
        write(tmp_path / "model", "new")
    assert os.listdir(tmp_path) == ["model"] and content(tmp_path / "model") == "old"


def test_a_path_with_a_line_break_is_named_once():
    path = "of\ntwo/config.json"
    with pytest.raises(InputError) as caught, files.describing(path, "T5", {"ours": "theirs"}):
        raise InputError(f"{path} has x 3: give 4")
    assert str(caught.value) == "of two/config.json has x 3: give 4"
    message = "^of two/config.json: theirs is 'ours': give 4$"
    with (
        pytest.raises(InputError, match=message),
        files.describing(path, "T5", {"ours": "theirs"}),
    ):
        raise InputError("ours is 'ours': give 4")


def test_a_link_to_a_checkpoint_stays(tmp_path):
    write(tmp_path / "model", "old")
    (tmp_path / "link").symlink_to("model")
    write(tmp_path / "link", "new")
    assert content(tmp_path / "model") == "new" and (tmp_path / "link").is_symlink()


def test_what_another_process_is_writing_stays(tmp_path):
    write(tmp_path / "model", "old")
    with files.staged_directory(tmp_path / "model", overwrite=True) as stage:
        files.write_json(stage / files.CONFIG_NAME, {"format": "any"})
        write(tmp_path / "model", "new")
        assert stage.is_dir()
    assert os.listdir(tmp_path) == ["model"]
    assert json.loads((tmp_path / "model" / files.CONFIG_NAME).read_text()) == {"format": "any"}


def test_where_there_are_no_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".model.writing-0a1b2c3d").mkdir()
    write(tmp_path / "model", "new")
    assert sorted(os.listdir(tmp_path)) == [".model.writing-0a1b2c3d", "model"]
