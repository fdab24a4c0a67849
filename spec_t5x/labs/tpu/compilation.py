"""Memory, costs and speed-ups of speculative decoding, compiled for TPUs without hardware.

Shapes suffice to compile the whole loops, for the memory they need, and a step of the target, a
step of each draft and the verifications, for their costs. The costs give c and T(gamma + 1), and
with the paper's acceptance rates the speed-up of each row of Table 2.
"""

import ctypes
import dataclasses
import functools
import gc
import importlib.metadata
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.benchmark import paper_tables, results
from spec_t5x.labs.benchmark.paper_tables import SpeedUp
from spec_t5x.labs.benchmark.random_models import check_vocabulary
from spec_t5x.labs.tpu import programs
from spec_t5x.labs.tpu.chips import Chip, StepCost, step_cost, topology
from spec_t5x.labs.tpu.programs import Workload
from spec_t5x.models.eagle import head_config
from spec_t5x.models.partitioning import bytes_per_device, make_mesh
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, WEIGHTS
from spec_t5x.tuning.step_times import StepTimes

log = logging.getLogger(__name__)

_GIB = 2**30
# Acceptance rates for which a pair's speed-up is shown.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Models, shapes and chips to compile for."""

    topology: str = "v4:2x2x1"
    # Names of ``models.sizes``. A draft may also be the target in "int8" or "int4", or an EAGLE
    # head of its last layer: "eagle", or "eagle:WIDTH" for a narrower one.
    target: str = paper_tables.TARGET
    drafts: tuple[str, ...] = ("t5_1_1_small",)
    # Type of the target's weights; "auto" is bfloat16. Drafts of other sizes are in bfloat16.
    weights: str = AUTO
    gamma: int = 7
    # Meshes to compile for: the number of chips along the axes (data, model).
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    work: Workload = Workload()

    def __post_init__(self):
        of_sizes = [name for name in self.drafts if name not in BITS and not _is_head(name)]
        check_vocabulary(self.target, of_sizes)
        for name in filter(_is_head, self.drafts):
            head_config(size(self.target), (0,), _width(name))
        check_choice("weights", self.weights, WEIGHTS)
        check_at_least(self, gamma=1)
        check_at_least(self.work, **{field.name: 1 for field in dataclasses.fields(self.work)})
        for data, model in self.meshes:
            if data < 1 or model < 1:
                raise InputError(f"mesh {data},{model}: give at least 1 for each axis")
            if self.work.batch % data:
                raise InputError(
                    f"batch {self.work.batch} does not divide over {data} replicas: give a "
                    f"multiple of {data}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HbmUse:
    """Memory of one chip that a loop takes, in bytes."""

    # None for the plain loop.
    draft: str | None
    gamma: int
    arguments: int
    # Beside the arguments, and in all; None if the compiler found the chip's memory too small.
    temporaries: int | None = None
    total: int | None = None
    capacity: int
    fits: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Cost and time of one call of a model."""

    # "plain", "verification" or "draft".
    kind: str
    model: str
    cost: StepCost
    # Roofline time (``StepCost.seconds``).
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Speed-up by Theorem 3.8, with c and T(gamma + 1) from roofline times."""

    draft: str
    gamma: int
    alpha: float
    c: float
    verification_cost: float
    speed_up: float
    # The row of Table 2 that alpha and gamma are from; None if they are given.
    paper: SpeedUp | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one mesh of ``data`` times ``model`` chips."""

    data: int
    model: int
    loops: tuple[HbmUse, ...]
    steps: tuple[Step, ...]
    pairs: tuple[Prediction, ...]
    table_2: tuple[Prediction, ...]


def run(options: Options) -> Iterator[Result]:
    """Compiles for each mesh in turn and yields its figures.

    Raises:
      InputError: an unknown topology, no libtpu, or a mesh of more chips than the topology has.
    """
    compilers = _compilers(options)
    # The paper's rows are about its target.
    rows = paper_tables.TABLE_2 if options.target == paper_tables.TARGET else ()
    for compiler in compilers:
        data, model = compiler.mesh.devices.shape
        yield Result(
            data=data,
            model=model,
            loops=tuple(compiler.loop(draft) for draft in (None, *options.drafts)),
            pairs=tuple(
                compiler.predict(draft, options.gamma, alpha)
                for draft in options.drafts
                for alpha in ALPHAS
            ),
            table_2=compiler.predict_rows(rows),
            # Evaluated last: the predictions fill it.
            steps=tuple(compiler.steps.values()),
        )


def predict_rows(options: Options, rows: Sequence[SpeedUp]) -> tuple[Prediction, ...]:
    """Predicts rows of Table 2 on the options' first mesh, without compiling the whole loops.

    Raises:
      InputError: as ``run`` does.
    """
    return _compilers(options)[0].predict_rows(rows)


def _compilers(options: Options) -> list["_Compiler"]:
    """Returns a compiler for each mesh; compiles nothing."""
    chip, devices = topology(options.topology)
    for data, model in options.meshes:
        if data * model > len(devices):
            raise InputError(
                f"mesh {data},{model} needs {data * model} chips and {options.topology} has "
                f"{len(devices)}: choose a larger topology or a smaller mesh"
            )
    return [
        _Compiler(options, chip, make_mesh(data, model, devices[: data * model]))
        for data, model in options.meshes
    ]


class _Compiler:
    """Compiler for one mesh, which compiles each step once."""

    def __init__(self, options: Options, chip: Chip, mesh: Mesh):
        self.options, self.chip, self.mesh = options, chip, mesh
        # By kind, model and gamma.
        self.steps: dict[tuple[str, str, int], Step] = {}
        self.target = programs.abstract_model(size(options.target), mesh, options.weights)

    def loop(self, draft: str | None) -> HbmUse:
        """Compiles a whole loop, plain if ``draft`` is None; returns the memory that it needs."""
        gamma, proposer = (self.options.gamma, self.draft(draft)) if draft else (0, None)
        # A leaf that target and draft share is two arguments of the program and one in memory.
        leaves = jax.tree.leaves((self.target, proposer))
        held = bytes_per_device({id(leaf): leaf for leaf in leaves})
        use = functools.partial(HbmUse, draft=draft, gamma=gamma, capacity=self.chip.memory)
        log.info("compiling the loop, %s", f"draft {draft}" if draft else "plain")
        try:
            compiled = programs.loop(self.target, proposer, self.options.work, gamma, self.mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return use(arguments=held)
        analysis = compiled.memory_analysis()
        del compiled
        _return_memory()
        arguments = analysis.argument_size_in_bytes - bytes_per_device(leaves) + held
        # Some outputs reuse the memory of arguments.
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        total = arguments + outputs + analysis.generated_code_size_in_bytes
        total += analysis.temp_size_in_bytes
        return use(
            arguments=arguments,
            temporaries=analysis.temp_size_in_bytes,
            total=total,
            fits=total <= self.chip.memory,
        )

    def model(self, name: str) -> T5Model:
        """Returns the target, or a draft's model, with shapes in place of parameters."""
        if name in BITS:
            return self.target.rounded(BITS[name])
        if name == self.options.target:
            return self.target
        return programs.abstract_model(size(name), self.mesh)

    def draft(self, name: str) -> TransformerDraft | SelfDraft:
        """Returns a draft with shapes in place of parameters."""
        if _is_head(name):
            return programs.abstract_head(self.target, self.mesh, _width(name))
        if name in BITS:
            return SelfDraft.rounded(self.target, BITS[name])
        return TransformerDraft(programs.abstract_model(size(name), self.mesh))

    def predict(
        self, draft: str, gamma: int, alpha: float, paper: SpeedUp | None = None
    ) -> Prediction:
        """Predicts the speed-up with a draft at the acceptance rate ``alpha``."""
        # In seconds: only ratios are used.
        times = StepTimes(
            target=self.step("plain", self.options.target, 0).seconds,
            draft=self.step("draft", draft, 0).seconds,
            verification=self.step("verification", self.options.target, gamma).seconds,
        )
        return Prediction(
            draft=draft,
            gamma=gamma,
            alpha=alpha,
            c=times.c,
            verification_cost=times.verification_cost,
            speed_up=times.speed_up(alpha, gamma),
            paper=paper,
        )

    def predict_rows(self, rows: Sequence[SpeedUp]) -> tuple[Prediction, ...]:
        """Predicts rows of Table 2, with the paper's gamma and alpha."""
        return tuple(
            self.predict(paper_tables.DRAFTS[row.draft], row.gamma, row.alpha, row) for row in rows
        )

    def step(self, kind: str, name: str, gamma: int) -> Step:
        """Returns a step, compiled at first use; ``gamma`` is of a verification, or else 0."""
        if (kind, name, gamma) not in self.steps:
            log.info("compiling: %s, %s, %d tokens", kind, name, gamma + 1)
            work, mesh = self.options.work, self.mesh
            if _is_head(name):
                head = self.draft(name)
                model, room = head.model, self.options.gamma
                compiled, cache = programs.head_step(self.target, head, work, room, mesh)
            else:
                model = self.model(name)
                compiled, cache = (
                    programs.verification(model, work, gamma, mesh)
                    if kind == "verification"
                    else programs.plain_step(model, work, mesh)
                )
            cost = step_cost(compiled, model, cache, gamma + 1)
            del compiled
            _return_memory()
            seconds = cost.seconds(self.chip)
            self.steps[kind, name, gamma] = Step(kind=kind, model=name, cost=cost, seconds=seconds)
        return self.steps[kind, name, gamma]


def _is_head(draft: str) -> bool:
    return draft.partition(":")[0] == "eagle"


def _width(draft: str) -> int | None:
    """Returns the width in "eagle:WIDTH"; None for "eagle", a head as wide as the target."""
    _, _, width = draft.partition(":")
    if width and not width.isdigit():
        raise InputError(f"draft {draft!r}: give eagle, or eagle:WIDTH such as eagle:1024")
    return int(width) if width else None


def _return_memory() -> None:
    """Returns freed memory to the system: libtpu leaves gigabytes with the process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def write_json(path: Path, options: Options, found: Sequence[Result]) -> None:
    """Writes a JSON file of options, results and the compilers' versions."""
    kept = [dataclasses.asdict(result) for result in found]
    values = {"versions": versions(), "options": dataclasses.asdict(options), "results": kept}
    results.write_json(path, values)


def versions() -> dict[str, str]:
    """Returns the versions of the packages that compile."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


# --- tables ----------------------------------------------------------------------


def header(options: Options) -> str:
    """Returns a line with the target, the chips, the shapes and the compilers' versions."""
    work = options.work
    stored = "bfloat16" if options.weights == AUTO else options.weights
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{options.target} in {stored} for TPU {options.topology}: batch {work.batch}, source "
        f"{work.source_len}, at most {work.max_decode_len} tokens, gamma {options.gamma} "
        f"({made_with})"
    )


