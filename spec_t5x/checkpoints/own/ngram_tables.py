"""N-gram tables on disk, and whether they belong to a target.

    config.json          format, version, order, vocabulary, what was counted
    ngrams.safetensors   unigram [vocab], and for each order n from 2 on:
                           n.children [contexts of order n - 1]   contexts that extend each
                           n.tokens, n.num_successors [contexts]
                           n.successors, n.masses [entries]

Contexts and entries are in the order that ``drafts.ngram.ContextLevel`` has them in;
numbers of items are stored in place of offsets. The vocabulary is the target's, and
stays with it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.own.directory import check_format, read_arrays, write_draft
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.drafts.ngram import MASS_UNITS, ContextLevel, NgramDraft
from spec_t5x.errors import InputError
from spec_t5x.types import Array, Int, Integer

FORMAT = "spec_t5x_ngram"
VERSION = 1
TABLES_NAME = "ngrams.safetensors"

_COPY_AGAIN = "copy the whole directory again"
_TABLES = ("children", "tokens", "num_successors", "successors", "masses")


def save_ngram(
    directory: str | Path,
    draft: NgramDraft,
    vocabulary: Vocabulary,
    *,
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes what ``training.ngram_counts`` counted, completely or not at all.

    The arguments are those of ``native.save_model``.

    Raises:
        InputError: the directory is taken, the vocabulary is of another size, or an
            extra entry has a name of the format's own.
    """
    if draft.vocab_size != vocabulary.vocab_size:
        raise InputError(
            f"the n-grams have {draft.vocab_size} tokens and the vocabulary "
            f"{vocabulary.vocab_size}: give the vocabulary that the texts were tokenised with"
        )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "order": draft.order,
        "vocab_size": draft.vocab_size,
        "vocabulary": vocabulary.fingerprint(),
    }
    arrays = _to_arrays(draft)
    write_draft(directory, metadata, TABLES_NAME, arrays, extra=extra, overwrite=overwrite)


def load_ngram(
    directory_or_name: str | Path,
    target: LoadedModel | None = None,
    *,
    order: int | None = None,
) -> NgramDraft:
    """Reads tables that ``save_ngram`` wrote, as a draft on JAX's default device.

    Args:
        directory_or_name: a directory, or the name of tables that ship with the package.
        target: the model that will verify the proposals. The draft gets as many logits;
            without it, as many as the vocabulary has ids.
        order: 1 for unigrams, 2 for bigrams, …; None takes the longest there are.

    Raises:
        InputError: the directory holds no n-grams or damaged ones, they are of another
            vocabulary than the target's, or do not go up to ``order``.
    """
    directory = find_directory(directory_or_name)
    metadata = read_json(directory / CONFIG_NAME)
    _check_config(metadata, directory / CONFIG_NAME)
    if target is not None:
        _check_belongs(metadata, directory, target)
    path = directory / TABLES_NAME
    draft = _from_arrays(read_arrays(path), metadata["order"], metadata["vocab_size"], str(path))
    if target is not None:
        draft = draft.with_vocab_size(target.config.vocab_size)
    return jax.device_put(draft if order is None else draft.with_order(order))


def _check_config(metadata: dict[str, Any], path: Path) -> None:
    check_format(metadata, path, FORMAT, VERSION, "give n-grams that spec-t5x train-ngram wrote")
    for name in ("order", "vocab_size"):
        value = metadata.get(name)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{path} has {name} {value!r}, which must be 1 or more: {_COPY_AGAIN}")


def _check_belongs(metadata: dict[str, Any], directory: Path, target: LoadedModel) -> None:
    if metadata.get("vocabulary") != target.vocabulary.fingerprint():
        raise InputError(
            f"n-grams {directory} and target {target.directory} have different vocabularies "
            f"({metadata['vocab_size']} and {target.vocabulary.vocab_size} ids): count n-grams "
            "with the target's vocabulary (spec-t5x train-ngram)"
        )


def _to_arrays(draft: NgramDraft) -> dict[str, np.ndarray]:
    arrays = {"unigram": np.asarray(draft.unigram)}
    for order, level in enumerate(draft.levels, start=2):
        children, num_successors = _counts(level.first), _counts(level.starts)
        tables = (children, level.tokens, num_successors, level.successors, level.masses)
        for name, table in zip(_TABLES, tables, strict=True):
            arrays[f"{order}.{name}"] = np.asarray(table)
    return arrays


def _counts(offsets: Int[Array, "owners_and_one"]) -> Integer[np.ndarray, "owners"]:
    """Numbers of items, in two bytes where they fit."""
    counts = np.diff(np.asarray(offsets))
    return counts.astype(np.uint16) if counts.max() <= np.iinfo(np.uint16).max else counts


def _from_arrays(
    arrays: Mapping[str, np.ndarray], order: int, vocab_size: int, source: str
) -> NgramDraft:
    """The draft, once its tables are known to fit together."""
    unigram = arrays.get("unigram")
    if unigram is None or not _is_law(unigram, vocab_size):
        raise InputError(f"{source}: no distribution over {vocab_size} tokens: {_COPY_AGAIN}")
    levels, num_above = [], 1
    for length in range(2, order + 1):
        tables = [arrays.get(f"{length}.{name}") for name in _TABLES]
        if not _fit_together(tables, num_above, vocab_size):
            raise InputError(
                f"{source}: the tables of order {length} are missing or do not fit together: "
                f"{_COPY_AGAIN}"
            )
        children, tokens, num_successors, successors, masses = tables
        levels.append(
            ContextLevel(
                first=_offsets(children),
                tokens=tokens,
                starts=_offsets(num_successors),
                successors=successors,
                masses=masses,
            )
        )
        num_above = len(tokens)
    return NgramDraft(
        unigram=unigram,
        levels=tuple(levels),
        max_successors=max((int(np.diff(level.starts).max()) for level in levels), default=0),
    )


def _is_law(probs: np.ndarray, vocab_size: int) -> bool:
    return bool(
        probs.dtype == np.float32
        and probs.shape == (vocab_size,)
        and np.all(probs >= 0)
        and abs(probs.sum(dtype=np.float64) - 1) < 1e-3
    )


def _fit_together(tables: list[np.ndarray | None], num_above: int, vocab_size: int) -> bool:
    """Whether no index leads out of the tables: on a device that would raise nothing."""
    if not all(table is not None and table.ndim == 1 and _is_whole(table) for table in tables):
        return False
    children, tokens, num_successors, successors, masses = tables
    if (len(children), len(num_successors)) != (num_above, len(tokens)):
        return False
    contexts = np.repeat(np.arange(num_above), children) * vocab_size
    owners = np.repeat(np.arange(len(tokens)), num_successors)
    if len(contexts) != len(tokens) or not len(owners) == len(successors) == len(masses) > 0:
        return False
    return bool(
        max(tokens.max(), successors.max()) < vocab_size
        and np.all(np.diff(contexts + tokens) > 0)
        # What each context hands out.
        and np.bincount(owners, weights=masses).max() < MASS_UNITS
    )


def _is_whole(table: np.ndarray) -> bool:
    return table.dtype in (np.uint16, np.int32) and (not table.size or bool(table.min() >= 0))


def _offsets(counts: Integer[np.ndarray, "owners"]) -> Int[np.ndarray, "owners_and_one"]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)
