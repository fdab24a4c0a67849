"""The default type that networks compute in."""

import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.machine import dtypes
from spec_t5x.machine.dtypes import resolve_dtype


@pytest.mark.parametrize(
    ("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")]
)
def test_auto_is_the_fast_type_of_the_platform(platform, dtype, caplog):
    assert resolve_dtype("auto", platform) == dtype
    assert resolve_dtype("float32", platform) == "float32"
    assert caplog.messages == []


def test_a_slow_choice_is_followed_with_one_warning(caplog):
    dtypes._warn_of_slowness.cache_clear()
    assert [resolve_dtype("bfloat16", "cpu") for _ in range(3)] == ["bfloat16"] * 3
    (line,) = caplog.messages
    assert "bfloat16 on a CPU is about 20 times slower" in line
    assert resolve_dtype("bfloat16", "tpu") == "bfloat16"
    assert caplog.messages == [line]


def test_another_type_is_refused():
    with pytest.raises(InputError, match="dtype is 'int8': choose one of auto, float32, bfloat16"):
        resolve_dtype("int8")


def test_the_commands_take_auto_which_here_is_float32():
    assert Models().dtype == "auto"
    assert Models().draft_options().dtype == "float32"
