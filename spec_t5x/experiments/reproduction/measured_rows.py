"""The measured rows of Table 2, which Table 4 and the curves show too."""

import dataclasses
from collections.abc import Mapping, Sequence

from spec_t5x.experiments.reproduction.items import Done

# Of the names of the parts that hold such rows.
PREFIX = "table2/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A speed-up measured here; names as in the paper's Table 2 and 4."""

    # The part that measured it.
    part: str
    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    # Time of a draft step, and of verifying gamma + 1 tokens, in target steps.
    c: float
    verification_cost: float
    # Generated tokens for each target call, and ``1 + accepted / target_calls``.
    block_efficiency: float
    accepted_plus_one: float
    speed_up: float
    # By Theorem 3.8, with verification at the price of one step and at the measured one.
    expected: float
    expected_with_verification: float

    @property
    def setting(self) -> tuple[str, str, float]:
        """What is the same for all values of gamma."""
        return self.task, self.draft, self.temperature


_FIELDS = [field.name for field in dataclasses.fields(MeasuredRow) if field.name != "part"]


def measured_rows(done: Mapping[str, Done]) -> list[MeasuredRow]:
    """The rows of all parts named ``table2/…`` whose results are there, in their order."""
    return [
        MeasuredRow(part=name, **{field: row[field] for field in _FIELDS})
        for name, part in done.items()
        if name.startswith(PREFIX)
        for row in part.result["rows"]
    ]


def parts_of(rows: Sequence[MeasuredRow]) -> tuple[str, ...]:
    """The parts that measured them, once each."""
    return tuple(dict.fromkeys(row.part for row in rows))
