"""The core without ``contrib``: its modules are imported, its commands and tests run."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests import core_copy

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
for words in ([], *([name] for name in ("generate", "infer", "train", "convert", "benchmark"))):
    with contextlib.redirect_stdout(helped), contextlib.suppress(SystemExit):
        main([*words, "--help"])
options = GenerateOptions(gamma=3, max_decode_len=8)
(outputs,) = Generator.load("t5-target").generate(["summarize: Good morning."], options)
contrib = [name for name in sys.modules if name.startswith("spec_t5x.contrib")]
found = {
    "package": str(package),
    "help": helped.getvalue(),
    "text": outputs[0].output,
    "drafts": registry.names("draft"),
    "families": registry.names("family"),
    "contrib": contrib,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Returns a copy of the package without contrib, and a function that runs programs in it."""
    directory = tmp_path_factory.mktemp("core")
    core_copy.write(directory)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(directory)},
            capture_output=True,
            text=True,
        )

    return directory, run


def test_its_modules_commands_and_packaged_pair_work(core):
    directory, run = core
    result = run("-c", PROGRAM)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["package"] == str(directory / "spec_t5x") and found["contrib"] == []
    assert "uniform" in found["drafts"] and not {"medusa", "cascade"} & {*found["drafts"]}
    assert found["families"] == ["t5"]
    assert "train-ngram" in found["help"] and "train-lm" not in found["help"]
    assert found["text"]


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
