"""Item "public": the paper's Tables 2, 3 and 5 on public weights, beside the paper's figures."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.paper_tables import LENIENCES
from spec_t5x.labs.benchmark.reliability import caution
from spec_t5x.labs.reproduction import contents, public_measurements, public_plan, stock_t5x
from spec_t5x.labs.reproduction.acceptance_rates import (
    PRINTED_LENIENT,
    TEMPERATURES,
    find_rate,
    printed_rates,
    rate_columns,
)
from spec_t5x.labs.reproduction.contents import Exhibit, ReportTable, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.public_measurements import Measured
from spec_t5x.labs.reproduction.public_pairs import (
    TASKS,
    PublicPair,
    built_in,
    located,
    paper_draft,
    public_name,
    read_pairs_file,
    short_name,
    task_files,
)
from spec_t5x.labs.reproduction.public_plan import Planned
from spec_t5x.labs.reproduction.speed_ups import MEASURED_COLUMNS, SPEED_UP_NOTE, marked
from spec_t5x.names import AUTO

log = logging.getLogger(__name__)

_PAPER = "The paper's figures are those of T5 1.1 XXL, fine-tuned on the task, on one TPU-v4 chip."


@functools.lru_cache(maxsize=1)
def plan(options: ReproduceOptions) -> tuple[Planned, ...]:
    """Finds and checks the pairs of a run; see ``public_plan``."""
    if options.pairs is not None:
        pairs = read_pairs_file(options.pairs)
    else:
        files, names = task_files(options.data), located(options.models)
        target, weights = options.target, AUTO
        if target == AUTO:
            target, weights, _ = public_plan.automatic_target(names)
        pairs = built_in(public_name(target), files, options.ngrams, options.models, weights)
    planned = tuple(map(public_plan.check_pair, pairs))
    for pair in pairs:
        public_plan.check_data(pair)
    return planned


def check(options: ReproduceOptions) -> None:
    """Checks pairs, device and data, logs what the run takes, and downloads the weights.

    Raises:
      InputError: something does not fit, or cannot be found, read or downloaded.
    """
    planned = plan(options)
    calls = [
        public_measurements.target_calls(each.pair, each.batch_size, options) for each in planned
    ]
    for line in public_plan.describe(planned, calls):
        log.info(line)
    public_plan.download([each.pair for each in planned])


def _content(options: ReproduceOptions, results: Measure) -> list[ReportTable]:
    models, found = public_measurements.ModelsInMemory(), []
    for each in plan(options):
        found.append((each.pair, public_measurements.measure(each, options, results, models)))
    tables = [
        _speed_ups([row for _, measured in found for row in measured.speed_ups]),
        *(_rates(pair, measured) for pair, measured in found),
        *(_leniences(pair, measured) for pair, measured in found if pair.task == "EnDe"),
        _quality([row for _, measured in found for row in measured.quality]),
    ]
    return [table for table in tables if table.rows]


_TARGET = contents.label("target")
_FIGURES = (
    contents.paper("paper_gamma", "γ", "d"),
    contents.paper("paper_alpha", "α"),
    contents.paper("paper_speed_up", "speed-up", ".1f"),
)
# The table would be wider than a page with these.
_LEFT_OUT = ("predicted_speed_up", "loop_speed_up")


def _speed_ups(rows: Sequence[dict[str, Any]]) -> ReportTable:
    """Makes a table like Table 2, with the paper's row beside that of the same task and size."""
    printed = {
        (row.task, f"T5-{row.draft}", row.temperature): {
            "paper_gamma": row.gamma,
            "paper_alpha": row.alpha,
            "paper_speed_up": row.measured,
        }
        for row in paper_tables.TABLE_2
    }
    measured = [column for column in MEASURED_COLUMNS if column.key not in _LEFT_OUT]
    doubts = caution(rows)
    baseline = f" {stock_t5x.NOTE}" if any(row["draft"] == stock_t5x.NAME for row in rows) else ""
    beside = [
        {} if row["is_auto"] else printed.get(_key(row, row["temperature"]), {}) for row in rows
    ]
    return ReportTable(
        caption="Table 2 on public weights, batch 1, in this device's fast type (dtype auto).",
        columns=(_TARGET, *contents.SETTING, *_FIGURES, *measured),
        rows=[row | theirs for row, theirs in zip(marked(rows), beside, strict=True)],
        note=f"{_PAPER} {SPEED_UP_NOTE} γ is the paper's, T5-small's for drafts that Table 2 has "
        "not, and then the one that gamma “auto” chose (0: plain decoding). At temperature 1 plain "
        f"and speculative texts are different draws.{baseline}"
        + (f" † {doubts}" if doubts else ""),
    )


def _key(row: dict[str, Any], temperature: float) -> tuple:
    return row["task"], paper_draft(row["draft"]), temperature


def _rates(pair: PublicPair, measured: Measured) -> ReportTable:
    """Makes a table like Table 3 of a pair."""
    printed = printed_rates(TASKS[pair.task].stands_for) if pair.task in TASKS else {}
    names = list(map(short_name, pair.draft))
    rows = [
        {
            "draft": paper_draft(name),
            "temperature": temperature,
            "paper_alpha": printed.get((paper_draft(name), temperature)),
            **find_rate(measured.rates, name, temperature),
        }
        for temperature in TEMPERATURES
        for name in names
    ]
    return ReportTable(
        caption=f"Table 3 on public weights: {pair.label}, {pair.task}",
        columns=(*rate_columns(contents.TEMPERATURE), contents.PROPOSED),
        rows=rows if measured.rates else [],
        note="α as in section 4.2, the mean of Definition 3.1's β over tokens that the target "
        "generated, with a 95% interval bootstrapped over texts; proposed: the share of tokens "
        "for which the draft proposed anything, over which α is taken.",
    )


def _leniences(pair: PublicPair, measured: Measured) -> ReportTable:
    """Makes a table like Table 5 of a pair, at both temperatures."""
    rows = [
        {
            "draft": paper_draft(name),
            "temperature": temperature,
            "lenience": lenience,
            "paper_alpha": PRINTED_LENIENT.get((paper_draft(name), temperature, lenience)),
            **find_rate(measured.rates, name, temperature, lenience=lenience),
        }
        for temperature in reversed(TEMPERATURES)
        for name in map(short_name, pair.draft)
        for lenience in LENIENCES
    ]
    return ReportTable(
        caption=f"Table 5 on public weights: {pair.label}, {pair.task}",
        columns=rate_columns(contents.TEMPERATURE, contents.LENIENCE),
        rows=rows if measured.rates else [],
    )


def _quality(rows: Sequence[dict[str, Any]]) -> ReportTable:
    return ReportTable(
        caption="Quality of the texts on public weights, plain (draft none) and speculative.",
        columns=(
            _TARGET,
            *contents.SETTING,
            contents.label("texts"),
            contents.label("metric"),
            contents.measured("score", "score"),
            contents.measured("low", "from"),
            contents.measured("high", "to"),
            contents.measured("num_pairs", "texts scored", "d"),
        ),
        rows=rows,
        note="Score against the references, with a 95% interval bootstrapped over texts. At "
        "temperature 0 plain and speculative texts are the same, but for near-ties in bfloat16; "
        "at temperature 1 they are different draws.",
    )


PUBLIC = Exhibit("Tables 2, 3 and 5 on public weights", _content, check)
