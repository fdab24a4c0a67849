"""Heads on disk: read back as written, and only for the target that they belong to."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints import loading
from spec_t5x.checkpoints.own.directory import target_fingerprint
from spec_t5x.checkpoints.own.draft_heads import load_heads, save_heads
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.heads import HeadsConfig, T5Heads
from spec_t5x.models.seq2seq import T5Model


@pytest.fixture
def target(configs, random_params, vocabulary, tmp_path):
    config = configs["1.1"]
    return LoadedModel(
        params=random_params(config),
        config=config,
        vocabulary=vocabulary,
        directory=tmp_path / "the-target",
        metadata={},
    )


def random_heads(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"wi": (3, 32, 12), "wo": (3, 12, 16)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def saved(target, tmp_path):
    save_heads(tmp_path / "heads", random_heads(), target, extra={"step": 7})
    return tmp_path / "heads"


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_float32_round_trip_is_exact(target, tmp_path):
    params = random_heads()
    save_heads(tmp_path / "exact", params, target, dtype="float32")
    loaded = load_heads(tmp_path / "exact", target)
    assert loaded.config == HeadsConfig(16, 96, num_heads=3, hidden_dim=12)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    # They fit the target's network.
    model = T5Model.create(target.params, target.config)
    logits = T5Heads.create(loaded.params, model).head_logits(
        jnp.ones((2, 16)), jnp.array([3, 4]), 3
    )
    assert logits.shape == (2, 3, 96)


def test_bfloat16_is_the_default_and_half_the_size(saved, target):
    loaded = load_heads(saved, target)
    for name, leaf in random_heads().items():
        assert loaded.params[name].dtype == jnp.float32
        rounded = leaf.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(loaded.params[name], rounded)
    assert (saved / "heads.safetensors").stat().st_size < 2 * 3 * (32 * 12 + 12 * 16) + 500
    assert loaded.metadata["step"] == 7 and loaded.directory == saved


def test_packaged_heads_have_names(saved, target, monkeypatch):
    monkeypatch.setattr(loading, "PACKAGED_MODELS", saved.parent)
    assert load_heads("heads", target).directory == saved


def test_the_type_that_a_target_was_loaded_as_does_not_matter(saved, target):
    halved = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), target.params)
    other = dataclasses.replace(target, params=halved)
    assert target_fingerprint(other) == target_fingerprint(target)
    load_heads(saved, other)


@pytest.mark.parametrize(("name", "value", "ours"), [("emb_dim", 24, 16), ("vocab_size", 99, 96)])
def test_heads_of_other_sizes(saved, target, name, value, ours):
    config = dataclasses.replace(target.config, **{name: value})
    message = message_of(load_heads, saved, dataclasses.replace(target, config=config))
    assert str(saved) in message and str(target.directory) in message
    assert f" {ours} and target" in message and f"has {value}: give heads" in message


def test_heads_of_another_vocabulary(saved, target):
    other = dataclasses.replace(target, vocabulary=ByteVocabulary())
    message = message_of(load_heads, saved, other)
    for vocabulary in (target.vocabulary, other.vocabulary):
        assert vocabulary.fingerprint()[:12] in message
    assert "are for vocabulary" in message


def test_heads_of_another_target_of_the_same_sizes(saved, target, random_params):
    other = dataclasses.replace(target, params=random_params(target.config, seed=1))
    assert "are for decoder" in message_of(load_heads, saved, other)


def test_directories_that_hold_no_heads(saved, target, tmp_path):
    assert "no directory" in message_of(load_heads, tmp_path / "absent", target)
    edit_config(saved, format="spec_t5x")
    assert "has format 'spec_t5x', not 'spec_t5x_heads'" in message_of(load_heads, saved, target)
    (saved / "config.json").unlink()
    assert f"no file {saved / 'config.json'}" in message_of(load_heads, saved, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2, this spec_t5x reads 1"),
        ({"heads": None}, "describes no heads under 'heads'"),
        ({"heads": {"emb_dim": 16}}, "describes no heads under 'heads'"),
        ({"target": None}, "are for vocabulary None"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_damaged_config(saved, target, changes, message):
    edit_config(saved, **changes)
    assert message in message_of(load_heads, saved, target)


def test_damaged_weights(saved, target):
    weights = saved / "heads.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert f"cannot read the weights in {weights}" in message_of(load_heads, saved, target)
    weights.unlink()
    assert f"no file {weights}" in message_of(load_heads, saved, target)


def test_weights_of_other_sizes(saved, target):
    sizes = {"emb_dim": 16, "vocab_size": 96, "num_heads": 4, "hidden_dim": 12}
    edit_config(saved, heads=sizes)
    message = message_of(load_heads, saved, target)
    assert "wi is [3, 32, 12], not [4, 32, 12]" in message


def test_what_is_not_saved(saved, target, tmp_path):
    broken = random_heads()
    broken["wo"][0, 0, 0] = np.nan
    destination = tmp_path / "new"
    assert "NaN or infinite" in message_of(save_heads, destination, broken, target)
    assert "choose bfloat16 or float32" in message_of(
        save_heads, destination, random_heads(), target, dtype="float16"
    )
    assert "extra entry 'heads'" in message_of(
        save_heads, destination, random_heads(), target, extra={"heads": 1}
    )
    assert not destination.exists()
    assert "overwrite=True" in message_of(save_heads, saved, random_heads(1), target)
    save_heads(saved, random_heads(1), target, dtype="float32", overwrite=True)
    np.testing.assert_array_equal(load_heads(saved, target).params["wi"], random_heads(1)["wi"])
