"""Distillation of toy models: alpha rises, is what decoding sees, and decides."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.data.batching import Batches, TokenisedPairs
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments.text_scores import score_texts
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.models.kept_layers import keep_layers, own_params
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.theory.formulas import expected_tokens
from spec_t5x.training import trainer
from spec_t5x.training.distill import DistillOptions, DraftLearner, Student, distill
from spec_t5x.training.distillation_losses import (
    DIVERGENCES,
)
from spec_t5x.training.held_out_alpha import held_out_alpha
from spec_t5x.training.learners import network_logits
from spec_t5x.training.target_outputs import SampleOptions, sample_targets
from spec_t5x.training.trainer import TrainOptions, model_inputs

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TARGET = tiny_t5(0, num_decoder_layers=3)
LAYERS = (0, 2)
LENGTH = 10


@pytest.fixture(scope="module")
def texts():
    """``texts(temperature, seed)``: the target's, for some sources, in batches of one shape."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(3, 9, 24)
    pairs = TokenisedPairs(
        source_ids=np.concatenate([[*rng.integers(3, 30, n - 1), 1] for n in lengths]),
        source_ends=np.cumsum(lengths),
        target_ids=np.ones(24, np.int32),
        target_ends=np.arange(1, 25),
        num_dropped=0,
    )

    def write(temperature, seed=0):
        options = SampleOptions(
            temperature=temperature,
            max_length=LENGTH,
            tokens_per_batch=10 * 8,
            buckets=(LENGTH,),
            seed=seed,
        )
        written = sample_targets(TARGET, pairs, options, None)
        return Batches(written, tokens_per_batch=10 * 8, seed=0, buckets=(LENGTH,))

    return write


def make_student(shares=True, known=None):
    kept = {"encoder": (0,), "decoder": LAYERS}
    params, config = keep_layers(TARGET.params, TARGET.config, **kept)
    config = dataclasses.replace(config, dropout_rate=0.1)
    if not shares:
        return Student(config=config, params=params)
    student = Student(config=config, params=own_params(params), shared_layers=LAYERS)
    return student if known is None else student.narrowed(TARGET.params, known)


def make_learner(student, distillation=None, **options):
    return DraftLearner(
        student=student,
        target=TARGET,
        distillation=distillation or DistillOptions(),
        options=TrainOptions(**{"steps": 1, "distillation_weight": 1.0, **options}),
    )


def run(
    texts,
    directory,
    steps,
    *,
    student=None,
    rate=3e-3,
    temperatures=(0.0,),
    patience=0,
    on_policy=0.0,
    **options,
):
    defaults = {"log_period": 0, "eval_period": 4, "checkpoint_period": 4}
    learner = make_learner(
        student or make_student(),
        DistillOptions(patience=patience, on_policy=on_policy),
        steps=steps,
        **{**defaults, **options},
    )
    held_out = {temperature: texts(temperature, seed=1) for temperature in temperatures}
    return distill(learner, optax.adam(rate), lambda step: rate, texts(1.0), held_out, directory)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "held_out" in line]


