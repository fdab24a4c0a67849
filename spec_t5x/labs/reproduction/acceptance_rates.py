"""Tables 3 and 5: acceptance rates of several drafts, strict and lenient.

alpha is the mean of sum min(p, q) over tokens that the target generated (section 4.2). All drafts
of a target are scored in one pass over its logits (``labs.benchmark.acceptance``).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_t5x.generation import Generator
from spec_t5x.interfaces import Draft
from spec_t5x.labs.benchmark import acceptance, paper_tables
from spec_t5x.labs.benchmark.options import AcceptanceOptions
from spec_t5x.labs.benchmark.paper_tables import LENIENCES
from spec_t5x.labs.reproduction import contents, pairs
from spec_t5x.labs.reproduction.contents import Column, Exhibit, ReportTable, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.pairs import Pair

TEMPERATURES = (0.0, 1.0)
_DRAFTS = ("unigram", "bigram", "transformer", "ngram", "copy")
_MAX_DECODE_LEN = 48
# By the paper's target: its smallest transformer draft, which the package's draft represents.
_SMALLEST = {
    "GPT-like (97M)": "GPT-like (6M)",
    "T5-XXL (EnDe)": "T5-small",
    "T5-XXL (CNN/DM)": "T5-small",
    "LaMDA (137B)": "LaMDA (100M)",
}
# Alphas of Table 5 and, at temperature 0, of section A.5, by draft, temperature and lenience.
PRINTED_LENIENT = {
    (cell.draft, temperature, cell.lenience): cell.alpha
    for temperature, cells in ((1.0, paper_tables.TABLE_5), (0.0, paper_tables.ARGMAX_LENIENCE))
    for cell in cells
}


def printed_rates(target: str) -> dict[tuple[str, float], float]:
    """Returns Table 3's alphas of one of its targets, by draft and temperature."""
    rows = (row for row in paper_tables.TABLE_3 if row.target == target)
    return {(row.draft, row.temperature): row.alpha for row in rows}


def rate_columns(*settings: Column) -> tuple[Column, ...]:
    """Returns the columns of a table of alphas, the paper's beside ours, by draft and settings."""
    return (
        contents.paper("draft", "draft"),
        *settings,
        contents.paper("paper_alpha", "α"),
        contents.label("our_draft", "our draft"),
        contents.measured("alpha", "α", ".3f"),
        contents.measured("low", "from", ".3f"),
        contents.measured("high", "to", ".3f"),
        contents.measured("tokens", "tokens", "d"),
    )


def measure_rates(pair: Pair, options: ReproduceOptions, results: Measure) -> list[dict[str, Any]]:
    """Measures alpha of the pair's drafts; returns ``AcceptanceRow`` dictionaries, [] on failure.

    Pairs of the same target and texts share one measurement, which has the filters of all.
    """
    # A quick run has the drafts whose order the paper compares.
    names = _DRAFTS[:3] if options.quick else _DRAFTS
    texts = pair.texts(options, 60 if options.quick else 1200)
    settings = {
        "num_tokens": 600 if options.quick else 10_000,
        "temperatures": TEMPERATURES,
        "leniences": LENIENCES if pair == pairs.ENDE else (1.0,),
        "top_ks": tuple(each.top_k for each in pair.same_texts()),
        "decoded_texts": 0,
        "batch_size": 16,
        "max_decode_len": _MAX_DECODE_LEN,
        "truncate": pair.truncate,
        "seed": options.seed,
    }

    def measure() -> dict[str, Any]:
        drafts = {name: pairs.load_draft(pair.target, name) for name in names}
        return score(pairs.load_target(pair.target), drafts, texts, **settings)

    inputs = pairs.inputs(pair, names, texts, settings=settings)
    found = results(f"acceptance/{pair.same_texts()[0].name}", inputs, measure)
    return found["rows"] if found else []


