"""``spec-t5x doctor``: findings, and the verdict."""

import functools
import importlib
import importlib.metadata
import json

import jax
import pytest

from spec_t5x.checkpoints import loading, named_models
from spec_t5x.labs.commands import doctor as command
from spec_t5x.machine import accelerators, description, operations
from spec_t5x.machine.extras import EXTRAS, Extra
from spec_t5x.machine.operations import Operations
from tests.documents.test_scripts import requirements_of_setup

pytestmark = pytest.mark.usefixtures("unchecked", "quick_compilation", "kept_programs")


@pytest.fixture
def doctor(run, monkeypatch):
    """Provides ``doctor(*flags)``: exit status, findings and verdict."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def examine(*flags):
        result, shown = run("doctor", "--json", *flags), run("doctor")
        assert result.errors == shown.errors == []
        return result.status, json.loads("\n".join(result.lines)), shown.lines[-1]

    return examine


def test_the_hubs_cache_is_where_its_library_has_it(doctor, monkeypatch):
    # As with XDG_CACHE_HOME set, which the library reads when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/caches/huggingface/hub")
    assert doctor()[1]["caches"]["Hugging Face"] == "/caches/huggingface/hub"


def test_a_machine_that_is_well(doctor, monkeypatch):
    monkeypatch.setattr(command, "EXTRAS", {"no_such_module": Extra("hf", "reading this")})
    status, found, verdict = doctor()
    assert (status, found["problems"], verdict) == (0, [], "generate would work here.")
    assert found["versions"]["jax"] == jax.__version__
    assert found["machine"]["platform"] == jax.devices()[0].platform
    assert found["machine"]["free_memory"] > 0
    assert found["packaged_models"] == loading.packaged_names()
    # A checkout that is not installed reports itself as missing, too.
    itself = "spec_t5x itself, so its requirements are unknown (pip install .)"
    assert [each for each in found["missing"] if each != itself] == [
        "reading this (pip install 'spec_t5x[hf]')"
    ]


def test_with_try_a_text_is_decoded(doctor, tiny_pair, monkeypatch):
    pair = {"target": str(tiny_pair / "target"), "draft": str(tiny_pair / "draft")}
    tiny = functools.partial(named_models.Models, **pair)
    # Modules that need the class itself are imported before it is replaced.
    for name in (
        "generation",
        "cli.convert",
        *(f"labs.commands.{n}" for n in ("acceptance", "benchmark")),
    ):
        importlib.import_module(f"spec_t5x.{name}")
    monkeypatch.setattr(named_models, "Models", tiny)
    status, found, _ = doctor("--try")
    assert status == 0 and found["tried"]["output"]
    monkeypatch.setattr(named_models, "Models", functools.partial(tiny, target="/no/such"))
    status, found, _ = doctor("--try")
    assert status == 1 and "decoding fails (no directory /no/such" in found["problems"][0]


def test_a_problem_and_what_makes_it_slow_are_the_verdict(doctor, monkeypatch):
    def machine():
        raise RuntimeError(reason)

    kernels = Operations()
    kernels.platform = "cpu"
    kernels.state = lambda: (False, "switched off")
    with monkeypatch.context() as patch:
        patch.setattr(operations, "registered", lambda: (kernels,))
        assert doctor()[::2] == (0, "generate works here, but slowly: switched off.")
        patch.setattr(accelerators, "unused", lambda: "why")
        assert doctor()[::2] == (1, "generate works here, but on the CPU only: why.")
        patch.setattr(description, "machine", machine)
        patch.setattr(accelerators, "present", lambda: None)
        reason = "no\ndevice"
        why = "JAX fails (no device): set JAX_PLATFORMS=cpu"
        assert doctor()[::2] == (1, f"generate would not work: {why}.")
        reason = "Unable to initialize backend 'tpu': in use (set JAX_PLATFORMS='' to choose one)"
        why = "Unable to initialize backend 'tpu': in use: set JAX_PLATFORMS=cpu"
        assert doctor()[::2] == (1, f"generate would not work: {why}.")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["flax<0.1"])
    assert doctor()[2].startswith("generate would not work: flax is ")


def test_extras_are_those_of_setup():
    known = requirements_of_setup()
    assert {extra.name for extra in EXTRAS.values()} <= set(known)
    # Doctor needs no extra itself.
    assert {"packaging", "psutil", "rich", "tabulate"} <= {each.name for each in known[""]}
