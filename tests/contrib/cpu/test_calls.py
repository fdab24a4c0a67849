"""The CPU kernels against plain formulas, and row against row bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.cpu import calls
from spec_t5x.contrib.cpu.library import available
from spec_t5x.contrib.cpu.operations import CPU
from spec_t5x.contrib.cpu.panels import Panels
from spec_t5x.machine.operations import XLA
from spec_t5x.models import partitioning
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling import distributions, random_bits
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True, scope="module")
def registered():
    assert available(), "the kernels need a C++ compiler"


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def pack(matrix, bias=None):
    packed = Panels.pack(matrix)
    return calls.Matrix(packed.panels, packed.scales, packed.features, bias)


def multiply(inputs, *matrices):
    return calls.multiply(inputs, list(map(pack, matrices)))


def rounded(values):
    """Rounds to numbers of bfloat16, in float32."""
    return values.astype(jnp.bfloat16).astype(np.float32)


def exact(inputs, matrix):
    return inputs.astype(np.float64) @ np.asarray(matrix, np.float64)


def assert_rows_alone_have_the_same_bits(function, inputs, together):
    for row in range(len(inputs)):
        np.testing.assert_array_equal(function(inputs[row : row + 1])[0], together[row])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 18])
@pytest.mark.parametrize(("inner", "columns"), [(5, 7), (130, 100)])
def test_products(rows, inner, columns):
    inputs, weights = draws(rows, inner), (draws(inner, columns), rounded(draws(inner, 48, seed=1)))
    outputs = multiply(inputs, *weights)
    for i, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
        np.testing.assert_allclose(output, exact(inputs, weight), atol=1e-5 * np.sqrt(inner))
        assert_rows_alone_have_the_same_bits(
            lambda row, i=i: multiply(row, *weights)[i], inputs, output
        )


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 200, 150), (3, 7, 64), (6, 200, 150), (8, 7, 64)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_are_multiplied_and_then_scaled(rows, inner, columns, bits):
    inputs, weight = draws(rows, inner), Rounded.of(draws(inner, columns, seed=1), bits)
    (output,) = multiply(inputs, weight)
    expected = exact(inputs, weight.matrix())
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5 * np.sqrt(inner))
    assert_rows_alone_have_the_same_bits(lambda row: multiply(row, weight)[0], inputs, output)


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 40])
@pytest.mark.parametrize(("inner", "columns"), [(64, 64), (700, 130)])
def test_a_byte_a_weight_gives_the_bits_of_bfloat16(rows, inner, columns):
    matrix = np.random.default_rng(1).integers(-127, 128, (inner, columns)).astype(np.float32)
    matrix *= np.float32(2) ** (np.arange(columns) % 40 - 20)
    inputs = draws(rows, inner)
    in_bytes = pack(matrix)
    assert in_bytes.panels.dtype == jnp.int8
    panels = in_bytes.panels.astype(jnp.float32) * in_bytes.scales
    in_bfloat16 = in_bytes._replace(panels=panels.astype(jnp.bfloat16), scales=None)
    given = [calls.multiply(inputs, [each])[0] for each in (in_bytes, in_bfloat16)]
    np.testing.assert_array_equal(*given)


def test_every_product_is_one_chain_of_additions():
    """Sums are in the order of the inputs: no number of rows and no layout changes a bit."""
    inputs, weight = draws(7, 90), draws(90, 70)
    (found,) = multiply(inputs, weight)
    sums = np.zeros((7, 70), np.float64)
    for k in range(90):
        # A product of two float32 is exact in float64: one rounding, as of an FMA.
        sums = (sums + inputs[:, k, None].astype(np.float64) * weight[k]).astype(np.float32)
        sums = sums.astype(np.float64)
    # Twice rounded, by way of float64, where the kernels round once.
    assert np.mean(found == sums.astype(np.float32)) > 0.999


@pytest.mark.parametrize("columns", [1024, 1030])
def test_products_shared_by_threads(columns):
    inputs, weight = draws(2, 3, 512), draws(512, columns)
    # Large enough for several threads.
    assert weight.nbytes > 1e6
    (output,) = multiply(inputs, weight)
    np.testing.assert_allclose(output, inputs @ weight, atol=2e-4)
    np.testing.assert_array_equal(output, multiply(inputs, weight)[0])


@pytest.mark.parametrize(("rows", "vocab", "inner"), [(1, 96, 32), (4, 101, 19), (11, 3000, 64)])
def test_products_with_a_table(rows, vocab, inner):
    inputs, table = draws(rows, inner), draws(vocab, inner, seed=1)
    output = calls.dot_with_table(inputs, table)
    np.testing.assert_allclose(output, exact(inputs, table.T), atol=1e-4)
    assert_rows_alone_have_the_same_bits(
        lambda row: calls.dot_with_table(row, table), inputs, output
    )
    few = calls.dot_with_table(inputs, table, jnp.int32(rows // 2))
    np.testing.assert_array_equal(few, output * (np.arange(rows) < rows // 2)[:, None])


def test_a_row_major_array_leaves_the_layouts_of_other_results_alone():
    """A copy shows it: it reads an array as row-major, in whatever order it is in memory."""
    inputs, kernel = draws(3, 5, 16), draws(16, 2, 8)

    @jax.jit
    def heads(inputs, kernel):
        # Whose order in memory XLA would choose.
        plain = jnp.einsum("bse,ehd->bhsd", inputs, kernel)
        return plain, calls.row_major(2 * plain)

    plain, twice = map(jnp.copy, heads(inputs, kernel))
    expected = np.einsum("bse,ehd->bhsd", inputs, kernel)
    np.testing.assert_allclose(plain, expected, atol=1e-4)
    np.testing.assert_allclose(twice, 2 * expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_of_a_table(dtype):
    table = draws(70, 19).astype(dtype)
    stored = table if dtype == np.float32 else table.view(np.uint16)
    tokens = np.asarray([[0, 69, 3], [3, 70, -1]])
    found = np.asarray(calls.look_up(jnp.asarray(tokens), stored))
    known = (tokens >= 0) & (tokens < 70)
    np.testing.assert_array_equal(found[known], table[tokens[known]].astype(np.float32))
    assert np.isnan(found[~known]).all()


def norm_of(width, centred):
    bias = draws(width, seed=2) if centred else None
    # An epsilon that shows beside a mean square of 1.
    return calls.Norm(draws(width, seed=1), 0.1, bias, centred)


@pytest.mark.parametrize("width", [16, 83])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(width, centred):
    inputs, norm = draws(2, 3, width) + 1, norm_of(width, centred)
    shifted = inputs - inputs.mean(-1, keepdims=True) if centred else inputs
    expected = shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + norm.epsilon) * norm.scale
    expected = expected + (norm.bias if centred else 0)
    np.testing.assert_allclose(calls.normalize(inputs, norm), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [40, 150])
@pytest.mark.parametrize("centred", [False, True])
def test_a_product_of_normed_inputs_with_a_bias_on_top_of_others(columns, centred):
    """The bits are those of one call after the other."""
    inputs, norm, residual = draws(2, 3, 70), norm_of(70, centred), draws(2, 3, columns, seed=3)
    weight, bias = draws(70, columns, seed=4), draws(columns, seed=5)
    (found,) = calls.multiply(inputs, [pack(weight, bias)], norm, residual)
    (product,) = multiply(calls.normalize(inputs, norm), weight)
    np.testing.assert_array_equal(found, residual + (np.asarray(product) + bias))


@pytest.mark.parametrize("width", [1, 16, 37, 5000])
def test_summaries_of_rows(width):
    values = 5 * draws(3, 7, width)
    # The first of several, far apart and in one register; and tokens that are left out.
    values[0, 0, [width // 2, width - 1]] = 99.0
    values[1, :, 1 : width // 2] = -np.inf
    best, log_sums = calls.summarize(values)
    np.testing.assert_array_equal(best, values.argmax(-1))
    np.testing.assert_allclose(log_sums, jax.nn.logsumexp(values, axis=-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(calls.summarize(values, with_sums=False)[0], best)


def test_a_block_of_values_that_are_no_numbers_is_not_lost():
    values = np.zeros((2, 5000), np.float32)
    values[0, 2048:4096] = np.nan
    values[1, 2048:4096] = -np.inf
    log_sums = calls.summarize(values)[1]
    assert np.isnan(log_sums[0])
    np.testing.assert_allclose(log_sums[1], np.log(5000 - 2048), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 37, 5000])
def test_a_row_of_values_that_are_no_numbers_has_a_token_of_the_vocabulary(width):
    values = np.full((2, width), np.nan, np.float32)
    best, _ = calls.summarize(values, with_sums=False)
    assert np.all((best >= 0) & (best < width))
    options = {"least_temperature": distributions.MIN_TEMPERATURE}
    zeros = np.zeros(2, np.float32)
    np.testing.assert_array_equal(
        calls.standardize(values, zeros, zeros.astype(np.uint32), zeros, **options).sum(-1), 1
    )
    # NaN is never kept, and numbers fewer than top_k all are.
    values[:, :2] = np.float32([-1.0, -2.0])[:width]
    found = calls.standardize(values, zeros + 1, np.full(2, 3, np.uint32), zeros, **options)
    expected = jax.nn.softmax(values[:, :2], axis=-1)
    np.testing.assert_allclose(found[:, :2], expected, rtol=1e-5)


WIDTHS = [1, 37, 5000]


# The expected distributions, by XLA's operations alone.
by_xla = jax.jit(distributions.tempered.__wrapped__, static_argnames="cut")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("k", "p"), [(0, 0.0), (1, 0.0), (3, 0.0), (0, 0.3), (0, 0.95)])
def test_distributions_are_those_of_xla(width, k, p):
    logits = 3 * draws(3, 4, width)
    # Ties at the top, at the edge of what is kept, and tokens that are excluded.
    logits[::2] = np.round(logits[::2])
    logits[1, :, : width // 2] = -np.inf
    temperatures = np.tile(np.float32([[1.0], [0.7], [0.0]]), (1, 4))
    temperatures[2, ::2] = distributions.MIN_TEMPERATURE
    options = {"least_temperature": distributions.MIN_TEMPERATURE}
    numbers = np.full((3, 4), k, np.uint32), np.full((3, 4), p, np.float32)
    found = np.asarray(calls.standardize(logits, temperatures, *numbers, **options))
    cut = "top_k" if k else "top_p" if p else None
    np.testing.assert_allclose(
        found,
        by_xla(logits, temperatures[..., None], np.uint32(k), np.float32(p), cut=cut),
        rtol=5e-6,
        atol=1e-9,
    )
    assert (found[np.isneginf(logits)] == 0).all()
    assert (np.max(found[2], axis=-1) == 1).all()
    # The same row beside others, or alone.
    of_row = (np.asarray(each) for each in (np.float32(0.7), np.uint32(k), np.float32(p)))
    alone = calls.standardize(logits[1, 3], *of_row, **options)
    np.testing.assert_array_equal(alone, found[1, 3])


@pytest.mark.parametrize("width", WIDTHS)
def test_overlap_and_excess_of_rows(width):
    rng = np.random.default_rng(width)
    target, draft = (rng.dirichlet(np.full(width, 0.3), (2, n)).astype(np.float32) for n in (4, 3))
    factors = np.float32([[1.0, 0.5, 0.25, 0.75], [1.0, 1.0, 1.0, 0.0]])
    overlaps, excesses = calls.compare(target, draft, factors)
    np.testing.assert_allclose(overlaps, np.minimum(target[:, :3], draft).sum(-1), rtol=1e-5)
    longer = np.pad(draft, ((0, 0), (0, 1), (0, 0)))
    expected = np.maximum(factors[..., None] * target - longer, 0).sum(-1)
    np.testing.assert_allclose(excesses, expected, rtol=1e-5, atol=1e-7)
    # Of a row that both share nothing is left, to the last bit.
    same = calls.compare(target, target, np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(same[1], np.zeros((2, 4)))


def test_tokens_are_those_that_xla_draws():
    """They may differ where a sum's rounding decides, which is rare."""
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.full(300, 0.2), (2, 4000)).astype(np.float32)
    target[:, ::7] = 0.0
    # Nothing is left of some rows, whose target is sampled then.
    draft[::9] = target[::9]
    uniforms = rng.random((4000, 2), dtype=np.float32)
    ends = np.float32([0, np.nextafter(1, 0, dtype=np.float32)])
    uniforms[:8] = np.stack(np.meshgrid(ends, ends), axis=-1).reshape(4, 2).repeat(2, axis=0)
    draw = jax.jit(jax.vmap(distributions.sample_at.__wrapped__))
    left = distributions.residual(jnp.asarray(target), jnp.asarray(draft))
    for masses, tokens in (
        (target, calls.sample(target, uniforms)),
        (left, calls.sample_residual(target, draft, uniforms)),
    ):
        assert np.mean(np.asarray(tokens) == draw(masses, uniforms)) > 0.999
        assert np.all(np.take_along_axis(np.asarray(masses), tokens[:, None], axis=1) > 0)
    # A number on the border of two tokens draws the second.
    quarters = np.full((16, 4), 0.25, np.float32)
    borders = np.stack(np.divmod(np.arange(16, dtype=np.float32), 4), axis=-1) / 4
    np.testing.assert_array_equal(calls.sample(quarters, borders), draw(quarters, borders))


