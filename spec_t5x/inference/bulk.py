"""Bulk inference from inputs to one file of answers.

    start     takes the lock; reads the inputs once; writes or compares the manifest
    decode    decodes this worker's missing shards, and writes each whole
    finish    joins all shards, in the last worker

All state is in the directory. A shard exists under its name, or it is decoded again to the same
bytes; so a run may be killed between any two system calls. A *worker* is a process that decodes
every n-th shard; without ``shard_count`` there is one.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from spec_t5x.errors import InputError, as_input_error
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.inference import processes, run_directory
from spec_t5x.inference.answering import Answerer, Learned, Tally, error_of
from spec_t5x.inference.decoding_progress import DecodingProgress
from spec_t5x.inference.infer_options import InferOptions
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.run_directory import COSTS, MANIFEST, Manifest, Shards, read_manifest
from spec_t5x.inference.signals import Interrupted, stopping
from spec_t5x.inference.sources import Item, Source, digest, read_shards, survey
from spec_t5x.machine.description import vector_instructions
from spec_t5x.machine.operations import registered
from spec_t5x.machine.paths import expanded
from spec_t5x.names import AUTO

# Most errors that a report lists.
_NAMED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a run: for all inputs once ``merged``, before that for those of this process."""

    # File of all answers; None if shards of other workers are missing.
    merged: Path | None
    inputs: int
    # Number of inputs without an answer; once merged, the first of their errors.
    errors: int
    named: list[str]
    # Counts of this process. The ratios are None if it decoded nothing.
    tokens: int
    block_efficiency: float | None
    # Share of the rows in all target calls that had not ended.
    occupancy: float | None
    seconds: float
    # Shards that other workers have not written yet.
    shards_left: int = 0
    # The reason why most steps left the draft out; None if they did not.
    verdict: str | None = None


def infer(
    options: InferOptions,
    decoding: GenerateOptions,
    source: Source,
    load: Callable[[Placement], Generator],
    *,
    settings: dict[str, Any],
) -> Report:
    """Decodes every input of ``source`` and writes the answers to ``options.output_dir``.

    Args:
      options: the directory, shards, workers and devices; ``check`` is called.
      load: loads the models for a placement; not called if this worker's shards exist.
      settings: further settings that the answers depend on, above all the checkpoints.

    Raises:
      InputError: an option or a file is unusable, or the inputs changed. Finished shards stay.
      Interrupted: SIGTERM or SIGINT came; it tells how far the run is. Finished shards stay.
    """
    options.check()
    progress = DecodingProgress()
    run = _Run(options, decoding, source, progress)
    try:
        with stopping(), contextlib.ExitStack() as held, progress:
            shards = run.start(settings, held)
            verdict = run.decode(shards, load)
            left = len(shards.unfinished())
            if not left:
                _merge_once(shards)
            report = _report(shards, progress.tally, progress.seconds, left=left)
            return dataclasses.replace(report, verdict=verdict)
    except Interrupted as interrupted:
        raise Interrupted(interrupted.number, run.how_far()) from interrupted


