"""The rows of the comparison: which ways of decoding there are, and who does them."""

import dataclasses
from typing import Any

from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.experiments.neighbours.options import NeighboursOptions

PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One row."""

    name: str
    # The module of this package that does it, and the process: methods of one process share
    # their weights.
    module: str
    process: str
    # Of the module's ``make``.
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Several tokens a call of the target.
    speculative: bool = False
    # Whether the weights are the same numbers; else the row is a note.
    exact: bool = True
    # Whether the module is to ``prepare`` first.
    prepares: bool = False
    # Why it cannot be done, known beforehand.
    problem: str | None = None


def methods(options: NeighboursOptions, job: Job) -> list[Method]:
    """All rows; ours first, and of ours plain decoding."""
    makers = {
        "transformers": _of_transformers,
        "ctranslate2": _of_ctranslate2,
        "t5x": _of_t5x,
    }
    rows = [_ours(PLAIN), *_speculative(options, job)]
    for name in options.implementations:
        rows += makers[name](options, job)
    return rows


def _ours(name: str, **more: Any) -> Method:
    return Method(name=f"spec_t5x, {name}", module="ours", process="ours", **more)


def _speculative(options: NeighboursOptions, job: Job) -> list[Method]:
    rows = []
    for pair in options.pairs if job.draft is not None else ():
        draft, _, verifier = str(pair).rpartition("/")
        named = job.draft if draft == "draft" else draft
        if verifier != "own":
            named = f"{named}/{verifier}"
        for gamma in options.gammas:
            arguments = {"draft": draft, "gamma": gamma}
            if verifier != "own":
                arguments["verifier"] = verifier
            rows.append(_ours(f"{named}, gamma {gamma}", arguments=arguments, speculative=True))
    return rows


def _of_transformers(options: NeighboursOptions, job: Job) -> list[Method]:
    common = {"module": "with_transformers", "process": "transformers"}
    rows = [
        Method(name="transformers, eager", **common),
        Method(name="transformers, static cache", arguments={"cache": "static"}, **common),
    ]
    if job.draft is None:
        return rows
    problem = None
    if job.draft_copy is None:
        problem = f"the draft {job.draft} is no T5, which an assistant must be"
    if job.alpha is not None:
        problem = "random weights: a random assistant is never right, and verdicts are not drawn"
    settings = {f"gamma {g}": {"assistant": "gamma", "gamma": g} for g in options.gammas}
    settings["its own gamma"] = {"assistant": "own"}
    return rows + [
        Method(
            name=f"transformers, assisted, {name}",
            arguments=arguments,
            speculative=True,
            problem=problem,
            **common,
        )
        for name, arguments in settings.items()
    ]


def _of_ctranslate2(options: NeighboursOptions, job: Job) -> list[Method]:
    # Each type has weights of its own.
    return [
        Method(
            name=f"CTranslate2, {compute_type}",
            module="with_ctranslate2",
            process=f"ctranslate2 {compute_type}",
            arguments={"compute_type": compute_type},
            exact=compute_type == "float32",
            prepares=True,
        )
        for compute_type in ("float32", "int8")
    ]


def _of_t5x(options: NeighboursOptions, job: Job) -> list[Method]:
    return [Method(name="T5X, temperature_sample", module="with_t5x", process="t5x")]
