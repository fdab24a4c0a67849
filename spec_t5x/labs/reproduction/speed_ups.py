"""Table 2: speed-ups measured here beside the paper's, and compiled for the paper's machine.

Each measurement decodes the same texts plainly and speculatively, in one process and in turn,
with one draft at one temperature: with the paper's gamma, and with the one that is best by
Theorem 3.8 for the alpha, c and T(gamma + 1) measured here, which tests the theorem.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from spec_t5x.generation import GenerateOptions
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.comparison import Comparison, compare
from spec_t5x.labs.benchmark.reliability import caution, doubt
from spec_t5x.labs.reproduction import compiled_steps, contents, pairs
from spec_t5x.labs.reproduction.contents import Exhibit, ReportTable, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.pairs import ENDE, SUMMARIES, Pair
from spec_t5x.labs.theory import formulas

# Table 2 has no row of n-gram drafts and copying; section 3.6 and Table 3 have them.
RUNS = [
    (pair, draft, temperature)
    for pair in (ENDE, SUMMARIES)
    for temperature in (0.0, 1.0)
    for draft in ("transformer", "bigram", "ngram", "copy")
]
# The runs of a quick report. The best gamma is measured for the first alone.
_QUICK_RUNS = [
    (ENDE, "transformer", 0.0),
    (ENDE, "ngram", 0.0),
    (ENDE, "transformer", 1.0),
    (SUMMARIES, "transformer", 0.0),
    (SUMMARIES, "copy", 0.0),
]
# Texts to choose from, texts decoded, tokens of each at most, repeats.
_FULL = {"pool": 120, "num_texts": 30, "max_decode_len": 48, "repeats": 5}
_QUICK = _FULL | {"pool": 60, "num_texts": 8, "repeats": 2}
MEASURED_COLUMNS = (
    contents.label("gamma_text", "γ"),
    contents.measured("alpha", "α", ".3f"),
    contents.measured("block_efficiency", "block efficiency"),
    contents.measured("c", "c", ".3f"),
    contents.measured("verification_cost", "T(γ+1)"),
    contents.closed_form("predicted_speed_up", "expected (3.8)"),
    contents.closed_form("predicted_speed_up_with_verification", "expected with T(γ+1)"),
    contents.measured("speed_up", "speed-up"),
    contents.measured("range", "least to most"),
    contents.measured("loop_speed_up", "loop alone"),
    contents.measured("plain_tokens_per_second", "plain, tokens/s", ".0f"),
    contents.measured("same_text", "same text"),
)
SPEED_UP_NOTE = (
    "Speed-up: the ratio of the median rates in tokens per second, encoders included and "
    "compilation not; least to most: over the repeats."
)
# The largest gamma that is tried when the best one is computed.
_MAX_GAMMA = 8


def measure_all(options: ReproduceOptions, results: Measure) -> list[dict[str, Any]]:
    """Returns rows measured for Table 2, without those of runs that failed."""
    rows = []
    paper_gammas = {compiled_steps.key(row): row.gamma for row in paper_tables.TABLE_2}
    for run in _QUICK_RUNS if options.quick else RUNS:
        pair, draft, temperature = run
        effort = _QUICK if options.quick else _FULL
        texts = pair.texts(options, effort["pool"])
        settings = {
            "temperature": temperature,
            "gamma": paper_gammas[pair.paper_task, "small", temperature],
            "try_best": not options.quick or run == _QUICK_RUNS[0],
            "seed": options.seed,
            **effort,
        }
        found = results(
            f"table2/{pair.name}/{draft}/t{temperature:g}",
            pairs.inputs(pair, (draft,), texts, **settings, version=5),
            functools.partial(measure, pair, draft, texts, settings),
        )
        rows += found["rows"] if found else []
    return rows


def measure(
    pair: Pair, draft: str, texts: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures a row with the paper's gamma and, if ``try_best``, one with the best gamma."""
    target = pairs.load_target(pair.target)
    generator = target.with_draft(pairs.load_draft(pair.target, draft))
    decoding = GenerateOptions(
        temperature=settings["temperature"],
        max_decode_len=settings["max_decode_len"],
        gamma=settings["gamma"],
        verifier="token",
        truncate=pair.truncate,
        seed=settings["seed"],
    )
    chosen = pairs.of_one_shape(generator, texts, decoding, settings["num_texts"])
    comparisons = [compare(generator, chosen, decoding, settings["repeats"])]
    times = comparisons[0].step_times
    # T(m) is taken to be linear, through T(1) = 1 and the T(gamma + 1) of the paper's gamma.
    slope = (times.verification_cost - 1) / settings["gamma"]
    # 0 if plain decoding is expected to be the fastest.
    best = formulas.optimal_gamma(
        comparisons[0].alpha or 0.0, times.c, lambda m: 1 + slope * (m - 1), _MAX_GAMMA
    )
    if settings["try_best"] and best not in (0, settings["gamma"]):
        decoding = dataclasses.replace(decoding, gamma=best)
        comparisons.append(compare(generator, chosen, decoding, settings["repeats"]))
    tokens = sum(each.plain_tokens + each.speculative_tokens for each in comparisons)
    return {
        "tokens": tokens * settings["repeats"],
        "rows": [
            comparison_row(pair.task, draft, each, f"{each.gamma}{' *' * (each.gamma == best)}")
            for each in comparisons
        ],
    }


