"""A run of ``spec-t5x acceptance``: models by name, texts from a file, figures kept as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from spec_t5x.checkpoints.make_draft import DraftOptions, make_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.errors import InputError
from spec_t5x.experiments.acceptance import AcceptanceOptions, AcceptanceRow, Report, measure
from spec_t5x.experiments.benchmark import machine
from spec_t5x.experiments.inputs import (
    InputOptions,
    generator_of,
    read_texts,
    without_folder,
)
from spec_t5x.generation import Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceRun(InputOptions):
    """Whose acceptance to measure, and on what."""

    # As on the command line; () takes the draft of ``Models``.
    drafts: tuple = ()

    def __post_init__(self):
        if not isinstance(self.drafts, tuple | list):
            raise InputError(f"drafts is {self.drafts!r}: give a list, as in ({self.drafts!r},)")
        # gin's sequences.
        object.__setattr__(self, "drafts", tuple(self.drafts))
        if len(set(self.drafts)) < len(self.drafts):
            raise InputError(f"drafts are {', '.join(self.drafts)}: give each of them once")
        if self.data and self.mixture_or_task:
            raise InputError(
                f"data is {self.data!r} and mixture_or_task {self.mixture_or_task!r}: give one"
            )


def run(
    chosen: AcceptanceRun,
    options: AcceptanceOptions,
    target: LoadedModel,
    texts: Sequence[str] = (),
    draft_options: DraftOptions | None = None,
    report: Report | None = None,
) -> list[AcceptanceRow]:
    """Measures ``chosen.drafts`` on the texts, or on those of ``chosen``.

    Args:
      chosen: the drafts' names, and where texts are.
      options: what to measure.
      target: the model that generates.
      texts: inputs, instead of a file or task.
      draft_options: of all drafts.
      report: as of ``experiments.acceptance.measure``.

    Raises:
      InputError: no input, or both texts and a file; a draft that does not go with the
        target.
    """
    generator = generator_of(target)
    texts = _texts(chosen, options, generator, texts)
    drafts = {
        name: make_draft(name, target, generator.target, draft_options) for name in chosen.drafts
    }
    return measure(generator, drafts, texts, options, report)


def write_json(
    path: Path,
    chosen: AcceptanceRun,
    options: AcceptanceOptions,
    target: LoadedModel,
    rows: Sequence[AcceptanceRow],
) -> None:
    """Keeps all figures, with the machine and the settings they were measured with."""
    report = {
        "machine": machine(),
        "target": target.directory.name,
        # Where the files were is nobody else's business.
        "inputs": dataclasses.asdict(chosen)
        | {
            "data": chosen.data and Path(chosen.data).name,
            "drafts": [without_folder(name) for name in chosen.drafts],
        },
        "options": dataclasses.asdict(options),
        "rows": [row.to_dict() | {"draft": without_folder(row.draft)} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _texts(
    chosen: AcceptanceRun, options: AcceptanceOptions, generator: Generator, texts: Sequence[str]
) -> list[str]:
    has_source = chosen.data or chosen.mixture_or_task
    if texts and has_source:
        raise InputError(f"both TEXT and {has_source} were given: give one of them")
    if texts:
        return list(texts)
    if has_source:
        # A text gives at least a token: no more can be needed, once through.
        return read_texts(chosen, generator, options.standardizations()[0], options.num_tokens)
    if not generator.is_decoder_only:
        chosen.check_given()
    # Unconditional text.
    return [""]
