"""Lines of text from a seqio task, as language models are trained on: lm1b through TFDS.

Imports seqio, and with it TensorFlow.
"""

from collections.abc import Iterator, Sequence

from spec_t5x.data.task_examples import find_tasks, read_features
from spec_t5x.errors import InputError


def read_task_lines(
    name: str,
    split: str,
    *,
    feature: str = "text",
    modules: Sequence[str] = (),
    limit: int | None = None,
) -> Iterator[str]:
    """Yields the text of each example, without the empty ones, always in one order.

    Args:
        name: of a task or mixture in seqio's registry; ``lm1b`` is there without modules.
        split: "train", "test", or what the task has.
        feature: which holds the text.
        modules: imported first; they register tasks.
        limit: take the first so many examples of each task.

    Raises:
        InputError: no such task, data that cannot be read, or no such feature.
    """
    for task in find_tasks(name, modules):
        for features in read_features(task, split, None, limit):
            text = features.get(feature)
            if not isinstance(text, bytes):
                known = ", ".join(sorted(features))
                raise InputError(
                    f"task {task.name} has no text {feature!r}: give one of its features ({known})"
                )
            if line := " ".join(text.decode().split()):
                yield line
