"""The notebooks run from top to bottom, and are stored with the outputs of such a run."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import quick_compilation

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# One is for a TPU, and was never run on one: it has no outputs.
RUN_HERE = [path for path in NOTEBOOKS if path.stem != "t5x_on_tpu"]
# What must be seen in the outputs of each.
SHOWN = {
    "beyond_text": ["% accepted", "always_left"],
    "own_checkpoints": ["block efficiency", "| ngram ", "speed-up"],
    "t5x_on_tpu": ["t5x.infer", "scripts/constraints.txt", "T(verify)"],
    "theory": ["0.600", "6.86", "image/png"],
    "tour": ["block efficiency", "drafts accepted", "identical", "[END]"],
}
# What only takes time.
SHORTER = {
    "time.sleep(0.1)": "time.sleep(0.02)",
    "num_steps=40": "num_steps=10",
    "num=1000": "num=100",
    "/ 1000:": "/ 100:",
    "compare(generator, sentences, options": "compare(generator, sentences[:1], options",
    "num_tokens=100": "num_tokens=20",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, kept_programs):
    """The kernels' own: this package, on the CPU, in as little of it as they need."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # Their programs run for a moment: compiling them is the cost.
    for name, value in quick_compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", kept_programs)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.mark.parametrize("path", RUN_HERE, ids=lambda path: path.stem)
def test_it_is_stored_with_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = "\n".join(_texts(notebook))
    for expected in SHOWN[path.stem]:
        assert expected in shown
    # Of whoever ran it nothing is shown.
    assert str(REPOSITORY) not in shown and str(Path.home() / ".") not in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}})
    client.execute(env=dict(os.environ))
    shown = "\n".join(_texts(notebook))
    for expected in SHOWN[path.stem]:
        assert expected in shown


def _texts(notebook):
    """What the cells and widgets printed or show, as text; a picture is its type."""
    yield json.dumps(notebook.metadata.get("widgets", {}))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
            yield output.get("text", "")
            yield from (f"{kind} {value}" for kind, value in output.get("data", {}).items())
