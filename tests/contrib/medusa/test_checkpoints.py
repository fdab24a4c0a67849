"""Tests of heads on disk: as written, and only for their target."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.medusa.checkpoints import load_heads, save_heads
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.models.seq2seq import T5Model
from tests.checkpoints import test_target_drafts as of_each_kind
from tests.checkpoints.test_target_drafts import saved, target  # noqa: F401


def random_heads(target=None):  # noqa: F811
    rng = np.random.default_rng(0)
    shapes = {"wi": (3, 32, 12), "wo": (3, 12, 16)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def save_random_heads(directory, target, **options):  # noqa: F811
    save_heads(directory, random_heads(), target, **options)


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    """Adds heads to the formats that ``test_target_drafts`` knows by name."""
    functions = save_random_heads, load_heads, random_heads
    monkeypatch.setitem(of_each_kind.KINDS, "heads", (*functions, "heads.safetensors", "heads"))
    damages = [
        ({"heads": {"emb_dim": 16}}, "describes no heads under 'heads'"),
        (
            {"heads": {"emb_dim": 16, "vocab_size": 96, "num_heads": 4, "hidden_dim": 12}},
            "wi is [3, 32, 12], not [4, 32, 12]",
        ),
    ]
    monkeypatch.setitem(of_each_kind.DAMAGES, "heads", damages)
    return "heads"


def test_bfloat16_is_the_default(saved, target, kind):  # noqa: F811
    of_each_kind.test_bfloat16_is_the_default_and_half_the_size(saved, target, kind)


def test_heads_of_another_target_are_refused(saved, target, kind, random_params):  # noqa: F811
    of_each_kind.test_drafts_of_another_target_are_refused(saved, target, kind, random_params)


@pytest.mark.usefixtures("unchecked")
def test_what_is_damaged(saved, target, kind):  # noqa: F811
    of_each_kind.test_what_is_damaged(saved, target, kind)


def test_heads_fit_the_network_of_their_target(saved, target):  # noqa: F811
    params = load_heads(saved, target)
    heads = T5Heads.create(params, T5Model.create(target.params, target.config))
    logits = heads.head_logits(jnp.ones((2, 16)), jnp.array([3, 4]), 3)
    assert logits.shape == (2, 3, 96)
