"""All items, in the paper's order, and what goes beyond the paper after them."""

from collections.abc import Sequence

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction import (
    closed_forms,
    curves,
    measured_figures,
    measured_rates,
    measured_speed,
    synthetic_speed,
)
from spec_t5x.experiments.reproduction.items import Item

ALL = "all"

# Measured for Table 2; others show the same rows.
_SPEED_UPS = measured_speed.speed_up_parts

# Parts are computed in this order, too: Figure 5's share compiled programs with Table 2's,
# and the last clears them all.
ITEMS: tuple[Item, ...] = (
    closed_forms.TABLE_1,
    measured_speed.TABLE_2,
    measured_rates.TABLE_3,
    closed_forms.table_4(_SPEED_UPS),
    measured_rates.TABLE_5,
    measured_figures.FIGURE_1,
    curves.figure_2(_SPEED_UPS),
    curves.figure_3(_SPEED_UPS),
    curves.figure_4(_SPEED_UPS),
    measured_figures.FIGURE_5,
    closed_forms.FACTORS,
    measured_rates.AGREEMENT,
    synthetic_speed.SYNTHETIC,
)


def select(names: Sequence[str]) -> tuple[Item, ...]:
    """The items of those names, in the report's order; ``all`` stands for every one.

    Raises:
      InputError: no item has the name.
    """
    known = [item.name for item in ITEMS]
    for name in names:
        if name not in (*known, ALL):
            raise InputError(f"no item {name!r}: give {ALL}, or some of {', '.join(known)}")
    return tuple(item for item in ITEMS if item.name in names or ALL in names)
