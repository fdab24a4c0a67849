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
from spec_t5x.contrib.cpu.panels import PackedEmbedding, Panels
from spec_t5x.machine.operations import XLA
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling import distributions, random_bits
from spec_t5x.testing.toy_models import tiny_t5

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
    """To numbers of bfloat16, in float32."""
    return values.astype(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 18])
@pytest.mark.parametrize(("inner", "columns"), [(5, 7), (130, 100)])
def test_products(rows, inner, columns):
    inputs, weights = draws(rows, inner), (draws(inner, columns), rounded(draws(inner, 48, seed=1)))
    for output, weight in zip(multiply(inputs, *weights), weights, strict=True):
        exact = inputs.astype(np.float64) @ weight.astype(np.float64)
        np.testing.assert_allclose(output, exact, atol=1e-5 * np.sqrt(inner))


@pytest.mark.parametrize("rows", [1, 3, 6, 40])
def test_weights_in_bfloat16_give_the_bits_of_float32(rows):
    inputs, weight, table = draws(rows, 200), rounded(draws(200, 150)), rounded(draws(150, 200))
    narrow = Panels.pack(weight)
    assert narrow.panels.dtype == jnp.bfloat16
    wide = narrow.panels.astype(jnp.float32)
    for panels in (narrow.panels, wide):
        (output,) = calls.multiply(inputs, [calls.Matrix(panels, narrow.scales, 150)])
        np.testing.assert_array_equal(output, multiply(inputs, weight)[0])
    np.testing.assert_array_equal(
        calls.dot_with_table(inputs, PackedEmbedding.pack(table).values),
        calls.dot_with_table(inputs, table),
    )


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 200, 150), (3, 7, 64), (6, 200, 150), (8, 7, 64)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_are_multiplied_and_then_scaled(rows, inner, columns, bits):
    inputs, weight = draws(rows, inner), Rounded.of(draws(inner, columns, seed=1), bits)
    (output,) = multiply(inputs, weight)
    exact = inputs.astype(np.float64) @ np.asarray(weight.matrix(), np.float64)
    np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5 * np.sqrt(inner))
    for row in range(rows):
        np.testing.assert_array_equal(multiply(inputs[row : row + 1], weight)[0][0], output[row])


def test_every_product_is_one_chain_of_additions():
    """In the order of the inputs, so that no number of rows and no layout changes a bit."""
    inputs, weight = draws(7, 90), draws(90, 70)
    (found,) = multiply(inputs, weight)
    sums = np.zeros((7, 70), np.float64)
    for k in range(90):
        # A product of two float32 is exact in float64: one rounding, as of an FMA.
        sums = (sums + inputs[:, k, None].astype(np.float64) * weight[k]).astype(np.float32)
        sums = sums.astype(np.float64)
    # Twice rounded, by way of float64, where the kernels round once.
    assert np.mean(found == sums.astype(np.float32)) > 0.999


def test_panels_of_another_shape_are_refused(unchecked):
    inputs, panels = draws(2, 8), np.zeros((2, 8, calls.PANEL), np.float32)
    none = np.zeros(0, np.float32)
    for wrong, scales, columns in (
        (panels, none, 64),
        (panels[:, :4], none, 100),
        (panels.astype(np.int32), none, 100),
        (panels.astype(np.int8), none, 100),
        (panels, np.zeros(128, np.float32), 100),
    ):
        with pytest.raises(Exception, match="panels of a product do not fit"):
            jax.block_until_ready(calls.multiply(inputs, [calls.Matrix(wrong, scales, columns)]))


@pytest.mark.parametrize("columns", [1024, 1030])
def test_products_shared_by_threads(columns):
    # Above the size from which threads take part.
    inputs, weight = draws(2, 3, 512), draws(512, columns)
    assert weight.nbytes > 1e6
    (output,) = multiply(inputs, weight)
    np.testing.assert_allclose(output, inputs @ weight, atol=2e-4)
    (again,) = multiply(inputs, weight)
    np.testing.assert_array_equal(output, again)


def test_the_number_of_rows_changes_no_bit_of_a_product():
    inputs, weight, table = draws(11, 200), draws(200, 150), draws(150, 200, seed=2)
    (together,) = multiply(inputs, weight)
    by_table = calls.dot_with_table(inputs, table)
    for row in range(11):
        (alone,) = multiply(inputs[row : row + 1], weight)
        np.testing.assert_array_equal(alone[0], together[row])
        np.testing.assert_array_equal(
            calls.dot_with_table(inputs[row : row + 1], table)[0], by_table[row]
        )


