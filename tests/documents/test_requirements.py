"""The requirements leave Colab's packages as they are, and bring no TensorFlow."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.conftest import SHARED
from tests.documents.test_scripts import requirements_of_setup

LISTS = sorted((SHARED / "colab").glob("pip-freeze-*.txt"))
# Extras that a visitor to Colab may install.
EXTRAS = ("", "eval", "plots", "demo", "train", "tasks")


@pytest.mark.skipif(not LISTS, reason="needs the lists of packages beside the repository")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_colabs_versions_are_within_the_bounds(path, extra):
    pins = [line.split("==") for line in path.read_text().splitlines() if "==" in line]
    versions = {canonicalize_name(name): version for name, version in pins}
    # The list must have something to compare.
    assert versions["jax"] and versions["flax"]
    for requirement in requirements_of_setup()[extra]:
        version = versions.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), requirement


def test_decoding_alone_requires_no_extras_package():
    known = requirements_of_setup()
    names = {requirement.name for requirement in known[""]}
    brought = {each.name for extra in EXTRAS[1:] for each in known[extra]}
    assert brought.isdisjoint(names)
    assert {"seqio", "tensorflow", "sacrebleu", "clu", "matplotlib"} <= brought


def test_training_brings_what_its_curves_import():
    """clu requires neither TensorFlow nor TensorBoard, which TensorFlow requires up to 2.20."""
    (folder,) = find_spec("clu").submodule_search_locations
    text = "".join(path.read_text("utf-8") for path in Path(folder).rglob("summary_writer.py"))
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert {"tensorboard", "tensorflow"} <= imported
    known = requirements_of_setup()
    brought = {each.name for extra in ("", "train") for each in known[extra]}
    # clu does require absl.
    assert imported - sys.stdlib_module_names - {"absl"} <= brought


@pytest.mark.parametrize("extra", ["tasks", "eval", "train", "plots", "demo", "tpu-compile"])
def test_the_tests_install_every_part(extra):
    # With what the extras include.
    included, left = set(), ["test"]
    while left:
        name = left.pop()
        for requirement in requirements_of_setup()[name]:
            if requirement.name == "spec_t5x":
                left += requirement.extras - included
                included |= requirement.extras
    assert extra in included
