"""Measurements of pairs of public weights: acceptance, speed-ups and quality, each kept.

The measurements are those of the packaged pairs (``acceptance_rates``, ``speed_ups``), on models
that hold a device's memory, of which one target is loaded at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spec_t5x.checkpoints import digests
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.interfaces import Draft
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.comparison import Comparison, compare
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.benchmark.paper_tables import LENIENCES
from spec_t5x.labs.benchmark.results import without_folder
from spec_t5x.labs.benchmark.text_source import read_sets, read_texts
from spec_t5x.labs.reproduction import pairs, stock_t5x
from spec_t5x.labs.reproduction.acceptance_rates import TEMPERATURES, score
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.public_pairs import TASKS, PublicPair, paper_draft, short_name
from spec_t5x.labs.reproduction.public_plan import MAX_DECODE_LEN, Planned
from spec_t5x.labs.reproduction.speed_ups import comparison_row
from spec_t5x.names import AUTO, NO_DRAFT

# Texts to time, the number they are chosen from, and repeats; tokens whose acceptance is scored,
# and the number of their texts; texts whose quality is scored.
_FULL = {
    "num_texts": 30,
    "pool": 120,
    "repeats": 5,
    "num_tokens": 10_000,
    "scored_texts": 1200,
    "judged_texts": 300,
}
_QUICK = {
    "num_texts": 4,
    "pool": 24,
    "repeats": 2,
    "num_tokens": 600,
    "scored_texts": 60,
    "judged_texts": 24,
}
# For tasks that the paper does not have.
_GAMMA_TASK = "EnDe"
# Fields that a row lacks if gamma "auto" left the draft out.
_OF_DRAFTS = (
    *("alpha", "block_efficiency", "c", "verification_cost"),
    *("predicted_speed_up", "predicted_speed_up_with_verification"),
)


def effort(options: ReproduceOptions) -> dict[str, int]:
    """Returns how much is decoded."""
    return _QUICK if options.quick else _FULL


def target_calls(pair: PublicPair, batch_size: int, options: ReproduceOptions) -> int:
    """Counts the target's calls for a pair if every text has the most tokens."""
    how, drafts, temperatures = effort(options), len(pair.draft), len(TEMPERATURES)
    # Plain and speculative, with two gammas, in the repeats and twice before them.
    ways = drafts * 4 + 2 * stock_t5x.is_installed()
    timed = ways * (how["repeats"] + 2) * how["num_texts"]
    judged = (1 + drafts) * how["judged_texts"] / batch_size
    scored = how["num_tokens"] / batch_size
    return round(temperatures * (MAX_DECODE_LEN * (timed + judged) + scored))


class ModelsInMemory:
    """One target, and the drafts that were made for it."""

    def __init__(self):
        self._key: tuple | None = None
        self._generator: Generator | None = None
        self._make: Callable[[str], Draft] | None = None

    def generator(self, pair: PublicPair) -> Generator:
        """Returns the pair's target without a draft; the last one is dropped before it is read."""
        if self._key != (key := (pair.target, pair.vocabulary, pair.weights)):
            self._key = self._generator = self._make = None
            options = DraftOptions()
            stored = {"vocabulary": pair.vocabulary, "weights": pair.weights}
            named = pair.target, options.dtype
            target, self._generator = Generator.load_target(*named, **stored)
            bound = self._generator.target
            self._make = functools.cache(lambda name: make_draft(name, target, bound, options))
            self._key = key
        return self._generator

    def draft(self, pair: PublicPair, name: str) -> Draft:
        """Returns a draft of the pair."""
        self.generator(pair)
        return self._make(name)


class Measured(NamedTuple):
    """Rows of the tables: what was measured of one pair; empty lists where it failed."""

    # ``AcceptanceRow`` dictionaries.
    rates: list[dict[str, Any]]
    # ``speed_ups.comparison_row``, with "target".
    speed_ups: list[dict[str, Any]]
    # Scores of plain and speculative decoding.
    quality: list[dict[str, Any]]


def measure(
    planned: Planned, options: ReproduceOptions, results: Measure, models: ModelsInMemory
) -> Measured:
    """Makes the measurements of a pair that are not stored yet, and stores each separately."""
    pair, speed_ups, quality = planned.pair, [], []

    def ask(name: str, inputs: Mapping[str, Any], compute: Callable, *how: Any) -> list[Any]:
        task = functools.partial(compute, planned, *how, options, models)
        found = results(f"public/{pair.name}/{name}", inputs, task)
        return found["rows"] if found else []

    common = _inputs(pair, options)
    drafts = {name: digests.files_digest(name)["content"] for name in pair.draft}
    rates = ask("acceptance", common | {"drafts": list(drafts.values())}, _rates)
    for temperature in TEMPERATURES:
        for name in (NO_DRAFT, *pair.draft):
            at, how = f"t{temperature:g}", (name, temperature)
            inputs = common | {"draft": drafts.get(name), "temperature": temperature}
            if name != NO_DRAFT:
                speed_ups += ask(f"{short_name(name)}/{at}", inputs, _speed_ups, *how)
            elif stock_t5x.is_installed():
                speed_ups += ask(f"baseline/t5x/{at}", inputs, _stock, *how)
            quality += ask(f"quality/{short_name(name)}/{at}", inputs, _quality, *how)
    return Measured(rates, speed_ups, quality)


