"""The notebooks run from top to bottom, and are stored with the outputs of one run."""

import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path

import jax
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from jax._src import xla_bridge
from nbclient import NotebookClient

from spec_t5x.labs.reproduction.public_pairs import PUBLIC
from spec_t5x.machine.xla_flags import GPU_FLAG
from tests import public_stand_ins, quick_compilation
from tests.checkpoints.hub_server import serving
from tests.child import HANGS

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = {
    path.stem: nbformat.read(path, as_version=4)
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
}
SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "run_notebooks.py"))
# Texts that must be in the outputs of each.
SHOWN = {
    "beyond_text": ["% accepted", "always_left"],
    "own_checkpoints": ["block efficiency", "| ngram ", "speed-up"],
    "paper_on_colab": ["GB/s (measured)", "t5-11b", "   0.75 ", "  3.4", "minutes from the choice"],
    "t5x_on_tpu": ["t5x.infer", "t5==0.9.4", "t5_1_0_xl ", "T(verify)"],
    "editing": ["block efficiency", "[END]", "image/png", "identical"],
    "theory": ["0.600", "6.86", "image/png"],
    "tour": ["block efficiency", "image/png", "uniform", "identical", "[END]"],
}
# Replacements that only save time.
SHORTER = {
    "time.sleep(0.1)": "time.sleep(0.02)",
    "num_steps=40": "num_steps=10",
    "num=1000": "num=100",
    "/ 1000:": "/ 100:",
    "compare(generator, sentences, options": "compare(generator, sentences[:1], options",
    "num_tokens=100": "num_tokens=20",
    "gammas = (2, 4, 7)": "gammas = (2,)",
    "gammas, rates = (2, 4, 8, 15), (0.0, 0.1, 0.2, 0.4)": "gammas, rates = (4,), (0.2,)",
    "with_errors(0.1), settings": "with_errors(0.1)[:1], settings, repeats=1",
    '("transformer", "ngram", "bigram", "copy", "uniform")': '("ngram", "uniform")',
    "MINUTES = 4000, 50e6, 15": "MINUTES = 40, 50e6, 60",
    "num_tokens=600": "num_tokens=20",
    "repeats=2": "repeats=1",
    "gamma=7, max_decode_len=64": "gamma=7, max_decode_len=8",
    "batch_size=8, max_decode_len=64": "batch_size=8, max_decode_len=8",
    "compare(corrector, mistakes, options": "compare(corrector, mistakes[:1], options, repeats=1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, kept_programs):
    """Sets what notebooks' kernels read: this package, on the CPU, and quick compilation."""
    for name, value in {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        **quick_compilation.ENVIRONMENT,
        "JAX_COMPILATION_CACHE_DIR": kept_programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_with_the_outputs_of_one_run(name):
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = "\n".join(_texts(notebook))
    assert [text for text in ("jax.devices() is [", *SHOWN[name]) if text not in shown] == []
    # Nothing is on standard error, and no path of the machine is shown.
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.get("name", "stdout") for output in outputs} <= {"stdout"}
    assert not re.search(r"(?<![\w.:/])/(tmp|root|home|usr|opt|work|content|Users)/", shown)
    assert (REPOSITORY / "notebooks" / f"{name}.ipynb").stat().st_size < 300_000


def test_the_tour_shows_samples_that_differ_and_a_line_that_is_well_formed():
    notebook = NOTEBOOKS["tour"]
    (sampled,) = (cell for cell in notebook.cells if "num_decodes" in cell.source)
    texts = [line.split(maxsplit=1)[1] for line in sampled.outputs[0].text.splitlines()]
    assert len(set(texts)) == len(texts) == 3
    summary, _ = notebook.cells[-1].outputs[0].text.split("   (block efficiency")
    assert re.fullmatch(r"[\w ,.-]+", summary)


def cell_with(name, text):
    (cell,) = (cell for cell in NOTEBOOKS[name].cells if text in cell.source)
    return cell.source


def test_models_of_ones_own_are_not_written_over(monkeypatch):
    ran, source = [], cell_with("own_checkpoints", "T5X = None")
    monkeypatch.setattr("spec_t5x.cli.main.main", lambda arguments: ran.append(arguments[:2]) or 2)
    with pytest.raises(RuntimeError, match="spec-t5x convert ended with status 2"):
        exec(source, {"NotebookError": RuntimeError})
    assert ran == [["convert", "t5-target"]]
    for name, given in {
        "HUGGING_FACE": "google/flan-t5-small",
        "T5X": "gs://b/checkpoint_1",
    }.items():
        source = source.replace(f"{name} = None", f"{name} = {given!r}")
    exec(source, names := {})
    assert len(ran) == 1 and names["HUGGING_FACE"] == "google/flan-t5-small"


def test_a_pair_is_two_names(monkeypatch):
    monkeypatch.setenv("PAIR", "google-t5/t5-base")
    source = cell_with("paper_on_colab", "PAIR = os.environ").removeprefix("%matplotlib inline\n")
    with pytest.raises(RuntimeError, match="PAIR is 'google-t5/t5-base': give a target and a dr"):
        exec(source, {"NotebookError": RuntimeError, "os": os})


def test_the_first_answers_of_a_t5x_launch_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, launched = "wmt_t2t_ende_v003-predict_with_aux.jsonl-00000-of-00001", []

    def shell(script, *arguments):
        launched.extend(arguments)
        (tmp_path / "answers").mkdir()
        line = json.dumps({"inputs": {"inputs_pretokenized": "Hi"}, "prediction": "Hallo"})
        (tmp_path / "answers" / name).write_text(f"{line}\n" * 5)
        (tmp_path / "answers" / f"{name}.COMPLETED").touch()

    exec(cell_with("t5x_on_tpu", "t5x.infer"), {"shell": shell, "Path": Path, "json": json})
    assert capsys.readouterr().out == "Hi -> Hallo\n" * 3
    # T5X has no default mesh for chips after v4.
    given = {"num_partitions=None", "model_parallel_submesh=(1, 1, 1, 1)"}
    assert {f"--gin.partitioning.PjitPartitioner.{each}" for each in given} < set(launched)


def test_all_replacements_are_used():
    text = "".join(cell.source for notebook in NOTEBOOKS.values() for cell in notebook.cells)
    assert [long for long in SHORTER if long not in text] == []


@pytest.fixture
def public_hub(tmp_path, monkeypatch):
    """Provides a Hub with tiny networks under the names of the public T5 1.0, for kernels."""
    stand_ins = public_stand_ins.write(tmp_path / "stand_ins")
    with serving() as running:
        running.repositories = dict.fromkeys(PUBLIC, stand_ins / "t5-base")
        running.repositories["google-t5/t5-small"] = stand_ins / "t5-small"
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield running


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, request):
    hub = request.getfixturevalue("public_hub") if name == "paper_on_colab" else None
    path = REPOSITORY / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert SCRIPT["first_code_cell"](notebook).source == SCRIPT["FIRST_CELL"]
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    if name == "t5x_on_tpu":
        # The launches' processes need the TPU.
        cell = "from jax._src.xla_bridge import backends_are_initialized as in_use"
        notebook.cells.append(nbformat.v4.new_code_cell(f"{cell}\nassert not in_use()"))
    if name == "own_checkpoints":
        # Its files exist when the cell runs again.
        notebook.cells.append(nbformat.v4.new_code_cell(cell_with(name, "train-ngram")))
    limits = {"timeout": HANGS, "startup_timeout": HANGS}
    client = NotebookClient(notebook, **limits, resources={"metadata": {"path": path.parent}})
    client.execute(env=dict(os.environ))
    shown = "\n".join(_texts(notebook))
    assert [text for text in SHOWN[name] if text not in shown] == []
    if hub is not None:
        target, draft = re.search(r"target (\S+), draft (\S+)", shown).groups()
        weights = {file for file in hub.sent if file.endswith(".safetensors")}
        assert weights == {f"{each}/model.safetensors" for each in (target, draft)}