@pytest.mark.parametrize(("rows", "vocab", "inner"), [(1, 96, 32), (4, 101, 19), (6, 3000, 64)])
def test_products_with_a_table(rows, vocab, inner):
    inputs, table = draws(rows, inner), draws(vocab, inner, seed=1)
    exact = inputs.astype(np.float64) @ table.T.astype(np.float64)
    np.testing.assert_allclose(calls.dot_with_table(inputs, table), exact, atol=1e-4)


def norm_of(width, centred):
    bias = draws(width, seed=2) if centred else None
    return calls.Norm(draws(width, seed=1), 1e-6, bias, centred)


@pytest.mark.parametrize("width", [16, 83])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(width, centred):
    inputs, norm = draws(2, 3, width) + 1, norm_of(width, centred)
    shifted = inputs - inputs.mean(-1, keepdims=True) if centred else inputs
    expected = shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + 1e-6) * norm.scale
    expected = expected + (norm.bias if centred else 0)
    np.testing.assert_allclose(calls.normalize(inputs, norm), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [40, 150])
@pytest.mark.parametrize("centred", [False, True])
def test_a_product_of_normed_inputs_with_a_bias_on_top_of_others(columns, centred):
    """To the bit what one call after the other gives."""
    inputs, norm, residual = draws(2, 3, 70), norm_of(70, centred), draws(2, 3, columns, seed=3)
    weight, bias = draws(70, columns, seed=4), draws(columns, seed=5)
    (found,) = calls.multiply(inputs, [pack(weight, bias)], norm, residual)
    (product,) = multiply(calls.normalize(inputs, norm), weight)
    np.testing.assert_array_equal(found, residual + (np.asarray(product) + bias))


def test_a_residual_of_another_shape_is_refused(unchecked):
    inputs, weights = draws(2, 8), [pack(draws(8, 5)), pack(draws(8, 5))]
    for residual, matrices in ((draws(1, 5), weights[:1]), (draws(2, 5), weights)):
        with pytest.raises(Exception, match="outputs of a product do not fit"):
            jax.block_until_ready(calls.multiply(inputs, matrices, residual=residual))


