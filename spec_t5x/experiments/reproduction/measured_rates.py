"""Tables 3 and 5, and whether three ways to the acceptance rate agree.

alpha is the mean of sum min(p, q) over tokens that the target generated (section 4.2), for
all drafts of a pair in one pass over the target's logits (``experiments.acceptance``).
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.reproduction import pairs
from spec_t5x.experiments.reproduction.items import Done, Item, Json, Part, Setting
from spec_t5x.experiments.reproduction.pairs import Pair
from spec_t5x.experiments.reproduction.sections import Column, Origin, Section, Table
from spec_t5x.theory import formulas

_TEMPERATURES = (0.0, 1.0)
_DRAFTS = ("unigram", "bigram", "transformer", "ngram", "copy")
# The order of Table 3 that is looked for.
_ORDER = ("unigram", "bigram", "transformer")
_LENIENCES = (1.0, 0.5, 0.3, 0.1)
# Of Table 5, which is of one task; the drafts of ours that stand for the paper's.
_LENIENT = {"unigram": "unigram", "bigram": "bigram", "transformer": "T5-small"}
# Ours for the smallest transformer of each block of Table 3.
_SMALLEST = {
    "GPT-like (97M)": "GPT-like (6M)",
    "T5-XXL (EnDe)": "T5-small",
    "T5-XXL (CNN/DM)": "T5-small",
    "LaMDA (137B)": "LaMDA (100M)",
}
_GAMMA = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Effort:
    """How much is measured."""

    # Tokens of the target for each rate, as many as in section 4.2 in a full run.
    num_tokens: int
    pool: int
    # Texts are of one padded length, for the sake of compilation.
    one_shape: bool
    batch_size: int = 16
    max_decode_len: int = 48
    # Decoded speculatively, for what the loop says.
    decoded_texts: int
    # The m of T(m); what lies between is interpolated.
    widths: tuple[int, ...]


_FULL = _Effort(
    num_tokens=10_000, pool=1200, one_shape=False, decoded_texts=128, widths=(*range(1, 12),)
)
_QUICK = _Effort(num_tokens=600, pool=60, one_shape=True, decoded_texts=16, widths=(1, 2, 4, 8))


def _effort(setting: Setting) -> _Effort:
    return _QUICK if setting.quick else _FULL


def _top_ks(pair: Pair) -> list[int]:
    """Of all pairs with the same target: one part measures them together."""
    return [other.top_k for other in pairs.PAIRS if other.target == pair.target]


def _rates(pair: Pair, done: Mapping[str, Done]) -> list[Json] | None:
    """The rows behind the pair's filter, which changes nothing at temperature 0."""
    if _rates_name(pair) not in done:
        return None
    rows = done[_rates_name(pair)].result["rows"]
    return [row for row in rows if row["temperature"] == 0 or row["top_k"] == pair.top_k]


def _drafts(pair: Pair) -> tuple[str, ...]:
    """Those of the pair's drafts that are there."""
    return tuple(draft for draft in _DRAFTS if pairs.missing(pair, (draft,)) is None)


# --- what is computed --------------------------------------------------------------


def _rates_name(pair: Pair) -> str:
    return f"acceptance/{pair.target}"


def _rates_part(setting: Setting, pair: Pair) -> Part:
    """alpha of every draft of the pair, with every filter that Table 3 has for its target."""
    return _acceptance_part(
        setting,
        pair,
        _rates_name(pair),
        # A quick run looks for the order alone.
        tuple(name for name in _drafts(pair) if not setting.quick or name in _ORDER),
        seconds=30.0 if setting.quick else 240.0,
        leniences=list(_LENIENCES) if pair == pairs.ENDE else [1.0],
        top_ks=_top_ks(pair),
        decoded_texts=0,
    )


def _agreement_name(pair: Pair) -> str:
    return f"agreement/{pair.name}"


def _agreement_part(setting: Setting, pair: Pair) -> Part:
    """alpha of some drafts, and what decoding with them achieved."""
    return _acceptance_part(
        setting,
        pair,
        _agreement_name(pair),
        ("transformer",) if setting.quick else ("transformer", "bigram"),
        seconds=30.0 if setting.quick else 240.0,
        decoded_texts=_effort(setting).decoded_texts,
    )


