"""What is said where JAX does not use the GPU or TPU of a machine."""

import importlib.metadata
from types import SimpleNamespace

import pytest

from spec_t5x.machine import accelerators
from spec_t5x.machine.accelerators import GPU, TPU


@pytest.fixture
def machine(monkeypatch):
    """``machine(files, platform, packages)``: device files, JAX's platform, installed versions."""

    def set_up(files=(), platform="cpu", platforms=None, **packages):
        versions = {name.replace("_", "-"): version for name, version in packages.items()}
        versions = {"jax": "0.12.0", "jaxlib": "0.12.0"} | versions
        monkeypatch.setattr(
            accelerators.glob, "glob", lambda pattern: [f for f in files if pattern.startswith(f)]
        )
        monkeypatch.setattr(accelerators, "version", versions.get)
        monkeypatch.setattr(accelerators, "_platform", lambda: platform)
        monkeypatch.setattr(
            importlib.metadata,
            "distributions",
            lambda: [SimpleNamespace(metadata={"Name": name}) for name in versions],
        )
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if platforms:
            monkeypatch.setenv("JAX_PLATFORMS", platforms)

    return set_up


CUDA12 = "pip install 'jax[cuda12]==0.12.0', and restart Python"
CUDA13 = "pip install 'jax[cuda13]==0.12.0', and restart Python"
GPU_FILES, TPU_FILES = ["/dev/nvidia"], ["/dev/accel"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        # Nothing to use, or used.
        ({}, None),
        ({"libtpu": "0.0.1"}, None),
        ({"files": GPU_FILES, "platform": "gpu", "jax_cuda12_plugin": "0.12.0"}, None),
        ({"files": TPU_FILES, "platform": "tpu", "libtpu": "0.0.21"}, None),
        ({"files": ["/dev/vfio"], "platform": "tpu", "libtpu": "0.0.21"}, None),
        # As JAX compares: numbers alone.
        ({"jax_cuda12_plugin": "0.12.0+cuda"}, None),
        (
            {"jax_cuda12_plugin": "0.7.2", "files": GPU_FILES},
            f"jax-cuda12-plugin is 0.7.2 and jaxlib 0.12.0: {CUDA12}",
        ),
        (
            {"jax_cuda13_plugin": "0.10.2"},
            f"jax-cuda13-plugin is 0.10.2 and jaxlib 0.12.0: {CUDA13}",
        ),
        (
            {"jax_cuda12_plugin": "0.12.0", "jax_cuda12_pjrt": "0.7.2"},
            f"jax-cuda12-pjrt is 0.7.2 and jaxlib 0.12.0: {CUDA12}",
        ),
        (
            {"jax_cuda12_plugin": "0.12.0", "jaxlib": "0.12.0.1"},
            f"jax-cuda12-plugin is 0.12.0 and jaxlib 0.12.0.1: {CUDA12}",
        ),
        ({"files": GPU_FILES}, f"JAX does not see the NVIDIA GPU: {CUDA12}"),
        (
            {"files": GPU_FILES, "jax_cuda13_plugin": "0.12.0"},
            "JAX does not see the NVIDIA GPU: jax-cuda13-plugin does not start, see whether "
            "nvidia-smi finds the driver, and restart Python",
        ),
        (
            {"files": TPU_FILES},
            "JAX does not see the TPU: pip install 'jax[tpu]==0.12.0', and restart Python",
        ),
        (
            {"files": TPU_FILES, "libtpu": "0.0.21"},
            "JAX does not see the TPU: libtpu does not start, end the other processes that hold "
            "the TPU, and restart Python",
        ),
        (
            {"files": GPU_FILES, "platforms": "cpu", "jax_cuda12_plugin": "0.12.0"},
            "JAX does not see the NVIDIA GPU: JAX_PLATFORMS is 'cpu', unset it",
        ),
        (
            {"files": TPU_FILES, "platforms": "tpu,cpu"},
            "JAX does not see the TPU: pip install 'jax[tpu]==0.12.0', and restart Python",
        ),
    ],
)
def test_what_keeps_jax_from_an_accelerator(machine, settings, line):
    machine(**settings)
    assert accelerators.unused() == line


def test_the_accelerator_by_its_device_files(machine):
    for files, found in ((TPU_FILES, TPU), (GPU_FILES, GPU), ([], None)):
        machine(files=files)
        assert accelerators.present() is found


def test_it_prints_jaxs_devices_and_the_line(machine, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    machine(files=GPU_FILES)
    accelerators.main()
    devices, why = capsys.readouterr().out.splitlines()
    assert devices.startswith("jax.devices() is [")
    assert why == f"JAX does not see the NVIDIA GPU: {CUDA12}"
