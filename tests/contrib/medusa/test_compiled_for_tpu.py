"""The loop with heads, compiled for a TPU v4 without one."""

import pytest

from tests.loops import test_compiled_for_tpu
from tests.loops.test_compiled_for_tpu import v4  # noqa: F401

pytestmark = pytest.mark.usefixtures("unchecked_module")


def test_no_cache_is_copied(target_of_drafts, v4):  # noqa: F811
    test_compiled_for_tpu.test_drafts("{}/heads", target_of_drafts, v4)