def _texts(notebook):
    """Yields what the cells and widgets printed or show, as text; a picture is its type."""
    yield json.dumps(notebook.metadata.get("widgets", {}))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output
            yield output.get("text", "")
            yield from (f"{kind} {value}" for kind, value in output.get("data", {}).items())


# The first cell


class Shell:
    """Replacement of IPython's shell that notes what the first cell runs."""

    def __init__(self, names, clone):
        self.names, self.clone, self.ran = names, clone, []

    def run_line_magic(self, name, line):
        self.system(f"%{name} {line}")

    def system(self, line):
        self.ran.append(line.format_map(self.names))
        if line.startswith("git clone") and self.clone:
            # As git leaves it.
            as_cloned(self.clone)


def as_cloned(folder):
    for name in ("spec_t5x/__init__.py", "setup.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def ran_in_a_shell(clone):
    """Runs the first cell; returns the shell that it ran its commands in."""
    shell = Shell(names := {}, clone)
    names["get_ipython"] = lambda: shell
    exec(TransformerManager().transform_cell(SCRIPT["FIRST_CELL"]), names)
    return shell


@pytest.fixture
def first_cell(monkeypatch):
    """Provides ``first_cell(folder, absent, clone)``: what it runs where these modules are absent.

    ``clone`` is the folder that ``git clone`` makes, if it succeeds; ``found`` are specs in place
    of absent modules' None. JAX has not started.
    """
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)

    def run(folder, absent=("spec_t5x",), clone=None, **found):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XLA_FLAGS", "")
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: found.get(name) if name in absent else find_spec(name),
        )
        shell = ran_in_a_shell(clone)
        *ran, devices = shell.ran
        assert devices == f'"{sys.executable}" -m spec_t5x.machine.accelerators'
        assert os.environ["XLA_FLAGS"] == GPU_FLAG
        return ran

    return run


