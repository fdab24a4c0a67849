"""Compiled programs kept whole: a later process runs them without tracing anything.

JAX looks into its compilation cache once a program has been traced and lowered, which takes
several times as long as loading it. Here the program is found by what its trace depends on:
the source that it goes through, versions, settings of JAX, the processor, and the structure,
shapes and static values of the arguments. Only programs of one device whose arguments are
classes of the package are kept, since nothing else's source is known.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import math
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from jax.experimental import serialize_executable

from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.description import native
from spec_t5x.machine.operations import usable

log = logging.getLogger(__name__)

# Bytes of kept programs; of more, those that were not used for longest go.
MAX_SIZE = 2**30
_PACKAGE = Path(__file__).parents[1]
# What of the package a trace goes through.
_TRACED = (
    *("contrib", "drafts", "loops", "machine", "models", "sampling", "theory"),
    *("interfaces.py", "types.py", "verifiers.py"),
)
# The packages whose classes arguments may consist of: this one, and those whose version counts.
_KNOWN = ("builtins", "flax", "jax", "jaxlib", "numpy", "spec_t5x")
# Seconds of compilation from which JAX's cache keeps a program.
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
# Settings of JAX that say where programs lie.
_PLACES = ("jax_compilation_cache", "jax_persistent_cache")


class Kept:
    """A function, compiled for the arguments that it is called with, or loaded if it was before.

    Nothing is kept unless JAX's compilation cache is a directory (``compilation_cache.enable``).
    """

    def __init__(
        self, function: Callable, static_argnames: Sequence[str], donated: int | None = None
    ):
        """Of a function that is compiled by ``jax.jit``.

        Args:
          function: what is kept.
          static_argnames: arguments given by name, hashable, of which each value has a program of
            its own.
          donated: number of the argument by place whose arrays the result is written to, which is
            the function's own ``donate_argnames``.
        """
        self._function = function
        self._static = tuple(static_argnames)
        self._donated = donated
        self._programs: dict[Any, Callable] = {}
        # That making or loading programs took.
        self.seconds = 0.0

    def __call__(self, *args, **kwargs):
        directory = _directory()
        if directory is None:
            return self._function(*args, **kwargs)
        static = {name: kwargs.pop(name) for name in self._static if name in kwargs}
        flat = [_flattened(argument) for argument in (*args, kwargs)]
        leaves = list(itertools.chain.from_iterable(each.leaves for each in flat))
        if any(each.kind is None for each in flat):
            return self._function(*args, **kwargs, **static)
        key = (tuple(static.items()), *(each.kind for each in flat))
        if key not in self._programs:
            start = time.perf_counter()
            structure = jax.tree.structure((args, kwargs))
            signature = (tuple(static.items()), structure, tuple(map(jax.typeof, leaves)))
            self._programs[key] = self._program(directory, signature, leaves)
            self.seconds += time.perf_counter() - start
        return self._programs[key](*leaves)

    def _program(self, directory: Path, signature, leaves: list) -> Callable:
        """Takes the leaves of the arguments: JAX describes a program's arguments by odd values."""
        static, structure, _ = signature

        def function(*leaves):
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return self._function(*args, **kwargs, **dict(static))

        described = repr((self._function.__module__, self._function.__qualname__, signature))
        # An object that is known by its address cannot be found again.
        if " at 0x" in described or not _is_known((jax.tree.unflatten(structure, leaves), static)):
            return function
        path = directory / hashlib.sha256((_surroundings() + described).encode()).hexdigest()
        program = _load(path, jax.tree.structure((tuple(leaves), {})))
        if program is not None:
            log.debug("loaded the program of %s from %s", self._function.__name__, path)
        else:
            jitted = jax.jit(function, donate_argnums=tuple(self._donated_leaves(structure)))
            program, is_new = _compiled(jitted.lower(*leaves))
            if is_new:
                _save(path, program)
        return program

    def _donated_leaves(self, structure: jax.tree_util.PyTreeDef) -> Sequence[int]:
        """The numbers of the donated argument's leaves among all."""
        if self._donated is None:
            return ()
        places, _ = structure.children()
        ends = list(itertools.accumulate(place.num_leaves for place in places.children()))
        end = ends[self._donated]
        return range(end - places.children()[self._donated].num_leaves, end)


class _Flat(NamedTuple):
    """An argument as a program takes it."""

    leaves: list
    # A number for its structure and the types of its leaves; None of one that is traced.
    kind: int | None


