"""A T5Gemma 2 on a mesh."""

import pytest

from tests.models.test_partitioning import test_the_text_is_that_of_one_device as check_text
from tests.simulated_devices import printed_by


@pytest.fixture(scope="module")
def found():
    return printed_by("contrib/t5gemma/partitioned_program.py", devices=8)


def test_the_text_is_that_of_one_device(found):
    check_text(found, "gemma")


def test_heads_of_keys_that_share_queries_are_sharded_where_they_divide(found):
    shardings = found["gemma"]["target"]
    assert shardings["decoder/layers_0/self_attention/key/kernel"][0] == [None, "model"]
    assert shardings["decoder/layers_0/self_attention/key_norm/scale"][0] == []
    assert all(compiled == wanted for compiled, wanted in shardings.values())
