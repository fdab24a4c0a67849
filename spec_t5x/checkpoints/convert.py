"""From one format of checkpoints to another, tensor by tensor.

A destination is written as the source is read: of a model of any size a few tensors are in
memory at a time (of Hugging Face's format, those of one file, 1 GB).
"""

import dataclasses
from pathlib import Path

from spec_t5x.checkpoints.formats import writers_of
from spec_t5x.checkpoints.loading import open_model
from spec_t5x.checkpoints.storage.files import check_destination
from spec_t5x.checkpoints.storage.locations import GcsPath, locate
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.checkpoints.t5x import writing as t5x
from spec_t5x.errors import InputError, check_choice
from spec_t5x.names import AUTO, WEIGHTS


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    weights: str = AUTO,
    vocabulary: VocabularyLike | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> StoredModel:
    """Writes a model in another format, completely or not at all.

    Args:
        source: what ``loading.load`` reads.
        destination: a directory; of a T5X checkpoint ``…/checkpoint_N``, where N is the
            step that T5X takes it for.
        to: "t5x" (its legacy format), "t5x_scanned" (the same for ``scalable_t5``), "huggingface"
            or "native".
        dtype: "float32" or "bfloat16", of the stored weights; None keeps the source's,
            of which all other types become float32.
        weights: "int8" or "int4" rounds the matrices, which "native" alone can store.
        vocabulary: as ``loading.load``. Only T5X's format does without one.
        overwrite: whether an earlier checkpoint may be replaced.
        report: called after each tensor with the bytes written so far and in all.

    Returns:
        The source as it was opened.

    Raises:
        InputError: the source cannot be read, the destination is taken, or the format has
            no such model.
    """
    check_choice("format", to, writers_of())
    check_choice("weights", weights, WEIGHTS)
    if weights != AUTO and to != "native":
        raise InputError(f"weights is {weights} and {to} stores none of that: give native")
    if isinstance(locate(destination), GcsPath):
        raise InputError(f"{destination} is in a bucket: write to this machine and copy it there")
    directory = Path(locate(destination))
    # Before anything is read.
    step = {"step": t5x.step_of(directory)} if to.startswith("t5x") else {}
    check_destination(directory, overwrite)
    stored = open_model(source, vocabulary=vocabulary)
    writers, kind = writers_of(stored.config), type(stored.config).__name__.removesuffix("Config")
    if to not in writers:
        having = " or ".join(sorted(writers))
        raise InputError(f"{source} is a {kind}, which {to} has not: give {having}")
    ends = 1 if stored.vocabulary is None else len(stored.vocabulary.eos_ids)
    if to.startswith("t5x") and (stored.config.added_rows or ends > 1):
        raise InputError(
            f"{source} has other special ids than T5's, which {to} has not: give huggingface or "
            "native"
        )
    if weights == AUTO and to == "native":
        weights = stored.weights
    written = dataclasses.replace(stored, metadata=stored.metadata | step, weights=weights)
    dtype = dtype or _common_dtype(stored)
    written.write(directory, writers[to], dtype=dtype, overwrite=overwrite, report=report)
    return stored


def _common_dtype(stored: StoredModel) -> str:
    """What holds all weights of a model as they are: bfloat16 only where all of them are."""
    types = {tensor.dtype for tensor in stored.tensors.values()}
    return "bfloat16" if types == {"bfloat16"} else "float32"