def comparison_row(
    task: str, draft: str, comparison: Comparison, gamma_text: str
) -> dict[str, Any]:
    """Returns a comparison as a row of a table with ``MEASURED_COLUMNS``."""
    low, high = comparison.speed_up_range
    texts = "yes" if comparison.identical else f"{len(comparison.divergences)} differ"
    return comparison.to_dict() | {
        "task": task,
        "draft": draft,
        "gamma_text": gamma_text,
        "range": f"{low:.2f}–{high:.2f}",
        "same_text": None if comparison.identical is None else texts,
    }


def _table_2(options: ReproduceOptions, results: Measure) -> list[ReportTable]:
    ours = measure_all(options, results)
    predicted = compiled_steps.measure(options, results)
    predictions = {tuple(row["key"]): row for row in predicted}
    printed = ReportTable(
        caption="Target T5-XXL, one TPU-v4 chip: measured by the paper, and predicted.",
        columns=(
            *contents.SETTING,
            contents.paper("gamma", "γ", "d"),
            contents.paper("alpha", "α"),
            contents.paper("measured", "speed-up", ".1f"),
            contents.compiled("c", "c", ".3f"),
            contents.compiled("verification_cost", "T(γ+1)", ".3f"),
            contents.compiled("speed_up", "speed-up"),
        ),
        rows=[
            vars(row)
            | {"draft": f"T5-{row.draft}", "c": None}
            | predictions.get(compiled_steps.key(row), {})
            for row in paper_tables.TABLE_2
        ],
        note=compiled_steps.NOTE,
    )
    return [printed, _measured_table(ours)] if ours else [printed]


def marked(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of comparisons with a dagger at the range of those that are in doubt."""
    # A column of reasons would make the table wider than a page.
    return [{**row, "range": row["range"] + (" †" if doubt(row) else "")} for row in rows]


def _measured_table(rows: Sequence[Mapping[str, Any]]) -> ReportTable:
    doubts = caution(rows)
    return ReportTable(
        caption="Small pairs on this machine, batch 1, in its fast type (dtype auto).",
        columns=(*contents.SETTING, *MEASURED_COLUMNS),
        rows=marked(rows),
        note=f"{SPEED_UP_NOTE} Loop alone: without dispatch, encoders and prefill. γ is the "
        "paper's, and (*) the one that Theorem 3.8 predicts to be the best with α, c and T(γ+1) as "
        "measured here, other T(m) on a line. At temperature 1 plain and speculative texts are "
        "different draws. T(γ+1) is the cost of verification in target steps, which the paper "
        "takes to be 1." + (f" † {doubts}" if doubts else ""),
    )


TABLE_2 = Exhibit(
    "Table 2. Speed-up of speculative decoding over plain decoding, batch 1", _table_2
)
