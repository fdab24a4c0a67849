"""``spec-t5x doctor``: what it finds, and what it makes of what it does not find."""

import functools
import json
import os

import jax
import pytest

from spec_t5x.checkpoints import loading, named_models, packaged
from spec_t5x.generation import installation
from spec_t5x.machine import accelerators, description, operations, versions
from spec_t5x.machine.extras import EXTRAS, Extra
from spec_t5x.machine.operations import Operations
from tests.documents.test_scripts import requirements_of_setup

pytestmark = pytest.mark.usefixtures("unchecked", "quick_compilation", "kept_programs")


@pytest.fixture
def doctor(run):
    """``doctor(*flags)``: exit status and what was found; nothing else is printed."""

    def examine(*flags):
        result = run("doctor", "--json", *flags)
        assert result.errors == []
        return result.status, json.loads("\n".join(result.lines))

    return examine


@pytest.fixture(autouse=True)
def known_environment(monkeypatch, tmp_path):
    for name in installation._VARIABLES:
        if name not in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))


def test_a_machine_that_is_well(doctor, run, tmp_path):
    (tmp_path / "hf" / "hub" / "models").mkdir(parents=True)
    (tmp_path / "hf" / "hub" / "models" / "weights").write_bytes(bytes(1000))
    (tmp_path / "hf" / "hub" / "link").symlink_to(tmp_path / "hf" / "hub" / "models" / "weights")
    status, found = doctor()
    assert (status, found["problems"]) == (0, [])
    assert found["versions"]["jax"] == jax.__version__
    assert found["machine"]["platform"] == jax.devices()[0].platform
    assert found["packaged_models"] == packaged.packaged_names()
    assert found["environment"]["HF_HOME"] == str(tmp_path / "hf")
    # The link counts as a link.
    assert 1000 < found["caches"]["Hugging Face"]["num_bytes"] < 1500
    nothing_yet = {"path": str(tmp_path / "programs"), "num_bytes": None, "writable": True}
    assert found["caches"]["compiled programs"] == nothing_yet
    assert not (tmp_path / "programs").exists()
    result = run("doctor")
    assert (result.status, result.lines[-1]) == (0, "generate would work here.")
    assert any(f"jax {jax.__version__}" in line for line in result.lines)


def test_with_try_a_text_is_decoded(doctor, tiny_pair, monkeypatch):
    pair = {"target": str(tiny_pair / "target"), "draft": str(tiny_pair / "draft")}
    tiny = functools.partial(named_models.Models, **pair)
    monkeypatch.setattr(named_models, "Models", tiny)
    status, found = doctor("--try")
    assert (status, found["problems"]) == (0, [])
    assert found["tried"]["output"] and found["tried"]["seconds"] > 0
    monkeypatch.setattr(named_models, "Models", functools.partial(tiny, target="/no/such"))
    status, found = doctor("--try")
    assert (status, found["tried"]) == (1, None)
    assert "decoding fails (no directory /no/such" in found["problems"][0]


def test_what_is_missing_is_named_with_the_remedy(doctor, run, monkeypatch, tmp_path):
    absent = {"no_such_module": Extra("hf", "reading this")}
    monkeypatch.setattr(installation, "EXTRAS", absent)
    for module in (loading, packaged):
        monkeypatch.setattr(module, "PACKAGED_MODELS", tmp_path)
    status, found = doctor()
    assert (status, found["missing"]) == (1, ["reading this (pip install 'spec_t5x[hf]')"])
    target, draft = found["problems"]
    assert target.startswith(f"the packaged ende-target is not in {tmp_path}: pip install")
    assert draft.startswith("the packaged ende-draft")
    result = run("doctor")
    assert result.status == 1
    assert result.lines[-1] == f"generate would not work: {target}; {draft}."


