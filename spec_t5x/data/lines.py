"""Lines of text for language models: read, tokenised, and batched like pairs.

To ``batching`` a line is a pair without a source: its target is the line's tokens and EOS,
and what the model reads is the start token and the line.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spec_t5x.data.batching import TokenisedPairs, cached, tokenise_texts
from spec_t5x.data.tsv import read_columns
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError


def read_lines(
    files: Sequence[str | Path],
    *,
    columns: Sequence[int] = (0,),
    num_columns: int = 1,
    limit: int | None = None,
) -> Iterator[str]:
    """Yields the texts of the files in order, stripped, without the empty ones.

    Args:
        files: plain text, one example a line, or tab-separated; gzipped or not.
        columns: which of a line's columns are texts, from 0, each of them an example.
        num_columns: the number that every line must have.
        limit: take the first so many texts.

    Raises:
        InputError: as ``tsv.read_columns``, or no file or no column is given.
    """
    if not files or not columns:
        raise InputError(f"files are {list(files)}, columns {list(columns)}: give at least one")
    rows = (row for file in files for row in read_columns(file, columns, num_columns))
    return itertools.islice((text for row in rows for text in row if text), limit)


def tokenise_lines(texts: Iterable[str], vocabulary: Vocabulary, max_length: int) -> TokenisedPairs:
    """The lines' ids, each ending in EOS, as pairs without a source.

    Args:
        texts: the lines; empty ones are dropped.
        vocabulary: encodes them.
        max_length: in tokens, EOS included; longer lines are dropped and counted.

    Raises:
        InputError: no line is left.
    """
    lines = tokenise_texts(((None, text) for text in texts), vocabulary, (0, max_length))
    if not len(lines):
        raise InputError(
            f"all {lines.num_dropped} lines are empty or longer than {max_length} tokens: raise "
            "the limit"
        )
    return lines


def tokenise_cached(
    texts: Iterable[str],
    vocabulary: Vocabulary,
    max_length: int,
    *,
    key: object,
    files: Sequence[str | Path],
    cache_dir: str | Path,
) -> TokenisedPairs:
    """``tokenise_lines``, or what an earlier call kept in ``cache_dir``.

    Args:
        texts, vocabulary, max_length: as ``tokenise_lines``.
        key: says which texts they are, by its ``repr``.
        files: what they are read from; a change in their content is noticed.
        cache_dir: where the arrays are kept.
    """

    def tokenise() -> TokenisedPairs:
        return tokenise_lines(texts, vocabulary, max_length)

    return cached(tokenise, cache_dir, "lines", vocabulary, (max_length, key), files)
