"""Runs the notebooks and stores them with their outputs.

    python scripts/run_notebooks.py [NAME…]

Every notebook gets the same first cell, which installs the package where it is missing.
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
FIRST_CELL = """\
# Installs spec_t5x where it is missing: from the checkout that this notebook lies in, else from a
# clone of REPOSITORY, the address that git clones.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # @param {type: "string"}

installed = importlib.util.find_spec("spec_t5x") is not None
clone = Path.cwd() / "spec_t5x_repository"
places = (clone, Path.cwd(), *Path.cwd().parents)
checkout = next((path for path in places if (path / "spec_t5x/__init__.py").exists()), None)
if not installed:
    address = REPOSITORY or os.environ.get("REPOSITORY")
    if checkout is None and not address:
        sys.exit("spec_t5x is not installed: set REPOSITORY above to the address that git clones")
    if checkout is None:
        subprocess.run(["git", "clone", "--quiet", "--depth=1", address, clone], check=True)
        checkout = clone
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", checkout], check=True)"""


def first_code_cell(notebook):
    """The cell that installs the package."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


def run(path: Path) -> None:
    """Runs a notebook from top to bottom and stores it.

    Raises:
      CellExecutionError: a cell failed; the stored notebook stays as it was.
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
    # What is kept is a CPU's; libtpu, where it is installed, complains that there is no TPU.
    client.execute(env={"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(REPOSITORY)})
    # Not the interpreter that happened to run it.
    notebook.metadata = {"kernelspec": {**notebook.metadata.kernelspec}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main(arguments: list[str]) -> None:
    """Runs the notebooks that are named, or all."""
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    chosen = parser.parse_args(arguments).names
    if unknown := set(chosen) - set(names):
        parser.error(f"no notebook {min(unknown)!r}: choose of {', '.join(names)}")
    for name in chosen or names:
        run(NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
