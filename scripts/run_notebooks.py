"""Runs the notebooks and stores them with their outputs, in place or in another folder.

    python scripts/run_notebooks.py [--to DIR] [NAME…]

Every notebook gets the same first cell, which installs the package if it is missing.
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
# Variables for stored outputs: a clone has no T5 1.0, and needs none of it.
VARIABLES = {"paper_on_colab": {"PAIR": "t5-target t5-draft"}}
FIRST_CELL = """\
# Installs spec_t5x where it is missing: from the clone that this notebook lies in or beside, else
# from a clone of REPOSITORY, whose examples and scripts some notebooks run.
import importlib.util
import os
import sys
from pathlib import Path

REPOSITORY = ""  # @param {type: "string"}


class NotebookError(Exception):
    \"\"\"Ends a run of cells with a line in the place of a traceback.\"\"\"

    def _render_traceback_(self):
        return [str(self)]


here = Path.cwd()
places = (here, *here.parents, *here.glob("*/"))
# Unlike a path's own exists, this one passes over folders that may not be read.
checkout = next((path for path in places if os.path.exists(path / "spec_t5x/__init__.py")), None)
address = REPOSITORY or os.environ.get("REPOSITORY")
if checkout is None and address:
    checkout = here / "spec_t5x_repository"
    !git clone --quiet --depth=1 "{address}" "{checkout}"
    if not (checkout / "setup.py").exists():
        raise NotebookError(f"nothing was cloned: REPOSITORY is {address}, give another")
# The package itself is also found in the current folder, without what it needs. A folder of its
# name, such as a clone, is found as a package without origin.
found = map(importlib.util.find_spec, ("spec_t5x", "jaxtyping", "matplotlib"))
if not all(spec and spec.origin for spec in found):
    if checkout is None:
        raise NotebookError("spec_t5x[plots] is not here: set REPOSITORY above to what git clones")
    %pip install --quiet "{checkout}[plots]"
# On a GPU each loop becomes one launch, if JAX has not made an array yet.
importlib.import_module("spec_t5x.machine.xla_flags").apply()
# Shows jax.devices(), and what to do where the machine has a GPU or TPU that is not among them: in
# another process, since a TPU serves one at a time, unless JAX has started in this one.
python, module = sys.executable, "spec_t5x.machine.accelerators"
if importlib.import_module("jax._src.xla_bridge").backends_are_initialized():
    importlib.import_module(module).main()
else:
    !"{python}" -m {module}"""


def first_code_cell(notebook):
    """Returns the notebook's first code cell, which installs the package."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


def run(path: Path, folder: Path) -> None:
    """Runs the notebook at ``path`` from top to bottom and writes the result to ``folder``.

    Raises:
      CellExecutionError: a cell failed; nothing is written.
    """
    notebook = nbformat.read(path, as_version=4)
    first_code_cell(notebook).source = FIRST_CELL
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    notebook.metadata.pop("widgets", None)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    # Stored outputs are those of a CPU; an installed libtpu would warn that it finds no TPU.
    variables = {**VARIABLES.get(path.stem, {}), "PYTHONPATH": str(REPOSITORY)}
    client.execute(env={"JAX_PLATFORMS": "cpu", **os.environ, **variables})
    # Drops the version of the Python that ran it.
    notebook.metadata = {"kernelspec": {**notebook.metadata.kernelspec}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    nbformat.validate(notebook)
    nbformat.write(notebook, folder / path.name)


def main(arguments: list[str]) -> None:
    """Runs the notebooks named in ``arguments``, or all of them."""
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--to", type=Path, default=NOTEBOOKS, metavar="DIR", help="folder to write to (notebooks)"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)} (all)"
    )
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(names):
        parser.error(f"no notebook {min(unknown)!r}: choose of {', '.join(names)}")
    args.to.mkdir(parents=True, exist_ok=True)
    for name in args.names or names:
        run(NOTEBOOKS / f"{name}.ipynb", args.to)


if __name__ == "__main__":
    main(sys.argv[1:])
