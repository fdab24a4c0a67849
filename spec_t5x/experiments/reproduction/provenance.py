"""Where a figure comes from: machine, versions, commit, date."""

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path

from spec_t5x.experiments.benchmark import machine

_CHECKOUT = Path(__file__).parents[3]
# Whose versions a figure may depend on.
_PACKAGES = ("spec_t5x", "jax", "jaxlib", "flax", "numpy")


def describe_machine() -> dict:
    """The device, the processor and its cores: what times depend on."""
    found = machine()
    return {
        "device": found["device"],
        "platform": found["platform"],
        "processor": found["processor"],
        "cores": _cores(),
    }


def versions() -> dict[str, str]:
    """Of the packages that compute."""
    return {name: _version(name) for name in _PACKAGES}


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` if files differ or are new; None outside."""
    try:
        top = _git("rev-parse", "--show-toplevel")
        # An installation may lie in a folder of somebody else's repository.
        if Path(top).resolve() != _CHECKOUT.resolve():
            return None
        changes = "+changes" if _git("status", "--porcelain") else ""
        return _git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return None


def now() -> str:
    """The date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _cores() -> int | None:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed; the commit tells more.
        return "not installed"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_CHECKOUT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