def test_jax_that_does_not_start(doctor, monkeypatch):
    def machine():
        raise RuntimeError("Unable to initialize\nbackend 'tpu'")

    monkeypatch.setattr(description, "machine", machine)
    status, found = doctor()
    why = "JAX does not start (Unable to initialize backend 'tpu'): "
    assert (status, found["problems"]) == (1, [why + "set JAX_PLATFORMS=cpu"])
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert doctor()[1]["problems"] == [why + "JAX_PLATFORMS is 'tpu', unset it"]


@pytest.fixture
def required(monkeypatch):
    """``required(installed, *requirements)``: what the package requires, and one version."""

    def declare(installed, *texts):
        version = versions.version
        monkeypatch.setattr(versions, "version", lambda name: installed.get(name) or version(name))
        monkeypatch.setattr(versions.importlib.metadata, "requires", lambda name: list(texts))

    return declare


@pytest.mark.parametrize(
    ("installed", "requirement", "problem"),
    [
        ({}, "no-such-package>=2", "no-such-package is not installed: pip install"),
        ({"flax": "0.10.1"}, "flax<0.13,>=0.11.2", "flax is 0.10.1: pip install 'flax<0.13,>=0.1"),
        ({"numpy": "3.0.0"}, "numpy<3,>=2.0", "numpy is 3.0.0: pip install 'numpy<3,>=2.0'"),
        ({"rich": "13.9.4"}, "rich<16,>=13.9", None),
        # What comes before a release serves, and extras and other systems ask for nothing.
        ({"jax": "0.12.0rc1"}, "jax<0.13,>=0.7.2", None),
        ({"seqio": "0.0.1"}, "seqio>=0.0.20; extra == 'tasks'", None),
        ({}, "no-such-package; platform_system == 'Plan 9'", None),
    ],
)
def test_versions_are_compared_with_the_packages_requirements(
    doctor, run, required, installed, requirement, problem
):
    required(installed, requirement)
    status, found = doctor()
    assert status == (1 if problem else 0)
    assert [line.partition(problem or "-")[1] for line in found["problems"]] == [problem] * status
    verdict = run("doctor").lines[-1]
    assert verdict.startswith("generate would not work: " if problem else "generate would work")


def test_a_checkout_that_is_not_installed(doctor, monkeypatch):
    def requires(name):
        raise versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.importlib.metadata, "requires", requires)
    monkeypatch.setattr(installation, "version", lambda name: None)
    status, found = doctor()
    assert (status, found["problems"]) == (0, [])
    assert found["missing"][0].startswith("spec_t5x itself, so nothing is known of versions (pip")


def test_an_accelerator_that_jax_does_not_use(doctor, run, monkeypatch):
    why = "jax-cuda12-plugin is 0.7.2 and jaxlib 0.12.0: pip install 'jax[cuda12]==0.12.0'"
    monkeypatch.setattr(accelerators, "unused", lambda: why)
    status, found = doctor()
    assert (status, found["problems"], found["accelerator"]) == (1, [], why)
    platform = jax.devices()[0].platform.upper()
    assert run("doctor").lines[-1] == f"generate works here, but on the {platform} only: {why}."


def test_kernels_that_are_not_used_make_it_slow(run, monkeypatch):
    why = "switched off"
    kernels = Operations()
    kernels.state = lambda: (False, why)
    monkeypatch.setattr(operations, "registered", lambda: (kernels,))
    result = run("doctor")
    assert (result.status, result.errors) == (0, [])
    assert result.lines[-1] == f"generate works here, but slowly: {why}."
    assert any(f"not used: {why}" in line for line in result.lines)


def test_what_a_cache_of_another_user_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert not installation._cache(tmp_path / "not" / "there").writable
    assert installation._cache(tmp_path.parent / "there").writable


def test_extras_are_those_of_setup():
    known = requirements_of_setup()
    assert {extra.name for extra in EXTRAS.values()} <= set(known)
    # Doctor needs no extra itself.
    assert {"packaging", "psutil", "rich", "tabulate"} <= {each.name for each in known[""]}
