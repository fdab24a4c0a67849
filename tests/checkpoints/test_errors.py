"""Every fault of a checkpoint is one line that names it and its remedy."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType

from spec_t5x.checkpoints import loading
from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import check_same_vocabulary, load, open_model
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.partitioning import param_shardings
from tests.checkpoints.faults import check_params, edit_config, message_of


def test_directories_that_hold_no_model(saved, tmp_path):
    assert f"no directory {tmp_path / 'absent'}" in message_of(load, tmp_path / "absent")
    assert "is a file" in message_of(load, saved / "config.json")
    for given in ({"directory_or_name": "~no-one/a"}, {"vocabulary": "~no-one/a"}):
        message = message_of(load, **{"directory_or_name": saved} | given)
        assert message.startswith("~no-one/a names no home directory (")
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in message_of(load, tmp_path / "empty")


def test_unknown_types_are_refused_before_a_model_is_found_or_downloaded(tmp_path, unchecked):
    name = "owner/no-such-model"
    assert (
        message_of(load, name, dtype="int8") == "dtype is 'int8': choose one of bfloat16, float32"
    )
    assert message_of(load, name, weights="int3").startswith("weights is 'int3': choose one of")
    assert message_of(load, name, shardings={}) == "shardings are a dict: give a function"
    converted = functools.partial(convert, name, tmp_path / "to", to="native")
    assert message_of(converted, dtype="float16").startswith("dtype is 'float16': choose one of")


def test_packaged_names_are_found_and_listed(saved, monkeypatch):
    monkeypatch.setattr(loading, "PACKAGED_MODELS", saved.parent)
    assert load("sound").directory == saved
    assert "one of the packaged sound" in message_of(load, "absent")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"format": "spec_t5x", ', "config.json as JSON"),
        ("[]", "no JSON object"),
        ("{}", "neither format 'spec_t5x' nor a model_type"),
        (
            '{"format": "spec_t5x_shared_draft"}',
            "sound holds a draft, not a whole model: give it as",
        ),
        ('{"format": "spec_t5x_ngram"}', "sound holds a draft, not a whole model: give it as"),
    ],
)
def test_corrupt_config(saved, content, expected):
    (saved / "config.json").write_text(content)
    assert expected in message_of(load, saved)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, "version 2"),
        ({"vocabulary": {"kind": "words"}}, "has vocabulary 'words': it must be sentencepiece, "),
        ({"model": {"vocab_size": 96, "n_layer": 3}}, "'n_layer'"),
        ({"model": {"vocab_size": "many"}}, "describes no T5"),
        (
            {"model": {"mlp_activations": ["relu6x", "linear"]}},
            "mlp_activations is 'relu6x': choose one of linear, relu",
        ),
    ],
)
def test_config_of_another_version_or_without_a_model(saved, changes, expected):
    edit_config(saved, **changes)
    assert expected in message_of(load, saved)


def test_missing_vocabulary_and_weights(saved):
    (saved / "spiece.model").unlink()
    assert f"no vocabulary at {saved / 'spiece.model'}" in message_of(load, saved)
    (saved / "params").rename(saved / "elsewhere")
    assert f"no directory {saved / 'params'}" in message_of(load, saved)


def test_replaced_vocabulary(saved, t5_spiece, configs):
    (saved / "spiece.model").write_bytes(t5_spiece.read_bytes())
    edit_config(saved, model={**configs["1.1"].to_dict(), "vocab_size": 32128})
    assert "is not the vocabulary" in message_of(load, saved)


@pytest.mark.parametrize("pattern", ["manifest.ocdbt", "d/*", "_METADATA"])
def test_truncated_weights(saved, pattern):
    for path in (saved / "params").glob(pattern):
        path.write_bytes(path.read_bytes()[:8])
    message = message_of(load, saved)
    assert "cannot read" in message and str(saved / "params") in message


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"vocab_size": 128, "mlp_dim": 32},
            ("11 of the wrong shape", "is [24, 16], not [32, 16]", ", and 5 more)"),
        ),
        ({"vocab_size": 32}, ("the vocabulary has 40 ids, the model embeds 32",)),
    ],
)
def test_weights_of_another_shape(saved, configs, sizes, expected):
    edit_config(saved, model={**configs["1.1"].to_dict(), **sizes})
    message = message_of(load, saved)
    assert all(part in message for part in expected)


def test_all_faults_of_a_tree_at_once(configs, random_params):
    params = random_params(configs["1.0"])
    del params["encoder"]["layers_1"]
    del params["decoder"]["decoder_norm"]
    params["decoder"]["logits_dense"] = {"kernel": np.zeros((16, 96))}
    params["token_embedder"]["embedding"] = np.zeros((16, 96))
    message = message_of(check_params, params, configs["1.0"], "here")
    assert message.startswith("here: ")
    assert "9 missing" in message and "decoder/decoder_norm/scale" in message
    assert "1 unexpected (decoder/logits_dense/kernel)" in message
    assert "token_embedder/embedding is [16, 96], not [96, 16]" in message


# In one block of values, and in a later one of many.
@pytest.mark.parametrize(
    ("value", "dtype", "block"), [(np.nan, "float32", 1 << 24), (-np.inf, "bfloat16", 7)]
)
def test_weights_that_are_not_finite(value, dtype, block, configs, random_params, monkeypatch):
    monkeypatch.setattr("spec_t5x.checkpoints.storage.tensors._FINITE_BLOCK", block)
    params = random_params(configs["1.0"])
    params["encoder"]["layers_1"]["mlp"]["wi"]["kernel"][3, 5] = value
    params = jax.tree.map(lambda leaf: leaf.astype(jax.numpy.dtype(dtype)), params)
    message = message_of(check_params, params, configs["1.0"], "here")
    assert "in 1 of" in message and "encoder/layers_1/mlp/wi/kernel" in message


def test_different_vocabularies_name_the_first_different_id(saved, spiece):
    target = load(saved)

    def draft(vocabulary):
        return dataclasses.replace(target, vocabulary=vocabulary, directory=Path("draft"))

    one, two = (SentencePieceVocabulary(spiece, extra_ids=number) for number in (1, 2))
    message = message_of(check_same_vocabulary, target, draft(two))
    assert str(saved) in message and "draft draft" in message and "40 and 42 ids" in message
    message = message_of(check_same_vocabulary, draft(two), draft(one))
    assert "id 40 is '▁<extra_id_1>' and '▁<extra_id_0>'" in message
    assert "ByteVocabulary" in message_of(check_same_vocabulary, target, draft(ByteVocabulary()))


MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 before JAX starts"


@pytest.mark.parametrize(
    ("platform", "free", "dtype", "remedy"),
    [
        ("gpu", 100, "float32", f"weights int8, dtype bfloat16, {MEM_FRACTION} or a smaller"),
        ("tpu", 100, "bfloat16", "weights int8 or a smaller model"),
        ("gpu", 1 << 30, "float32", None),
        # A host's memory is not reported exactly, and some devices report none.
        ("cpu", 100, "float32", None),
        ("gpu", None, "float32", None),
    ],
)
def test_a_model_larger_than_the_devices_memory(saved, platform, free, dtype, remedy, monkeypatch):
    opened, (cpu,) = open_model(saved), jax.devices("cpu")[:1]
    free_of_device(monkeypatch, platform, free)
    # Nothing is read.
    monkeypatch.setattr(type(opened), "read_params", lambda *_, **__: {})
    if remedy is None:
        assert opened.load(dtype=dtype).params == {}
        return
    message = message_of(opened.load, dtype=dtype)
    assert message.startswith(f"{saved} takes 0.0 GiB and the Tesla T4 has 0.0 free: give {remedy}")
    shapes = expected_shapes(opened.config).items()
    in_int8 = sum(
        math.prod(shape) * (1 if path.endswith("/kernel") else np.dtype(dtype).itemsize)
        for path, shape in shapes
    )
    rounding = {"dtype": dtype, "for_decoding": True, "weights": "int8"}
    free_of_device(monkeypatch, platform, in_int8 - 1)
    remedy = re.sub("weights int8(, | or )", "", remedy)
    assert f": give {remedy}" in message_of(opened.load, **rounding)
    free_of_device(monkeypatch, platform, in_int8)
    assert opened.load(**rounding).weights == "auto"
    # The host may have room.
    with jax.default_device(cpu):
        assert opened.load(dtype=dtype).params == {}


def test_names_of_models_of_another_type_are_refused(unchecked):
    assert message_of(Models, draft=5) == "draft is 5: give a value of type str | None"
    assert message_of(Models, draft_top_k="4") == "draft_top_k is '4': give a value of type int"


def free_of_device(monkeypatch, platform, free, used=0):
    """Replaces JAX's first device by one with this memory, in bytes; None reports none."""
    stats = None if free is None else {"bytes_limit": free + used, "bytes_in_use": used}
    kind = {"device_kind": "Tesla T4", "platform": platform}
    device = SimpleNamespace(memory_stats=lambda: stats, **kind)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


