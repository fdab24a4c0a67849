"""Parameters are bound to the configuration that they were made with."""

import dataclasses
import re

import flax.struct
import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x import registry
from spec_t5x.checkpoints.loading import load
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.binding import Family, abstract_params, bind
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.models.weights import Form

CONFIG = T5Config(
    vocab_size=40,
    emb_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=48,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dtype="float32",
)
PARAMS = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract_params(CONFIG))
NORM = "decoder/decoder_norm/scale"


@pytest.mark.parametrize(
    ("path", "change", "found"),
    [
        # Kernels would read past the end of the first three.
        (NORM, lambda leaf: leaf[:-1], "is (31,) and the network's (32,)"),
        (NORM, None, "is missing and the network's (32,)"),
        ("token_embedder/embedding", lambda leaf: leaf[:-1], "and the network's ("),
        ("decoder/layers_0/mlp/wo/kernel", lambda leaf: leaf.T, "and the network's ("),
        ("decoder/other/scale", lambda leaf: jnp.ones(3), "is (3,) and the network's none"),
    ],
)
def test_parameters_of_another_shape_are_refused(path, change, found):
    flat = flatten_dict(PARAMS, sep="/")
    leaf = flat.pop(path, None)
    if change is not None:
        flat[path] = change(leaf)
    message = re.escape(f"parameter {path} ") + ".*" + re.escape(found)
    with pytest.raises(InputError, match=f"{message}.*: give the parameters and the conf"):
        bind(unflatten_dict(flat, sep="/"), CONFIG)


@pytest.mark.parametrize(
    ("params", "config", "message"),
    [
        (None, CONFIG, "params are a NoneType: give Flax's nested dicts"),
        (PARAMS, None, "config is a NoneType: give one of "),
        (
            {"decoder": {0: jnp.ones(2)}},
            CONFIG,
            "parameter decoder/0 is (2,) and the network's none",
        ),
        (
            PARAMS | {"token_embedder": {"embedding": [0.0]}},
            CONFIG,
            "parameter token_embedder/embedding is a list and the network's (40, 32)",
        ),
    ],
    ids=["no parameters", "no configuration", "a number as a key", "a list"],
)
def test_other_objects_are_refused(params, config, message, unchecked):
    with pytest.raises(InputError, match=re.escape(message)):
        bind(params, config)


def test_paths_may_be_keys():
    bound, expected = bind(flatten_dict(PARAMS, sep="/"), CONFIG), bind(PARAMS, CONFIG)
    assert jax.tree.structure(bound) == jax.tree.structure(expected)


def test_layers_that_would_not_be_computed_are_refused():
    fewer = dataclasses.replace(CONFIG, num_decoder_layers=CONFIG.num_decoder_layers - 1)
    with pytest.raises(InputError, match="the network's none: give the parameters"):
        bind(PARAMS, fewer)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mlp_dim": 2 * CONFIG.mlp_dim}, "layers_0/mlp/wi/kernel is"),
        ({"vocab_size": 2 * CONFIG.vocab_size}, "embedding is (40, 32) and the network's (80, 32)"),
    ],
)
def test_matrices_that_are_rounded_or_packed_for_kernels_are_compared(weights, change, found):
    params = bind(PARAMS, CONFIG, weights).weights
    assert bind(params, CONFIG).config == CONFIG
    with pytest.raises(InputError, match=re.escape(found)):
        bind(params, dataclasses.replace(CONFIG, **change))


def test_bound_parameters_are_bound_again():
    model = bind(PARAMS, CONFIG, "int8")
    again = bind(model.weights, CONFIG)
    kernel = again.weights["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert isinstance(kernel, Form)
    # A model whose weights are read later.
    assert bind({}, CONFIG).config == CONFIG


@dataclasses.dataclass(frozen=True)
class OwnConfig(T5Config):
    """Configuration of a user's family, which inherits T5's."""


@flax.struct.dataclass
class OwnModel(T5Model):
    """Network of a user's family."""


OWN = Family(config=OwnConfig, model=OwnModel)


def test_a_family_that_inherits_t5s_configuration_is_found(tmp_path, monkeypatch):
    families = registry._PLACES["family"]
    monkeypatch.setitem(registry._PLACES, "family", {**families, "own": f"{__name__}:OWN"})
    config = OwnConfig(**dataclasses.asdict(CONFIG) | {"vocab_size": 384})
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract_params(config))
    assert type(bind(params, config)) is OwnModel
    assert type(bind(PARAMS, CONFIG)) is T5Model
    save_model(tmp_path / "own", params, config, ByteVocabulary(), dtype="float32")
    assert type(load(tmp_path / "own").bind()) is OwnModel
