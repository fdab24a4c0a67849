"""Measured results, each kept under a hash of all that it depends on."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark.other_programs import OtherPrograms
from spec_t5x.labs.reproduction import provenance
from spec_t5x.tuning.store import Store

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
        before: Callable[[str, float], None] | None = None,
    ):
        """Uses a directory, which need not be there yet.

        Args:
          directory: of the files; None keeps nothing.
          origin: of the run (``provenance.origin``), noted with each result. A result depends
            on the machine and the version of JAX; of this package's code, a measurement says
            by a number in its inputs what it depends on.
          before: is called with the name and estimated seconds of a measurement, which then
            begins. None plans: what is not kept is noted in ``missing``, and not measured.
        """
        self.store, self.origin = directory and Store(directory), origin
        self.before = before
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
        self._load(name, inputs)
        if name not in self.found and self.before is None:
            self.missing[name] = seconds
        elif name not in self.found and name not in self.failed:
            self.before(name, seconds)
            start, others = time.perf_counter(), OtherPrograms()
            try:
                # As a file gives it back, so that every run renders the same.
                result = json.loads(json.dumps(compute()))
            except Exception as error:
                self.failed[name] = one_line(error)
            else:
                seconds = round(time.perf_counter() - start, 1)
                self._keep(name, inputs, result, seconds, round(others.share, 3))
        return self.found.get(name, {}).get("result")

    def kept(self, name: str, inputs: Mapping[str, Any], *_) -> Any | None:
        """Called like ``__call__``, but never measures: None where nothing is kept."""
        self._load(name, inputs)
        if name not in self.found:
            return None
        self.asked[name] = None
        return self.found[name]["result"]

    def _load(self, name: str, inputs: Mapping[str, Any]) -> None:
        if self.store and name not in self.found:
            kept = self.store.load(self._depends_on(name, inputs), _checked)
            if kept:
                self.found[name] = kept

    def _keep(
        self, name: str, inputs: Mapping[str, Any], result: Any, seconds: float, beside: float
    ) -> None:
        took = {"date": provenance.now(), "seconds": seconds, "beside": beside}
        origin = {**self.origin, **took}
        self.found[name] = {"result": result, "provenance": origin}
        problem = self.store.save(self._depends_on(name, inputs), self.found[name])
        if problem:
            raise OSError(problem)

    def _depends_on(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        machine = {key: value for key, value in self.origin["machine"].items() if key != "spec_t5x"}
        return {"name": name, "inputs": inputs, "machine": machine}


def _checked(kept: Any) -> dict[str, Any]:
    if not isinstance(kept, dict) or kept.keys() != {"result", "provenance"}:
        raise InputError("the file was edited: it is measured again")
    return kept


def one_line(error: Exception) -> str:
    """An exception as a line of the report."""
    text = " ".join(str(error).split())
    # A user's mistake says all in its message; elsewhere the kind helps.
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
