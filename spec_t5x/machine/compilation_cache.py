"""The user's cache directory, and JAX's persistent compilation cache in it."""

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

# Bytes of compiled programs beyond which JAX removes those least recently used. A program for a CPU
# takes a few megabytes.
MAX_SIZE = 2 * 2**30
# Seconds of a compilation that is logged: dozens of programs of a few operations take less.
_WORTH_A_LINE = 0.05


def user_cache() -> Path:
    """Returns the package's cache directory, ``~/.cache/spec_t5x``, created if it is missing.

    Files of the cache are loaded as code. If another user can write to the directory, or it cannot
    be created, ``temporary_cache`` is returned, and one line of the log gives the reason.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return _in_place_of("~/.cache", "there is no home directory: set XDG_CACHE_HOME")
    return _checked(caches / "spec_t5x")


@functools.cache
def temporary_cache() -> Path:
    """Returns this process's temporary directory, or a path in which nothing can be made."""
    try:
        directory = tempfile.mkdtemp(prefix="spec_t5x-")
    except OSError:
        return Path(os.devnull)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def enable() -> None:
    """Makes JAX store compiled programs in ``JAX_COMPILATION_CACHE_DIR`` or the user's cache.

    An empty ``JAX_COMPILATION_CACHE_DIR`` disables the cache. ``JAX_COMPILATION_CACHE_MAX_SIZE``
    (bytes; ``MAX_SIZE`` by default) bounds the cache of a user with a name. Calls ``announce``.
    """
    announce()
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        directory = _bounded(user_cache() / "compiled")
    if not directory:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Small programs are stored as well, for a fast start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Disables JAX's persistent compilation cache while the code inside runs."""
    directory = jax.config.jax_compilation_cache_dir
    _use(None)
    try:
        yield
    finally:
        _use(directory)


def _use(directory: str | None) -> None:
    if directory != jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
        # JAX reads the setting only when it opens the cache.
        jax_cache.reset_cache()


@functools.cache
def announce() -> None:
    """Logs the process's first compilation of over a second; at DEBUG, those of over 0.05 s."""
    state = {"waiting": None}

    def is_long() -> None:
        state["logged"] = True
        directory = jax.config.jax_compilation_cache_dir
        where = f", which is done once (kept in {directory})" if directory else ""
        log.info("compiling for these models and shapes%s", where)

    def event(name: str, **_) -> None:
        if name.endswith("compile_requests_use_cache") and "logged" not in state:
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
    """Creates a cache's directory and bounds its size; returns None if it is not writable."""
    is_set = "JAX_COMPILATION_CACHE_MAX_SIZE" in os.environ
    try:
        directory.mkdir(exist_ok=True)
        if jax.config.jax_compilation_cache_max_size == -1 and not is_set:
            # To bound a cache, JAX asks for its files' owner by names, which a container's user may
            # lack; it would then store one program and warn of every other.
            with contextlib.suppress(KeyError):
                directory.owner()
                directory.group()
                jax.config.update("jax_compilation_cache_max_size", MAX_SIZE)
        if jax.config.jax_compilation_cache_max_size != -1:
            # A killed process leaves a program without its file "-atime", perhaps without its end.
            # In a bounded cache JAX would store nothing, and compile the program at every start.
            for program in directory.glob("*-cache"):
                if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                    program.unlink(missing_ok=True)
    except OSError:
        return None
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
    log.warning("compiled programs are not kept: %s cannot be used (%s)", directory, why)
    return temporary_cache()
