"""Measured results, each kept in a file of its own under a hash of all that it depends on."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.experiments.reproduction import provenance
from spec_t5x.machine.atomic import remove_unfinished, write_whole

# Raised when the meaning of these files changes.
_VERSION = 2

# What items call to measure: ``Results.__call__`` or ``Results.kept``.
Measure = Callable[..., Any]


class Results:
    """Calls functions that measure, and keeps what they return.

    Attributes:
      found: by name, the ``result`` of each measurement and its ``provenance``.
      failed: by name, why there is no result.
      missing: by name, the estimated seconds of what is not kept; of a plan alone.
      asked: the names of what was called for since it was last emptied.
    """

    def __init__(
        self,
        directory: Path | None,
        origin: Mapping[str, Any],
        run: Mapping[str, Any],
        *,
        fresh: bool = False,
        before: Callable[[str, float], None] | None = None,
    ):
        """Uses a directory, which need not be there yet.

        Args:
          directory: of the files; None keeps nothing.
          origin: machine, versions and commit (``provenance.origin``). A result depends on
            the machine and on the versions of other packages; of this package's code, a
            measurement says by a number in its inputs what it depends on.
          run: seed and effort, noted with each result.
          fresh: measure again what is kept.
          before: is called with the name and estimated seconds of a measurement, which then
            begins. None plans: what is not kept is noted in ``missing``, and not measured.
        """
        self.directory, self.fresh, self.before = directory, fresh, before
        self.origin, self.run = origin, run
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.missing: dict[str, float] = {}
        self.asked: dict[str, None] = {}

    def __call__(
        self, name: str, inputs: Mapping[str, Any], seconds: float, compute: Callable[[], Any]
    ) -> Any | None:
        """A result: found in this run, kept by an earlier one, or else measured and kept.

        A measurement that fails is noted in ``failed`` and does not stop the others.

        Args:
          name: unique in the report: "acceptance/ende-target".
          inputs: all that the result depends on, as JSON.
          seconds: what it takes on two cores, compilation included: an estimate.
          compute: measures; what it returns is JSON.

        Raises:
          OSError: the result cannot be kept.
        """
        self.asked[name] = None
        if not self.fresh:
            self._load(name, inputs)
        if name not in self.found and self.before is None:
            self.missing[name] = seconds
        elif name not in self.found and name not in self.failed:
            self.before(name, seconds)
            start = time.perf_counter()
            try:
                # As a file gives it back, so that every run renders the same.
                result = json.loads(json.dumps(compute()))
            except Exception as error:
                self.failed[name] = one_line(error)
            else:
                self._keep(name, inputs, result, round(time.perf_counter() - start, 1))
        return self.found.get(name, {}).get("result")

    def kept(self, name: str, inputs: Mapping[str, Any], *_) -> Any | None:
        """Called like ``__call__``, but never measures: None where nothing is kept."""
        self._load(name, inputs)
        if name not in self.found:
            return None
        self.asked[name] = None
        return self.found[name]["result"]

    def tidy(self) -> None:
        """Removes what a killed run was writing."""
        remove_unfinished(self.directory)

    def _load(self, name: str, inputs: Mapping[str, Any]) -> None:
        if name in self.found or self.directory is None:
            return
        # Where it is absent, cut or edited, it is measured again.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            kept = json.loads(self._path(name, inputs).read_text(encoding="utf-8"))
            if kept["depends_on"] == self._depends_on(name, inputs):
                self.found[name] = {key: kept[key] for key in ("result", "provenance")}

    def _keep(self, name: str, inputs: Mapping[str, Any], result: Any, seconds: float) -> None:
        origin = {**self.origin, "date": provenance.now(), "seconds": seconds, **self.run}
        self.found[name] = {"result": result, "provenance": origin}
        content = {"depends_on": self._depends_on(name, inputs), **self.found[name]}
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(name, inputs), [(json.dumps(content, indent=1) + "\n").encode()])

    def _path(self, name: str, inputs: Mapping[str, Any]) -> Path:
        text = json.dumps(self._depends_on(name, inputs), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _depends_on(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        versions = {n: v for n, v in self.origin["versions"].items() if n != "spec_t5x"}
        machine = {**self.origin["machine"], "versions": versions}
        depends_on = {"version": _VERSION, "name": name, "inputs": inputs, "machine": machine}
        return json.loads(json.dumps(depends_on))


def one_line(error: Exception) -> str:
    """An exception as a line of the report."""
    text = " ".join(str(error).split())
    # A user's mistake says all in its message; elsewhere the kind helps.
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
