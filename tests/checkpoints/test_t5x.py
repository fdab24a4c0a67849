"""T5X's checkpoints without T5X: what it wrote is read, what we write is the same."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load, load_vocabulary, open_model
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.checkpoints.storage.tensors import array_tensors
from spec_t5x.checkpoints.t5x import reading, scanned
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from tests.checkpoints.faults import assert_trees_equal, message_of, save_t5x, with_sentinels


def weights_of(directory) -> dict[str, np.ndarray]:
    return open_model(directory).read_params(dtype="float32")


def edit_index(checkpoint, change):
    """Writes the msgpack file anew, with its tree changed."""
    path = checkpoint / "checkpoint"
    tree = msgpack_restore(path.read_bytes())
    path.write_bytes(msgpack_serialize(change(tree) or tree))


@pytest.fixture
def legacy(t5x_data, tmp_path) -> Path:
    """Provides a copy of the checkpoint that T5X wrote in its legacy format."""
    return shutil.copytree(t5x_data.legacy, tmp_path / "model" / "checkpoint_7")


@pytest.fixture
def orbax(t5x_data, tmp_path) -> Path:
    """Provides a copy of the checkpoint that T5X wrote with Orbax."""
    return shutil.copytree(t5x_data.orbax, tmp_path / "model" / "checkpoint_7")


@pytest.mark.parametrize("kind", ["legacy", "orbax"])
def test_what_t5x_wrote_is_read_without_it(t5x_data, kind, monkeypatch):
    for name in ("t5x", "tensorflow", "seqio", "orbax"):
        monkeypatch.setitem(sys.modules, name, None)
    config = {"legacy": t5x_data.LEGACY, "orbax": t5x_data.ORBAX}[kind]
    loaded = load(getattr(t5x_data, kind), vocabulary="bytes")
    assert loaded.config == config
    assert_trees_equal(loaded.params, t5x_data.known_params(config))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded.params))
    assert loaded.vocabulary.vocab_size == config.vocab_size
    assert loaded.metadata == {"step": 7}


def test_a_models_directory_stands_for_its_latest_checkpoint(legacy, t5x_data):
    shutil.copytree(legacy, legacy.with_name("checkpoint_10"))
    # Left by a run that was killed.
    (legacy.with_name("checkpoint_12.tmp-123")).mkdir()
    assert load(legacy.parent, vocabulary="bytes").directory.name == "checkpoint_10"
    legacy.with_name("checkpoint_11").mkdir()
    assert "checkpoint_11 is the latest of 3" in message_of(load, legacy.parent)
    # Flax writes checkpoints that are files.
    legacy.with_name("checkpoint_13").write_bytes(b"")
    assert "checkpoint_13 is the latest of 4" in message_of(load, legacy.parent)


@pytest.mark.parametrize(
    "changes", [{}, {"logits_via_embedding": False}, {"relpos_per_layer": True}], ids=str
)
def test_a_configuration_is_told_from_shapes_that_are_all_different(changes):
    """Heads are wider together than the states, as in T5 11B."""
    sizes = {"vocab_size": 7, "emb_dim": 6, "num_heads": 5, "head_dim": 4, "mlp_dim": 11}
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 3, "relpos_num_buckets": 9}
    config = T5Config(**sizes, **layers, **changes)
    assert reading.infer_config(expected_shapes(config), "DIR") == config


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("network.T5Config.mlp_activations = ('silu', 'linear')\n", True),
        ("network.T5Config:\n  emb_dim = 8\n  mlp_activations = ('silu', 'linear')\n", True),
        ("network.T5Config.mlp_activations = ['silu', 'linear']\n", True),
        ('network.T5Config.mlp_activations = \\\n    ("silu", "linear")  # as in T5 1.2\n', True),
        # As ``gin.config_str`` writes a macro, and a long tuple.
        ("ACT = ('silu', 'linear')\nnetwork.T5Config.mlp_activations = %ACT\n", True),
        ("network.T5Config.mlp_activations = %A\nA = %B\nB = \\\n    ('silu', 'linear')\n", True),
        ("network.T5Config.mlp_activations = (\n    'silu',  # gated\n    'linear',\n)\n", True),
        ("network.T5Config.mlp_activations = \\\n    ('silu',\n     'linear')\n", True),
        ("draft/network.T5Config.mlp_activations = ('silu', 'linear')\n", False),
        pytest.param("\n" * 300_000, False, id="blank lines"),
    ],
)
def test_activations_are_those_of_t5xs_gin_file(
    tmp_path, configs, random_params, text, is_read, monkeypatch
):
    config = configs["1.1"]
    save_t5x(tmp_path / "checkpoint_0", random_params(config), config)
    (tmp_path / "checkpoint_0" / "spec_t5x.json").unlink()
    (tmp_path / "config.gin").write_text(f"# network.T5Config\nx.T5Config.emb_dim = 8\n{text}")
    monkeypatch.chdir(tmp_path / "checkpoint_0")
    for place in (tmp_path, "."):
        found = open_model(place).config.mlp_activations
        assert found == (("silu", "linear") if is_read else ("gelu", "linear"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("network.T5Config.mlp_activations = %ACTIVATIONS\n", "%ACTIVATIONS"),
        ("network.T5Config.mlp_activations = %A\nA = %A\n", "%A"),
        ("A = ('silu',\n  @linear)\nT5Config.mlp_activations = %A\n", "('silu', @linear)"),
    ],
)
def test_activations_that_cannot_be_read_are_refused(tmp_path, configs, random_params, text, value):
    save_t5x(tmp_path / "checkpoint_0", random_params(configs["1.1"]), configs["1.1"])
    (tmp_path / "checkpoint_0" / "spec_t5x.json").unlink()
    (tmp_path / "config.gin").write_text(text)
    message = message_of(open_model, tmp_path)
    assert f"{tmp_path / 'config.gin'} binds mlp_activations to {value} (" in message
    (tmp_path / "config.gin").write_text(text, encoding="utf-16")
    message = message_of(open_model, tmp_path)
    assert message.startswith(f"cannot read {tmp_path / 'config.gin'} (")
    assert message.endswith(": make it readable, in UTF-8")


def change_specs(tree, change, path=()):
    """Returns every TensorStore specification in a tree, changed."""
    if not isinstance(tree, dict):
        return tree
    if "driver" in tree:
        return change(dict(tree), path)
    return {key: change_specs(value, change, (*path, key)) for key, value in tree.items()}


def with_bucket(spec, path):
    kvstore = {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": spec["kvstore"]["path"]}
    return {**spec, "kvstore": kvstore, "transform": {"input_inclusive_min": [0, 0]}}


def with_path_outside(spec, path):
    """Returns the form of TensorStore before 0.1.14."""
    name = spec["kvstore"]["path"].rstrip("/")
    return {**spec, "kvstore": {"driver": "gfile"}, "path": name}


def with_cast(spec, path):
    return {"driver": "cast", "dtype": "float32", "base": spec}


def without_path(spec, path):
    return {**spec, "kvstore": {"driver": "gfile"}}


@pytest.mark.parametrize("change", [with_bucket, with_path_outside, with_cast, without_path])
def test_specifications_written_elsewhere(legacy, t5x_data, change):
    edit_index(legacy, lambda tree: change_specs(tree, change))
    assert_trees_equal(weights_of(legacy), t5x_data.known_params(t5x_data.LEGACY))


def test_arrays_within_the_index(legacy, t5x_data):
    """T5X inlines what is not partitioned."""
    params = flatten_dict(t5x_data.known_params(t5x_data.LEGACY))

    def inline(spec, path):
        if path[-1] != "scale" or path[1] != "target":
            return spec
        shutil.rmtree(legacy / ".".join(path[1:]))
        return params[path[2:]]

    edit_index(legacy, lambda tree: change_specs(tree, inline))
    assert not list(legacy.glob("target.*.scale"))
    assert_trees_equal(weights_of(legacy), unflatten_dict(params))


@pytest.mark.parametrize(
    "named", [lambda state: {"_optimizer": state}, lambda state: state], ids=["_optimizer", "none"]
)
def test_parameters_and_step_by_other_paths(legacy, t5x_data, named):
    edit_index(legacy, lambda tree: {"version": 3} | named(tree["optimizer"]))
    assert_trees_equal(weights_of(legacy), t5x_data.known_params(t5x_data.LEGACY))
    assert open_model(legacy).metadata == {"step": 7}


def test_an_array_in_zarr3(legacy, t5x_data):
    params = t5x_data.known_params(t5x_data.LEGACY)
    directory = legacy / "target.decoder.decoder_norm.scale"
    shutil.rmtree(directory)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(directory)}}
    store = ts.open(spec, create=True, dtype="float32", shape=[4]).result()
    store.write(params["decoder"]["decoder_norm"]["scale"]).result()

    def in_zarr3(spec, path):
        return spec | {"driver": "zarr3"} if "decoder_norm" in path else spec

    edit_index(legacy, lambda tree: change_specs(tree, in_zarr3))
    assert_trees_equal(weights_of(legacy), params)


def test_values_in_the_index_of_early_orbax(legacy, t5x_data):
    """A description of the tree is beside it, and the index has no version."""
    params = t5x_data.known_params(t5x_data.LEGACY)
    for path in legacy.glob("target.*"):
        shutil.rmtree(path)
    (legacy / "checkpoint").write_bytes(msgpack_serialize({"target": params}))
    assert "has version None" in message_of(weights_of, legacy)
    (legacy / "_METADATA").write_text("{}")
    assert_trees_equal(weights_of(legacy), params)


def test_placeholders_of_early_orbax(legacy, t5x_data):
    """Each array has a directory, which a msgpack file without a version names."""

    def placeholder(spec, path):
        return f"PLACEHOLDER://{spec['kvstore']['path'].rstrip('/')}"

    edit_index(legacy, lambda tree: change_specs(tree["optimizer"], placeholder))
    (legacy / "state").mkdir()
    for path in list(legacy.iterdir()):
        if path.name != "state":
            path.rename(legacy / "state" / path.name)
    assert_trees_equal(weights_of(legacy), t5x_data.known_params(t5x_data.LEGACY))
    assert open_model(legacy).directory == legacy


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a\0b"])
def test_arrays_outside_of_the_checkpoint_are_not_read(legacy, name):
    edit_index(
        legacy,
        lambda tree: change_specs(tree["optimizer"], lambda spec, path: f"PLACEHOLDER://{name}"),
    )
    assert f"names {name!r}, which is outside" in message_of(load, legacy, vocabulary="bytes")


@pytest.mark.parametrize(("version", "dtype"), [("1.0", "bfloat16"), ("1.1", "float32")])
def test_round_trip_through_every_format(
    tmp_path, spiece, vocabulary, configs, random_params, version, dtype
):
    config = dataclasses.replace(configs[version], relpos_max_distance=100)
    params = random_params(config)
    first = tmp_path / "t5x" / "checkpoint_100"
    save_t5x(first, params, config, vocabulary, dtype=dtype)
    ways = [("theirs", "huggingface"), ("ours", "native"), ("checkpoint_100", "t5x")]
    source = first
    for name, to in ways:
        convert(source, tmp_path / name, to=to)
        source = tmp_path / name
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(np.float32), params)
    for directory in (first, *(tmp_path / name for name, _ in ways)):
        loaded = load(directory)
        assert loaded.config == config, directory
        assert loaded.vocabulary.fingerprint() == vocabulary.fingerprint()
        assert_trees_equal(loaded.params, expected)
        stored = {info.dtype for info in open_model(directory).tensors.values()}
        assert stored == {dtype}
    assert load(source).metadata["step"] == 100
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    again = tmp_path / "checkpoint_100"
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for file in files:
        if file.name != "spec_t5x.json":
            assert (first / file).read_bytes() == (again / file).read_bytes()


def test_writes_what_t5x_would(t5x_data, tmp_path):
    """Index and arrays are those of T5X, but for the optimizer's state."""
    directory = tmp_path / "checkpoint_7"
    save_t5x(directory, t5x_data.known_params(t5x_data.LEGACY), t5x_data.LEGACY)

    def tree_of(checkpoint):
        tree = msgpack_restore((checkpoint / "checkpoint").read_bytes())
        assert tree["version"] == 3 and int(tree["optimizer"]["state"]["step"]) == 7
        return tree["optimizer"]["target"]

    assert tree_of(directory) == tree_of(t5x_data.legacy)
    for theirs in t5x_data.legacy.glob("target.*/.zarray"):
        ours = directory / theirs.parent.name / theirs.name
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
    assert str(tmp_path).encode() not in b"".join(
        path.read_bytes() for path in directory.rglob("*") if path.is_file()
    )


