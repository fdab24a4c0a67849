"""Training by T5X from a checkpoint's weights, with a new optimizer at step 0.

T5X resumes a checkpoint's optimizer at its step. A checkpoint of ``spec-t5x convert --to t5x`` has
no optimizer, and a draft made of another model's layers should not take that model's. T5X
initializes what a restored state lacks (``fallback_to_scratch``): here, all but the weights.
"""

from collections.abc import Mapping
from typing import Any

from t5x import state_utils

from spec_t5x.checkpoints.storage.tensors import listed
from spec_t5x.errors import InputError
from spec_t5x.types import PyTree


def weights_alone(
    state_dict: PyTree, target_state_dict: PyTree, *, is_resuming: bool = False
) -> PyTree:
    """Returns the weights of a checkpoint's state, or the whole state if ``is_resuming``.

    gin lists this function in ``utils.RestoreCheckpointConfig.state_transformation_fns``.

    Raises:
      InputError: the weights are not those of the network, by name and, where the checkpoint
        stores it, by shape.
    """
    if is_resuming:
        return state_dict
    found, expected = (
        {name: _shape(leaf) for name, leaf in state_utils.flatten_state_dict(part).items()}
        for part in (state_dict["target"], target_state_dict["target"])
    )
    wrong = {name for name in found if found[name] not in (None, expected.get(name, ()))}
    wrong |= found.keys() ^ expected.keys()
    if wrong:
        raise InputError(
            f"{len(wrong)} of {len(expected)} weights of the initial checkpoint are not the "
            f"model's ({listed(sorted(wrong))}): give a checkpoint of its sizes"
        )
    return {"target": state_dict["target"]}


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Returns a leaf's shape, or None if the checkpoint does not store it."""
    shape = leaf["metadata"]["shape"] if isinstance(leaf, Mapping) else getattr(leaf, "shape", None)
    return None if shape is None else tuple(shape)
