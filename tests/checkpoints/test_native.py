"""The project's own format: round trips, and its files."""

import json
import math
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.t5 import T5Config
from tests.checkpoints.faults import assert_trees_equal, message_of


def test_float32_round_trip_is_exact(tmp_path, vocabulary, configs, random_params):
    config, params = configs["1.1"], random_params(configs["1.1"])
    save_model(tmp_path / "model", params, config, vocabulary, dtype="float32")
    loaded = load(tmp_path / "model")
    assert_trees_equal(loaded.params, params)
    assert loaded.config == config
    assert loaded.vocabulary.fingerprint() == vocabulary.fingerprint()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded.params))


def test_config_json_is_readable_and_takes_extra_entries(
    tmp_path, vocabulary, configs, random_params
):
    config = configs["1.0"]
    save_model(
        tmp_path / "model",
        random_params(config),
        config,
        vocabulary,
        extra={"training": {"steps": 10, "text": "naïve"}},
    )
    values = json.loads((tmp_path / "model/config.json").read_text("utf-8"))
    assert values["format"] == "spec_t5x"
    assert values["version"] == 1
    assert values["stored_dtype"] == "bfloat16"
    assert T5Config.from_dict(values["model"]) == config
    assert values["vocabulary"] == {
        "kind": "sentencepiece",
        "file": "spiece.model",
        "extra_ids": 0,
        "fingerprint": vocabulary.fingerprint(),
    }
    assert values["training"] == {"steps": 10, "text": "naïve"}
    assert load(tmp_path / "model").metadata == {"training": values["training"]}


def test_files_are_few_and_name_no_machine(saved, tmp_path):
    files = [path for path in (saved / "params").rglob("*") if path.is_file()]
    assert len(files) < 16
    for path in files:
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content, path
        assert b'timestamp_nsecs": 1' not in content, path
    # Nothing of the writing remains beside the checkpoint.
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_orbax_restores_what_is_written(tmp_path, vocabulary, configs, random_params, monkeypatch):
    monkeypatch.setattr("spec_t5x.checkpoints.storage.tensorstore_arrays._COMMIT_BYTES", 2000)
    monkeypatch.setattr("spec_t5x.checkpoints.storage.tensorstore_arrays._CHUNK_BYTES", 500)
    params = random_params(configs["1.1"])
    save_model(tmp_path / "model", params, configs["1.1"], vocabulary, dtype="float32")
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_trees_equal(checkpointer.restore(tmp_path / "model/params"), params)
    assert_trees_equal(load(tmp_path / "model").params, params)


def test_what_orbax_writes_is_read(saved, configs, random_params):
    """Earlier releases of the package wrote it so."""
    params = random_params(configs["1.1"], seed=3)
    shutil.rmtree(saved / "params")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(saved / "params", params)
    assert_trees_equal(load(saved).params, params)


def test_a_leaf_of_orbax_that_is_no_array_is_left_out(saved):
    params = load(saved).params
    path = saved / "params" / "_METADATA"
    values = json.loads(path.read_text())
    leaf = {"key_metadata": [{"key": "note", "key_type": 2}], "value_metadata": {}}
    values["tree_metadata"]["('note',)"] = leaf
    for kind in ("string", "None"):
        leaf["value_metadata"] = {"value_type": kind, "skip_deserialize": False}
        path.write_text(json.dumps(values))
        assert_trees_equal(load(saved).params, params)


def test_a_chunk_that_is_absent_in_zarr3_is_no_zeros(saved, configs, random_params):
    """Orbax stores chunks of zeros, too, and its metadata say so."""
    params = random_params(configs["1.1"], seed=3)
    params["decoder"]["decoder_norm"]["scale"][:] = 0.0
    shutil.rmtree(saved / "params")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(saved / "params", params)
    assert_trees_equal(load(saved).params, params)
    shutil.rmtree(saved / "params" / "token_embedder.embedding" / "c")
    assert "cannot read token_embedder/embedding of" in message_of(load, saved)
    # Earlier releases of Orbax said nothing, and stored none.
    path = saved / "params" / "_METADATA"
    values = json.loads(path.read_text())
    del values["store_array_data_equal_to_fill_value"]
    path.write_text(json.dumps(values))
    assert not np.any(load(saved).params["token_embedder"]["embedding"])


def test_overwrites_only_when_told(saved, vocabulary, configs, random_params):
    config = configs["1.0"]
    params = random_params(config, seed=7)
    with pytest.raises(InputError, match="overwrite=True"):
        save_model(saved, params, config, vocabulary)
    for value in (object(), "\ud800", math.nan):
        with pytest.raises(InputError, match="config.json cannot hold these values .*: give plain"):
            save_model(saved, params, config, vocabulary, overwrite=True, extra={"a": value})
    assert load(saved).config == configs["1.1"]
    save_model(saved, params, config, vocabulary, overwrite=True)
    assert load(saved).config == config
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_overwrites_no_directory_that_is_not_a_checkpoint(
    tmp_path, vocabulary, configs, random_params
):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("...")
    config = configs["1.0"]
    with pytest.raises(InputError, match="no checkpoint"):
        save_model(precious, random_params(config), config, vocabulary, overwrite=True)
    # Nor a project with a file of this name, or a training with its checkpoints.
    (precious / "config.json").write_text('{"port": 80}')
    with pytest.raises(InputError, match="no config.json of a model"):
        save_model(precious, random_params(config), config, vocabulary, overwrite=True)
    (precious / "config.json").write_text('{"model_type": "t5"}')
    (precious / "checkpoint-500").mkdir()
    with pytest.raises(InputError, match="holds checkpoint-500, which would be deleted"):
        save_model(precious, random_params(config), config, vocabulary, overwrite=True)
    assert (precious / "thesis.tex").is_file()
