"""Speculative against plain decoding, for many drafts and verifiers, on real sentences.

Each row decodes the same inputs plainly and speculatively, in one process and in turn,
compilation apart. Beside the measured speed-up stands what Theorem 3.8 predicts from the
alpha and c of the same run, with the cost of verification counted.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterator
from typing import Any

import jax

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import DraftOptions, make_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.drafts.stopping import Stopping
from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import Comparison, compare
from spec_t5x.experiments.inputs import InputOptions, generator_of, read_texts
from spec_t5x.generation import GenerateOptions
from spec_t5x.interfaces import Draft
from spec_t5x.models.binding import Model
from spec_t5x.tuning.identity import processor

HELP = "drafts and verifiers against plain decoding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(InputOptions):
    """What to measure. Every combination of draft, verifier, temperature and gamma."""

    # The first that the encoder takes; of a task, the first, without what it refuses.
    num_inputs: int = 60
    repeats: int = 5
    # Drafts and verifiers by name: ``DRAFT/VERIFIER`` pairs. ``draft`` is the run's own draft,
    # ``adaptive`` the same with a gamma that adapts, ``own`` the run's own verifier.
    pairs: tuple = ("transformer/block",)
    temperatures: tuple = (0.0, 1.0)
    gammas: tuple = (4,)
    # Of ``adaptive``: the time of a draft step in target steps.
    adaptive_c: float = 0.1

    def __post_init__(self):
        self.check_given()
        for name in ("num_inputs", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}: give at least 1")
        for pair in self.pairs:
            if str(pair).count("/") < 1:
                raise InputError(f"pair {pair!r}: write DRAFT/VERIFIER")

    @property
    def uses_own_draft(self) -> bool:
        """Whether a row is of the run's own draft."""
        return any(pair.rpartition("/")[0] in ("draft", "adaptive") for pair in self.pairs)


# As the command knows it (``cli.benchmark``).
Options = BenchmarkOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    draft: str
    verifier: str
    comparison: Comparison


def run(
    options: BenchmarkOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Row]:
    """Measures row after row.

    Args:
      options: what to measure.
      report: ``report(done, total, what)`` is told of each row.
      models: the target and its draft, with the draft's settings (``cli.settings.Models``).
        The draft is what ``draft`` and ``adaptive`` stand for in ``options.pairs``.
      decoding: what is the same in all rows: lengths, the batch's size.

    Raises:
      InputError: nothing to decode, a beam search, or a draft or verifier that does not go
        with the target.
    """
    decoding = decoding or GenerateOptions()
    if decoding.beams:
        raise InputError(f"beams is {decoding.beams}: the benchmark does not search, leave it 0")
    draft = models.draft_name() if options.uses_own_draft else None
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    generator = generator_of(target)
    texts = read_texts(options, generator, decoding, options.num_inputs)
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
        model = _make_draft(draft_name, options, target, generator.target, draft, draft_options)
        row = dataclasses.replace(
            _with_verifier(decoding, verifier), gamma=gamma, temperature=temperature
        )
        comparison = compare(generator.with_draft(model), texts, row, options.repeats)
        yield Row(draft=draft_name, verifier=row.verifier, comparison=comparison)
        # Compiled programs of earlier rows are of no more use, and fill the memory.
        jax.clear_caches()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| draft | verifier | temp. | gamma | alpha | block efficiency | c | T(verify) | speed-up "
        "| loop alone¹ | predicted² | oracle³ | same text |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        c = row.comparison
        same = {None: "—", True: "yes", False: f"{len(c.divergences)} differ"}[c.identical]
        lines.append(
            f"| {row.draft} | {row.verifier} | {c.temperature:g} | {c.gamma} | {c.alpha:.3f} "
            f"| {c.block_efficiency:.2f} | {c.step_times.c:.3f} "
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


def to_dict(rows: list[Row]) -> dict[str, Any]:
    """All figures, as JSON can hold them."""
    return {
        "rows": [
            {"draft": row.draft, "verifier": row.verifier} | row.comparison.to_dict()
            for row in rows
        ]
    }


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "processor": processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _make_draft(
    name: str,
    options: BenchmarkOptions,
    target: LoadedModel,
    model: Model,
    own: str | None,
    draft_options: DraftOptions,
) -> Draft:
    """The draft of a row."""
    if name == "adaptive":
        stopping = Stopping(c=options.adaptive_c)
        draft_options = dataclasses.replace(draft_options, stopping=stopping)
    if name in ("draft", "adaptive"):
        name = own or "transformer"
    return make_draft(name, target, model, draft_options)


def _with_verifier(decoding: GenerateOptions, name: str) -> GenerateOptions:
    if name == "own":
        return decoding
    # What is bound of the run's own verifier is not for another.
    return dataclasses.replace(decoding, verifier=name, widths=(), lenience=1.0)
