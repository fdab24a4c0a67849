"""Decoding on a mesh: the rules, and the same text as on one device."""

import jax
import jax.numpy as jnp
import pytest
from flax.linen.partitioning import axis_rules
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from spec_t5x.errors import InputError
from spec_t5x.models.logical_axes import constrain, partition_spec
from spec_t5x.models.partitioning import RULES, make_mesh, param_shardings
from spec_t5x.models.sizes import size
from tests.simulated_devices import printed_by

MESH = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def found():
    """Provides the program's results by number of heads."""
    return printed_by("models/partitioned_program.py", devices=8)


@pytest.fixture(scope="module")
def on_8_devices(found):
    """Provides the results of data 2 x model 4 with heads that divide."""
    return found["4"]


@pytest.mark.parametrize("case", ["4", "4 in int8"])
def test_the_text_is_that_of_one_device(found, case):
    plain, speculative = found[case]["plain"], found[case]["alone"]
    assert found[case]["on_mesh"] == speculative
    # Greedy rows are those of plain decoding.
    assert plain["tokens"][::2] == speculative["tokens"][::2]
    assert len({str(row) for row in plain["tokens"]}) > 6
    assert speculative["accepted"] > 0


@pytest.mark.parametrize("model", ["target", "draft"])
def test_no_parameter_is_replicated_that_the_rules_shard(on_8_devices, model):
    shardings = on_8_devices[model]
    assert shardings and all(compiled == wanted for compiled, wanted in shardings.values())
    replicated = {path for path, (compiled, _) in shardings.items() if "model" not in compiled}
    # The scales of norms have no axis but the one of the states.
    assert replicated and all(path.endswith("norm/scale") for path in replicated)
    assert shardings["decoder/layers_0/self_attention/query/kernel"][0] == [None, "model"]
    assert shardings["decoder/layers_0/mlp/wo/kernel"][0] == ["model"]
    assert shardings["decoder/logits_dense/kernel"][0] == [None, "model"]
    assert shardings["token_embedder/embedding"][0] == ["model"]
    assert shardings["encoder/relpos_bias/rel_embedding"][0] == ["model"]


@pytest.mark.parametrize("case", ["4", "4 in int8"])
def test_rows_are_spread_and_caches_stay_where_they_are(found, case):
    assert found[case]["rows"] == [["data"], ["data"]]
    # Logits alone are gathered: those of the draft's one or two, and of gamma + 1 tokens.
    for array in found[case]["gathered"]:
        assert array.endswith(",64]"), array


def test_scales_of_a_source_in_int8_are_sharded_as_its_heads(found):
    values, scales = ["data", "model"], ["data", "model"]
    assert found["4 in int8"]["source"] == [values, scales]


def test_heads_that_do_not_divide_stay_whole_and_text_the_same(found):
    assert found["6"]["on_mesh"] == found["6"]["alone"]
    shardings = found["6"]["target"]
    assert shardings["encoder/relpos_bias/rel_embedding"][0] == []
    assert shardings["decoder/layers_0/self_attention/query/kernel"][0] == [None, "model"]


def test_an_axis_that_the_mesh_does_not_divide_is_replicated():
    spec = partition_spec((6, 32), ("heads", "relpos_buckets"), RULES, MESH)
    assert spec == PartitionSpec(None, None)
    spec = partition_spec((512, 384), ("embed", "joined_kv"), RULES, MESH)
    assert spec == PartitionSpec(None, "model")
    spec = partition_spec((3, 4, 7, 64), ("batch", "heads", "length", "kv"), RULES, MESH)
    assert spec == PartitionSpec(None, "model", None, None)


def test_a_constraint_without_mesh_or_without_rules_is_none():
    def program(array):
        return str(jax.make_jaxpr(lambda a: constrain(a, ("batch", "mlp")))(array))

    array = jnp.zeros((8, 8))
    with axis_rules(RULES):
        assert "sharding_constraint" not in program(array)
    with jax.set_mesh(make_mesh(1, 1, jax.devices()[:1])):
        assert "sharding_constraint" not in program(array)
        with axis_rules(RULES):
            assert "sharding_constraint" in program(array)


def test_programs_of_several_cpu_devices_are_neither_kept_nor_read_back(tmp_path):
    assert printed_by("models/unkept_program.py", devices=2, cache=tmp_path) == {
        "on the mesh": "neither",
        "outside": "written",
        "on the mesh, kept": "neither",
        "outside, kept": "read",
        "on a mesh of one device": "written",
        "on a mesh of one device, kept": "read",
    }


def test_shardings_of_the_largest_size_take_no_memory():
    mesh = make_mesh(1, 1, jax.devices()[:1])
    shardings = param_shardings(size("t5_1_1_xxl"), mesh)
    spec = shardings["decoder"]["layers_23"]["mlp"]["wi_0"]["kernel"].spec
    assert spec == PartitionSpec(None, "model")


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (2, 4, "a mesh of 2 by 4 needs 8 devices and there are 1"),
        (0, 1, "a mesh of 0 by 1 devices: give at least 1"),
        (None, 3, "a mesh of 1 by 3 needs 3 devices and there are 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_an_error(data, model, message):
    with pytest.raises(InputError, match=message):
        make_mesh(data, model, jax.devices()[:1])
