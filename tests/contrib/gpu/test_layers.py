"""Networks by the GPU kernels, run by JAX's interpreter: texts, bits, and which calls use them."""

import contextlib
import functools
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.contrib.gpu import kernels, layers, operations
from spec_t5x.contrib.gpu.operations import GPU, SWITCH, GpuOperations
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.testing.laws import check_target
from spec_t5x.labs.training.exports import model_in_memory
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA, usable
from spec_t5x.models import weights
from spec_t5x.models.binding import abstract_params, expected_shapes
from spec_t5x.models.layers import Dense
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.sizes import size
from spec_t5x.sampling.distributions import argmax, sampling
from spec_t5x.verifiers import TokenVerifier, TreeVerifier
from tests.child import HANGS
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZE = {
    "vocab_size": 96,
    "emb_dim": 48,
    "num_heads": 3,
    "head_dim": 16,
    "mlp_dim": 64,
    "num_decoder_layers": 2,
    "mlp_activations": ("gelu", "linear"),
}
SOURCES = jnp.asarray(np.random.default_rng(0).integers(2, 96, (3, 9)), jnp.int32)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(2, 96, (3, 5)), jnp.int32)


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch):
    """Enables also the kernels for several rows."""
    monkeypatch.setenv(SWITCH, "1")


@jax.jit
def logits(model, sources, tokens):
    """Returns the logits of the first call over ``tokens``."""
    return model.score(model.prefill(sources, 20), tokens)[0]


def by_kernels(model):
    """Returns a model with the kernels' operations and weights as they read them."""
    return model.replace(weights=GPU.pack(model.weights), operations=GPU)


@functools.cache
def make(kv="auto", dtype="bfloat16", seed=0, **changes):
    """Returns a T5 whose layers the kernels compute, and the same one by XLA."""
    model = tiny_t5(seed, **{**SIZE, **changes}, dtype=dtype)
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    plain = model.replace(weights=weights, operations=XLA, kv=kv)
    return by_kernels(plain), plain


# In tiles, and one by one, where JAX's interpreter on a CPU adds in another order.
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.0), ("float32", 1e-4)])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_calls_over_several_tokens_have_the_bits_of_calls_over_one(kv, dtype, atol):
    check_target(make(kv, dtype)[0], SOURCES, atol=atol)


# T5 XL's, with fewer layers: on a GPU alone, since the interpreter takes minutes.
XL = {
    "vocab_size": 32128,
    "emb_dim": 2048,
    "num_heads": 32,
    "head_dim": 64,
    "mlp_dim": 5120,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
}


@pytest.mark.parametrize("rows", [1, 8])
def test_five_tokens_have_the_bits_of_one_by_one_in_a_larger_cache(rows):
    """They cross the end of a round of 128 slots; sources are of different lengths."""
    on_gpu = jax.default_backend() == "gpu"
    model, width, before = (make(**XL)[0], 400, 126) if on_gpu else (make()[0], 9, 4)
    drawn = np.random.default_rng(0).integers(2, 96, (rows, width + before + 5))
    sources = np.where(np.arange(width) <= width - np.arange(rows)[:, None], drawn[:, :width], 0)
    cache = jax.jit(model.prefill, static_argnums=1)(jnp.asarray(sources, jnp.int32), before + 11)
    score, tokens = jax.jit(model.score), jnp.asarray(drawn[:, width:], jnp.int32)
    for start in range(0, before, 14):
        cache = score(cache, tokens[:, start : min(start + 14, before)])[2]
    logits, _, whole = score(cache, tokens[:, before:])
    one_by_one = []
    for start in range(before, before + 5):
        found, _, cache = score(cache, tokens[:, start : start + 1])
        one_by_one.append(found)
    # On a CPU, the interpreter adds tokens of one row in another order.
    atol = 0.0 if on_gpu or rows > 1 else 2e-2
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    # The caches first: they come before the last norm and the output layer.
    for ours, theirs in zip(*map(jax.tree.leaves, (whole.layers, cache.layers)), strict=True):
        same(ours, theirs)
    same(logits, jnp.concatenate(one_by_one, axis=1))


