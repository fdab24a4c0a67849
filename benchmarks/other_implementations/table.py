"""Table of results as Markdown, for the command and for ``scripts/tables.py``."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

_NOTES = (
    "¹ How many times as fast as plain decoding with this package: the median of the rounds' "
    "ratios, not the ratio of the median times. ² Time over the memory-bandwidth bound: one pass "
    "for each token over the weights, and over the caches in use, at the read bandwidth measured "
    "in the same run. ³ Without the first token, and over the bound; not defined for speculation."
)
_INEXACT = " ⁴ The weights are rounded: fewer bytes are read, and the output may differ."


def table(groups: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """Returns Markdown with one table per target, footnotes and versions.

    Args:
      groups: results of ``rounds.measure``, one per target.
      machine: description of the machine, whose "processor" is shown.
    """
    parts = [f"{machine['processor']}, {groups[0]['threads']} threads, float32, batch 1, greedy."]
    for group in groups:
        bound = group["bound"]
        cells = [_cells(row, bound) for row in group["rows"]]
        token, step = _ms(bound["token_seconds"]), _ms(bound["step_seconds"])
        name = "memory-bandwidth bound"
        cells.append({"": name, "ms/token": token, "vs. bound²": "1", "ms/step³": step})
        # Only columns in which some row has a figure.
        headers = list(dict.fromkeys(name for row in cells for name in row))
        rows = [[row.get(name, "") for name in headers] for row in cells]
        parts += [_caption(group), tabulate(rows, headers, "pipe", disable_numparse=True)]
    rows = [row for group in groups for row in group["rows"]]
    parts.append(_NOTES + ("" if all(row["exact"] for row in rows) else _INEXACT))
    versions = dict.fromkeys(row["version"] for row in rows if "version" in row)
    return "\n\n".join([*parts, f"Versions: {'; '.join(versions)}."])


def _caption(group: Mapping[str, Any]) -> str:
    inputs, bound = group["num_inputs"], group["bound"]
    alphas = ", ".join(f"{alpha:g}" for alpha in group["alphas"] or ())
    simulated = f", random weights, acceptances simulated at {alphas}" if alphas else ""
    return (
        f"**{group['title']}**: {inputs} source{'s' * (inputs > 1)} of "
        f"{group['source_tokens'] / inputs:.1f} tokens, outputs of "
        f"{group['num_tokens'] / inputs:.1f}{simulated}. A step reads "
        f"{bound['step_bytes'] / 1e6:.0f} MB, at {bound['bytes_per_second'] / 1e9:.1f} GB/s."
    )


def _cells(row: Mapping[str, Any], bound: Mapping[str, Any]) -> dict[str, str]:
    cells = {"": row["name"] if row["exact"] else f"{row['name']}⁴"}
    if "problem" in row:
        return cells | {"ms/token": row["problem"]}
    step, different = row.get("step_seconds"), row.get("num_different")
    cells |= {
        "ms/token": _ms(row["seconds_per_token"]),
        "speed-up¹": f"{row['speed_up']:.2f}",
        "vs. bound²": f"{row['times_bound']:.2f}",
        "ms/step³": f"{_ms(step)} ({step / bound['step_seconds']:.2f})" if step else "—",
        "first token, ms": _ms(row["first_token_seconds"]),
    }
    if row.get("compile_seconds") is not None:
        cells["compile, s"] = f"{row['compile_seconds']:.1f}"
    if row.get("peak_bytes") is not None:
        cells["memory (MiB)"] = f"{row['peak_bytes'] / 2**20:.0f}"
    same = "—" if different is None else f"{different} differ" if different else "yes"
    return cells | {"same ids": same}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
