"""``spec-t5x benchmark``: speculative against plain decoding, for many drafts and settings.

Each row decodes the same inputs plainly and speculatively in turn, in one process, compilation
apart. Beside the measured speed-up stands what Theorem 3.8 predicts from the alpha and c of
the same row, with the cost of verification counted.

The inputs are texts; or, with an acceptance rate alpha, random ids, and the verdicts are drawn
(``drawn_verdicts``). Then a target ``random:t5_1_1_xxl`` of random weights will do.
"""

import dataclasses
import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import find_models, make_draft
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, as_lists, check_at_least
from spec_t5x.generation import AUTO, GenerateOptions, Generator
from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark import paper_tables, results
from spec_t5x.labs.benchmark.comparison import Comparison, compare
from spec_t5x.labs.benchmark.drawn_verdicts import DrawnVerifier, compare_drawn
from spec_t5x.labs.benchmark.iteration_parts import measure_parts, overhead
from spec_t5x.labs.benchmark.other_programs import OtherPrograms
from spec_t5x.labs.benchmark.random_models import (
    check_fits,
    check_vocabulary,
    random_model,
    random_sources,
)
from spec_t5x.labs.benchmark.reliability import doubt
from spec_t5x.labs.benchmark.text_source import TextSource, read_texts
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.verifiers import VERIFIERS

log = logging.getLogger(__name__)

Report = Callable[[int, int, str], None]

# The run's own draft, and the run's own verifier.
OWN_DRAFT, OWN_VERIFIER = "draft", "own"
# Before a name of ``models.sizes``: random weights.
RANDOM = "random:"
# A draft that needs no weights.
COPY = "copy"


