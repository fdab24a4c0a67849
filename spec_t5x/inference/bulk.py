"""A run from its inputs to one file of answers.

    start     the lock; one reading of the inputs; the manifest, written or compared
    decode    the shards that are not there yet, each written whole
    finish    process 0 waits for the other processes and joins all shards; of workers that know
              nothing of one another, the last

The directory is all the state that there is. A shard is there under its name or is decoded
again, which gives the same bytes; so a run may be killed between any two system calls.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from spec_t5x.errors import InputError
from spec_t5x.generation import AUTO, GenerateOptions, Generator
from spec_t5x.inference import processes, run_directory
from spec_t5x.inference.answering import Answerer, Learned, Tally, error_of
from spec_t5x.inference.decoding_progress import DecodingProgress
from spec_t5x.inference.infer_options import InferOptions
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.processes import Hosts
from spec_t5x.inference.run_directory import COSTS, MANIFEST, Manifest, Shards, read_manifest
from spec_t5x.inference.signals import Interrupted, stopping
from spec_t5x.inference.sources import Item, Source, digest, read_shards, survey
from spec_t5x.machine import atomic

# Seconds in which every process sees what another has written.
_LATE = 2.0
# Bad inputs that a report names one by one.
_NAMED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """How a run ended, for this process."""

    # All answers; None where another process joins them.
    merged: Path | None
    inputs: int
    # Inputs without an answer, and what is wrong with the first of them.
    errors: int
    named: list[str]
    # Of this process, since it was started.
    tokens: int
    block_efficiency: float
    # The share of the rows in all target calls that had not ended.
    occupancy: float
    seconds: float
    # Shards that other workers have not written yet.
    shards_left: int = 0
    # Why the draft was left out, where it mostly was.
    verdict: str | None = None


def infer(
    options: InferOptions,
    decoding: GenerateOptions,
    source: Source,
    load: Callable[[Placement], Generator],
    *,
    settings: dict[str, Any],
    hosts: Hosts | None = None,
) -> Report:
    """Answers every input of ``source`` in ``options.output_dir``.

    Args:
      options: where to and how; ``check`` is called.
      decoding: how to decode.
      source: the inputs.
      load: reads the pair for some devices; not called when all shards are there.
      settings: what else decides the answers, above all the checkpoints.
      hosts: this process among those of the run.

    Raises:
      InputError: an option, an input or a file that cannot be used. Finished shards stay.
      Interrupted: SIGTERM or SIGINT came, with how far the run is. Finished shards stay.
    """
    options.check()
    progress = DecodingProgress()
    run = _Run(options, decoding, source, hosts or Hosts(), progress)
    with stopping():
        try:
            with contextlib.ExitStack() as held, progress:
                shards, unfinished = run.start(settings, held)
                verdict = run.decode(shards, unfinished, load)
                return dataclasses.replace(run.finish(shards, unfinished), verdict=verdict)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.number, run.how_far()) from interrupted


def merge(directory: Path) -> Report:
    """Joins the shards that workers have written.

    Raises:
      InputError: there is no run, or a shard of it is missing or damaged.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise InputError(f"{directory} has no {MANIFEST}: give the --output_dir of a run")
    shards = _shards(directory, manifest)
    if missing := shards.unfinished():
        raise InputError(
            f"{len(missing)} of {shards.count} shards are missing, the first is {missing[0]}: run "
            f"the worker of each, --shard_index N modulo --shard_count ({missing[0]} modulo the "
            "count)"
        )
    _merge_once(shards)
    return _report_of_all(shards, Tally(), 0.0)


