"""What options of a seqio task mean, wherever a task may be given."""

import dataclasses
from typing import Any, TypeVar

from spec_t5x.errors import InputError

Decoding = TypeVar("Decoding")


class TaskOptions:
    """To be mixed into options that have these fields.

    ``task_modules`` are names of modules (or one name) that register tasks,
    ``task_feature_lengths`` is ``{"inputs": N, "targets": N}`` or part of it, T5X's names.
    """

    task_modules: Any
    task_feature_lengths: dict[str, int] | None

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules to import before a task is looked for."""
        modules = self.task_modules or ()
        return (modules,) if isinstance(modules, str) else tuple(modules)

    def check_lengths(self) -> None:
        """Raises ``InputError`` for lengths that are none."""
        lengths = self.task_feature_lengths
        if lengths is None:
            return
        if not isinstance(lengths, dict) or set(lengths) - {"inputs", "targets"}:
            raise InputError(
                f"task_feature_lengths is {lengths!r}: give {{'inputs': N, 'targets': N}}"
            )
        for name, value in lengths.items():
            if not isinstance(value, int) or value < 2:
                raise InputError(f"task_feature_lengths has {name} {value!r}: give at least 2")

    def decoding(self, options: Decoding) -> Decoding:
        """``generation.GenerateOptions`` with the task's lengths, where these are given."""
        lengths = self.task_feature_lengths or {}
        if "inputs" in lengths:
            options = dataclasses.replace(options, max_source_len=lengths["inputs"], truncate=True)
        if "targets" in lengths:
            options = dataclasses.replace(options, max_decode_len=lengths["targets"])
        return options
