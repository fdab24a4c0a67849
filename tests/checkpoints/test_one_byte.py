"""Matrices in a byte a weight: exactly bfloat16, near the weights, stable when written again."""

import jax
import numpy as np
import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native import rounded
from spec_t5x.checkpoints.storage.tensors import array_tensors
from spec_t5x.errors import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def kept(tiny_pair, tmp_path_factory):
    """Provides the pair's target with a byte a weight on disk."""
    directory = tmp_path_factory.mktemp("one_byte") / "target"
    convert(tiny_pair / "target", directory, to="native", dtype="int8")
    return directory


def stored(arrays):
    """Returns the tensors that ``split_exactly`` makes of matrices by name."""
    flat = rounded.split_exactly((f"layer/{name}", array) for name, array in arrays.items())
    return array_tensors({"layer": {path.split("/")[1]: array for path, array in flat}})


def joined(arrays):
    return rounded.join(stored(arrays), "DIR", "bfloat16")


def whole(tensor):
    return tensor.read(tuple(slice(0, size) for size in tensor.shape))


@pytest.mark.parametrize("packaged", [None, "t5-target"])
def test_the_model_is_in_bfloat16(kept, packaged):
    exact = load(packaged or kept, dtype="float32").params
    loaded = load(packaged or kept, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, exact, loaded.params)
    assert loaded.weights == "auto"


@pytest.mark.parametrize(("dtype", "of"), [("int8", "bytes"), ("bfloat16", "bfloat16")])
def test_written_again_it_is_the_same(kept, tmp_path, dtype, of):
    convert(kept, tmp_path / of, to="native", dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, load(kept).params, load(tmp_path / of).params)


@pytest.mark.parametrize(("name", "axis"), [("kernel", 0), ("embedding", 1)])
def test_weights_move_by_at_most_half_a_step(name, axis):
    matrix = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    # Columns and rows of other sizes, powers of two, 127 of them, and zeros.
    matrix[:, 0], matrix[0], matrix[:, 1], matrix[:, 2] = 0.0, 0.0, 1.0, 127 / 64
    matrix *= np.float32(2.0) ** np.arange(-15, 15)
    found = whole(joined({name: matrix})[f"layer/{name}"])
    largest = np.abs(matrix).max(axis=axis, keepdims=True)
    assert (np.abs(found.astype(np.float32) - matrix) <= largest / 127).all()
    if name == "kernel":
        np.testing.assert_array_equal(found[1:, :3], matrix[1:, :3].astype(found.dtype))


def test_other_formats_and_rounded_models_have_none(tiny_pair, tmp_path):
    given = tiny_pair / "target", tmp_path / "copy"
    with pytest.raises(InputError, match="dtype is int8, which huggingface cannot store"):
        convert(*given, to="huggingface", dtype="int8")
    with pytest.raises(InputError, match="weights are int4 and dtype int8: give another dtype"):
        convert(*given, to="native", dtype="int8", weights="int4")
