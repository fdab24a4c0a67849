"""Networks made of another's layers, and what they may share with it."""

import jax
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import model_in_memory
from spec_t5x.labs.training.kept_layers import keep_layers, kept_layers, likeliest_ids, with_shared
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from tests.toy_t5 import disturbed, tiny_t5


def test_rules():
    assert kept_layers("all", 3) == (0, 1, 2)
    assert kept_layers("first:2", 6) == (0, 1) and kept_layers("last:1", 6) == (5,)
    assert kept_layers("every:3", 8) == (0, 3, 6)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("middle:2", "'middle:2': give all, first:K, last:K or every:K"),
        ("every", "'every': give all"),
        ("first:-1", "'first:-1': give all"),
        ("first:0", "'first:0', of 4: give K from 1 to 4"),
        ("every:5", "'every:5', of 4: give K from 1 to 4"),
    ],
)
def test_rules_that_keep_nothing(rule, message):
    with pytest.raises(InputError, match=message):
        kept_layers(rule, 4)


def test_the_kept_layers_stand_in_their_order():
    model = tiny_t5(0, num_encoder_layers=2, num_decoder_layers=4)
    whole = model.params
    params, config = keep_layers(whole, model.config, encoder=(1,), decoder=(0, 3))
    model_in_memory("smaller", params, config, None).check()
    assert (config.num_encoder_layers, config.num_decoder_layers) == (1, 2)
    assert params["encoder"]["layers_0"] is whole["encoder"]["layers_1"]
    assert params["decoder"]["layers_0"] is whole["decoder"]["layers_0"]
    assert params["decoder"]["layers_1"] is whole["decoder"]["layers_3"]
    assert params["decoder"]["logits_dense"] is whole["decoder"]["logits_dense"]


def test_a_draft_is_its_own_parameters_and_those_of_the_target():
    target = tiny_t5(0, num_decoder_layers=3)
    of_target = target.params
    params, config = keep_layers(of_target, target.config, encoder=(0,), decoder=(0, 2))
    own = own_params(disturbed(T5Model.create(params, config), 0.5).params)
    assert list(own) == ["decoder"]
    assert set(own["decoder"]["layers_1"]["encoder_decoder_attention"]) == {"query", "out"}
    whole = with_shared(own, of_target, (0, 2))
    model_in_memory("draft", whole, config, None).check()
    assert whole["encoder"] is of_target["encoder"]
    assert whole["token_embedder"] is of_target["token_embedder"]
    ours, theirs = whole["decoder"]["layers_1"], of_target["decoder"]["layers_2"]
    for name in ("key", "value"):
        of_source = "encoder_decoder_attention"
        assert ours[of_source][name] is theirs[of_source][name]
    assert np.any(ours["mlp"]["wo"]["kernel"] != theirs["mlp"]["wo"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, own_params(whole), own)


def test_the_likeliest_tokens_of_texts():
    tokens = np.array([5, 5, 5, 9, 9, 7, 7, 2, 0, 0, 0, 0, 0])
    # End of sequence first, padding last; of 7 and 9, and of all the others, the lower ids.
    order = [1, 5, 7, 9, 2, 3, 4, 6, 8, 10, 11]
    for number in range(1, 12):
        assert likeliest_ids(tokens, number, 12).tolist() == sorted(order[:number])
    for number in (0, 12):
        with pytest.raises(InputError, match=f"a narrow head of {number} of 12 tokens"):
            likeliest_ids(tokens, number, 12)
