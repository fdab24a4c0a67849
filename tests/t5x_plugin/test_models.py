"""The plug-in writes what T5X writes: texts, scores and their order."""

import functools

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import gin
import jax
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import decoding, models

from spec_t5x.beams.hypotheses import BeamResult, BeamStats
from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin import speculative_model
from spec_t5x.t5x_plugin.acceptance import totals
from spec_t5x.t5x_plugin.decode_settings import read_settings
from spec_t5x.t5x_plugin.drafts import ModelDraft, NamedDraft
from spec_t5x.t5x_plugin.speculation import speculate
from spec_t5x.t5x_plugin.speculative_model import random_stream
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier
from tests.named_drafts import named
from tests.t5x_plugin.toy_models import (
    EOS,
    TARGET,
    VOCAB,
    make_batch,
    make_decoder_only_pair,
    make_pair,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

KEY = jax.random.PRNGKey(5)
GREEDY = {"temperature": 0.0, "topk": 0, "rescale_log_probs": False}
TOLERANCE = 2e-4


@functools.cache
def pair(size):
    return make_pair(size)


def predict(model, params, batch, **arguments):
    """Returns the outputs of ``predict_batch_with_aux``, compiled as T5X compiles it."""
    rng = arguments.pop("rng", None)

    def call(params, batch, rng):
        given = {} if rng is None else {"rng": rng}
        return model.predict_batch_with_aux(params, batch, **given, **arguments)

    return jax.jit(call)(params, batch, rng)


def assert_same(pair, batch, options=None, **arguments):
    """Returns the texts that both models write."""
    # T5X adds to the dictionary that it is given.
    decoder_params = arguments.pop("decoder_params", {})
    expected, expected_aux = predict(
        pair.model, pair.params, batch, decoder_params=dict(decoder_params), **arguments
    )
    model, params = pair.speculative(**(options or {}))
    found, aux = predict(model, params, batch, decoder_params=dict(decoder_params), **arguments)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(aux["scores"], expected_aux["scores"], atol=TOLERANCE, rtol=1e-5)
    return np.asarray(found), aux


@pytest.mark.parametrize(("size", "prompted"), [("1.1", False), ("1.0", True)])
def test_greedy_text_and_scores_are_t5xs(size, prompted):
    texts, aux = assert_same(
        pair(size), make_batch(6), decoder_params=GREEDY, prompt_with_targets=prompted
    )
    # Not all of one kind, and the draft was of use.
    assert len(np.unique(texts, axis=0)) > 3
    assert np.sum(aux["accepted"]) > 0
    assert np.sum(aux["accepted"]) < np.sum(aux["proposed"])
    if not prompted:
        # Up to its end; padding's id is a token like any other before it.
        is_end = texts == EOS
        counts = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, texts.shape[1])
        np.testing.assert_array_equal(aux["appended"], counts)
        of_examples = {name: np.asarray(values).tolist() for name, values in aux.items()}
        efficiency = totals(of_examples)["block_efficiency"]
        assert efficiency == pytest.approx(counts.sum() / np.sum(aux["target_calls"]))
    np.testing.assert_array_equal(aux["verified"], np.sum(aux["verified_by_position"], axis=1))
    assert np.all(aux["accepted_by_position"] <= aux["verified_by_position"])