def _acceptance_part(
    setting: Setting,
    pair: Pair,
    name: str,
    drafts: tuple[str, ...],
    *,
    seconds: float,
    **options: Json,
) -> Part:
    """A part that measures; ``options`` are ``AcceptanceOptions``'s, as JSON."""
    effort = _effort(setting)
    texts = pair.texts(setting, effort.pool)
    options |= {
        "num_tokens": effort.num_tokens,
        "batch_size": effort.batch_size,
        "max_decode_len": effort.max_decode_len,
        "seed": setting.seed,
    }
    return Part(
        name=name,
        inputs=pairs.inputs(pair, drafts, texts, one_shape=effort.one_shape, options=options),
        seconds=seconds,
        compute=lambda report: _measure(
            pair, drafts, texts.texts, options, effort.one_shape, report
        ),
    )


def _measure(
    pair: Pair,
    drafts: Sequence[str],
    texts: Sequence[str],
    options: Mapping[str, Json],
    one_shape: bool,
    report: Callable[[float], None],
) -> Json:
    from spec_t5x.experiments.acceptance import AcceptanceOptions, measure
    from spec_t5x.generation import GenerateOptions

    generator = pairs.load_target(pair)
    if one_shape:
        decoding = GenerateOptions(max_decode_len=options["max_decode_len"], truncate=pair.truncate)
        texts = pairs.of_one_shape(generator, texts, decoding, len(texts))
    rows = measure(
        generator,
        {draft: pairs.load_draft(pair, draft) for draft in drafts},
        texts,
        AcceptanceOptions(
            temperatures=_TEMPERATURES,
            truncate=pair.truncate,
            gamma=_GAMMA,
            **options,
        ),
        report=lambda done, total, what: report(done / total),
    )
    # All drafts and leniences look at the same tokens.
    looked_at = {(row.temperature, row.top_k, row.top_p): row.num_tokens for row in rows}
    return {
        "tokens": sum(looked_at.values()),
        "rows": [row.to_dict() for row in rows],
    }


def _costs_part(setting: Setting, pair: Pair) -> Part:
    """c of the pair's transformer and T(m) of its target."""
    effort = _effort(setting)
    texts = pair.texts(setting, 1)
    return Part(
        name=f"costs/{pair.name}",
        inputs=pairs.inputs(
            pair,
            ("transformer",),
            texts,
            widths=list(effort.widths),
            max_decode_len=effort.max_decode_len,
        ),
        seconds=12.0 if setting.quick else 40.0,
        compute=lambda report: _measure_costs(pair, texts.texts, effort),
    )


def _measure_costs(pair: Pair, texts: Sequence[str], effort: _Effort) -> Json:
    from spec_t5x.experiments.reproduction.step_costs import draft_cost, verification_costs
    from spec_t5x.generation import GenerateOptions

    options = GenerateOptions(
        max_decode_len=effort.max_decode_len,
        truncate=pair.truncate,
        temperature=1.0,
        gamma=_GAMMA,
        verifier="token",
    )
    return {
        "c": draft_cost(pair, "transformer", texts[0], options),
        "verification_costs": verification_costs(pair, texts[0], options, effort.widths),
    }


# --- Table 3 -----------------------------------------------------------------------

_TITLE_3 = "Table 3. Acceptance rate alpha for several targets and drafts"


def _parts_3(setting: Setting) -> list[Part]:
    # By name: pairs with the same target share a part.
    parts = [_rates_part(setting, pair) for pair in pairs.present()]
    return list({part.name: part for part in parts}.values())


def _render_3(setting: Setting, done: Mapping[str, Done]) -> Section:
    rates = {pair: rows for pair in pairs.PAIRS if (rows := _rates(pair, done)) is not None}
    return Section(
        title=_TITLE_3,
        finding=" ".join(findings_3(rates)),
        paragraphs=(
            "alpha is the mean of sum min(p, q) over tokens that the target generated "
            "(section 4.2), with a 95% interval bootstrapped over whole texts. The paper's rows "
            "stand beside the small pair that takes the place of its models; T5-base, T5-large "
            "and the larger LaMDA have no counterpart here.",
            *findings_3(rates),
            *(_of_the_pair(setting, pair) for pair in rates),
            *pairs.absences(),
        ),
        content=[_table_3(pair, rates.get(pair, ())) for pair in pairs.PAIRS],
    )


def _of_the_pair(setting: Setting, pair: Pair) -> str:
    texts = pair.texts(setting, _effort(setting).pool).name
    behind = f", every distribution behind a top-{pair.top_k} filter" if pair.top_k else ""
    return f"{pair.stands_for}: `{pair.target}` on {texts}{behind}."


def findings_3(rates: Mapping[Pair, Sequence[Json]]) -> list[str]:
    """Whether the paper's two orders are found, and where not."""
    if not rates:
        return ["Nothing was measured here."]
    return [_order_of_drafts(rates), _order_of_temperatures(rates)]


