"""Plans what has to be computed, computes it part by part, keeps each when it is done."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from spec_t5x.experiments.reproduction.cache import Cache, UnusableError, as_json
from spec_t5x.experiments.reproduction.items import Done, Item, Json, Part, Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run has to do."""

    setting: Setting
    items: tuple[Item, ...]
    # By name; shared parts once, in the order of the items that need them.
    parts: Mapping[str, Part]
    # Item name to the names of its parts, and of those that it borrows.
    owned: Mapping[str, tuple[str, ...]]
    borrowed: Mapping[str, tuple[str, ...]]
    # Of earlier runs: of these parts, and of those that items merely borrow.
    kept: Mapping[str, Done]
    # Item name to why it is not computed at all: cannot be here, or its parts are unknown.
    unavailable: Mapping[str, str]
    broken: Mapping[str, str]
    # What is to be said of the kept files.
    remarks: tuple[str, ...]

    @property
    def open(self) -> tuple[Part, ...]:
        """The parts that must be computed."""
        return tuple(part for name, part in self.parts.items() if name not in self.kept)

    @property
    def seconds(self) -> float:
        """What those take, by their own estimates."""
        return sum((part.seconds for part in self.open), 0.0)

    def sentence(self) -> str:
        """How long the run takes, to be told beforehand."""
        kind = "quick" if self.setting.quick else "full"
        count, total = len(self.parts) - len(self.open), len(self.parts)
        if not total:
            return "closed forms alone: this takes a moment"
        kept = f"{count} of {total} parts are kept from earlier"
        if not self.open:
            return f"all {total} parts are kept from earlier: this takes a moment"
        return f"the {kind} run takes about {duration(self.seconds)}: {kept}"


@runtime_checkable
class Watcher(Protocol):
    """Is told where a run stands."""

    def begin(self, number: int, total: int, part: Part) -> None:
        """The ``number``-th of ``total`` parts to compute begins."""

    def advance(self, fraction: float) -> None:
        """So much of the current part is done, from 0 to 1."""

    def end(self, part: Part, problem: str | None) -> None:
        """The part is kept, or why it is not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """All results, and what has none."""

    done: Mapping[str, Done]
    # Part name to the reason, in one line.
    failed: Mapping[str, str]


def make_plan(
    items: Sequence[Item], setting: Setting, cache: Cache, *, fresh: bool = False
) -> Plan:
    """Looks up what is kept and what must be computed.

    Args:
      items: what is wanted.
      setting: of the run.
      cache: of earlier results.
      fresh: compute all again.
    """
    parts, lent, owned, borrowed, unavailable, broken = {}, {}, {}, {}, {}, {}
    for item in items:
        try:
            if reason := item.unavailable(setting):
                unavailable[item.name] = reason
                continue
            own = item.parts(setting)
        except Exception as error:  # what is wrong with one item does not stop the others
            broken[item.name] = one_line(error)
            continue
        try:
            others = item.borrowed(setting)
        except Exception:  # those whose parts they are say what is wrong
            others = ()
        for part in own:
            if parts.setdefault(part.name, part).inputs != part.inputs:
                raise ValueError(f"two parts named {part.name} have different inputs")
        lent |= {part.name: part for part in others}
        owned[item.name] = tuple(part.name for part in own)
        borrowed[item.name] = tuple(part.name for part in others)
    # What is borrowed alone is nothing to compute again.
    wanted = {n: p for n, p in lent.items() if n not in parts} if fresh else {**lent, **parts}
    kept, remarks = _look_up(wanted, cache)
    return Plan(
        setting=setting,
        items=tuple(items),
        parts=parts,
        owned=owned,
        borrowed=borrowed,
        kept=kept,
        unavailable=unavailable,
        broken=broken,
        remarks=remarks,
    )


def _look_up(parts: Mapping[str, Part], cache: Cache) -> tuple[dict[str, Done], tuple[str, ...]]:
    """What is kept, and what is to be said of files that cannot be used."""
    kept, remarks = {}, []
    for name, part in parts.items():
        try:
            done = cache.load(part)
        except UnusableError as error:
            remarks.append(f"what was kept of {name} is not used: {error}")
            continue
        if done is not None:
            kept[name] = done
    return kept, tuple(remarks)


def run(
    plan: Plan, cache: Cache, watcher: Watcher, origin: Mapping[str, Json], now: Callable[[], str]
) -> Outcome:
    """Computes what is open. A part that fails does not stop the others.

    Args:
      plan: of ``make_plan``, with the same cache.
      cache: gets every part as soon as it is done.
      watcher: is told.
      origin: goes into the provenance of each part: machine, versions, commit.
      now: tells the date.

    Raises:
      OSError: a result cannot be kept.
    """
    computed, failed = {}, {}
    for number, part in enumerate(plan.open, start=1):
        watcher.begin(number, len(plan.open), part)
        start = time.perf_counter()
        try:
            result = as_json(part.compute(watcher.advance))
        except Exception as error:  # told in the report, in place of the result
            failed[part.name] = one_line(error)
            watcher.end(part, failed[part.name])
            continue
        provenance = {
            **origin,
            "date": now(),
            "seconds": round(time.perf_counter() - start, 1),
            "seed": plan.setting.seed,
            "quick": plan.setting.quick,
        }
        computed[part.name] = Done(result=result, provenance=as_json(provenance))
        cache.store(part, computed[part.name])
        watcher.end(part, None)
    return Outcome(done={**plan.kept, **computed}, failed=failed)


def results_of(item: Item, plan: Plan, outcome: Outcome) -> dict[str, Done]:
    """What ``item.render`` is given, in the order of its parts."""
    names = (*plan.owned[item.name], *plan.borrowed[item.name])
    return {name: outcome.done[name] for name in names if name in outcome.done}


def one_line(error: Exception) -> str:
    """An exception as a line of the report."""
    text = " ".join(str(error).split())
    # A user's mistake tells all in its message; elsewhere the kind helps.
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def duration(seconds: float | int) -> str:
    """As people say it: "40 s", "8 min", "1 h 10 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
