"""Fitting of a draft's embeddings and output layer to the number of ids that its target embeds.

Models that share a vocabulary may embed different numbers of ids: T5's have 32100 or 32128 rows.
The target stays as it is, and so does its distribution. A larger draft loses its last rows; a
smaller one gets rows of zeros with masked logits, unless it is decoder-only, which is refused.
"""

import dataclasses

import numpy as np

from spec_t5x.checkpoints.loading import check_same_vocabulary
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.errors import InputError

# Parameters with an axis of ids, and the number of that axis.
_AXES = {
    "token_embedder/embedding": 0,
    "source_embedder/embedding": 0,
    "token_embedding": 0,
    "decoder/logits_dense/kernel": 1,
    "logits_dense/kernel": 1,
}


def fitted(draft: StoredModel, target: LoadedModel) -> StoredModel:
    """Returns the draft with the target's number of ids; refuses ids that differ in meaning."""
    check_same_vocabulary(target, draft)
    draft.check()
    size, added = target.config.vocab_size, draft.config.added_rows
    more = size - draft.config.vocab_size
    if not more:
        return draft
    changes = {"vocab_size": size}
    if not draft.config.has_source:
        if more > 0:
            raise InputError(
                f"target {target.directory} embeds {size} ids and draft {draft.directory} "
                f"{draft.config.vocab_size}: give a draft with at least as many"
            )
    elif added or more > 0:
        # ``added_rows`` counts id 0, which it masks, too: padding, which no text contains.
        changes["added_rows"] = max(max(added, 1) + more, 1)
    config = dataclasses.replace(draft.config, **changes)
    tensors = draft.tensors and {
        path: _resized(tensor, _AXES[path], size) if path in _AXES else tensor
        for path, tensor in draft.tensors.items()
    }
    return dataclasses.replace(draft, config=config, tensors=tensors, vocabulary=target.vocabulary)


def _resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Cuts a matrix to ``size`` along ``axis``, or pads it with zeros at the end of that axis."""
    old = tensor.shape[axis]

    def read(index):
        start, stop, _ = index[axis].indices(size)
        kept = slice(min(start, old), min(stop, old))
        part = tensor.read((*index[:axis], kept, *index[axis + 1 :]))
        missing = [(0, 0)] * part.ndim
        missing[axis] = (0, (stop - start) - part.shape[axis])
        return np.pad(part, missing)

    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    return dataclasses.replace(tensor, shape=shape, read=read)
