"""Tests of heads on disk: as written, and only for their target."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.medusa.checkpoints import load_heads, save_heads
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.models.seq2seq import T5Model
from tests.checkpoints.faults import edit_config, message_of
from tests.checkpoints.test_target_drafts import target  # noqa: F401

SHAPES = {"wi": (3, 32, 12), "wo": (3, 12, 16)}


@pytest.fixture
def heads():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def saved(heads, target, tmp_path):  # noqa: F811
    save_heads(tmp_path / "heads", heads, target)
    return tmp_path / "heads"


def test_bfloat16_is_the_default(saved, heads, target):  # noqa: F811
    loaded = load_heads(saved, target)
    for name, values in heads.items():
        rounded = values.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(loaded[name], rounded)
    size = sum(values.size for values in heads.values())
    assert (saved / "heads.safetensors").stat().st_size < 2 * size + 5000


def test_heads_of_another_target_are_refused(saved, target, random_params):  # noqa: F811
    def message(**changes):
        return message_of(load_heads, saved, dataclasses.replace(target, **changes))

    assert "has 24" in message(config=dataclasses.replace(target.config, emb_dim=24))
    assert "are for vocabulary" in message(vocabulary=ByteVocabulary())
    assert "are for decoder" in message(params=random_params(target.config, seed=1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"emb_dim": 16}, "describes no heads under 'heads'"),
        (
            {"emb_dim": 16, "vocab_size": 96, "num_heads": 4, "hidden_dim": 12},
            "wi is [3, 32, 12], not [4, 32, 12]",
        ),
    ],
)
def test_what_is_damaged(saved, target, config, expected):  # noqa: F811
    edit_config(saved, heads=config)
    assert expected in message_of(load_heads, saved, target)


def test_heads_fit_the_network_of_their_target(saved, target):  # noqa: F811
    params = load_heads(saved, target)
    heads = T5Heads.create(params, T5Model.create(target.params, target.config))
    logits = heads.head_logits(jnp.ones((2, 16)), jnp.array([3, 4]), 3)
    assert logits.shape == (2, 3, 96)
