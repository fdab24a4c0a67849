"""Where a measured number comes from: machine, versions, commit, date."""

import datetime
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.machine.description import machine

_CHECKOUT = Path(__file__).parents[3]


def origin(options: ReproduceOptions) -> dict[str, Any]:
    """What a run's numbers come from: the machine with its versions, the commit, the options."""
    return {
        "machine": machine(),
        "commit": commit(),
        "seed": options.seed,
        "quick": options.quick,
        # Where the files are is nobody else's business.
        "data_dir": options.data_dir and options.data_dir.name,
    }


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` if files differ or are new; None outside."""
    try:
        top = _git("rev-parse", "--show-toplevel")
        # An installation may lie inside another repository.
        if Path(top).resolve() != _CHECKOUT.resolve():
            return None
        changes = "+changes" if _git("status", "--porcelain") else ""
        return _git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return None


def now() -> str:
    """The date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def describe(machine: Mapping[str, Any]) -> str:
    """A machine in a few words: "Intel Xeon, 2 cores (cpu)"."""
    device, platform = machine["device"], machine["platform"]
    accelerator = "" if device == platform else f"{device}, "
    return f"{accelerator}{machine['processor']}, {machine['threads']} cores ({platform})"


def lines(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each commit and seed that results of a report come from, all of one machine."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        p = one["provenance"]
        commit = f"commit {p['commit']}" if p["commit"] else "not from a checkout"
        place = f"{describe(p['machine'])}, {commit}, seed {p['seed']}"
        groups.setdefault(place, []).append(one)
    return [", ".join((place, *_amount(group))) for place, group in groups.items()]


def _amount(group: list[Mapping[str, Any]]) -> Iterable[str]:
    if tokens := sum(one["result"].get("tokens", 0) for one in group):
        yield f"{tokens:,} tokens counted"
    days = sorted({one["provenance"]["date"].split()[0] for one in group})
    yield " to ".join(dict.fromkeys((days[0], days[-1])))
    yield f"took {duration(sum(one['provenance']['seconds'] for one in group))}"


def duration(seconds: float | int) -> str:
    """Seconds as text: "40 s", "8 min", "1 h 40 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_CHECKOUT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
