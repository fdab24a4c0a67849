"""A draft's tables cut or padded to the number of ids that its target embeds.

Models of one vocabulary have embeddings of different sizes, 32100 and 32128 rows for T5's. The
target keeps its rows, so its texts and their law stay. A larger draft loses its last rows; a
smaller one gets rows of zeros, and the logits of those ids are masked.
"""

import dataclasses

import numpy as np

from spec_t5x.checkpoints.loading import check_same_vocabulary
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.errors import InputError

# The parameters with one entry for each id, and its axis.
_AXES = {
    "token_embedder/embedding": 0,
    "source_embedder/embedding": 0,
    "token_embedding": 0,
    "decoder/logits_dense/kernel": 1,
    "logits_dense/kernel": 1,
}


def fitted(draft: StoredModel, target: LoadedModel) -> StoredModel:
    """Returns the draft with as many ids as the target; refuses one whose ids differ in meaning."""
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
                f"{draft.config.vocab_size}: give a draft with as many, or more"
            )
    elif added or more > 0:
        # Id 0 is masked, too: no token where ids are renumbered, and else in no text.
        changes["added_rows"] = max(max(added, 1) + more, 1)
    config = dataclasses.replace(draft.config, **changes)
    tensors = {
        path: _resized(tensor, _AXES[path], size) if path in _AXES else tensor
        for path, tensor in draft.tensors.items()
    }
    return dataclasses.replace(draft, config=config, tensors=tensors, vocabulary=target.vocabulary)


def _resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Returns a matrix that is cut, or padded with zeros at the end, along an axis."""
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
