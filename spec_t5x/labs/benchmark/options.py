"""Options of measurements and of the texts that they read, in a module without JAX for --help."""

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spec_t5x import registry
from spec_t5x.data.task_options import TaskOptions
from spec_t5x.data.text_files import is_jsonl
from spec_t5x.errors import InputError, check_at_least, check_choice, check_numbers, check_unused
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.list_options import as_lists
from spec_t5x.names import AUTO
from spec_t5x.options import GenerateOptions, check_types, option

if TYPE_CHECKING:
    from spec_t5x.labs.estimates import Bootstrap

# Options of ``TextSource`` that only a .tsv, a .jsonl, or any file has.
_OF_TSV = "source_column", "target_column", "num_columns"
_OF_JSON = "source_field", "target_field"
_OF_FILE = "prefix", "metric", "source_words", *_OF_TSV, *_OF_JSON
# Words of ``pairs`` for the draft that ``models`` names and the verifier that ``decoding`` has.
OWN_DRAFT, OWN_VERIFIER = "draft", "own"
# Prefix of a name of ``models.sizes``, for random weights.
RANDOM = "random:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource(TaskOptions):
    """Options of texts to read: a local file of pairs or a seqio task, or neither."""

    data: str | None = option(None, "file of text pairs, .tsv or .jsonl, gzipped or not", "FILE")
    # None is the default of ``labs.text_pairs.read_pairs``.
    source_column: int | None = option(
        None, "column of a .tsv's sources, from 0 (default: 0 of two, else 1)"
    )
    target_column: int | None = option(
        None, "column of a .tsv's targets, from 0 (default: the one after sources)"
    )
    num_columns: int | None = option(
        None, "number of columns of a .tsv (default: that of the first line)"
    )
    limit: int | None = option(None, "read only the first N pairs")
    # As a language model's prompt.
    source_words: int | None = option(None, "keep only the first N words of each source of a file")
    source_field: str = option("article", "field of a .jsonl with the source", "NAME")
    target_field: str = option("highlights", "field of a .jsonl with the target", "NAME")
    # A task adds its prefix itself.
    prefix: str = option("", "text to put before every source of a file", "TEXT")
    # A name of ``labs.metrics.METRICS``, for a file; a task names its metrics itself.
    metric: str = "bleu"
    split: str = option("validation", "split of the task", "NAME")

    def __post_init__(self):
        check_types(self)
        if self.data and self.mixture_or_task:
            raise InputError(
                f"data is {self.data!r} and mixture_or_task {self.mixture_or_task!r}: give one"
            )
        check_at_least(self, limit=1, source_words=1, num_columns=1)
        if self.mixture_or_task:
            check_unused(self, f"{self.mixture_or_task} is a task, which has its own", *_OF_FILE)
        elif self.data:
            of_others = _OF_TSV if is_jsonl(self.data) else _OF_JSON
            check_unused(self, f"{self.data} has none", *of_others)
        self.check_task()
        from spec_t5x.labs.metrics import metric_by_name

        metric_by_name(self.metric)

    def check_no_file(self, why: str) -> None:
        """Raises ``InputError``, for the reason ``why``, if a limit or a file's option is set."""
        check_unused(self, why, "limit", *_OF_FILE)

    @property
    def name(self) -> str | None:
        """Name of the file or task; None without either."""
        return self.data or self.mixture_or_task

    def check_given(self) -> None:
        """Raises ``InputError`` unless there is a file or a task."""
        if self.name is None:
            raise InputError("data is None: give a file of pairs, or mixture_or_task")

    def without_targets(self) -> "TextSource":
        """Returns the source of a file with other targets, because the file may lack its own."""
        if is_jsonl(self.data or ""):
            return dataclasses.replace(self, target_field=self.source_field)
        return dataclasses.replace(self, target_column=self.source_column or 0)

    def check_scored(self) -> None:
        """Raises ``InputError`` unless there is a task, or a file and its metric is installed."""
        from spec_t5x.labs.metrics import check_installed, metric_by_name

        self.check_given()
        if self.data is not None:
            check_installed([metric_by_name(self.metric)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """Settings of ``acceptance.measure``."""

    # Names of the drafts that the command loads; () is --draft. ``measure`` ignores them.
    drafts: tuple = ()
    # Each temperature is measured with each of top_ks and each of top_ps (0 filters nothing), or
    # unfiltered if both are empty. Temperature 0, which no filter changes, is measured once.
    temperatures: tuple = option(
        (0.0, 1.0), "sampling temperature, 0 is argmax; repeatable", [float]
    )
    top_ks: tuple = option(
        (), "sample from the k likeliest tokens only; 0 keeps all; repeatable", [int]
    )
    top_ps: tuple = option(
        (), "sample from the likeliest tokens of this total mass; 0 keeps all; repeatable", [float]
    )
    leniences: tuple = option(
        (1.0,), "lenience l of section A.5; 1 is lossless; repeatable", [float]
    )
    # Sampling decodes the texts repeatedly until there are as many; at temperature 0 each text is
    # decoded once, which may give fewer.
    num_tokens: int = option(10_000, "tokens to generate with each sampling setting")
    max_decode_len: int = option(128, "maximum number of generated tokens in a text")
    max_source_len: int | None = option(
        None, "maximum length of a source in tokens (default: the checkpoint's, or 512)"
    )
    batch_size: int = option(16, "texts generated together")
    seed: int = option(0, "random seed")
    # The intervals are bootstrapped over texts.
    confidence: float = option(0.95, "confidence level of the intervals")
    # Only if leniences include 1; 0 decodes none.
    decoded_texts: int = option(64, "texts to decode speculatively with each draft, too")
    gamma: int = option(7, "tokens that a draft proposes in an iteration of that decoding")
    truncate: bool = option(False, "cut inputs that are too long")

    def __post_init__(self):
        as_lists(self, drafts=0, temperatures=1, top_ks=0, top_ps=0, leniences=1)
        check_types(self)
        if len(set(self.drafts)) < len(self.drafts):
            raise InputError(f"drafts are {', '.join(self.drafts)}: give each of them once")
        check_at_least(self, num_tokens=1, decoded_texts=0, max_decode_len=1)
        check_numbers(1, self.max_decode_len, gamma=self.gamma)
        self.bootstrap()
        if not any(self.temperatures):
            check_unused(self, "every temperature is 0, where neither counts", "top_ks", "top_ps")
        # GenerateOptions checks the rest.
        for decoding, lenience in itertools.product(self.standardizations(), self.leniences):
            dataclasses.replace(decoding, lenience=lenience)

    def bootstrap(self) -> "Bootstrap":
        """Returns the settings of the bootstrap that gives the intervals."""
        from spec_t5x.labs.estimates import Bootstrap

        return Bootstrap(confidence=self.confidence, seed=self.seed)

    def standardizations(self) -> list[GenerateOptions]:
        """Returns decoding options, one for each distinct pair of temperature and filter."""
        filters = [(k, 0.0) for k in self.top_ks] + [(0, p) for p in self.top_ps]
        names = "seed", "batch_size", "max_decode_len", "max_source_len", "truncate", "gamma"
        common = {"verifier": "token"} | {name: getattr(self, name) for name in names}
        found = {}
        for temperature, (top_k, top_p) in itertools.product(
            self.temperatures, filters or [(0, 0.0)]
        ):
            # Filters do not change an argmax, and top-k 1 is an argmax at any temperature.
            plain = {"temperature": 0.0, "top_k": 0, "top_p": 0.0}
            given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            options = GenerateOptions(**given if temperature else plain, **common)
            if options.sampling().greedy:
                options = dataclasses.replace(options, **plain)
            found[options] = None
        return list(found)


class Setting(NamedTuple):
    """Settings of a row."""

    draft: str
    decoding: GenerateOptions
    # The acceptance rate to simulate; None decodes texts.
    alpha: float | None = None
    # The row of Table 2 that these settings repeat; None if they repeat none.
    paper: paper_tables.SpeedUp | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Settings of a run: every combination of draft, temperature, gamma, batch size and length."""

    # ``DRAFT`` or ``DRAFT/VERIFIER``. ``draft`` is the run's own draft, ``random:SIZE`` one of
    # random weights.
    pairs: tuple = (OWN_DRAFT,)
    gammas: tuple = option(
        (4,), "tokens proposed in an iteration, or auto; repeatable", [int | str]
    )
    temperatures: tuple = option(
        (0.0, 1.0), "sampling temperature, 0 is argmax; repeatable", [float]
    )
    # () takes batch size and length from the run's ``GenerateOptions``.
    batch_sizes: tuple = option((), "inputs decoded together; repeatable (default: 1)", [int])
    max_decode_lens: tuple = option(
        (), "maximum number of generated tokens; repeatable (default: 128)", [int]
    )
    # False makes fewer rows: each varies one list, and has the first value of the others.
    every_combination: bool = True
    # The first texts that the encoder takes; of a task only as many examples are read.
    num_inputs: int = option(60, "texts to decode")
    repeats: int = option(5, "repetitions of each measurement")
    alpha: float | None = option(
        None, "simulate acceptance at this rate, on random sources and not texts"
    )
    source_len: int = option(64, "tokens of a random source")
    # Replaces the lists above.
    table_2: bool = option(False, "simulate acceptance at the rates of the paper's Table 2")
    # With the overhead (``iteration_parts``).
    parts: bool = option(False, "also time each part of an iteration")

    def __post_init__(self):
        as_lists(self, pairs=1, temperatures=1, gammas=1, batch_sizes=0, max_decode_lens=0)
        check_types(self)
        check_at_least(self, num_inputs=1, repeats=1, source_len=1)
        if 0 in self.gammas:
            raise InputError("gammas is 0: give at least 1")
        if self.table_2:
            lists = "alpha", "gammas", "temperatures", "batch_sizes"
            check_unused(self, "the rows of table_2 have their own", *lists)
            if self.max_decode_lens[1:]:
                raise InputError(f"max_decode_lens are {self.max_decode_lens}: table_2 takes one")
        if self.alpha is not None:
            from spec_t5x.labs.benchmark.simulated_acceptance import SimulatedVerifier

            SimulatedVerifier(alpha=self.alpha)
        if self.simulated:
            check_unused(self, "acceptances are simulated for one random batch", "num_inputs")
            for pair in self.pairs:
                if draft_and_verifier(pair)[1] != OWN_VERIFIER:
                    raise InputError(
                        f"pairs hold {pair} and acceptances are simulated: give the draft alone"
                    )
        elif not self.parts:
            check_unused(self, "sources are texts", "source_len")
        if AUTO in self.gammas and (self.simulated or self.parts):
            raise InputError(
                f"gammas hold {AUTO}: give numbers to simulate acceptances, or to time parts"
            )

    @property
    def simulated(self) -> bool:
        """True if acceptances are simulated and no text is read."""
        return self.alpha is not None or self.table_2

    def settings(self, decoding: GenerateOptions) -> list[Setting]:
        """Returns the settings of each row; ``decoding`` has those that all of them share."""
        lists = {
            "pair": self.pairs,
            "batch_size": self.batch_sizes or (decoding.batch_size,),
            "max_decode_len": self.max_decode_lens or (decoding.max_decode_len,),
            "temperature": self.temperatures,
            "gamma": self.gammas,
        }
        for name in ("temperature", "gamma"):
            given, listed = getattr(decoding, name), lists[name]
            if given not in (getattr(GenerateOptions, name), *listed):
                raise InputError(
                    f"GenerateOptions.{name} is {given} and {name}s {listed}: give {name}s alone"
                )
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
            draft, verifier = draft_and_verifier(values.pop("pair"))
            if self.simulated:
                values |= {"verifier": "token", "widths": (), "lenience": 1.0}
            elif verifier not in (OWN_VERIFIER, decoding.verifier):
                # Settings of the run's own verifier do not apply to another.
                values |= {"verifier": verifier, "widths": (), "lenience": 1.0}
            row = dataclasses.replace(decoding, **values)
            if self.parts and row.make_verifier().tree(1) is not None:
                raise InputError(
                    f"the verifier is {row.verifier}: to time parts, choose one of chains"
                )
            settings.append(Setting(draft, row, self.alpha))
        return settings

    def _rows_of_table_2(self, length: int | None, seed: int) -> list[Setting]:
        """Returns Table 2's rows for the drafts ``random:SIZE`` in ``pairs``, by default all."""
        names = {row: RANDOM + paper_tables.DRAFTS[row.draft] for row in paper_tables.TABLE_2}
        given = [str(pair) for pair in self.pairs if pair != OWN_DRAFT]
        if others := {*given} - {*names.values()}:
            known = ", ".join(dict.fromkeys(names.values()))
            raise InputError(
                f"draft {min(others)} is not in Table 2: give some of {known}, or an alpha"
            )
        shared = {"max_decode_len": length, "seed": seed, "verifier": "token"}
        return [
            Setting(
                draft=name,
                decoding=GenerateOptions(gamma=row.gamma, temperature=row.temperature, **shared),
                alpha=row.alpha,
                paper=row,
            )
            for row, name in names.items()
            if not given or name in given
        ]


def draft_and_verifier(pair: str) -> tuple[str, str]:
    """Splits a pair at its last slash, if a verifier follows.

    A verifier has to follow a draft's name, unless there is such a folder (``eagle/draft``).

    >>> draft_and_verifier("transformer:/runs/draft/token")
    ('transformer:/runs/draft', 'token')
    >>> draft_and_verifier("copy")
    ('copy', 'own')
    """
    draft, _, verifier = str(pair).rpartition("/")
    verifiers = *registry.names("verifier"), OWN_VERIFIER
    if verifier and draft in registry.names("draft") and not Path(pair).exists():
        check_choice(f"the verifier of {draft}", verifier, verifiers)
    is_pair = draft and verifier in verifiers
    return (draft, verifier) if is_pair else (str(pair), OWN_VERIFIER)
