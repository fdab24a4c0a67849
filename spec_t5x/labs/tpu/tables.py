"""Tables of what was compiled for a TPU: memory, costs of steps and predicted speed-ups."""

from collections.abc import Sequence

from spec_t5x.labs.benchmark import results
from spec_t5x.labs.tpu.compilation import Prediction, Result, TreePrediction, versions
from spec_t5x.labs.tpu.options import ALPHAS, Options
from spec_t5x.names import AUTO

_GIB = 2**30


def header(options: Options) -> str:
    """Returns a line with the target, the chips, the shapes and the compilers' versions."""
    work = options.work
    stored = "bfloat16" if options.weights == AUTO else options.weights
    source = "" if options.kv == AUTO else f" in {options.kv}"
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{options.target} in {stored} for TPU {options.topology}: batch {work.batch}, source "
        f"{work.source_len}{source}, at most {work.max_decode_len} tokens, gamma {options.gamma} "
        f"({made_with})"
    )


def tables(result: Result) -> list[results.Table | str]:
    """Returns a heading, and tables of the memory, steps and predictions of one mesh."""
    chips, mesh = result.data * result.model, f"data {result.data}, model {result.model}"
    parts = [
        f"## {chips} chip{'s' * (chips > 1)} ({mesh}), each with:",
        *([results.table(_MEMORY, result.loops)] if result.loops else []),
        results.table(_STEPS, result.steps),
    ]
    if result.pairs:
        parts.append(_pair_table(result.pairs))
    if result.trees:
        parts.append(tree_table(result.trees))
    if result.table_2:
        parts.append(results.table(_TABLE_2, result.table_2))
    return parts


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / _GIB:.2f}"


def _widths(branching: Sequence[int]) -> str | None:
    return ",".join(map(str, branching)) or None


_MEMORY = {
    "loop": lambda m: "plain" if m.draft is None else f"speculative, gamma {m.gamma}",
    "tree": lambda m: _widths(m.branching),
    "draft": lambda m: m.draft or "",
    "arguments, GiB": lambda m: _gib(m.arguments),
    "temporaries, GiB": lambda m: _gib(m.temporaries),
    "in all, GiB": lambda m: f"{_gib(m.total)} of {m.capacity / _GIB:.0f}",
    "fits": lambda m: "yes" if m.fits else "NO",
}
_STEPS = {
    "step": lambda s: s.kind,
    "model": lambda s: s.model,
    "tree": lambda s: _widths(s.branching),
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


def tree_table(trees: Sequence[TreePrediction]) -> results.Table:
    """Returns a table with a row for each draft and tree, a column for each block efficiency."""
    speed_ups = {
        (each.draft, each.branching, each.block_efficiency): each.speed_up for each in trees
    }
    columns = {
        "draft": lambda t: t.draft,
        "tree": lambda t: _widths(t.branching),
        "nodes": lambda t: t.nodes,
        "drafting": lambda t: f"{t.drafting_cost:.3f}",
        "T(verify)": lambda t: f"{t.verification_cost:.3f}",
    }
    for tokens in dict.fromkeys(each.block_efficiency for each in trees):
        columns[f"at {tokens:g} tokens"] = lambda t, tokens=tokens: (
            f"{speed_ups[t.draft, t.branching, tokens]:.2f}"
        )
    rows = list({(each.draft, each.branching): each for each in trees}.values())
    notes = "Speed-ups at so many tokens per target call; drafting and T(verify) in target steps."
    return results.table(columns, rows, notes)
