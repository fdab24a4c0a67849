"""The default type that networks compute in."""

from types import SimpleNamespace

import jax
import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.machine import dtypes
from spec_t5x.machine.dtypes import resolve_dtype

# Devices as JAX describes them: an NVIDIA GPU has a compute capability, an AMD GPU an architecture.
CPU, TPU = (SimpleNamespace(platform=name, device_kind=name) for name in ("cpu", "tpu"))
P100, T4, L4, H100, MI300 = (
    SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    for kind, capability in [
        ("Tesla P100-PCIE-16GB", "6.0"),
        ("Tesla T4", "7.5"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("AMD Instinct MI300X", "gfx942"),
    ]
)
SLOW, FAST = (CPU, P100, T4), (TPU, L4, H100, MI300)


@pytest.mark.parametrize("device", [*SLOW, *FAST], ids=lambda device: device.device_kind)
def test_auto_is_the_fast_type_of_the_device(device, monkeypatch, caplog):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert resolve_dtype("auto") == ("float32" if device in SLOW else "bfloat16")
    assert resolve_dtype("float32") == "float32"
    assert caplog.messages == []


@pytest.mark.parametrize("device", SLOW, ids=lambda device: device.device_kind)
def test_a_slow_choice_is_followed_with_one_warning(device, monkeypatch, caplog):
    dtypes._warn.cache_clear()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert [resolve_dtype("bfloat16") for _ in range(3)] == ["bfloat16"] * 3
    (line,) = caplog.messages
    slow = f"bfloat16 is slower than float32 on this device ({device.device_kind}): leave --dtype"
    assert slow in line
    monkeypatch.setattr(jax, "devices", lambda: [TPU])
    assert resolve_dtype("bfloat16") == "bfloat16"
    assert caplog.messages == [line]


@pytest.mark.parametrize(("platforms", "warned"), [(None, True), ("cpu", False)])
def test_an_accelerator_that_jax_leaves_unused_is_one_warning(
    platforms, warned, monkeypatch, caplog
):
    dtypes._warn.cache_clear()
    monkeypatch.setattr(dtypes, "_unused", lambda: "JAX does not see the TPU: end the others")
    monkeypatch.setattr(jax, "devices", lambda: [CPU])
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        assert [resolve_dtype("auto") for _ in range(2)] == ["float32"] * 2
    finally:
        jax.config.update("jax_platforms", before)
    line = "computing on the CPU: JAX does not see the TPU: end the others"
    assert caplog.messages == [line] * warned


def test_another_type_is_refused():
    with pytest.raises(InputError, match="dtype is 'int8': choose one of auto, bfloat16, float32"):
        resolve_dtype("int8")


def test_the_commands_take_auto_which_here_is_float32():
    assert Models().dtype == "auto"
    assert Models().draft_options().dtype == "float32"
