"""Counts the kernels and launches of decoding on an H100 in compiled programs, without a GPU.

    pip install "jax[cuda12]"     # the version of the installed JAX; no driver is needed
    python -m benchmarks.gpu_launches --target t5_1_1_small --batch 1 8 \\
        --json benchmarks/gpu_launches.json
    python -m benchmarks.gpu_launches --loops --target t5_1_1_small --batch 1 8 \\
        --json benchmarks/gpu_loops.json

XLA compiles for the GPU that ``H100`` describes, without autotuning, and dumps its thunks:
kernels, copies, loops, and command buffers (CUDA graphs), each of which the host launches at once.
The host runs a loop outside of a command buffer, and reads its condition in every round unless the
number of rounds is known. ``--loops`` compiles all kinds of loops and counts each one's launches.
A count is no measurement of time.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.stages import Compiled

from benchmarks import command
from spec_t5x.contrib.gpu.kernels import SWITCH
from spec_t5x.contrib.gpu.operations import GPU, MOST_INNER, GpuOperations, is_small
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.tpu import programs
from spec_t5x.labs.tpu.options import Workload
from spec_t5x.loops.pace import Costs
from spec_t5x.machine.operations import XLA, Operations
from spec_t5x.machine.xla_flags import GPU_FLAG
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.partitioning import make_mesh, replicated
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.verifiers import TreeVerifier

# XLA's GpuTargetConfigProto of an H100 with 80 GB, by NVIDIA's data sheet and the limits of
# compute capability 9.0.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 device_address_bits: 64
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""
_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)")
BY = {"XLA": XLA, "contrib/gpu": GPU}
_LOOPS = ("kWhile", "kConditional")
MOST_INNER_HELP = "most rows of a matrix for contrib/gpu (3072: up to T5-large; 5120: XL)"


@dataclasses.dataclass
class Thunk:
    """Operation of a compiled program, and those inside it."""

    kind: str
    inner: list["Thunk"] = dataclasses.field(default_factory=list)

    @property
    def loops(self) -> list["Thunk"]:
        """Loops directly inside, also if they are recorded in a command buffer."""
        buffers = (each.inner for each in self.inner if each.kind == "kCommandBuffer")
        return [each for each in sum(buffers, self.inner) if each.kind in _LOOPS]

    @property
    def kernels(self) -> int:
        """Number of kernels and copies of one round, without those of loops inside."""
        counted = (each for each in self.inner if each.kind not in _LOOPS)
        return sum(each.kernels if each.kind == "kCommandBuffer" else 1 for each in counted)

    @property
    def launches(self) -> int:
        """Number of launches of one round from the host, without the rounds of loops inside."""
        return sum(each.kind not in _LOOPS for each in self.inner)


def thunks(lines: Sequence[str]) -> Thunk:
    """Returns the program of a dump of thunks, in which inner ones are indented.

    >>> program = thunks(["0: kCommandBuffer", "  1: kCopy", "  2: kWhile", "    3: kCopy"])
    >>> program.launches, program.kernels, program.loops[0].kernels
    (1, 1, 1)
    """
    program = Thunk("program")
    above = [(-1, program)]
    for line in lines:
        if found := _THUNK.match(line):
            indent, thunk = len(found["indent"]), Thunk(found["kind"])
            while above[-1][0] >= indent:
                above.pop()
            above[-1][1].inner.append(thunk)
            above.append((indent, thunk))
    return program


def counts(program: Thunk, gamma: int) -> dict[str, Any]:
    """Returns the counts of a speculative loop: prefill, an iteration, a step of the draft."""
    # Encoding large batches is a loop, too (``PairBias.part_size``).
    *_, iteration = program.loops
    graph = any(iteration in each.inner for each in program.inner)
    inside = any(each.loops for each in iteration.inner if each.kind == "kCommandBuffer")
    draft, *others = iteration.loops
    rounds = gamma - 1
    alone = iteration.launches + rounds * (0 if inside else draft.launches)
    # Verifiers' loops are over the drafts.
    alone += sum(gamma * other.launches for other in others)
    return {
        "prefill_kernels": program.kernels,
        "draft_step_kernels": draft.kernels,
        "iteration_kernels": iteration.kernels + rounds * draft.kernels,
        # 0 if the whole loop is recorded.
        "iteration_launches": 0 if graph else alone,
        "other_loops": len(others),
    }


def _plain(args, target, draft, work, mesh) -> Compiled:
    return programs.loop(target, None, work, 0, mesh)


def _chain(args, target, draft, work, mesh, **options) -> Compiled:
    return programs.loop(target, draft, work, args.gamma, mesh, **options)


def _chain_at_a_pace(args, *given) -> Compiled:
    return _chain(args, *given, costs=Costs.by_formula(c=0.1, largest=args.gamma))


def _eagle(args, target, draft, work, mesh) -> Compiled:
    head = programs.abstract_head(target, mesh, target.config.emb_dim // 4)
    head = dataclasses.replace(head, model=head.model.replace(operations=target.operations))
    return _chain(args, target, head, work, mesh)


def _tree(args, *given) -> Compiled:
    return _chain(args, *given, verifier=TreeVerifier((2, 2, *[1] * (args.gamma - 2))))


LOOPS: dict[str, Callable[..., Compiled]] = {
    "plain": _plain,
    "chain": _chain,
    "chain at a pace": _chain_at_a_pace,
    "EAGLE head": _eagle,
    "tree": _tree,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("gpu_launches", __doc__)
    add = parser.add_argument
    add("--target", default="t5_1_1_xxl", help="published size of the target (t5_1_1_xxl)")
    add("--draft", default="t5_1_1_small", help="published size of the draft (t5_1_1_small)")
    add("--gamma", type=int, default=7, help="tokens proposed in an iteration (7)")
    add("--batch", nargs="+", type=int, default=[1], help="rows of the batch (1)")
    add("--source_len", type=int, default=512, help="length of the source in tokens (512)")
    add("--loops", action="store_true", help="count the launches of all kinds of loops")
    add("--flags", default=GPU_FLAG, help=f"XLA's flags ({GPU_FLAG})")
    add("--most_inner", type=int, default=MOST_INNER, help=MOST_INNER_HELP)
    add("--json", type=Path, metavar="FILE", help="file for all counts")
    args = parser.parse_args(arguments)
    settings = {"jax": jax.__version__, "options": command.options(args)}

    def shown(rows: list[dict[str, Any]]) -> results.Table:
        return table_of_loops(rows) if args.loops else table([{**settings, "rows": rows}])

    return command.run("gpu_launches", args, measure(args), shown, settings)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compiles loops, with layers by XLA and by ``contrib/gpu``; yields their counts.

    Raises:
      InputError: gamma below 2, or JAX's CUDA plug-in is missing.
    """
    if args.gamma < 2:
        raise InputError(f"gamma is {args.gamma}: give at least 2, for a loop of draft steps")
    with tempfile.TemporaryDirectory() as folder:
        flags = args.flags, "--xla_gpu_autotune_level=0", f"--xla_dump_to={folder}"
        os.environ["XLA_FLAGS"] = " ".join(flags)
        jax.config.update("jax_platforms", "cpu")
        # The networks choose between forms for a CPU and for other platforms by the default one.
        with mock.patch("jax.default_backend", return_value="gpu"):
            mesh = make_mesh(1, 1, devices())
            choices = itertools.product(args.batch, (True, False), BY)
            for batch, greedy, by in choices:
                target, draft = (
                    computed_by(BY[by], programs.abstract_model(size(name), mesh), args.most_inner)
                    for name in (args.target, args.draft)
                )
                work = Workload(batch=batch, source_len=args.source_len, greedy=greedy)
                for loop in LOOPS if args.loops else ["chain"]:
                    start = time.perf_counter()
                    # Where the draft's kernels run, so does their argmax.
                    with all_kernels(draft.operations is GPU):
                        compiled = LOOPS[loop](args, target, TransformerDraft(draft), work, mesh)
                    (dump,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
                    program = thunks(dump.read_text(encoding="utf-8").splitlines())
                    dump.unlink()
                    row = {"loop": loop, "batch": batch, "temperature": int(not greedy), "by": by}
                    memory = compiled.memory_analysis()
                    yield row | {
                        "compile_seconds": time.perf_counter() - start,
                        "argument_bytes": memory.argument_size_in_bytes,
                        "temporary_bytes": memory.temp_size_in_bytes,
                        "launches": program.launches,
                        **(counts(program, args.gamma) if loop == "chain" else {}),
                    }


@contextlib.contextmanager
def all_kernels(used: bool) -> Iterator[None]:
    """Lets programs be lowered with all kernels of ``contrib/gpu``, or with none of them."""
    switched = mock.patch.dict(os.environ, {SWITCH: "1" if used else "0"})
    with switched, mock.patch.object(GpuOperations, "state", return_value=(used, "")):
        yield


def computed_by(operations: Operations, model: T5Model, most_inner: int = MOST_INNER) -> T5Model:
    """Returns the model with operations, and its weights, arrays or shapes, as they read them.

    XLA computes models with matrices of more than ``most_inner`` rows.
    """
    params = model.params
    if operations is XLA or not is_small(expected_shapes(model.config), most_inner):
        return model.replace(weights=params, operations=XLA)
    first = jax.tree.leaves(params)[0]
    if not isinstance(first, jax.ShapeDtypeStruct):
        return model.replace(weights=operations.pack(params), operations=operations)
    shapes = jax.eval_shape(operations.pack, params)
    shapes = programs.with_sharding(shapes, replicated(first.sharding.mesh))
    return model.replace(weights=shapes, operations=operations)


def devices() -> list[jax.Device]:
    """Returns the one device to compile for; raises ``InputError`` without JAX's CUDA plug-in."""
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="H100", target_config=H100, topology="1x1x1"
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"JAX {jax.__version__} compiles for no GPU ({reason}): pip install "
            f'"jax[cuda12]=={jax.__version__}" in an environment of its own'
        ) from error
    return list(found.devices)


