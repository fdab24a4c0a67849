"""What is compiled once: the user's cache, and JAX's persistent compilation cache in it."""

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from spec_t5x.machine import progress

log = logging.getLogger(__name__)

# Bytes of compiled programs; of more, those that were not used for longest go. A program for a
# CPU takes a few megabytes.
MAX_SIZE = 2 * 2**30
# Seconds: programs of a few operations, of which there are dozens, take less.
_WORTH_A_LINE = 0.05


def user_cache() -> Path:
    """Where the package keeps what it can make again: ``~/.cache/spec_t5x``.

    What lies there is loaded as code. A directory that another user could have written to is
    not used; in its place, and where none can be made, a temporary one is, until the process
    ends. Why is logged once.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return _in_place_of("~/.cache", "there is no home directory: set XDG_CACHE_HOME")
    return _checked(caches / "spec_t5x")


@functools.cache
def temporary_cache() -> Path:
    """A directory of this process, removed when it ends."""
    directory = tempfile.mkdtemp(prefix="spec_t5x-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def enable() -> None:
    """Keeps compiled programs in ``JAX_COMPILATION_CACHE_DIR`` or the user's cache.

    Set that variable to another place, or to an empty string to switch this off. The user's
    cache is bounded by ``MAX_SIZE``, or by ``JAX_COMPILATION_CACHE_MAX_SIZE``. That a program is
    compiled is logged (``announce``).
    """
    announce()
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        directory = _bounded(user_cache() / "compiled")
    if not directory:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Small programs count as well: starting fast is the point.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Within it JAX's cache is neither read nor written."""
    directory = jax.config.jax_compilation_cache_dir
    _use(None)
    try:
        yield
    finally:
        _use(directory)


def _use(directory: str | None) -> None:
    if directory != jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
        # JAX looks at the setting once.
        jax_cache.reset_cache()


@functools.cache
def announce() -> None:
    """Logs that a program is being compiled, the first that takes more than a moment."""
    state = {"waiting": None}

    def is_long() -> None:
        state["said"] = True
        directory = jax.config.jax_compilation_cache_dir
        where = f" (kept in {directory})" if directory else ""
        log.info("compiling for these models and shapes, which is done once%s", where)

    def event(name: str, **_) -> None:
        if name.endswith("compile_requests_use_cache") and "said" not in state:
            state["waiting"] = threading.Timer(progress.A_MOMENT, is_long)
            state["waiting"].daemon = True
            state["waiting"].start()

    def ended(name: str, seconds: float, **_) -> None:
        if name.endswith("backend_compile_duration"):
            if seconds >= _WORTH_A_LINE:
                log.debug("compiled or loaded a program: %.2f s", seconds)
            if state["waiting"]:
                state["waiting"].cancel()

    jax.monitoring.register_event_listener(event)
    jax.monitoring.register_event_duration_secs_listener(ended)


def _bounded(directory: Path) -> Path | None:
    """The directory, whose size JAX bounds; None where nothing can be written."""
    try:
        directory.mkdir(exist_ok=True)
        # JAX orders programs by these files, and keeps none where one is missing: of a cache
        # that had no bound, or of a process that was killed.
        for program in directory.glob("*-cache"):
            used = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
            if not used.exists():
                used.write_bytes(bytes(8))
    except OSError:
        return None
    if jax.config.jax_compilation_cache_max_size == -1:
        jax.config.update("jax_compilation_cache_max_size", MAX_SIZE)
    return directory if os.access(directory, os.W_OK) else None


@functools.cache
def _checked(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return _in_place_of(directory, f"{error.strerror}: set XDG_CACHE_HOME to another place")
    if status.st_uid not in (0, os.getuid()):
        return _in_place_of(directory, "it is another user's: set XDG_CACHE_HOME to another place")
    if status.st_mode & 0o022:
        return _in_place_of(directory, "others can write to it: remove it")
    return directory


@functools.cache
def _in_place_of(directory: Path | str, why: str) -> Path:
    log.warning("nothing that is compiled is kept, %s cannot be used (%s)", directory, why)
    return temporary_cache()
