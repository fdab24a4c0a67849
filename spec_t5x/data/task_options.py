"""Options of a seqio task, shared by training, evaluation and bulk inference."""

import dataclasses
import os
from typing import Any

from spec_t5x.errors import InputError, check_unused
from spec_t5x.options import GenerateOptions, option

# The paper's tasks (``paper_tasks``), and the prefixes that T5's mixture has for them.
TRANSLATE_PREFIX, SUMMARIZE_PREFIX = "translate English to German: ", "summarize: "
WMT_ENDE, CNN_DAILYMAIL = "wmt_t2t_ende_v003", "cnn_dailymail_v002"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of a seqio task, by T5X's names: a base class of other options."""

    mixture_or_task: str | None = option(
        None,
        "seqio task or mixture to read instead of a file; a mixture's tasks are read in turn",
        "NAME",
    )
    # The paper's tasks need none. T5X's macro is one name or None: these are accepted as well.
    task_modules: tuple | list | str | None = option(
        (), "module that registers tasks, to be imported; repeatable", ["MODULE"]
    )
    task_feature_lengths: dict | None = option(None, "cut inputs to N tokens; end outputs after N")
    use_cached_tasks: bool = option(False, "read a task's seqio cache instead of its data")
    seqio_additional_cache_dirs: tuple | list | str | None = option((), "more caches of tasks")

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules to import before a task is looked up."""
        return _names(self.task_modules)

    @property
    def caches(self) -> tuple[str, ...] | None:
        """Folders of cached tasks, in addition to seqio's; None if tasks are read uncached."""
        folders = map(os.path.expanduser, _names(self.seqio_additional_cache_dirs))
        return tuple(folders) if self.use_cached_tasks else None

    def check_task(self) -> None:
        """Raises ``InputError`` for an unknown task, invalid lengths, or if seqio is missing."""
        folders = _names(self.seqio_additional_cache_dirs)
        if folders and not self.use_cached_tasks:
            raise InputError(
                f"seqio_additional_cache_dirs is {','.join(folders)}, which nothing reads: set "
                "use_cached_tasks=True"
            )
        if self.mixture_or_task is None:
            check_unused(self, "there is no mixture_or_task", "use_cached_tasks")
        else:
            # Checked here, before a model is downloaded or loaded.
            from spec_t5x.data.task_examples import check_registered

            check_registered(self.mixture_or_task, self.modules)
        lengths = {} if self.task_feature_lengths is None else self.task_feature_lengths
        if not isinstance(lengths, dict) or set(lengths) - {"inputs", "targets"}:
            raise InputError(
                f"task_feature_lengths is {lengths!r}: give {{'inputs': N, 'targets': N}}"
            )
        for name, value in lengths.items():
            if not isinstance(value, int) or value < 2:
                raise InputError(f"task_feature_lengths has {name} {value!r}: give at least 2")

    def decoding(self, options: GenerateOptions) -> GenerateOptions:
        """Returns ``options`` with ``task_feature_lengths`` as limits.

        Raises ``InputError`` if the options have another limit.
        """
        lengths = self.task_feature_lengths or {}
        for part, name in (("inputs", "max_source_len"), ("targets", "max_decode_len")):
            given, length = getattr(options, name), lengths.get(part)
            if given is not None and length not in (None, given):
                raise InputError(
                    f"{name} is {given} and task_feature_lengths has {part} {length}: leave one out"
                )
            if length is not None:
                truncate = options.truncate or part == "inputs"
                options = dataclasses.replace(options, **{name: length, "truncate": truncate})
        return options


def _names(given: Any) -> tuple[str, ...]:
    """Returns a tuple of the names given: one name, a sequence of names, or None."""
    return (given,) if isinstance(given, str) else tuple(given or ())
