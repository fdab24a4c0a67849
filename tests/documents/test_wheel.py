"""The wheel holds the package with its models, gin files and data files, and nothing else."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import spec_t5x
from tests.child import REPOSITORY, printed

# The largest file, in bytes, that package registries take by default.
LARGEST = 100e6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel without a network, from a copy that holds an earlier build."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("spec_t5x", "gin_configs", "tests"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    removed = source / "build" / "lib" / "spec_t5x" / "contrib" / "removed"
    removed.mkdir(parents=True)
    (removed / "__init__.py").touch()
    printed("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_every_file_of_the_package_and_no_other(wheel):
    package = REPOSITORY / "spec_t5x"
    wanted = {
        str(path.relative_to(REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {
        f"spec_t5x/{path.relative_to(REPOSITORY)}"
        for path in (REPOSITORY / "gin_configs").rglob("*")
        if path.suffix == ".gin" or path.name == "__init__.py"
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert inside == wanted
    assert "spec_t5x/pretrained/t5-target/params/manifest.ocdbt" in inside
    assert "spec_t5x/gin_configs/runs/infer.gin" in inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_has_no_part_of_the_tests(wheel):
    arguments = "--sdist", "--no-isolation", "--outdir", wheel.parent, wheel.parent / "source"
    printed("-m", "build", *arguments)
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        parts = [name.split("/") for name in archive.getnames()]
    assert {part[1] for part in parts if part[2:]} == {
        "spec_t5x",
        "spec_t5x.egg-info",
        "gin_configs",
    }


def test_its_version_is_that_of_the_package_and_the_documents(wheel):
    version = spec_t5x.__version__
    assert wheel.name.split("-")[1] == version
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version


def test_a_build_where_the_sources_are_keeps_them(tmp_path):
    for name in ("setup.py", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "spec_t5x").mkdir()
    (tmp_path / "spec_t5x" / "__init__.py").touch()
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "."]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert (tmp_path / "spec_t5x" / "__init__.py").exists()


def test_its_gin_files_are_found_by_the_names_of_a_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = "import sys; from spec_t5x.cli.gin_files import read_all\n"
    program += "print(*(name for name, _ in read_all(sys.argv[1:])), sep='\\n')"
    here = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path / "installed")}
    shown = printed("-c", program, "gin_configs/runs/distill_t5_draft.gin", **here)
    names = set(shown.splitlines())
    # The files that it includes are among them.
    assert len(names) > 1
    inside = tmp_path / "installed" / "spec_t5x" / "gin_configs"
    assert all(Path(name).is_relative_to(inside) for name in names)


def test_it_is_small_enough(wheel):
    assert 1e6 < wheel.stat().st_size < LARGEST