class Setting(NamedTuple):
    """What a row measures."""

    draft: str
    decoding: GenerateOptions
    # The rate that verdicts are drawn with; None decodes texts.
    alpha: float | None = None
    # The row of Table 2 that it is.
    paper: paper_tables.SpeedUp | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What to measure: every combination of draft, temperature, gamma, batch size and length."""

    # The first inputs that the encoder takes; of a task, of its first examples.
    num_inputs: int = 60
    repeats: int = 5
    # ``DRAFT`` or ``DRAFT/VERIFIER``. ``draft`` is the run's own draft, ``random:SIZE`` one of
    # random weights.
    pairs: tuple = (OWN_DRAFT,)
    temperatures: tuple = (0.0, 1.0)
    # Whole numbers from 1, or "auto".
    gammas: tuple = (4,)
    # () takes ``GenerateOptions``' batch size and length.
    batch_sizes: tuple = ()
    max_decode_lens: tuple = ()
    # False varies one list at a time, the others at their first value.
    every_combination: bool = True
    # Also time the parts of an iteration and the overhead beyond them.
    parts: bool = False
    # Draw verdicts with this acceptance rate, for random sources of ``source_len`` tokens.
    alpha: float | None = None
    source_len: int = 64
    # Draw verdicts for the rows of the paper's Table 2, instead of the lists above.
    table_2: bool = False

    def __post_init__(self):
        as_lists(self, pairs=1, temperatures=1, gammas=1, batch_sizes=0, max_decode_lens=0)
        check_at_least(self, num_inputs=1, repeats=1, source_len=1)
        if 0 in self.gammas:
            raise InputError("gammas is 0: give at least 1")
        if self.alpha is not None:
            DrawnVerifier(alpha=self.alpha)
        if AUTO in self.gammas and (self.drawn or self.parts):
            raise InputError(
                f"gammas hold {AUTO}: drawn verdicts and parts of an iteration need a number"
            )

    @property
    def drawn(self) -> bool:
        """Whether verdicts are drawn, and no text is read."""
        return self.alpha is not None or self.table_2

    def settings(self, decoding: GenerateOptions) -> list[Setting]:
        """What each row measures; ``decoding`` is what all of them share."""
        lists = {
            "pair": self.pairs,
            "batch_size": self.batch_sizes or (decoding.batch_size,),
            "max_decode_len": self.max_decode_lens or (decoding.max_decode_len,),
            "temperature": self.temperatures,
            "gamma": self.gammas,
        }
        if self.table_2:
            return self._rows_of_table_2(lists["max_decode_len"][0], decoding.seed)
        if self.every_combination:
            every = itertools.product(*lists.values())
            chosen = [dict(zip(lists, each, strict=True)) for each in every]
        else:
            first = {name: values[0] for name, values in lists.items()}
            chosen = [first] + [
                first | {name: value} for name, values in lists.items() for value in values[1:]
            ]
        settings = []
        for values in chosen:
            draft, verifier = _draft_and_verifier(values.pop("pair"))
            if verifier not in (OWN_VERIFIER, decoding.verifier):
                # Settings of the run's own verifier do not apply to another.
                values |= {"verifier": verifier, "widths": (), "lenience": 1.0}
            settings.append(Setting(draft, dataclasses.replace(decoding, **values), self.alpha))
        return settings

    def _rows_of_table_2(self, length: int | None, seed: int) -> list[Setting]:
        """Those of the drafts ``random:SIZE`` among the pairs; without any, all."""
        given = [str(pair) for pair in self.pairs if str(pair).startswith(RANDOM)]
        settings = [
            Setting(
                draft=RANDOM + paper_tables.DRAFTS[row.draft],
                decoding=GenerateOptions(
                    gamma=row.gamma,
                    temperature=row.temperature,
                    max_decode_len=length,
                    seed=seed,
                    verifier="token",
                ),
                alpha=row.alpha,
                paper=row,
            )
            for row in paper_tables.TABLE_2
        ]
        chosen = [each for each in settings if not given or each.draft in given]
        if not chosen:
            known = ", ".join(RANDOM + name for name in paper_tables.DRAFTS.values())
            raise InputError(
                f"drafts are {', '.join(given)}: Table 2 has {known}; give one of these, or an "
                "alpha"
            )
        return chosen


def _draft_and_verifier(pair: str) -> tuple[str, str]:
    """
    >>> _draft_and_verifier("transformer:/runs/draft/token")
    ('transformer:/runs/draft', 'token')
    >>> _draft_and_verifier("copy")
    ('copy', 'own')
    """
    draft, _, verifier = str(pair).rpartition("/")
    is_pair = draft and verifier in (*VERIFIERS, OWN_VERIFIER)
    return (draft, verifier) if is_pair else (str(pair), OWN_VERIFIER)


def run(
    options: BenchmarkOptions,
    report: Report = lambda done, total, what: None,
    *,
    models: Models,
    decoding: GenerateOptions | None = None,
    source: TextSource | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures row after row, each as JSON can hold it.

    Args:
      options: what to measure.
      report: ``report(done, total, what)``, before each row.
      models: the target and its draft, with the draft's settings.
      decoding: what is the same in all rows.
      source: the texts; not read where verdicts are drawn.

    Raises:
      InputError: nothing to decode, a beam search, or a draft or verifier that does not fit
        the target.
    """
    decoding, source = decoding or GenerateOptions(), source or TextSource()
    _check(options, models, decoding, source)
    settings = options.settings(decoding)
    loaded = _Loaded(models, decoding.seed, settings)
    generator, texts = loaded.generator, []
    if not options.drawn:
        texts = read_texts(source, generator, decoding, options.num_inputs)
        # As ``generate`` decodes them: a batch takes as long as its longest row.
        texts.sort(key=lambda text: len(generator.tokenize(text, decoding)))
    of_checkpoint = {} if options.drawn else generator.defaults
    for done, setting in enumerate(settings):
        row = setting.decoding.without_open(of_checkpoint)
        name, setting = setting.draft, setting._replace(decoding=row)
        what = f"{name}/{row.verifier}, gamma {row.gamma}, temperature {row.temperature:g}"
        report(done, len(settings), f"{what}, batch {row.batch_size}, {row.max_decode_len} tokens")
        draft = loaded.draft(name)
        if options.drawn:
            comparison = compare_drawn(
                loaded.target,
                draft,
                row,
                alpha=setting.alpha,
                source_len=options.source_len,
                repeats=options.repeats,
            )
        elif _leaves_out(generator.with_draft(draft), texts, row):
            log.info("%s: no acceptance pays, gamma auto leaves the draft out: no row", what)
            continue
        else:
            comparison = compare(generator.with_draft(draft), texts, row, options.repeats)
        record = _record(setting, comparison, options)
        if options.parts:
            others = OtherPrograms()
            record |= _parts(loaded.target, draft, row, options)
            record["beside"] = max(record["beside"], others.share)
        yield record
        # Compiled programs of earlier rows are not used again and take memory.
        jax.clear_caches()
    report(len(settings), len(settings), "all measured")