def test_a_vocabulary_is_given_found_or_asked_for(
    legacy, tmp_path, spiece, configs, random_params, monkeypatch
):
    message = message_of(load, legacy)
    assert "holds no vocabulary" in message and "--vocabulary" in message
    config, params = configs["1.0"], random_params(configs["1.0"])
    directory = tmp_path / "other" / "checkpoint_3"
    save_t5x(directory, params, config)
    assert load(directory, vocabulary=f"{spiece}:7").vocabulary.vocab_size == 47
    shutil.copy(spiece, directory.parent / "spiece.model")
    monkeypatch.chdir(directory)
    for place in (directory, "."):
        assert "is ambiguous" in message_of(load, place)
    with_sentinels(spiece, directory / "spiece.model", 3)
    assert load(directory).vocabulary.vocab_size == 43
    (directory / "spiece.model").unlink()
    # The folder above is searched only for a checkpoint_STEP.
    directory.rename(directory.with_name("final"))
    assert "holds no vocabulary" in message_of(load, directory.with_name("final"))


def test_a_vocabulary_that_disagrees_is_refused(tmp_path, saved, spiece, configs, random_params):
    config = configs["1.1"]
    assert load(saved, vocabulary=f"{spiece}:0").vocabulary.extra_ids == 0
    other = tmp_path / "other.model"
    other.write_bytes(spiece.read_bytes().replace(b"z", b"Z"))
    for given in (f"{spiece}:5", f"{other}:0"):
        message = message_of(load, saved, vocabulary=given)
        assert "already holds a vocabulary (40 ids)" in message
    directory = tmp_path / "checkpoint_0"
    save_t5x(directory, random_params(config), config, load_vocabulary(saved))
    assert load(directory, vocabulary=saved).vocabulary.vocab_size == 40
    assert "holds a vocabulary (40 ids)" in message_of(load, directory, vocabulary="bytes:0")
    assert load_vocabulary(directory).fingerprint() == load_vocabulary(saved).fingerprint()


