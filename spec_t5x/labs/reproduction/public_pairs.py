"""Pairs of public weights: those of T5 1.0, and those that a file lists.

The paper's targets, T5 1.1 XXL fine-tuned on either task, were not published, and the public T5 1.1
is pretrained on spans alone. T5 1.0 (Raffel et al. 2020) was trained on a mixture with both tasks,
each under its prefix, and its largest size is the paper's.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spec_t5x.data.task_options import CNN_DAILYMAIL, SUMMARIZE_PREFIX, TRANSLATE_PREFIX, WMT_ENDE
from spec_t5x.errors import InputError, as_input_error, check_choice, did_you_mean
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.labs.benchmark.results import without_folder
from spec_t5x.names import AUTO, WEIGHTS

# T5 1.0 on the Hugging Face Hub, from the smallest, with the names of ``models.sizes``.
PUBLIC = {
    "google-t5/t5-small": "t5_1_0_small",
    "google-t5/t5-base": "t5_1_0_base",
    "google-t5/t5-large": "t5_1_0_large",
    "google-t5/t5-3b": "t5_1_0_xl",
    "google-t5/t5-11b": "t5_1_0_xxl",
}
# The sizes that drafted in the paper.
_DRAFTS = tuple(PUBLIC)[: len(paper_tables.DRAFTS)]
# The vocabulary of T5X's checkpoints in a folder that ``scripts/fetch_checkpoints.sh`` filled.
_VOCABULARY = Path("vocabularies", "cc_all.32000.100extra", "sentencepiece.model")


class _Task(NamedTuple):
    """Task of the paper's Table 2: seqio's name, T5's prefix and metric, and its target's name."""

    mixture_or_task: str
    prefix: str
    metric: str
    # The paper's target in ``paper_tables.TABLE_3``.
    stands_for: str


TASKS = {
    "EnDe": _Task(WMT_ENDE, TRANSLATE_PREFIX, "bleu_intl", "T5-XXL (EnDe)"),
    "CNN/DM": _Task(CNN_DAILYMAIL, SUMMARIZE_PREFIX, "rouge", "T5-XXL (CNN/DM)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicPair:
    """Target with its drafts on one task; the fields are those of a pair in a file."""

    # Names that ``loading.load`` and ``make_draft`` take.
    target: str
    draft: tuple[str, ...]
    # Name of the task in the report; the paper's figures are beside "EnDe" and "CNN/DM".
    task: str
    # Vocabulary of a target without one, as T5X's checkpoints are.
    vocabulary: str | None = None
    # Precision of the target's matrices: "auto" is the checkpoint's; "int8" and "int4" round them.
    weights: str = AUTO
    # Texts, with their prefix and metric.
    source: TextSource

    def __post_init__(self):
        check_choice("weights", self.weights, WEIGHTS)

    @property
    def label(self) -> str:
        """The target's name, without folders, and its precision if the target is rounded."""
        name = short_name(self.target)
        return name if self.weights == AUTO else f"{name} {self.weights}"

    @property
    def name(self) -> str:
        """Name of the pair's measurements, which no other pair of a run has."""
        return f"{self.label}/{self.task.replace('/', '-')}"


def short_name(name: str) -> str:
    """Returns a model's or draft's name without folders, and a T5X checkpoint's by its model.

    >>> short_name("google-t5/t5-3b"), short_name("gs://a/t5_small/checkpoint_1000000")
    ('t5-3b', 't5_small')
    """
    return without_folder(re.sub(r"/checkpoint_\d+/*$", "", name).removeprefix("gs://"))


def paper_draft(draft: str) -> str | None:
    """Returns the paper's draft of the same kind or size, as in ``paper_tables.TABLE_3``."""
    kind, _, argument = draft.partition(":")
    if kind in ("unigram", "bigram"):
        return kind
    name = short_name(argument if kind == "transformer" else draft).lower()
    sizes = [size for size in paper_tables.DRAFTS if size in name.replace("_", "-").split("-")]
    return f"T5-{sizes[0]}" if len(sizes) == 1 else None


def located(models: Path | None) -> dict[str, str]:
    """Returns the public sizes that are available, the smallest first, each with its location.

    Args:
      models: a folder of T5X's checkpoints under the names of ``scripts/fetch_checkpoints.sh``
        (``t5_1_0_small``), or of the Hub's directories (``t5-small``); None takes the Hub.

    Raises:
      InputError: the folder holds none.
    """
    if models is None:
        return {name: name for name in PUBLIC}
    found = {}
    for name, size in PUBLIC.items():
        places = [models / size, models / name, models / name.partition("/")[2]]
        if place := next(filter(Path.is_dir, places), None):
            found[name] = str(place)
    if not found:
        raise InputError(
            f"--models {models} holds no {', no '.join(PUBLIC.values())}: let "
            "scripts/fetch_checkpoints.sh copy some to it"
        )
    return found


