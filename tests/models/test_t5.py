"""The encoder-decoder: values of its configuration, dropout, and layers whose outputs it shows."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config, Transformer
from tests.toy_t5 import tiny_t5

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
        ("dropout_rate", "0.1", "dropout_rate is '0.1': give a number from 0"),
        ("dropout_rate", np.float32("nan"), "dropout_rate is .*nan.*: give a number from 0"),
        ("dropout_rate", True, "dropout_rate is True: give a number from 0"),
        ("relpos_num_buckets", None, "relpos_num_buckets is None: give a whole number"),
        ("emb_dim", 32.0, "emb_dim is 32.0: give a whole number of at least 1"),
        ("added_rows", -1, "added_rows is -1: give at least 0"),
        ("dropout_rate", 10**400, "dropout_rate is 1000*: give a number from 0 to 2147483647"),
        ("vocab_size", 2**31, "vocab_size is 2147483648: give at least 1, at most 2147483647"),
        ("num_decoder_layers", 10**9, "num_decoder_layers is 10*: give at least 1, at most 9999"),
        ("relpos_per_layer", "false", "relpos_per_layer is 'false': give True or False"),
        ("mlp_activations", None, "T5Config.mlp_activations is None: give a list of names"),
        ("mlp_activations", "relu", "T5Config.mlp_activations is 'relu': give a list of names"),
        ("mlp_activations", (), r"T5Config.mlp_activations is \(\): give a list of names"),
        ("mlp_activations", [None], "T5Config.mlp_activations is None: choose one of"),
    ],
)
def test_values_that_a_network_cannot_have_are_refused(name, value, message):
    with pytest.raises(InputError, match=f"^{message}"):
        T5Config(**{name: value})


def test_the_outputs_of_layers_follow_the_states_in_the_order_asked_for():
    model = tiny_t5(2, num_decoder_layers=2)
    decoder = {k: v for k, v in model.params["decoder"].items() if k != "layers_1"}
    first_layer = model.config.with_layers(encoder=[0], decoder=[0])
    shallow = T5Model.create({**model.params, "decoder": decoder}, first_layer)

    @jax.jit
    def score(model):
        cache = model.prefill(jnp.array([[5, 6, 7, 1], [9, 1, 0, 0]]), 8)
        return model.score(cache, jnp.array([[0, 4, 7], [0, 8, 3]]))[:2]

    logits, states = score(model)
    shown_logits, shown = score(model.showing((1, 0)))
    np.testing.assert_allclose(shown_logits, logits, rtol=1e-5, atol=1e-5)
    last, second, first = np.split(np.asarray(shown), 3, axis=-1)
    np.testing.assert_allclose(last, states, rtol=1e-5, atol=1e-5)
    # The norm's scale is of the last layer's states alone.
    scale = np.asarray(model.params["decoder"]["decoder_norm"]["scale"])
    np.testing.assert_allclose(second * scale, last, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(first * scale, score(shallow)[1], rtol=1e-5, atol=1e-5)


def test_dropout_is_where_t5x_has_it_with_one_mask_for_all_positions_of_a_row():
    """A mask's length is 1, in attention over the queries; the encoder's output alone has more."""
    config, masks = tiny_t5(0, dropout_rate=0.5).config, []

    def note(call, args, options, context):
        if isinstance(dropout := context.module, nn.Dropout) and not options["deterministic"]:
            shape = np.array(args[0].shape)
            shape[list(dropout.broadcast_dims)] = 1
            masks.append((dropout.rate, *shape.tolist()))
        return call(*args, **options)

    tokens = [jnp.ones((2, length), jnp.int32) for length in (5, 3, 3)]
    with nn.intercept_methods(note):
        keys = {name: jax.random.key(0) for name in ("params", "dropout")}
        jax.eval_shape(lambda: Transformer(config).init(keys, *tokens))
    states, hidden = (0.5, 2, 1, config.emb_dim), (0.5, 2, 1, config.mlp_dim)
    weights = {length: (0.5, 2, config.num_heads, 1, length) for length in (5, 3)}
    encoder = [states, weights[5], states, hidden, states, (0.5, 2, 5, config.emb_dim)]
    decoder = [states, weights[3], states, weights[5], states, hidden, states, states]
    assert masks == encoder + decoder