def pip(folder):
    return f'%pip install --quiet "{folder}[plots]"'


def test_a_notebook_in_or_beside_a_clone_installs_that(first_cell, tmp_path):
    # In the clone the package alone is found without its requirements.
    for absent in ("spec_t5x", "jaxtyping", "matplotlib"):
        for folder in (REPOSITORY / "notebooks", REPOSITORY):
            assert first_cell(folder, absent=[absent]) == [pip(REPOSITORY)]
    as_cloned(clone := tmp_path / "a clone")
    assert first_cell(tmp_path) == [pip(clone)]
    assert first_cell(tmp_path, absent=[]) == []


def test_a_clone_of_the_packages_name_is_not_the_package(first_cell, tmp_path):
    as_cloned(clone := tmp_path / "spec_t5x")
    namespace = importlib.machinery.PathFinder.find_spec("spec_t5x", [str(tmp_path)])
    assert first_cell(tmp_path, spec_t5x=namespace) == [pip(clone)]


def test_folders_that_may_not_be_read_are_passed_over(first_cell, tmp_path, monkeypatch):
    as_cloned(clone := tmp_path / "a clone")
    stat = os.stat

    def guarded(path, *args, **options):
        # Root may read every folder.
        if str(path).endswith("spec_t5x/__init__.py") and clone not in Path(path).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", guarded)
    assert first_cell(tmp_path) == [pip(clone)]


def test_an_installed_package_gets_a_clone_too(first_cell, tmp_path, monkeypatch):
    """Notebooks need the clone's examples and scripts."""
    monkeypatch.delenv("REPOSITORY", raising=False)
    assert first_cell(tmp_path, absent=[]) == []
    address, clone = "https://host.example/spec_t5x", tmp_path / "spec_t5x_repository"
    monkeypatch.setenv("REPOSITORY", address)
    cloned = [f'git clone --quiet --depth=1 "{address}" "{clone}"']
    assert first_cell(tmp_path, absent=[], clone=clone) == cloned
    # The second run finds it.
    assert first_cell(tmp_path, absent=[]) == []


def test_a_second_run_asks_for_the_devices_that_the_kernel_holds(monkeypatch, capsys):
    jax.devices()
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert ran_in_a_shell(clone=None).ran == []
    assert capsys.readouterr().out.startswith("jax.devices() is [")


def test_a_notebook_alone_installs_from_a_clone(first_cell, tmp_path, monkeypatch):
    address, clone = "https://host.example/spec_t5x", tmp_path / "spec_t5x_repository"
    monkeypatch.setenv("REPOSITORY", address)
    with pytest.raises(Exception, match=f"nothing was cloned: REPOSITORY is {address}, give"):
        first_cell(tmp_path)
    assert first_cell(tmp_path, clone=clone) == [
        f'git clone --quiet --depth=1 "{address}" "{clone}"',
        pip(clone),
    ]


def test_a_notebook_alone_names_in_a_line_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPOSITORY", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not InteractiveShell().run_cell(SCRIPT["FIRST_CELL"]).success
    message = "spec_t5x[plots] is not here: set REPOSITORY above to what git clones"
    assert capsys.readouterr().out.splitlines() == [message]
