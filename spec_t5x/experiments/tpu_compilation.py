"""Speculative decoding compiled for TPUs that are not there: does it fit, what does it bring.

From shapes alone: the whole loops, for the memory they need; a step of the target, a step
of each draft and the verifications, for what they cost. From these c, the cost of a
verification, and with the paper's acceptance rates the speed-up of each row of Table 2.
"""

import ctypes
import dataclasses
import gc
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables, tpu_programs
from spec_t5x.experiments.paper_tables import SpeedUp
from spec_t5x.experiments.tpu_chips import Chip, topology
from spec_t5x.experiments.tpu_programs import Workload
from spec_t5x.experiments.tpu_roofline import StepCost, step_cost
from spec_t5x.experiments.tpu_tiles import Caches, loop_caches
from spec_t5x.models.partitioning import bytes_per_device, make_mesh
from spec_t5x.models.sizes import size
from spec_t5x.theory.formulas import wall_time_improvement

# Acceptance rates that a pair's speed-up is given for.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile, and for what."""

    topology: str = "v4:2x2x1"
    # Names of ``models.sizes``.
    target: str = paper_tables.TARGET
    drafts: tuple[str, ...] = ("t5_1_1_small",)
    gamma: int = 7
    # Chips in (data, model).
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    work: Workload = Workload()
    # Whether to predict the rows of Table 2; None does so for the paper's target.
    table_2: bool | None = None

    def __post_init__(self):
        for name in (self.target, *self.drafts):
            size(name)
        if self.gamma < 1:
            raise InputError(f"gamma is {self.gamma}: give at least 1")
        for field in dataclasses.fields(self.work):
            value = getattr(self.work, field.name)
            if value < 1:
                raise InputError(f"{field.name} is {value}: give at least 1")
        for data, model in self.meshes:
            if data < 1 or model < 1:
                raise InputError(f"mesh {data},{model}: give at least 1 for each axis")
            if self.work.batch % data:
                raise InputError(
                    f"batch {self.work.batch} does not divide over {data} replicas: give a "
                    f"multiple of {data}"
                )
        for name in self.drafts:
            if size(name).vocab_size != size(self.target).vocab_size:
                raise InputError(
                    f"draft {name} has {size(name).vocab_size} tokens and {self.target} "
                    f"{size(self.target).vocab_size}: choose a draft of the target's family"
                )

    @property
    def wants_table_2(self) -> bool:
        """Whether the rows of Table 2 are predicted."""
        return self.target == paper_tables.TARGET if self.table_2 is None else self.table_2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one chip that a loop takes."""

    # None for the plain loop.
    draft: str | None
    gamma: int
    arguments: int
    # None where the compiler gave up for want of memory.
    temporaries: int | None
    outputs: int | None
    # Outputs that lie where arguments were.
    aliased: int | None
    program: int | None
    # Of the temporaries, what the models have cached of the texts.
    caches: Caches | None
    capacity: int

    @property
    def total(self) -> int | None:
        """All that must be there at a time."""
        if self.temporaries is None:
            return None
        return self.arguments + self.temporaries + self.outputs - self.aliased + self.program

    @property
    def fits(self) -> bool:
        """Whether a chip has as much."""
        return self.total is not None and self.total <= self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step and what it costs."""

    # "plain", "verification" or "draft".
    kind: str
    model: str
    cost: StepCost
    # By roofline.
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A speed-up by Theorem 3.8, from costs by roofline."""

    draft: str
    gamma: int
    alpha: float
    c: float
    verification_cost: float
    speed_up: float
    # The row of Table 2 that alpha and gamma are from, if any.
    paper: SpeedUp | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """All that was found for one mesh."""

    data: int
    model: int
    loops: tuple[Memory, ...]
    steps: tuple[Step, ...]
    pairs: tuple[Prediction, ...]
    table_2: tuple[Prediction, ...]


def run(options: Options, report: Callable[[str], None] = lambda _: None) -> Iterator[Result]:
    """Compiles for each mesh in turn.

    Args:
      options: what to compile.
      report: told what is being compiled.

    Raises:
      InputError: no such topology, no libtpu, or more chips asked for than it has.
    """
    chip, devices = topology(options.topology)
    # All of them, before anything is compiled.
    meshes = [_mesh(options, devices, data, model) for data, model in options.meshes]
    for mesh in meshes:
        yield _run(options, chip, mesh, report)


def predict_rows(
    options: Options, rows: Sequence[SpeedUp], report: Callable[[str], None] = lambda _: None
) -> list[Prediction]:
    """Rows of Table 2 alone, without the whole loops and their memory.

    Args:
      options: the topology, the target, the lengths and the first mesh.
      rows: what to predict.
      report: told what is being compiled.

    Raises:
      InputError: no such topology, no libtpu, or more chips asked for than it has.
    """
    chip, devices = topology(options.topology)
    mesh = _mesh(options, devices, *options.meshes[0])
    compiler = _Compiler(options, chip, mesh, report)
    return [
        compiler.predict(paper_tables.DRAFTS[row.draft], row.gamma, row.alpha, row) for row in rows
    ]


def _mesh(options: Options, devices: Sequence[jax.Device], data: int, model: int) -> Mesh:
    if data * model > len(devices):
        raise InputError(
            f"mesh {data},{model} needs {data * model} chips and {options.topology} has "
            f"{len(devices)}: choose a larger topology or a smaller mesh"
        )
    return make_mesh(data, model, devices[: data * model])


def _run(options: Options, chip: Chip, mesh: Mesh, report: Callable[[str], None]) -> Result:
    data, model = mesh.devices.shape
    compiler = _Compiler(options, chip, mesh, lambda what: report(f"{data}x{model}: {what}"))
    loops = [compiler.loop(None)] + [compiler.loop(draft) for draft in options.drafts]
    pairs = [
        compiler.predict(draft, options.gamma, alpha)
        for draft in options.drafts
        for alpha in ALPHAS
    ]
    table_2 = [
        compiler.predict(paper_tables.DRAFTS[row.draft], row.gamma, row.alpha, row)
        for row in paper_tables.TABLE_2
        if options.wants_table_2
    ]
    return Result(
        data=data,
        model=model,
        loops=tuple(loops),
        steps=tuple(compiler.steps.values()),
        pairs=tuple(pairs),
        table_2=tuple(table_2),
    )


class _Compiler:
    """Compiles for one mesh; every step once."""

    def __init__(self, options: Options, chip: Chip, mesh: Mesh, report: Callable[[str], None]):
        self.options, self.chip, self.mesh, self.report = options, chip, mesh, report
        # By kind, model and gamma.
        self.steps: dict[tuple[str, str, int], Step] = {}

    def loop(self, draft: str | None) -> Memory:
        """The memory of a whole loop: plain, or speculative with a draft."""
        options, config = self.options, size(self.options.target)
        gamma = options.gamma if draft else 0
        self.report(f"{'plain loop' if draft is None else f'speculative loop, {draft}'}")
        try:
            if draft is None:
                compiled = tpu_programs.plain_loop(config, options.work, self.mesh)
            else:
                compiled = tpu_programs.speculative_loop(
                    config, size(draft), options.work, gamma, self.mesh
                )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return self._does_not_fit(draft, gamma)
        memory = _memory(compiled, draft, gamma, options.work, self.chip)
        del compiled
        _return_memory()
        return memory

    def predict(
        self, draft: str, gamma: int, alpha: float, paper: SpeedUp | None = None
    ) -> Prediction:
        """The speed-up with a draft at an acceptance rate."""
        plain = self.plain_step(self.options.target, "plain").seconds
        c = self.plain_step(draft, "draft").seconds / plain
        verification_cost = self.verification(gamma).seconds / plain
        return Prediction(
            draft=draft,
            gamma=gamma,
            alpha=alpha,
            c=c,
            verification_cost=verification_cost,
            speed_up=wall_time_improvement(alpha, gamma, c, verification_cost),
            paper=paper,
        )

    def plain_step(self, name: str, kind: str) -> Step:
        """A step of the target, or of a draft's model."""
        if (kind, name, 0) not in self.steps:
            self.report(f"{kind} step, {name}")
            config, work = size(name), self.options.work
            cache = tpu_programs.plain_state(config, work, self.mesh).cache
            self._keep(kind, name, 0, tpu_programs.plain_step(config, work, self.mesh), cache)
        return self.steps[kind, name, 0]

    def verification(self, gamma: int) -> Step:
        """A verification by the target."""
        name = self.options.target
        if ("verification", name, gamma) not in self.steps:
            self.report(f"verification of {gamma} drafts, {name}")
            config, work = size(name), self.options.work
            cache = tpu_programs.verification_state(config, work, gamma, self.mesh).target_cache
            compiled = tpu_programs.verification(config, work, gamma, self.mesh)
            self._keep("verification", name, gamma, compiled, cache)
        return self.steps["verification", name, gamma]

    def _keep(self, kind: str, name: str, gamma: int, compiled: Compiled, cache) -> None:
        model = tpu_programs.abstract_model(size(name), self.mesh)
        cost = step_cost(compiled, model, cache, gamma + 1)
        step = Step(kind=kind, model=name, cost=cost, seconds=cost.seconds(self.chip))
        self.steps[kind, name, gamma] = step
        _return_memory()

    def _does_not_fit(self, draft: str | None, gamma: int) -> Memory:
        names = [self.options.target, *([draft] if draft else [])]
        models = [tpu_programs.abstract_model(size(name), self.mesh) for name in names]
        return Memory(
            draft=draft,
            gamma=gamma,
            arguments=bytes_per_device(models),
            temporaries=None,
            outputs=None,
            aliased=None,
            program=None,
            caches=None,
            capacity=self.chip.memory,
        )


def _memory(
    compiled: Compiled, draft: str | None, gamma: int, work: Workload, chip: Chip
) -> Memory:
    slots = work.max_decode_len + gamma + 1
    analysis = compiled.memory_analysis()
    return Memory(
        draft=draft,
        gamma=gamma,
        arguments=analysis.argument_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
        caches=loop_caches(compiled.as_text(), slots),
        capacity=chip.memory,
    )


def _return_memory() -> None:
    """Gives freed memory back to the system: libtpu leaves gigabytes with the process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def write_json(path: Path, options: Options, results: list[Result]) -> None:
    """Keeps all figures (bytes, seconds, operations), with the versions they are from."""
    report = {
        "versions": versions(),
        "options": dataclasses.asdict(options),
        "results": [_as_dict(result) for result in results],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """The versions of what compiles."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def _as_dict(result: Result) -> dict[str, Any]:
    report = dataclasses.asdict(result)
    for loop, memory in zip(report["loops"], result.loops, strict=True):
        loop.update(total=memory.total, fits=memory.fits)
    for entry, step in zip(report["steps"], result.steps, strict=True):
        entry["cost"]["bytes_read"] = step.cost.bytes_read
    return report
