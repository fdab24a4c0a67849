"""What was measured, and the figures that follow from it."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from spec_t5x.experiments.floor import Floor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where an output is not that of our plain decoding."""

    # Indices of the input and of the token.
    input: int
    position: int
    plain_token: int
    other_token: int
    # Our target's logit of the plain token minus that of the other one.
    margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """Of a method in a process of its own, which has done nothing else."""

    load_seconds: float
    # First decode minus the second.
    compile_seconds: float
    # Most that the process had in memory at a time, libraries included.
    peak_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds for all inputs, a number for each repeat."""

    # Source ids in, output ids out.
    decode: list[float]
    # The same, told to generate one token.
    first_token: list[float]
    # None where the encoder cannot be called by itself.
    encoder: list[float] | None
    # Share of a processor that the process took while others had their turn.
    idle_share: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method."""

    name: str
    # Several tokens a call of the target; whether the weights are the same numbers.
    speculative: bool
    exact: bool
    alone: Alone | None = None
    # Why there are no figures; then there is nothing of the following.
    problem: str | None = None
    version: str | None = None
    timings: Timings | None = None
    num_tokens: int | None = None
    # Whether every output is that of our plain decoding; None where verdicts are drawn.
    identical: bool | None = None
    divergences: list[Divergence] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All methods on one target."""

    title: str
    num_inputs: int
    # Of all sources, and of all outputs of our plain decoding.
    source_tokens: int
    num_tokens: int
    # Room that caches are given.
    max_decode_len: int
    # Of drawn verdicts.
    alpha: float | None
    floor: Floor
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """All of it with all figures, as JSON can hold it."""
        plain = _per_token(self.rows[0])
        rows = [
            dataclasses.asdict(row) | {"figures": _figures(row, self, plain)} for row in self.rows
        ]
        return dataclasses.asdict(self) | {"floor": self.floor.to_dict(), "rows": rows}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def _per_token(row: Row) -> list[float]:
    """Seconds for each token, by repeat; the encoder has its share."""
    return [seconds / row.num_tokens for seconds in row.timings.decode]


def _figures(row: Row, group: Group, plain: list[float]) -> dict[str, float] | None:
    """Medians over the repeats; of ratios, of the ratios of each repeat."""
    if row.timings is None:
        return None
    timings, floor = row.timings, group.floor
    per_token = _per_token(row)
    low, middle, high = quartiles(per_token)
    figures = {
        "seconds_per_token": middle,
        "seconds_per_token_quartiles": [low, high],
        "tokens_per_second": 1 / middle,
        # Above 1: faster than our plain decoding.
        "speed_up": _median_ratio(plain, per_token),
        "times_floor": middle / floor.token_seconds,
        "first_token_seconds": statistics.median(timings.first_token) / group.num_inputs,
        "encoder_seconds": timings.encoder
        and statistics.median(timings.encoder) / group.num_inputs,
    }
    further = row.num_tokens - group.num_inputs
    if further and not row.speculative:
        # Of speculation the first call brings more tokens than one.
        steps = [
            (decode - first) / further
            for decode, first in zip(timings.decode, timings.first_token, strict=True)
        ]
        figures["step_seconds"] = statistics.median(steps)
        figures["step_times_floor"] = figures["step_seconds"] / floor.step_seconds
    return figures


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(
        above / below for above, below in zip(numerators, denominators, strict=True)
    )
