"""Writes the tables of README and docs from the JSON results in ``benchmarks/``.

    python scripts/tables.py            # after a benchmark's file has changed
    python scripts/tables.py --check    # exit status 1 if a table is out of date

A table is written between two comments. The first names its kind (a key of ``MAKERS``), its file
or patterns of files with commas between, and optionally the columns to show:

    <!-- table: implementations benchmarks/implementations_pair.json: ms/token, speed-up -->
    <!-- end of table -->
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_t5x.labs.benchmark import reliability, results, sweep
from spec_t5x.labs.benchmark.options import OWN_DRAFT
from spec_t5x.labs.estimates import Estimate
from spec_t5x.labs.reproduction.contents import Origin
from spec_t5x.labs.tpu import tables as tpu_tables
from spec_t5x.labs.tpu.compilation import TreePrediction
from spec_t5x.names import AUTO

REPOSITORY = Path(__file__).resolve().parents[1]
# benchmarks/ and examples/ are not installed with the package.
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples" / "corrections")]
import measure  # noqa: E402

from benchmarks import bulk, decoding, gpu_launches, objectives  # noqa: E402
from benchmarks.other_implementations.table import table as implementations  # noqa: E402

# Names of what the leaderboard shows, and its columns in the report of ``reproduce public``.
_REPORTED = {
    **{name: (Origin.LABEL, name) for name in ("target", "task", "draft")},
    "temperature": (Origin.LABEL, "temp."),
    "gamma": (Origin.LABEL, "γ"),
    "alpha": (Origin.MEASURED, "α"),
    "block_efficiency": (Origin.MEASURED, "block efficiency"),
    "speed_up": (Origin.MEASURED, "speed-up"),
    "identical": (Origin.MEASURED, "same text"),
}
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def lines_of(values: Mapping[str, Any], *names: str, across: str) -> list[tuple[tuple, dict]]:
    """Groups rows by values of ``names``; returns ``(values, {value of across: row})`` pairs."""
    lines: dict[tuple, dict[Any, Mapping[str, Any]]] = {}
    for row in values["rows"]:
        lines.setdefault(tuple(row[name] for name in names), {})[row[across]] = row
    return list(lines.items())


def by_gamma(values: Mapping[str, Any]) -> str:
    """Makes a table of speed-ups, with a line per draft and batch size and a column per gamma."""

    def cell(row: Mapping[str, Any]) -> str:
        plain, speculative = (row[f"{way}_seconds"] for way in ("plain", "speculative"))
        return f"{statistics.median(plain) / statistics.median(speculative):.2f}"

    columns = {"draft": lambda line: line[0][0], "batch": lambda line: line[0][1]}
    for gamma in dict.fromkeys(row["gamma"] for row in values["rows"]):
        # Auto may choose plain decoding, which has no row.
        columns[f"gamma {gamma}"] = lambda line, gamma=gamma: (
            cell(line[1][gamma]) if gamma in line[1] else None
        )
    return results.table(columns, lines_of(values, "draft", "batch_size", across="gamma"))


def by_temperature(values: Mapping[str, Any]) -> str:
    """Makes a table with a line per draft and verifier; a cell has one figure per temperature."""
    columns: dict[str, Callable] = {"draft": lambda line: line[0][0]}
    if len({row["verifier"] for row in values["rows"]}) > 1:
        columns["verifier"] = lambda line: line[0][1]
    figures = {"alpha": ("alpha", 3), "block efficiency": ("block_efficiency", 2)}
    figures |= {"c": ("c", 2), "T(verify)": ("verification_cost", 2), "speed-up": ("speed_up", 2)}
    for title, (name, digits) in figures.items():
        columns[title] = lambda line, name=name, digits=digits: " / ".join(
            f"{line[1][t][name]:.{digits}f}" for t in sorted(line[1])
        )
    return results.table(columns, lines_of(values, "draft", "verifier", across="temperature"))


def alphas(values: Mapping[str, Any]) -> str:
    """Makes a table of acceptance rates: a line per draft, two columns per temperature.

    A draft that proposed for a share of the tokens has the share in a third column.
    """
    columns = {"draft": lambda line: line[0][0]}
    for t in dict.fromkeys(row["temperature"] for row in values["rows"]):
        columns[f"alpha, T = {t:g}"] = lambda line, t=t: f"{Estimate(**line[1][t]['alpha']):.3f}"
        columns[f"block efficiency, T = {t:g}"] = lambda line, t=t: (
            f"{Estimate(**line[1][t]['decoded']['block_efficiency']):.2f}"
        )
    if any(row["share_proposed"] < 1 for row in values["rows"]):
        columns["proposed"] = lambda line: " / ".join(
            f"{line[1][t]['share_proposed']:.2f}" for t in sorted(line[1])
        )
    return results.table(columns, lines_of(values, "draft", across="temperature"))


def predicted(files: Sequence[Mapping[str, Any]]) -> str:
    """Makes a table of predicted tokens per second, with a line per target, topology and draft."""
    lines = []
    for options, found in ((file["options"], found) for file in files for found in file["results"]):
        plain = next(step["seconds"] for step in found["steps"] if step["kind"] == "plain")
        held = {loop["draft"]: loop["total"] / 2**30 for loop in found["loops"]}
        for draft in options["drafts"]:
            pairs = {p["alpha"]: p for p in found["pairs"] if p["draft"] == draft}
            lines.append((options, found, draft, held[draft], plain, pairs))

    def rate(alpha: float) -> Callable:
        return lambda line: f"{line[5][alpha]['speed_up'] / line[4]:.0f}"

    columns = {
        "target": lambda line: f"{line[0]['target']} {line[0]['weights']}".removesuffix(" auto"),
        "chips": lambda line: f"{line[1]['model']} {line[0]['topology'].partition(':')[0]}",
        "draft": lambda line: line[2],
        "GiB a chip": lambda line: f"{line[3]:.1f}",
        "c": lambda line: f"{line[5][0.8]['c']:.3f}",
        "plain": lambda line: f"{1 / line[4]:.0f}",
        **{f"alpha {alpha}": rate(alpha) for alpha in (0.6, 0.7, 0.8, 0.9)},
    }
    return results.table(columns, lines)


def trees(values: Mapping[str, Any]) -> str:
    """Makes a table of the speed-ups with trees that ``compile-tpu`` predicts on its first mesh."""
    found = values["results"][0]["trees"]
    return tpu_tables.tree_table(
        [TreePrediction(**row | {"branching": tuple(row["branching"])}) for row in found]
    )


def by_nodes(files: Sequence[Mapping[str, Any]]) -> str:
    """Makes a table of verifications: a line for each chip, a column for each number of nodes."""
    lines = []
    for options, found in ((file["options"], found) for file in files for found in file["results"]):
        plain = next(step["seconds"] for step in found["steps"] if step["kind"] == "plain")
        costs = {tree["nodes"]: tree["verification_cost"] for tree in found["trees"]}
        lines.append((options, found, plain, costs))
    columns = {
        "chips": lambda line: f"{line[1]['model']} {line[0]['topology'].partition(':')[0]}",
        "step, ms": lambda line: f"{1e3 * line[2]:.2f}",
        **{
            f"{nodes} nodes": lambda line, nodes=nodes: f"{line[3][nodes]:.3f}"
            for nodes in lines[0][3]
        },
    }
    return results.table(columns, lines)


def leaderboard(several: Sequence[Mapping[str, Any]]) -> str:
    """Makes a table of lossless speed-ups at batch 1: a line per device, pair, texts, temperature.

    A line is that of gamma "auto" if it was measured, else that of the fastest gamma. Beside a
    speed-up stands why it is unreliable, if it is.
    """

    def rank(row: Mapping[str, Any]) -> tuple[bool, float]:
        return row["gamma"] == "auto", row["speed_up"]

    best: dict[tuple, Mapping[str, Any]] = {}
    for machine, target, texts, row in itertools.chain(*map(_speed_ups, several)):
        device = machine["device"]
        device = machine["processor"] if device == "cpu" else device
        line = device, target, row["draft"], texts, row["temperature"]
        if line not in best or rank(row) > rank(best[line]):
            best[line] = row
    columns: dict[str, Callable] = {
        title: lambda line, place=place: line[0][place]
        for place, title in enumerate(("device", "target", "draft", "texts", "temp."))
    }

    def speed_up(line: tuple[tuple, Mapping[str, Any]]) -> str:
        why = reliability.doubt(line[1])
        return f"{line[1]['speed_up']:.2f}" + (f" ({why})" if why else "")

    columns |= {
        "gamma": lambda line: line[1]["gamma"],
        "alpha": lambda line: _number(line[1]["alpha"], ".3f"),
        "block efficiency": lambda line: _number(line[1]["block_efficiency"], ".2f"),
        "speed-up": speed_up,
        "same text": lambda line: {True: "yes", False: "no", None: "-"}[line[1]["identical"]],
    }
    table = results.table(columns, sorted(best.items(), key=lambda line: line[0]))
    note = (
        "Targets named `random:…` have random weights, and their acceptances are simulated. "
        "Unreliable speed-ups are marked: *noise* is above what the calls allow, *others N%* was "
        "measured while other programs used N % of the processors."
    )
    return f"{table}\n\n{note}"


def _speed_ups(values: Mapping[str, Any]) -> Iterator[tuple[Mapping, str, str, Mapping[str, Any]]]:
    """Yields machine, target, texts and row of each speed-up at batch 1 in a file.

    The file is of ``benchmark --json``, or ``results.json`` of ``reproduce public``.
    """
    if "rows" in values:
        source, models = values.get("source") or {}, values["models"]
        for row in values["rows"]:
            if row["batch_size"] == 1 and not row.get("lossy"):
                texts = source.get("data") or row.get("task") or "-"
                yield values["machine"], _target_of(models), texts, row | _draft_of(models, row)
        return
    machine = values["run"]["machine"]
    for table in values["items"]["public"]["content"]:
        places = [(column["origin"], column["title"]) for column in table["columns"]]
        for cells in table["rows"] if _REPORTED["speed_up"] in places else ():
            found = dict(zip(places, cells, strict=True))
            row = {name: found[place] for name, place in _REPORTED.items()}
            # A baseline has no gamma; "auto: 3" is what gamma "auto" chose.
            if row["gamma"] is not None:
                row["gamma"] = row["gamma"].partition(":")[0]
                row["identical"] = row["identical"] and row["identical"] == "yes"
                yield machine, row["target"], row["task"], row


def _target_of(models: Mapping[str, Any]) -> str:
    """Returns the target's name, and its rounded types if it was rounded."""
    weights, kv = models.get("weights", AUTO), models.get("kv", AUTO)
    rounded = "" if weights == AUTO else f" {weights}"
    return models["target"] + rounded + ("" if kv == AUTO else f" kv {kv}")