@pytest.mark.parametrize(
    "changes", [{}, {"relpos_per_layer": True}, {"mlp_activations": ("relu",)}]
)
def test_logits_are_those_of_xla(changes):
    ours, plain = make(dtype="float32", **changes)
    wanted = logits(plain, SOURCES, TOKENS)
    found = logits(ours, SOURCES, TOKENS)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * float(jnp.abs(wanted).max()))


def test_a_narrow_output_layer_is_computed_as_a_whole_one_is():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(48, 32)), jnp.bfloat16)
    head = NarrowHead.create(np.arange(1, 33), 96)
    ours, plain = (NarrowT5.narrowed(model, head, kernel) for model in make())
    states = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 48)), jnp.bfloat16)
    assert "pallas_call" in str(jax.make_jaxpr(ours.logits)(states))
    np.testing.assert_allclose(ours.logits(states), plain.logits(states), rtol=1e-4, atol=1e-4)


def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_xla():
    ours, plain = make()
    exact = plain.with_params(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), plain.params))
    exact = exact.replace(module=make(dtype="float32")[1].module, operations=XLA)
    wanted, *found = (logits(model, SOURCES, TOKENS) for model in (exact, ours, plain))
    errors = [float(jnp.abs(each - wanted).mean()) for each in found]
    assert errors[0] < 1.2 * errors[1]


# Of one row one by one, of several in tiles.
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("verifier", [TokenVerifier(), TreeVerifier((2, 2))])
def test_speculative_text_in_bfloat16_is_that_of_plain_decoding(verifier, rows):
    target, draft = make()[0], TransformerDraft(make(seed=1, num_decoder_layers=1)[0])
    prompts = jnp.zeros((rows, 1), jnp.int32)
    given = SOURCES[:rows], prompts, jax.random.key(0), sampling(0.0)
    plain = autoregressive_decode(target, *given, max_decode_len=14)
    found = speculative_decode(target, draft, *given, max_decode_len=14, gamma=2, verifier=verifier)
    np.testing.assert_array_equal(found.tokens, plain.tokens)