SETTINGS = {
    "rows of their own": {
        "temperature": np.array([0.0, 0.5, 1.0, 1.5]),
        "topk": 0,
        "rescale_log_probs": False,
    },
    "top-k": {"temperature": 1.0, "topk": 5},
    "top-p": {"temperature": 0.9, "topk": 0, "topp": 0.8},
    "default": {},
    "limits and another end": {
        "temperature": 1.0,
        "topk": 0,
        "max_decode_steps": 9,
        "max_decode_steps_hard_limit": 4,
        "eos_id": 7,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_coupled_samples_are_t5xs_seed_for_seed(name):
    texts, _ = assert_same(
        pair("1.1"),
        make_batch(4),
        {"verifier": "coupled"},
        decoder_params=SETTINGS[name],
        rng=KEY,
        num_decodes=3,
        # Of top-k the best alone.
        return_all_decodes=name != "top-k",
    )
    if name in ("top-p", "limits and another end"):
        assert any((row != row[0]).any() for row in texts)


def test_coupled_samples_of_every_draft():
    for options in ({}, {"draft": NamedDraft(name="copy"), "gamma": 2}, {"gamma": 0}):
        assert_same(
            pair("1.0"),
            make_batch(4, seed=1),
            {"verifier": "coupled", **options},
            decoder_params={"temperature": 1.0, "topk": 0},
            rng=KEY,
            prompt_with_targets=True,
        )


@pytest.mark.parametrize(
    ("costs", "least", "most"),
    [({"c": 0.2, "position": 0.2}, 0.01, 0.9), ({"c": 2.0}, 0, 0)],
    ids=["in between", "never pays"],
)
def test_with_costs_as_many_tokens_as_pay_are_proposed(costs, least, most):
    _, aux = assert_same(
        pair("1.1"),
        make_batch(4),
        {"verifier": "coupled", **costs},
        decoder_params={"temperature": 1.0, "topk": 0, "rescale_log_probs": False},
        rng=KEY,
        num_decodes=2,
        return_all_decodes=True,
    )
    # Of the most that could have been, at gamma 3.
    share = np.sum(aux["proposed"]) / (3 * np.sum(aux["target_calls"]))
    assert least <= share <= most


@pytest.mark.parametrize(
    ("num_decodes", "params", "prompted"),
    [(4, {}, False), (1, {"alpha": 0.0, "max_decode_len": 14}, True)],
)
def test_beam_search_finds_what_t5xs_does(num_decodes, params, prompted):
    searching = make_pair("1.1", decode_fn=decoding.beam_search)
    for gamma in (0, 2):
        assert_same(
            searching,
            make_batch(4),
            {"gamma": gamma},
            decoder_params=params,
            num_decodes=num_decodes,
            return_all_decodes=True,
            prompt_with_targets=prompted,
        )


@pytest.mark.parametrize("decode_fn", [decoding.temperature_sample, decoding.beam_search])
def test_with_the_source_in_int8_the_text_is_that_of_gamma_0(decode_fn):
    searching, options = make_pair("1.1", decode_fn=decode_fn), {"num_decodes": 2}
    if decode_fn is decoding.temperature_sample:
        options = {"decoder_params": GREEDY}
    found = {}
    for gamma, kv in ((0, "int8"), (2, "int8"), (2, "auto")):
        model, params = searching.speculative(gamma=gamma, kv=kv)
        found[gamma, kv] = predict(model, params, make_batch(6), **options)
    (texts, aux), (plain, _), (_, of_auto) = found[2, "int8"], found[0, "int8"], found[2, "auto"]
    np.testing.assert_array_equal(texts, plain)
    assert not np.allclose(aux["scores"], of_auto["scores"], atol=TOLERANCE)


@pytest.mark.parametrize("decode_fn", [decoding.temperature_sample, decoding.beam_search])
def test_a_feature_converters_start_token(decode_fn):
    """T5X's encoder-decoders start with 0 and count the token among those of the prompt."""
    batch = make_batch(4)
    batch["decoder_input_tokens"] = batch["decoder_input_tokens"].at[:, 0].set(EOS + 2)
    params, options = {}, {}
    if decode_fn is decoding.temperature_sample:
        params, options = {"temperature": 1.0, "topk": 0, "max_decode_steps": 3}, {"rng": KEY}
    texts, aux = assert_same(
        make_pair("1.1", decode_fn=decode_fn),
        batch,
        {"verifier": "coupled"} if options else {},
        decoder_params=params,
        prompt_with_targets=True,
        num_decodes=2,
        **options,
    )
    if options:
        # Three tokens and the start token's after each prompt that leaves room.
        lengths = np.count_nonzero(batch["decoder_input_tokens"][:, 1:], axis=1)
        assert max(np.count_nonzero(texts, axis=1) - lengths) == 4


def test_counts_are_those_of_all_decodes_and_once_of_a_search():
    sampled = {"rng": KEY, "decoder_params": {"temperature": 1.0, "topk": 0}, "num_decodes": 3}
    for decode_fn, options in (
        (decoding.temperature_sample, sampled),
        (decoding.beam_search, {"num_decodes": 3}),
    ):
        model, params = make_pair("1.1", decode_fn=decode_fn).speculative()
        batch = make_batch(4)
        _, every = predict(model, params, batch, return_all_decodes=True, **options)
        _, best = predict(model, params, batch, **options)
        assert every.keys() == best.keys()
        np.testing.assert_array_equal(best.pop("scores"), every.pop("scores")[:, -1])
        for name, values in best.items():
            if decode_fn is decoding.beam_search:
                assert values.shape == (4,)
                np.testing.assert_array_equal(values, every[name])
            else:
                np.testing.assert_allclose(values, np.sum(every[name], axis=1), rtol=1e-6)
        of_best, of_every = (
            totals({name: np.asarray(values).tolist() for name, values in aux.items()})
            for aux in (best, every)
        )
        assert of_best == pytest.approx(of_every)


def test_settings_bound_by_a_partial_and_by_gin_hold():
    bound = functools.partial(decoding.temperature_sample, temperature=1.0, topk=0)
    assert_same(make_pair("1.1", bound), make_batch(3), {"verifier": "coupled"}, rng=KEY)
    with gin.unlock_config():
        gin.parse_config(
            "from __gin__ import dynamic_registration\n"
            "from t5x import decoding\n"
            "decoding.temperature_sample.temperature = 1.2\n"
            "decoding.temperature_sample.topk = 6\n"
            "FN = @decoding.temperature_sample\n"
            "SCOPED = @scope/decoding.temperature_sample\n"
        )
    bound = gin.query_parameter("%FN").scoped_configurable_fn
    scoped = gin.query_parameter("%SCOPED").scoped_configurable_fn
    texts, _ = assert_same(make_pair("1.1", bound), make_batch(3), {"verifier": "coupled"}, rng=KEY)
    # Run-time parameters come first.
    greedy, _ = assert_same(
        make_pair("1.1", bound),
        make_batch(3),
        {"verifier": "coupled"},
        rng=KEY,
        decoder_params={"temperature": 0.0},
    )
    assert (texts != greedy).any()
    with pytest.raises(InputError, match="gin scope"):
        make_pair("1.1", scoped).speculative()


@pytest.mark.parametrize(
    ("temperature", "bidirectional", "tied", "start", "limit"),
    [(0.0, True, True, 0, None), (1.0, False, False, 0, None), (0.0, True, True, 7, 3)],
)
def test_decoder_only_twin(temperature, bidirectional, tied, start, limit):
    decoder = make_decoder_only_pair(bidirectional, tied)
    rng = np.random.default_rng(3)
    # A row without a prompt begins with a feature converter's start token.
    lengths = np.array([0 if start else 1, 4, 9, 6, TARGET - 1])
    tokens = rng.integers(2, 40, (5, TARGET))
    # Prompts may hold the end of sequence: it separates inputs from targets.
    tokens[np.arange(5), lengths - 1] = EOS
    shifted = np.pad(tokens, ((0, 0), (1, 0)), constant_values=start)[:, :TARGET]
    batch = {
        "decoder_input_tokens": jnp.asarray(shifted, jnp.int32),
        "decoder_causal_attention": jnp.asarray(np.arange(TARGET) <= lengths[:, None], jnp.int32),
    }
    texts, aux = assert_same(
        decoder,
        batch,
        {"verifier": "coupled"},
        decoder_params={
            "temperature": temperature,
            "topk": 0,
            "rescale_log_probs": False,
            "max_decode_steps": limit,
        },
        rng=KEY,
        num_decodes=2,
        return_all_decodes=True,
    )
    assert len(np.unique(texts[:, 0], axis=0)) > 2
    assert np.sum(aux["accepted"]) > 0


def test_losses_and_scores_are_the_stock_models():
    stock = pair("1.1")
    model, params = stock.speculative()
    batch = make_batch(3)
    batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
    batch["decoder_loss_weights"] = jnp.ones_like(batch["decoder_input_tokens"], jnp.float32)
    np.testing.assert_allclose(
        model.score_batch(params, batch), stock.model.score_batch(stock.params, batch), rtol=1e-6
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("decoder_params", "message"),
    [
        ({"logit_callback_fn": lambda logits, state: logits}, "logit_callback_fn"),
        ({"beam": 3}, "'beam'.*temperature_sample takes"),
        ({"num_decodes": 3}, "'num_decodes': bind predict_batch_with_aux.num_decodes"),
        ({"topk": np.array([1, 2])}, r"topk is array\(\[1, 2\]\): give one number, known"),
        # One line each.
        ({"topk": np.ones((2, 2))}, r"^topk is array\(\[\[1., 1.\], \[1., 1.\]\]\): give one num"),
        (
            {"max_decode_steps": np.full(99, 17)},
            r"^max_decode_steps is \[17 17 .*\.\.\.: give whole",
        ),
        ({"temperature": np.full(99, -1.0)}, r"^temperature is \[-1. -1. .*\.\.\.: give a number"),
        # Not 1, which is argmax.
        ({"topk": 1.5}, "top_k is 1.5: give a whole number"),
        ({"topk": "40"}, "topk is '40': give one number"),
        ({"topp": None}, "topp is None: give one number"),
        ({"max_decode_steps": TARGET + 1}, "max_decode_steps is 17"),
        ({"max_decode_steps": True}, "max_decode_steps is True: give whole numbers"),
        ({"max_decode_steps": [[2], [3], [4]]}, r"max_decode_steps is \[\[2\] \[3\] \[4\]\]"),
        ({"max_decode_steps": 2.5}, "max_decode_steps is 2.5: give whole numbers"),
        ({"eos_id": jnp.int32(5)}, r"eos_id is Array\(5, .*: give an id"),
        ({"initial_index": np.zeros(3)}, "initial_index"),
        ({"decode_rng": KEY}, "leave one of them out"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(decoder_params, message):
    model, params = pair("1.1").speculative()
    with pytest.raises(InputError, match=message):
        model.predict_batch_with_aux(
            params, make_batch(3), rng=KEY, decoder_params={"topk": 0, **decoder_params}
        )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("decode_fn", [decoding.temperature_sample, decoding.beam_search])
@pytest.mark.parametrize("num_decodes", [0, -1, "2", 1.5])
def test_a_number_of_decodes_is_checked(decode_fn, num_decodes):
    model, params = make_pair("1.1", decode_fn=decode_fn).speculative()
    with pytest.raises(InputError, match=rf"^num_decodes is '?{num_decodes}'?: give"):
        model.predict_batch_with_aux(params, make_batch(3), num_decodes=num_decodes)


@pytest.mark.parametrize(
    ("decoder_params", "message"),
    [
        ({"max_decode_len": 0}, "max_decode_len is 0: give at least 1, at most"),
        ({"max_decode_len": TARGET + 1}, "max_decode_len is 17: give at least 1, at most 16"),
        ({"max_decode_len": "9"}, "max_decode_len is '9': give a whole number"),
        ({"alpha": -0.1}, "alpha is -0.1: give a number of at least 0"),
        ({"alpha": "0.6"}, "alpha is '0.6': give a number of at least 0"),
        ({"alpha": np.array(True)}, r"alpha is array\(True\): give a number of at least 0"),
        ({"alpha": float("nan")}, "alpha is nan: give a number of at least 0"),
        ({"alpha": np.ones(3)}, r"alpha is array\(\[1., 1., 1.\]\): give a number"),
        ({"eos_id": 7}, "a prompt holds 7, the search's eos_id: leave it out, or"),
    ],
)
def test_what_a_search_cannot_honour_is_an_error(decoder_params, message):
    model, params = make_pair("1.1", decode_fn=decoding.beam_search).speculative()
    batch = make_batch(3)
    batch["decoder_input_tokens"] = jnp.tile(jnp.array([0, 5, 7, 6] + [0] * 12), (3, 1))
    options = {"decoder_params": decoder_params, "prompt_with_targets": True}
    with pytest.raises(InputError, match=message):
        model.predict_batch_with_aux(params, batch, **options)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(predict(model, params, batch, **options))


@pytest.mark.parametrize("decode_fn", [decoding.temperature_sample, decoding.beam_search])
def test_a_vocabulary_without_an_end_has_none_in_its_prompts(decode_fn):
    """T5X ends the texts at 1 and forces a 1 of a prompt as any other token."""
    stock = make_pair("1.1", decode_fn=decode_fn)
    vars(stock.model)["_output_vocabulary"] = seqio.PassThroughVocabulary(size=VOCAB)
    batch, options = make_batch(3), {"prompt_with_targets": True}
    batch["decoder_input_tokens"] = jnp.tile(jnp.array([0, 5, EOS, 6] + [0] * 12), (3, 1))
    if decode_fn is decoding.temperature_sample:
        assert_same(stock, batch, decoder_params=GREEDY, **options)
    else:
        model, params = stock.speculative()
        with pytest.raises(InputError, match="a prompt holds 1, the search's eos_id"):
            model.predict_batch_with_aux(params, batch, **options)


def test_a_search_gets_what_the_call_and_the_model_set(monkeypatch):
    """A prompt may fill ``max_decode_len``."""
    searching, given = make_pair("1.1", decode_fn=decoding.beam_search), []

    def search(target, inputs, prompts, *, beams, max_decode_len, **options):
        given.append((prompts, beams, max_decode_len, options))
        tokens = jnp.zeros((3, beams, max_decode_len), jnp.int32)
        numbers, counts = jnp.zeros((3, beams)), jnp.zeros(3, jnp.int32)
        stats = BeamStats(target_calls=counts, steps=counts)
        lengths = jnp.zeros((3, beams), jnp.int32)
        return BeamResult(tokens=tokens, scores=numbers, lengths=lengths, stats=stats)

    monkeypatch.setattr(speculative_model, "beam_search", search)
    model, params = searching.speculative()
    model._default_decoder_params = models.DecoderParams(num_decodes=4, return_all_decodes=True)
    batch = make_batch(3)
    batch["decoder_input_tokens"] = jnp.tile(jnp.array([2, 5, 4, 6] + [0] * 12), (3, 1))
    decoder_params = {"eos_id": 7, "alpha": 0.25, "max_decode_len": 3}
    options = {"decoder_params": decoder_params, "prompt_with_targets": True}
    tokens, _ = model.predict_batch_with_aux(params, batch, **options)
    best, _ = model.predict_batch_with_aux(
        params, batch, **options, num_decodes=2, return_all_decodes=False
    )
    assert (tokens.shape, best.shape) == ((3, 4, 3), (3, 3))
    (prompts, beams, length, options), (_, fewer, *_) = given
    assert (beams, length, fewer, options["gamma"], options["eos_id"]) == (4, 3, 2, 3, 7)
    assert options["ranking"].exponent == 0.25
    np.testing.assert_array_equal(prompts, [[0, 5, 4, 6]] * 3)


def test_a_tree_is_drafted_whole_or_not_at_all():
    model, _ = pair("1.1").speculative(verifier="multi", c=0.1, position=0.05)
    assert model._costs.iteration == pytest.approx((1.0, np.inf, np.inf, 1.45))


def test_batches_that_a_decoder_alone_cannot_continue():
    model, params = make_decoder_only_pair(True, True).speculative()
    tokens = jnp.tile(jnp.array([0, 5, 0, 6] + [0] * 12), (3, 1))
    with pytest.raises(InputError, match="no decoder_causal_attention: give inputs and targets"):
        model.predict_batch_with_aux(params, {"decoder_input_tokens": tokens})
    batch = {"decoder_input_tokens": tokens, "decoder_causal_attention": jnp.ones_like(tokens)}
    with pytest.raises(InputError, match="without holes"):
        model.predict_batch_with_aux(params, batch)


def test_a_draft_is_of_the_targets_kind():
    decoder, stock = make_decoder_only_pair(True, True), pair("1.1")
    message = "the draft is a DecoderOnlyConfig and the target a T5Model: give a draft of the"
    with pytest.raises(InputError, match=message):
        stock.speculative(draft=decoder.draft)[0]._pair({**stock.params, "draft": {}})
    model, params = decoder.speculative(draft=NamedDraft(name="int8"))
    with pytest.raises(InputError, match="'int8' of a decoder-only target: give a ModelDraft or"):
        model._pair(params)


def test_a_draft_of_a_published_size_computes_in_the_type_that_is_given():
    assert ModelDraft(size="t5_1_1_small").config.dtype == "bfloat16"
    assert ModelDraft(size="t5_1_1_small", dtype="float32").config.dtype == "float32"


def test_a_hole_in_a_prompt_is_an_error():
    model, params = pair("1.1").speculative()
    batch = make_batch(3)
    batch["decoder_input_tokens"] = jnp.tile(jnp.array([0, 5, EOS, 6] + [0] * 12), (3, 1))
    with pytest.raises(InputError, match="without holes"):
        model.predict_batch_with_aux(params, batch, prompt_with_targets=True)
    with pytest.raises(Exception, match="without holes"):
        jax.block_until_ready(predict(model, params, batch, prompt_with_targets=True))


def test_keys_of_the_hardwares_generators():
    """Their vmap draws the same in all rows, so the rows' keys are of another kind."""
    sampled = {"temperature": 1.0, "topk": 0}
    starts = jnp.zeros(3, jnp.int32)
    with jax.default_prng_impl("unsafe_rbg"):
        made = []
        for seed in (1, 2):
            key = jax.random.PRNGKey(seed)
            settings = read_settings(decoding.temperature_sample, sampled, key, EOS, TARGET)
            made.append(random_stream(settings, BlockVerifier(), starts, TARGET))
            with pytest.raises(InputError, match="threefry"):
                random_stream(settings, CoupledVerifier(), starts, TARGET)
        model, params = pair("1.1").speculative(verifier="block")
        predict(model, params, make_batch(2), rng=key, decoder_params=sampled)
    assert {str(jax.random.key_impl(key)) for key in made} == {"threefry2x32"}
    first, second = map(jax.random.key_data, made)
    assert (first != second).any()
    # T5X's usual keys stay what they are.
    settings = read_settings(decoding.temperature_sample, sampled, KEY, EOS, TARGET)
    usual = random_stream(settings, BlockVerifier(), starts, TARGET)
    np.testing.assert_array_equal(jax.random.key_data(usual), KEY)


class OwnDecoding(models.EncoderDecoderModel):
    """A model that overrides decoding."""

    def predict_batch_with_aux(self, *args, **kwargs):
        raise NotImplementedError


class OwnFeatures(models.EncoderDecoderModel):
    """A model that overrides loss and score."""

    FEATURE_CONVERTER_CLS = "own"

    def _compute_logits(self, *args, **kwargs):
        return 2.0 * super()._compute_logits(*args, **kwargs)


def test_what_a_subclass_has_of_its_own_stays():
    stock = pair("1.1")
    own = OwnFeatures.__new__(OwnFeatures)
    vars(own).update(vars(stock.model))
    model = speculate(own, stock.draft)
    params = {**stock.params, "draft": stock.draft_params}
    batch = make_batch(2)
    batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
    assert isinstance(model, OwnFeatures)
    assert model.FEATURE_CONVERTER_CLS == "own"
    np.testing.assert_allclose(
        model._compute_logits(params, batch), own._compute_logits(stock.params, batch)
    )
    expected, _ = predict(stock.model, stock.params, batch, decoder_params=dict(GREEDY))
    found, _ = predict(model, params, batch, decoder_params=dict(GREEDY))
    np.testing.assert_array_equal(found, expected)


def test_models_that_cannot_be_sped_up():
    stock = pair("1.1")
    own = OwnDecoding.__new__(OwnDecoding)
    with pytest.raises(InputError, match="OwnDecoding overrides"):
        speculate(own, stock.draft)
    with pytest.raises(InputError, match="decode_fn is .*lambda"):
        make_pair("1.1", decode_fn=lambda **kwargs: None).speculative()
    model, _ = stock.speculative(draft=ModelDraft(size="t5_1_1_small"))
    with pytest.raises(InputError, match="embeds 32128 ids and the target 40: set DRAFT_SIZE"):
        model.get_initial_variables(
            jax.random.key(0), {"encoder_input_tokens": (1, 4), "decoder_input_tokens": (1, 4)}
        )


# Mistakes in a launch's macros, as ``speculate`` gets them.
MISTAKES = [
    ("gamma", "auto", "gamma is 'auto': a T5X launch measures no times, give a number, and with"),
    ("gamma", -1, "gamma is -1: give at least 0"),
    ("gamma", "3", "gamma is '3': give a whole number"),
    ("gamma", None, "gamma is None: give a whole number"),
    ("c", "0.05", "c is '0.05': give a number of at least 0"),
    ("c", True, "c is True: give a number of at least 0"),
    ("c", -2.0, "c is -2.0: give a number of at least 0"),
    ("c", float("nan"), "c is nan: give a number of at least 0"),
    ("position", 0.1, "position is 0.1 without c: give c too"),
    ("position", None, "position is None: give a number"),
    ("verifier", "Block", "verifier is 'Block': choose one of"),
    ("verifier", ["block"], r"verifier is \['block'\]: choose one of"),
    ("lenience", "0.5", "lenience is '0.5': give a number"),
    ("lenience", 2.0, "lenience is 2.0: give a number"),
    ("kv", "int4", "kv is 'int4': choose one of auto, int8"),
    ("statistics", "False", "statistics is 'False': choose one of True, False"),
    ("widths", 4, r"widths is 4: give a list, as in \(4,\)"),
    (
        "draft",
        "copy",
        "draft is 'copy': give @drafts.ModelDraft.* DRAFT_NAME with gin_configs/t5x/",
    ),
    ("draft", NamedDraft, "draft is <class .*NamedDraft'>: give @drafts.ModelDraft"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "value", "message"), MISTAKES)
def test_settings_of_a_wrong_type_or_size(name, value, message):
    with pytest.raises(InputError, match=message) as raised:
        pair("1.1").speculative(**{name: value})
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ModelDraft, "ModelDraft has size None and config None"),
        (lambda: ModelDraft(size=5), "size is 5: choose one of t5_1_0_small"),
        (lambda: ModelDraft(size="t5_small"), "size is 't5_small'"),
        (
            lambda: ModelDraft(size="t5_1_1_small", dtype="float16"),
            "choose one of bfloat16, float32",
        ),
        (lambda: ModelDraft(config={"emb_dim": 16}), "ModelDraft is of .*emb_dim.*give the size"),
        (lambda: ModelDraft(size="t5_small", config=1), r"give one of them \(a gin file that sets"),
        (lambda: NamedDraft(name=None), "DRAFT_NAME is None: give a name"),
        (lambda: NamedDraft(name=3), "DRAFT_NAME is 3: give a name"),
    ],
)
def test_what_is_no_draft(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "searches"),
    [("copy", False), ("int8", False), ("mixed:{}/draft", False), ("{}/draft", True)],
)
def test_a_beam_search_needs_a_model(name, searches, drafts_of_pair):
    draft = NamedDraft(name=named(name, drafts_of_pair))
    searching = make_pair("1.1", decode_fn=decoding.beam_search)
    assert draft.searches == searches
    searching.speculative(draft=draft, gamma=0)
    with pytest.raises(InputError, match="which has no verifier: leave VERIFIER out, or add"):
        searching.speculative(draft=draft, verifier="coupled")
    with pytest.raises(InputError, match="c is 0.1 and gamma 0, which drafts nothing"):
        searching.speculative(draft=draft, gamma=0, c=0.1)
    with pytest.raises(InputError, match="which always drafts GAMMA tokens: leave C out, or add"):
        searching.speculative(draft=draft, c=0.1)
    if searches:
        searching.speculative(draft=draft)
    else:
        with pytest.raises(InputError, match="cannot search: add --gin_file=gin_configs/t5x/gree"):
            searching.speculative(draft=draft)
    decoder = make_decoder_only_pair(True, True)
    decoder.model._decode_fn = decoding.beam_search
    with pytest.raises(InputError, match="decode a decoder-only model with temperature_sample"):
        decoder.speculative(gamma=0)