def table_of_loops(rows: Sequence[dict[str, Any]]) -> results.Table:
    """Makes a table with a line for each loop of ``LOOPS``, from the result of ``measure``."""
    columns = {
        "loop": lambda row: row["loop"],
        "batch": lambda row: str(row["batch"]),
        "temperature": lambda row: str(row["temperature"]),
        "layers by": lambda row: row["by"],
        "launches": lambda row: str(row["launches"]),
    }
    return results.table(columns, rows)


def table(files: Sequence[Mapping[str, Any]]) -> results.Table:
    """Makes a table with a line for each loop in JSON files: layers by XLA, then by the kernels."""
    lines = [
        (file["options"], *pair)
        for file in files
        for pair in zip(file["rows"][::2], file["rows"][1::2], strict=True)
    ]

    def both(name: str) -> Callable:
        return lambda line: " → ".join(str(row[name]) for row in line[1:])

    columns = {
        "target": lambda line: line[0]["target"],
        "gamma": lambda line: str(line[0]["gamma"]),
        "batch": lambda line: str(line[1]["batch"]),
        "temp.": lambda line: str(line[1]["temperature"]),
        "a draft step": both("draft_step_kernels"),
        "an iteration": both("iteration_kernels"),
        "launches of an iteration": both("iteration_launches"),
        "launches": both("launches"),
        "GB of temporaries": lambda line: " → ".join(
            f"{row['temporary_bytes'] / 1e9:.2f}" for row in line[1:]
        ),
    }
    note = "Numbers of kernels and launches; launches beyond one encode sources in parts."
    return results.table(columns, lines, note)


if __name__ == "__main__":
    sys.exit(main())
