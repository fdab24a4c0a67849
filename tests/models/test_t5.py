"""Configurations of the encoder-decoder: their values, and those that are refused."""

import json

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

pytestmark = pytest.mark.usefixtures("unchecked")


def test_numbers_of_numpy_are_made_pythons():
    config = T5Config(
        emb_dim=np.int64(32), dropout_rate=np.float32(0.25), mlp_activations=["gelu", "linear"]
    )
    assert (type(config.emb_dim), type(config.dropout_rate)) == (int, float)
    assert config == T5Config(emb_dim=32, dropout_rate=0.25, mlp_activations=("gelu", "linear"))
    assert T5Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dropout_rate", "0.1", "dropout_rate is '0.1': give a number of at least 0"),
        ("dropout_rate", np.float32("nan"), "dropout_rate is .*nan.*: give a number of at least"),
        ("relpos_num_buckets", None, "relpos_num_buckets is None: give a whole number"),
        ("emb_dim", 32.0, "emb_dim is 32.0: give a whole number of at least 1"),
        ("added_rows", -1, "added_rows is -1: give at least 0"),
        ("mlp_activations", None, "T5Config.mlp_activations is None: give a list of names"),
        ("mlp_activations", "relu", "T5Config.mlp_activations is 'relu': give a list of names"),
        ("mlp_activations", (), r"T5Config.mlp_activations is \(\): give a list of names"),
        ("mlp_activations", [None], "T5Config.mlp_activations is None: choose one of"),
    ],
)
def test_values_that_a_network_cannot_have_are_refused(name, value, message):
    with pytest.raises(InputError, match=f"^{message}"):
        T5Config(**{name: value})
