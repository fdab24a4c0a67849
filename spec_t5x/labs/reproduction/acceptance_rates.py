"""Tables 3 and 5: acceptance rates of several drafts, strict and lenient.

alpha is the mean of sum min(p, q) over tokens that the target generated (section 4.2), for
all drafts of a target in one pass over its logits (``labs.benchmark.acceptance``).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from spec_t5x.labs.benchmark import acceptance, paper_tables
from spec_t5x.labs.reproduction import columns, pairs
from spec_t5x.labs.reproduction.contents import Exhibit, ReportTable, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.pairs import Pair

_TEMPERATURES = (0.0, 1.0)
_DRAFTS = ("unigram", "bigram", "transformer", "ngram", "copy")
_LENIENCES = (1.0, 0.5, 0.3, 0.1)
_MAX_DECODE_LEN = 48
# The smallest transformer of each of the paper's targets, for which our own stands.
_SMALLEST = {
    "GPT-like (97M)": "GPT-like (6M)",
    "T5-XXL (EnDe)": "T5-small",
    "T5-XXL (CNN/DM)": "T5-small",
    "LaMDA (137B)": "LaMDA (100M)",
}


def measure_rates(pair: Pair, options: ReproduceOptions, results: Measure) -> list[dict[str, Any]]:
    """alpha of the pair's drafts, as dictionaries of ``AcceptanceRow``.

    Pairs with the same target share a measurement, with the filters of all of them.
    """
    quick = options.quick
    # In a quick run those whose order the paper compares.
    drafts = _DRAFTS[:3] if quick else _DRAFTS
    texts = pair.texts(options, 60 if quick else 1200)
    settings = {
        "num_tokens": _num_tokens(options),
        "temperatures": _TEMPERATURES,
        "leniences": _LENIENCES if pair == pairs.ENDE else (1.0,),
        "top_ks": tuple(other.top_k for other in pairs.PAIRS if other.target == pair.target),
        "decoded_texts": 0,
        "batch_size": 16,
        "max_decode_len": _MAX_DECODE_LEN,
        "truncate": pair.truncate,
        "seed": options.seed,
    }

    def measure() -> dict[str, Any]:
        rows = acceptance.measure(
            pairs.load_target(pair.target),
            {draft: pairs.load_draft(pair.target, draft) for draft in drafts},
            texts,
            acceptance.AcceptanceOptions(**settings),
        )
        # All drafts and leniences look at the same tokens.
        tokens = {(row.temperature, row.top_k): row.num_tokens for row in rows}
        return {"tokens": sum(tokens.values()), "rows": list(map(dataclasses.asdict, rows))}

    inputs = pairs.inputs(pair, drafts, texts, settings=settings)
    found = results(f"acceptance/{pair.target}", inputs, 30.0 if quick else 240.0, measure)
    return found["rows"] if found else []


def _num_tokens(options: ReproduceOptions) -> int:
    """Tokens to count at each temperature; the paper counted 10,000."""
    return 600 if options.quick else 10_000


def _find(
    rows: Iterable[Any], draft: str | None, temperature: float, **values: float | int
) -> dict:
    """The row as a table shows it; empty where there is none."""
    wanted = {"draft": draft, "temperature": temperature, "lenience": 1.0, **values}
    for row in rows:
        if wanted.items() <= row.items():
            # Of a draft that never proposed there is no rate.
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


_RATE_COLUMNS = (
    columns.label("our_draft", "our draft"),
    columns.measured("alpha", "α", ".3f"),
    columns.measured("low", "from", ".3f"),
    columns.measured("high", "to", ".3f"),
    columns.measured("tokens", "tokens", "d"),
)


# --- Table 3 -----------------------------------------------------------------------


def _tables_3(options: ReproduceOptions, results: Measure) -> list[ReportTable]:
    asked = _num_tokens(options)
    return [_table_3(pair, measure_rates(pair, options, results), asked) for pair in pairs.PAIRS]


def _table_3(pair: Pair, rows: Sequence[Any], asked: int) -> ReportTable:
    printed = {
        (row.draft, row.temperature): row.alpha
        for row in paper_tables.TABLE_3
        if row.target == pair.stands_for
    }
    ours = {"unigram": "unigram", "bigram": "bigram", _SMALLEST[pair.stands_for]: "transformer"}
    # The paper's drafts in its order, then ours that it does not have.
    drafts = {their_name: ours.get(their_name) for their_name, _ in printed}
    names = [*drafts.items()]
    present = {row["draft"] for row in rows}
    names += [(None, name) for name in _DRAFTS if name in present - set(drafts.values())]
    return ReportTable(
        caption=f"{pair.stands_for} and our {pair.target}"
        + (f", both behind a top-{pair.top_k} filter" if pair.top_k else ""),
        columns=(
            columns.paper("draft", "draft"),
            columns.label("temperature", "temp."),
            columns.paper("paper_alpha", "α"),
            *_RATE_COLUMNS,
            columns.measured("proposed", "proposed"),
        ),
        rows=[
            {
                "draft": their_name,
                "temperature": temperature,
                "paper_alpha": printed.get((their_name, temperature)),
                # A filter changes nothing at temperature 0, which is measured without.
                **_find(rows, our_name, temperature, top_k=pair.top_k if temperature else 0),
            }
            for temperature in _TEMPERATURES
            for their_name, our_name in names
        ],
        note=_few_tokens(rows, asked)
        + "α with a 95% interval, bootstrapped over texts; proposed: the share of tokens for "
        "which the draft proposed anything, over which α is taken." * (pair == pairs.PAIRS[-1]),
    )


def _few_tokens(rows: Sequence[Any], asked: int) -> str:
    """Says where the texts have fewer tokens than were asked for."""
    counted = min((row["num_tokens"] for row in rows if row["temperature"] == 0), default=asked)
    if counted >= asked:
        return ""
    return (
        f"At temperature 0 each text has one output, and all of them have {counted:,} of the "
        f"{asked:,} tokens asked for: a `--data_dir` with more texts has more. "
    )


# --- Table 5 -----------------------------------------------------------------------


def _tables_5(options: ReproduceOptions, results: Measure) -> list[ReportTable]:
    rates = measure_rates(pairs.ENDE, options, results)
    return [
        _lenience_table(
            "Temperature 1: a draft x is kept with probability min(1, p(x) / (l q(x))).",
            1.0,
            paper_tables.TABLE_5,
            rates,
        ),
        _lenience_table(
            "Temperature 0: a draft x is kept where p(x) is at least l max(p) (section A.5).",
            0.0,
            paper_tables.ARGMAX_LENIENCE,
            rates,
        ),
    ]


def _lenience_table(
    caption: str, temperature: float, printed: Sequence[paper_tables.Lenient], rates: Sequence[Any]
) -> ReportTable:
    ours = {"unigram": "unigram", "bigram": "bigram", "T5-small": "transformer"}
    return ReportTable(
        caption=caption,
        columns=(
            columns.paper("draft", "draft"),
            columns.label("lenience", "lenience l"),
            columns.paper("paper_alpha", "α"),
            *_RATE_COLUMNS,
        ),
        rows=[
            {
                "draft": cell.draft,
                "lenience": cell.lenience,
                "paper_alpha": cell.alpha,
                **_find(rates, ours.get(cell.draft), temperature, lenience=cell.lenience, top_k=0),
            }
            for cell in printed
        ],
        note="With lenience below 1 no token comes with more than 1/l times its probability "
        "under the target. The speed-ups that section A.5 derives are among the factors in the "
        "text.",
    )


TABLE_3 = Exhibit("Table 3. Acceptance rate α for several targets and drafts", _tables_3)
TABLE_5 = Exhibit("Table 5. α by lenience, English-German", _tables_5)
