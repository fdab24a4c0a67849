"""A run from its inputs to one file of answers.

    start     the lock; one reading of the inputs; the manifest, written or compared
    decode    the shards that are not there yet, each written whole
    finish    process 0 waits for the other processes and joins all shards

The directory is all the state that there is. A shard is there under its name or is decoded
again, which gives the same bytes; so a run may be killed between any two system calls.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from spec_t5x.errors import InputError
from spec_t5x.generation import AUTO, GenerateOptions, Generator
from spec_t5x.generation.left_out import Learned
from spec_t5x.inference import processes, run_directory
from spec_t5x.inference.answering import Answerer, error_of
from spec_t5x.inference.decoding_progress import DecodingProgress
from spec_t5x.inference.infer_options import InferOptions
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.processes import Hosts
from spec_t5x.inference.run_directory import COSTS, MANIFEST, Manifest, Shards, read_manifest
from spec_t5x.inference.signals import Stopped, stopping
from spec_t5x.inference.sources import Source, digest, read_shards, survey

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
    seconds: float
    # Why the draft was left out, where it mostly was.
    verdict: str | None = None


def infer(
    options: InferOptions,
    decoding: GenerateOptions,
    source: Source,
    load: Callable[[Placement, Learned | None], Generator],
    *,
    settings: dict[str, Any],
    hosts: Hosts | None = None,
) -> Report:
    """Answers every input of ``source`` in ``options.output_dir``.

    Args:
      options: where to and how; ``check`` is called.
      decoding: how to decode.
      source: the inputs.
      load: reads the pair for some devices, given what the run knows of the draft; not called
        when all shards are there.
      settings: what else decides the answers, above all the checkpoints.
      hosts: this process among those of the run.

    Raises:
      InputError: an option, an input or a file that cannot be used. Finished shards stay.
      Stopped: SIGTERM or SIGINT came, with how far the run is. Finished shards stay.
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
        except Stopped as stopped:
            raise Stopped(stopped.number, run.how_far()) from stopped


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
            held.enter_context(processes.locked(self.directory, self.hosts.index))
        with self.hosts.together():
            if self.hosts.index == 0:
                processes.check_alone(self.directory, self.hosts.count)
                count, digests = survey(self.source, self.options.shard_size, self.progress.reading)
                now = Manifest(
                    source=self.source.name, count=count, digests=digests, settings=settings
                )
                run_directory.start(self.directory, now, overwrite=self.options.overwrite)
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
            shards = self._shards(manifest)
            # Before any process writes one: all of them see the same.
            return shards, shards.unfinished()

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

    def _shards(self, manifest: Manifest) -> Shards:
        size = manifest.settings["shard_size"]
        return Shards(directory=self.directory, total=manifest.count, size=size)

    def _placement(self) -> Placement:
        return Placement.create(self.options.model_parallel, self.decoding.batch_size)

    def decode(
        self,
        shards: Shards,
        unfinished: list[int],
        load: Callable[[Placement, Learned | None], Generator],
    ) -> str | None:
        """Decodes and writes this process's part of the unfinished shards.

        Returns:
          Why the draft was left out of the last of them, where it mostly was.
        """
        if not unfinished:
            self.hosts.part()
            return None
        with self.hosts.together():
            placement = self._placement()
            generator = placement.generator(load(placement, self._learned()))
            answerer = Answerer(generator=generator, options=self.decoding, placement=placement)
        if self.decoding.gamma == AUTO and generator.may_draft:
            self._share_costs(answerer, shards, unfinished[0])
        self.hosts.part()
        mine = unfinished[self.hosts.index :: self.hosts.count]
        left = sum(len(shards.indices(shard)) for shard in unfinished)
        self.progress.decoding(sum(len(shards.indices(s)) for s in mine), shards.total - left)
        digests = read_manifest(self.directory).digests
        for shard, raws in read_shards(self.source, shards.size, mine):
            if digest(raws) != digests[shard]:
                raise InputError(
                    f"{self.source.name} has changed since the run started (shard {shard}): "
                    "give the inputs as they were, or --overwrite to start over"
                )
            items = map(self.source.item, shards.indices(shard), raws)
            shards.write(shard, answerer.lines(list(items), self.progress.count))
        return answerer.verdict

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
        with self.hosts.together():
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
                answerer.generator.assume(self.decoding, learned.costs)

    def finish(self, shards: Shards, unfinished: list[int]) -> Report:
        """The report; process 0 first waits for the other processes and joins all shards."""
        tally, errors = self.progress.tally, []
        is_first = self.hosts.index == 0
        if is_first:
            self._wait(shards, unfinished)
            if not shards.merged.exists():
                shards.merge()
            errors = [error for line in shards.lines() if (error := error_of(line))]
        return Report(
            merged=shards.merged if is_first else None,
            inputs=shards.total if is_first else tally.inputs,
            errors=len(errors) if is_first else tally.errors,
            named=errors[:_NAMED],
            tokens=tally.tokens,
            block_efficiency=tally.block_efficiency,
            seconds=self.progress.seconds,
        )

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
        shards = self._shards(manifest)
        done = shards.count - len(shards.unfinished())
        return (
            f"with {done} of {shards.count} shards finished in {self.directory}: give the same "
            "command again to resume"
        )