def assert_identical(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize(
    ("student", "objective", "temperatures"),
    [
        ({}, "cross_entropy", (0.0,)),
        ({"known": np.arange(1, 27)}, "total_variation", (0.0,)),
        ({"shares": False}, "forward_kl", (1.0, 0.0)),
    ],
    ids=["shared encoder", "narrow head", "layers of its own"],
)
def test_alpha_rises(texts, tmp_path, student, objective, temperatures):
    student = make_student(**student)
    result = run(
        texts,
        tmp_path,
        60,
        student=student,
        objective=objective,
        temperatures=temperatures,
        eval_period=20,
        checkpoint_period=0,
    )
    found = records(tmp_path)
    # Of the start too, and at each temperature.
    assert [line["step"] for line in found] == [s for s in (0, 20, 40, 60) for _ in temperatures]
    for each, first in zip(result.best.dev, found, strict=False):
        before = first["held_out"]
        assert each.temperature == before["temperature"]
        assert each.alpha.value > before["alpha"]["value"] + 0.02
        assert each.loss < before["loss"]
        assert each.alpha.low < each.alpha.value < each.alpha.high
        assert each.expected_tokens == pytest.approx(expected_tokens(each.alpha.value, 4))
    # The best that was seen at the first temperature, not the last.
    best = max(line["held_out"]["alpha"]["value"] for line in found[:: len(temperatures)])
    assert result.best.dev[0].alpha.value == best


KNOWN = np.arange(1, 30, 2)


def losses(student, objective, weight=1.0):
    """Loss and gradient of a batch of two rows, as training has them, and its arrays."""
    rng = np.random.default_rng(0)
    text = rng.integers(1, 30, (2, 4))
    inputs = rng.integers(1, 30, (2, 5)), np.pad(text[:, :-1], ((0, 0), (1, 0))), text
    learner = make_learner(student, objective=objective, distillation_weight=weight)
    target_logits = network_logits(TARGET.config, TARGET.params, inputs)

    def loss(params):
        logits = student.logits(params, TARGET.params, inputs)
        sums = learner.losses(logits, target_logits, text)
        return sums.loss, (sums, logits)

    (_, (sums, logits)), gradient = jax.value_and_grad(loss, has_aux=True)(student.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    return sums, logits, target_logits, text


@pytest.mark.parametrize("objective", DIVERGENCES)
def test_a_draft_that_does_not_know_all_tokens_learns_what_it_can_say(objective):
    student = make_student(known=KNOWN)
    sums, logits, target_logits, _ = losses(student, objective)
    assert sums.num_tokens == 8
    p, q = (np.asarray(jax.nn.softmax(each), np.float64) for each in (target_logits, logits))
    assert not np.any(q[..., ::2]) and np.any(p[..., ::2])
    if objective in ("forward_kl", "jeffreys"):
        # The rest of what the target says, as if it were all.
        p = p * np.isin(np.arange(30), KNOWN)
        p /= p.sum(axis=-1, keepdims=True)
    known_p, known_q = p[..., KNOWN], q[..., KNOWN]
    expected = {
        "forward_kl": known_p * np.log(known_p / known_q),
        "reverse_kl": known_q * np.log(known_q / known_p),
        "jeffreys": (known_p - known_q) * np.log(known_p / known_q),
        "total_variation": np.maximum(p - q, 0),
    }[objective].sum()
    assert float(sums.loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("objective", "weight"), [("cross_entropy", 1.0), ("forward_kl", 0.5)])
def test_tokens_of_the_text_that_a_draft_does_not_know_are_passed_over(objective, weight):
    sums, logits, _, text = losses(make_student(known=KNOWN), objective, weight)
    is_known = np.isin(text, KNOWN)
    assert 0 < is_known.sum() < text.size
    assert sums.num_tokens == is_known.sum() and np.isfinite(sums.loss)
    if objective == "cross_entropy":
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        log_probs = np.take_along_axis(log_probs, text[..., None], axis=-1)
        assert float(sums.loss) == pytest.approx(-log_probs[..., 0][is_known].sum(), rel=1e-5)


def test_a_narrow_output_layer_begins_as_the_whole_one(texts):
    student, whole = make_student(known=KNOWN), make_student()
    inputs = model_inputs(next(texts(1.0).one_pass()))
    ours = student.logits(student.params, TARGET.params, inputs)
    theirs = whole.logits(whole.params, TARGET.params, inputs)
    np.testing.assert_allclose(ours[..., KNOWN], theirs[..., KNOWN], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_is_what_the_draft_is_accepted_with(texts, temperature):
    """As the decoding draft, with the target's cache, has it of the same texts."""
    student, batches = make_student(), list(texts(temperature).one_pass())
    learner = make_learner(student)
    found = held_out_alpha(
        lambda inputs: learner.score(student.params, TARGET.params, inputs, temperature),
        batches,
        temperature=temperature,
        gamma=4,
    )
    draft = SharedEncoderDraft.create(student.params, student.config, LAYERS, TARGET)
    betas = []
    for batch in batches:
        source, _, text = model_inputs(batch)
        scores = score_texts(
            TARGET,
            {"draft": draft},
            source,
            jnp.zeros((len(source), 1), jnp.int32),
            text,
            np.count_nonzero(text, axis=1),
            jax.random.split(jax.random.key(0), len(source)),
            sampling(temperature),
        )["draft"]
        betas.append(np.asarray(scores.betas[0])[text != 0])
    betas = np.concatenate(betas)
    assert found.alpha.count == betas.size and found.alpha.num_texts == 24
    assert found.alpha.value == pytest.approx(betas.mean(), abs=1e-5)


def test_a_run_out_of_time_goes_on_as_though_it_had_not_stopped(texts, tmp_path, monkeypatch):
    """Between two evaluations, where another draft might be the best, and end the patience."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = run(texts, whole, 10, patience=2)
    # Asked once at the start, and once before each step.
    clock = types.SimpleNamespace(monotonic=functools.partial(next, itertools.count(0.0, 60.0)))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "time", clock)
        stopped = run(texts, cut, 10, patience=2, max_minutes=6.5)
    assert not stopped.finished and int(stopped.state.step) == 6
    resumed = run(texts, cut, 10, patience=2)
    assert resumed.best.step == undisturbed.best.step
    assert resumed.best.dev == undisturbed.best.dev
    assert_identical(undisturbed.state, resumed.state)
    assert [line["step"] for line in records(whole)] == [0, 4, 8, 10]
    assert records(cut) == records(whole)


def test_without_a_better_alpha_it_stops_and_gives_the_best(texts, tmp_path):
    """Steps so large that they do harm: the start is the best."""
    result = run(texts, tmp_path, 40, rate=1.0, patience=2)
    assert result.finished and int(result.state.step) == 8
    assert result.best.step == 0
    assert_identical(result.best.params, make_student().params)
    assert result.best.dev[0].record() == {"held_out": records(tmp_path)[0]["held_out"]}
    # Asked again, it does not go on.
    again = run(texts, tmp_path, 40, rate=1.0, patience=2)
    assert int(again.state.step) == 8 and again.best.dev == result.best.dev


def test_on_its_own_texts_the_draft_reads_what_it_writes(texts):
    student, batches = make_student(), texts(1.0).batches()
    learner = make_learner(student, DistillOptions(on_policy=0.5, temperature=0.0), seed=5)
    writer = T5Model.create(student.whole(student.params, TARGET.params), student.config)
    own = 0
    for step, batch in zip(range(16), batches, strict=False):
        source, shifted, text = learner.inputs(student.params, TARGET.params, step, batch)
        np.testing.assert_array_equal(source, batch.encoder_input_tokens)
        np.testing.assert_array_equal(shifted[:, 1:], text[:, :-1])
        assert not np.any(shifted[:, 0])
        if text is batch.decoder_target_tokens:
            continue
        own += 1
        expected = autoregressive_decode(
            writer,
            jnp.asarray(source),
            jnp.zeros((len(source), 1), jnp.int32),
            jax.random.key(0),
            sampling(0.0),
            max_decode_len=text.shape[1],
        ).tokens[:, 0]
        # As far as padding that the draft said itself.
        is_text = np.cumprod(expected != 0, axis=1)
        np.testing.assert_array_equal(text, expected * is_text)
    assert 4 <= own <= 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": "draft"}, "outputs is 'draft': choose target or references"),
        ({"temperature": -1.0}, "temperature"),
        ({"eval_temperatures": ()}, "eval_temperatures is ()"),
        ({"eval_temperatures": 1.0}, "eval_temperatures is 1.0"),
        ({"on_policy": 1.5}, "on_policy is 1.5: give 0..1"),
        ({"dev_texts": 0}, "dev_texts is 0: give at least 1"),
        ({"gamma": 0}, "gamma is 0"),
        ({"patience": -1}, "patience is -1"),
        ({"train_texts": 0}, "train_texts is 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(InputError) as caught:
        DistillOptions(**changes)
    assert message in str(caught.value)