def score(
    target: Generator, drafts: Mapping[str, Draft], texts: Sequence[str], **settings: Any
) -> dict[str, Any]:
    """Measures with ``AcceptanceOptions(**settings)``; returns rows and the number of tokens."""
    rows = acceptance.measure(target, drafts, texts, AcceptanceOptions(**settings))
    # All drafts and leniences are scored on the same tokens.
    tokens = {(row.temperature, row.top_k): row.num_tokens for row in rows}
    return {"tokens": sum(tokens.values()), "rows": list(map(dataclasses.asdict, rows))}


def find_rate(
    rows: Iterable[Any], draft: str | None, temperature: float, **values: float | int
) -> dict:
    """Returns the report's cells of the first row with these settings, or {} if there is none."""
    wanted = {"draft": draft, "temperature": temperature, "lenience": 1.0, "top_k": 0, **values}
    for row in rows:
        if wanted.items() <= row.items():
            # A draft that never proposed has no rate.
            alpha = row["alpha"] or {"value": None, "low": None, "high": None}
            return {
                "our_draft": draft,
                "alpha": alpha["value"],
                "low": alpha["low"],
                "high": alpha["high"],
                "tokens": row["num_tokens"],
                "proposed": row["share_proposed"],
            }
    return {}


def _table_3(pair: Pair, rows: Sequence[Any]) -> ReportTable:
    printed = printed_rates(pair.stands_for)
    ours = {"unigram": "unigram", "bigram": "bigram", _SMALLEST[pair.stands_for]: "transformer"}
    # The paper's drafts in its order, then ours that it does not have.
    names = list(dict.fromkeys((theirs, ours.get(theirs)) for theirs, _ in printed))
    others = {row["draft"] for row in rows} - {name for _, name in names}
    names += [(None, name) for name in _DRAFTS if name in others]
    return ReportTable(
        caption=f"{pair.stands_for} and our {pair.target} ({pair.task})"
        + (f", both behind a top-{pair.top_k} filter" if pair.top_k else ""),
        columns=(*rate_columns(contents.TEMPERATURE), contents.PROPOSED),
        rows=[
            {
                "draft": their_name,
                "temperature": temperature,
                "paper_alpha": printed.get((their_name, temperature)),
                # A filter changes nothing at temperature 0, which is measured without.
                **find_rate(rows, our_name, temperature, top_k=pair.top_k if temperature else 0),
            }
            for temperature in TEMPERATURES
            for their_name, our_name in names
        ],
        note="α with a 95% interval, bootstrapped over texts; proposed: the share of tokens for "
        "which the draft proposed anything, over which α is taken. At temperature 0 each text has "
        "one output, and few texts have few tokens." * (pair == pairs.PAIRS[-1]),
    )


def _tables_5(options: ReproduceOptions, results: Measure) -> list[ReportTable]:
    rates = measure_rates(pairs.ENDE, options, results)
    ours = {"unigram": "unigram", "bigram": "bigram", "T5-small": "transformer"}
    # Captions and notes by temperature.
    texts = {
        1.0: (
            "Temperature 1: a draft x is kept with probability min(1, p(x) / (l q(x))).",
            "With lenience below 1 no token comes with more than 1/l times its probability under "
            "the target.",
        ),
        0.0: (
            "Temperature 0: a draft x is kept where p(x) is at least l max(p) (section A.5, "
            "which prints the opposite inequality).",
            "p is the target's distribution before argmax: with lenience below 1 a text may have "
            "tokens that are not the likeliest.",
        ),
    }
    return [
        ReportTable(
            caption=caption,
            columns=rate_columns(contents.LENIENCE),
            rows=[
                {"draft": draft, "lenience": lenience, "paper_alpha": alpha}
                | find_rate(rates, ours.get(draft), temperature, lenience=lenience)
                for (draft, printed_at, lenience), alpha in PRINTED_LENIENT.items()
                if printed_at == temperature
            ],
            note=note,
        )
        for temperature, (caption, note) in texts.items()
    ]


TABLE_3 = Exhibit(
    "Table 3. Acceptance rate α for several targets and drafts",
    lambda options, results: [
        _table_3(pair, measure_rates(pair, options, results)) for pair in pairs.PAIRS
    ],
)
TABLE_5 = Exhibit("Table 5. α by lenience, English-German", _tables_5)
