"""N-gram tables on disk.

    config.json          format, version, order, vocabulary, facts about the counted texts
    ngrams.safetensors   unigram [vocab], and for each order n from 2 on:
                           n.children [contexts of order n - 1]   number that extend each of these
                           n.tokens, n.num_successors [contexts]
                           n.successors, n.masses [entries]

The tables are those of ``drafts.ngram.ContextLevel``, with counts in place of the offsets ``first``
and ``starts``. The vocabulary is the target's: config.json has only its fingerprint.
"""

from pathlib import Path

import jax
import numpy as np

from spec_t5x.checkpoints.native.directory import DraftFormat, read_arrays
from spec_t5x.checkpoints.native.target_drafts import read_config
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.drafts.kinds import DraftKind, Request
from spec_t5x.drafts.ngram import ContextLevel, NgramDraft
from spec_t5x.errors import InputError
from spec_t5x.types import Int, Integer

FORMAT = DraftFormat("spec_t5x_ngram", "ngrams.safetensors", "n-grams that spec-t5x train-ngram")
TABLES = ("children", "tokens", "num_successors", "successors", "masses")


def load_ngram(
    directory_or_name: str | Path, target: LoadedModel | None = None, *, order: int | None = None
) -> NgramDraft:
    """Reads tables that ``labs/training/exports.py`` wrote, as a draft on JAX's default device.

    Args:
        target: the model that will verify the proposals, which must have the tables' vocabulary.
            The draft gets its number of logits; for None, as many as the vocabulary has ids.
        order: 1 for unigrams, 2 for bigrams, …; None takes the stored order.

    Raises:
        InputError: the directory holds no n-grams or damaged ones, their vocabulary is not the
            target's, or ``order`` is not from 1 to the stored order.
    """
    draft = _read_tables(*_open(directory_or_name, target))
    if target is not None:
        draft = draft.with_vocab_size(target.config.vocab_size)
    return jax.device_put(draft if order is None else draft.with_order(order))


def _open(directory_or_name: str | Path, target: LoadedModel | None) -> tuple[Path, int, int]:
    """Returns the file of tables, their order and number of ids, which are checked."""
    directory, metadata = read_config(directory_or_name, FORMAT)
    with describing(directory / CONFIG_NAME, "n-grams"):
        stored_order, vocab_size = int(metadata["order"]), int(metadata["vocab_size"])
    if target is not None and metadata.get("vocabulary") != target.vocabulary.fingerprint():
        raise InputError(
            f"n-grams {directory} and target {target.directory} have different vocabularies "
            f"({vocab_size} and {target.vocabulary.vocab_size} ids): count n-grams with the "
            "target's vocabulary (spec-t5x train-ngram)"
        )
    return directory / FORMAT.file, stored_order, vocab_size


def _offsets(counts: Integer[np.ndarray, "owners"]) -> Int[np.ndarray, "owners_and_one"]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)


def _read_tables(path: Path, order: int, vocab_size: int) -> NgramDraft:
    """Reads a draft of this order; raises ``InputError`` if its tables do not fit together."""
    arrays = read_arrays(path)
    levels = []
    with describing(path, f"n-grams up to order {order}"):
        unigram = arrays["unigram"]
        fits = unigram.shape == (vocab_size,)
        for length in range(2, order + 1):
            children, tokens, counts, successors, masses = (
                arrays[f"{length}.{name}"] for name in TABLES
            )
            level = ContextLevel(
                first=_offsets(children),
                tokens=tokens,
                starts=_offsets(counts),
                successors=successors,
                masses=masses,
            )
            # JAX clamps an index outside of a table and raises nothing.
            fits &= level.first[-1] == len(tokens) == len(level.starts) - 1
            fits &= level.starts[-1] == len(successors) == len(masses)
            fits &= max(tokens.max(), successors.max()) < vocab_size
            levels.append(level)
    if not fits:
        raise InputError(
            f"{path}: the tables are not of {vocab_size} tokens or do not fit together: copy the "
            "whole directory again"
        )
    return NgramDraft(
        unigram=unigram,
        levels=tuple(levels),
        max_successors=max((int(np.diff(level.starts).max()) for level in levels), default=0),
    )


def _of_order(order: int | None) -> DraftKind:
    def make(request: Request, argument: str) -> NgramDraft:
        draft = load_ngram(argument, request.target, order=order)
        return draft.replace(settings=request.options.settings)

    return DraftKind(
        make=make,
        draft=NgramDraft,
        open=_open,
        has_checkpoint=True,
        packaged="ngram",
        format=FORMAT.name if order is None else None,
        needs_network=False,
        has_temperature=True,
    )


UNIGRAM, BIGRAM, NGRAM = _of_order(1), _of_order(2), _of_order(None)
