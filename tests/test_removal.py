"""The package without ``contrib``, and without ``labs`` too: what remains is imported and works."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import core_copy
from tests.child import finished

# A part of the core's tests that takes a minute; ``scripts/core_tests.sh`` runs all of them.
TESTS = (
    "tests/test_registry.py",
    "tests/test_imports.py",
    "tests/test_verifiers.py",
    "tests/models/test_sizes.py",
    "tests/checkpoints/test_native.py",
    "tests/checkpoints/test_drafts.py",
    "tests/drafts/test_ngram.py",
    "tests/loops/test_outputs.py",
)
PROGRAM = """
import contextlib, importlib, io, json, pathlib, sys
import spec_t5x
from spec_t5x import registry
from spec_t5x.cli.main import main
from spec_t5x.generation import GenerateOptions, Generator

package = pathlib.Path(spec_t5x.__file__).parent
for path in sorted(package.rglob("*.py")):
    # What T5X's own programs import.
    if not {"t5x_plugin", "t5x_training"} & set(path.parts) and path.stem != "__main__":
        parts = path.relative_to(package.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
helped = io.StringIO()
for words in ("", "generate", "infer", "convert", *sys.argv[1:]):
    with contextlib.redirect_stdout(helped), contextlib.suppress(SystemExit):
        main([*words.split(), "--help"])
examined = io.StringIO()
if "doctor" in sys.argv:
    with contextlib.redirect_stdout(examined):
        main(["doctor"])
options = GenerateOptions(gamma=3, max_decode_len=8)
(outputs,) = Generator.load("t5-target").generate(["summarize: Good morning."], options)
found = {
    "package": str(package),
    "help": helped.getvalue(),
    "doctor": examined.getvalue(),
    "text": outputs[0].output,
    "drafts": registry.names("draft"),
    "families": registry.names("family"),
    "rings": [name for name in ("labs", "contrib") if f"spec_t5x.{name}" in sys.modules],
}
print(json.dumps(found))
"""


def copied(directory: Path, *rings: str) -> tuple[Path, Callable]:
    """Returns a copy of the package without ``rings``, and a function that runs programs in it."""
    core_copy.write(directory, *rings)

    here = {"cwd": directory, "PYTHONPATH": str(directory)}
    return directory, functools.partial(finished, sys.executable, **here)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Returns a copy without contrib, and a function that runs programs in it."""
    return copied(tmp_path_factory.mktemp("core"), "contrib")


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    """Returns a copy without contrib and labs, and a function that runs programs in it."""
    return copied(tmp_path_factory.mktemp("core_alone"), "contrib", "labs")


def what_works(directory: Path, run: Callable, *commands: str) -> dict:
    """Returns what ``PROGRAM`` finds in a copy, with the help of more commands."""
    result = run("-c", PROGRAM, *commands)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["package"] == str(directory / "spec_t5x")
    assert "uniform" in found["drafts"] and not {"medusa", "cascade"} & {*found["drafts"]}
    assert found["families"] == ["t5"]
    assert found["text"]
    return found


def test_its_modules_commands_and_packaged_pair_work(core):
    found = what_works(*core, "train", "benchmark", "doctor")
    assert "generate would work here." in found["doctor"] or "but slowly" in found["doctor"]
    assert found["rings"] == ["labs"]
    assert "train-ngram" in found["help"] and "train-lm" not in found["help"]


def test_the_core_alone_decodes(core_alone):
    found = what_works(*core_alone)
    assert found["rings"] == []
    assert not re.search(r"^ +(train|benchmark|demo)", found["help"], re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ["benchmark", "--help"],
        ["doctor"],
        ["train-ngram", "--data", "x"],
        ["generate", "x", "--trace"],
    ],
)
def test_what_needs_labs_is_said_in_a_line(core_alone, words):
    _, run = core_alone
    result = run("-m", "spec_t5x.cli.main", *words)
    (line,) = result.stderr.splitlines()
    name = words[-1] if words[0] == "generate" else words[0]
    missing = f"{name} needs spec_t5x.labs, which is not installed: pip install spec_t5x again"
    assert result.returncode == 2 and line.startswith(f"spec-t5x: error: {missing}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "medusa:somewhere"], "no draft 'medusa:somewhere': .* or one of transformer,"),
        (["--target", "lm-target"], "has network 'gpt', this spec_t5x reads t5: install"),
    ],
)
def test_what_is_gone_is_said_in_a_line(core, words, message):
    _, run = core
    result = run("-m", "spec_t5x.cli.main", "generate", "A text.", *words)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert re.search(message, line), line


def test_its_tests_pass(core):
    _, run = core
    result = run("-m", "pytest", *TESTS, "-x", "-q", "-p", "no:cacheprovider")
    assert result.returncode == 0, result.stdout[-3000:]
