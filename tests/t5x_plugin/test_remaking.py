"""Gin's bindings of a model's methods hold for the model that is made of it."""

import copy
import functools

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import gin
import jax
import jax.numpy as jnp
import numpy as np
from t5x import models

from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.drafts import NamedDraft
from spec_t5x.t5x_plugin.remaking import launch_model
from spec_t5x.t5x_plugin.speculation import speculate
from spec_t5x.t5x_plugin.speculative_model import draft_of
from tests.t5x_plugin import programs  # noqa: F401 registers the programs
from tests.t5x_plugin.toy_models import (
    TARGET,
    OwnMetrics,
    make_batch,
    make_decoder_only_pair,
    make_pair,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

KEY = jax.random.PRNGKey(3)
HEADER = """
from __gin__ import dynamic_registration
import jax
from spec_t5x.t5x_plugin import speculative_model
from t5x import decoding
from t5x import models
"""
STOCK = "models.EncoderDecoderModel"
OURS = "speculative_model.SpeculativeEncoderDecoderModel"
DECODER_ONLY = "models.DecoderOnlyModel"


@functools.cache
def pair(kind: str = STOCK):
    return make_decoder_only_pair(True, True) if kind == DECODER_ONLY else make_pair("1.1")


def bind(*lines: str, model: str = STOCK) -> type:
    """Binds these lines; returns the class of a launch's model as gin makes it."""
    gin.parse_config(HEADER + "\n".join([*lines, f"MODEL = @{model}()"]))
    return gin.query_parameter("%MODEL").scoped_configurable_fn


def speculative(made_by: type, kind: str = STOCK, **options):
    """Returns the speculative twin of a toy model that gin made, and its parameters."""
    stock = pair(kind)
    model = made_by.__new__(made_by)
    vars(model).update(vars(stock.model))
    options = {"draft": stock.draft, "gamma": 3, "verifier": "coupled", **options}
    return speculate(model, **options), {**stock.params, "draft": stock.draft_params}


def batch_of(kind: str):
    batch = make_batch(4)
    if kind == DECODER_ONLY:
        tokens = jnp.where(batch["decoder_input_tokens"] == 0, 2, batch["decoder_input_tokens"])
        tokens = tokens.at[:, 0].set(0)
        lengths = np.array([[1], [4], [9], [6]])
        causal = jnp.asarray(np.arange(TARGET) <= lengths, jnp.int32)
        return {"decoder_input_tokens": tokens, "decoder_causal_attention": causal}
    return batch


def predict(model, params, kind, **arguments):
    batch = batch_of(kind)
    # Sampled texts differ; gin's parameters hold where the caller gives none.
    if arguments.pop("sampled", True):
        arguments.setdefault("decoder_params", dict(SAMPLED))
    call = jax.jit(lambda p: model.predict_batch_with_aux(p, batch, rng=KEY, **arguments))
    tokens, aux = call(params)
    return np.asarray(tokens), np.asarray(aux["scores"])


SAMPLED = {"temperature": 1.2, "topk": 0, "rescale_log_probs": False}
BOTH = {"num_decodes": 2, "return_all_decodes": True}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (STOCK, BOTH),
        (OURS, BOTH),
        (DECODER_ONLY, BOTH),
        (STOCK, {"decoder_params": SAMPLED}),
        (OURS, {"prompt_with_targets": True}),
    ],
)
def test_arguments_that_gin_binds_are_honoured(kind, arguments):
    family = DECODER_ONLY if kind == DECODER_ONLY else STOCK
    stock, sampled = pair(family), "decoder_params" not in arguments
    # T5X adds to the dictionary that it is given.
    expected = predict(stock.model, stock.params, family, **copy.deepcopy(arguments))
    lines = [f"{kind}.predict_batch_with_aux.{key} = {value!r}" for key, value in arguments.items()]
    model, params = speculative(bind(*lines, model=family), family)
    found = predict(model, params, family, sampled=sampled)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=2e-4, rtol=1e-5)
    without = predict(stock.model, stock.params, family, sampled=sampled)
    assert without[0].shape != found[0].shape or (without[0] != found[0]).any()


@pytest.mark.parametrize("kind", [STOCK, OURS])
def test_who_takes_precedence(kind):
    """A caller's argument before gin's, ours before the stock class's, a scope's before none's."""
    other = OURS if kind == STOCK else STOCK
    scoped = bind(
        f"{kind}.predict_batch_with_aux.num_decodes = 2",
        f"{kind}.predict_batch_with_aux.return_all_decodes = True",
        f"twice/{kind}.predict_batch_with_aux.num_decodes = 4",
        model="twice/" + STOCK,
    )
    model, params = speculative(scoped)
    assert predict(model, params, STOCK, num_decodes=3)[0].shape == (4, 3, TARGET)
    in_scope = 4 if kind == STOCK else 2
    assert predict(model, params, STOCK)[0].shape == (4, in_scope, TARGET)
    model, params = speculative(bind(f"{other}.predict_batch_with_aux.num_decodes = 5"))
    expected = 5 if other == OURS else 2
    assert predict(model, params, STOCK)[0].shape == (4, expected, TARGET)