def h100():
    """Makes JAX compile for an H100 without a GPU; JAX before 0.11 needs nothing."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(H100.device_kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def num_kernels(model, num, rows=3):
    """Returns the number of kernels of a call over ``num`` tokens a row, in code for a GPU."""
    cache = model.replace(operations=XLA).prefill(jnp.zeros((rows, 9), jnp.int32), 40)
    tokens = jax.ShapeDtypeStruct((rows, num), jnp.int32)
    with mock.patch("jax.default_backend", return_value="gpu"), h100():
        traced = jax.jit(lambda tokens: model.score(cache, tokens)[0]).trace(tokens)
        code = traced.lower(lowering_platforms=("cuda",)).as_text()
    functions = re.findall(r"func.func private @(\w+)\((.*?)\n  }", code, re.DOTALL)
    names = [name for name, body in functions if "xla.gpu.triton" in body]
    return sum(code.count(f"call @{name}(") for name in names)


@pytest.mark.parametrize(
    ("changes", "tokens", "rows", "expected"),
    [
        # Eight in each of two layers, and the output layer.
        ({}, 1, 3, 17),
        ({}, 8, 3, 17),
        ({"logits_via_embedding": True}, 1, 3, 16),
        ({}, kernels.TILE, kernels.MOST_ROWS, 17),
        ({}, kernels.TILE + 1, kernels.MOST_ROWS, 0),
        ({}, kernels.MOST_TOKENS, 1, 17),
        # Too many rows for products, or too many tokens of a row.
        ({}, 1, kernels.MOST_ROWS + 1, 17),
        ({"dtype": "float32"}, 1, kernels.MOST_ROWS + 1, 0),
        ({}, 1, kernels.MOST_ROWS_IN_TILES + 1, 4),
        ({}, kernels.MOST_TOKENS + 1, 1, 0),
        # Heads of no power of two: products alone, six for attention.
        ({"head_dim": 48}, 1, 3, 17),
        # Matrices whose sides are no multiples of 16.
        ({"head_dim": 24}, 1, 3, 5),
        ({"mlp_dim": 56}, 1, 3, 13),
    ],
)
def test_kernels_of_a_call(changes, tokens, rows, expected):
    assert num_kernels(make(**changes)[0], tokens, rows) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "expected"), [(1, 17), (2, 0)])
def test_kernels_of_a_call_without_the_switch(rows, expected, dtype, monkeypatch):
    monkeypatch.delenv(SWITCH)
    assert num_kernels(make(dtype=dtype)[0], 5, rows) == expected


def test_logits_by_xla_widen_no_matrix():
    params = GPU.pack({"kernel": jnp.ones((48, 32), jnp.bfloat16)})
    dense, inputs = Dense(32, ("embed", "vocab"), parent=None), jnp.ones((2, 3, 48), jnp.bfloat16)
    found = str(jax.make_jaxpr(lambda inputs: dense.apply({"params": params}, inputs))(inputs))
    assert "f32[2,3,32]" in found and "f32[48,32]" not in found and "f32[32,48]" not in found


def test_another_default_device_has_no_kernels():
    with jax.default_device(jax.devices("cpu")[0]):
        assert num_kernels(make()[0], 1, rows=1) == 0
        assert GPU.state()[1].startswith("jax_default_device is ")


def test_matrices_in_int4_are_multiplied_by_xla():
    int8, int4 = (make()[0].rounded(bits) for bits in (8, 4))
    assert num_kernels(int8, 1) == 17
    assert num_kernels(int4, 1) == 4


@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 3, 48), (2, 2, 2, 48)])
def test_maps_of_inputs_of_any_rank(shape):
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(48, 32)), jnp.float32)
    dense, params = Dense(32, ("embed", "mlp"), parent=None), {"kernel": kernel}
    with nn.intercept_methods(layers.intercept):
        found = dense.apply({"params": GPU.pack(params)}, inputs)
    np.testing.assert_allclose(found, jnp.dot(inputs, kernel), rtol=1e-4, atol=1e-4)


H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
A100 = SimpleNamespace(device_kind="NVIDIA A100-SXM4-40GB", compute_capability="8.0")
T4 = SimpleNamespace(device_kind="Tesla T4", compute_capability="7.5")
MI300 = SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")


@pytest.mark.parametrize(
    ("switch", "devices", "reason"),
    [
        ("1", [H100], ""),
        ("", [H100], ""),
        ("1", [A100], ""),
        ("", [A100], "they were tested on an H100 and an H200; try SPEC_T5X_GPU_KERNELS=1"),
        ("0", [H100], "SPEC_T5X_GPU_KERNELS is 0"),
        ("", [H100, H100], "there are 2 devices"),
        ("1", [H100, H100], "there are 2 devices"),
        ("1", [T4], "Tesla T4 is no NVIDIA GPU of compute capability 8.0"),
        ("1", [MI300], "AMD Instinct MI300X is no NVIDIA GPU of compute capability 8.0"),
        ("1", jax.devices("cpu")[:1], "cpu is no NVIDIA GPU of compute capability 8.0"),
    ],
)
def test_devices_and_the_switch(switch, devices, reason, monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    operations._say_unused.cache_clear()
    for _ in range(2):
        assert (usable(expected_shapes(size("t5_1_1_small")), "bfloat16") is GPU) == (not reason)
    used = "for one row; for more, try SPEC_T5X_GPU_KERNELS=1"
    used = "SPEC_T5X_GPU_KERNELS is 1" if switch else used
    assert GPU.state() == (not reason, reason or used)
    # The key of stored costs contains it.
    assert repr(GPU) == f"GpuOperations({switch})"
    said = [f"SPEC_T5X_GPU_KERNELS is 1, but XLA computes all layers: {reason}"]
    assert [record.getMessage() for record in caplog.records] == (
        said if reason and switch == "1" else []
    )


TRITON = "jax.experimental.pallas.triton"


def test_a_jax_without_pallas_on_triton_has_no_kernels(monkeypatch):
    """Their modules are imported all the same, on every machine."""
    code = f"import sys; sys.modules['{TRITON}'] = None; import spec_t5x.contrib.gpu.operations"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS)
    monkeypatch.setattr(jax, "devices", lambda: [H100])
    monkeypatch.setitem(sys.modules, TRITON, None)
    assert GPU.state() == (False, f"JAX {jax.__version__} has no Pallas on Triton")


def in_type(params, dtype):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


@pytest.mark.parametrize(
    ("name", "switch", "dtypes"),
    [
        ("t5_1_1_small", "", ["bfloat16"]),
        ("t5_1_1_small", "1", ["bfloat16", "float32"]),
        ("t5_1_1_base", "", []),
        ("t5_1_1_large", "1", ["bfloat16", "float32"]),
        ("t5_1_1_xl", "1", []),
    ],
)
def test_models_that_the_kernels_suit(name, switch, dtypes, monkeypatch):
    monkeypatch.setattr(GpuOperations, "state", lambda self: (True, ""))
    monkeypatch.setenv(SWITCH, switch)
    shapes = expected_shapes(size(name))
    for dtype in ("bfloat16", "float32"):
        others = {path: shape for path, shape in shapes.items() if "relpos" not in path}
        assert GPU.usable(others, dtype) == (dtype in dtypes and switch == "1")
        assert GPU.usable(shapes, dtype) == (dtype in dtypes)
        params = in_type(abstract_params(size(name)), dtype)
        assert GPU.suit(params, dtype) == (dtype in dtypes)
        # Maps of a training are in float32, whatever type it computes in.
        assert GPU.suit(in_type(params, "float32"), dtype) == ("float32" in dtypes)
        rounded = jax.eval_shape(functools.partial(weights.rounded, bits=8, tied=False), params)
        assert GPU.suit(rounded, "bfloat16") == ("bfloat16" in dtypes)
    assert operations.is_small(shapes, most_inner=5120)


@pytest.mark.parametrize(("most_inner", "is_transposed"), [(64, True), (63, False)])
def test_a_stored_model_is_read_as_the_operations_of_its_size_need_it(
    most_inner, is_transposed, monkeypatch
):
    """A model that is too large for the kernels would be multiplied by XLA transposed."""
    model = tiny_t5(0, **{**SIZE, "vocab_size": 384})
    stored = model_in_memory("model", model.params, model.config, ByteVocabulary())
    monkeypatch.setattr(operations, "MOST_INNER", most_inner)
    monkeypatch.setattr(GpuOperations, "state", lambda self: (True, ""))
    read = stored.load(dtype="bfloat16", for_decoding=True)
    flat = flatten_dict(read.params, sep="/")
    matrices = [leaf for path, leaf in flat.items() if path.endswith("/kernel")]
    assert {isinstance(matrix, Transposed) for matrix in matrices} == {is_transposed}
    assert (read.bind().operations is GPU) == is_transposed


def test_argmax_is_one_reduction_where_the_kernels_are_used(monkeypatch):
    logits = jnp.asarray([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    monkeypatch.setattr(GpuOperations, "state", lambda self: (False, ""))
    assert GPU.kernel("argmax", logits) is None
    monkeypatch.setattr(GpuOperations, "state", lambda self: (True, ""))
    assert GPU.kernel("argmax", logits)(logits).tolist() == argmax(logits).tolist() == [1, 0]
    assert GPU.kernel("log_sum_exp", logits) is None
