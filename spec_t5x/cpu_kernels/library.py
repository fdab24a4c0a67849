"""Compiles the kernels with the machine's C++ compiler, once, and registers them with XLA."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from spec_t5x.compilation_cache import user_cache

# "0" keeps to XLA's own operations.
SWITCH = "SPEC_T5X_CPU_KERNELS"

_SOURCE = Path(__file__).with_name("decoder_kernels.cc")
# For this very processor: the library is kept under a hash of it.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_SYMBOLS = (
    "SpecT5XMultiply",
    "SpecT5XDot",
    "SpecT5XNormalize",
    "SpecT5XSummarize",
    "SpecT5XStandardize",
    "SpecT5XCompare",
    "SpecT5XSample",
    "SpecT5XSampleResidual",
    "SpecT5XExtend",
    "SpecT5XExtendNodes",
    "SpecT5XAttend",
)


@functools.cache
def available() -> bool:
    """Whether the kernels can be called; the first question compiles and registers them.

    Where they cannot, why is said once on standard error, with the remedy.
    """
    if os.environ.get(SWITCH) == "0":
        return False
    compiler = _compiler()
    if compiler is None:
        _say("there is no C++ compiler: install g++ or clang++, or set CXX")
        return False
    try:
        library = ctypes.CDLL(str(build(compiler, user_cache() / "kernels")))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        _say(f"{compiler} could not build them ({reason.strip().splitlines()[0]}): set CXX")
        return False
    for symbol in _SYMBOLS:
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(symbol, handler, platform="cpu")
    return True


def build(compiler: str, directory: Path) -> Path:
    """The compiled library, from ``directory`` or made there.

    Raises:
      OSError: the directory cannot be written to, or the compiler not run.
      subprocess.CalledProcessError: the compiler refuses.
    """
    include = jax.ffi.include_dir()
    described = repr((compiler, _version(compiler), _FLAGS, jax.__version__, _processor()))
    digest = hashlib.sha256(described.encode() + _SOURCE.read_bytes()).hexdigest()[:24]
    library = directory / f"decoder_kernels_{digest}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    # Processes may build at the same time: each in a place of its own, the last one stays.
    with tempfile.TemporaryDirectory(dir=directory) as place:
        made = Path(place) / library.name
        command = [compiler, *_FLAGS, f"-I{include}", str(_SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(library)
    return library


def _compiler() -> str | None:
    """``CXX``, or what the system has."""
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given] if given else ["g++", "clang++"])), None)


def _version(compiler: str) -> str:
    run = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)
    return run.stdout


def _processor() -> str:
    """What the compiler's ``native`` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return platform.processor() + platform.machine()


def _say(why: str) -> None:
    print(
        f"spec-t5x: decoding on this CPU takes longer than it could, {why} "
        f"({SWITCH}=0 says that this is meant)",
        file=sys.stderr,
    )
