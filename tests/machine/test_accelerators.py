"""Reasons for which JAX does not use the GPU or TPU of a machine."""

import importlib.metadata
from types import SimpleNamespace

import jax
import pytest

from spec_t5x.machine import accelerators
from spec_t5x.machine.accelerators import GPU, TPU


@pytest.fixture
def machine(monkeypatch):
    """Provides a function that sets device files, JAX's platform and installed versions."""

    def set_up(files=(), platform="cpu", platforms=None, **packages):
        versions = {name.replace("_", "-"): version for name, version in packages.items()}
        versions = {"jax": "0.12.0", "jaxlib": "0.12.0"} | versions
        monkeypatch.setattr(
            accelerators.glob, "glob", lambda pattern: [f for f in files if pattern.startswith(f)]
        )
        monkeypatch.setattr(accelerators, "version", versions.get)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(
            importlib.metadata,
            "distributions",
            lambda: [SimpleNamespace(metadata={"Name": name}) for name in versions],
        )
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if platforms:
            monkeypatch.setenv("JAX_PLATFORMS", platforms)

    return set_up


CUDA12, CUDA13, OF_TPU = (
    f"pip install 'jax[{extra}]==0.12.0', and restart Python"
    for extra in ("cuda12", "cuda13", "tpu")
)
AT_GPU, AT_TPU = {"files": ["/dev/nvidia"]}, {"files": ["/dev/accel"]}
NO_GPU, NO_TPU = (f"JAX does not see the {name}: " for name in ("NVIDIA GPU", "TPU"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        # There is nothing to use, or it is used.
        ({"libtpu": "0.0.1"}, None),
        ({**AT_GPU, "platform": "gpu", "jax_cuda12_plugin": "0.12.0"}, None),
        ({"files": ["/dev/vfio"], "platform": "tpu", "libtpu": "0.0.21"}, None),
        # JAX compares the numbers alone.
        ({"jax_cuda12_plugin": "0.12.0+cuda"}, None),
        (
            {**AT_GPU, "jax_cuda12_plugin": "0.7.2"},
            f"jax-cuda12-plugin is 0.7.2 and jaxlib 0.12.0: {CUDA12}",
        ),
        (
            {"jax_cuda13_plugin": "0.12.0", "jax_cuda13_pjrt": "0.7.2"},
            f"jax-cuda13-pjrt is 0.7.2 and jaxlib 0.12.0: {CUDA13}",
        ),
        (
            {"jax_cuda12_plugin": "0.12.0", "jaxlib": "0.12.0.1"},
            f"jax-cuda12-plugin is 0.12.0 and jaxlib 0.12.0.1: {CUDA12}",
        ),
        (AT_GPU, NO_GPU + CUDA12),
        (
            {**AT_GPU, "jax_cuda13_plugin": "0.12.0"},
            NO_GPU + "jax-cuda13-plugin does not start, see whether nvidia-smi finds the driver, "
            "and restart Python",
        ),
        ({**AT_TPU, "platforms": "tpu,cpu"}, NO_TPU + OF_TPU),
        (
            {**AT_TPU, "libtpu": "0.0.21"},
            NO_TPU + "libtpu does not start, end the other processes that hold the TPU, and "
            "restart Python",
        ),
        (
            {**AT_GPU, "platforms": "cpu", "jax_cuda12_plugin": "0.12.0"},
            NO_GPU + "JAX_PLATFORMS is 'cpu', unset it",
        ),
    ],
)
def test_reasons_not_to_use_an_accelerator(machine, settings, line):
    machine(**settings)
    assert accelerators.unused() == line


@pytest.mark.parametrize(
    ("settings", "platform", "remedy"),
    [
        (
            {**AT_TPU, "platforms": "tpu,cpu", "libtpu": "0.0.21"},
            "tpu",
            "libtpu does not start, end the other processes that hold the TPU, and restart Python",
        ),
        ({**AT_GPU, "platforms": "cuda,cpu"}, "cuda", CUDA12),
        ({"platforms": "tpu,cpu"}, "tpu", "set JAX_PLATFORMS=cpu"),
    ],
)
def test_a_platform_that_does_not_start(machine, settings, platform, remedy):
    machine(**settings)
    why = f"Unable to initialize backend '{platform}': ABORTED: it is in use"
    jaxs = "(set JAX_PLATFORMS='' to automatically choose an available backend)"
    assert accelerators.fault_of(RuntimeError(f"{why} {jaxs}")) == f"{why}: {remedy}"
    assert accelerators.fault_of(RuntimeError("RESOURCE_EXHAUSTED")) is None


def test_a_file_of_another_accelerator_beside_the_one_in_use(machine, monkeypatch):
    machine(**AT_GPU)
    monkeypatch.setattr(accelerators.glob, "glob", lambda pattern: [pattern])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert accelerators.unused() is None


def test_the_accelerator_by_its_device_files(machine):
    for files, found in ((AT_TPU, TPU), (AT_GPU, GPU), ({}, None)):
        machine(**files)
        assert accelerators.present() is found


def test_it_prints_jaxs_devices_and_the_line(machine, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    # JAX looks for plug-ins once, by the functions that the fixture replaces.
    jax.devices()
    machine(**AT_GPU)
    accelerators.main()
    devices, why = capsys.readouterr().out.splitlines()
    assert devices.startswith("jax.devices() is [")
    assert why == NO_GPU + CUDA12


def test_a_default_device_that_jax_has_not_is_named():
    why = "Unknown backend: 'gpu' requested, but only cpu is present"
    line = f"{why}: set JAX_DEFAULT_DEVICE to one of these, or unset it"
    assert accelerators.fault_of(RuntimeError(f"{why}\n  In call to configurable")) == line
    assert accelerators.fault_of(RuntimeError()) is None
