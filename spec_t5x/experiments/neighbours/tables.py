"""Tables of results, from what their JSON file holds."""

from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = (
    "",
    "ms/token",
    "quartiles",
    "tokens/s",
    "to plain¹",
    "to the floor²",
    "ms/step³",
    "first token",
    "encoder",
    "compile",
    "peak memory⁴",
    "same ids",
)
_SHORT = ("", "ms/token", "to plain¹", "to the floor²", "ms/step³", "first token", "same ids")
_NOTES = (
    "¹ How many times as fast as our plain decoding. ² Time over the least that reading every "
    "weight once a call, and the caches in use, takes at the bandwidth measured in this run. "
    "³ Without the first token; of speculation it would say nothing. First token and encoder "
    "in ms; of ours the encoder is with the keys and values of the source."
)
_INEXACT_NOTE = (
    "⁵ A note: the weights are rounded, so that less is read and the text may be another."
)
_MEMORY_NOTE = "⁴ Of a process that does nothing else, libraries included."


def full(groups: Sequence[Mapping[str, Any]]) -> str:
    """Everything, a table for each target."""
    lines = []
    for group in groups:
        lines += [*_caption(group), "", *_lines(_HEADER, group, _cells), ""]
        lines += [*_versions(group), *_different(group), ""]
    return "\n".join([*lines, " ".join([_NOTES, _MEMORY_NOTE, *_inexact(groups)])])


def short(groups: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """What the README has room for."""
    lines = [f"{machine['processor']}, {_threads(groups)}, float32, batch 1.", ""]
    for group in groups:
        lines += [*_caption(group), "", *_lines(_SHORT, group, _short_cells), ""]
    versions = dict.fromkeys(line for group in groups for line in _versions(group))
    different = [line for group in groups for line in _different(group)]
    notes = " ".join([_NOTES, *_inexact(groups)])
    return "\n".join([*lines, notes, *different, *versions])


def _lines(header: Sequence[str], group: Mapping[str, Any], cells) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    empty = len(header) - 1
    for row in group["rows"]:
        found = [row["problem"], *[""] * (empty - 1)] if row["figures"] is None else cells(row)
        name = row["name"] if row["exact"] else f"{row['name']}⁵"
        lines.append("| " + " | ".join([name, *found]) + " |")
    floor = group["floor"]
    shown = {
        "ms/token": _ms(floor["token_seconds"]),
        "ms/step³": _ms(floor["step_seconds"]),
        "to the floor²": "1",
    }
    lines.append("| " + " | ".join(["the floor", *(shown.get(h, "") for h in header[1:])]) + " |")
    return lines


def _inexact(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    exact = all(row["exact"] for group in groups for row in group["rows"])
    return [] if exact else [_INEXACT_NOTE]


def _cells(row: Mapping[str, Any]) -> list[str]:
    figures, alone = row["figures"], row["alone"]
    low, high = figures["seconds_per_token_quartiles"]
    return [
        _ms(figures["seconds_per_token"]),
        f"{_ms(low)}–{_ms(high)}",
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['speed_up']:.2f}",
        f"{figures['times_floor']:.2f}",
        _step(figures),
        _ms(figures["first_token_seconds"]),
        _ms(figures["encoder_seconds"]),
        f"{alone['compile_seconds']:.1f} s" if alone else "—",
        f"{alone['peak_bytes'] / 2**20:.0f} MiB" if alone else "—",
        _same(row),
    ]


def _short_cells(row: Mapping[str, Any]) -> list[str]:
    figures = row["figures"]
    return [
        _ms(figures["seconds_per_token"]),
        f"{figures['speed_up']:.2f}",
        f"{figures['times_floor']:.2f}",
        _step(figures),
        _ms(figures["first_token_seconds"]),
        _same(row),
    ]


def _ms(seconds: float | None) -> str:
    return "—" if seconds is None else f"{1e3 * seconds:.2f}"


def _step(figures: Mapping[str, Any]) -> str:
    """Milliseconds, and how many times the floor."""
    if "step_seconds" not in figures:
        return "—"
    return f"{_ms(figures['step_seconds'])} ({figures['step_times_floor']:.2f})"


def _same(row: Mapping[str, Any]) -> str:
    if row["identical"] is None:
        return "—"
    return "yes" if row["identical"] else f"{len(row['divergences'])} differ"


def _caption(group: Mapping[str, Any]) -> list[str]:
    inputs, floor = group["num_inputs"], group["floor"]
    what = f"{inputs} sources" if inputs > 1 else "one source"
    drawn = group["alpha"] is not None
    weights = f", random weights, verdicts drawn with alpha {group['alpha']:g}" if drawn else ""
    place = {True: "in the last-level cache", False: "in memory", None: "wherever they are kept"}
    return [
        f"**{group['title']}**: {what} of {group['source_tokens'] / inputs:.1f} tokens, outputs of "
        f"{group['num_tokens'] / inputs:.1f}{weights}. A step reads "
        f"{floor['reads']['decoder'] / floor['reads']['num_tokens'] / 1e6:.0f} MB "
        f"{place[floor['in_cache']]}, at {floor['bandwidth'] / 1e9:.1f} GB/s."
    ]


def _threads(groups: Sequence[Mapping[str, Any]]) -> str:
    threads = groups[0]["floor"]["threads"]
    return f"{threads} threads" if threads > 1 else "one thread"


def _versions(group: Mapping[str, Any]) -> list[str]:
    known = dict.fromkeys(row["version"] for row in group["rows"] if row["version"])
    return [f"Versions: {'; '.join(known)}."] if known else []


def _different(group: Mapping[str, Any]) -> list[str]:
    """Where ids differ, by how little ours were preferred."""
    lines = []
    for row in group["rows"]:
        if row["divergences"]:
            largest = max(abs(divergence["margin"]) for divergence in row["divergences"])
            lines.append(
                f"{row['name']}: {len(row['divergences'])} of {group['num_inputs']} outputs part "
                f"from ours, where the target preferred our token by at most {largest:.2g}."
            )
    return lines
