"""What experiments decode: a loaded target, and texts that it takes."""

import dataclasses
import logging
from pathlib import Path

from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.errors import InputError
from spec_t5x.experiments.evaluation import EvaluationOptions, fits, read_sets
from spec_t5x.generation import DEFAULT_MAX_SOURCE_LENGTH, GenerateOptions, Generator
from spec_t5x.models.binding import bind


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """A file of pairs, of which the sources are decoded, or a task."""

    # .tsv or .jsonl, gzipped or not.
    data: str | None = None
    # Of a .tsv; None is as usual (``data.tsv.read_pairs``).
    source_column: int | None = None
    num_columns: int | None = None
    # The same of JSON lines.
    source_field: str = "article"
    # Put before every source of a file; a task has its own.
    prefix: str = ""
    # A task or mixture of seqio's, instead of a file.
    mixture_or_task: str | None = None
    split: str = "validation"
    # Modules that register tasks when imported; the paper's tasks are known without.
    task_modules: tuple | str | None = ()

    def check_given(self) -> None:
        """Raises ``InputError`` unless there is a file or a task."""
        if not isinstance(self.data, str | None) or (self.data or self.mixture_or_task) is None:
            raise InputError(f"data is {self.data!r}: give a file of pairs, or mixture_or_task")


def generator_of(target: LoadedModel) -> Generator:
    """A generator without a draft.

    Not ``Generator.load``: that would read the target again where drafts are made of it,
    too, and an XXL fits a device once.
    """
    return Generator(
        target=bind(target.params, target.config),
        vocabulary=target.vocabulary,
        max_source_len=target.metadata.get("max_source_length", DEFAULT_MAX_SOURCE_LENGTH),
    )


def read_texts(
    options: InputOptions, generator: Generator, decoding: GenerateOptions, limit: int | None = None
) -> list[str]:
    """The first ``limit`` inputs that the target takes, all of them with None.

    Of a task, they are among its first ``limit`` examples: it may be of any length.

    Raises:
      InputError: the file or task cannot be read, or has no such input.
    """
    read = EvaluationOptions(
        data=options.data,
        source_column=options.source_column,
        # The references are not looked at.
        target_column=options.source_column,
        num_columns=options.num_columns,
        source_field=options.source_field,
        target_field=options.source_field,
        prefix=options.prefix,
        mixture_or_task=options.mixture_or_task,
        split=options.split,
        task_modules=options.task_modules,
        limit=limit if options.mixture_or_task else None,
    )
    pairs = [pair for part in read_sets(read, generator.vocabulary) for pair in part.pairs]
    name = options.data or options.mixture_or_task
    texts, num_skipped = [], 0
    for source, _ in pairs:
        if len(texts) == limit:
            break
        if fits(generator, source, decoding):
            texts.append(source)
        else:
            num_skipped += 1
    if not texts:
        raise InputError(f"{name} has no input that the target takes: give another, or truncate")
    if num_skipped:
        logging.getLogger(__name__).warning(
            "%d of %d inputs of %s are empty or too long and left out: truncate cuts long ones",
            num_skipped,
            len(texts) + num_skipped,
            name,
        )
    return texts


def without_folder(draft: str) -> str:
    """``ngram:/home/me/tables`` as ``ngram:tables``."""
    kind, colon, argument = draft.rpartition(":")
    return f"{kind}{colon}{Path(argument).name}"
