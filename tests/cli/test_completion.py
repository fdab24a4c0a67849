"""What a shell is offered, by argcomplete's own protocol."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x import names, registry
from spec_t5x.checkpoints.packaged import packaged_names
from spec_t5x.cli.completion import COMPLETERS
from spec_t5x.data.metrics import METRICS
from spec_t5x.verifiers import VERIFIERS

REPOSITORY = Path(__file__).parents[2]
# As the shell runs the command; then says which heavy modules that has imported.
PROGRAM = """
import atexit, os, sys
exit, os._exit = os._exit, lambda status: (print(*loaded()), sys.stdout.flush(), exit(status))
loaded = lambda: [name for name in ("jax", "flax", "tensorflow") if name in sys.modules]
from spec_t5x.cli.main import main
main()
"""


@pytest.fixture
def offered(tmp_path):
    """``offered(line)``: the words for the end of a line; checks that nothing heavy is imported."""
    pytest.importorskip("argcomplete")
    read, answers = tmp_path / "read", tmp_path / "answers"
    read.mkdir()
    (read / "corpus.txt").touch()

    def ask(line: str) -> set[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SHELL": "bash",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }
        command = [sys.executable, "-c", PROGRAM]
        result = subprocess.run(
            command, env=environment, cwd=read, capture_output=True, text=True, timeout=120
        )
        assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
        return {word.strip() for word in answers.read_text().split("\n")}

    return ask


def test_commands_flags_and_names_are_offered_without_jax(offered):
    assert {"generate", "infer", "doctor"} <= offered("spec-t5x ")
    trainings = {"train-ngram", *registry.names("training")}
    assert offered("spec-t5x train-") == {name for name in trainings if name.startswith("train-")}
    assert {"--draft", "--draft_top_k"} <= offered("spec-t5x generate --draft")
    targets = [name for name in packaged_names() if name.startswith("ende-t")]
    assert targets and offered("spec-t5x generate --target ende-t") == set(targets)
    assert offered("spec-t5x generate --draft cop") == {"copy"}
    # A path, too.
    assert offered("spec-t5x generate --draft co") == {"copy", "corpus.txt", "correct-target"}
    assert offered("spec-t5x generate --verifier t") == {"token", "tree"}
    assert offered("spec-t5x benchmark --draft big") == {"bigram"}
    assert offered("spec-t5x generate --weights int") == {"int8", "int4"}


def test_the_words_are_those_that_are_taken():
    assert set(names.VERIFIERS) == set(VERIFIERS)
    assert COMPLETERS["metric", "NAME"]("") == list(METRICS)