def model_drafts(target: str, names: Collection[str]) -> list[str]:
    """Returns those of ``names``, keys of ``PUBLIC``, that draft for a public target."""
    smaller = tuple(PUBLIC)[: tuple(PUBLIC).index(target)]
    return [name for name in _DRAFTS if name in smaller and name in names]


def built_in(
    target: str,
    files: Mapping[str, str],
    ngrams: Path | None,
    models: Path | None = None,
    weights: str = AUTO,
) -> list[PublicPair]:
    """Returns the pairs of a public target: the smaller sizes that drafted in the paper, and copy.

    Args:
      target: a key of ``PUBLIC``.
      files: by task, a file of pairs in place of the seqio task; a task without one is left out,
        unless there is no file at all.
      ngrams: n-gram tables of T5's vocabulary, for unigram and bigram; None leaves them out.
      models: as ``located`` takes it.
      weights: precision of the target's matrices.

    Raises:
      InputError: ``models`` does not hold the target.
    """
    places = located(models)
    if target not in places:
        raise InputError(
            f"--models {models} has no {target} ({PUBLIC[target]}): give --target "
            f"{' or '.join(places)}, or let scripts/fetch_checkpoints.sh copy it there"
        )
    tables = () if ngrams is None else (f"unigram:{ngrams}", f"bigram:{ngrams}")
    drafts = (*(places[name] for name in model_drafts(target, places)), *tables, "copy")
    where = {"target": places[target], "draft": drafts, "weights": weights}
    if models is not None and not Path(places[target], "config.json").exists():
        where["vocabulary"] = str(models / _VOCABULARY)
    found = []
    for name, task in TASKS.items():
        if name in files:
            given = {"data": files[name], "prefix": task.prefix, "metric": task.metric}
        elif files:
            continue
        else:
            given = {"mixture_or_task": task.mixture_or_task}
        found.append(PublicPair(**where, task=name, source=TextSource(**given)))
    return found


def public_name(target: str) -> str:
    """Returns the key of ``PUBLIC`` that a name means: "google-t5/t5-3b" for "t5-3b"."""
    names = {alias: k for k, v in PUBLIC.items() for alias in (k, v, k.partition("/")[2])}
    if target not in names:
        raise InputError(
            f"target {target!r} is no public T5 1.0: give {AUTO}, one of {', '.join(PUBLIC)}, or "
            "--pairs FILE with other pairs"
        )
    return names[target]


def task_files(values: Sequence[str]) -> dict[str, str]:
    """Returns the file of each task from texts ``TASK=FILE``."""
    found = {}
    for value in values:
        task, equals, file = value.partition("=")
        if task not in TASKS or not equals or not file:
            raise InputError(f"data is {value!r}: give TASK=FILE, with {' or '.join(TASKS)}")
        if task in found:
            raise InputError(f"data has {found[task]} and {file} for {task}: give one")
        found[task] = file
    return found


def read_pairs_file(path: Path) -> list[PublicPair]:
    """Reads a JSON list of objects: the fields of ``PublicPair``, and of ``TextSource`` beside.

    Raises:
      InputError: the file cannot be read, or a pair has an unknown, missing or wrong field.
    """
    with as_input_error(f"cannot read --pairs {path}", "give a list in JSON", OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, list) or not values:
        raise InputError(f'--pairs {path} is no list of pairs: give [{{"target": …}}, …]')
    found = [_pair(each, f"--pairs {path}: pair {n}") for n, each in enumerate(values, start=1)]
    names = [pair.name for pair in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(
                f"--pairs {path}: pairs {names.index(name) + 1} and {number + 1} are both {name}: "
                "give one, with a list of drafts, or another name of the task"
            )
    return found


def _pair(values: Any, place: str) -> PublicPair:
    if not isinstance(values, dict):
        raise InputError(f"{place} is {json.dumps(values)}: give an object")
    own = {field.name for field in dataclasses.fields(PublicPair)} - {"source"}
    texts = {field.name for field in dataclasses.fields(TextSource)} - {"limit"}
    for name in values:
        if name not in own | texts:
            hint = did_you_mean(name, own | texts)
            raise InputError(f"{place} has an unknown field {name!r}{hint}: remove it")
    for name in ("target", "draft", "task"):
        if not values.get(name):
            raise InputError(f"{place} has no {name}: give one")
    drafts = values["draft"]
    drafts = [drafts] if isinstance(drafts, str) else drafts
    alone = [values[name] for name in ("target", "task")]
    alone += [values.get(name) or "" for name in ("vocabulary", "prefix")]
    if not isinstance(drafts, list) or not all(isinstance(text, str) for text in drafts + alone):
        raise InputError(f"{place}: give texts, and a text or a list of texts for draft")
    if len(set(map(short_name, drafts))) < len(drafts):
        raise InputError(
            f"{place} has drafts {', '.join(drafts)}: give each once, in folders of different names"
        )
    try:
        source = TextSource(**{name: values[name] for name in values if name in texts})
        source.check_given()
        kept = {name: values[name] for name in values if name in own} | {"draft": tuple(drafts)}
        return PublicPair(**kept, source=source)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
