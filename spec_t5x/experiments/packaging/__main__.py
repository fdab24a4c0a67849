"""``python -m spec_t5x.experiments.packaging``: see the package."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.loading import PACKAGED_MODELS, load
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json, staged_directory, write_json
from spec_t5x.errors import InputError
from spec_t5x.experiments.packaging import cards
from spec_t5x.experiments.packaging.cards import CARDS, COMPARED, Measurement

FIGURES_NAME = "figures.json"
# Of the models of texts: longer sources were not trained on, and are refused.
MAX_SOURCE_LENGTH = 96

# What a measurement prints, of the measurement and the folder that its files are in.
Measure = Callable[[Measurement, Path], dict[str, Any]]


def main(arguments=None) -> int:
    """Runs one of the three commands; 1 if ``check`` finds a difference, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.packaging")
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="take over what a training exported")
    saving.add_argument("name", choices=CARDS)
    saving.add_argument("directory", type=Path)
    saving.add_argument("--steps", type=int, help="of the training (what the export says)")
    for name, about in (("measure", "write cards"), ("check", "measure again and compare")):
        measuring = commands.add_parser(name, help=about)
        measuring.add_argument("--data", type=Path, required=True, metavar="DIR")
        measuring.add_argument("names", nargs="*", metavar="NAME")
    for each in commands.choices.values():
        each.add_argument("--models", type=Path, default=PACKAGED_MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        if args.command == "save":
            save(args.name, args.directory, args.models, steps=args.steps)
            return 0
        names = args.names or list(CARDS)
        check_places(names, args.data)
        run = {"measure": measure, "check": check}[args.command]
        return run(names, args.data, args.models, remembered(evaluate))
    except InputError as error:
        print(f"packaging: error: {error}", file=sys.stderr)
        return 2


def save(name: str, directory: Path, models: Path, *, steps: int | None = None) -> None:
    """Copies an export to its packaged name; its card is written by ``measure``.

    Args:
      name: of ``CARDS``.
      directory: a model, heads or tables.
      models: the packaged models.
      steps: of all its trainings, where the export knows of the last one alone.

    Raises:
      InputError: no such model, nothing is there, or nothing that a training exported.
    """
    cards.card_of(name)
    config = read_json(directory / CONFIG_NAME)
    destination = models / name
    if directory.resolve() == destination.resolve():
        raise InputError(f"{directory} is the packaged {name} itself: give an export's directory")
    kind = config.get("format")
    if not str(kind).startswith("spec_t5x"):
        raise InputError(
            f"{directory} has the format {kind!r}: give what a training exported, or run "
            "spec-t5x convert first"
        )
    steps = steps or config.get("step")
    if kind == "spec_t5x":
        _save_model(directory, destination, steps)
        return
    with staged_directory(destination, overwrite=True) as stage:
        shutil.copytree(directory, stage, dirs_exist_ok=True)
        if steps:
            config.pop("step", None)
            write_json(stage / CONFIG_NAME, config | {"training_steps": steps})


def _save_model(directory: Path, destination: Path, steps: int | None) -> None:
    loaded = load(directory, on_host=True)
    figures = {key: loaded.metadata.get(key) for key in ("cross_entropy", "accuracy")}
    save_model(
        destination,
        loaded.params,
        loaded.config,
        loaded.vocabulary,
        extra={"max_source_length": MAX_SOURCE_LENGTH, "training_steps": steps, **figures},
        overwrite=True,
    )


def check_places(names: list[str], data: Path) -> None:
    """Before a measurement, which may be long, all that the next ones need.

    Raises:
      InputError: no such model, or its folder is not in ``data``.
    """
    for name in names:
        folder = data / cards.card_of(name).folder
        if not folder.is_dir():
            raise InputError(f"no folder {folder}: give --data the folder that holds it")


def measure(names: list[str], data: Path, models: Path, run: Measure) -> int:
    """Runs the commands of the cards; writes figures.json and README.md of each."""
    for name in names:
        card = cards.card_of(name)
        figures = {each.name: run(each, data / card.folder) for each in card.measurements}
        directory = models / name
        write_json(directory / FIGURES_NAME, figures)
        text = cards.rendered(name, directory, figures)
        (directory / "README.md").write_text(text, encoding="utf-8")
    return 0


def check(names: list[str], data: Path, models: Path, run: Measure) -> int:
    """Runs the commands again and prints what each card says beside it."""
    outside = 0
    print("| model | text | figure | card (95 % interval) | now | |\n|---|---|---|---|---|---|")
    for name in names:
        card = cards.card_of(name)
        claimed = read_json(models / name / FIGURES_NAME)
        for each in card.measurements:
            for line, is_within in compared(claimed[each.name], run(each, data / card.folder)):
                outside += not is_within
                print(f"| {name} | {each.label} | {line} |", flush=True)
    print(f"\n{outside} figures outside of their intervals")
    return int(outside > 0)


def compared(claimed: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """A line for each figure with an interval, and whether it lies within it."""
    lines = []
    for key in COMPARED:
        if key not in claimed["intervals"]:
            continue
        low, high = claimed["intervals"][key]
        is_within = low <= found[key] <= high
        verdict = "within" if is_within else "OUTSIDE"
        lines.append(
            (
                f"{key} | {claimed[key]:.3f} ({low:.3f}\u2013{high:.3f}) | {found[key]:.3f} "
                f"| {verdict}",
                is_within,
            )
        )
    return lines


def evaluate(measurement: Measurement, folder: Path) -> dict[str, Any]:
    """What the command of a card prints, run as a user runs it.

    Raises:
      InputError: it fails.
    """
    print(f"spec-t5x evaluate {measurement.arguments}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "spec_t5x.cli.main", "evaluate"]
    done = subprocess.run(
        [*command, *measurement.arguments.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(
            f"spec-t5x evaluate {measurement.arguments} ended with {done.returncode}: see above"
        )
    return json.loads(done.stdout)


def remembered(run: Measure) -> Measure:
    """The same, each command run once: a target and its draft share some."""
    results: dict[tuple[str, Path], dict[str, Any]] = {}

    def once(measurement: Measurement, folder: Path) -> dict[str, Any]:
        key = (measurement.arguments, folder)
        if key not in results:
            results[key] = run(measurement, folder)
        return results[key]

    return once


if __name__ == "__main__":
    sys.exit(main())
