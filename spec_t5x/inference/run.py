"""A run from its inputs to one file of answers.

    begin     the lock; one reading of the inputs; the manifest, written or compared
    decode    the shards that are not there yet, each written whole
    finish    process 0 waits for all shards and joins them

The directory is all the state there is. A shard is there under its name or has to be
decoded again, which gives the same bytes; so a run may be killed between any two of the
system's calls.
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
from spec_t5x.inference import locks
from spec_t5x.inference.answering import Answerer
from spec_t5x.inference.hosts import Hosts
from spec_t5x.inference.inputs import Source, Survey, digest, read_shards, survey
from spec_t5x.inference.manifest import NAME as MANIFEST_NAME
from spec_t5x.inference.manifest import Manifest, check_same, read_manifest
from spec_t5x.inference.options import InferOptions
from spec_t5x.inference.placement import Placement
from spec_t5x.inference.progress import Progress
from spec_t5x.inference.shards import (
    COSTS,
    Shards,
    error_of,
    holds_answers,
    remove_answers,
    write,
)
from spec_t5x.inference.signals import Stopped, stopping
from spec_t5x.loops.pace import Costs
from spec_t5x.machine.atomic import remove_unfinished

# Seconds between two looks at what the other processes have written.
_POLL = 0.5
# Seconds in which every process sees what another has written.
_LATE = 2.0
# Bad inputs that a report names one by one.
_NAMED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """How a run ended, for this process."""

    # All answers; None where another process joins them, or nobody does.
    merged: Path | None
    inputs: int
    # Inputs without an answer, and what is wrong with the first of them.
    errors: int
    named: list[str]
    # Of this process, since it was started.
    tokens: int
    block_efficiency: float
    seconds: float


def infer(
    options: InferOptions,
    decoding: GenerateOptions,
    source: Source,
    load: Callable[[Placement], Generator],
    *,
    settings: dict[str, Any],
    hosts: Hosts | None = None,
    progress: Progress | None = None,
) -> Report:
    """Answers every input of ``source`` in ``options.output_dir``.

    Args:
      options: where to and how; ``check`` is called.
      decoding: how to decode.
      source: the inputs.
      load: reads the pair for some devices; not called when all shards are there.
      settings: what else decides the answers, above all the checkpoints.
      hosts: this process among those of the run.
      progress: hears where the run stands.

    Raises:
      InputError: see the parts. Finished shards stay.
      InterruptedRun: SIGTERM or SIGINT came. Finished shards stay.
    """
    options.check()
    progress = progress or Progress()
    run = _Run(options, decoding, source, hosts or Hosts(), progress)
    with stopping():
        try:
            with contextlib.ExitStack() as held, progress:
                shards, unfinished = run.begin(settings, held)
                run.decode(shards, unfinished, load)
                return run.finish(shards, unfinished)
        except Stopped as stopped:
            raise InterruptedRun(stopped.number, _how_far(options)) from stopped


class InterruptedRun(Stopped):
    """A signal ended the run; the message says how far it had come."""

    def __init__(self, number: int, message: str):
        super().__init__(number)
        self.message = message


@dataclasses.dataclass(frozen=True)
class _Run:
    options: InferOptions
    decoding: GenerateOptions
    source: Source
    hosts: Hosts
    progress: Progress

    @property
    def directory(self) -> Path:
        return Path(self.options.output_dir).expanduser()

    def begin(
        self, settings: dict[str, Any], held: contextlib.ExitStack
    ) -> tuple[Shards, list[int]]:
        """The run's shards, and those that are not there yet.

        The manifest is written by process 0, and compared by all the others. ``held``
        gets this process's lock on the directory.
        """
        with self.hosts.together():
            settings = self._settings(settings)
            self._make_directory()
            held.enter_context(locks.held(self.directory, self.hosts.index))
        with self.hosts.together():
            if self.hosts.index == 0:
                locks.check_alone(self.directory, self.hosts.count)
                self._write_manifest(settings)
        with self.hosts.together():
            manifest = read_manifest(self.directory)
            if manifest is None:
                raise InputError(
                    f"{self.directory} has no {MANIFEST_NAME} in this process: give all "
                    "processes one directory that they share"
                )
            if self.hosts.index > 0:
                known = Survey(count=manifest.count, digests=manifest.digests)
                now = Manifest.create(manifest.source, known, settings)
                check_same(manifest, now, self.directory)
            shards = Shards(
                directory=self.directory, total=manifest.count, size=self.options.shard_size
            )
            # Before any process goes on to write: all of them see the same.
            return shards, shards.unfinished()

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make {self.directory} ({error.strerror}): give another --output_dir"
            ) from error

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

    def _write_manifest(self, settings: dict[str, Any]) -> None:
        """Writes the manifest, or compares the one that is there."""
        remove_unfinished(self.directory)
        found = survey(self.source, self.options.shard_size, self.progress.reading)
        manifest = Manifest.create(self.source.name, found, settings)
        if self.options.overwrite:
            remove_answers(self.directory)
        if not holds_answers(self.directory):
            # Nothing to be mixed with: a run that wrote no shard may be begun differently.
            write(self.directory / MANIFEST_NAME, [manifest.content()], MANIFEST_NAME)
            return
        before = read_manifest(self.directory)
        if before is None:
            raise InputError(
                f"{self.directory} holds predictions and no {MANIFEST_NAME}: give another "
                "--output_dir, or --overwrite to start anew"
            )
        check_same(before, manifest, self.directory)

    def _placement(self) -> Placement:
        return Placement.create(self.options.model_parallel, self.decoding.batch_size)

    def decode(
        self, shards: Shards, unfinished: list[int], load: Callable[[Placement], Generator]
    ) -> None:
        """Decodes and writes this process's part of the unfinished shards."""
        if not unfinished:
            self.hosts.part()
            return
        with self.hosts.together():
            placement = self._placement()
            generator = placement.generator(load(placement))
            answerer = Answerer(generator=generator, options=self.decoding, placement=placement)
            if self.options.strict and self.hosts.index == 0:
                self._check_all(answerer)
        if self.decoding.gamma == AUTO and generator.draft is not None:
            self._settle_costs(answerer, unfinished[0])
        self.hosts.part()
        mine = unfinished[self.hosts.index :: self.hosts.count]
        left = sum(len(shards.indices(shard)) for shard in unfinished)
        self.progress.decoding(sum(len(shards.indices(s)) for s in mine), shards.total - left)
        digests = read_manifest(self.directory).digests
        for shard, raws in read_shards(self.source, self.options.shard_size, mine):
            if digest(raws) != digests[shard]:
                raise InputError(
                    f"{self.source.name} has changed since the run began (shard {shard}): "
                    "give the inputs as they were, or --overwrite to start anew"
                )
            items = map(self.source.item, shards.indices(shard), raws)
            shards.write(shard, answerer.lines(list(items), self.progress.count))

    def _settle_costs(self, answerer: Answerer, shard: int) -> None:
        """What speculation costs, for all processes and all of the run the same.

        Together with the inputs it decides how many tokens are drafted, and so the bytes.
        """
        path = self.directory / COSTS
        with self.hosts.together():
            if self.hosts.index == 0 and not path.exists():
                ((_, raws),) = read_shards(self.source, self.options.shard_size, [shard])
                size = self.options.shard_size
                items = map(self.source.item, range(shard * size, (shard + 1) * size), raws)
                costs = answerer.costs(list(items))
                if costs is not None:
                    content = json.dumps(dataclasses.asdict(costs)).encode() + b"\n"
                    write(path, [content], COSTS)
        with self.hosts.together():
            if path.exists():
                answerer.generator.assume(self.decoding, _read_costs(path))

    def _check_all(self, answerer: Answerer) -> None:
        """Every input can be decoded, for ``strict``."""
        errors, named = 0, []
        for index, raw in enumerate(self.source.raw()):
            item = self.source.item(index, raw)
            try:
                answerer.ids(item)
            except InputError as error:
                errors += 1
                if len(named) < _NAMED:
                    named.append(f"{item.place[0]} {item.place[1]}: {error}")
        if errors:
            for text in named:
                self.progress.say(text)
            raise InputError(
                f"{errors} inputs of {self.source.name} cannot be decoded, the first is "
                f"{named[0]}; leave out --strict to answer the others"
            )

    def finish(self, shards: Shards, unfinished: list[int]) -> Report:
        """The report; process 0 first waits for all shards and joins them."""
        tally = self.progress.tally
        report = Report(
            merged=None,
            inputs=tally.inputs,
            errors=tally.errors,
            named=[],
            tokens=tally.tokens,
            block_efficiency=tally.block_efficiency,
            seconds=self.progress.seconds,
        )
        if self.hosts.index > 0:
            return report
        self._wait(shards, unfinished)
        errors = _Errors()
        if self.options.merge and not shards.merged.exists():
            shards.merge(errors.see)
        else:
            for line in shards.lines():
                errors.see(line)
        return dataclasses.replace(
            report,
            merged=shards.merged if self.options.merge else None,
            inputs=shards.total,
            errors=errors.count,
            named=errors.named,
        )

    def _wait(self, shards: Shards, unfinished: list[int]) -> None:
        """Until the other processes have written their shards.

        Raises:
          InputError: one of them has ended before.
        """
        owners = {shard: place % self.hosts.count for place, shard in enumerate(unfinished)}
        while missing := shards.unfinished():
            lost = [s for s in missing if not locks.is_held(self.directory, owners[s])]
            # One that has just finished holds no lock either.
            lost = [s for s in lost if s in shards.unfinished()]
            if lost:
                # A shared file system may show a new file late.
                time.sleep(_LATE)
                lost = [s for s in lost if s in shards.unfinished()]
            if lost:
                owner = owners[lost[0]]
                count = sum(owners[shard] == owner for shard in lost)
                raise InputError(
                    f"process {owner} ended before {count} of its shards were written, the first "
                    f"is {lost[0]}: see its message, and give the same command again"
                )
            time.sleep(_POLL)


def _read_costs(path: Path) -> Costs:
    try:
        return Costs.parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, InputError) as error:
        raise InputError(f"{path} cannot be read ({error}): give --overwrite") from error


@dataclasses.dataclass
class _Errors:
    """The inputs without an answer, as the lines tell."""

    count: int = 0
    named: list[str] = dataclasses.field(default_factory=list)

    def see(self, line: bytes) -> None:
        error = error_of(line)
        if error is None:
            return
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(error)


def _how_far(options: InferOptions) -> str:
    directory = Path(options.output_dir).expanduser()
    manifest = read_manifest(directory)
    if manifest is None:
        return "before anything was written"
    size = manifest.settings["shard_size"]
    shards = Shards(directory=directory, total=manifest.count, size=size)
    done = shards.count - len(shards.unfinished())
    return (
        f"with {done} of {shards.count} shards finished in {directory}: give the same command "
        "again to go on"
    )