def merge(directory: Path) -> Report:
    """Joins the shards that workers have written into one file; returns the run's report.

    Raises ``InputError`` if there is no run, or a shard of it is missing or damaged.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise InputError(f"{directory} has no {MANIFEST}: give the --output_dir of a run")
    shards = _shards(directory, manifest)
    if missing := shards.unfinished():
        raise InputError(
            f"{len(missing)} of {shards.count} shards are missing, the first is {missing[0]}: run "
            f"their workers (for shard {missing[0]}, --shard_index is {missing[0]} modulo "
            "--shard_count)"
        )
    _merge_once(shards)
    return _report(shards, Tally(), 0.0)


@dataclasses.dataclass(frozen=True)
class _Run:
    options: InferOptions
    decoding: GenerateOptions
    source: Source
    progress: DecodingProgress

    @property
    def directory(self) -> Path:
        return expanded(self.options.output_dir)

    def start(self, settings: dict[str, Any], held: contextlib.ExitStack) -> Shards:
        """Prepares the directory; returns the run's shards.

        The first worker writes the manifest, and the others compare theirs with it. The process
        keeps a lock on the directory until ``held`` is closed.
        """
        settings = json.loads(json.dumps(self._settings(settings)))
        with as_input_error(f"cannot make {self.directory}", "give another --output_dir", OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
        index, count = self.options.workers
        held.enter_context(processes.locked(self.directory, index))
        if count == 1:
            # Checked here to refuse at once, and below for workers that begin in the meantime.
            processes.check_alone(self.directory)
        inputs, digests = survey(self.source, self.options.shard_size, self.progress.reading)
        now = Manifest(source=self.source.name, count=inputs, digests=digests, settings=settings)
        with processes.one_at_a_time(self.directory):
            if count == 1:
                processes.check_alone(self.directory)
            # While the inputs were read, another worker may have begun the run.
            before = read_manifest(self.directory) if count > 1 else None
            if before is None:
                run_directory.start(self.directory, now, overwrite=self.options.overwrite)
            else:
                before.check_same(now, self.directory)
        return _shards(self.directory, now)

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            **settings,
            **self.source.settings,
            "shard_size": self.options.shard_size,
            **dataclasses.asdict(self.decoding),
            # The platform and devices decide the order of sums, and with it their last digits.
            "platform": jax.default_backend(),
            "device_kind": jax.devices()[0].device_kind,
            "instructions": vector_instructions() if jax.default_backend() == "cpu" else None,
            "models_and_devices": self._placement().shape,
            "kernels": [str(each) for each in registered() if (each.state() or (False,))[0]],
            "jax": jax.__version__,
        }

    def _placement(self) -> Placement:
        return Placement.create(self.options.model_parallel, self.decoding.batch_size)

    def decode(self, shards: Shards, load: Callable[[Placement], Generator]) -> str | None:
        """Decodes and writes this worker's part of the missing shards; returns ``Report.verdict``.

        Its part is every ``count``-th shard, and does not depend on the other workers.
        """
        index, count = self.options.workers
        unfinished = shards.unfinished()
        mine = [shard for shard in unfinished if shard % count == index]
        if not mine:
            return None
        placement = self._placement()
        generator = placement.generator(load(placement))
        answerer = Answerer(generator=generator, options=self.decoding, placement=placement)
        auto = self.decoding.gamma == AUTO and not self.decoding.beams
        if auto and generator.draft is not None:
            self._share_costs(answerer, shards)
        left = sum(len(shards.indices(shard)) for shard in unfinished)
        self.progress.decoding(sum(len(shards.indices(s)) for s in mine), shards.total - left)
        for shard, lines in answerer.shards(self._read(shards, mine), self.progress.count):
            shards.write(shard, lines)
        return answerer.verdict

    def _read(self, shards: Shards, numbers: list[int]) -> Iterator[tuple[int, list[Item]]]:
        """Yields number and inputs of each shard; raises ``InputError`` if the inputs changed."""
        digests = read_manifest(self.directory).digests
        for shard, raws in read_shards(self.source, shards.size, numbers):
            if digest(raws) != digests[shard]:
                raise InputError(
                    f"{self.source.name} has changed since the run started (shard {shard}): "
                    "give the inputs as they were, or --overwrite to start over"
                )
            yield shard, list(map(self.source.item, shards.indices(shard), raws))

    def _share_costs(self, answerer: Answerer, shards: Shards) -> None:
        """Sets the costs that the run's first worker measures: they decide the bytes of answers."""
        path = self.directory / COSTS
        with processes.one_at_a_time(self.directory):
            if not path.exists():
                # On the first shard with a decodable input, whether or not that shard is missing.
                read = (items for _, items in self._read(shards, list(range(shards.count))))
                learned = next(filter(None, map(answerer.learned, read)), None)
                if learned is None:
                    return
                content = json.dumps(dataclasses.asdict(learned)).encode() + b"\n"
                run_directory.write(path, [content], COSTS)
        kinds = OSError, ValueError, TypeError, KeyError
        with as_input_error(f"{path} cannot be read", "give --overwrite", *kinds):
            learned = Learned.parse(json.loads(path.read_text(encoding="utf-8")))
        answerer.assume(learned)

    def how_far(self) -> str:
        """Returns a phrase that says how many shards of a stopped run are finished."""
        manifest = read_manifest(self.directory)
        if manifest is None:
            return "before anything was written"
        shards = _shards(self.directory, manifest)
        done = shards.count - len(shards.unfinished())
        how = "without --overwrite" if self.options.overwrite else "again"
        return (
            f"with {done} of {shards.count} shards finished in {self.directory}: give the same "
            f"command {how} to resume"
        )


def _shards(directory: Path, manifest: Manifest) -> Shards:
    return Shards(directory=directory, total=manifest.count, size=manifest.settings["shard_size"])


def _merge_once(shards: Shards) -> None:
    """Joins the shards, unless another worker has done so."""
    if shards.merged.exists():
        return
    with processes.one_at_a_time(shards.directory):
        if not shards.merged.exists():
            shards.merge()


def _report(shards: Shards, tally: Tally, seconds: float, left: int = 0) -> Report:
    """Makes the report: of all inputs or, if shards are ``left``, of this process's ``tally``."""
    errors = filter(None, map(error_of, () if left else shards.lines()))
    named = list(itertools.islice(errors, _NAMED))
    return Report(
        merged=None if left else shards.merged,
        inputs=tally.inputs if left else shards.total,
        errors=tally.errors if left else len(named) + sum(1 for _ in errors),
        named=named,
        tokens=tally.tokens,
        block_efficiency=tally.block_efficiency if tally.target_calls else None,
        occupancy=tally.occupancy if tally.target_calls else None,
        seconds=seconds,
        shards_left=left,
    )
