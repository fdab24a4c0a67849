"""Memory, costs and speed-ups of speculative decoding, compiled for TPUs without hardware.

Shapes suffice to compile the whole loops, for the memory they need, and a step of the target, a
step of each draft and the verifications, for their costs. The costs give c and T(gamma + 1), and
with the paper's acceptance rates the speed-up of each row of Table 2. No acceptance rate gives the
tokens of a tree, whose speed-up is predicted for given block efficiencies.
"""

import ctypes
import dataclasses
import functools
import gc
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, is_out_of_memory
from spec_t5x.labs.benchmark import paper_tables, results
from spec_t5x.labs.benchmark.paper_tables import SpeedUp
from spec_t5x.labs.benchmark.step_times import StepTimes
from spec_t5x.labs.theory import formulas
from spec_t5x.labs.tpu import programs
from spec_t5x.labs.tpu.chips import Chip, topology
from spec_t5x.labs.tpu.options import ALPHAS, Options, head_width, is_head
from spec_t5x.labs.tpu.step_costs import StepCost, bytes_per_device, step_cost
from spec_t5x.models.cache import KVCache
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.weights import BITS
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.verifiers import TreeVerifier, Verifier

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HbmUse:
    """Memory of one chip that a loop takes, in bytes."""

    # None for the plain loop.
    draft: str | None
    gamma: int
    # Children of a tree's nodes by depth; empty for a chain.
    branching: tuple[int, ...] = ()
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
    # Children of a tree's nodes by depth, if the tokens are its nodes; empty for a chain.
    branching: tuple[int, ...] = ()
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
class TreePrediction:
    """Speed-up with a tree at a given block efficiency, from roofline times in target steps."""

    draft: str
    # Children of the nodes by depth, and the number of nodes.
    branching: tuple[int, ...]
    nodes: int
    # Time of the draft's steps over the nodes of all depths but the last.
    drafting_cost: float
    # Time of the target's call over all nodes.
    verification_cost: float
    block_efficiency: float
    speed_up: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one mesh of ``data`` times ``model`` chips."""

    data: int
    model: int
    loops: tuple[HbmUse, ...]
    steps: tuple[Step, ...]
    pairs: tuple[Prediction, ...]
    trees: tuple[TreePrediction, ...]
    table_2: tuple[Prediction, ...]


def run(options: Options) -> Iterator[Result]:
    """Compiles for each mesh in turn and yields its figures.

    Raises:
      InputError: an unknown topology, no libtpu, a mesh of more chips than the topology has, or a
        call that does not fit into a chip's memory.
    """
    compilers = _compilers(options)
    # The paper's rows are about its target, and chains.
    of_paper = options.target == paper_tables.TARGET and not options.trees
    rows = paper_tables.TABLE_2 if of_paper else ()
    for compiler in compilers:
        data, model = compiler.mesh.devices.shape
        yield Result(
            data=data,
            model=model,
            loops=tuple(
                compiler.loop(draft) for draft in (None, *options.drafts) if not options.steps_only
            ),
            pairs=tuple(
                compiler.predict(draft, options.gamma, alpha)
                for draft in options.drafts
                for alpha in ALPHAS
                if not options.trees
            ),
            trees=tuple(
                compiler.predict_tree(draft, tree, tokens)
                for draft in options.drafts
                for tree in options.trees
                for tokens in options.tokens_per_call
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
        # By kind, model, tokens, branching and children.
        self.steps: dict[tuple[str, str, int, tuple[int, ...], int], Step] = {}
        stored = options.weights, options.kv
        self.target = programs.abstract_model(size(options.target), mesh, *stored)

    def loop(self, draft: str | None) -> HbmUse:
        """Compiles a whole loop, plain if ``draft`` is None; returns the memory that it needs.

        Of several trees the loop has the one of most nodes.
        """
        gamma, proposer = (self.options.gamma, self.draft(draft)) if draft else (0, None)
        verifier = max(self.options.verifiers, key=lambda each: each.num_nodes(self.options.gamma))
        tree = verifier.tree(gamma) if draft else None
        # A leaf that target and draft share is two arguments of the program and one in memory.
        leaves = jax.tree.leaves((self.target, proposer))
        held = bytes_per_device({id(leaf): leaf for leaf in leaves})
        use = functools.partial(
            HbmUse,
            draft=draft,
            gamma=gamma,
            branching=tree.branching if tree else (),
            capacity=self.chip.memory,
        )
        log.info("compiling the loop, %s", f"draft {draft}" if draft else "plain")
        try:
            compiled = programs.loop(
                self.target, proposer, self.options.work, gamma, self.mesh, verifier
            )
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
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
        if is_head(name):
            return programs.abstract_head(self.target, self.mesh, head_width(name))
        if name in BITS:
            return SelfDraft.rounded(self.target, BITS[name])
        return TransformerDraft(programs.abstract_model(size(name), self.mesh))

    def predict(
        self, draft: str, gamma: int, alpha: float, paper: SpeedUp | None = None
    ) -> Prediction:
        """Predicts the speed-up with a draft at the acceptance rate ``alpha``."""
        # In seconds: only ratios are used.
        times = StepTimes(
            target=self.plain().seconds,
            draft=self.draft_step(draft).seconds,
            verification=self.verification(gamma, self.options.verifiers[0]).seconds,
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

    def predict_tree(self, draft: str, tree: Tree, tokens: float) -> TreePrediction:
        """Predicts the speed-up with a tree if a target call appends ``tokens`` tokens."""
        levels = [self.level_step(draft, tree, depth).seconds for depth in range(tree.depth)]
        verifying = self.verification(tree.depth, TreeVerifier(tree.branching)).seconds
        step = self.plain().seconds
        drafting, verification = sum(levels) / step, verifying / step
        # c is the mean over the depths.
        time = formulas.iteration_time(tree.depth, drafting / tree.depth, verification)
        return TreePrediction(
            draft=draft,
            branching=tree.branching,
            nodes=tree.num_nodes,
            drafting_cost=drafting,
            verification_cost=verification,
            block_efficiency=tokens,
            speed_up=tokens / time,
        )

    def plain(self) -> Step:
        """Returns a plain step of the target."""
        given = self.target, self.options.work, self.mesh
        return self._step("plain", self.options.target, 1, programs.plain_step, given)

    def draft_step(self, name: str) -> Step:
        """Returns a step of a draft that proposes a chain."""
        work = self.options.work
        if is_head(name):
            head, gamma = self.draft(name), self.options.gamma
            given = self.target, head, work, gamma, self.mesh
            return self._step("draft", name, 1, programs.head_step, given, head.model)
        return self._step(
            "draft", name, 1, programs.plain_step, (self.model(name), work, self.mesh)
        )

    def level_step(self, name: str, tree: Tree, depth: int) -> Step:
        """Returns a draft's step over a tree's nodes at one depth."""
        draft = self.draft(name)
        given = self.target, draft, self.options.work, tree, depth, self.mesh
        nodes, of_tree = tree.level_sizes[depth], (tree.branching, tree.branching[depth])
        return self._step("draft", name, nodes, programs.level_step, given, draft.model, *of_tree)

    def verification(self, gamma: int, verifier: Verifier) -> Step:
        """Returns an iteration of a chain of ``gamma`` drafts or a tree without the drafting."""
        tree, nodes = verifier.tree(gamma), verifier.num_nodes(gamma)
        given = self.target, self.options.work, gamma, self.mesh, verifier
        name, branching = self.options.target, tree.branching if tree else ()
        return self._step(
            "verification", name, nodes, programs.verification, given, None, branching
        )

    def _step(
        self,
        kind: str,
        name: str,
        tokens: int,
        make: Callable[..., tuple[Compiled, KVCache]],
        given: tuple,
        model: T5Model | None = None,
        branching: tuple[int, ...] = (),
        children: int = 0,
    ) -> Step:
        """Returns a step over ``tokens`` tokens of ``model``, the first of ``given`` if None.

        ``make(*given)`` compiles the program.
        """
        key = kind, name, tokens, branching, children
        if key not in self.steps:
            log.info("compiling: %s, %s, %d tokens", kind, name, tokens)
            try:
                program, cache = make(*given)
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                mesh = ",".join(map(str, self.mesh.devices.shape))
                raise InputError(
                    f"a call of {name} over {tokens} tokens needs more than a chip's "
                    f"{self.chip.memory / 2**30:.0f} GiB on mesh {mesh}: give a larger "
                    "model axis, or fewer bits (--weights int8 or int4)"
                ) from None
            cost = step_cost(program, model or given[0], cache, tokens)
            del program
            _return_memory()
            self.steps[key] = Step(
                kind=kind,
                model=name,
                branching=branching,
                cost=cost,
                seconds=cost.seconds(self.chip),
            )
        return self.steps[key]


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
