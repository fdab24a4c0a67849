"""Store of measured results with provenance, each under a hash of all that it depends on."""

import datetime
import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, one_line
from spec_t5x.labs.benchmark.reliability import OtherPrograms
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.machine.description import machine
from spec_t5x.tuning.store import Store

log = logging.getLogger(__name__)

# ``Results``, which items call to measure.
Measure = Callable[..., Any]
_CHECKOUT = Path(__file__).parents[3]


class Results:
    """Cache in a directory, which is called to measure or to return what was measured before.

    Attributes:
      found: the ``result`` and ``provenance`` of each measurement of this run, by name.
      failed: the reason why a measurement has no result, by name.
      asked: names of the measurements requested since the caller last cleared it.
    """

    def __init__(self, directory: Path, origin: Mapping[str, Any]):
        """Stores the directory, made with the first result, and the run's ``origin()``.

        A result is reused on the same machine and versions of Python and JAX. The inputs of a
        measurement include a version, to be raised when the code that measures changes.
        """
        self.store, self.origin = Store(directory), origin
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.asked: dict[str, None] = {}

    def __call__(self, name: str, inputs: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """Returns a measurement: of this run, stored by an earlier run, or else of ``compute()``.

        If ``compute`` raises, the reason is stored in ``failed`` and None returned. ``inputs`` are
        all that the result depends on besides the machine; they and the result are JSON.

        Raises:
          OSError: the result cannot be stored.
        """
        self.asked[name] = None
        machine = {key: value for key, value in self.origin["machine"].items() if key != "spec_t5x"}
        depends_on = {"name": name, "inputs": inputs, "machine": machine}
        if name not in self.found and (kept := self.store.load(depends_on, _checked)):
            self.found[name] = kept
        if name in self.found or name in self.failed:
            return self.found.get(name, {}).get("result")
        log.info(f"measuring {name}")
        start, others = time.perf_counter(), OtherPrograms()
        try:
            # The result as a file would return it, so that this run's report equals later ones.
            result = json.loads(json.dumps(compute()))
        except Exception as error:
            self.failed[name] = reason(error)
            return None
        took = {"date": now(), "seconds": round(time.perf_counter() - start, 1)}
        took["beside"] = round(others.share, 3)
        self.found[name] = {"result": result, "provenance": {**self.origin, **took}}
        if problem := self.store.save(depends_on, self.found[name]):
            raise OSError(problem)
        return result


def _checked(kept: Any) -> dict[str, Any]:
    if not isinstance(kept, dict) or kept.keys() != {"result", "provenance"}:
        raise InputError("the file was edited: it is measured again")
    return kept


def reason(error: Exception) -> str:
    """Returns an error's type and message as one line, or a ``ValueError``'s message alone."""
    text, kind = one_line(error, most=2000), type(error).__name__
    # A user's mistake needs no more than its message; an error without one is named by its type.
    return text if isinstance(error, ValueError) or text == kind else f"{kind}: {text}"


# Provenance


def origin(options: ReproduceOptions) -> dict[str, Any]:
    """Returns the origin of a run's numbers: the machine with its versions, commit, options."""
    return {
        "machine": machine(),
        "commit": commit(),
        "seed": options.seed,
        "quick": options.quick,
        # The path is private.
        "data_dir": options.data_dir and options.data_dir.name,
    }


def commit() -> str | None:
    """Returns the checkout's commit, with ``+changes`` if files differ or are new.

    Returns None outside of a checkout.
    """
    try:
        top = _git("rev-parse", "--show-toplevel")
        # An installation may be inside another repository.
        if Path(top).resolve() != _CHECKOUT.resolve():
            return None
        changes = "+changes" if _git("status", "--porcelain") else ""
        return _git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_CHECKOUT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def now() -> str:
    """Returns the date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def describe(machine: Mapping[str, Any]) -> str:
    """Describes ``machine()`` in a few words: "Intel Xeon, 2 cores (cpu)"."""
    device, platform = machine["device"], machine["platform"]
    accelerator = "" if device == platform else f"{device}, "
    return f"{accelerator}{machine['processor']}, {machine['threads']} cores ({platform})"


def lines(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each machine, commit and seed: tokens, days and seconds of results."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        p = one["provenance"]
        commit = f"commit {p['commit']}" if p["commit"] else "not from a checkout"
        place = f"{describe(p['machine'])}, {commit}, seed {p['seed']}"
        groups.setdefault(place, []).append(one)
    return [f"{place}, {_amount(group)}" for place, group in groups.items()]


def _amount(group: list[Mapping[str, Any]]) -> str:
    tokens = sum(one["result"].get("tokens", 0) for one in group)
    days = sorted({one["provenance"]["date"].split()[0] for one in group})
    seconds = sum(one["provenance"]["seconds"] for one in group)
    counted = f"{tokens:,} tokens counted, " * bool(tokens)
    return f"{counted}{' to '.join(dict.fromkeys((days[0], days[-1])))}, took {seconds:.0f} s"
