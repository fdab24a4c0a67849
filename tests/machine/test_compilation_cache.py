"""Compiled programs outlive the process, where the user wants them to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.machine import compilation_cache

PROGRAM = """
import jax
from spec_t5x.machine.compilation_cache import enable
enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2 + 1)(1.0)
"""


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"XDG_CACHE_HOME": "{tmp}/user"}, "user/spec_t5x/compiled"),
        ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/own"}, "own"),
        ({"XDG_CACHE_HOME": "{tmp}/user", "JAX_COMPILATION_CACHE_DIR": ""}, None),
    ],
    ids=["by default", "named", "switched off"],
)
def test_programs_are_kept_where_the_environment_says(tmp_path, variables, kept):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert bool(files) == bool(kept)
    assert all(path.is_relative_to(tmp_path / kept) for path in files)


FILL = """
import jax
from spec_t5x.machine import compilation_cache
compilation_cache.MAX_SIZE = 6000
compilation_cache.enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for number in range(3):
    jax.jit(lambda x: x * number + 1)(1.0)
"""


def test_the_users_cache_is_bounded(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    programs = tmp_path / "spec_t5x" / "compiled"
    programs.mkdir(parents=True, mode=0o700)
    programs.parent.chmod(0o700)
    # Of a cache that had no bound: JAX has not noted when it was used.
    (programs / "old-cache").write_bytes(bytes(5900))
    run = subprocess.run(
        [sys.executable, "-c", FILL],
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    kept = list(programs.glob("*-cache"))
    assert kept and programs / "old-cache" not in kept
    assert sum(path.stat().st_size for path in kept) <= 6000


COMPILE = """
import jax
from spec_t5x.machine import compilation_cache
compilation_cache._A_MOMENT = {moment}
compilation_cache.enable()
compilation_cache.announce(print)
for number in range(2):
    jax.jit(lambda x: jax.lax.sort(x * number + 1))(jax.numpy.arange(9.0))
"""


@pytest.mark.parametrize(
    ("moment", "said"),
    [(0.0, ["compiling for these models and shapes, which is done once (kept in {cache})"])]
    + [(60.0, [])],
    ids=["long", "short"],
)
def test_it_is_said_once_that_a_program_is_compiled(tmp_path, moment, said):
    cache = tmp_path / "own"
    run = subprocess.run(
        [sys.executable, "-c", COMPILE.format(moment=moment)],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines() == [line.format(cache=cache) for line in said]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_a_cache_is_its_users_alone(caches, capsys):
    assert compilation_cache.user_cache() == caches / "spec_t5x"
    assert (caches / "spec_t5x").stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ""


def writable_by_others(caches, monkeypatch):
    (caches / "spec_t5x").mkdir(parents=True)
    (caches / "spec_t5x").chmod(0o777)
    return "others can write to it: remove it"


def somebody_elses(caches, monkeypatch):
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


@pytest.mark.parametrize("spoil", [writable_by_others, somebody_elses, no_directory, no_home])
def test_a_cache_that_cannot_be_trusted_is_not_used(caches, monkeypatch, capsys, spoil):
    compilation_cache._in_place_of.cache_clear()
    remedy = spoil(caches, monkeypatch)
    found = compilation_cache.user_cache()
    assert found == compilation_cache.user_cache() == compilation_cache.temporary_cache()
    assert found.stat().st_mode & 0o777 == 0o700 and not found.is_relative_to(caches)
    said = capsys.readouterr().err
    assert remedy in said and said.count("\n") == 1
