"""Weights in panels: what is packed, and that nothing of it is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES
from spec_t5x.models import weights
from spec_t5x.models.binding import bind
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.weights import Panels, Rounded, TiedTable, rounded, rows
from spec_t5x.testing.toy_models import tiny_t5


def draws(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", [(3, 64), (5, 7), (2, 130)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matrix_is_held_at_the_width_of_its_values(shape, dtype):
    matrix = draws(*shape).astype(jnp.dtype(dtype)).astype(np.float32)
    packed = Panels.pack(matrix)
    assert packed.panels.dtype == jnp.dtype(dtype)
    assert packed.panels.shape == (-(-shape[1] // 64), shape[0], 64)
    np.testing.assert_array_equal(packed.matrix(), matrix)
    assert packed.matrix().dtype == jnp.float32


def test_one_value_too_fine_keeps_a_matrix_in_float32():
    # Beyond what is looked at in one step.
    matrix = np.ones((5000, 70), np.float32)
    assert Panels.pack(matrix).panels.dtype == jnp.bfloat16
    matrix[-1, -1] += 2.0**-20
    packed = Panels.pack(matrix)
    assert packed.panels.dtype == jnp.float32
    np.testing.assert_array_equal(packed.matrix(), matrix)


@pytest.mark.parametrize(("bits", "group", "largest"), [(8, 130, 127), (4, 64, 7)])
def test_rounded_a_value_is_off_by_half_a_step_at_most(bits, group, largest):
    matrix = draws(130, 70)
    # A group without scale, and of four bits a last one of two rows.
    matrix[:64, 3] = 0.0
    weight = Rounded.of(matrix, bits)
    values = np.asarray(weight.values, np.int32)
    for begin in range(0, 130, group):
        rows = slice(begin, begin + group)
        steps = np.abs(matrix[rows]).max(axis=0) / largest
        assert np.all(np.abs(weight.matrix()[rows] - matrix[rows]) <= steps * 0.5001)
        assert np.array_equal(np.abs(values[rows]).max(axis=0), np.where(steps > 0, largest, 0))
    packed = Panels.pack(weight)
    np.testing.assert_array_equal(packed.matrix(), weight.matrix())
    assert packed.panels.nbytes == 130 * 128 * bits // 8
    inputs = draws(3, 5, 130)
    np.testing.assert_allclose(weight.times(inputs), inputs @ weight.matrix(), atol=1e-4)


@pytest.mark.parametrize("make", [tiny_t5])
def test_a_model_gives_back_its_parameters(make):
    # Of either kind: in bfloat16, and not.
    given = make(0).params
    first, *rest = jax.tree.leaves(given)
    given = jax.tree.map(
        lambda leaf: leaf if leaf is first else leaf.astype(jnp.bfloat16).astype(jnp.float32), given
    )
    model = make(0).with_params(given)
    assert model.kernels
    jax.tree.map(np.testing.assert_array_equal, model.params, given)
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(model.weights)}
    assert types == {"float32", "bfloat16", "uint16"}


def test_a_packaged_model_takes_the_bytes_of_its_checkpoint():
    loaded = load("ende-target")
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (bind(loaded.params, loaded.config).weights, loaded.params)
    ]
    # All but norms and biases by distance in bfloat16, and panels whole.
    assert sizes[0] < 0.505 * sizes[1]


@pytest.mark.parametrize("target", ["ende-target", "summaries-target"])
def test_what_is_read_in_bfloat16_gives_the_text_of_float32(target, monkeypatch):
    """On 200 texts of the target's words, to the last bit of the scores."""
    words = sorted({word for text in (*SENTENCES, *DESCRIPTIONS) for word in text.split()})
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, rng.integers(1, 12))) for _ in range(200)]
    options = GenerateOptions(batch_size=40, max_decode_len=16, gamma=0)
    narrow = Generator.load(target)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_narrow", np.asarray)
        wide = Generator.load(target)
    sizes = [sum(a.nbytes for a in jax.tree.leaves(g.target.weights)) for g in (narrow, wide)]
    assert sizes[0] < 0.51 * sizes[1]
    found, expected = (list(generator.generate(texts, options)) for generator in (narrow, wide))
    assert [[o.output_ids for o in answer] for answer in found] == [
        [o.output_ids for o in answer] for answer in expected
    ]
    assert [a[0].score for a in found] == [a[0].score for a in expected]


def test_without_the_kernels_a_packed_model_computes_the_same():
    """What runs where the inputs are not float32, and under XLA alone."""
    model = tiny_t5(0)
    tokens = jnp.asarray([[5, 9, 3, 1]])

    @jax.jit
    def read(params):
        return model.module.apply({"params": params}, *[tokens] * 3, enable_dropout=False)

    # Which sums in another order: how far apart depends on the processor's registers.
    np.testing.assert_allclose(read(model.weights), read(model.params), rtol=1e-5, atol=1e-5)


def tied_output(model) -> TiedTable:
    """The embeddings of a T5, which are its output layer."""
    return model.weights["token_embedder"]["embedding"]


@pytest.mark.parametrize("bits", [8, 4])
def test_tied_embeddings_are_rounded_as_the_output_layer_alone(bits):
    model = tiny_t5(0, logits_via_embedding=True)
    embedding = model.params["token_embedder"]["embedding"]
    expected = Rounded.of(embedding.T, bits).matrix()
    by_xla = model.replace(weights=model.params, kernels=False)
    states = jnp.asarray(draws(2, 3, 16))
    for each, form in ((model, Panels), (by_xla, Rounded)):
        coarse = each.rounded(bits)
        assert tied_output(coarse).table is tied_output(each)
        assert isinstance(tied_output(coarse).output, form)
        np.testing.assert_array_equal(tied_output(coarse).output.matrix(), expected)
        logits = coarse.module.apply({"params": coarse.weights}, states, method="logits")
        np.testing.assert_allclose(logits, states @ expected * 16**-0.5, atol=1e-5)
        # Of what is looked up, so that a coarser output layer is not rounded twice.
        np.testing.assert_array_equal(
            tied_output(each.rounded(8).rounded(bits)).output.matrix(), expected
        )
        tokens = jnp.asarray([[5, 1]])
        np.testing.assert_array_equal(rows(tied_output(coarse), tokens), embedding[tokens])


def test_a_rounded_output_layer_lies_across_devices_as_the_embeddings_do():
    mesh = make_mesh(model=1)
    shape = jax.ShapeDtypeStruct(
        (130, 70), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("model"))
    )
    tied = rounded({"embedding": shape}, tied=True)["embedding"]
    assert tied.table is shape and tied.output.values.shape == (70, 130)
    assert tied.output.values.sharding.spec == jax.P(None, "model")
    assert rounded({"embedding": shape}, tied=False)["embedding"] is shape
