"""Compiling the kernels, and doing without them."""

import contextlib
import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_t5x.contrib.cpu import library
from spec_t5x.errors import InputError
from spec_t5x.machine.compilation_cache import temporary_cache


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Provides the only program, ``g++``, which logs its calls and refuses the flag in REFUSED."""
    directory = tmp_path / "bin"
    directory.mkdir()
    program, log = directory / "g++", tmp_path / "log"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "if '--version' in sys.argv: sys.exit()\n"
        f"print(*sys.argv[1:], file=open({str(log)!r}, 'a'))\n"
        "if os.environ.get('REFUSED') in sys.argv: sys.exit('no such flag')\n"
        "time.sleep(0.2)\n"
        "open(sys.argv[-1], 'w')\n"
    )
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CXX", raising=False)
    return log


def test_of_several_builds_at_once_one_compiles(tmp_path, fake_compiler):
    with ThreadPoolExecutor() as threads:
        built = list(threads.map(lambda _: library.build(["g++"], tmp_path / "own"), range(4)))
    assert {library.build(["g++"], tmp_path / "own")} == set(built)
    assert [built[0]] == list((tmp_path / "own").glob("[!.]*"))
    assert len(fake_compiler.read_text().splitlines()) == 1


def test_the_compiler_is_cxx_or_one_that_exists(tmp_path, fake_compiler, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "g++ -m64")
    library.build(library._compiler(), tmp_path)
    assert fake_compiler.read_text().startswith("-m64 -std=c++17")
    monkeypatch.setenv("CXX", "ccache g++")
    assert library._compiler() == ["g++"]
    assert "CXX is 'ccache g++', which is not found: g++ compiles" in caplog.text


def test_the_processor_goes_by_two_names(tmp_path, fake_compiler, monkeypatch):
    monkeypatch.setenv("REFUSED", "-march=native")
    assert library.build(["g++"], tmp_path).exists()
    assert "-mcpu=native" in fake_compiler.read_text().splitlines()[-1]
    monkeypatch.setenv("REFUSED", "-w")
    with pytest.raises(subprocess.CalledProcessError) as error:
        library.build(["g++"], tmp_path / "other")
    assert error.value.stderr == "no such flag\n"


@pytest.mark.parametrize("has_locks", [True, False])
def test_without_a_cache_directory_it_is_built_in_a_temporary_one(
    tmp_path, fake_compiler, monkeypatch, caplog, has_locks
):
    def lock(path, **_):
        if path.parent == tmp_path / "kernels":
            raise NotImplementedError
        return contextlib.nullcontext()

    monkeypatch.setattr(library, "user_cache", lambda: tmp_path)
    if has_locks:
        (tmp_path / "kernels").write_text("no directory")
    else:
        monkeypatch.setattr(library, "FileLock", lock)
    assert library._kept_or_built(["g++"]).parent == temporary_cache()
    assert "the kernels are compiled at every start" in caplog.text


def test_without_any_directory_one_line_says_why(tmp_path, fake_compiler, monkeypatch, caplog):
    (tmp_path / "file").touch()
    for name in ("user_cache", "temporary_cache"):
        monkeypatch.setattr(library, name, lambda: tmp_path / "file")
    assert not library.available.__wrapped__()
    (said,) = caplog.messages
    assert "g++ could not build them" in said and "TMPDIR if nothing can be written there" in said


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({library.SWITCH: "0"}, ""),
        ({"CXX": "no-such-compiler", "PATH": ""}, "there is no C++ compiler: install g++"),
        # A compiler that refuses everything, in an empty cache.
        ({"CXX": "false"}, "could not build them"),
    ],
)
def test_without_them_one_line_says_why(tmp_path, monkeypatch, caplog, environment, said):
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path)} | environment).items():
        monkeypatch.setenv(name, value)
    # As the first call of a process.
    assert not library.available.__wrapped__()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == (1 if said else 0)
    assert not said or said in lines[0]


def test_a_damaged_library_is_built_again(tmp_path, fake_compiler):
    """A process that loads a truncated one ends by a signal."""
    library.build(["g++"], tmp_path).write_bytes(b"another")
    made = library.build(["g++"], tmp_path)
    assert [made] == list(tmp_path.glob("*.so")) and not made.read_bytes()
    assert len(fake_compiler.read_text().splitlines()) == 2


def test_a_library_is_of_one_source_compiler_processor_and_release(
    tmp_path, fake_compiler, monkeypatch
):
    """Hosts may share the cache, and each finds the library that it built."""
    (tmp_path / "later.cc").write_text("// another source")
    changes = {
        "processor_features": lambda: "flags : avx512f",
        "_version": lambda compiler: "g++ 99",
        "_FLAGS": ("-O0",),
        "_SOURCE": tmp_path / "later.cc",
        "jax.__version__": "99.0",
    }

    def built_by_all():
        yield library.build(["g++"], tmp_path / "own")
        yield library.build(["g++", "-m64"], tmp_path / "own")
        for name, value in changes.items():
            with monkeypatch.context() as patch:
                patch.setattr(f"{library.__name__}.{name}", value)
                yield library.build(["g++"], tmp_path / "own")

    built = list(built_by_all())
    assert len({*built}) == len(built) == len({*(tmp_path / "own").glob("*.so")})
    # Nor does finding one write to the directory.
    monkeypatch.setattr(library, "FileLock", None)
    assert list(built_by_all()) == built


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, fake_compiler, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = library.build(["g++"], tmp_path / "spec_t5x" / "kernels")
    assert not library.available.__wrapped__()
    assert f"{made} cannot be loaded ({made}: file too short): remove it" in caplog.text


def test_their_state_is_reported_without_compiling_them(tmp_path, fake_compiler, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The library that this compiler makes is an empty file.
    used, said = library.state()
    assert not used and said.startswith(f"no library can be loaded from {tmp_path}")
    assert said.endswith("set XDG_CACHE_HOME to a directory whose files may be executed")
    monkeypatch.setattr(ctypes, "CDLL", str)
    used, said = library.state()
    assert used and "once, at first use" in said
    monkeypatch.setenv("REFUSED", "-w")
    assert library.state()[1].startswith("g++ could not build them (no such flag): set CXX")
    assert not list(tmp_path.rglob("*.so"))
    monkeypatch.delenv("REFUSED")
    with monkeypatch.context() as patch:
        (tmp_path / "file").touch()
        patch.setattr(library, "user_cache", lambda: tmp_path / "file")
        used, said = library.state()
        assert used and "at every start" in said
        patch.setattr(library, "temporary_cache", lambda: tmp_path / "file")
        assert "could not build them" in library.state()[1]
    monkeypatch.setattr(library, "available", lambda: (tmp_path / "loadable").exists())
    made = library.build(["g++"], tmp_path / "spec_t5x" / "kernels")
    assert not library.state()[0] and f"{made} cannot be loaded: remove it" in library.state()[1]
    (tmp_path / "loadable").touch()
    assert library.state() == (True, "compiled")
    monkeypatch.setenv("PATH", "")
    used, said = library.state()
    assert not used and "install g++" in said
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.state() == (False, "switched off by SPEC_T5X_CPU_KERNELS=0")
    monkeypatch.setenv(library.SWITCH, "off")
    with pytest.raises(InputError, match="SPEC_T5X_CPU_KERNELS is 'off': set it to 1 or 0"):
        library.state()