def test_summaries_are_shared_by_threads_and_mapped_over():
    values = draws(9, 8000)
    assert values.size > 32768
    best = jax.vmap(lambda row: calls.summarize(row)[0])(values)
    np.testing.assert_array_equal(best, values.argmax(-1))


# A head has four registers, one or more beside them, and a rest, for registers of any size.
BATCH, HEADS, LENGTH, HEAD_DIM, NEW = 3, 2, 21, 92, 4
STARTS = np.array([0, 5, 17], np.int32)


def split(joined):
    return joined.reshape(BATCH, -1, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


EMBED = 40
MATRICES = [draws(EMBED, HEADS * HEAD_DIM, seed=seed) / 4 for seed in (6, 7, 8)]
MATRICES.append(draws(HEADS * HEAD_DIM, EMBED, seed=9) / 4)
BIASES = [draws(weight.shape[1], seed=seed) for seed, weight in enumerate(MATRICES, 10)]
NORM = norm_of(EMBED, centred=True)
LAYER = NORM, list(map(pack, MATRICES, BIASES))


def first(num, layer):
    """Limits a layer to the first ``num`` tokens of each row."""
    norm, matrices = layer
    return norm, [matrix._replace(num=jnp.int32(num)) for matrix in matrices]


def extension():
    """Returns states, cache and bias."""
    cache = [draws(BATCH, HEADS, LENGTH, HEAD_DIM, seed=seed) for seed in (3, 4)]
    return draws(BATCH, NEW, EMBED), cache, draws(HEADS, LENGTH, seed=5)


def extend(states, cache, starts, bias, scale=1.0):
    return calls.extend_attention(states, *LAYER, *cache, starts, bias, scale)


def through(states, contexts):
    """Maps a layer's contexts to its output."""
    return states + contexts @ MATRICES[-1] + BIASES[-1]


def projected(states, which):
    normed = np.asarray(calls.normalize(states, NORM))
    return split(normed @ MATRICES[which] + BIASES[which])


def expected_extension(states, cache, bias, scale):
    keys, values = (cached.copy() for cached in cache)
    queries, new_keys, new_values = (projected(states, which) for which in range(3))
    contexts = np.zeros((BATCH, NEW, HEADS, HEAD_DIM), np.float32)
    for row, start in enumerate(STARTS):
        keys[row, :, start : start + NEW] = new_keys[row]
        values[row, :, start : start + NEW] = new_values[row]
        for i in range(NEW):
            seen = start + i + 1
            scores = np.einsum("hd,hkd->hk", queries[row, :, i], keys[row, :, :seen]) * scale
            scores = scores + bias[:, :seen][:, ::-1]
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            contexts[row, i] = np.einsum("hk,hkd->hd", weights, values[row, :, :seen])
    return through(states, contexts.reshape(BATCH, NEW, -1)), keys, values


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_attention_over_a_cache_that_it_extends(scale):
    states, cache, bias = extension()
    found = extend(states, cache, STARTS, bias, scale)
    for ours, theirs in zip(found, expected_extension(states, cache, bias, scale), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    without = extend(states, cache, STARTS, None, scale)
    expected = expected_extension(states, cache, np.zeros_like(bias), scale)
    np.testing.assert_allclose(without[0], expected[0], atol=1e-4)


@pytest.mark.parametrize("used", [NEW, 2])
def test_a_start_that_runs_over_the_end_is_moved_back_as_xla_does(used):
    states, cache, bias = extension()
    starts = np.array([0, LENGTH - 2, LENGTH + 9], np.int32)
    _, keys, _ = calls.extend_attention(states, *first(used, LAYER), *cache, starts, bias)
    expected = jax.vmap(lambda row, at, start: jax.lax.dynamic_update_slice(row, at, (0, start, 0)))
    expected = expected(cache[0], projected(states[:, :used], 1), starts)
    np.testing.assert_allclose(keys, expected, atol=2e-5)


def test_nodes_without_a_slot_are_not_cached_and_see_no_slot_without_a_position():
    states, cache, bias = extension()
    slots, positions = np.tile(np.arange(NEW), (BATCH, 1)), np.tile(np.arange(LENGTH), (BATCH, 1))
    slots[0, 1], slots[1, 3], positions[:, 10], positions[:, 11] = -1, LENGTH, LENGTH, -1
    visible = np.tile(np.tri(NEW, LENGTH, dtype=bool), (BATCH, 1, 1))
    # The last node may see only slots 10 and 11, which have no position.
    visible[:, -1], visible[..., 10:12] = False, True
    nodes = jnp.asarray(slots), jnp.asarray(positions), jnp.asarray(visible)
    found, *after = calls.extend_attention_nodes(states, *LAYER, *cache, *nodes, bias)
    for which, (ours, before) in enumerate(zip(after, cache, strict=True), 1):
        expected, new = before.copy(), projected(states, which)
        for row, node in np.argwhere((slots >= 0) & (slots < LENGTH)):
            expected[row, :, slots[row, node]] = new[row, :, node]
        np.testing.assert_allclose(ours, expected, atol=2e-5)
    nothing = np.zeros((BATCH, NEW, HEADS * HEAD_DIM), np.float32)
    np.testing.assert_allclose(found[:, -1], through(states, nothing)[:, -1], atol=2e-5)
    in_a_row, *_ = extend(states, cache, np.zeros(BATCH, np.int32), bias)
    np.testing.assert_array_equal(found[2, :-1], in_a_row[2, :-1])


SOURCE_LAYER = NORM, [LAYER[1][0], LAYER[1][3]]


def test_attention_to_a_source():
    states = draws(BATCH, NEW, EMBED)
    keys, values = (draws(BATCH, HEADS, LENGTH, HEAD_DIM, seed=seed) for seed in (1, 2))
    # Padding at the end, in the middle, and nothing else.
    mask = np.zeros((BATCH, LENGTH), np.float32)
    mask[0, 15:], mask[1, 3], mask[2] = -1e10, -1e10, -1e10
    found = calls.source_attention(states, *SOURCE_LAYER, keys, values, mask)
    scores = np.einsum("bhnd,bhkd->bhnk", projected(states, 0), keys) + mask[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1)
    contexts = np.einsum("bhnk,bhkd->bnhd", weights, values).reshape(BATCH, NEW, -1)
    np.testing.assert_allclose(found, through(states, contexts), atol=1e-4)
    # Consecutive rows share the source of their input.
    rows = np.repeat(states, 2, axis=0)
    shared = calls.source_attention(rows, *SOURCE_LAYER, keys, values, mask)
    np.testing.assert_array_equal(shared, np.repeat(found, 2, axis=0))


@pytest.mark.parametrize("used", [None, 13])
def test_attention_over_whole_sequences(used):
    states, bias = draws(BATCH, LENGTH, EMBED), draws(1, HEADS, LENGTH, LENGTH, seed=5)
    allowed = np.random.default_rng(0).random((BATCH, 1, LENGTH, LENGTH)) < 0.7
    # What nothing attends to, and what attends to nothing.
    allowed[..., used:], allowed[2, :, 4] = False, False
    layer = first(used or LENGTH, LAYER)
    found = calls.whole_attention(states, *layer, allowed, bias, HEAD_DIM, 0.5)
    queries, keys, values = (projected(states, which) for which in range(3))
    scores = 0.5 * np.einsum("bhnd,bhkd->bhnk", queries, keys) + bias
    scores = np.where(allowed, scores, scores - 1e10)[..., :used]
    weights = jax.nn.softmax(scores, axis=-1)
    contexts = np.einsum("bhnk,bhkd->bnhd", weights, values[:, :, :used])
    expected = through(states, contexts.reshape(BATCH, LENGTH, -1))
    np.testing.assert_allclose(found[:, :used], expected[:, :used], atol=1e-4)
    assert not np.any(found[:, used or LENGTH :])


def refused_calls():
    """Calls with arrays that do not fit, by what their errors say."""
    inputs, panels, weight = draws(2, 8), np.zeros((2, 8, calls.PANEL), np.float32), draws(8, 5)
    for wrong, columns in ((panels, 64), (panels[:, :4], 100), (panels.astype(np.int8), 100)):
        matrix = calls.Matrix(wrong, None, columns)
        yield "panels of a product do not fit", functools.partial(calls.multiply, inputs, [matrix])
    given = [inputs, [pack(weight, draws(4))]]
    yield "panels of a product do not fit", functools.partial(calls.multiply, *given)
    for residual, matrices in ((draws(1, 5), 1), (draws(2, 5), 2)):
        given = [inputs, [pack(weight)] * matrices, None, residual]
        yield "outputs of a product do not fit", functools.partial(calls.multiply, *given)
    halves = np.zeros((4, 8), np.int16)
    yield "a table and its rows do not fit", functools.partial(calls.look_up, STARTS, halves)
    for table in (draws(5, 7), np.zeros((5, 8), np.int16)):
        given = inputs, table
        yield "a table and its inputs", functools.partial(calls.dot_with_table, *given)
    probs, uniforms = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    yield "two uniform numbers", functools.partial(calls.sample, probs, uniforms[:1])
    mixed = functools.partial(calls.sample_residual, probs, probs[:1], uniforms)
    yield "rows of one shape", mixed
    numbers = np.ones(1, np.float32), np.zeros(2, np.uint32), np.zeros(2, np.float32)
    few = functools.partial(calls.standardize, probs, *numbers, least_temperature=0.1)
    yield "a temperature, top_k and top_p are needed for each row", few
    states, cache, bias = extension()
    for matrices in (LAYER[1][:2], []):
        given = states, NORM, matrices, *cache, STARTS, bias
        yield "lacks its matrix", functools.partial(calls.extend_attention, *given)
    given = draws(BATCH, LENGTH + 1, EMBED), cache, STARTS, bias
    yield "more new tokens than the cache holds", functools.partial(extend, *given)


def test_arrays_that_do_not_fit_are_refused(unchecked):
    for message, call in refused_calls():
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call())


@jax.jit
def logits_of(model):
    """Logits of two calls, so that the second attends to what the first cached."""
    tokens = np.random.default_rng(1).integers(2, 30, (2, 9)).astype(np.int32)
    cache = model.prefill(jnp.asarray([[5, 9, 3, 1, 0], [4, 1, 0, 0, 0]]), 24)
    first, _, cache = model.score(cache, tokens[:, :4])
    return jnp.concatenate([first, model.score(cache, tokens[:, 4:])[0]], axis=1)


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("make", [tiny_t5])
def test_logits_are_those_of_xla(make, kv):
    model = make(seed=0).with_kv(kv)
    assert model.operations is CPU
    by_xla = dataclasses.replace(model, weights=model.params, operations=XLA)
    np.testing.assert_allclose(logits_of(model), logits_of(by_xla), atol=5e-5)


def test_only_float32_on_one_cpu_device_suits(monkeypatch):
    leaf = jnp.zeros((2, 2))
    assert calls.suit({"a": leaf}) and CPU.usable({}, "float32")
    with monkeypatch.context() as patch:
        # On several each matrix would be gathered for every step.
        patch.setattr(jax, "local_device_count", lambda: 2)
        assert not calls.suit({"a": leaf}) and not CPU.usable({}, "float32")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert not CPU.usable({}, "float32")
    assert not CPU.usable({}, "bfloat16")
    assert not calls.suit({})
    assert not calls.suit({"a": leaf, "b": leaf.astype(jnp.bfloat16)})
    assert not calls.suit({"a": np.zeros((2, 2), np.float32)})
    found = []
    jax.jit(lambda leaf: found.append(calls.suit({"a": leaf})))(leaf)
    assert found == [False]


def test_a_sampled_step_hashes_by_the_kernel():
    def program():
        uniform = jax.jit(lambda key: random_bits.uniform(key, 2))
        return uniform.lower(jax.random.key(7)).compile().as_text()

    assert "SpecT5XThreefry" in program()
    # The devices of a mesh may be of several processes.
    with partitioning.partitioned(partitioning.make_mesh(model=1)):
        assert "SpecT5XThreefry" not in program()
