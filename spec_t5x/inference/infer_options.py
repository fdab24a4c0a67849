"""Options of bulk inference, besides models and decoding; imports no JAX, for ``--help``."""

import dataclasses
import re

from spec_t5x.data.task_options import TaskOptions
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.machine.paths import expanded
from spec_t5x.options import check_types, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of a run in several processes, with T5X's names."""

    multiprocess: bool = option(
        False, "find the other processes from the environment (Cloud TPU, Slurm, Open MPI)"
    )
    coordinator_address: str | None = option(None, "address of process 0", "HOST:PORT")
    process_count: int | None = option(None, "number of processes")
    process_index: int | None = option(None, "index of this process, from 0")

    def __post_init__(self):
        check_types(self)
        address, count, index = self.coordinator_address, self.process_count, self.process_index
        if (address, count, index) == (None, None, None):
            return
        if None in (address, count, index) or not 0 <= index < count:
            raise InputError(
                f"coordinator_address is {address}, process_count {count}, process_index {index}: "
                "give all three, and an index from 0 to below the count"
            )
        # With an address of another form JAX crashes or waits for minutes.
        form = r"(dns:///|ipv[46]:)?(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5})"
        if not (found := re.fullmatch(form, address)) or not 0 < int(found[3]) < 2**16:
            raise InputError(f"coordinator_address is {address!r}: give HOST:PORT (node0:1234)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferOptions(TaskOptions):
    """Options of bulk inference: inputs (a file or a seqio task), outputs, workers, devices."""

    input: str | None = option(
        None, "JSON lines (.jsonl, .json), or a text on each line; gzipped or not", "FILE"
    )
    field: str | None = option(
        None, "field of a JSON line that holds the text (default: inputs, input or text)", "NAME"
    )
    split: str = option("validation", "split of the task", "NAME")
    output_dir: str | None = option(None, "directory for shards and predictions.jsonl", "DIR")
    shard_size: int = option(1024, "inputs in a shard; a killed run repeats unfinished shards")
    overwrite: bool = option(
        False, "delete the outputs of an earlier run in the directory and start anew"
    )
    shard_index: int | None = option(
        None, "index of this worker, which decodes every shard_count-th shard from there on"
    )
    shard_count: int | None = option(
        None, "number of independent workers; the last to finish joins the shards"
    )
    merge: bool = option(False, "only join the shards in output_dir into predictions.jsonl")
    model_parallel: int = option(1, "devices of this machine that share one model")

    @property
    def workers(self) -> tuple[int, int]:
        """Index of this worker and number of workers; ``(0, 1)`` without ``shard_count``."""
        return (0, 1) if self.shard_count is None else (self.shard_index, self.shard_count)

    def check(self) -> None:
        """Raises ``InputError`` for a wrong type or range, or values that exclude each other."""
        check_types(self)
        if not self.output_dir:
            raise InputError(f"output_dir is {self.output_dir!r}: give --output_dir DIR")
        for name in ("output_dir", "input"):
            if "://" in (path := getattr(self, name) or ""):
                raise InputError(f"{name} is {path}: give a path of a file system that is shared")
            expanded(path)  # raises if it cannot
        index, count = self.shard_index, self.shard_count
        if (index is None) != (count is None) or (count is not None and not 0 <= index < count):
            raise InputError(
                f"shard_index is {index} and shard_count {count}: give both, and an index from 0 "
                "to below the count"
            )
        if count is not None and self.overwrite:
            raise InputError(
                "overwrite would delete what other workers have written: delete "
                f"{self.output_dir} before the first of them starts"
            )
        if self.merge:
            return
        if (self.input is None) == (self.mixture_or_task is None):
            raise InputError(
                f"input is {self.input!r} and mixture_or_task {self.mixture_or_task!r}: give one"
            )
        if self.input == "-":
            raise InputError(
                "input is standard input, which cannot be read again after a restart: give a "
                "file, or use spec-t5x generate"
            )
        if self.input is not None and self.overwrite:
            path, output = (expanded(p).resolve() for p in (self.input, self.output_dir))
            if path.parent == output:
                raise InputError(f"input is {self.input}, which overwrite may delete: move it")
        if self.field is not None and self.mixture_or_task:
            raise InputError(f"field is {self.field!r}, which only JSON lines have: leave it out")
        check_numbers(1, 2**31 - 1, shard_size=self.shard_size, model_parallel=self.model_parallel)
        self.check_task()