# The mesh is abstract, because there is one device.
@pytest.mark.usefixtures("unchecked")
def test_shards_larger_than_a_devices_memory(saved, monkeypatch):
    opened, rounding = open_model(saved), {"for_decoding": True, "weights": "int8"}
    monkeypatch.setattr(type(opened), "read_params", lambda *_, **__: {})
    mesh = AbstractMesh((1, 2), ("data", "model"), (AxisType.Auto,) * 2)
    shardings = functools.partial(param_shardings, mesh=mesh)
    flat = flatten_dict(shardings(opened.config), sep="/")
    shapes = expected_shapes(opened.config)
    of_shard = sum(4 * math.prod(flat[path].shard_shape(shapes[path])) for path in shapes)
    assert of_shard < 0.6 * sum(4 * math.prod(shape) for shape in shapes.values())
    free_of_device(monkeypatch, "tpu", of_shard)
    assert opened.load(dtype="float32", shardings=shardings).params == {}
    free_of_device(monkeypatch, "tpu", of_shard - 1)
    message = message_of(opened.load, dtype="float32", shardings=shardings)
    ways = "weights int8, dtype bfloat16, a larger model_parallel or a smaller model"
    assert message.endswith(f"0.0 GiB of each device and the Tesla T4 has 0.0 free: give {ways}")
    assert opened.load(dtype="float32", shardings=shardings, **rounding).weights == "auto"


def test_memory_that_is_in_use_and_a_draft_that_does_not_fit(saved, monkeypatch):
    opened = open_model(saved)
    monkeypatch.setattr(type(opened), "read_params", lambda *_, **__: {})
    free_of_device(monkeypatch, "gpu", 100, used=1 << 30)
    message = message_of(opened.load, dtype="bfloat16")
    assert message.endswith(
        "has 0.0 free, 1.0 are in use: delete the models loaded before, or restart Python"
    )
    # A draft's target is among them.
    message = message_of(opened.load, dtype="bfloat16", option="draft_weights")
    assert f": give draft_weights int8, {MEM_FRACTION} or a smaller model" in message