def _order_of_drafts(rates: Mapping[Pair, Sequence[Json]]) -> str:
    exceptions, total = [], 0
    for pair, temperature in itertools.product(rates, _TEMPERATURES):
        alphas = [_alpha(rates[pair], draft, temperature) for draft in _ORDER]
        if None in alphas:
            continue
        total += 1
        if not all(low < high for low, high in itertools.pairwise(alphas)):
            values = ", ".join(f"{n} {a:.3f}" for n, a in zip(_ORDER, alphas, strict=True))
            exceptions.append(f"{pair.name} at temperature {temperature:g} ({values})")
    text = (
        f"The paper's order, {' < '.join(_ORDER)}, is found in {total - len(exceptions)} of "
        f"{total} cases"
    )
    return f"{text}; not for {'; '.join(exceptions)}." if exceptions else f"{text}."


def _order_of_temperatures(rates: Mapping[Pair, Sequence[Json]]) -> str:
    exceptions, total = [], 0
    for pair, rows in rates.items():
        at_0, at_1 = (_alpha(rows, "transformer", t) for t in _TEMPERATURES)
        if at_0 is None or at_1 is None:
            continue
        total += 1
        if at_0 < at_1:
            exceptions.append(f"{pair.name} ({at_0:.3f} and {at_1:.3f})")
    text = (
        "For the neural draft alpha at temperature 0 is at or above alpha at temperature 1 in "
        f"{total - len(exceptions)} of {total} cases"
    )
    return f"{text}; not for {'; '.join(exceptions)}." if exceptions else f"{text}."


def _find(
    rows: Sequence[Json], draft: str | None, temperature: float, lenience: float = 1.0
) -> Json | None:
    for row in rows:
        if (row["draft"], row["temperature"], row["lenience"]) == (draft, temperature, lenience):
            return row
    return None


def _alpha(
    rows: Sequence[Json], draft: str, temperature: float, lenience: float = 1.0
) -> float | None:
    row = _find(rows, draft, temperature, lenience)
    return None if row is None or row["alpha"] is None else row["alpha"]["value"]


def _table_3(pair: Pair, rows: Sequence[Json]) -> Table:
    paper = {
        (rate.draft, rate.temperature): rate.alpha
        for rate in paper_tables.TABLE_3
        if rate.target == pair.stands_for
    }
    ours = {"unigram": "unigram", "bigram": "bigram", _SMALLEST[pair.stands_for]: "transformer"}
    # The paper's drafts in its order, then ours that it does not have.
    names = [(draft, ours.get(draft)) for draft in dict.fromkeys(draft for draft, _ in paper)]
    measured = {row["draft"] for row in rows}
    names += [(None, draft) for draft in _DRAFTS if draft in measured - {n for _, n in names}]
    lines = [
        (
            their_name,
            temperature,
            paper.get((their_name, temperature)),
            our_name if our_name in measured else None,
            *_rate_cells(_find(rows, our_name, temperature)),
        )
        for temperature in _TEMPERATURES
        for their_name, our_name in names
    ]
    columns = (
        Column("draft", Origin.PAPER),
        Column("temperature", Origin.LABEL, "g"),
        Column("alpha", Origin.PAPER),
        Column("our draft", Origin.LABEL),
        Column("alpha", Origin.MEASURED, ".3f"),
        Column("from", Origin.MEASURED, ".3f"),
        Column("to", Origin.MEASURED, ".3f"),
        Column("tokens", Origin.MEASURED, "d"),
        Column("proposed, share", Origin.MEASURED),
    )
    return Table(
        caption=f"{pair.stands_for}" + (f" and our {pair.target}" if rows else ""),
        columns=columns if rows else columns[:3],
        rows=lines if rows else [line[:3] for line in lines],
        notes=("Where nothing is proposed (copying without a match) alpha does not count.",)
        if rows
        else (),
        parts=(_rates_name(pair),) if rows else (),
    )


def _rate_cells(row: Json | None) -> tuple:
    """alpha, its interval, tokens looked at, share of places with a proposal."""
    if row is None:
        return (None,) * 5
    if row["alpha"] is None:
        return (None, None, None, row["num_tokens"], row["share_proposed"])
    alpha = row["alpha"]
    return alpha["value"], alpha["low"], alpha["high"], row["num_tokens"], row["share_proposed"]


# --- Table 5 -----------------------------------------------------------------------

_TITLE_5 = "Table 5. alpha by lenience, English-German, temperature 1"


def _parts_5(setting: Setting) -> list[Part]:
    return [_rates_part(setting, pairs.ENDE), _costs_part(setting, pairs.ENDE)]


