"""``spec-t5x benchmark``: speculative against plain decoding, for many drafts and settings.

Each row decodes the same inputs plainly and speculatively in turn, in one process, and excludes
compilation. Beside the measured speed-up is the one that Theorem 3.8 predicts from the alpha, c
and cost of verification of the same row.

The inputs are texts or, if an acceptance rate alpha is simulated (``simulated_acceptance``), random
ids. A simulated rate also serves to time random weights (``random:t5_1_1_xxl``).
"""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spec_t5x.checkpoints.make_draft import check_draft, checked_parts, make_draft
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, check_unused
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.comparison import Comparison, compare, pays, without_open
from spec_t5x.labs.benchmark.iteration_parts import measure_parts, overhead
from spec_t5x.labs.benchmark.options import (
    OWN_DRAFT,
    RANDOM,
    BenchmarkOptions,
    Setting,
    TextSource,
    draft_and_verifier,
)
from spec_t5x.labs.benchmark.random_models import (
    check_memory,
    check_vocabulary,
    random_model,
    random_sources,
)
from spec_t5x.labs.benchmark.reliability import OtherPrograms, doubt
from spec_t5x.labs.benchmark.simulated_acceptance import compare_simulated
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.labs.benchmark.text_source import check_readable, read_texts
from spec_t5x.loops.decode_state import Loop
from spec_t5x.models.sizes import size
from spec_t5x.names import AUTO, NO_DRAFT
from spec_t5x.options import NEUTRAL

log = logging.getLogger(__name__)

Report = Callable[[int, int, str], None]

# The draft that needs no weights.
COPY = "copy"


