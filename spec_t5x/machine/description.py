"""Description of the machine that a measurement was made on: devices, processor, versions."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import psutil

from spec_t5x.machine.extras import version


def machine() -> dict[str, Any]:
    """Returns the devices, threads and versions that times depend on, as a dict for JSON."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.local_device_count(),
        "processor": processor(),
        "threads": threads(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "spec_t5x": version("spec_t5x"),
    }


def processor() -> str:
    """Returns the processor's name, or its architecture if the system gives no name."""
    for line in processor_features().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def processor_features() -> str:
    """Returns the processor's name and features as text: ``-march=native`` depends on these."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return platform.processor() + platform.machine()


def vector_instructions() -> str:
    """Returns the names of the processor's vector instructions, which decide how a CPU sums."""
    found = re.findall(r"\b(?:amx|asimd|avx|fma|sve)\w*", processor_features())
    return " ".join(sorted(set(found)))


def threads() -> int:
    """Returns the number of logical processors that this process may run on."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return len(process.cpu_affinity())
    return psutil.cpu_count() or 1


def free_memory() -> int | None:
    """Returns the free bytes of this process's first device (a CPU has the machine's), or None."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available if device.platform == "cpu" else None