def test_a_draft_of_t5x_takes_the_targets_vocabulary(saved, tmp_path, configs, random_params):
    config = configs["1.1"]
    save_t5x(tmp_path / "draft" / "checkpoint_0", random_params(config, 1), config)
    target = load(saved)
    model = T5Model.create(target.params, target.config)
    draft = make_draft(tmp_path / "draft", target, model)
    assert draft.model.config == config
    other = dataclasses.replace(config, vocab_size=128)
    save_t5x(tmp_path / "wide" / "checkpoint_0", random_params(other), other)
    assert "embeds 96 ids" in message_of(make_draft, tmp_path / "wide", target, model)


def test_missing_arrays_are_all_named(legacy):
    for path in [*legacy.glob("target.encoder.layers_*.mlp.wo.kernel"), *legacy.glob("*.wi.*")]:
        shutil.rmtree(path, ignore_errors=True)
    message = message_of(load, legacy, vocabulary="bytes")
    assert "5 of 34 arrays are missing (decoder/layers_0/mlp/wi/kernel" in message


def test_damaged_arrays(legacy):
    chunk = legacy / "target.token_embedder.embedding" / "0.0"
    content = chunk.read_bytes()
    damages = (
        lambda: chunk.write_bytes(content[: len(content) // 2]),
        # TensorStore would take it for zeros.
        chunk.unlink,
        lambda: (chunk.parent / ".zarray").write_text("{"),
    )
    for damage in damages:
        damage()
        message = message_of(load, legacy, vocabulary="bytes")
        assert "cannot read token_embedder/embedding of" in message


@pytest.mark.parametrize(("entry", "size"), [("chunks", 10**13), ("shape", 2**31 - 1)])
def test_sizes_that_no_memory_holds(legacy, entry, size):
    """TensorStore would end the process."""
    path = legacy / "target.token_embedder.embedding" / ".zarray"
    values = json.loads(path.read_text())
    values[entry][0] = size
    path.write_text(json.dumps(values))
    tensor = open_model(legacy).tensors["token_embedder/embedding"]
    message = message_of(tensor.read, (slice(None), slice(None)))
    assert "cannot read token_embedder/embedding of" in message


def test_a_step_that_is_no_number(legacy):
    edit_index(legacy, lambda tree: tree["optimizer"]["state"].update(step=np.zeros(2)))
    assert "describes no step (" in message_of(load, legacy, vocabulary="bytes")


def test_damaged_orbax(orbax):
    (data,) = (orbax / "state" / "d").iterdir()
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert f"of {orbax}" in message_of(load, orbax, vocabulary="bytes")
    data.write_bytes(content)
    (orbax / "state" / "manifest.ocdbt").unlink()
    assert "38 of 38 arrays are missing" in message_of(load, orbax)
    (orbax / "state" / "_METADATA").write_text('{"tree_metadata": 3}')
    assert "describes no arrays" in message_of(load, orbax)
    leaf = {"key_metadata": [{"key": "\ud800"}], "value_metadata": {"value_type": "scalar"}}
    (orbax / "state" / "_METADATA").write_text(json.dumps({"tree_metadata": {"a": leaf}}))
    assert "is not UTF-8" in message_of(load, orbax)
    for damaged in ("{", "[" * 100_000, "1" * 5000):
        (orbax / "state" / "_METADATA").write_text(damaged)
        assert "_METADATA as JSON" in message_of(load, orbax)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x82", "checkpoint as msgpack"),
        (b"model_checkpoint_path: x", "is a TensorFlow checkpoint"),
        (msgpack_serialize([1, 2]), "holds no tree"),
        (msgpack_serialize({"version": 1}), "has version 1, this spec_t5x reads 2 and 3"),
        (msgpack_serialize({"version": np.zeros(2)}), "checkpoint describes no arrays ("),
        (
            msgpack_serialize({"version": 3, "model": {"a": np.zeros(1)}}),
            "no parameters under 'target', but 'model'",
        ),
        (
            msgpack_serialize({"version": 3, "optimizer": {"state": {"step": np.int32(1)}}}),
            "holds an optimizer's state and no parameters: give the checkpoint",
        ),
    ],
)
def test_damaged_index(legacy, content, expected):
    (legacy / "checkpoint").write_bytes(content)
    assert expected in message_of(load, legacy)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda t: t["encoder"].update(encoder=t["decoder"]["layers_0"]),
            "param_scan_axis = 1",
        ),
        (
            # Scanned along axis 0.
            lambda t: t["encoder"].update(
                encoder={"pre_mlp_layer_norm": {"scale": np.ones((2, 4), "f")}}
            ),
            "param_scan_axis = 1",
        ),
        (
            lambda t: t["encoder"]["layers_1"].update(relpos_bias=t["encoder"]["relpos_bias"]),
            "1 unexpected (",
        ),
        (lambda t: t.pop("encoder"), "has no encoder"),
        (lambda t: t["encoder"].update({f"layers_{'9' * 5000}": np.zeros(1)}), "1 unexpected ("),
        (
            lambda t: t["encoder"].update(encoder_norm={"driver": "cast", "kvstore": {}}),
            "checkpoint has no base",
        ),
        (
            lambda t: t["encoder"].update(encoder_norm=[[1], [1, 2]]),
            "checkpoint describes no arrays (",
        ),
        (lambda t: t.pop("token_embedder"), "is not there"),
        (
            lambda t: t["encoder"]["encoder_norm"].update(scale={"driver": "n5", "kvstore": {}}),
            "encoder/encoder_norm/scale is stored with TensorStore's driver 'n5', T5X uses zarr",
        ),
        (
            lambda t: t["encoder"]["relpos_bias"].update(rel_embedding=np.zeros((3, 32), "f")),
            "does not divide into the 3 heads",
        ),
    ],
)
def test_networks_that_are_no_t5(legacy, change, expected):
    edit_index(legacy, lambda tree: change(tree["optimizer"]["target"]) and None)
    assert expected in message_of(load, legacy, vocabulary="bytes")


