"""What can be reproduced: an item has parts, each of which is computed once and kept."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction.sections import Section

# What JSON can hold.
Json = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What the user chose for the whole run."""

    # Fewer inputs, tokens and repeats: minutes instead of an hour.
    quick: bool = False
    seed: int = 0
    # Holds ``ende/dev.tsv.gz``, ``summarize/debian_dev.tsv.gz`` and the like; None takes
    # the sentences that come with the package (``examples``). A text becomes a Path.
    data_dir: Path | str | None = None

    def __post_init__(self):
        # gin hands over whatever a file binds.
        if not isinstance(self.quick, bool):
            raise InputError(f"Setting.quick is {self.quick!r}: give True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"Setting.seed is {self.seed!r}: give a whole number")
        if self.data_dir is not None:
            if not isinstance(self.data_dir, str | Path):
                raise InputError(f"Setting.data_dir is {self.data_dir!r}: give a text in quotes")
            object.__setattr__(self, "data_dir", Path(self.data_dir))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A unit of work: kept under a hash of its inputs, so that a run can be resumed."""

    # Unique in the report: "acceptance/ende/t0".
    name: str
    # All that the result depends on, as JSON: settings, names and fingerprints of models
    # and data, and a version to raise when the code's meaning changes.
    inputs: Mapping[str, Json]
    # What it takes on two cores, compilation included: an estimate, told beforehand.
    seconds: float | int
    # Told what fraction is done where that is known.
    compute: Callable[[Callable[[float], None]], Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A part's result, and where it comes from."""

    result: Json
    # Machine, versions, commit, date and seconds of the run that computed it.
    provenance: Mapping[str, Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A table or a figure of the paper."""

    # "table1" … "table5", "figure1" … "figure5", and what goes beyond the paper.
    name: str
    title: str
    # Parts may be shared between items (by name); () for closed forms.
    parts: Callable[[Setting], Sequence[Part]]
    # Of the parts' results by name; a part that could not be computed is absent.
    render: Callable[[Setting, Mapping[str, Done]], Section]
    # Parts of other items that ``render`` gets too where their results are there, but that
    # are not computed for this item's sake: measured points over a curve.
    borrowed: Callable[[Setting], Sequence[Part]] = lambda setting: ()
    # Why this machine cannot (a package that is missing), or None.
    unavailable: Callable[[Setting], str | None] = lambda setting: None