@pytest.mark.parametrize("width", [1, 16, 37, 5000])
def test_summaries_of_rows(width):
    values = 5 * draws(3, 7, width)
    # The first of several, far apart and in one register.
    values[0, 0, [width // 2, width - 1]] = 99.0
    best, log_sums = calls.summarize(values)
    np.testing.assert_array_equal(best, values.argmax(-1))
    np.testing.assert_allclose(log_sums, jax.nn.logsumexp(values, axis=-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(calls.summarize(values, with_sums=False)[0], best)


def test_summaries_of_rows_without_some_tokens():
    values = np.full((2, 40), -np.inf, np.float32)
    values[0, 17], values[1, [3, 39]] = 2.0, 1.0
    best, log_sums = calls.summarize(values)
    np.testing.assert_array_equal(best, [17, 3])
    np.testing.assert_allclose(log_sums, [2.0, 1.0 + np.log(2.0)], rtol=1e-6)


WIDTHS = [1, 37, 5000]


# What the kernels are to give, by XLA's operations alone.
by_xla = jax.jit(distributions.tempered.__wrapped__, static_argnames=("top_k", "top_p"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kept", [(0, 0.0), (3, 0.0), (0, 0.3), (0, 0.95)])
def test_what_is_sampled_is_what_xla_makes_of_the_logits(width, kept):
    kept = dict(zip(("top_k", "top_p"), kept, strict=True))
    logits = 3 * draws(3, 4, width)
    # Ties at the top, at the edge of what is kept, and tokens that are excluded.
    logits[0] = np.round(logits[0])
    logits[1, :, : width // 2] = -np.inf
    temperatures = np.tile(np.float32([[1.0], [0.7], [0.0]]), (1, 4))
    least = distributions.MIN_TEMPERATURE
    found = np.asarray(calls.standardize(logits, temperatures, **kept, least_temperature=least))
    np.testing.assert_allclose(
        found, by_xla(logits, temperatures[..., None], **kept), rtol=5e-6, atol=1e-9
    )
    assert (found[np.isneginf(logits)] == 0).all()
    assert (np.max(found[2], axis=-1) == 1).all()
    # The same row beside others, or alone.
    alone = calls.standardize(
        logits[1, 3], np.asarray(0.7, np.float32), **kept, least_temperature=least
    )
    np.testing.assert_array_equal(alone, found[1, 3])


@pytest.mark.parametrize("width", WIDTHS)
def test_top_k_keeps_the_largest_and_what_ties_with_the_last(width):
    ranks = np.random.default_rng(0).permutation(width).astype(np.float32)
    logits = np.stack([ranks, -ranks, np.floor(ranks / 3), 1e30 * ranks])
    ones = np.ones(4, np.float32)
    for k in (1, 2, 7, width):
        found = calls.standardize(logits, ones, top_k=k, top_p=0.0, least_temperature=1e-4)
        threshold = np.sort(logits, axis=-1)[:, -min(k, width), None]
        found = np.asarray(found)
        assert (found[logits < threshold] == 0).all()
        # What is kept far below the largest has no mass left in float32.
        heavy = logits > logits.max(axis=-1, keepdims=True) - 80
        assert (found[heavy & (logits >= threshold)] > 0).all()


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


def fine_uniforms():
    """Pairs of numbers in [0, 1), both ends among them."""
    line = np.concatenate([np.linspace(0, 1, 200, endpoint=False), [np.nextafter(1, 0)]])
    return np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2).astype(np.float32)


@pytest.mark.parametrize("width", [1, 7, 50])
def test_tokens_come_as_often_as_their_mass(width):
    """On a grid of uniform numbers, which every cell of the square has its share of."""
    rng = np.random.default_rng(width)
    target, draft = rng.dirichlet(np.full(width, 0.5), 2).astype(np.float32)
    target[rng.random(width) < 0.3] = 0.0
    target[-1] += 0.1
    uniforms = fine_uniforms()
    rows = [np.tile(row, (len(uniforms), 1)) for row in (target, draft)]
    left = np.asarray(distributions.residual(target, draft))
    for masses, tokens in (
        (target, calls.sample(rows[0], uniforms)),
        (left, calls.sample_residual(*rows, uniforms)),
    ):
        counts = np.bincount(tokens, minlength=width)
        assert counts.size == width and not counts[masses == 0].any()
        # Each of two cuts may be a line of the grid off, at either end.
        shares = counts / len(uniforms)
        np.testing.assert_allclose(shares, masses / masses.sum(), atol=4 / 200)


def test_tokens_are_those_that_xla_draws():
    """But where a sum's rounding decides, which is rare."""
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.full(300, 0.2), (2, 4000)).astype(np.float32)
    uniforms = rng.random((4000, 2), dtype=np.float32)
    draw = jax.jit(jax.vmap(distributions.sample_at.__wrapped__))
    for tokens, expected in (
        (calls.sample(target, uniforms), draw(target, uniforms)),
        (
            calls.sample_residual(target, draft, uniforms),
            draw(distributions.residual(jnp.asarray(target), jnp.asarray(draft)), uniforms),
        ),
    ):
        assert np.mean(np.asarray(tokens) == expected) > 0.999


def test_where_nothing_is_left_the_target_is_sampled():
    target = np.float32([[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]])
    uniforms = np.float32([[0.9, 0.9], [0.0, 0.0]])
    np.testing.assert_array_equal(calls.sample_residual(target, target, uniforms), [2, 1])


def test_shapes_that_do_not_fit_are_refused(unchecked):
    probs, uniforms = np.ones((2, 3), np.float32), np.zeros((1, 2), np.float32)
    with pytest.raises(Exception, match="two uniform numbers"):
        jax.block_until_ready(calls.sample(probs, uniforms))
    with pytest.raises(Exception, match="rows of one shape"):
        jax.block_until_ready(calls.sample_residual(probs, probs[:1], np.zeros((2, 2), np.float32)))


def test_summaries_are_shared_by_threads_and_mapped_over():
    values = draws(9, 8000)
    assert values.size > 32768
    best = jax.vmap(lambda row: calls.summarize(row)[0])(values)
    np.testing.assert_array_equal(best, values.argmax(-1))


BATCH, HEADS, LENGTH, HEAD_DIM, NEW = 3, 2, 21, 24, 4
STARTS = np.array([0, 5, 17], np.int32)


def split(joined):
    return joined.reshape(BATCH, -1, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


EMBED = 40
MATRICES = [draws(EMBED, HEADS * HEAD_DIM, seed=seed) / 4 for seed in (6, 7, 8)]
MATRICES.append(draws(HEADS * HEAD_DIM, EMBED, seed=9))
BIASES = [draws(weight.shape[1], seed=seed) for seed, weight in enumerate(MATRICES, 10)]
NORM = norm_of(EMBED, centred=True)
LAYER = NORM, list(map(pack, MATRICES, BIASES))


def first(num, layer):
    """The layer for so many tokens of each row."""
    norm, matrices = layer
    return norm, [matrix._replace(num=jnp.int32(num)) for matrix in matrices]


def extension(poison=0.0):
    """States, cache and bias of ``extend_attention``; what no query may see is ``poison``."""
    cache = [draws(BATCH, HEADS, LENGTH, HEAD_DIM, seed=seed) for seed in (3, 4)]
    for row, start in enumerate(STARTS):
        for cached in cache:
            cached[row, :, start:] = poison
    return draws(BATCH, NEW, EMBED), cache, draws(HEADS, LENGTH, seed=5)


def extend(states, cache, starts, bias, scale=1.0):
    return calls.extend_attention(states, *LAYER, *cache, starts, bias, scale)


def through(states, contexts):
    """What a layer makes of its contexts."""
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


def test_attention_looks_at_nothing_beyond_a_query():
    found = []
    for poison in (0.0, np.nan):
        states, cache, bias = extension(poison)
        found.append(extend(states, cache, STARTS, bias)[0])
    np.testing.assert_array_equal(*found)


def test_attention_one_token_after_the_other_is_the_same_bit_for_bit():
    states, cache, bias = extension()
    together = extend(states, cache, STARTS, bias)
    for i in range(NEW):
        one, *cache = extend(states[:, i : i + 1], cache, STARTS + i, bias)
        np.testing.assert_array_equal(one[:, 0], together[0][:, i])
    np.testing.assert_array_equal(cache[0], together[1])
    np.testing.assert_array_equal(cache[1], together[2])


def test_tokens_that_do_not_count_are_zeros_and_enter_no_cache():
    states, cache, bias = extension()
    some = calls.extend_attention(states, *first(2, LAYER), *cache, STARTS, bias)
    attended = calls.source_attention(states, *first(2, SOURCE_LAYER), *cache, draws(BATCH, LENGTH))
    for found, expected in zip(some, extend(states[:, :2], cache, STARTS, bias), strict=True):
        np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert not np.any(some[0][:, 2:]) and not np.any(attended[:, 2:])


def test_a_start_that_runs_over_the_end_is_moved_back_as_xla_does():
    states, cache, bias = extension()
    starts = np.array([0, LENGTH - 2, LENGTH + 9], np.int32)
    _, keys, _ = extend(states, cache, starts, bias)
    expected = jax.vmap(lambda row, at, start: jax.lax.dynamic_update_slice(row, at, (0, start, 0)))
    expected = expected(cache[0], projected(states, 1), starts)
    np.testing.assert_allclose(keys, expected, atol=2e-5)


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


def test_matrices_that_attention_lacks_are_refused(unchecked):
    states, cache, bias = extension()
    norm, matrices = LAYER
    for given in (matrices[:2], []):
        with pytest.raises(Exception, match="lacks its matrix"):
            jax.block_until_ready(calls.extend_attention(states, norm, given, *cache, STARTS, bias))


def test_the_cache_is_written_in_place():
    states, cache, bias = extension()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def loop(keys, values):
        def body(i, carry):
            return extend(states, carry[1:], STARTS, bias)

        return jax.lax.fori_loop(0, 3, body, (jnp.zeros_like(states), keys, values))

    text = loop.lower(*map(jnp.asarray, cache)).compile().as_text()
    shape = f"f32[{BATCH},{HEADS},{LENGTH},{HEAD_DIM}]"
    copies = [line for line in text.splitlines() if f"{shape}{{3,2,1,0}} copy(" in line]
    assert "SpecT5XExtend" in text
    assert not copies, copies


# Whole models

TOKENS = np.random.default_rng(1).integers(2, 30, (2, 9)).astype(np.int32)


@jax.jit
def logits_of(model):
    """In two calls, so that the second attends to what the first cached."""
    cache = model.prefill(jnp.asarray([[5, 9, 3, 1, 0], [4, 1, 0, 0, 0]]), 24)
    first, _, cache = model.score(cache, TOKENS[:, :4])
    return jnp.concatenate([first, model.score(cache, TOKENS[:, 4:])[0]], axis=1)


@pytest.mark.parametrize("make", [tiny_t5])
def test_logits_are_those_of_xla(make):
    model = make(seed=0)
    assert model.operations is CPU
    by_xla = dataclasses.replace(model, weights=model.params, operations=XLA)
    np.testing.assert_allclose(logits_of(model), logits_of(by_xla), atol=5e-5)


def test_only_float32_on_one_cpu_device_suits(monkeypatch):
    leaf = jnp.zeros((2, 2))
    assert calls.suit({"a": leaf})
    with monkeypatch.context() as patch:
        # On several each matrix would be gathered for every step.
        patch.setattr(jax, "local_device_count", lambda: 2)
        assert not calls.suit({"a": leaf})
    assert not calls.suit({})
    assert not calls.suit({"a": leaf, "b": leaf.astype(jnp.bfloat16)})
    assert not calls.suit({"a": np.zeros((2, 2), np.float32)})
    found = []
    jax.jit(lambda leaf: found.append(calls.suit({"a": leaf})))(leaf)
    assert found == [False]


def test_a_sampled_step_hashes_by_the_kernel():
    uniform = jax.jit(lambda key: random_bits.uniform(key, 2))
    assert "SpecT5XThreefry" in uniform.lower(jax.random.key(7)).compile().as_text()
