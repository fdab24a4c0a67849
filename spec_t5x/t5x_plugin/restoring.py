"""Target and draft restored from two checkpoints, by T5X's own machinery.

T5X restores one train state from one path. Here that state is taken apart: the target's
part is restored from the path of ``RestoreCheckpointConfig``, the draft's from a path of
its own, each by T5X's checkpoint manager (legacy checkpoints, Orbax, partitioned reads).
A draft by name is read by the model, from whatever it is stored in.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from t5x import checkpoints, partitioning, train_state
from tensorflow.io import gfile

from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.drafts import DraftSource
from spec_t5x.t5x_plugin.speculative_model import DRAFT, SpeculativeModel
from spec_t5x.types import PyTree

# Characters of an error of T5X's, which may list a tree of parameters.
_LONGEST = 400


class SpeculativeCheckpointManager:
    """What ``utils.RestoreCheckpointConfig.checkpoint_manager_cls`` is bound to.

    It restores; to save a training's state, use T5X's own manager.
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
        """As ``t5x.checkpoints.OrbaxCheckpointManagerInterface``.

        Args:
          directory, train_state, partitioner, **kwargs: of T5X's manager.
          draft_path: checkpoint of the draft, or a folder of checkpoints, of which the
            latest is taken; None where it has no parameters, and of a draft by name.
          model: whose train state it is.

        Raises:
          InputError: a model that does not speculate, a draft with parameters and no path, or
            a path of nothing or that is not needed.
        """
        self._train_state = train_state
        self._has_draft = DRAFT in train_state.params
        by_name = model is not None and draft_of(model).reads_itself
        self._draft_path = checked_path(draft_path, self._has_draft, by_name)
        self._model = model
        # One manager each, made when its part is restored: one looks into its directory.
        self._manager = functools.partial(
            checkpoints.OrbaxCheckpointManagerInterface, partitioner=partitioner, **kwargs
        )
        self._directory = directory
        self._partitioner = partitioner

    def restore(
        self,
        path: str,
        fallback_state: Mapping[str, Any] | None = None,
        state_transformation_fns: Sequence[Any] = (),
        **kwargs: Any,
    ) -> train_state.TrainState:
        """The train state: the target's from ``path``, the draft's from its own.

        ``fallback_state`` and ``state_transformation_fns`` are the target's.
        """
        part = functools.partial(_part_of_state, self._train_state)
        if fallback_state is not None:
            targets = {k: v for k, v in fallback_state["target"].items() if k != DRAFT}
            fallback_state = {**fallback_state, "target": targets}
        target = self._restore_part(
            part(draft=False),
            self._directory,
            path,
            fallback_state=fallback_state,
            state_transformation_fns=state_transformation_fns,
            **kwargs,
        )
        return self._with_draft(target)

    def restore_from_tf_checkpoint(self, path: str, **kwargs: Any) -> train_state.TrainState:
        """A target of T5's Mesh TensorFlow format; the draft's format is detected."""
        target = self._manager(
            directory=self._directory, train_state=_part_of_state(self._train_state, draft=False)
        ).restore_from_tf_checkpoint(path, **kwargs)
        return self._with_draft(target)

    def _with_draft(self, target: train_state.TrainState) -> train_state.TrainState:
        """One train state of two; its step is the target's."""
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
            params = self._restore_part(part, path, path).params
        except Exception as error:
            # T5X's readers know one model, ``target``, and raise errors of many kinds.
            why = " ".join(str(error).split()).replace("target/", "draft/")[:_LONGEST]
            raise _not_restored(path, why) from error
        # T5X's reader of Orbax returns what is stored, of any shape.
        expected = flatten_dict(flax.core.unfreeze(part.params), sep="/")
        for name, leaf in flatten_dict(flax.core.unfreeze(params), sep="/").items():
            if leaf.shape != expected[name].shape:
                why = f"draft/{name} is {leaf.shape} there, and {expected[name].shape} here"
                raise _not_restored(path, why)
        return params

    def _read_draft(self, params: PyTree) -> PyTree:
        on_every_device = NamedSharding(self._partitioner.mesh, PartitionSpec())
        draft = self._model.read_draft(flax.core.unfreeze(params))
        return jax.device_put(jax.device_get(draft), on_every_device)

    def _restore_part(self, state, directory: str, path: str, **kwargs):
        return self._manager(directory=directory, train_state=state).restore(path=path, **kwargs)


def _not_restored(path: str, why: str) -> InputError:
    return InputError(
        f"the draft's checkpoint {path} cannot be restored: {why}: give a T5X checkpoint of the "
        "sizes of DRAFT_SIZE (or draft_of_sizes.gin)"
    )


def draft_of(model: Any) -> DraftSource:
    """Returns the draft of the launch's ``MODEL``."""
    if not isinstance(model, SpeculativeModel):
        raise InputError(
            f"MODEL is a {type(model).__name__} without a draft: give speculate.gin, or the run's "
            "file that includes it, after the model's file"
        )
    return model.draft_source


def checked_path(path: Any, has_draft: bool, by_name: bool) -> str | None:
    """Returns the path of the draft's checkpoint, None of a draft that has none."""
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
    if not gfile.exists(path):
        raise InputError(f"there is no draft's checkpoint {path}: set DRAFT_CHECKPOINT_PATH")
    return path


def _part_of_state(state: train_state.TrainState, *, draft: bool) -> train_state.TrainState:
    """The shapes and axes of one of the two models alone."""

    def part(tree):
        if tree is None:
            return None
        tree = dict(flax.core.unfreeze(tree))
        drafts = tree.pop(DRAFT, None)
        return flax.core.freeze(drafts if draft else tree)

    return state.replace(params=part(state.params), params_axes=part(state.params_axes))
