"""Speculative against plain decoding, for many drafts and verifiers, on real sentences.

Each row decodes the same inputs plainly and speculatively, in one process and in turn,
compilation apart. Beside the measured speed-up stands what Theorem 3.8 predicts from the
alpha and c of the same run, with the cost of verification counted.
"""

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from spec_t5x.checkpoints.drafts import DraftOptions, make_draft
from spec_t5x.checkpoints.loading import load
from spec_t5x.data.tsv import read_pairs
from spec_t5x.drafts.stopping import Stopping
from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import Comparison, compare
from spec_t5x.generation import GenerateOptions, Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What to measure. Every combination of draft, verifier, temperature and gamma."""

    # A file of pairs, of which one column is decoded; .tsv or .tsv.gz.
    data: str | None = None
    source_column: int = 1
    num_columns: int = 3
    num_inputs: int = 60
    repeats: int = 5
    target: str = "ende-target"
    # Drafts and verifiers by name; ``DRAFT/VERIFIER`` pairs.
    pairs: tuple = ("transformer/block",)
    temperatures: tuple = (0.0, 1.0)
    gammas: tuple = (4,)
    # For drafts named ``adaptive``: the transformer with a gamma that adapts, at this c.
    adaptive_c: float = 0.1
    max_decode_len: int = 128

    def __post_init__(self):
        if not isinstance(self.data, str):
            raise InputError(f"data is {self.data!r}: give a file of pairs")
        for name in ("num_inputs", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}: give at least 1")
        for pair in self.pairs:
            if str(pair).count("/") < 1:
                raise InputError(f"pair {pair!r}: write DRAFT/VERIFIER")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    draft: str
    verifier: str
    comparison: Comparison


def run(
    options: BenchmarkOptions, report: Callable[[int, int, str], None] | None = None
) -> Iterator[Row]:
    """Measures row after row; ``report(done, total, what)`` is told of each."""
    target = load(options.target)
    generator = Generator.load(options.target)
    texts = _texts(generator, options)
    combinations = [
        (pair, temperature, gamma)
        for pair in options.pairs
        for temperature in options.temperatures
        for gamma in options.gammas
    ]
    for done, (pair, temperature, gamma) in enumerate(combinations):
        if report:
            report(done, len(combinations), f"{pair}, temperature {temperature:g}, gamma {gamma}")
        draft_name, _, verifier = pair.rpartition("/")
        stopping = Stopping(c=options.adaptive_c) if draft_name == "adaptive" else None
        draft = make_draft(
            "transformer" if stopping else draft_name,
            target,
            generator.target,
            DraftOptions(stopping=stopping),
        )
        decoding = GenerateOptions(
            gamma=gamma,
            temperature=temperature,
            verifier=verifier,
            max_decode_len=options.max_decode_len,
        )
        comparison = compare(generator.with_draft(draft), texts, decoding, options.repeats)
        yield Row(draft=draft_name, verifier=verifier, comparison=comparison)
        # Compiled programs of earlier rows are of no more use, and fill the memory.
        jax.clear_caches()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| draft | verifier | temp. | gamma | alpha | tokens per call | c | T(verify) | speed-up "
        "| loop alone¹ | predicted² | oracle³ | same text |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        c = row.comparison
        same = {None: "—", True: "yes", False: f"{len(c.divergences)} differ"}[c.identical]
        lines.append(
            f"| {row.draft} | {row.verifier} | {c.temperature:g} | {c.gamma} | {c.alpha:.3f} "
            f"| {c.mean_acceptance_length:.2f} | {c.step_times.c:.3f} "
            f"| {c.step_times.verification_cost:.2f} | {c.speed_up:.2f} | {c.loop_speed_up:.2f} "
            f"| {c.predicted_with_verification:.2f} | {c.oracle:.2f} | {same} |"
        )
    lines += [
        "",
        "¹ Without dispatch, encoding and prefill, which both pay for each input. ² Theorem 3.8 "
        "with the measured c and cost of verification, T(verify), both in steps of the target; "
        "for chains of gamma drafts. ³ 1 / (1 - alpha + c alpha): gamma known beforehand, and "
        "verification at the cost of one step.",
    ]
    return "\n".join(lines)


def write_json(path: Path, options: BenchmarkOptions, rows: list[Row]) -> None:
    """Keeps all figures, with the machine and the settings they were measured with."""
    report = {
        "machine": machine(),
        # Where the data was is nobody else's business.
        "options": dataclasses.asdict(options) | {"data": Path(options.data).name},
        "rows": [
            {"draft": row.draft, "verifier": row.verifier} | row.comparison.to_dict()
            for row in rows
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "processor": _processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _processor() -> str:
    """The processor's name where the system tells it, its architecture elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _texts(generator: Generator, options: BenchmarkOptions) -> list[str]:
    """The first inputs that the encoder takes."""
    decoding, texts = GenerateOptions(), []
    columns = (options.source_column, options.source_column, options.num_columns)
    for text, _ in read_pairs(options.data, *columns):
        try:
            generator.tokenize(text, decoding)
        except InputError:
            continue
        texts.append(text)
        if len(texts) == options.num_inputs:
            break
    if not texts:
        raise InputError(f"{options.data} has no input that the encoder takes: give another file")
    return texts
