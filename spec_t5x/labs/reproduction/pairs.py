"""Packaged models and texts that represent the paper's, and how they are loaded.

The paper's models (T5-XXL, LaMDA, its GPT-like pair) are not public, so small packaged pairs take
their places: the same kinds of network, draft and task, trained on other text. The order of the
drafts, and how measured speed-ups relate to expected ones, compare with the paper; the numbers do
not.
"""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from spec_t5x.checkpoints import digests
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.data.task_options import SUMMARIZE_PREFIX, TRANSLATE_PREFIX
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.interfaces import Draft
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.labs.reproduction import example_texts
from spec_t5x.labs.reproduction.contents import ReproduceOptions

# The kind of packaged file that holds a draft; "copy" needs none.
_KINDS = {"unigram": "ngram", "bigram": "ngram", "ngram": "ngram", "transformer": "transformer"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Packaged target with its drafts and texts."""

    name: str
    target: str
    # The paper's target that this pair represents, as in ``paper_tables.TABLE_3``, and the task
    # of that target in Table 2; None if it is not there.
    stands_for: str
    paper_task: str | None = None
    # Name of this pair's task in the report.
    task: str
    # Texts of ``example_texts``, and the number of words that each is cut to; None for all.
    examples: tuple[str, ...]
    words: int | None = None
    # Text in front of every text.
    prefix: str = ""
    # Top-k filter of the distributions of draft and target; 0 for none.
    top_k: int = 0
    # Cut texts that are longer than the encoder takes.
    truncate: bool = False

    def texts(self, options: ReproduceOptions, count: int) -> list[str]:
        """Reads the first ``count`` texts, or as many as there are, as the target takes them."""
        texts = example_texts.read(self.examples, options.data_dir, count)
        if self.words:
            texts = [" ".join(text.split()[: self.words]) for text in texts]
        return [self.prefix + text for text in texts]

    def same_texts(self) -> list["Pair"]:
        """Returns the pairs that have this one's target and texts, itself included."""
        key = (self.target, self.examples, self.prefix)
        return [each for each in PAIRS if (each.target, each.examples, each.prefix) == key]


ENDE = Pair(
    name="ende",
    target="t5-target",
    stands_for="T5-XXL (EnDe)",
    paper_task="EnDe",
    task="EnDe",
    examples=example_texts.SENTENCES,
    prefix=TRANSLATE_PREFIX,
)
SUMMARIES = Pair(
    name="summaries",
    target="t5-target",
    stands_for="T5-XXL (CNN/DM)",
    paper_task="CNN/DM",
    task="package summaries",
    examples=example_texts.DESCRIPTIONS,
    prefix=SUMMARIZE_PREFIX,
    truncate=True,
)
LANGUAGE = Pair(
    name="lm",
    target="lm-target",
    stands_for="GPT-like (97M)",
    task="sentences, from their first three words",
    examples=example_texts.SENTENCES,
    words=3,
)
# LaMDA's output is always behind this filter.
TOP_40 = dataclasses.replace(LANGUAGE, name="lm-top40", stands_for="LaMDA (137B)", top_k=40)

PAIRS = (LANGUAGE, ENDE, SUMMARIES, TOP_40)


def inputs(pair: Pair, drafts: Sequence[str], texts: Sequence[str], **more: Any) -> dict[str, Any]:
    """Returns the ``inputs`` of ``Results.__call__``: digests of models and texts, and ``more``."""
    kinds = sorted({_KINDS[draft] for draft in drafts if draft in _KINDS})
    files = [pair.target, *(PACKAGED_DRAFTS[pair.target][kind] for kind in kinds)]
    return {
        "version": 4,
        "files": [digests.files_digest(name)["content"] for name in files],
        "drafts": list(drafts),
        "texts": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        **more,
    }


@functools.lru_cache(maxsize=4)
def load_target(name: str) -> Generator:
    """Loads the packaged target's ``Generator``, without a draft."""
    return Generator.load(name)


@functools.lru_cache(maxsize=16)
def load_draft(target: str, draft: str) -> Draft:
    """Loads a draft of a packaged target by its name (``checkpoints.make_draft``)."""
    return Generator.load(target, draft).draft


def of_one_shape(generator, texts: Sequence[str], options, count: int) -> list[str]:
    """Returns the first ``count`` texts of those that are padded to the most common shape.

    One program serves all of them, since compilation takes most of the time on a CPU.

    Raises:
      InputError: there is no text.
    """
    if not texts:
        raise InputError("no texts: give a data_dir that has some")
    batches = text_batches(generator, texts, dataclasses.replace(options, batch_size=1))
    shapes = [(batch.tokens.shape, batch.prompts.shape) for batch in batches]
    ((common, _),) = Counter(shapes).most_common(1)
    return [text for text, shape in zip(texts, shapes, strict=True) if shape == common][:count]
