"""Checkpoints of rounded matrices: the numbers that a model computes with, and no others."""

import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native import rounded
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import array_tensors
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import model_in_memory
from spec_t5x.machine import operations as operations_lib
from spec_t5x.machine.operations import XLA
from spec_t5x.models.weights import BITS
from tests.checkpoints.faults import edit_config, message_of
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")


def same(first, second):
    assert jax.tree.structure(first.weights) == jax.tree.structure(second.weights)
    leaves = map(jax.tree.leaves, (first.weights, second.weights))
    for ours, theirs in zip(*leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module", params=["int8", "int4"])
def kept(tiny_pair, tmp_path_factory, request):
    """Provides the pair's target with rounded matrices on disk, and how they were rounded."""
    directory = tmp_path_factory.mktemp("rounded") / "target"
    convert(tiny_pair / "target", directory, to="native", weights=request.param)
    return directory, request.param


def test_the_model_is_that_of_the_rounded_weights(tiny_pair, kept):
    directory, weights = kept
    loaded = load(directory)
    assert loaded.weights == weights
    same(loaded.bind(), load(tiny_pair / "target").bind(weights))
    # Where other weights are in bfloat16, too.
    in_bfloat16 = load(directory, dtype="bfloat16").bind().weights["decoder"]["layers_0"]
    expected = loaded.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(in_bfloat16["mlp"]["wo"]["kernel"].matrix(), expected)


@pytest.mark.parametrize("operations", [(XLA,), None], ids=["xla", "machine's"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_matrices_are_rounded_one_by_one_as_they_are_read(weights, tied, operations, monkeypatch):
    """The device holds one matrix in float32, not all of them."""
    if operations:
        monkeypatch.setattr(operations_lib, "registered", lambda: operations)
    model = tiny_t5(0, vocab_size=384, logits_via_embedding=tied)
    opened = model_in_memory("model", model.params, model.config, ByteVocabulary())
    held = []

    def read_params(self, *, packed, **options):
        params = {}

        def note(path, param):
            found = packed(path, param)
            params[path] = found
            kernels = [leaf for name, leaf in params.items() if name.endswith("/kernel")]
            held.append(sum(leaf.nbytes for leaf in jax.tree.leaves(kernels)))
            return found

        return whole(self, packed=note, **options)

    whole = StoredModel.read_params
    monkeypatch.setattr(StoredModel, "read_params", read_params)
    options = {"dtype": "float32", "for_decoding": True}
    rounded, later = opened.load(weights=weights, **options), opened.load(**options)
    assert (rounded.weights, later.weights) == ("auto", "auto")
    same(rounded.bind(), later.bind(weights))
    same(rounded.bind(weights), rounded.bind())
    other = "int4" if weights == "int8" else "int8"
    same(rounded.bind(other), rounded.bind().rounded(BITS[other]))
    assert not operations or later.bind().operations is operations[0]
    assert max(held[: len(held) // 2]) < 0.6 * max(held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_copied_and_exported_as_it_is(kept, tmp_path, dtype):
    """All but the matrices, which are never rounded again, is in ``dtype``."""
    directory, weights = kept
    expected = {
        path: leaf if path[-1] == "kernel" else leaf.astype(dtype)
        for path, leaf in flatten_dict(load(directory).params).items()
    }
    for to in ("t5x", "huggingface", "native"):
        convert(directory, tmp_path / to / "checkpoint_0", to=to, dtype=dtype)
        exported = load(tmp_path / to / "checkpoint_0")
        jax.tree.map(np.testing.assert_array_equal, flatten_dict(exported.params), expected)
    assert exported.weights == weights
    convert(directory, tmp_path / "copy", to="native")
    same(load(tmp_path / "copy").bind(), load(directory).bind())
    # Of two types that are stored, the wider one is the default.
    convert(tmp_path / "huggingface" / "checkpoint_0", tmp_path / "again", to="native")
    again = flatten_dict(load(tmp_path / "again").params)
    jax.tree.map(np.testing.assert_array_equal, again, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": "int3"}, "has weights 'int3', this spec_t5x reads auto, int8, int4: install"),
        ({"version": 3}, "has version 3, this spec_t5x reads 2: install"),
        ({"weights": "auto"}, "has version 2, this spec_t5x reads 1: install"),
    ],
)
def test_another_version_is_refused(kept, tmp_path, changes, expected):
    directory = shutil.copytree(kept[0], tmp_path / "target")
    edit_config(directory, **changes)
    assert expected in message_of(load, directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [{}, {"kernel_scales": np.ones((2, 5), np.float32)}])
def test_a_matrix_without_its_scales_is_refused(scales, dtype):
    stored = array_tensors({"wo": {"kernel": np.ones((4, 5), np.int8), **scales}})
    with pytest.raises(InputError, match="DIR: wo/kernel has no scales that fit it: copy"):
        rounded.join(stored, "DIR", dtype)


@pytest.mark.parametrize(("name", "bits"), [("kernel", 4), ("kernel", 8), ("embedding", 8)])
def test_slices_are_those_of_the_whole(name, bits):
    arrays = [(f"wo/{name}", np.random.default_rng(0).normal(size=(130, 7)).astype(np.float32))]
    in_4_bits = bits == 4
    flat = dict(rounded.split(arrays, 4, "float32") if in_4_bits else rounded.split_exactly(arrays))
    stored = array_tensors({"wo": {path.split("/")[1]: array for path, array in flat.items()}})
    tensor = rounded.join(stored, "DIR", "float32" if in_4_bits else "bfloat16")[f"wo/{name}"]
    whole = tensor.read((slice(0, 130), slice(0, 7)))
    part = (slice(60, 129), slice(2, 5))
    np.testing.assert_array_equal(tensor.read(part), whole[part])


def test_other_formats_have_no_rounded_matrices(tiny_pair, tmp_path):
    with pytest.raises(InputError, match="weights is int8, which t5x cannot store: give native"):
        convert(tiny_pair / "target", tmp_path / "checkpoint_0", to="t5x", weights="int8")
    with pytest.raises(InputError, match="weights is 'int5': choose one of auto, int8, int4"):
        convert(tiny_pair / "target", tmp_path / "a", to="native", weights="int5")