def _check(
    options: BenchmarkOptions, models: Models, decoding: GenerateOptions, source: TextSource
) -> None:
    """Refuses what does not fit together, before anything is loaded."""
    if decoding.beams:
        raise InputError(f"beams is {decoding.beams}: the benchmark does not search, leave it 0")
    if not options.drawn:
        if models.target.startswith(RANDOM):
            raise InputError(
                f"target {models.target} has random weights and reads no text: give an alpha"
            )
        source.check_given()
    elif source.name:
        raise InputError(
            f"verdicts are drawn and data is {source.name!r}: random sources are decoded, leave "
            "one of them out"
        )
    if options.table_2 and not models.target.startswith(RANDOM):
        raise InputError(f"target is {models.target!r}: Table 2 is timed with random:t5_1_1_xxl")


class _Loaded:
    """The target of a run, a checkpoint or random weights, and its drafts by name."""

    def __init__(self, models: Models, seed: int, settings: Sequence[Setting]):
        self._seed, self._options = seed, models.draft_options()
        names = {setting.draft for setting in settings}
        self._own = models.draft_name() if OWN_DRAFT in names else None
        # One draft on the device at a time.
        self._made: tuple[str, Draft] | None = None
        self._loaded, self.generator = None, None
        if models.target.startswith(RANDOM):
            _check_sizes(models, settings)
            config = _size(models.target)
            self.target: Target = random_model(config, self._options.dtype, seed)
        else:
            named = (self._text(name) for name in names if not name.startswith(RANDOM))
            find_models(models.target, named)
            self._loaded = load(
                models.target, dtype=self._options.dtype, vocabulary=models.vocabulary
            )
            self.generator = Generator.of(self._loaded, models.weights)
            self.target = self.generator.target

    def draft(self, name: str) -> Draft:
        """The draft of a row."""
        if self._made is None or self._made[0] != name:
            self._made = None
            self._made = name, self._make(name)
        return self._made[1]

    def _text(self, name: str) -> str:
        """What ``make_draft`` makes a row's draft of."""
        return self._own or "transformer" if name == OWN_DRAFT else name

    def _make(self, name: str) -> Draft:
        options = self._options
        name = self._text(name)
        if name.startswith(RANDOM):
            model = random_model(_size(name), options.dtype, self._seed + 1)
            return TransformerDraft(model, settings=options.settings)
        if self._loaded is None:
            # Of drawn verdicts: it copies random sources.
            return CopyDraft(self.target.vocab_size)
        return make_draft(name, self._loaded, self.target, options)


def _size(name: str) -> T5Config:
    return size(name.removeprefix(RANDOM))


def _check_sizes(models: Models, settings: Sequence[Setting]) -> None:
    """Refuses drafts that do not go with a target of random weights, and what has no room."""
    names = {setting.draft for setting in settings}
    drafts = sorted(models.draft_name() or "" if name == OWN_DRAFT else name for name in names)
    for name in drafts:
        if not name.startswith(RANDOM) and name != COPY:
            raise InputError(
                f"draft {name}: a target of random weights takes random:SIZE or {COPY}"
            )
    drafts = [name.removeprefix(RANDOM) for name in drafts if name != COPY]
    target = models.target.removeprefix(RANDOM)
    check_vocabulary(target, drafts)
    check_fits(target, drafts, models.draft_options().dtype)


