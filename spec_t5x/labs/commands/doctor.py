"""``spec-t5x doctor``: devices, kernels, caches, versions, and whether ``generate`` works."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from importlib.util import find_spec
from typing import Any

import spec_t5x
from spec_t5x.errors import one_line
from spec_t5x.labs.requirements import requirements, unmet
from spec_t5x.machine import accelerators
from spec_t5x.machine.extras import EXTRAS, version

HELP = "show devices, kernels, caches and versions, and what keeps generate from working"

_SHOWN = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "numpy"),
    *("tensorstore", "gin-config", "sentencepiece", "tokenizers", "safetensors", "rich"),
    *("argcomplete", "seqio", "tensorflow", "protobuf", "transformers", "torch", "t5x", "gradio"),
)
_VARIABLES = (
    *("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *("SPEC_T5X_CPU_KERNELS", "SPEC_T5X_GPU_KERNELS", "CXX", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "TPU_NAME"),
)
_TEXT = "translate English to German: Where is the station?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = "also decode a short text with the packaged models"
    parser.add_argument("--try", action="store_true", dest="decode", help=text)


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if ``generate`` fails or an accelerator is unused, else 0."""
    found = inspect(args.decode)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        from tabulate import tabulate

        style = "simple" if sys.stdout.isatty() else "pipe"
        lines = [(name, _shown(value)) for name, value in found.items()]
        table = tabulate(lines, ("what", "found"), style, disable_numparse=True)
        print(table, _verdict(found), sep="\n\n", flush=True)
    return 1 if found["problems"] or found["accelerator"] else 0


def inspect(decode: bool = False) -> dict[str, Any]:
    """Inspects versions, devices, kernels, caches and packaged models; never raises.

    Args:
      decode: also decodes a short text with the packaged models, which may compile.

    Returns:
      JSON values; ``problems`` and ``accelerator`` tell what does not work, with remedies.
    """
    versions = {"spec_t5x": spec_t5x.__version__, "python": platform.python_version()}
    versions |= {name: found for name in _SHOWN if (found := version(name))}
    absent = [extra for module, extra in EXTRAS.items() if find_spec(module) is None]
    missing = [f"{extra.purpose} ({extra.remedy})" for extra in absent]
    try:
        problems = list(filter(None, map(unmet, requirements())))
    except importlib.metadata.PackageNotFoundError:
        missing.insert(0, "spec_t5x itself, so its requirements are unknown (pip install .)")
        problems = []
    environment = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    found = {"versions": versions, "environment": environment, "missing": missing}
    found |= {"problems": problems, "accelerator": None}
    for name, step in {"JAX": _machine, "decoding": _decoded}.items():
        if not problems and (decode or step is _machine):
            # Any exception is a finding to report.
            try:
                found |= step()
            except Exception as error:
                remedy = _remedy(error) if step is _machine else "see spec-t5x generate --debug"
                fault = accelerators.fault_of(error)
                problems.append(fault or f"{name} fails ({one_line(error)}): {remedy}")
    return found


def _machine() -> dict[str, Any]:
    """Returns the findings about devices, memory, kernels, caches and packaged models."""
    import psutil
    from huggingface_hub.constants import HF_HUB_CACHE

    from spec_t5x.checkpoints.loading import packaged_names
    from spec_t5x.machine import description
    from spec_t5x.machine.compilation_cache import user_cache
    from spec_t5x.machine.operations import registered

    machine, memory = description.machine(), psutil.virtual_memory()
    computes = machine["platform"].replace("gpu", "cuda")
    caches = {
        "compiled programs": os.environ.get("JAX_COMPILATION_CACHE_DIR", user_cache() / "compiled"),
        "CPU kernels and costs": user_cache(),
        "Hugging Face": HF_HUB_CACHE,
    }
    return {
        "machine": machine | {"free_memory": description.free_memory()},
        "host_memory": {"free": memory.available, "total": memory.total},
        "accelerator": accelerators.unused(),
        "kernels": next((o.state() for o in registered() if o.platform == computes), None),
        "caches": {name: str(path) for name, path in caches.items()},
        "packaged_models": packaged_names(),
    }


def _decoded() -> dict[str, Any]:
    """Decodes a text with the packaged models; returns input, output and seconds."""
    from spec_t5x.checkpoints.named_models import Models
    from spec_t5x.generation import GenerateOptions, Generator
    from spec_t5x.machine.compilation_cache import enable

    enable()
    start = time.perf_counter()
    ((output,),) = Generator.load_named(Models()).generate(_TEXT, GenerateOptions(gamma=4))
    seconds = time.perf_counter() - start
    return {"tried": {"input": _TEXT, "output": output.output, "seconds": round(seconds, 1)}}


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "pip install spec_t5x again"
    given = os.environ.get("JAX_PLATFORMS")
    return f"JAX_PLATFORMS is {given!r}, unset it" if given else "set JAX_PLATFORMS=cpu"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return "" if value is None else str(value)


def _verdict(found: dict[str, Any]) -> str:
    if found["problems"]:
        return f"generate would not work: {'; '.join(found['problems'])}."
    if found["accelerator"]:
        device = found["machine"]["platform"].upper()
        return f"generate works here, but on the {device} only: {found['accelerator']}."
    if found["machine"]["platform"] == "cpu" and not (found["kernels"] or [True])[0]:
        return f"generate works here, but slowly: {found['kernels'][1]}."
    return "generate works here." if "tried" in found else "generate would work here."
