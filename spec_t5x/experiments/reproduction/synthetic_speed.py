"""Table 2 at real size: random weights, and verdicts drawn with the paper's alphas."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.reproduction import columns
from spec_t5x.experiments.reproduction.cache import Measure
from spec_t5x.experiments.reproduction.contents import Item, ReproduceOptions, Table

# From the paper's own down to what any machine holds. On a CPU a step of a larger one takes
# a tenth of a second and more.
_TARGETS = ("t5_1_1_xxl", "t5_1_1_xl", "t5_1_1_large", "t5_1_1_base")


def _largest(options: ReproduceOptions):
    """Options of the largest target that this device can hold, with the smaller drafts.

    Raises:
      InputError: it holds none.
    """
    import jax

    from spec_t5x.experiments.synthetic_acceptance import SyntheticOptions, check_memory
    from spec_t5x.models.sizes import size

    cpu = jax.default_backend() == "cpu"
    for target in _TARGETS[-1:] if cpu else _TARGETS:
        names = paper_tables.DRAFTS.values()
        drafts = [name for name in names if size(name).emb_dim < size(target).emb_dim]
        repeats = 3 if options.quick else 9
        chosen = SyntheticOptions(
            target=target,
            drafts=drafts[:1] if options.quick else drafts,
            # The paper does not say how long its sources are.
            source_len=64 if cpu else 512,
            decode_len=64 if cpu else 128,
            repeats=repeats,
            step_repeats=repeats,
            seed=options.seed,
        )
        try:
            check_memory(chosen)
        except InputError:
            continue
        return chosen
    raise InputError(f"this device has no room for {_TARGETS[-1]}: take one with more memory")


def _compute(options: ReproduceOptions, results: Measure) -> dict[str, Any]:
    chosen = _largest(options)
    count = 1 if options.quick else len(chosen.rows())

    def measure() -> dict[str, Any]:
        from spec_t5x.experiments import synthetic_acceptance

        timings = list(itertools.islice(synthetic_acceptance.run(chosen), count))
        tokens = sum(each.num_tokens * len(each.speculative_seconds) for each in timings)
        return {"tokens": tokens, "rows": [_row(each) for each in timings]}

    inputs = {"version": 3, "options": dataclasses.asdict(chosen), "rows": count}
    found = results("synthetic", inputs, 40.0 if options.quick else 70.0 * count, measure)
    return {"target": chosen.target, "rows": found["rows"] if found else []}


def _row(timing) -> dict[str, Any]:
    """A ``synthetic_acceptance.Timing`` as the table shows it."""
    low, high = timing.speed_up_range
    return {
        "task": timing.row.paper.task,
        "draft": timing.row.draft,
        "temperature": timing.row.temperature,
        "gamma": timing.row.gamma,
        "alpha": timing.row.alpha,
        "drawn": timing.acceptance_rate,
        "block_efficiency": timing.block_efficiency,
        "c": timing.step_times.c,
        "verification_cost": timing.step_times.verification_cost,
        "expected": timing.expected,
        "expected_with_verification": timing.expected_with_verification,
        "speed_up": timing.speed_up,
        "range": f"{low:.2f} to {high:.2f}",
        "loop_speed_up": timing.loop_speed_up,
        "setup_ms": 1e3 * statistics.median(timing.plain_setup_seconds),
        "compile_s": timing.speculative_compile_seconds,
        "paper_expected": timing.row.paper.expected,
        "paper_measured": timing.row.paper.measured,
    }


def _render(options: ReproduceOptions, found: Mapping[str, Any]) -> list[Table]:
    table = Table(
        caption=f"Target {found['target']} with random weights on this device.",
        columns=(
            *columns.SETTING,
            columns.paper("gamma", "γ", "d"),
            columns.paper("alpha", "α"),
            columns.measured("drawn", "drawn", ".3f"),
            columns.measured("block_efficiency", "block efficiency"),
            *columns.COSTS,
            *columns.EXPECTED,
            columns.SPEED_UP,
            columns.measured("range", "least to most"),
            columns.measured("loop_speed_up", "loop alone"),
            columns.measured("setup_ms", "setup, ms", ".1f"),
            columns.measured("compile_s", "compilation, s", ".1f"),
            columns.paper("paper_expected", "EXP", ".1f"),
            columns.paper("paper_measured", "EMP", ".1f"),
        ),
        rows=found["rows"],
        note="Whether a draft is accepted is drawn with the paper's α (drawn: the share that was): "
        "no text comes of it, only time; all else is as in decoding. The largest target is taken "
        "that this device can hold and run in a reasonable time, the paper's T5-XXL on a GPU or "
        "TPU with 32 GiB; speed-ups of a smaller one are not the paper's. " + columns.COSTS_NOTE,
    )
    return [table] if table.rows else []


SYNTHETIC = Item("Table 2 in time alone: real sizes, synthetic acceptance", _compute, _render)
