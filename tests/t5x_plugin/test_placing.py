"""Axes of a draft that T5X's mesh does not divide are whole on every device."""

import types

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import jax
from flax.core import unfreeze
from flax.linen.partitioning import get_axis_names, logical_to_mesh_axes
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, NamedSharding
from t5x.partitioning import standard_logical_axis_rules

from spec_t5x.models.binding import abstract_variables
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.t5x_plugin.placing import with_divided_axes

pytestmark = pytest.mark.usefixtures("unchecked")

ODD = T5Config(
    vocab_size=130, emb_dim=18, num_heads=3, head_dim=5, mlp_dim=50, mlp_activations=("gelu",)
)


def place(config, data, model, dims=(1, 1)):
    """Returns the paths whose axes changed, and the axes before and after."""
    mesh = AbstractMesh((data, model), ("data", "model"))
    partitioner = types.SimpleNamespace(
        mesh=mesh, logical_axis_rules=standard_logical_axis_rules(*dims)
    )
    variables = abstract_variables(config)
    placed = with_divided_axes(variables, partitioner)
    before, after = (
        flatten_dict(unfreeze(get_axis_names(part["params_axes"]))) for part in (variables, placed)
    )
    shapes = flatten_dict(unfreeze(variables["params"]))
    assert jax.tree.structure(placed["params"]) == jax.tree.structure(variables["params"])
    # T5X has these very rules applied, and refuses what does not divide.
    for path, leaf in shapes.items():
        axes = logical_to_mesh_axes(tuple(after[path]), partitioner.logical_axis_rules)
        NamedSharding(mesh, axes).shard_shape(leaf.shape)
    return {path for path in before if tuple(before[path]) != tuple(after[path])}, before, after


@pytest.mark.parametrize(
    ("name", "model", "number"),
    [
        ("t5_1_1_small", 2, 0),
        ("t5_1_1_small", 4, 2),
        ("t5_1_1_large", 32, 2),
    ],
)
def test_only_biases_of_published_sizes(name, model, number, caplog):
    with caplog.at_level("INFO", logger="absl"):
        changed, _, after = place(size(name), 1, model)
    assert len(changed) == number
    assert all(path[-1] == "rel_embedding" for path in changed)
    assert all(tuple(after[path]) == (None, "relpos_buckets") for path in changed)
    lines = [line for line in caplog.messages if "does not divide" in line]
    assert len(lines) == bool(number)


@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(("data", "model"), [(1, 4), (4, 2), (3, 2), (8, 8), (1, 1)])
def test_whatever_the_mesh_and_the_rules(data, model, dims):
    changed, before, after = place(ODD, data, model, dims)
    assert bool(changed) == (data * model > 1)
    kept = {path: tuple(names) for path, names in after.items() if path not in changed}
    assert all(names == tuple(before[path]) for path, names in kept.items())
