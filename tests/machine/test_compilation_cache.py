"""The cache of compiled programs: its place, bound, log line and owner."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

from spec_t5x.machine import compilation_cache


@pytest.fixture
def own_settings(monkeypatch):
    """Restores JAX's settings."""
    before = dict(jax.config.values)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    yield
    for name, value in before.items():
        if name.startswith(("jax_compilation_cache", "jax_persistent_cache")):
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("named", "kept"), [(None, "user/spec_t5x/compiled"), ("own", "own"), ("", None)]
)
@pytest.mark.usefixtures("own_settings")
def test_programs_are_kept_where_the_environment_says(tmp_path, monkeypatch, named, kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    if named is not None:
        named = named and str(tmp_path / named)
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", named)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir == (str(tmp_path / kept) if kept else "")


FILL = """
import jax
from spec_t5x.machine import compilation_cache
compilation_cache.MAX_SIZE = 6000
compilation_cache.enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for number in range(3):
    jax.jit(lambda x: x * number + 1)(1.0)
"""
# Timers of 0 seconds fire at once, others never: the first program takes less than a moment.
COMPILE = """
import logging
import sys
import types
import jax
from spec_t5x.machine import compilation_cache, progress
waiting = set()
class Timer:
    def __init__(self, seconds, function):
        self.seconds, self.function = seconds, function
    def start(self):
        waiting.add(self) if self.seconds else self.function()
    def cancel(self):
        waiting.discard(self)
compilation_cache.threading = types.SimpleNamespace(Timer=Timer)
logging.basicConfig(format="%(message)s", level=logging.INFO)
compilation_cache.enable()
for number, moment in enumerate((60.0, 0.0, 0.0)):
    progress.A_MOMENT = moment
    jax.jit(lambda x: jax.lax.sort(x * number + 1))(jax.numpy.arange(9.0))
    print(number, *waiting, file=sys.stderr)
"""


def run(program, **variables):
    """Returns what a new process prints on standard error."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stderr


def test_the_users_cache_is_bounded(tmp_path):
    programs = tmp_path / "spec_t5x" / "compiled"
    programs.mkdir(parents=True, mode=0o700)
    programs.parent.chmod(0o700)
    # In a cache without a bound JAX stores no time of last use.
    (programs / "old-cache").write_bytes(bytes(5900))
    assert run(FILL, XDG_CACHE_HOME=str(tmp_path)) == ""
    kept = list(programs.glob("*-cache"))
    assert kept and programs / "old-cache" not in kept
    assert sum(path.stat().st_size for path in kept) <= 6000


def test_a_program_that_a_killed_process_cut_off_is_compiled_again(tmp_path):
    where = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30)}
    run(FILL, **where)
    (program, *_) = (tmp_path / "spec_t5x" / "compiled").glob("*-cache")
    content = program.read_bytes()
    program.write_bytes(content[:100])
    program.with_name(program.name.replace("-cache", "-atime")).unlink()
    assert run(FILL, **where) == ""
    assert program.read_bytes()[100:]


def test_a_cache_without_a_bound_stays_so(tmp_path):
    program = (
        "import jax, sys; from spec_t5x.machine import compilation_cache; "
        "compilation_cache.enable(); "
        "sys.stderr.write(str(jax.config.jax_compilation_cache_max_size))"
    )
    where = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run(program, JAX_COMPILATION_CACHE_MAX_SIZE="-1", **where) == "-1"
    # JAX stores no time of last use there.
    (kept := tmp_path / "spec_t5x" / "compiled" / "old-cache").touch()
    assert run(program, JAX_COMPILATION_CACHE_MAX_SIZE="-1", **where) == "-1" and kept.exists()
    assert int(run(program, **where)) > 0


@pytest.mark.parametrize("name", ["owner", "group"])
@pytest.mark.usefixtures("own_settings")
def test_a_cache_whose_owner_has_no_name_has_no_bound(tmp_path, monkeypatch, name):
    def nameless(path):
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
    jax.config.update("jax_compilation_cache_max_size", -1)
    with monkeypatch.context() as inside:
        inside.setattr(Path, name, nameless)
        assert compilation_cache._bounded(tmp_path) == tmp_path
        assert jax.config.jax_compilation_cache_max_size == -1
    assert compilation_cache._bounded(tmp_path) == tmp_path
    assert jax.config.jax_compilation_cache_max_size == compilation_cache.MAX_SIZE


def test_a_compilation_is_logged_once(tmp_path):
    said = run(COMPILE, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).splitlines()
    line = "compiling for these models and shapes, which is done once"
    assert said == ["0", f"{line} (kept in {tmp_path})", "1", "2"]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_a_cache_is_its_users_alone(caches, caplog):
    assert compilation_cache.user_cache() == caches / "spec_t5x"
    assert (caches / "spec_t5x").stat().st_mode & 0o777 == 0o700
    assert caplog.messages == []


def writable_by_others(caches, monkeypatch):
    (caches / "spec_t5x").mkdir(parents=True)
    (caches / "spec_t5x").chmod(0o777)
    return "others can write to it: remove it"


def another_users(caches, monkeypatch):
    (caches / "spec_t5x").mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(caches / "spec_t5x", 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    return "it is another user's: set XDG_CACHE_HOME"


def no_directory(caches, monkeypatch):
    caches.write_text("a file")
    return "set XDG_CACHE_HOME to another place"


def no_home(caches, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    return "there is no home directory: set XDG_CACHE_HOME"


@pytest.mark.parametrize("spoil", [writable_by_others, another_users, no_directory, no_home])
def test_a_cache_that_cannot_be_trusted_is_not_used(caches, monkeypatch, caplog, spoil):
    compilation_cache._in_place_of.cache_clear()
    remedy = spoil(caches, monkeypatch)
    found = compilation_cache.user_cache()
    assert found == compilation_cache.user_cache() == compilation_cache.temporary_cache()
    assert found.stat().st_mode & 0o777 == 0o700 and not found.is_relative_to(caches)
    (said,) = caplog.messages
    assert remedy in said


def test_without_a_place_for_temporary_files_nothing_is_kept(caches, monkeypatch, caplog):
    def mkdtemp(**_):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    place = compilation_cache.temporary_cache.__wrapped__
    monkeypatch.setattr(compilation_cache, "temporary_cache", place)
    compilation_cache._in_place_of.cache_clear()
    caches.write_text("a file")
    assert compilation_cache._bounded(compilation_cache.user_cache() / "compiled") is None
    (said,) = caplog.messages
    assert said.startswith("compiled programs are not kept")
