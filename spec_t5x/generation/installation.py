"""What ``spec-t5x`` finds on this machine, and whether it would work."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spec_t5x
from spec_t5x.machine import accelerators, xla_flags
from spec_t5x.machine.extras import EXTRAS
from spec_t5x.machine.versions import requirements, unmet, version

# Those whose versions are shown.
_SHOWN = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "numpy"),
    *("tensorstore", "gin-config", "sentencepiece", "tokenizers", "safetensors", "rich"),
    *("argcomplete", "seqio", "tensorflow", "protobuf", "transformers", "torch", "t5x", "gradio"),
)
# What changes what is found or how fast it is.
_VARIABLES = (
    *("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SPEC_T5X_CPU_KERNELS"),
    *("CXX", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TPU_NAME"),
)
_TEXT = "Where is the station?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDirectory:
    """A directory of what can be made or fetched again."""

    path: str
    # None where there is none yet.
    num_bytes: int | None
    writable: bool


@dataclasses.dataclass(kw_only=True)
class Installation:
    """What was found; ``inspect`` makes it."""

    # By package; None of one that is not installed.
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    # ``machine.description.machine`` and memory in bytes; empty where JAX does not start.
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Whether CPU kernels are used, and what there is to say of it; None where there are none.
    cpu_kernels: tuple[bool, str] | None = None
    caches: dict[str, CacheDirectory] = dataclasses.field(default_factory=dict)
    packaged_models: list[str] = dataclasses.field(default_factory=list)
    # Why JAX does not use the machine's accelerator, with the remedy.
    accelerator: str | None = None
    # What does not work, with the remedy.
    missing: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    # Why ``generate`` would not work, with the remedies.
    problems: list[str] = dataclasses.field(default_factory=list)
    # A text that was decoded: its output, and seconds.
    tried: dict[str, Any] | None = None


def inspect(decode: bool = False) -> Installation:
    """Looks at versions, devices, kernels, caches and packaged models; raises nothing.

    Args:
      decode: also decodes a short text with the packaged pair, which may compile.
    """
    found = Installation(versions=_versions(), environment=_environment())
    found.missing = list(_missing())
    found.problems = list(_unmet())
    if not found.problems:
        # Whatever is broken is what is looked for.
        try:
            _look_at_machine(found)
        except Exception as error:
            found.problems.append(f"JAX does not start ({_one_line(error)}): {_remedy(error)}")
    if decode and not found.problems:
        try:
            found.tried = _decode()
        except Exception as error:
            found.problems.append(f"decoding fails ({_one_line(error)}): see --debug of generate")
    return found


def _versions() -> dict[str, str | None]:
    versions = {"spec_t5x": spec_t5x.__version__, "python": platform.python_version()}
    return versions | {name: version(name) for name in _SHOWN}


def _unmet() -> Iterator[str]:
    """Requirements that are absent, or installed in a version that the package does not take."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield from filter(None, map(unmet, requirements("spec_t5x")))


def _environment() -> dict[str, str]:
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    # What the commands set themselves.
    if given.get("XLA_FLAGS") == xla_flags.combined(""):
        del given["XLA_FLAGS"]
    return given


def _missing() -> Iterator[str]:
    if version("spec_t5x") is None:
        yield "spec_t5x itself, so nothing is known of versions (pip install . in its checkout)"
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield f"{extra.purpose} ({extra.remedy})"


def _look_at_machine(found: Installation) -> None:
    import psutil

    from spec_t5x.checkpoints.loading import PACKAGED_MODELS, packaged_names
    from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
    from spec_t5x.checkpoints.named_models import DEFAULT_TARGET
    from spec_t5x.machine import description
    from spec_t5x.machine.operations import registered

    memory = psutil.virtual_memory()
    found.machine = description.machine() | {
        "free_memory": description.free_memory(),
        "host_memory": {"free": memory.available, "total": memory.total},
    }
    found.accelerator = accelerators.unused()
    if found.machine["platform"] == "cpu":
        found.cpu_kernels = registered()[0].state()
    found.caches = dict(_caches())
    found.packaged_models = packaged_names()
    for name in (DEFAULT_TARGET, PACKAGED_DRAFTS[DEFAULT_TARGET]["transformer"]):
        if name not in found.packaged_models:
            found.problems.append(
                f"the packaged {name} is not in {PACKAGED_MODELS}: pip install spec_t5x again, or "
                "give --target and --draft"
            )


def _caches() -> Iterator[tuple[str, CacheDirectory]]:
    from spec_t5x.machine.compilation_cache import user_cache

    own = user_cache()
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", own / "compiled")
    if compiled:
        yield "compiled programs", _cache(Path(compiled))
    yield "CPU kernels", _cache(own / "kernels")
    yield "measured costs", _cache(own / "costs")
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield "Hugging Face", _cache(Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")))


def _cache(path: Path) -> CacheDirectory:
    # One that is not there is made in the nearest directory that is.
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return CacheDirectory(
        path=str(path),
        num_bytes=_size(path) if path.is_dir() else None,
        writable=os.access(there, os.W_OK),
    )


def _size(directory: Path) -> int:
    """Bytes of all files; of a link its own."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            # Another process may remove it meanwhile.
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _decode() -> dict[str, Any]:
    from spec_t5x.checkpoints.named_models import Models
    from spec_t5x.generation import GenerateOptions, Generator
    from spec_t5x.machine.compilation_cache import enable

    enable()
    start = time.perf_counter()
    generator = Generator.load_named(Models())
    outputs = next(iter(generator.generate([_TEXT], GenerateOptions(gamma=4))))
    seconds = time.perf_counter() - start
    return {"input": _TEXT, "output": outputs[0].output, "seconds": seconds}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "pip install spec_t5x again"
    given = os.environ.get("JAX_PLATFORMS")
    return f"JAX_PLATFORMS is {given!r}, unset it" if given else "set JAX_PLATFORMS=cpu"
