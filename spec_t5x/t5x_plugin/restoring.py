"""Restoring of target and draft from two checkpoints, by T5X's checkpoint manager.

T5X restores one train state from one path. Here that state is split: T5X's checkpoint manager
(legacy checkpoints, Orbax, partitioned reads) restores the target's part from the path of
``RestoreCheckpointConfig`` and the draft's from another path. The model reads a ``NamedDraft``.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import flax.core
import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from t5x import checkpoints, partitioning, train_state
from tensorflow.io import gfile

from spec_t5x.errors import InputError, one_line
from spec_t5x.models.partitioning import gathered
from spec_t5x.t5x_plugin.drafts import NamedDraft
from spec_t5x.t5x_plugin.speculative_model import DRAFT, SpeculativeModel, draft_of, split_params
from spec_t5x.types import PyTree


class SpeculativeCheckpointManager:
    """Checkpoint manager that restores a target and its draft, and saves nothing.

    gin binds ``utils.RestoreCheckpointConfig.checkpoint_manager_cls`` to this class.
    """

    def __init__(
        self,
        directory: str,
        train_state: train_state.TrainState,
        partitioner: partitioning.BasePartitioner,
        draft_path: str | None = None,
        model: SpeculativeModel | None = None,
        **kwargs: Any,
    ):
        """Checks the draft's path, and stores the other arguments, which are T5X's.

        ``draft_path`` is the draft's checkpoint, or a folder of checkpoints, whose latest is
        restored; None for a ``NamedDraft`` or a draft without parameters.

        Raises:
          InputError: a model without a draft, a ``ModelDraft`` without a path, or a path that
            does not exist or is not needed.
        """
        self._train_state = train_state
        self._has_draft = DRAFT in train_state.params
        by_name = model is not None and isinstance(draft_of(model), NamedDraft)
        self._draft_path = checked_path(draft_path, self._has_draft, by_name)
        self._model, self._directory, self._partitioner = model, directory, partitioner
        # A manager looks into its directory when it is made.
        self._manager = functools.partial(
            checkpoints.OrbaxCheckpointManagerInterface, partitioner=partitioner, **kwargs
        )

    def restore(
        self, path: str, fallback_state: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> train_state.TrainState:
        """Returns the train state with the target's part from ``path``, and the draft's parameters.

        ``fallback_state`` and ``kwargs``, T5X's other arguments, are for the target.
        """
        if fallback_state is not None:
            fallback_state = {**fallback_state, "target": split_params(fallback_state["target"])[0]}
        target = self._target_manager().restore(path=path, fallback_state=fallback_state, **kwargs)
        return self._with_draft(target)

    def restore_from_tf_checkpoint(self, path: str, **kwargs: Any) -> train_state.TrainState:
        """Restores a target of T5's Mesh TensorFlow format, and the draft as ``restore`` does."""
        return self._with_draft(self._target_manager().restore_from_tf_checkpoint(path, **kwargs))

    def _target_manager(self) -> checkpoints.OrbaxCheckpointManagerInterface:
        state = _part_of_state(self._train_state, draft=False)
        return self._manager(directory=self._directory, train_state=state)

    def _with_draft(self, target: train_state.TrainState) -> train_state.TrainState:
        """Returns the target's train state with the draft's parameters, if any, under ``draft``."""
        if not self._has_draft:
            return target
        params = self._restore_draft() if self._draft_path else self._read_draft(target.params)
        params = {**flax.core.unfreeze(target.params), DRAFT: flax.core.unfreeze(params)}
        return target.replace(
            params=flax.core.freeze(params), params_axes=self._train_state.params_axes
        )

    def _restore_draft(self) -> PyTree:
        path = self._draft_path
        if steps := checkpoints.all_steps(path):
            path = checkpoints.get_checkpoint_dir(path, max(steps))
        part = _part_of_state(self._train_state, draft=True)
        try:
            params = self._manager(directory=path, train_state=part).restore(path=path).params
        except Exception as error:
            # T5X's readers call any model ``target``; their errors may list a tree of parameters.
            why = one_line(error, most=400).replace("target/", "draft/")
            raise _not_restored(path, why) from error
        # T5X's reader of Orbax returns arrays of any shape that is stored.
        expected = flatten_dict(flax.core.unfreeze(part.params), sep="/")
        for name, leaf in flatten_dict(flax.core.unfreeze(params), sep="/").items():
            if leaf.shape != expected[name].shape:
                why = f"draft/{name} is {leaf.shape} there, and {expected[name].shape} here"
                raise _not_restored(path, why)
        return params

    def _read_draft(self, params: PyTree) -> PyTree:
        on_every_device = NamedSharding(self._partitioner.mesh, PartitionSpec())
        draft = self._model.read_draft(flax.core.unfreeze(params))
        # A draft of the target's weights is as sharded as they are, over hosts too.
        return jax.device_put(jax.tree.map(gathered, draft), on_every_device)


def _not_restored(path: str, why: str) -> InputError:
    return InputError(
        f"the draft's checkpoint {path} cannot be restored: {why}: give a T5X checkpoint of the "
        "sizes of DRAFT_SIZE (or draft_of_sizes.gin)"
    )


def checked_path(path: Any, has_draft: bool, by_name: bool) -> str | None:
    """Returns the path of the draft's checkpoint, or None if none is needed; checks either."""
    if by_name or not has_draft:
        if path:
            why = "the draft comes by name" if by_name else "the draft has no parameters"
            raise InputError(f"DRAFT_CHECKPOINT_PATH is {path!r} and {why}: leave it None")
        return None
    if not path:
        raise InputError(
            "the draft is a model and DRAFT_CHECKPOINT_PATH is not set: set it or, for a draft by "
            "name, give draft_by_name.gin after speculate.gin and after the run's file"
        )
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"DRAFT_CHECKPOINT_PATH is {path!r}: give the path of one checkpoint")
    if gfile.exists(f"{path}.index"):
        raise InputError(
            f"the draft's checkpoint {path} is Mesh TensorFlow's: convert it with T5X's "
            "scripts/convert_tf_checkpoint.py"
        )
    if not gfile.exists(path):
        raise InputError(f"there is no draft's checkpoint {path}: set DRAFT_CHECKPOINT_PATH")
    return path


def _part_of_state(state: train_state.TrainState, *, draft: bool) -> train_state.TrainState:
    """Returns a train state with the parameters and axes of the draft alone, or the target's."""

    def part(tree):
        if tree is None:
            return None
        target, drafts = split_params(tree)
        return flax.core.freeze(drafts if draft else target)

    return state.replace(params=part(state.params), params_axes=part(state.params_axes))
