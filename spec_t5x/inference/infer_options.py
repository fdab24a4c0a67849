"""Options of bulk inference, besides models and decoding."""

import dataclasses

import gin

from spec_t5x.data.task_options import TaskOptions
from spec_t5x.errors import InputError, check_at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferOptions(TaskOptions):
    """Where the inputs are and where the answers go.

    Inputs are those of a file (``input``) or of a seqio task (``mixture_or_task``).
    """

    # A directory for the answers; it is made if it is not there.
    output_dir: str | None = None
    # JSON lines or plain lines, gzipped or not.
    input: str | None = None
    # The field of a JSON line that holds the text; None takes inputs, input or text, where the
    # file's name ends in .jsonl, .json or .ndjson.
    field: str | None = None
    # Of a task.
    split: str = "validation"
    # Inputs in a shard: what a kill costs at most.
    shard_size: int = 1024
    # Delete an earlier run's answers and start over.
    overwrite: bool = False
    # This worker among several that know nothing of one another: it answers the shards whose
    # number, modulo the count, is the index.
    shard_index: int | None = None
    shard_count: int | None = None
    # Nothing but joining the shards of such workers.
    merge: bool = False
    # Devices of this machine that share one model; the others hold replicas.
    model_parallel: int = 1

    def check(self) -> None:
        """Raises ``InputError`` for a value of the wrong kind, or two that exclude each other."""
        if not isinstance(self.output_dir, str) or not self.output_dir:
            raise InputError(f"output_dir is {self.output_dir!r}: give --output_dir DIR")
        for name in ("output_dir", "input"):
            if "://" in (getattr(self, name) or ""):
                raise InputError(
                    f"{name} is {getattr(self, name)}: give a path, of a file system that all "
                    "processes share"
                )
        if (self.shard_index is None) != (self.shard_count is None) or (
            self.shard_count is not None and not 0 <= self.shard_index < self.shard_count
        ):
            raise InputError(
                f"shard_index is {self.shard_index} and shard_count {self.shard_count}: give both, "
                "and an index from 0 to below the count"
            )
        if self.shard_count is not None and self.overwrite:
            raise InputError(
                "overwrite would delete what other workers have written: delete "
                f"{self.output_dir} before the first of them starts"
            )
        if self.merge:
            return
        if (self.input is None) == (self.mixture_or_task is None):
            raise InputError(
                f"input is {self.input!r} and mixture_or_task {self.mixture_or_task!r}: give one "
                "of them"
            )
        if self.input == "-":
            raise InputError(
                "input is standard input, which cannot be read again after a restart: give a "
                "file, or use spec-t5x generate"
            )
        if self.field is not None and self.mixture_or_task:
            raise InputError(f"field is {self.field!r}, which only JSON lines have: leave it out")
        check_at_least(self, shard_size=1, model_parallel=1)
        self.check_task()


gin.external_configurable(InferOptions, module="spec_t5x")
