"""Fixture that shares jitted training steps between the runs of a test module."""

import dataclasses
import functools

import pytest

from spec_t5x.labs.training import trainer
from spec_t5x.labs.training.optimizers import OptimizerOptions

_OF_THE_LOSS = ("label_smoothing", "z_loss", "objective", "distillation_weight")


@pytest.fixture(scope="module", autouse=True)
def shared_steps():
    """Reuses the jitted step of an equal learner and optimizer, so that it is traced once."""
    make, steps = trainer.make_train_step, {}

    def shared(learner, optimizer):
        options = [getattr(learner.options, name) for name in _OF_THE_LOSS]
        fields = {field.name: getattr(learner, field.name) for field in dataclasses.fields(learner)}
        # Configurations are compared by value, other fields by identity.
        same = [
            repr(value) if name == "config" else id(value)
            for name, value in fields.items()
            if name not in ("options", "distillation")
        ]
        parts = learner.options.accumulation_steps
        key = (type(learner), *same, *options, parts, id(optimizer))
        if key not in steps:
            # Stores the objects, too: a freed object's id could be reused.
            steps[key] = make(learner, optimizer), learner, optimizer
        return steps[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "make_train_step", shared)
        patch.setattr(OptimizerOptions, "build", functools.cache(OptimizerOptions.build))
        yield