def _draft_of(models: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the draft's name; rows of the run's own draft have a word in its place."""
    is_own = row["draft"] == OWN_DRAFT
    return {"draft": (models.get("draft") or "the packaged one") if is_own else row["draft"]}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def in_print(values: Mapping[str, Any]) -> str:
    """Makes a table of the speed-ups that papers report."""
    titles = list(values["rows"][0])
    return results.table({t: lambda row, t=t: row[t] for t in titles}, values["rows"])


# Functions from the JSON of a file (or list of files) to a table, by kind of table.
MAKERS: dict[str, Callable[[Any], str]] = {
    "implementations": lambda values: implementations(values["groups"], values["machine"]),
    "benchmark": lambda values: sweep.table(values["rows"]),
    "benchmark_by_gamma": by_gamma,
    "benchmark_by_temperature": by_temperature,
    "alphas": alphas,
    "bulk": bulk.table,
    "copying": measure.table,
    "objectives": lambda values: objectives.table(values["rows"]),
    "in_print": in_print,
    "leaderboard": leaderboard,
    "predicted": predicted,
    "trees": trees,
    "by_nodes": by_nodes,
    "gpu_kernels": gpu_launches.table,
    "decoding": lambda values: decoding.table(values["rows"]),
}
_TABLE = re.compile(
    r"(<!-- table: (\S+) (\S+?)(?:: ([^\n]+))? -->\n).*?(<!-- end of table -->)", re.DOTALL
)
_MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def with_columns(text: str, names: Sequence[str]) -> str:
    """Returns Markdown with only the first and the named columns of its tables.

    Footnotes without a reference in the remaining cells are removed, the others renumbered. Raises
    ``ValueError`` for a name that no table has.
    """
    lines, places, unknown = [], [0], set(names)
    for line in text.splitlines():
        if line.startswith("|"):
            cells = line.strip("|").split("|")
            if not (lines and lines[-1].startswith("|")):
                titles = [cell.strip().rstrip(_MARKS) for cell in cells]
                unknown -= set(titles)
                places = [0, *(titles.index(name) for name in names if name in titles[1:])]
            line = f"|{'|'.join(cells[place] for place in places)}|"
        lines.append(line)
    if unknown:
        raise ValueError(f"no table has the columns {sorted(unknown)}: name others")
    used = {mark for line in lines if line.startswith("|") for mark in line if mark in _MARKS}
    numbers = str.maketrans(dict(zip(sorted(used, key=_MARKS.index), _MARKS, strict=False)))
    kept = []
    for line in lines:
        if line[:1] and line[0] in _MARKS:
            notes = re.split(f"(?=[{_MARKS}] )", line)
            line = "".join(note for note in notes if note[:1] in used).strip()
        kept.append(line.translate(numbers))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def filled(text: str, folder: Path) -> str:
    """Returns the text with all tables rewritten from their files.

    Args:
      text: Markdown.
      folder: directory that the paths in the comments are relative to.

    Raises:
      KeyError: the kind of a table is not in ``MAKERS``.
      OSError: a file is missing or cannot be read.
    """

    def make(found: re.Match) -> str:
        start, kind, file, columns, end = found.groups()
        paths = [path for part in file.split(",") for path in sorted(folder.glob(part))]
        if not paths:
            raise FileNotFoundError(f"no file {file} in {folder}: write the results there")
        several = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        values = several if set("*,") & set(file) else several[0]
        table = str(MAKERS[kind](values))
        if columns:
            table = with_columns(table, columns.split(", "))
        return f"{start}\n{table}\n\n{end}"

    return _TABLE.sub(make, text)


def main() -> int:
    """Rewrites the documents; with ``--check`` only returns 1 if one is out of date, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report out-of-date tables")
    args = parser.parse_args()
    status = 0
    for document in DOCUMENTS:
        before = document.read_text(encoding="utf-8")
        after = filled(before, REPOSITORY)
        if before != after and args.check:
            print(f"{document.name} has an out-of-date table: run scripts/tables.py")
            status = 1
        elif before != after:
            document.write_text(after, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