def _inputs(pair: PublicPair, options: ReproduceOptions) -> dict[str, Any]:
    """Returns what all measurements of a pair depend on."""
    source = dataclasses.asdict(pair.source)
    return {
        "version": 1,
        "target": digests.files_digest(pair.target)["content"],
        "vocabulary": digests.files_digest(pair.vocabulary)["content"],
        "weights": pair.weights,
        # The content, whatever the folder.
        "source": source | {"data": digests.files_digest(pair.source.data)["content"]},
        "max_decode_len": MAX_DECODE_LEN,
        "seed": options.seed,
        **effort(options),
    }


def _decoding(temperature: float, options: ReproduceOptions, **more: Any) -> GenerateOptions:
    return GenerateOptions(
        temperature=temperature,
        max_decode_len=MAX_DECODE_LEN,
        verifier="token",
        truncate=True,
        seed=options.seed,
        **more,
    )


def _rates(planned: Planned, options: ReproduceOptions, models: ModelsInMemory) -> dict[str, Any]:
    """Scores all drafts of a pair on the same tokens, with lenience on the paper's Table 5 task."""
    pair, how = planned.pair, effort(options)
    generator = models.generator(pair)
    texts = read_texts(pair.source, generator, _decoding(0.0, options), how["scored_texts"])
    return score(
        generator,
        {short_name(name): models.draft(pair, name) for name in pair.draft},
        texts,
        num_tokens=how["num_tokens"],
        temperatures=TEMPERATURES,
        leniences=LENIENCES if pair.task == "EnDe" else (1.0,),
        decoded_texts=0,
        batch_size=planned.batch_size,
        max_decode_len=MAX_DECODE_LEN,
        truncate=True,
        seed=options.seed,
    )


def _speed_ups(
    planned: Planned,
    draft: str,
    temperature: float,
    options: ReproduceOptions,
    models: ModelsInMemory,
) -> dict[str, Any]:
    """Times plain and speculative decoding in turn, with the paper's gamma and with "auto"."""
    pair, how = planned.pair, effort(options)
    target = models.generator(pair)
    generator = target.with_draft(models.draft(pair, draft))
    texts = read_texts(pair.source, target, _decoding(temperature, options), how["pool"])
    rows, tokens = [], 0
    for gamma in (paper_gamma(pair.task, draft, temperature), AUTO):
        decoding = _decoding(temperature, options, gamma=gamma)
        chosen = pairs.of_one_shape(generator, texts, decoding, how["num_texts"])
        found = compare(generator, chosen, decoding, how["repeats"])
        rows.append(_speed_up_row(pair, draft, found, is_auto=gamma == AUTO))
        tokens += (found.plain_tokens + found.speculative_tokens) * how["repeats"]
    return {"tokens": tokens, "rows": rows}


def _speed_up_row(
    pair: PublicPair, draft: str, found: Comparison, *, is_auto: bool
) -> dict[str, Any]:
    label = f"auto: {found.gamma}" if is_auto else f"{found.gamma}"
    row = comparison_row(pair.task, short_name(draft), found, label)
    if found.left_out is not None:
        # Both ways decoded plainly.
        row |= dict.fromkeys(_OF_DRAFTS)
    return row | {"target": pair.label, "is_auto": is_auto}


def _stock(
    planned: Planned, _: str, temperature: float, options: ReproduceOptions, models: ModelsInMemory
) -> dict[str, Any]:
    """Times stock T5X on the texts of ``_speed_ups``; no row if T5X cannot run the target."""
    pair, how = planned.pair, effort(options)
    target, decoding = models.generator(pair), _decoding(temperature, options)
    texts = read_texts(pair.source, target, decoding, how["pool"])
    chosen = pairs.of_one_shape(target, texts, decoding, how["num_texts"])
    rows = stock_t5x.measure(target, chosen, decoding, how["repeats"])
    tokens = sum(row["plain_tokens"] + row["stock_tokens"] for row in rows) * how["repeats"]
    row_of = {"target": pair.label, "task": pair.task, "is_auto": False}
    return {"tokens": tokens, "rows": [row | row_of for row in rows]}


def paper_gamma(task: str, draft: str, temperature: float) -> int:
    """Returns the gamma of Table 2: of the draft's size on the task, or else of T5-small's."""
    task = task if task in TASKS else _GAMMA_TASK
    found = {
        f"T5-{row.draft}": row.gamma
        for row in paper_tables.TABLE_2
        if (row.task, row.temperature) == (task, temperature)
    }
    return found.get(paper_draft(draft), found["T5-small"])


def _quality(
    planned: Planned,
    draft: str,
    temperature: float,
    options: ReproduceOptions,
    models: ModelsInMemory,
) -> dict[str, Any]:
    """Scores the texts that the target decodes with a draft, or plainly, against references."""
    pair = planned.pair
    generator, gamma = models.generator(pair), 0
    if draft != NO_DRAFT:
        generator = generator.with_draft(models.draft(pair, draft))
        gamma = paper_gamma(pair.task, draft, temperature)
    decoding = _decoding(temperature, options, gamma=gamma, batch_size=planned.batch_size)
    source = dataclasses.replace(pair.source, limit=effort(options)["judged_texts"])
    rows, tokens = [], 0
    for texts in read_sets(source, generator.vocabulary):
        found = evaluate(generator, texts, decoding)
        tokens += found.num_tokens
        for metric, value in found.metrics.items():
            low, high = found.intervals.get(metric, (None, None))
            rows.append(
                {
                    "target": pair.label,
                    "task": pair.task,
                    "texts": without_folder(texts.name),
                    "draft": short_name(draft),
                    "temperature": temperature,
                    "metric": metric,
                    "score": float(value),
                    "low": low,
                    "high": high,
                    "num_pairs": found.num_pairs,
                }
            )
    return {"tokens": tokens, "rows": rows}
