"""Training data of language models: lines of text."""

import dataclasses
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import gin

from spec_t5x.contrib.lm.wordpiece import WordPieceVocabulary, train_wordpiece
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.text_pairs import read_lines
from spec_t5x.labs.training.batching import TokenisedPairs, tokenise
from spec_t5x.labs.training.run_data import TrainingData
from spec_t5x.labs.training.same_run import train_once

log = logging.getLogger(__name__)

# Maximum number of lines, sampled from all, that a vocabulary is trained on.
_SAMPLED_LINES = 400_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(TrainingData):
    """Settings and reader of a language model's training data, lines of text files."""

    has_source = False

    directory: str = "."  # of the files below
    # Plain or tab-separated text, optionally gzipped; each of ``columns`` in a line is one example.
    train_files: tuple | str
    dev_files: tuple | str = ()
    columns: tuple = (0,)
    num_columns: int = 1
    max_length: int = 128  # tokens, EOS included
    tokens_per_batch: int = 2048  # including padding

    def __post_init__(self):
        super().__post_init__()
        for name in ("train_files", "dev_files"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else value)
        if not self.train_files:
            raise InputError("train_files are (): give at least one file")

    def _names(self, part: str) -> Sequence[str]:
        return self.train_files if part == "train" else self.dev_files

    def _files(self, part: str) -> list[Path]:
        return [Path(self.directory) / name for name in self._names(part)]

    def name(self, part: str) -> str | None:
        """Returns the file names of "train" or "dev", joined by commas; None if there are none."""
        return ", ".join(self._names(part)) or None

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum lengths of source and text in tokens: ``(0, max_length)``."""
        return 0, self.max_length

    def check_readable(self) -> None:
        """Reads the first line of each file."""
        for file in (*self._files("train"), *self._files("dev")):
            next(read_lines([file], self.columns, self.num_columns), None)

    def train_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Trains a WordPiece vocabulary on the training lines, or loads ``directory``'s."""
        path = directory / TOKENIZER_NAME

        def train() -> None:
            lines = _sampled(self._lines("train"), _SAMPLED_LINES)
            log.info(f"training a vocabulary of {vocab_size} pieces")
            train_wordpiece(lines, path, vocab_size)

        settings = vocab_size, tuple(self.columns), self.num_columns
        train_once(path, self._files("train"), settings, train)
        return WordPieceVocabulary(path)

    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads all lines as pairs without a source; ``seed`` and ``first`` are not used."""
        lines = ((None, line) for line in self._lines(part))
        return tokenise(lines, vocabulary, self.longest, name=self.name(part))

    def _lines(self, part: str) -> Iterator[str]:
        return read_lines(self._files(part), self.columns, self.num_columns)


def _sampled(texts: Iterable[str], size: int) -> list[str]:
    """Draws at most ``size`` texts uniformly by reservoir sampling; keeps only those in memory."""
    # A fixed seed makes the vocabulary independent of the training seed.
    rng, sample = random.Random(0), []
    for number, text in enumerate(texts):
        if number < size:
            sample.append(text)
        elif (index := rng.randrange(number + 1)) < size:
            sample[index] = text
    return sample


gin.external_configurable(TextOptions, module="spec_t5x")