def run(
    options: BenchmarkOptions,
    report: Report = lambda done, total, what: None,
    *,
    models: Models,
    decoding: GenerateOptions | None = None,
    source: TextSource | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures the settings one after the other, and yields each row as values of JSON.

    Args:
      options: the lists of settings, and how to measure. Gamma "auto" leaves out a row whose
        draft pays at no likely acceptance rate.
      report: called before each row with rows done, rows in all and the row's settings.
      models: the target and its draft, with the draft's settings.
      decoding: options of decoding that all rows share.
      source: the texts; not read if acceptances are simulated.

    Raises:
      InputError: no text, a beam search, or a draft or verifier that does not fit the target.
    """
    decoding, source = decoding or GenerateOptions(), source or TextSource()
    _check(options, models, decoding, source)
    settings = options.settings(decoding)
    if not options.simulated:
        check_readable(source)

    def read(reader: Generator) -> list[str]:
        return read_texts(source, reader, decoding, options.num_inputs)

    given = models, decoding, settings
    target, generator, make, texts = _load(*given, read=None if options.simulated else read)
    defaults = {}
    if not options.simulated:
        defaults = generator.defaults
        # Sorted as in ``generate``, since a batch takes as long as its longest row.
        texts.sort(key=lambda text: len(generator.tokenize(text, decoding)))
    made, draft, pair = None, None, None
    for done, setting in enumerate(settings):
        row, name = without_open(setting.decoding, defaults), setting.draft
        what = f"{name}/{row.verifier}, gamma {row.gamma}, temperature {row.temperature:g}"
        report(done, len(settings), f"{what}, batch {row.batch_size}, {row.max_decode_len} tokens")
        if name != made:
            # One draft is on the device at a time.
            draft = pair = None
            made, draft = name, make(name)
        if options.simulated:
            how = {"source_len": options.source_len, "repeats": options.repeats}
            comparison = compare_simulated(target, draft, row, alpha=setting.alpha, **how)
        else:
            pair = generator.with_draft(draft)
            if not pays(pair, text_batches(pair, texts[: row.batch_size], row)[0], row):
                log.info("%s: no row, the draft pays at no likely acceptance rate", what)
                continue
            comparison = compare(pair, texts, row, options.repeats)
        record = _record(setting._replace(decoding=row), comparison, options)
        if options.parts:
            others = OtherPrograms()
            record |= _parts(target, draft, row, options)
            record["beside"] = max(record["beside"], others.share)
        yield record
        # Compiled programs of earlier rows are not used again and take memory.
        jax.clear_caches()
    report(len(settings), len(settings), "all measured")


def _check(
    options: BenchmarkOptions, models: Models, decoding: GenerateOptions, source: TextSource
) -> None:
    """Raises ``InputError`` for arguments that do not fit together, before anything is loaded."""
    is_random = models.target.startswith(RANDOM)
    drafts = {draft_and_verifier(pair)[0] for pair in options.pairs}
    has_own = OWN_DRAFT in drafts and not options.table_2
    if NO_DRAFT in drafts or (has_own and models.draft == NO_DRAFT):
        raise InputError(f"the draft is {NO_DRAFT}, which has no speed-up: give one to measure")
    check_unused(decoding, "a benchmark has no beam search", "beams")
    if options.simulated:
        rules = (name for name in NEUTRAL if name != "max_decode_len")
        check_unused(decoding, "acceptances are simulated without rules of decoding", *rules)
        source.check_no_file("acceptances are simulated without texts")
    if options.simulated and source.name:
        raise InputError(
            f"data is {source.name!r} and acceptances are simulated for random sources: leave out "
            "data, or alpha and table_2"
        )
    if options.table_2 and not is_random:
        raise InputError(f"target is {models.target!r}: Table 2 is timed with random:t5_1_1_xxl")
    if is_random and not options.simulated:
        raise InputError(
            f"target {models.target} has random weights and reads no text: give an alpha"
        )
    if is_random and models.draft is None and has_own:
        raise InputError(f"target {models.target} has no draft: give random:SIZE or {COPY}")
    if is_random:
        check_unused(models, "the target has random weights", "task", "vocabulary")


def _load(
    models: Models,
    decoding: GenerateOptions,
    settings: Sequence[Setting],
    read: Callable[[Generator], list[str]] | None,
) -> tuple[Target, Generator | None, Callable[[str], Draft], list[str]]:
    """Loads the target; returns it, its generator, a function that makes a draft, and texts.

    The generator is None for a target of random weights. The function takes a draft's name.
    ``read`` is called with a generator without weights, before the target's are loaded; None reads
    no texts.
    """
    texts: list[str] = []
    options, seed = models.draft_options(), decoding.seed
    own = models.draft_name() if any(each.draft == OWN_DRAFT for each in settings) else None
    rows = [each._replace(draft=own) if each.draft == OWN_DRAFT else each for each in settings]
    names = {row.draft for row in rows}
    if models.target.startswith(RANDOM):
        loaded = generator = None
        if COPY in names:
            checked_parts(COPY, options, has_source=True)
        _check_sizes(models.target, names, options.dtype)
        given = options.dtype, seed, models.weights, models.kv
        target = random_model(_size(models.target), *given)
    else:
        stored_rows = [row for row in rows if not row.draft.startswith(RANDOM)]
        for row in stored_rows:
            check_draft(row.draft, row.decoding, options)
        # Each draft was checked with its row's verifier above.
        plain = dataclasses.replace(decoding, gamma=0)
        drawn = sorted(name.removeprefix(RANDOM) for name in names if name.startswith(RANDOM))
        for name in drawn:
            size(name)  # raises for an unknown one
        opened, reader = Generator.open(models, {row.draft for row in stored_rows}, plain)
        check_vocabulary(models.target, opened.config.vocab_size, drawn, prefix=RANDOM)
        texts = read(reader) if read else []
        named = opened, options.dtype, models.task, models.kv
        loaded, generator = Generator.load_target(*named, weights=models.weights)
        target = generator.target

    def make(name: str) -> Draft:
        name = own if name == OWN_DRAFT else name
        if name.startswith(RANDOM):
            model = random_model(_size(name), options.dtype, seed + 1, options.weights)
            return TransformerDraft(model, settings=options.settings)
        if loaded is None:
            return CopyDraft(target.vocab_size)
        return make_draft(name, loaded, target, options)

    return target, generator, make, texts


def _size(name: str):
    return size(name.removeprefix(RANDOM))


def _check_sizes(target: str, names: set[str], dtype: str) -> None:
    """Raises ``InputError`` if a draft does not fit a random target, or the device's memory."""
    for name in sorted(names):
        if not name.startswith(RANDOM) and name != COPY:
            raise InputError(
                f"draft {name}: for a target of random weights give random:SIZE or {COPY}"
            )
    target, *drafts = (
        name.removeprefix(RANDOM) for name in (target, *sorted(names)) if name != COPY
    )
    check_vocabulary(target, size(target).vocab_size, drafts)
    check_memory(target, drafts, dtype)


def _record(setting: Setting, comparison: Comparison, options: BenchmarkOptions) -> dict[str, Any]:
    """Returns a row as values of JSON: the settings and the measurements."""
    row = setting.decoding
    record = comparison.to_dict() | {
        "draft": results.without_folder(setting.draft),
        "verifier": "simulated" if options.simulated else row.verifier,
        "gamma": row.gamma,
        "gamma_mean": comparison.gamma,
        "batch_size": row.batch_size,
        "max_decode_len": row.max_decode_len,
        "predicted": comparison.predicted_with_verification,
    }
    if options.simulated:
        record["source_len"] = options.source_len
        record["predicted"] = comparison.step_times.batch_speed_up(
            comparison.alpha, row.gamma, rows=row.batch_size, length=row.max_decode_len
        )
    if setting.paper:
        record |= {"task": setting.paper.task, "paper": dataclasses.asdict(setting.paper)}
    return record


def _parts(
    target: Target, draft: Draft, row: GenerateOptions, options: BenchmarkOptions
) -> dict[str, Any]:
    sources = jnp.asarray(random_sources(target, row.batch_size, options.source_len, row.seed))
    loop = Loop(gamma=row.gamma, max_decode_len=row.max_decode_len, verifier=row.make_verifier())
    repeats = max(options.repeats, 5)
    parts = measure_parts(target, draft, sources, row.sampling(), loop, repeats)
    return {"parts": parts, **overhead(parts)}


# The table

Row = Mapping[str, Any]


def _cell(name: str, form: str = ".2f") -> Callable[[Row], str | None]:
    """Returns a function that formats a row's value, or both ends of a list; None if absent."""

    def cell(row: Row) -> str | None:
        value = row.get(name)
        if isinstance(value, list):
            return "–".join(format(each, form) for each in value)
        return value if value is None or isinstance(value, str) else format(value, form)

    return cell


def _part(name: str) -> Callable[[Row], str | None]:
    """Returns a function that formats the median milliseconds of a part; None without parts."""
    return lambda row: f"{statistics.median(row['parts'][name]):.3f}" if "parts" in row else None


def _same_text(row: Row) -> str | None:
    if row.get("identical") is None:
        return None
    return "yes" if row["identical"] else f"{len(row['divergences'])} differ"


def _plain_steps(row: Row) -> str | None:
    if row.get("gamma") != AUTO or "plain_steps" not in row:
        return None
    return f"{row['plain_steps'] / row['target_calls']:.0%}"


_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "task": _cell("task"),
    "draft": _cell("draft"),
    "verifier": _cell("verifier"),
    "temp.": _cell("temperature", "g"),
    "batch": _cell("batch_size", "d"),
    "tokens": _cell("max_decode_len", "d"),
    "gamma": _cell("gamma", "d"),
    "alpha": _cell("alpha", ".3f"),
    "block efficiency": _cell("block_efficiency"),
    "c": _cell("c", ".3f"),
    "T(verify)": _cell("verification_cost"),
    "speed-up": _cell("speed_up"),
    "lowest–highest": _cell("speed_up_range"),
    "doubt": doubt,
    "loop alone¹": _cell("loop_speed_up"),
    "predicted²": _cell("predicted"),
    "plain steps": _plain_steps,
    "same text": _same_text,
    "the paper's EXP": lambda row: row.get("paper", {}).get("expected"),
    "EMP": lambda row: row.get("paper", {}).get("measured"),
    "iteration, ms": _part("iteration"),
    "both networks³": _part("networks"),
    "overhead": _cell("overhead", ".3f"),
    "of the iteration": _cell("overhead_share", ".1%"),
    "quartiles": _cell("overhead_quartiles", ".1%"),
    "drafts alone": _part("proposal"),
    "verification alone": _part("verification"),
    "plain step": _part("plain_step"),
    "of it beyond the call": _cell("plain_overhead_share", ".1%"),
}
_NOTES = {
    "loop_speed_up": "¹ Without dispatch, encoder and prefill.",
    "predicted": "² Theorem 3.8 with the measured c and cost of verification T(verify), in target "
    "steps; for simulated acceptances, until the last row of the batch ends.",
    "acceptance_by_position": "Of a tree, alpha is the acceptance rate of each node's first child; "
    "the prediction takes the acceptance of all children, by depth.",
    "parts": "³ gamma draft steps, their sampling included, and the target call over gamma + 1 "
    "tokens, in alternation; each alone beside it.",
}


def table(rows: Sequence[Row]) -> results.Table:
    """Makes a table of the rows, without the columns that have no value in any row."""
    notes = [note for name, note in _NOTES.items() if any(row.get(name) for row in rows)]
    return results.table(_COLUMNS, rows, *notes)


def best(rows: Sequence[Row]) -> str:
    """Names the row with the highest speed-up, with its range over the rounds."""
    if not rows:
        return "Best: plain decoding; no draft pays at a likely acceptance rate."
    row = max(rows, key=lambda row: row["speed_up"])
    low, high = row["speed_up_range"]
    return (
        f"Best: {row['draft']} with verifier {row['verifier']} at gamma {row['gamma']}, "
        f"{row['speed_up']:.2f} times plain decoding ({low:.2f}–{high:.2f})."
    )
