"""A T5X training that starts from a checkpoint's weights, with an optimizer of its own.

T5X goes on where a checkpoint's optimizer was, at its step. A checkpoint that
``spec-t5x convert --to t5x`` made of another format has no optimizer, and a draft that is
made of another's layers should not take its. T5X fills what a restored state lacks from
one initialised from scratch (``fallback_to_scratch``); here it is made to lack all but
the weights, and those it must have.
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
    """What ``utils.RestoreCheckpointConfig.state_transformation_fns`` holds.

    With ``is_resuming`` the checkpoint is one of the training's own and stays as it is.

    Raises:
      InputError: the checkpoint's weights are not those of the network, by name and, where
        the checkpoint tells it, by shape.
    """
    if is_resuming:
        return state_dict
    found, expected = (
        {name: _shape(leaf) for name, leaf in state_utils.flatten_state_dict(part).items()}
        for part in (state_dict["target"], target_state_dict["target"])
    )
    # Where a checkpoint does not store a shape, any will do.
    wrong = {name for name in found if found[name] not in (None, expected.get(name, ()))}
    wrong |= found.keys() ^ expected.keys()
    if wrong:
        raise InputError(
            f"{len(wrong)} of {len(expected)} weights of the initial checkpoint are not the "
            f"model's ({listed(sorted(wrong))}): give a checkpoint of its sizes"
        )
    return {"target": state_dict["target"]}


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """None where a checkpoint does not store it."""
    if isinstance(leaf, Mapping):
        return tuple(leaf["metadata"]["shape"])
    shape = getattr(leaf, "shape", None)
    return None if shape is None else tuple(shape)
