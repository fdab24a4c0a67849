"""Weights in panels: what is packed, and that nothing of it is lost."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage import tensors
from spec_t5x.contrib.cpu import operations, panels
from spec_t5x.contrib.cpu.panels import PackedEmbedding, Panels
from spec_t5x.data.task_options import SUMMARIZE_PREFIX, TRANSLATE_PREFIX
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES
from spec_t5x.models.weights import Rounded
from tests.toy_t5 import tiny_t5


def draws(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", [(3, 64), (5, 7), (5000, 130)])
def test_a_matrix_is_held_at_the_width_of_its_values(shape):
    matrix = draws(*shape).astype(jnp.bfloat16).astype(np.float32)
    for dtype in ("bfloat16", "float32"):
        packed = Panels.pack(matrix)
        assert packed.panels.dtype == jnp.dtype(dtype)
        assert packed.panels.shape == (-(-shape[1] // 64), shape[0], 64)
        np.testing.assert_array_equal(packed.matrix(), matrix)
        # One value that is too fine keeps the matrix in float32.
        matrix[-1, -1] = 1 + 2.0**-20


def test_a_matrix_of_whole_numbers_takes_a_byte_a_weight():
    matrix = np.random.default_rng(1).integers(-127, 128, (130, 70)).astype(np.float32)
    matrix[0] = 127.0
    # Other powers of two, and a column of zeros.
    matrix *= np.float32(2) ** (np.arange(70) - 35)
    matrix[:, 5] = 0.0
    packed = Panels.pack(matrix)
    assert packed.panels.dtype == jnp.int8
    np.testing.assert_array_equal(packed.matrix(), matrix)
    # Half of a step, and the matrix is in bfloat16.
    matrix[1, 0] = 63.5 * 2.0**-35
    assert Panels.pack(matrix).panels.dtype == jnp.bfloat16


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_numbers_stay_what_they_are(bits):
    weight = Rounded.of(draws(130, 70), bits)
    packed = Panels.pack(weight)
    np.testing.assert_array_equal(packed.matrix(), weight.matrix())
    assert packed.panels.nbytes == 130 * 128 * bits // 8


@pytest.mark.parametrize("make", [tiny_t5])
def test_a_model_gives_back_its_parameters(make):
    # Of either kind: in bfloat16, and not.
    given = make(0).params
    first, *rest = jax.tree.leaves(given)
    given = jax.tree.map(
        lambda leaf: leaf if leaf is first else leaf.astype(jnp.bfloat16).astype(jnp.float32), given
    )
    model = make(0).with_params(given)
    assert model.operations is operations.CPU
    jax.tree.map(np.testing.assert_array_equal, model.params, given)
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(model.weights)}
    assert types == {"float32", "bfloat16", "uint16"}


@pytest.fixture(scope="module")
def in_bfloat16(tiny_pair, tmp_path_factory):
    """Provides the pair's target with bfloat16 on disk."""
    directory = tmp_path_factory.mktemp("in_bfloat16") / "target"
    convert(tiny_pair / "target", directory, to="native", dtype="bfloat16")
    return directory


# What a model is read in, and what is read in place of that: a function of ``panels``, another.
@pytest.mark.parametrize(
    ("target", "narrower", "share"),
    [
        # All but norms and biases by distance are in bfloat16.
        (None, {"_narrow": np.asarray}, 0.51),
        # All but those and the embeddings are in bytes.
        ("t5-target", {"_in_bytes": lambda matrix: None}, 0.55),
    ],
    ids=["bfloat16", "bytes"],
)
def test_what_is_read_in_fewer_bits_gives_the_text_of_more(
    target, narrower, share, in_bfloat16, monkeypatch
):
    """Outputs for random words are the same, with the same bits of the scores."""
    words = sorted({word for text in (*SENTENCES, *DESCRIPTIONS) for word in text.split()})
    rng = np.random.default_rng(0)
    prefixes = (TRANSLATE_PREFIX, "correct: ", SUMMARIZE_PREFIX) if target else ("",)
    texts = [
        prefixes[i % len(prefixes)] + " ".join(rng.choice(words, rng.integers(1, 8)))
        for i in range(60)
    ]
    options = GenerateOptions(batch_size=30, max_decode_len=16, gamma=0, truncate=True)
    narrow = Generator.load(target or in_bfloat16)
    with monkeypatch.context() as patch:
        for name, function in narrower.items():
            patch.setattr(panels, name, function)
        wide = Generator.load(target or in_bfloat16)
    sizes = [sum(a.nbytes for a in jax.tree.leaves(g.target.weights)) for g in (narrow, wide)]
    assert sizes[0] < share * sizes[1]
    found, expected = (list(generator.generate(texts, options)) for generator in (narrow, wide))
    assert [[o.output_ids for o in answer] for answer in found] == [
        [o.output_ids for o in answer] for answer in expected
    ]
    assert [a[0].score for a in found] == [a[0].score for a in expected]


def test_without_the_kernels_a_packed_model_computes_the_same():
    """Inputs that are not float32 need it, and XLA alone."""
    model = tiny_t5(0)
    tokens = jnp.asarray([[5, 9, 3, 1]])

    @jax.jit
    def read(params):
        return model.module.apply({"params": params}, *[tokens] * 3, enable_dropout=False)

    # XLA sums in another order, and the difference depends on the processor's registers.
    np.testing.assert_allclose(read(model.weights), read(model.params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_they_are_arrays_of_the_device_whatever_their_width(stored, tmp_path, tiny_pair):
    convert(tiny_pair / "target", tmp_path / "copy", to="native", dtype=stored)
    params = load(tmp_path / "copy", for_decoding=True).params
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    table = params["token_embedder"]["embedding"]
    assert isinstance(table, PackedEmbedding)
    assert table.values.dtype == (np.float32 if stored == "float32" else np.uint16)


def test_weights_for_decoding_are_packed_as_they_are_read(in_bfloat16, monkeypatch):
    alive, most = [], 0
    packed = panels.packed

    def watched(name, whole):
        nonlocal most
        alive.append(weakref.ref(whole))
        most = max(most, sum(reference() is not None for reference in alive))
        return packed(name, whole)

    monkeypatch.setattr(panels, "packed", watched)
    loaded = load(in_bfloat16, for_decoding=True)
    assert panels.is_packed(loaded.params)
    # Norms and biases by distance are kept as they were read; matrices are not.
    kept = sum(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded.params))
    assert most <= kept + tensors._AHEAD < len(alive) / 2

    bound, whole = loaded.bind(), load(in_bfloat16).bind()
    assert bound.operations is operations.CPU
    assert jax.tree.structure(bound) == jax.tree.structure(whole)
    for pair in zip(jax.tree.leaves(bound), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_model_is_in_panels_throughout(bits):
    coarse = tiny_t5(0, logits_via_embedding=True).rounded(bits)
    tied = coarse.weights["token_embedder"]["embedding"]
    assert isinstance(tied.table, PackedEmbedding) and isinstance(tied.output, Panels)
    forms = jax.tree.leaves(coarse.weights, is_leaf=lambda node: isinstance(node, Panels))
    dtypes = {str(form.panels.dtype) for form in forms if isinstance(form, Panels)}
    assert dtypes == {{8: "int8", 4: "uint8"}[bits]}
