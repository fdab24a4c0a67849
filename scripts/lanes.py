"""Prints pytest options, one per line, that skip parts of the second lane (slow tests).

    python scripts/lanes.py            # the default lane: every part is skipped
    python scripts/lanes.py --changed  # also runs the parts whose files have changed

A part is skipped with ``--ignore``. Files that all tests share, for example ``tests/conftest.py``,
belong to every part. A file has changed if it differs from its version in a base revision: the one
that the environment variable CI_BASE names or, without it, the last commit at least a day older
than HEAD. If git cannot find the base, every part runs.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]


class Part(NamedTuple):
    """Part of the second lane: slow tests, and prefixes of the paths that they depend on."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]


# Files that belong to every part: set-up, the tests' fixtures and helpers, and a module of tests
# whose drafts others decode with.
_SHARED = re.compile(
    r"pytest\.ini|setup\.py|pyproject\.toml|scripts/lanes\.py|tests/(.+/)?(?!test_)\w+\.py"
    r"|tests/drafts/test_every_draft\.py"
)
# Packages and modules that every decoding program depends on.
_DECODING = tuple(
    f"spec_t5x/{name}"
    for name in (
        *("beams", "drafts", "generation", "interfaces", "loops", "machine", "models", "options"),
        *("sampling", "tuning", "verifiers"),
    )
)
PARTS: Mapping[str, Part] = {
    "notebooks": Part(
        ("tests/documents/test_notebooks.py",),
        ("notebooks/", "scripts/run_notebooks.py", "spec_t5x/generation/", "spec_t5x/labs/demo"),
    ),
    "site": Part(
        ("tests/documents/test_site.py",),
        ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/", "mkdocs.yml", "scripts/"),
    ),
    "wheel": Part(
        ("tests/documents/test_wheel.py",),
        ("setup.py", "pyproject.toml", "MANIFEST.in", "spec_t5x/pretrained/", "gin_configs/"),
    ),
    "pages in a browser": Part(
        ("tests/labs/commands/test_demo.py", "tests/labs/reproduction/test_report_in_browser.py"),
        (
            *("spec_t5x/labs/commands/demo", "spec_t5x/labs/demo", "spec_t5x/labs/reproduction/"),
            "spec_t5x/generation/",
        ),
    ),
    "compiled programs": Part(
        (
            "tests/loops/test_compiled_for_tpu.py",
            "tests/loops/test_compiled_loops.py",
            "tests/labs/tpu/",
        ),
        (*_DECODING, "spec_t5x/labs/tpu/"),
    ),
    "laws beside transformers": Part(
        ("tests/loops/test_laws_against_transformers.py", "tests/loops/test_ruled.py"),
        (*_DECODING, "tests/drafts/test_ngram.py"),
    ),
    "checkpoints beside transformers and T5X": Part(
        (
            "tests/checkpoints/test_generation_config.py",
            "tests/checkpoints/test_layouts.py",
            "tests/checkpoints/test_special_ids.py",
            "tests/checkpoints/test_t5x_itself.py",
        ),
        (
            *_DECODING,
            "spec_t5x/checkpoints/",
            "spec_t5x/data/",
            "spec_t5x/labs/training/exports",
            "tests/checkpoints/test_huggingface.py",
        ),
    ),
    "contrib": Part(
        ("tests/contrib/", "tests/test_removal.py"),
        (
            *(*_DECODING, "spec_t5x/cli/", "spec_t5x/contrib/", "spec_t5x/registry"),
            # Tests that contrib's repeat with its own drafts and models.
            *("tests/checkpoints/", "tests/drafts/", "tests/end_to_end/", "tests/loops/"),
            *("tests/labs/benchmark/", "tests/labs/testing/", "tests/labs/training/"),
            "tests/models/",
        ),
    ),
    "several devices": Part(
        ("tests/labs/training/test_layout.py", "tests/models/test_partitioning.py"),
        ("spec_t5x/labs/training/", "spec_t5x/models/"),
    ),
    "every draft by its name": Part(
        ("tests/end_to_end/", "tests/inference/test_processes.py"),
        (
            *(*_DECODING, "spec_t5x/checkpoints/", "spec_t5x/inference/"),
            "spec_t5x/labs/training/exports",
        ),
    ),
    "trainings": Part(
        (
            "tests/labs/training/test_distill.py",
            "tests/labs/training/test_killed_runs.py",
            "tests/labs/training/test_run_distill.py",
            "tests/labs/training/test_run_tasks.py",
            "tests/labs/training/test_task_streams.py",
        ),
        ("spec_t5x/labs/training/", "spec_t5x/data/", "spec_t5x/models/"),
    ),
    "comparisons": Part(
        ("tests/benchmarks/", "tests/labs/reproduction/test_measured.py"),
        (
            *("benchmarks/", "spec_t5x/labs/benchmark/", "spec_t5x/labs/reproduction/"),
            *("scripts/gpu/measure.sh", "tests/labs/benchmark/test_simulated_acceptance.py"),
            "tests/labs/benchmark/test_sweep.py",
        ),
    ),
}


def changed_files() -> list[str] | None:
    """Returns the paths that differ from the base revision; None if git finds no base."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        seconds = int(git("log", "-1", "--format=%ct")) - 24 * 60 * 60
        base = os.environ.get("CI_BASE") or git("rev-list", "-1", f"--before={seconds}", "HEAD")
        untracked = git("ls-files", "--others", "--exclude-standard").splitlines()
        return git("diff", "--name-only", base).splitlines() + untracked if base else None
    except (OSError, subprocess.CalledProcessError):
        return None


def left_out(changed: Iterable[str] | None) -> list[str]:
    """Returns the tests of parts without a changed path; [] for None or a changed shared file."""
    paths = () if changed is None else tuple(changed)
    if changed is None or any(map(_SHARED.fullmatch, paths)):
        return []
    return [
        test
        for part in PARTS.values()
        if not any(path.startswith((*part.tests, *part.sources)) for path in paths)
        for test in part.tests
    ]


def main() -> int:
    """Prints one ``--ignore`` option for each skipped test; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changed", action="store_true", help="run the parts whose files changed")
    args = parser.parse_args()
    for test in left_out(changed_files() if args.changed else ()):
        print(f"--ignore={test}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
