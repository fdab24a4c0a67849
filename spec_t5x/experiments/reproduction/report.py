"""The report of a run: what each item came to, its figures as files, its gaps with reasons."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spec_t5x.experiments.reproduction.items import Done, Item, Json, Setting
from spec_t5x.experiments.reproduction.pictures import Picture, save
from spec_t5x.experiments.reproduction.runner import Outcome, Plan, duration, one_line, results_of
from spec_t5x.experiments.reproduction.sections import Drawing, Origin, Plot, Section, Table

PAPER = (
    "Yaniv Leviathan, Matan Kalman and Yossi Matias: Fast Inference from Transformers via "
    "Speculative Decoding, ICML 2023"
)
PAPER_URL = "https://arxiv.org/abs/2211.17192"

# What each origin means, in the report's legend; in order.
LEGEND = {
    Origin.CLOSED_FORM: "computed by this package from the paper's formulas",
    Origin.MEASURED: "a measurement on the machine and at the commit named beside it",
    Origin.COMPILED: "from programs that the TPU's compiler made here, without a TPU: a prediction",
    Origin.PAPER: "printed in the paper",
}
# Those that a run makes, and whose machine and date are told.
_MADE_HERE = (Origin.MEASURED, Origin.COMPILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """An item, and what came of it."""

    item: Item
    # None where nothing can be shown.
    section: Section | None
    # Of the section's plots and drawings, by their names.
    pictures: Mapping[str, Picture]
    # The results that the section shows.
    done: Mapping[str, Done]
    # What could not be computed, and why: sentences without a full stop.
    problems: tuple[str, ...] = ()
    # Why this machine cannot compute it at all; no fault of the run.
    unavailable: str | None = None

    @property
    def state(self) -> str:
        """In a word, for the summary."""
        if self.section is None:
            return "not computed"
        return "in part" if self.problems else "complete"

    def sources(self, content: Table | Plot | Drawing) -> list[str]:
        """Where the figures made here come from: machine, commit, seed, tokens, date."""
        if not any(origin in _MADE_HERE for origin in origins_of(content)):
            return []
        names = content.parts or tuple(self.done)
        return provenance_lines([self.done[name] for name in names if name in self.done])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that is written."""

    setting: Setting
    entries: Sequence[Entry]
    # Machine, versions and commit of this run.
    origin: Mapping[str, Json]
    date: str
    # Parts that this run computed, and that it found.
    computed: int
    kept: int

    @property
    def complete(self) -> bool:
        """Whether nothing failed."""
        return not any(entry.problems for entry in self.entries)

    def command(self, entry: Entry) -> str:
        """What computes an item alone."""
        words = ["spec-t5x", "reproduce", entry.item.name, "--output", "DIR"]
        if self.setting.quick:
            words.append("--quick")
        if self.setting.seed:
            words += ["--seed", str(self.setting.seed)]
        if self.setting.data_dir is not None:
            words += ["--data_dir", self.setting.data_dir.name]
        return " ".join(words)

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of what holds for the whole run."""
        setting = self.setting
        texts = "of the package" if setting.data_dir is None else f"in {setting.data_dir.name}"
        versions = self.origin["versions"].items()
        return [
            ("Machine", describe(self.origin["machine"])),
            ("Software", ", ".join(f"{name} {version}" for name, version in versions)),
            ("Commit", self.origin["commit"] or "not from a checkout"),
            (
                "Run",
                f"{'quick' if setting.quick else 'full'}, seed {setting.seed}, texts {texts}",
            ),
            ("Parts", f"{self.computed} computed in this run, {self.kept} kept from earlier"),
            ("Written", self.date),
        ]


def assemble(
    plan: Plan, outcome: Outcome, directory: Path, origin: Mapping[str, Json], date: str
) -> Report:
    """Renders every item and saves its figures.

    Args:
      plan, outcome: of the run.
      directory: of the report; figures go into ``figures`` in it.
      origin: machine, versions and commit of the run.
      date: of the report.

    Raises:
      OSError: a figure cannot be written.
    """
    return Report(
        setting=plan.setting,
        entries=[_entry(item, plan, outcome, directory) for item in plan.items],
        origin=origin,
        date=date,
        computed=len(plan.open) - len(outcome.failed),
        kept=len(plan.parts) - len(plan.open),
    )


def _entry(item: Item, plan: Plan, outcome: Outcome, directory: Path) -> Entry:
    nothing = Entry(item=item, section=None, pictures={}, done={})
    if item.name in plan.unavailable:
        return dataclasses.replace(nothing, unavailable=plan.unavailable[item.name])
    if item.name in plan.broken:
        return dataclasses.replace(nothing, problems=(plan.broken[item.name],))
    problems = tuple(
        f"{name}: {outcome.failed[name]}"
        for name in plan.owned[item.name]
        if name in outcome.failed
    )
    done = results_of(item, plan, outcome)
    try:
        section = item.render(plan.setting, done)
        pictures = {
            content.name: save(content, directory)
            for content in section.content
            if not isinstance(content, Table)
        }
    except OSError:
        raise
    except Exception as error:  # the other items are still worth a report
        return dataclasses.replace(nothing, problems=(*problems, one_line(error)))
    return Entry(item=item, section=section, pictures=pictures, done=done, problems=problems)


def origins_of(content: Table | Plot | Drawing) -> list[Origin]:
    """How its figures came about, in the legend's order."""
    if isinstance(content, Table):
        found = {column.origin for column in content.columns}
    else:
        found = set(content.origins)
    return [origin for origin in LEGEND if origin in found]


def format_cell(value: float | int | str | None, fmt: str) -> str:
    """A cell as it is shown."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, fmt)


def describe(machine: Mapping[str, Json]) -> str:
    """A machine in a few words: "Intel Xeon, 2 cores (cpu)"."""
    device, platform = machine["device"], machine["platform"]
    accelerator = "" if device == platform else f"{device}, "
    return f"{accelerator}{machine['processor']}, {machine['cores']} cores ({platform})"


def provenance_lines(done: Sequence[Done]) -> list[str]:
    """A line for each machine, commit and seed that results come from."""
    groups: dict[tuple, list[Done]] = {}
    for one in done:
        p = one.provenance
        place = (describe(p["machine"]), p["commit"], p["seed"], p["quick"])
        groups.setdefault(place, []).append(one)
    return [", ".join(_of_group(*place, group)) for place, group in groups.items()]


def _of_group(
    machine: str, commit: str | None, seed: int, quick: bool, done: Sequence[Done]
) -> Iterator[str]:
    yield machine
    yield f"commit {commit}" if commit else "no commit: not from a checkout"
    yield f"seed {seed}"
    if quick:
        yield "quick run"
    tokens = sum(one.result.get("tokens", 0) for one in done if isinstance(one.result, dict))
    if tokens:
        yield f"{tokens:,} tokens counted"
    days = sorted({one.provenance["date"].split()[0] for one in done})
    yield days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    yield f"took {duration(sum(one.provenance['seconds'] for one in done))}"
