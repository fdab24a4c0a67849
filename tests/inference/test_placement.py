"""Shardings of a pair's weights, in each of their forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.inference.placement import Placement
from spec_t5x.machine.operations import XLA
from spec_t5x.models import partitioning
from spec_t5x.models.partitioning import make_mesh
from tests.simulated_devices import printed_by
from tests.toy_t5 import tiny_t5


@pytest.mark.parametrize("bits", [8, 4])
def test_tied_embeddings_are_split_by_tokens_in_both_forms(bits):
    model = tiny_t5(0, logits_via_embedding=True)
    model = model.replace(weights=model.params, operations=XLA).rounded(bits)
    generator = Generator(target=model, vocabulary=ByteVocabulary(), max_source_len=8)
    placed = Placement(mesh=make_mesh(model=1)).generator(generator).target
    tied = placed.weights["token_embedder"]["embedding"]
    assert tied.table.sharding.spec == jax.P("model", None)
    assert tied.output.values.sharding.spec == jax.P(None, "model")
    assert tied.output.scales.sharding.spec == jax.P()
    states = jnp.ones((1, 2, 16))
    np.testing.assert_array_equal(
        *(m.module.apply({"params": m.weights}, states, method="logits") for m in (model, placed))
    )


@pytest.mark.usefixtures("unchecked")
def test_a_batch_that_the_copies_of_a_model_cannot_share_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [None, None])
    mesh = AbstractMesh((2, 1), ("data", "model"))
    monkeypatch.setattr(partitioning, "make_mesh", lambda **_: mesh)
    assert Placement.create(model_parallel=1, batch_size=4).shape == [2, 1]
    with pytest.raises(InputError, match="batch_size is 3 and 2 copies of the model run: give a"):
        Placement.create(model_parallel=1, batch_size=3)


def test_matrices_are_rounded_as_their_shards_are_read(tiny_pair):
    found = printed_by("inference/rounded_program.py", tiny_pair, devices=2)
    assert found.pop("draft") == {"query": [None, "model"], "same": True}
    assert found.keys() == {"int8", "int4"}
    for name, each in found.items():
        assert each["same"], name
        # The scales of toys take much.
        assert each["share"] < 0.5, name