def _leaves_out(generator: Generator, texts: Sequence[str], options: GenerateOptions) -> bool:
    """Whether gamma "auto" comes to 0, since no acceptance pays for the draft."""
    if options.gamma != AUTO:
        return False
    batch = generator.batches(texts[: options.batch_size], options)[0]
    return generator.engine(options).first_pace(batch) is None


def _record(setting: Setting, comparison: Comparison, options: BenchmarkOptions) -> dict[str, Any]:
    """A row as JSON can hold it: the settings and what was measured."""
    row = setting.decoding
    record = comparison.to_dict() | {
        "draft": results.without_folder(setting.draft),
        "verifier": "drawn" if options.drawn else row.verifier,
        "gamma": row.gamma,
        "gamma_mean": comparison.gamma,
        "batch_size": row.batch_size,
        "max_decode_len": row.max_decode_len,
        "predicted": comparison.predicted_with_verification,
    }
    if options.drawn:
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
    parts = measure_parts(
        target,
        draft,
        jnp.asarray(random_sources(target, row.batch_size, options.source_len, row.seed)),
        row.sampling(),
        gamma=row.gamma,
        max_decode_len=row.max_decode_len,
        verifier=row.make_verifier(),
        repeats=max(options.repeats, 5),
    )
    return {"parts": parts, **overhead(parts)}


# --- the table -------------------------------------------------------------------


def _cell(name: str, form: str = ".2f") -> Callable[[Mapping[str, Any]], str | None]:
    """A cell: the row's value in a format, of an interval both ends; None where it has none."""

    def cell(row: Mapping[str, Any]) -> str | None:
        value = row.get(name)
        if isinstance(value, list):
            return "–".join(format(each, form) for each in value)
        return value if value is None or isinstance(value, str) else format(value, form)

    return cell


def _part(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    """A cell: milliseconds of a part of an iteration, the median."""

    def cell(row: Mapping[str, Any]) -> str | None:
        return f"{statistics.median(row['parts'][name]):.3f}" if "parts" in row else None

    return cell


def _same_text(row: Mapping[str, Any]) -> str | None:
    if row.get("identical") is None:
        return None
    return "yes" if row["identical"] else f"{len(row['divergences'])} differ"


def _plain_steps(row: Mapping[str, Any]) -> str | None:
    if row.get("gamma") != AUTO or "plain_steps" not in row:
        return None
    return f"{row['plain_steps'] / row['target_calls']:.0%}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
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
    "oracle³": _cell("oracle_speed_up"),
    "plain steps": _plain_steps,
    "same text": _same_text,
    "the paper's EXP": lambda row: row.get("paper", {}).get("expected"),
    "EMP": lambda row: row.get("paper", {}).get("measured"),
    "iteration, ms": _part("iteration"),
    "both networks⁴": _part("networks"),
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
    "steps; of drawn verdicts until the last row of the batch is done.",
    "oracle_speed_up": "³ 1 / (1 - alpha + c alpha): gamma known beforehand, and verification at "
    "the cost of one step.",
    "parts": "⁴ gamma draft steps, their sampling included, and the target call over gamma + 1 "
    "tokens, in alternation; each alone beside it.",
}


def table(rows: Sequence[Mapping[str, Any]]) -> results.Table:
    """The rows as a table; columns that no row has a value for are left out."""
    notes = [note for name, note in _NOTES.items() if any(name in row for row in rows)]
    return results.table(_COLUMNS, rows, *notes)


def best(rows: Sequence[Mapping[str, Any]]) -> str:
    """The closing sentence: the row with the highest speed-up, and its range over the rounds."""
    if not rows:
        return "Best: plain decoding; no acceptance pays for a draft."
    row = max(rows, key=lambda row: row["speed_up"])
    low, high = row["speed_up_range"]
    return (
        f"Best: {row['draft']} with verifier {row['verifier']} at gamma {row['gamma']}, "
        f"{row['speed_up']:.2f} times plain decoding ({low:.2f}–{high:.2f})."
    )