def _render_5(setting: Setting, done: Mapping[str, Done]) -> Section:
    costs_name = f"costs/{pairs.ENDE.name}"
    rows = _rates(pairs.ENDE, done) or ()
    costs = done[costs_name].result if costs_name in done else None
    content = [
        _lenience_table(
            "Temperature 1: a draft x is kept with probability min(1, p(x) / (l q(x))).",
            1.0,
            paper_tables.TABLE_5,
            rows,
            costs,
        ),
        _lenience_table(
            "Temperature 0: a draft x is kept where p(x) is at least l max(p) (section A.5).",
            0.0,
            paper_tables.ARGMAX_LENIENCE,
            rows,
            costs,
        ),
    ]
    return Section(
        title=_TITLE_5,
        finding=finding_5(rows),
        paragraphs=(
            "Lenience below 1 is lossy: with it no token comes with more than 1/l times its "
            "probability under the target. Speed-ups are Theorem 3.8 at the best gamma"
            + (
                f" up to {len(costs['verification_costs']) - 1}, "
                f"ours with c = {costs['c']:.3f} as measured here, once with verification at "
                "the price of one step, as the paper takes it, and once with T(m) as measured."
                if costs
                else "."
            ),
            finding_5(rows),
        ),
        content=content,
    )


def finding_5(rows: Sequence[Json]) -> str:
    """Whether alpha rises as lenience falls, as it does in the paper."""
    curves = {
        (draft, temperature): [
            _alpha(rows, draft, temperature, lenience) for lenience in _LENIENCES
        ]
        for draft in _LENIENT
        for temperature in _TEMPERATURES
    }
    curves = {key: curve for key, curve in curves.items() if None not in curve}
    if not curves:
        return "Nothing was measured here."
    falling = [
        f"{draft} at temperature {temperature:g}"
        for (draft, temperature), curve in curves.items()
        if any(after < before for before, after in itertools.pairwise(curve))
    ]
    found = len(curves) - len(falling)
    text = f"alpha rises with each step of lenience in {found} of {len(curves)} cases"
    return f"{text}; not for {'; '.join(falling)}." if falling else f"{text}."


def _lenience_table(
    caption: str,
    temperature: float,
    cells: Sequence[paper_tables.Lenient],
    rows: Sequence[Json],
    costs: Json | None,
) -> Table:
    ours = {theirs: draft for draft, theirs in _LENIENT.items()}
    lines = []
    for cell in cells:
        draft = ours.get(cell.draft)
        row = _find(rows, draft, temperature, cell.lenience)
        alpha = None if row is None or row["alpha"] is None else row["alpha"]["value"]
        lines.append(
            (
                cell.draft,
                cell.lenience,
                cell.alpha,
                None if cell.speed_up is None else float(cell.speed_up),
                draft if row else None,
                *_rate_cells(row)[:4],
                *_speed_ups(draft, alpha, costs),
            )
        )
    columns = (
        Column("draft", Origin.PAPER),
        Column("lenience l", Origin.LABEL, "g"),
        Column("alpha", Origin.PAPER),
        Column("speed-up", Origin.PAPER, "g"),
        Column("our draft", Origin.LABEL),
        Column("alpha", Origin.MEASURED, ".3f"),
        Column("from", Origin.MEASURED, ".3f"),
        Column("to", Origin.MEASURED, ".3f"),
        Column("tokens", Origin.MEASURED, "d"),
        Column("speed-up, T(m) = 1", Origin.CLOSED_FORM),
        Column("T(m) counted", Origin.CLOSED_FORM),
    )
    return Table(
        caption=caption,
        columns=columns if rows else columns[:4],
        rows=lines if rows else [line[:4] for line in lines],
    )


def _speed_ups(draft: str | None, alpha: float | None, costs: Json | None) -> tuple:
    """At the best gamma; of the draft whose c was measured."""
    if draft != "transformer" or alpha is None or costs is None:
        return None, None
    # Rounding takes a rate of 1 above it.
    alpha = min(alpha, 1.0)
    counted = costs["verification_costs"]
    return (
        float(formulas.best_improvement(alpha, costs["c"], max_gamma=len(counted) - 1)),
        float(formulas.best_improvement(alpha, costs["c"], np.asarray(counted))),
    )


# --- three ways to alpha -------------------------------------------------------------

_TITLE_AGREEMENT = "Three ways to the acceptance rate"
_WAYS = ("by Corollary 3.6", "in the loop", "observed")