def test_conversions_that_cannot_be(saved, tmp_path, configs, random_params):
    assert "'onnx'" in message_of(convert, saved, tmp_path / "a", to="onnx")
    assert "in a bucket" in message_of(convert, saved, "gs://bucket/a", to="native")
    for name in ("a", "checkpoint_5.tmp", "my_checkpoint_5"):
        assert "checkpoint_STEP" in message_of(convert, saved, tmp_path / name, to="t5x")
    assert "exists" in message_of(convert, saved, saved, to="huggingface")
    save_t5x(tmp_path / "checkpoint_0", random_params(configs["1.0"]), configs["1.0"])
    for to in ("huggingface", "native"):
        message = message_of(convert, tmp_path / "checkpoint_0", tmp_path / "a", to=to)
        assert "holds no vocabulary" in message
    for overwrite in (False, True):
        given = {"to": "t5x", "dtype": "bfloat16", "overwrite": overwrite}
        convert(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1", **given)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("to", ["t5x", "huggingface", "native"])
def test_a_disk_that_is_full_is_one_line(saved, tmp_path, disk, to):
    disk.fill()
    message = message_of(convert, saved, tmp_path / "new" / "checkpoint_0", to=to)
    disk.clear()
    assert f"cannot write {tmp_path / 'new' / 'checkpoint_0'} (" in message
    assert "make room there or choose another directory" in message
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("per_layer", [True, False])
def test_scanned_layers_come_back(
    tmp_path, vocabulary, configs, random_params, per_layer, monkeypatch
):
    """All layers of a tensor are read at once; a bias that they share becomes each one's."""
    config = dataclasses.replace(configs["1.1"], relpos_per_layer=per_layer)
    extra = {"max_source_length": 33}
    save_model(tmp_path / "a", random_params(config), config, vocabulary, extra=extra)
    convert(tmp_path / "a", tmp_path / "checkpoint_5", to="t5x_scanned")
    names = [entry.name for entry in (tmp_path / "checkpoint_5").iterdir()]
    assert "target.decoder.decoder.mlp.wi_0.kernel" in names
    assert not any("layers_" in name for name in names)

    opened = []
    monkeypatch.setattr(scanned._Layers, "__init__", spied(scanned._Layers.__init__, opened))
    loaded = load(tmp_path / "checkpoint_5")
    assert loaded.config == dataclasses.replace(config, relpos_per_layer=True)
    # Nothing that was read is kept.
    assert opened and not any(layers._read for layers in opened)
    expected = flatten_dict(weights_of(tmp_path / "a"), sep="/")
    for path, leaf in flatten_dict(loaded.params, sep="/").items():
        shared = re.sub("layers_[0-9]+/", "", path)
        np.testing.assert_array_equal(leaf, expected.get(path, expected.get(shared)))
    convert(tmp_path / "checkpoint_5", tmp_path / "b", to="native")
    again = load(tmp_path / "b")
    assert_trees_equal(again.params, loaded.params)
    # Entries beside the format's come along.
    assert again.metadata["max_source_length"] == loaded.metadata["max_source_length"] == 33

    def lengthen(tree):
        stack = tree["optimizer"]["target"]["encoder"]["encoder"]
        stack["mlp"]["wo"]["kernel"] = np.zeros((24, 3, 16), np.float32)

    edit_index(tmp_path / "checkpoint_5", lengthen)
    message = message_of(load, tmp_path / "checkpoint_5")
    assert "encoder/encoder/mlp/wo/kernel is [24, 3, 16] and the encoder has 2 layers" in message


def test_slices_of_scanned_layers_are_those_of_the_whole(configs, random_params):
    """Eleven layers, so that order by name is not by number; some slices cut heads."""
    config = dataclasses.replace(configs["1.1"], relpos_per_layer=True, num_encoder_layers=11)
    given = dict(sorted(array_tensors(random_params(config)).items()))
    stacked = scanned.scanned(given, config.head_dim)
    found = scanned.ours(stacked, "DIR")
    assert found.keys() == given.keys()
    cuts = ((0, 0), (3, 0), (0, 3), (3, 2), (5, 5))

    def parts(tensor):
        for first, last in cuts:
            yield tuple(slice(min(first, n - 1), max(n - last, 1)) for n in tensor.shape)

    for path, tensor in given.items():
        for part in parts(tensor):
            np.testing.assert_array_equal(found[path].read(part), tensor.read(part), err_msg=path)
    for tensor in stacked.values():
        whole = tensor.read(tuple(slice(0, n) for n in tensor.shape))
        for part in parts(tensor):
            np.testing.assert_array_equal(tensor.read(part), whole[part])


def spied(init, made):
    """Returns a constructor that also notes what it made."""

    def spy(self, *args):
        made.append(self)
        init(self, *args)

    return spy
