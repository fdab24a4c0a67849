"""Compiles the kernels with the machine's C++ compiler, once, and registers them with XLA."""

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from filelock import FileLock

from spec_t5x.machine.compilation_cache import temporary_cache, user_cache
from spec_t5x.machine.description import native
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)

# "0" keeps to XLA's own operations.
SWITCH = "SPEC_T5X_CPU_KERNELS"

_SOURCE = Path(__file__).with_name("decoder_kernels.cc")
# Besides flags for this very processor, a hash of which is in the library's name.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
# Time limit for another process that compiles them, in seconds.
_PATIENCE = 300
_NO_COMPILER = "there is no C++ compiler: install g++ or clang++, or set CXX"


@functools.cache
def available() -> bool:
    """Tells whether the kernels can be called; the first call compiles and registers them.

    If they cannot be called, the reason is logged once as a warning, with the remedy.
    """
    if os.environ.get(SWITCH) == "0":
        return False
    compiler = _compiler()
    if compiler is None:
        _say_slow(_NO_COMPILER)
        return False
    try:
        library = ctypes.CDLL(str(_kept_or_built(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or "").strip() or str(error)
        _say_slow(f"{compiler[0]} could not build them ({reason.splitlines()[0]}): set CXX")
        return False
    for symbol in re.findall(r"HANDLER_SYMBOL\((\w+)", _SOURCE.read_text()):
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(symbol, handler, platform="cpu")
    return True


def state() -> tuple[bool, str]:
    """Tells whether the kernels are used, and why or why not; compiles nothing."""
    if os.environ.get(SWITCH) == "0":
        return False, f"switched off by {SWITCH}=0"
    compiler = _compiler()
    if compiler is None:
        return False, _NO_COMPILER
    try:
        library = _place(compiler, user_cache() / "kernels")
    except (OSError, subprocess.CalledProcessError) as error:
        return False, f"{compiler[0]} cannot be run ({error}): set CXX"
    if not library.exists():
        return True, f"{compiler[0]} compiles them at first use, once, in about ten seconds"
    if available():
        return True, "compiled"
    return False, f"{library} cannot be loaded: remove it"


def build(compiler: Sequence[str], directory: Path) -> Path:
    """Returns the compiled library in ``directory``, which is made if absent.

    Of several processes that build it at once, one compiles and the others wait. ``compiler`` is
    the program and its first arguments.

    Raises:
      OSError: the directory cannot be written to, or the compiler not run.
      subprocess.CalledProcessError: the compiler refuses.
    """
    library = _place(compiler, directory)
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    what = f"compiling the kernels for this processor, which is done once (kept in {directory})"
    with doing(log, what), FileLock(directory / ".lock", timeout=_PATIENCE):
        if not library.exists():
            # A killed process leaves no half of a library.
            with tempfile.TemporaryDirectory(dir=directory) as place:
                made = Path(place) / library.name
                _compile(compiler, made)
                made.replace(library)
    return library


def _place(compiler: Sequence[str], directory: Path) -> Path:
    """Returns the path of the compiled library."""
    described = repr((compiler, _version(compiler), _FLAGS, jax.__version__, native()))
    digest = hashlib.sha256(described.encode() + _SOURCE.read_bytes()).hexdigest()[:24]
    return directory / f"decoder_kernels_{digest}.so"


def _kept_or_built(compiler: Sequence[str]) -> Path:
    """Builds the library in the user's cache or, if that fails, for this process alone."""
    directory = user_cache() / "kernels"
    try:
        return build(compiler, directory)
    # File systems without locks raise the second.
    except (OSError, NotImplementedError) as error:
        log.warning(
            "every start compiles the kernels, %s cannot be written (%s): set XDG_CACHE_HOME to "
            "another place",
            directory,
            error,
        )
        return build(compiler, temporary_cache())


def _compile(compiler: Sequence[str], library: Path) -> None:
    def run(native: str) -> subprocess.CompletedProcess:
        command = [*compiler, *_FLAGS, native, f"-I{jax.ffi.include_dir()}", str(_SOURCE)]
        return subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)

    first = run("-march=native")
    # Apple's clang has another name for it on Apple's processors.
    if first.returncode and run("-mcpu=native").returncode:
        first.check_returncode()


def _compiler() -> list[str] | None:
    """Returns ``CXX`` with its arguments, or the system's compiler if that program is missing."""
    given = os.environ.get("CXX", "")
    wanted = given.split()
    for command in filter(None, (wanted, ["g++"], ["clang++"])):
        if shutil.which(command[0]):
            if wanted and command is not wanted:
                log.warning(
                    "CXX is %r and there is no such program: %s compiles the kernels",
                    given,
                    command[0],
                )
            return command
    return None


def _version(compiler: Sequence[str]) -> str:
    run = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True)
    return run.stdout


def _say_slow(why: str) -> None:
    log.warning(
        "decoding on this CPU takes longer than it could, %s (%s=0 says that this is meant)",
        why,
        SWITCH,
    )
