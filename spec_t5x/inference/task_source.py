"""A seqio task or mixture as a stream of inputs.

The only module of ``inference`` that imports seqio, and with it TensorFlow.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spec_t5x.data.task_examples import read_features
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.inference.sources import PRETOKENIZED, Item
from spec_t5x.machine.extras import needed

with needed("seqio"):
    import seqio

_PRETOKENIZED = "_pretokenized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Examples of a task's split, or of a mixture's tasks one after another, as in T5X.

    The task's preprocessors make the ids, with the model's vocabulary.
    """

    # Tasks of ``task_examples.task_or_mixture``, whose ids are the vocabulary's.
    tasks: list[seqio.Task]
    split: str
    # Lengths that features are cut to; None cuts none.
    lengths: Mapping[str, int] | None
    vocabulary: Vocabulary
    # True reads what seqio's caching has written.
    cached: bool = False

    @property
    def name(self) -> str:
        """Names of the tasks, and of their split in parentheses."""
        return f"{', '.join(task.name for task in self.tasks)} ({self.split})"

    @property
    def settings(self) -> dict[str, Any]:
        """Names, split, lengths and caching of the tasks, as values of JSON."""
        lengths = None if self.lengths is None else dict(self.lengths)
        names = [task.name for task in self.tasks]
        found = {"tasks": names, "split": self.split, "task_feature_lengths": lengths}
        return found | ({"use_cached_tasks": True} if self.cached else {})

    def raw(self) -> Iterator[bytes]:
        """Yields examples as JSON; raises ``InputError`` if a task has no feature ``inputs``."""
        for task in self.tasks:
            if "inputs" not in task.output_features:
                raise InputError(f"task {task.name} has no feature inputs: give another task")
            examples = read_features(task, self.split, self.lengths, cached=self.cached)
            yield from (_to_line(task, example) for example in examples)

    def item(self, index: int, raw: bytes) -> Item:
        """Makes the input of an example, given as a line of JSON."""
        values = json.loads(raw)
        fields = values["fields"]
        return Item(
            index=index,
            place=("example", index),
            text=fields.get(PRETOKENIZED) or self.vocabulary.decode(values["ids"]),
            ids=values["ids"],
            fields=fields,
            task=values["task"],
        )


def _to_line(task: seqio.Task, example: dict[str, Any]) -> bytes:
    """Returns an example's line of JSON: its task, its ids and its ``*_pretokenized`` texts."""
    fields = {
        key: _plain(value) for key, value in sorted(example.items()) if key.endswith(_PRETOKENIZED)
    }
    line = {"task": task.name, "ids": np.asarray(example["inputs"]).tolist(), "fields": fields}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    value = np.asarray(value)
    return [_plain(entry) for entry in value] if value.dtype == object else value.tolist()