@dataclasses.dataclass(frozen=True)
class _Run:
    options: InferOptions
    decoding: GenerateOptions
    source: Source
    hosts: Hosts
    progress: DecodingProgress

    @property
    def directory(self) -> Path:
        return Path(self.options.output_dir).expanduser()

    def start(
        self, settings: dict[str, Any], held: contextlib.ExitStack
    ) -> tuple[Shards, list[int]]:
        """The run's shards, and those that are not there yet.

        The manifest is written by process 0, and compared by all the others. ``held``
        gets this process's lock on the directory.
        """
        with self.hosts.together():
            settings = json.loads(json.dumps(self._settings(settings)))
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"cannot make {self.directory} ({error.strerror}): give another --output_dir"
                ) from error
            number = self.options.shard_index if self._is_worker else self.hosts.index
            held.enter_context(processes.locked(self.directory, number))
        if self._is_worker:
            with processes.one_at_a_time(self.directory):
                manifest = read_manifest(self.directory)
                if manifest is None:
                    manifest = self._begin(settings)
            manifest.check_same(dataclasses.replace(manifest, settings=settings), self.directory)
            shards = _shards(self.directory, manifest)
            return shards, shards.unfinished()
        with self.hosts.together():
            if self.hosts.index == 0:
                processes.check_alone(self.directory, self.hosts.count)
                self._begin(settings)
        with self.hosts.together():
            manifest = read_manifest(self.directory)
            if manifest is None:
                raise InputError(
                    f"{self.directory} has no {MANIFEST} in this process: give all "
                    "processes one directory that they share"
                )
            if self.hosts.index > 0:
                now = dataclasses.replace(manifest, settings=settings)
                manifest.check_same(now, self.directory)
            shards = _shards(self.directory, manifest)
            # Before any process writes one: all of them see the same.
            return shards, shards.unfinished()

    @property
    def _is_worker(self) -> bool:
        """Whether this process knows nothing of the others."""
        return self.options.shard_count is not None

    def _begin(self, settings: dict[str, Any]) -> Manifest:
        """Reads the inputs once, and writes the manifest or compares it."""
        count, digests = survey(self.source, self.options.shard_size, self.progress.reading)
        now = Manifest(source=self.source.name, count=count, digests=digests, settings=settings)
        run_directory.start(self.directory, now, overwrite=self.options.overwrite)
        return now

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            **settings,
            **self.source.settings,
            "shard_size": self.options.shard_size,
            **dataclasses.asdict(self.decoding),
            # They decide in which order numbers are added up, and so the last digits.
            "platform": jax.default_backend(),
            "device_kind": jax.devices()[0].device_kind,
            "models_and_devices": self._placement().shape,
            "jax": jax.__version__,
        }

    def _placement(self) -> Placement:
        return Placement.create(self.options.model_parallel, self.decoding.batch_size)

    def decode(
        self,
        shards: Shards,
        unfinished: list[int],
        load: Callable[[Placement], Generator],
    ) -> str | None:
        """Decodes and writes this process's part of the unfinished shards.

        Returns:
          Why the draft was left out of the last of them, where it mostly was.
        """
        mine = self._mine(unfinished)
        if not (mine if self._is_worker else unfinished):
            self.hosts.part()
            return None
        with self.hosts.together():
            placement = self._placement()
            generator = placement.generator(load(placement))
            answerer = Answerer(generator=generator, options=self.decoding, placement=placement)
        if self.decoding.gamma == AUTO and generator.draft is not None:
            self._share_costs(answerer, shards, unfinished[0])
        self.hosts.part()
        left = sum(len(shards.indices(shard)) for shard in unfinished)
        self.progress.decoding(sum(len(shards.indices(s)) for s in mine), shards.total - left)
        for shard, lines in answerer.shards(self._read(shards, mine), self.progress.count):
            shards.write(shard, lines)
        return answerer.verdict

    def _read(self, shards: Shards, numbers: list[int]) -> Iterator[tuple[int, list[Item]]]:
        """The inputs of some shards, which are those that the run started with."""
        digests = read_manifest(self.directory).digests
        for shard, raws in read_shards(self.source, shards.size, numbers):
            if digest(raws) != digests[shard]:
                raise InputError(
                    f"{self.source.name} has changed since the run started (shard {shard}): "
                    "give the inputs as they were, or --overwrite to start over"
                )
            yield shard, list(map(self.source.item, shards.indices(shard), raws))

    def _mine(self, unfinished: list[int]) -> list[int]:
        """This process's part. A worker's does not depend on what others have finished."""
        if self._is_worker:
            index, count = self.options.shard_index, self.options.shard_count
            return [shard for shard in unfinished if shard % count == index]
        return unfinished[self.hosts.index :: self.hosts.count]

    def _learned(self) -> Learned | None:
        """What this run knows of its draft since it began."""
        path = self.directory / COSTS
        if not path.exists():
            return None
        try:
            return Learned.parse(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} cannot be read ({error}): give --overwrite") from error

    def _share_costs(self, answerer: Answerer, shards: Shards, shard: int) -> None:
        """What speculation costs, for all processes and all of the run the same.

        Together with the inputs it decides how many tokens are drafted, and so the bytes.
        """
        alone = contextlib.nullcontext()
        if self._is_worker:
            alone = processes.one_at_a_time(self.directory)
        with self.hosts.together(), alone:
            if self.hosts.index == 0 and self._learned() is None:
                ((_, raws),) = read_shards(self.source, shards.size, [shard])
                items = map(self.source.item, shards.indices(shard), raws)
                learned = answerer.learned(list(items))
                if learned is not None:
                    content = json.dumps(dataclasses.asdict(learned)).encode() + b"\n"
                    run_directory.write(self.directory / COSTS, [content], COSTS)
        with self.hosts.together():
            learned = self._learned()
            if learned is not None:
                answerer.assume(learned)

    def finish(self, shards: Shards, unfinished: list[int]) -> Report:
        """The report; process 0 first waits for the other processes and joins all shards.

        Of workers the last one does, whichever that is.
        """
        tally, seconds = self.progress.tally, self.progress.seconds
        left = len(shards.unfinished()) if self._is_worker else 0
        if left or self.hosts.index:
            return dataclasses.replace(_report(tally, seconds), shards_left=left)
        if self._is_worker:
            _merge_once(shards)
        else:
            self._wait(shards, unfinished)
            if not shards.merged.exists():
                shards.merge()
        return _report_of_all(shards, tally, seconds)

    def _wait(self, shards: Shards, unfinished: list[int]) -> None:
        """Until the other processes have ended."""
        for process in range(1, self.hosts.count):
            processes.wait_for(self.directory, process)
        if shards.unfinished():
            # A shared file system may show a new file late.
            time.sleep(_LATE)
        if missing := shards.unfinished():
            owner = unfinished.index(missing[0]) % self.hosts.count
            raise InputError(
                f"process {owner} ended before shard {missing[0]} was written ({len(missing)} are "
                "missing): see its message, and give the same command again"
            )

    def how_far(self) -> str:
        """Of a run that was stopped."""
        manifest = read_manifest(self.directory)
        if manifest is None:
            return "before anything was written"
        shards = _shards(self.directory, manifest)
        done = shards.count - len(shards.unfinished())
        return (
            f"with {done} of {shards.count} shards finished in {self.directory}: give the same "
            "command again to resume"
        )


def _shards(directory: Path, manifest: Manifest) -> Shards:
    size = manifest.settings["shard_size"]
    return Shards(directory=directory, total=manifest.count, size=size)


def _merge_once(shards: Shards) -> None:
    """Joins the shards of workers, unless another has."""
    with processes.one_at_a_time(shards.directory):
        if not shards.merged.exists():
            atomic.remove_unfinished(shards.directory)
            shards.merge()


def _report_of_all(shards: Shards, tally: Tally, seconds: float) -> Report:
    """Of a run whose shards are joined, of which this process decoded a part."""
    errors = [error for line in shards.lines() if (error := error_of(line))]
    return dataclasses.replace(
        _report(tally, seconds),
        merged=shards.merged,
        inputs=shards.total,
        errors=len(errors),
        named=errors[:_NAMED],
    )


def _report(tally: Tally, seconds: float) -> Report:
    """Of this process alone."""
    return Report(
        merged=None,
        inputs=tally.inputs,
        errors=tally.errors,
        named=[],
        tokens=tally.tokens,
        block_efficiency=tally.block_efficiency,
        occupancy=tally.occupancy,
        seconds=seconds,
    )
