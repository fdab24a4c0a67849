"""Which models and texts stand for the paper's, and how they are loaded.

The paper's models (T5-XXL, LaMDA, its GPT-like pair) are not to be had here, so small
pairs that come with the package take their places: the same kinds of network, draft and
task, trained on other text. What is compared with the paper is the order of the drafts and
how measured speed-ups relate to expected ones, not the numbers.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction import examples
from spec_t5x.experiments.reproduction.examples import Texts
from spec_t5x.experiments.reproduction.items import Json, Setting

# An n-gram table and a network share the kind of their file; ``copy`` has none.
_FILES = {"unigram": "ngram", "bigram": "ngram", "ngram": "ngram", "transformer": "transformer"}

# Words of a sentence that a language model is given to go on from.
_PROMPT_WORDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target with its drafts and texts."""

    name: str
    # Of the packaged target.
    target: str
    # The paper's target that it stands for, as in ``paper_tables.TABLE_3``.
    stands_for: str
    # As in Table 2, where the paper has a row of this task.
    paper_task: str | None
    # Ours, in a table.
    task: str
    texts: Callable[[Setting, int], Texts]
    # Of every distribution, draft's and target's; 0 for none.
    top_k: int = 0
    # What the texts are cut to, where they can be longer than the encoder takes.
    truncate: bool = False


def _beginnings(setting: Setting, count: int) -> Texts:
    """The first words of sentences, for a model that goes on from them."""
    sentences = examples.sentences(setting, count)
    return Texts(
        name=f"the first {_PROMPT_WORDS} words of {sentences.name}",
        texts=tuple(" ".join(text.split()[:_PROMPT_WORDS]) for text in sentences.texts),
    )


ENDE = Pair(
    name="ende",
    target="ende-target",
    stands_for="T5-XXL (EnDe)",
    paper_task="EnDe",
    task="EnDe",
    texts=examples.sentences,
)
SUMMARIES = Pair(
    name="summaries",
    target="summaries-target",
    stands_for="T5-XXL (CNN/DM)",
    paper_task="CNN/DM",
    task="summaries",
    texts=examples.descriptions,
    truncate=True,
)
LANGUAGE = Pair(
    name="lm",
    target="lm-target",
    stands_for="GPT-like (97M)",
    paper_task=None,
    task="unconditional text",
    texts=_beginnings,
)
# LaMDA's output is always behind this filter.
TOP_40 = dataclasses.replace(LANGUAGE, name="lm-top40", stands_for="LaMDA (137B)", top_k=40)

PAIRS = (LANGUAGE, ENDE, SUMMARIES, TOP_40)


def missing(pair: Pair, drafts: Sequence[str] = ("transformer",)) -> str | None:
    """What of the pair does not come with this package, or None."""
    from spec_t5x.checkpoints.loading import packaged_names

    packaged = packaged_names()
    files = draft_files(pair)
    kinds = dict.fromkeys(_FILES[draft] for draft in drafts if draft in _FILES)
    absent = [
        name
        for name in (pair.target, *(files.get(kind, f"{kind} draft for it") for kind in kinds))
        if not _is_there(name, packaged)
    ]
    return f"the package has no {', '.join(absent)}" if absent else None


def _is_there(name: str, packaged: Sequence[str]) -> bool:
    from spec_t5x.checkpoints.loading import PACKAGED_MODELS
    from spec_t5x.checkpoints.storage.files import CONFIG_NAME

    # Tables and heads are no models, and not among the names.
    return name in packaged or (PACKAGED_MODELS / name / CONFIG_NAME).is_file()


def draft_files(pair: Pair) -> Mapping[str, str]:
    """The pair's packaged drafts, by kind."""
    from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS

    return PACKAGED_DRAFTS.get(pair.target, {})


def present(drafts: Sequence[str] = ("transformer",), pairs: Sequence[Pair] = PAIRS) -> list[Pair]:
    """The pairs that are all there."""
    return [pair for pair in pairs if missing(pair, drafts) is None]


def none_present(
    drafts: Sequence[str] = ("transformer",), pairs: Sequence[Pair] = PAIRS
) -> str | None:
    """Why nothing can be measured, or None where one of the pairs is there."""
    if present(drafts, pairs):
        return None
    return "; ".join(dict.fromkeys(missing(pair, drafts) or "" for pair in pairs))


def absences(pairs: Sequence[Pair] = PAIRS, drafts: Sequence[str] = ("transformer",)) -> list[str]:
    """A sentence for each pair that is not there."""
    return [
        f"Nothing stands for {pair.stands_for}: {reason}."
        for pair in pairs
        if (reason := missing(pair, drafts)) is not None
    ]


def inputs(pair: Pair, drafts: Sequence[str], texts: Texts, **more: Json) -> dict[str, Json]:
    """What a part that decodes with the pair depends on."""
    from spec_t5x.inference.fingerprints import fingerprint

    files = {_FILES[draft] for draft in drafts if draft in _FILES}
    return {
        "version": 2,
        "target": fingerprint(pair.target)["content"],
        "drafts": list(drafts),
        "draft_files": {
            kind: fingerprint(name)["content"]
            for kind, name in draft_files(pair).items()
            if kind in files
        },
        "texts": texts.fingerprint,
        **more,
    }


@functools.lru_cache(maxsize=4)
def load_target(pair: Pair):
    """The pair's ``Generator``, without a draft."""
    from spec_t5x.generation import Generator

    return Generator.load(pair.target)


@functools.lru_cache(maxsize=16)
def load_draft(pair: Pair, draft: str):
    """A draft of the pair by its name (``checkpoints.make_draft``)."""
    from spec_t5x.generation import Generator

    return Generator.load(pair.target, draft).draft


def of_one_shape(generator, texts: Sequence[str], options, count: int) -> list[str]:
    """The first ``count`` of the texts that are padded to the commonest length.

    One program serves all of them: compiling is what takes long on a CPU.

    Raises:
      InputError: no text is left.
    """
    if not texts:
        raise InputError("no texts: give a data_dir that has some")
    one = dataclasses.replace(options, batch_size=1)
    batches = generator.batches(texts, one)
    shapes = [(batch.tokens.shape, batch.prompts.shape) for batch in batches]
    ((common, _),) = Counter(shapes).most_common(1)
    pairs = zip(texts, shapes, strict=True)
    return [text for text, shape in pairs if shape == common][:count]
