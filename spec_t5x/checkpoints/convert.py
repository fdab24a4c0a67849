"""Conversion of checkpoints from one format to another, tensor by tensor.

Each tensor is written once it is read, so that only a few tensors of a model of any size are in
memory at a time (for Hugging Face's format the tensors of one file, 1 GB).
"""

import dataclasses
from pathlib import Path

from spec_t5x.checkpoints.formats import writers_of
from spec_t5x.checkpoints.loading import open_model
from spec_t5x.checkpoints.storage.files import check_destination
from spec_t5x.checkpoints.storage.locations import GcsPath, locate
from spec_t5x.checkpoints.storage.stored_model import StoredModel, Writer
from spec_t5x.checkpoints.storage.tensors import Report
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.checkpoints.t5x import writing as t5x
from spec_t5x.errors import InputError, check_choice
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, NATIVE_DTYPES, WEIGHTS


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
    """Writes a model in another format, completely or not at all; returns the opened source.

    Args:
        source: the model's directory or name, as for ``loading.load``.
        destination: directory to write on this machine; for T5X ``…/checkpoint_N`` with step N.
        to: "t5x" (its legacy format), "t5x_scanned" (the same for ``scalable_t5``), "huggingface"
            or "native".
        dtype: "float32" or "bfloat16", the type of the stored weights; None is "bfloat16" if all
            weights of the source have that type, else "float32". "int8", for "native" alone, rounds
            the matrices to whole numbers times powers of two, which are read back as bfloat16.
        weights: "int8" or "int4" rounds the matrices, for "native" alone; "auto" adds no rounding.
        vocabulary: vocabulary of a source without one; only T5X's formats can be written without.
        overwrite: whether an earlier checkpoint may be replaced.
        report: called after each tensor with the bytes written so far and the total.

    Raises:
        InputError: the source cannot be read, the destination is taken or in a bucket, or the
            format cannot store the model.
    """
    check_choice("to", to, writers_of())
    check_choice("weights", weights, WEIGHTS)
    check_choice("dtype", dtype or "float32", NATIVE_DTYPES)
    for name, value in (("weights", weights), ("dtype", dtype)):
        if value in BITS and to != "native":
            raise InputError(f"{name} is {value}, which {to} cannot store: give native")
    directory = locate(destination)
    if isinstance(directory, GcsPath):
        raise InputError(f"{destination} is in a bucket: write to this machine and copy it there")
    # Checked first: reading may download gigabytes.
    step = {"step": t5x.step_of(directory)} if to.startswith("t5x") else {}
    check_destination(directory, overwrite)
    stored = open_model(source, vocabulary=vocabulary, downloads=False)
    write = _writer_for(source, stored, to)
    if stored.tensors is None:
        stored = open_model(source, vocabulary=vocabulary)
    if weights == AUTO and to == "native":
        weights = stored.weights
    types = {tensor.dtype for tensor in stored.tensors.values()}
    dtype = dtype or ("bfloat16" if types == {"bfloat16"} else "float32")
    written = dataclasses.replace(stored, metadata=stored.metadata | step, weights=weights)
    written.write(directory, write, dtype=dtype, overwrite=overwrite, report=report)
    return stored


def _writer_for(source: str | Path, stored: StoredModel, to: str) -> Writer:
    """Returns the writer of the format ``to``; raises ``InputError`` if it cannot store a model."""
    writers, kind = writers_of(stored.config), type(stored.config).__name__.removesuffix("Config")
    if to not in writers:
        having = " or ".join(sorted(writers))
        raise InputError(f"{source} is a {kind}, which {to} cannot store: give {having}")
    ends = 1 if stored.vocabulary is None else len(stored.vocabulary.eos_ids)
    if to.startswith("t5x") and (stored.config.added_rows or ends > 1):
        raise InputError(
            f"{source} has other special ids than T5's, which {to} cannot store: give "
            "huggingface or native"
        )
    return writers[to]