def tables(result: Result) -> list[results.Table | str]:
    """Returns a heading, and tables of the memory, steps and predictions of one mesh."""
    chips, mesh = result.data * result.model, f"data {result.data}, model {result.model}"
    parts = [
        f"## {chips} chip{'s' * (chips > 1)} ({mesh}), each with:",
        results.table(_MEMORY, result.loops),
        results.table(_STEPS, result.steps),
        _pair_table(result.pairs),
    ]
    if result.table_2:
        parts.append(results.table(_TABLE_2, result.table_2))
    return parts


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / _GIB:.2f}"


_MEMORY = {
    "loop": lambda m: "plain" if m.draft is None else f"speculative, gamma {m.gamma}",
    "draft": lambda m: m.draft or "",
    "arguments, GiB": lambda m: _gib(m.arguments),
    "temporaries, GiB": lambda m: _gib(m.temporaries),
    "in all, GiB": lambda m: f"{_gib(m.total)} of {m.capacity / _GIB:.0f}",
    "fits": lambda m: "yes" if m.fits else "NO",
}
_STEPS = {
    "step": lambda s: s.kind,
    "model": lambda s: s.model,
    "tokens": lambda s: s.cost.new_tokens,
    "compiler's Gop": lambda s: f"{s.cost.operations / 1e9:.2f}",
    "weights, GB": lambda s: f"{s.cost.weight_bytes / 1e9:.3f}",
    "caches, GB": lambda s: f"{s.cost.cache_bytes / 1e9:.3f}",
    "compiler's GB": lambda s: f"{s.cost.compiler_bytes / 1e9:.2f}",
    "collectives": lambda s: ", ".join(f"{c.count} {c.kind}" for c in s.cost.collectives) or "none",
    "sent, MB": lambda s: f"{sum(c.sent_bytes for c in s.cost.collectives) / 1e6:.3f}",
    "ms by roofline": lambda s: f"{1e3 * s.seconds:.3f}",
}
_COSTS = {
    "c": lambda p: f"{p.c:.3f}",
    "T(verify)": lambda p: f"{p.verification_cost:.3f}",
}
_TABLE_2 = {
    "task": lambda p: p.paper.task,
    "draft": lambda p: p.paper.draft,
    "temp.": lambda p: f"{p.paper.temperature:g}",
    "gamma": lambda p: p.gamma,
    "alpha": lambda p: f"{p.alpha:.2f}",
    "c, paper": lambda p: f"{p.paper.c:.2f}",
    **_COSTS,
    "predicted": lambda p: f"{p.speed_up:.2f}",
    "EXP": lambda p: f"{p.paper.expected:.1f}",
    "EMP": lambda p: f"{p.paper.measured:.1f}",
}


def _pair_table(pairs: Sequence[Prediction]) -> results.Table:
    """Returns a table with a row for each draft and a column for each acceptance rate."""
    speed_ups = {(pair.draft, pair.alpha): pair.speed_up for pair in pairs}
    columns = {"draft": lambda p: p.draft, "gamma": lambda p: p.gamma, **_COSTS}
    for alpha in ALPHAS:
        columns[f"at alpha {alpha}"] = lambda p, a=alpha: f"{speed_ups[p.draft, a]:.2f}"
    return results.table(columns, list({pair.draft: pair for pair in pairs}.values()))