# The numbers of kinds; and by ``id``, arguments of many leaves, which are looked through once.
_kinds: dict[Any, int] = {}
_seen: dict[int, tuple[weakref.ref, _Flat]] = {}
_MANY = 32


def _flattened(argument: Any) -> _Flat:
    """The leaves of an argument, and its kind.

    To look at those of a model takes a tenth of the time of a short text: a frozen dataclass, which
    the structures of Flax are, is remembered for as long as it lives.
    """
    known = _seen.get(id(argument))
    if known is not None and known[0]() is argument:
        return known[1]
    leaves, structure = jax.tree.flatten(argument)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return _Flat(leaves, None)
    kind = structure, tuple(map(jax.typeof, leaves))
    flat = _Flat(leaves, _kinds.setdefault(kind, len(_kinds)))
    if len(leaves) >= _MANY and dataclasses.is_dataclass(argument):
        place = id(argument)
        _seen[place] = weakref.ref(argument, lambda _: _seen.pop(place, None)), flat
    return flat


def _directory() -> Path | None:
    """Where programs are kept; None where none are."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory or "://" in directory or jax.device_count() != 1:
        return None
    return Path(directory) / "whole"


def _is_known(arguments: Any) -> bool:
    """Whether every node and leaf is of a class whose source the key covers."""
    packages = set()

    def look(node) -> bool:
        packages.add(type(node).__module__.partition(".")[0])
        return False

    jax.tree.leaves(arguments, is_leaf=look)
    return packages <= set(_KNOWN)


@functools.cache
def source() -> str:
    """A hash of the source that programs are made from, kernels included."""
    total = hashlib.sha256()
    for path in itertools.chain.from_iterable(map(_sources, _TRACED)):
        total.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return total.hexdigest()


@functools.cache
def _surroundings() -> str:
    """What every program depends on beside its arguments."""
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_PLACES)
    }
    device = jax.devices()[0]
    versions = (sys.version, jax.__version__, flax.__version__, np.__version__)
    return repr(
        (
            source(),
            versions,
            settings,
            os.environ.get("XLA_FLAGS"),
            (device.device_kind, device.client.platform_version),
            native(),
            # Programs call kernels by name: the question registers them.
            usable("float32"),
        )
    )


def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """The program, and whether it was compiled here.

    One that JAX's cache held cannot be kept: XLA's CPU backend writes it without its functions.
    So it is not put there, to be kept here alone.
    """
    hits, seconds = _cache_hits(), jax.config.values[_LEAST_SECONDS]
    before = len(hits)
    jax.config.update(_LEAST_SECONDS, math.inf)
    try:
        return lowered.compile(), len(hits) == before
    finally:
        jax.config.update(_LEAST_SECONDS, seconds)


@functools.cache
def _cache_hits() -> list[str]:
    """The hits of JAX's cache since the first call; JAX 0.7 takes no listener back."""
    hits = []

    def look(event: str, **_) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(look)
    return hits


def _sources(name: str) -> list[Path]:
    place = _PACKAGE / name
    if name.endswith(".py"):
        return [place]
    return sorted((*place.rglob("*.py"), *place.rglob("*.cc")))


def _load(path: Path, structure: jax.tree_util.PyTreeDef) -> Callable | None:
    """The program, or None: there is none, or it cannot be used any more."""
    try:
        with path.open("rb") as file:
            payload, result = pickle.load(file)
        os.utime(path)
        return serialize_executable.deserialize_and_load(
            payload, structure, jax.tree.structure(result)
        )
    # There is no file, or whatever a damaged one raises: it is made again.
    except Exception:
        return None


def _save(path: Path, program: jax.stages.Compiled) -> None:
    """Keeps a program; nothing happens where that cannot be done."""
    try:
        payload, _, structure = serialize_executable.serialize(program)
        # Structures cannot be pickled, values of them can.
        result = jax.tree.unflatten(structure, range(structure.num_leaves))
        content = pickle.dumps((payload, result))
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in _beyond(path.parent, MAX_SIZE - len(content)):
            old.unlink(missing_ok=True)
        write_whole(path, [content])
    # What cannot be written is made again by the next process, whatever the reason.
    except Exception:
        return


def _beyond(directory: Path, size: int) -> Iterator[Path]:
    """The files that do not fit into so many bytes, were the newest kept."""
    files = [(path.stat(), path) for path in directory.iterdir()]
    for status, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
        size -= status.st_size
        if size < 0:
            yield path
