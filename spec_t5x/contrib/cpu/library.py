"""Library of the kernels: compiled by the machine's C++ compiler once, and registered with XLA."""

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from spec_t5x.machine.compilation_cache import temporary_cache, user_cache
from spec_t5x.machine.description import processor_features
from spec_t5x.machine.operations import switch
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)

# Environment variable that disables the kernels if it is "0".
SWITCH = "SPEC_T5X_CPU_KERNELS"

_SOURCE = Path(__file__).with_name("decoder_kernels.cc")
# Compiler flags; ``_compile`` adds one for this processor. Without aligned loops, a product of 1 to
# 6 rows takes up to a fifth longer on Zen 4, depending on unrelated code.
_FLAGS = ("-std=c++17", "-O3", "-falign-loops=64", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
# Time to wait while another process compiles the kernels, in seconds.
_PATIENCE = 300
# What a compiler that cannot be run, or a directory that cannot be written, raises; file systems
# without locks raise the second.
_FAILURES = (OSError, NotImplementedError, subprocess.CalledProcessError)
_NO_EXECUTION = "set XDG_CACHE_HOME to a directory whose files may be executed"
_NO_COMPILER = "there is no C++ compiler: install g++ or clang++, or set CXX"


@functools.cache
def available() -> bool:
    """Returns True if the kernels can be called; the first call compiles and registers them.

    If they cannot be built, the reason and a remedy are logged once, as a warning.
    """
    if switch(SWITCH) == "0":
        return False
    compiler = _compiler()
    if compiler is None:
        _say_slow(_NO_COMPILER)
        return False
    try:
        place = _kept_or_built(compiler)
    except _FAILURES as error:
        _say_slow(_not_built(compiler, error))
        return False
    try:
        library = ctypes.CDLL(str(place))
    except OSError as error:
        _say_slow(f"{place} cannot be loaded ({error}): remove it, or {_NO_EXECUTION}")
        return False
    for symbol in re.findall(r"HANDLER_SYMBOL\((\w+)", _SOURCE.read_text()):
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(symbol, handler, platform="cpu")
    return True


def state() -> tuple[bool, str]:
    """Returns True if the kernels are or will be used, and the reason.

    If they are not compiled yet, an empty library in their place shows whether they can be.
    """
    if switch(SWITCH) == "0":
        return False, f"switched off by {SWITCH}=0"
    compiler = _compiler()
    if compiler is None:
        return False, _NO_COMPILER
    directory = user_cache() / "kernels"
    try:
        if (library := _kept(_name(compiler), directory)) is None:
            place, error = _kept_or_built(compiler, _try)
            if error is not None:
                return False, f"no library can be loaded from {place} ({error}): {_NO_EXECUTION}"
            when = "once, at first use" if place == directory else "at every start"
            return True, f"{compiler[0]} compiles them {when}, in about ten seconds"
    except _FAILURES as error:
        return False, _not_built(compiler, error)
    if available():
        return True, "compiled"
    return False, f"{library} cannot be loaded: remove it, or {_NO_EXECUTION}"


def build(compiler: Sequence[str], directory: Path) -> Path:
    """Returns the path of the library in ``directory``; compiles the library if it is absent.

    If several processes build at once, one compiles and the others wait. ``compiler`` is the
    program and its first arguments.

    Raises:
      OSError: the directory cannot be written, the compiler cannot be run, or the wait timed out.
      subprocess.CalledProcessError: the compiler fails.
    """
    name = _name(compiler)
    if library := _kept(name, directory):
        return library
    directory.mkdir(parents=True, exist_ok=True)
    what = f"compiling the kernels for this processor, which is done once (kept in {directory})"
    with doing(log, what), FileLock(directory / ".lock", timeout=_PATIENCE):
        if (library := _kept(name, directory)) is None:
            # Renamed when complete: a killed process leaves no partial library.
            with tempfile.TemporaryDirectory(dir=directory) as place:
                made = Path(place) / name
                _compile(compiler, made)
                library = made.replace(directory / f"{name}_{_digest(made.read_bytes())}.so")
    return library


def _kept(name: str, directory: Path) -> Path | None:
    """Returns the path of a library that was built before; removes damaged ones.

    A process that loads the first part of a library ends without a message.
    """
    for library in directory.glob(f"{name}_*.so"):
        if library.stem == f"{name}_{_digest(library.read_bytes())}":
            return library
        library.unlink()
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _name(compiler: Sequence[str]) -> str:
    """Returns a library's name, with a hash of source, flags, processor and versions."""
    described = repr((compiler, _version(compiler), _FLAGS, jax.__version__, processor_features()))
    return f"decoder_kernels_{_digest(described.encode() + _SOURCE.read_bytes())}"


def _try(compiler: Sequence[str], directory: Path) -> tuple[Path, OSError | None]:
    """Builds an empty library as ``build`` does; returns the directory and the error of loading."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        source, made = Path(place) / "empty.cc", Path(place) / "empty.so"
        source.write_text("#include <cstdint>\n")
        _compile(compiler, made, source)
        try:
            ctypes.CDLL(str(made))
        except OSError as error:
            return directory, error
    return directory, None


def _kept_or_built(compiler: Sequence[str], build: Callable = build) -> Any:
    """Calls ``build`` for the user's cache or, if that cannot be written, for a temporary one."""
    directory = user_cache() / "kernels"
    try:
        return build(compiler, directory)
    except (OSError, NotImplementedError) as error:
        if directory.parent == temporary_cache():
            raise
        log.warning(
            "the kernels are compiled at every start because %s cannot be written (%s): set "
            "XDG_CACHE_HOME to another directory",
            directory,
            error,
        )
        return build(compiler, temporary_cache())


def _compile(compiler: Sequence[str], library: Path, source: Path = _SOURCE) -> None:
    def run(native: str) -> subprocess.CompletedProcess:
        command = [*compiler, *_FLAGS, native, f"-I{jax.ffi.include_dir()}", str(source)]
        return subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)

    first = run("-march=native")
    # On Apple's processors, Apple's clang accepts only -mcpu=native.
    if first.returncode and run("-mcpu=native").returncode:
        first.check_returncode()


def _compiler() -> list[str] | None:
    """Returns the compiler's command: the words of ``CXX``, or g++, or clang++; None if absent."""
    given = os.environ.get("CXX", "")
    wanted = given.split()
    for command in filter(None, (wanted, ["g++"], ["clang++"])):
        if shutil.which(command[0]):
            if wanted and command is not wanted:
                log.warning(
                    "CXX is %r, which is not found: %s compiles the kernels",
                    given,
                    command[0],
                )
            return command
    return None


def _version(compiler: Sequence[str]) -> str:
    run = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True)
    return run.stdout


def _not_built(compiler: Sequence[str], error: Exception) -> str:
    reason = (getattr(error, "stderr", None) or "").strip() or str(error)
    remedy = "set CXX, or TMPDIR if nothing can be written there"
    return f"{compiler[0]} could not build them ({reason.splitlines()[0]}): {remedy}"


def _say_slow(why: str) -> None:
    log.warning(
        "decoding on this CPU is slower than it could be: %s (%s=0 silences this)",
        why,
        SWITCH,
    )