def _compared(setting: Setting) -> list[Pair]:
    """The filter changes no formula: one of the language model's two settings will do."""
    if setting.quick:
        return [pairs.ENDE]
    return [pair for pair in pairs.PAIRS if pair != pairs.TOP_40]


def _parts_agreement(setting: Setting) -> list[Part]:
    return [_agreement_part(setting, pair) for pair in pairs.present(pairs=_compared(setting))]


def _render_agreement(setting: Setting, done: Mapping[str, Done]) -> Section:
    lines = [
        (pair, row)
        for pair in pairs.PAIRS
        if _agreement_name(pair) in done
        for row in done[_agreement_name(pair)].result["rows"]
    ]
    return Section(
        title=_TITLE_AGREEMENT,
        finding=finding_agreement(lines),
        paragraphs=(
            "alpha as E[sum min(p, q)] over the places of texts that the target wrote "
            "(Corollary 3.6); the same sum over the places that speculative decoding verified; "
            f"and the share of drafts there that it accepted (token verification, gamma {_GAMMA}). "
            "95% intervals, bootstrapped over whole texts. The loop verifies every place but the "
            "one after a whole accepted block, which tends to be easier than others.",
            finding_agreement(lines),
            *pairs.absences(_compared(setting)),
        ),
        content=[_agreement_table(lines)] if lines else (),
    )


def _estimates(row: Json) -> tuple[Json | None, ...]:
    decoded = row["decoded"] or {"alpha": None, "observed": None}
    return row["alpha"], decoded["alpha"], decoded["observed"]


def _overlap(estimates: Sequence[Json | None]) -> bool | None:
    """Whether all intervals have points in common, pair by pair."""
    if any(estimate is None or estimate["low"] is None for estimate in estimates):
        return None
    return all(
        one["low"] <= other["high"] and other["low"] <= one["high"]
        for one, other in itertools.combinations(estimates, 2)
    )


def finding_agreement(lines: Sequence[tuple[Pair, Json]]) -> str:
    """In how many cases the three intervals have points in common."""
    verdicts = {
        (pair.name, row["draft"], row["temperature"]): _overlap(_estimates(row))
        for pair, row in lines
    }
    verdicts = {key: verdict for key, verdict in verdicts.items() if verdict is not None}
    if not verdicts:
        return "Nothing was measured here."
    apart = [
        f"{pair}, {draft}, temperature {temperature:g}"
        for (pair, draft, temperature), verdict in verdicts.items()
        if not verdict
    ]
    text = (
        "The acceptance rate by Corollary 3.6, by the loop's statistics and as observed agree "
        f"within their intervals in {len(verdicts) - len(apart)} of {len(verdicts)} cases"
    )
    return f"{text}; not for {'; '.join(apart)}." if apart else f"{text}."


def _agreement_table(lines: Sequence[tuple[Pair, Json]]) -> Table:
    columns = [
        Column("pair", Origin.LABEL),
        Column("draft", Origin.LABEL),
        Column("temperature", Origin.LABEL, "g"),
    ]
    for way in _WAYS:
        columns += [
            Column(way, Origin.MEASURED, ".3f"),
            Column("interval", Origin.MEASURED),
            Column("places", Origin.MEASURED, "d"),
        ]
    columns.append(Column("agree", Origin.MEASURED))
    rows = []
    for pair, row in lines:
        cells = [pair.name, row["draft"], row["temperature"]]
        for estimate in _estimates(row):
            cells += _estimate_cells(estimate)
        verdict = _overlap(_estimates(row))
        rows.append((*cells, None if verdict is None else "yes" if verdict else "no"))
    return Table(caption="alpha in three ways.", columns=columns, rows=rows)


def _estimate_cells(estimate: Json | None) -> tuple:
    if estimate is None:
        return None, None, None
    low, high = estimate["low"], estimate["high"]
    interval = None if low is None else f"{low:.3f} to {high:.3f}"
    return estimate["value"], interval, estimate["count"]


TABLE_3 = Item(
    name="table3",
    title=_TITLE_3,
    parts=_parts_3,
    render=_render_3,
    unavailable=lambda setting: pairs.none_present(),
)
TABLE_5 = Item(
    name="table5",
    title=_TITLE_5,
    parts=_parts_5,
    render=_render_5,
    unavailable=lambda setting: pairs.missing(pairs.ENDE, tuple(_LENIENT)),
)
AGREEMENT = Item(
    name="agreement",
    title=_TITLE_AGREEMENT,
    parts=_parts_agreement,
    render=_render_agreement,
    unavailable=lambda setting: pairs.none_present(pairs=_compared(setting)),
)
