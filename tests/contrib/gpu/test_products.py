"""GPU kernels of products, run by JAX's interpreter, against plain JAX."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.gpu import kernels, products
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.models.layers import RMSNorm, activated
from spec_t5x.models.weights import Rounded

pytestmark = pytest.mark.usefixtures("quick_compilation")

INNER, FEATURES = 48, 80
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# The number of matrices, whether states are normed, activations, and whether a residual is added.
PRODUCTS = [
    (2, True, ("gelu", "linear"), False),
    (1, False, (), False),
    (3, True, (), False),
    (1, True, ("relu",), False),
    (1, False, (), True),
]
ROWS = (1, 2, 5, 16, 17, 64, 80, kernels.MOST_ROWS * kernels.TILE)
# Every number of rows with one product, and every product with rows of one tile and of two.
CASES = [*itertools.product(ROWS, PRODUCTS[:1]), *itertools.product((1, 17), PRODUCTS[1:])]


def drawn(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def expected(states, matrices, norm, activations, residual):
    if norm is not None:
        scale = {"params": {"scale": norm.scale}}
        states = RMSNorm(norm.epsilon, str(states.dtype)).apply(scale, states)
    results = [jnp.dot(states, matrix.astype(states.dtype)) for matrix in matrices]
    if activations:
        results = [activated(activations, results)]
    return results if residual is None else [residual + results[0]]


@pytest.mark.parametrize(
    ("dtype", "in_tiles"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize(("rows", "kind"), CASES)
def test_products(dtype, in_tiles, rows, kind):
    num, normed, activations, added = kind
    states = drawn(0, rows, INNER, dtype=dtype)
    matrices = [drawn(i + 1, INNER, FEATURES, dtype=dtype) / 7 for i in range(num)]
    # An epsilon that shows beside a mean square of 1.
    norm = products.Norm(drawn(8, INNER, dtype=dtype), 0.1) if normed else None
    residual = drawn(9, rows, FEATURES, dtype=dtype) if added else None
    given = activations, residual
    wanted = expected(states, matrices, norm, *given)
    options = {"activations": activations, "residual": residual, "in_tiles": in_tiles}
    found = products.multiply(states, [Transposed.of(m) for m in matrices], norm, **options)
    assert len(found) == len(wanted)
    for product, reference in zip(found, wanted, strict=True):
        assert product.dtype == dtype and product.shape == (rows, FEATURES)
        scale = float(jnp.abs(reference).max())
        difference = jnp.abs(product.astype(jnp.float32) - reference.astype(jnp.float32))
        assert float(difference.max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize(("features", "normed"), [(4096, True), (8192, False)])
def test_wide_programs_in_tiles(features, normed):
    """Programs of 32 and 64 columns, of 80 tokens in two programs."""
    states, matrix = drawn(0, 80, 64, dtype="bfloat16"), drawn(1, 64, features, dtype="bfloat16")
    norm = products.Norm(drawn(8, 64, dtype="bfloat16"), 0.1) if normed else None
    given = [Transposed.of(matrix)], norm
    (found,) = products.multiply(states, *given, in_tiles=True, dtype="float32")
    (one,) = products.multiply(states[77:78], *given, in_tiles=True, dtype="float32")
    np.testing.assert_array_equal(found[77:78], one)
    (wanted,) = expected(states.astype("float32"), [matrix], norm, (), None)
    np.testing.assert_allclose(found, wanted, atol=2e-2 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("inner", [48, 640])
def test_products_of_matrices_in_int8(inner, in_tiles):
    states = drawn(0, 3, inner, dtype="bfloat16").astype(jnp.float32)
    matrix = Rounded.of(drawn(1, inner, FEATURES))
    given = states.astype("bfloat16") if in_tiles else states
    options = {"dtype": "float32", "in_tiles": in_tiles}
    (found,) = products.multiply(given, [Transposed.of(matrix)], **options)
    np.testing.assert_allclose(found, matrix.times(states), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [16, 17, 64])
def test_a_token_has_the_same_bits_in_any_tile(num_rows):
    states, matrix = (drawn(i, num_rows, 256, dtype="bfloat16") for i in range(2))
    given = [Transposed.of(jnp.tile(matrix[:16].T, 2))], products.Norm(jnp.ones(256), 1e-6)
    (wanted,) = products.multiply(states[-1:], *given, in_tiles=True)
    (found,) = products.multiply(states, *given, in_tiles=True)
    np.testing.assert_array_equal(found[-1:], wanted)


@pytest.mark.parametrize("in_tiles", [False, True])
def test_logits_of_bfloat16_states_are_not_rounded(in_tiles):
    states, matrix = (drawn(i, 16, 16, dtype=jnp.bfloat16) for i in range(2))
    given = states, [Transposed.of(matrix)]
    (found,) = products.multiply(*given, dtype="float32", in_tiles=in_tiles)
    wanted = np.asarray(states, np.float32) @ np.asarray(matrix, np.float32)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 100), (40, 32)])
def test_matrices_that_do_not_fit(shape):
    assert not products.fits(Transposed.of(drawn(0, *shape)))


@pytest.mark.parametrize(
    ("features", "inner", "columns"),
    # The last are too many columns for programs of as few elements.
    [(80, 48, 16), (512, 512, 2), (512, 2048, 1), (32128, 512, 8)],
)
def test_columns_of_a_program_one_by_one(features, inner, columns):
    assert products._num_columns(features, inner) == columns


@pytest.mark.parametrize("kind", PRODUCTS)
def test_reads_under_way_fit_the_smallest_shared_memory(kind):
    """An L4 and an A10 have 99 KiB; compiled for one, programs took 5.5 KiB beside the reads."""
    num, normed, activations, _ = kind
    groups = [[None] * num] if activations else [[None]] * num
    widths, features = (512, 768, 1024, 2048, 4096), (1024, 2816, 5120, 32128)
    for inner, rows, most in itertools.product(widths, (8, 32, 48, 64, 512), features):
        sizes = products._sizes_in_tiles(rows, inner, most, groups, normed)
        columns = sizes.columns * len(groups[0])
        reads = (sizes.stages - 1) * 2 * sizes.step * (columns + sizes.tokens)
        assert reads + 6000 <= 99 << 10