def test_other_methods_keep_their_bindings():
    batch = batch_of(DECODER_ONLY)
    batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
    batch["decoder_loss_weights"] = jnp.ones(batch["decoder_input_tokens"].shape)
    bound = bind(f"{DECODER_ONLY}.score_batch.return_intermediates = True", model=DECODER_ONLY)
    model, params = speculative(bound, DECODER_ONLY)
    scores, intermediates = model.score_batch(params, batch)
    assert scores.shape == (4,)
    assert "decoder" in intermediates


class Wrapped(models.EncoderDecoderModel):
    """An override that looks like the wrapped method."""

    @functools.wraps(models.EncoderDecoderModel.predict_batch_with_aux)
    def predict_batch_with_aux(self, *args, **kwargs):
        return super().predict_batch_with_aux(*args, **kwargs)


class Partial(models.EncoderDecoderModel):
    """An override that is no function."""

    predict_batch_with_aux = functools.partialmethod(
        models.EncoderDecoderModel.predict_batch_with_aux, num_decodes=4
    )


@pytest.mark.parametrize("own", [Wrapped, Partial])
def test_an_override_is_refused_as_before(own):
    bind(f"{STOCK}.predict_batch_with_aux.num_decodes = 4")
    with pytest.raises(InputError, match=f"{own.__name__} overrides EncoderDecoderModel.predict_b"):
        speculative(own)
    model, _ = speculative(OwnMetrics)
    assert isinstance(model, OwnMetrics)


class OwnPredictions(models.EncoderDecoderModel):
    """An override of what ``AcceptanceEvaluator`` does not call."""

    def predict_batch(self, *args, **kwargs):
        return 1 + super().predict_batch(*args, **kwargs)


def test_predictions_that_an_evaluator_would_not_call():
    def give(evaluator):
        imports = "import seqio\nfrom spec_t5x.t5x_plugin import acceptance\n"
        gin.parse_config(f"{HEADER}{imports}EVALUATOR = @{evaluator}")
        bound = "__main__.evaluate.inference_evaluator_cls", gin.query_parameter("%EVALUATOR")
        gin.bind_parameter(*bound)

    give("seqio.Evaluator")
    model, params = speculative(OwnPredictions)
    found = model.predict_batch(params, batch_of(STOCK))
    expected = predict(model, params, STOCK, sampled=False)[0]
    np.testing.assert_array_equal(found, 1 + expected)
    give("acceptance.AcceptanceEvaluator")
    with pytest.raises(InputError, match="OwnPredictions overrides predict_batch, which Accept"):
        speculative(OwnPredictions)
    speculative(OwnMetrics)


def test_a_constructor_that_is_not_called():
    made_by = bind(f"{OURS}.decode_fn = @decoding.beam_search")
    with pytest.raises(InputError, match="gin binds Spec.*decode_fn: bind EncoderDecoderModel.dec"):
        speculative(made_by)
    model = made_by.__new__(bind(model=OURS))
    with pytest.raises(InputError, match="is a Specul.* without a draft: give speculate.gin"):
        model.get_initial_variables(KEY, {})


def test_a_speculative_model_may_be_given_another_draft():
    model, _ = speculative(OwnMetrics)
    again = speculate(model, NamedDraft(name="copy"), gamma=2)
    assert isinstance(again, type(model)) and draft_of(again).name == "copy"
    assert draft_of(model) == pair().draft


def test_the_launchs_own_model():
    bind(f"{STOCK}.optimizer_def = None", f"{STOCK}.z_loss = 0.5")
    with pytest.raises(InputError, match="bind no models.EncoderDecoderModel.module: give the mo"):
        launch_model()
    arguments = ("module", "input_vocabulary", "output_vocabulary")
    gin.parse_config([f"{STOCK}.{name} = None" for name in arguments])
    assert launch_model()._z_loss == 0.5
    # ``speculate`` refuses it, and names the binding that is meant.
    bind(f"{OURS}.z_loss = 0.25")
    assert launch_model()._z_loss == 0.5


@pytest.mark.parametrize("other", [f"{DECODER_ONLY}.z_loss = 0.5", f"a/{STOCK}.z_loss = 0.5"])
def test_a_launchs_model_of_another_class_or_scope(other):
    """``speculate.gin`` has replaced ``MODEL``, so that which one it was is not known."""
    bind(*(f"{STOCK}.{name} = None" for name in ("module", "optimizer_def")))
    gin.parse_config([f"{STOCK}.{name}_vocabulary = None" for name in ("input", "output")])
    launch_model()
    bind(other)
    with pytest.raises(InputError, match="binds models.EncoderDecoderModel and .*: name the model"):
        launch_model()
