"""What ``tpu_compilation`` found, as Markdown."""

from collections.abc import Iterable, Sequence

from spec_t5x.experiments.tpu_compilation import Memory, Options, Prediction, Result, versions
from spec_t5x.experiments.tpu_programs import Workload
from spec_t5x.experiments.tpu_tiles import Caches, unpadded_lengths

_GIB = 2**30
FOOTNOTES = (
    "¹ Operations as the compiler counts them, conversions included. ² The compiler's bytes "
    "accessed,\nwhich include what moves within the chip; the roofline takes weights and caches, "
    "each read once.\n³ Of the texts, among the temporaries; memory holds whole tiles."
)


def header(options: Options) -> str:
    """What was compiled, with what."""
    work = options.work
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{options.target} in bfloat16 for TPU {options.topology}: batch {work.batch}, source "
        f"{work.source_len}, at most {work.max_decode_len} tokens, gamma {options.gamma} "
        f"({made_with})"
    )


def tables(result: Result, work: Workload) -> str:
    """Memory, steps and predictions for one mesh."""
    chips = result.data * result.model
    title = (
        f"## {chips} chip{'s' * (chips > 1)} (data {result.data}, model {result.model}), each with:"
    )
    parts = [title, memory_table(result)]
    parts += [padding(loop, work) for loop in result.loops[-1:] if loop.caches is not None]
    parts += [step_table(result), pair_table(result.pairs)]
    if result.table_2:
        parts.append(paper_table(result.table_2))
    return "\n\n".join(parts)


def padding(loop: Memory, work: Workload) -> str:
    """How the slots of a loop's caches are padded, and which lengths would need none."""
    extra, multiple = loop.gamma + 1, loop.caches.slot_multiple
    slots = f"{work.max_decode_len + extra} slots ({work.max_decode_len} tokens and gamma + 1)"
    lengths = unpadded_lengths(work.max_decode_len, extra, multiple)
    if work.max_decode_len in lengths:
        return f"A text's cache of {slots} needs no padding of its slots."
    return (
        f"A text's cache of {slots} is padded to a multiple of {multiple} slots: "
        f"--max_decode_len {' or '.join(map(str, lengths))} needs no padding."
    )


def memory_table(result: Result) -> str:
    """A loop a row."""
    return _table(
        (
            "loop",
            "draft",
            "arguments, GiB",
            "temporaries, GiB",
            "caches (in tiles³), GiB",
            "in all, GiB",
            "fits",
        ),
        (
            (
                "plain" if loop.draft is None else f"speculative, gamma {loop.gamma}",
                loop.draft or "",
                _gib(loop.arguments),
                _gib(loop.temporaries),
                _in_tiles(loop.caches),
                f"{_gib(loop.total)} of {loop.capacity / _GIB:.0f}",
                "yes" if loop.fits else "NO",
            )
            for loop in result.loops
        ),
    )


def step_table(result: Result) -> str:
    """A step a row."""
    return _table(
        (
            "step",
            "model",
            "tokens",
            "Gop¹",
            "weights, GB",
            "caches, GB",
            "compiler's GB²",
            "collectives",
            "sent, MB",
            "ms by roofline",
        ),
        (
            (
                step.kind,
                step.model,
                step.cost.new_tokens,
                f"{step.cost.operations / 1e9:.2f}",
                f"{step.cost.weight_bytes / 1e9:.3f}",
                f"{step.cost.cache_bytes / 1e9:.3f}",
                f"{step.cost.compiler_bytes / 1e9:.2f}",
                ", ".join(f"{c.count} {c.kind}" for c in step.cost.collectives) or "none",
                f"{sum(c.sent_bytes for c in step.cost.collectives) / 1e6:.3f}",
                f"{1e3 * step.seconds:.3f}",
            )
            for step in result.steps
        ),
    )


def pair_table(pairs: Sequence[Prediction]) -> str:
    """A draft a row, its speed-ups by acceptance rate."""
    alphas = sorted({pair.alpha for pair in pairs})
    drafts = {pair.draft: pair for pair in pairs}
    speed_ups = {(pair.draft, pair.alpha): pair.speed_up for pair in pairs}
    return _table(
        ("draft", "gamma", "c", "T(verify)", *(f"at alpha {alpha}" for alpha in alphas)),
        (
            (
                draft,
                pair.gamma,
                f"{pair.c:.3f}",
                f"{pair.verification_cost:.3f}",
                *(f"{speed_ups[draft, alpha]:.2f}" for alpha in alphas),
            )
            for draft, pair in drafts.items()
        ),
    )


def paper_table(predictions: Iterable[Prediction]) -> str:
    """A row of Table 2 a row."""
    return _table(
        (
            "task",
            "draft",
            "temp.",
            "gamma",
            "alpha",
            "c, paper",
            "c",
            "T(verify)",
            "predicted",
            "EXP",
            "EMP",
        ),
        (
            (
                row.paper.task,
                row.paper.draft,
                f"{row.paper.temperature:g}",
                row.gamma,
                f"{row.alpha:.2f}",
                f"{row.paper.c:.2f}",
                f"{row.c:.3f}",
                f"{row.verification_cost:.3f}",
                f"{row.speed_up:.2f}",
                f"{row.paper.expected:.1f}",
                f"{row.paper.measured:.1f}",
            )
            for row in predictions
        ),
    )


def _in_tiles(caches: Caches | None) -> str:
    return "?" if caches is None else f"{_gib(caches.num_bytes)} ({_gib(caches.tiled_bytes)})"


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / _GIB:.2f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
