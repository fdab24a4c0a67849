"""Distillation of toy models: alpha rises, equals that of decoding, and selects the best draft."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark.text_scores import score_texts
from spec_t5x.labs.theory.formulas import expected_tokens
from spec_t5x.labs.training import distill
from spec_t5x.labs.training.batching import Batches, batch_of, join_pairs
from spec_t5x.labs.training.distill import (
    DistillOptions,
    DraftLearner,
    sample_outputs,
)
from spec_t5x.labs.training.first_head import first_head, head_config
from spec_t5x.labs.training.held_out_alpha import HeldOutAlpha
from spec_t5x.labs.training.interfaces import TrainOptions, model_inputs
from spec_t5x.labs.training.kept_layers import keep_layers
from spec_t5x.labs.training.learners import network_logits, read_target
from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.labs.training.student import Student, unroll
from spec_t5x.labs.training.target_outputs import SampleOptions, sample_targets
from spec_t5x.labs.training.trainer import fit
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.models.eagle import EagleNetwork
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import sampling
from tests.labs.training.toys import a_minute_a_step, assert_identical
from tests.toy_drafts import tiny_head
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TARGET = tiny_t5(0, num_decoder_layers=2)
GENERATOR = Generator(target=TARGET, vocabulary=ByteVocabulary(), max_source_len=16)
LAYERS = (1,)
BATCHES = {"tokens_per_batch": 10 * 8, "buckets": (10,)}


@pytest.fixture(scope="module")
def texts():
    """Provides ``texts(temperature, seed)``: the target's texts, in batches of one shape."""
    rng = np.random.default_rng(3)
    sources = [[*rng.integers(3, 30, n - 1).tolist(), 1] for n in rng.integers(3, 9, 24)]
    pairs = join_pairs((source, [1]) for source in sources)

    @functools.cache
    def write(temperature, seed=0):
        options = SampleOptions(temperature=temperature, max_length=10, seed=seed, **BATCHES)
        return Batches(sample_targets(GENERATOR, pairs, options, None), seed=0, **BATCHES)

    return write


@functools.cache
def make_student(shares=True, known=None, unrolled_steps=0):
    params, config = keep_layers(TARGET.params, TARGET.config, encoder=(0,), decoder=LAYERS)
    if not shares:
        return Student(config=dataclasses.replace(config, dropout_rate=0.1), params=params)
    own = own_params(params)
    if unrolled_steps:
        config = head_config(TARGET.config, LAYERS)
        own = first_head(jax.random.key(0), TARGET.params, TARGET.config, config, LAYERS)
    config = dataclasses.replace(config, dropout_rate=0.1)
    student = Student(
        config=config, params=own, shared_layers=LAYERS, unrolled_steps=unrolled_steps
    )
    return student if known is None else student.narrowed(TARGET.params, np.asarray(known))


def make_learner(student, distillation=None, **options):
    return DraftLearner(
        student=student,
        target=TARGET,
        distillation=distillation or DistillOptions(),
        options=TrainOptions(**{"steps": 1, "distillation_weight": 1.0, **options}),
    )


_SCORES, adam = {}, functools.cache(optax.adam)


def run(texts, directory, steps, *, student=None, rate=5e-3, temperatures=(0.0,), **options):
    # One objective and rate, so that runs of one student share a compiled step.
    defaults = {"objective": "cross_entropy", "log_period": 0}
    defaults |= {"eval_period": 4, "checkpoint_period": 4}
    student = student or make_student()
    recipe = {name: options.pop(name) for name in ("patience", "on_policy") if name in options}
    learner = make_learner(student, DistillOptions(**recipe), steps=steps, **defaults | options)
    # Traced once for all numbers of steps.
    key = id(student), learner.options.objective
    learner.__dict__["score"] = _SCORES.setdefault(key, learner.score)
    held_out = {temperature: texts(temperature, seed=1) for temperature in temperatures}
    given = learner, adam(rate), lambda step: rate, texts(1.0), held_out, directory
    return fit(*given, initial_params=student.params)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "held_out" in line]


@pytest.mark.parametrize(
    ("student", "objective", "temperatures"),
    [
        ({}, "cross_entropy", (0.0,)),
        ({"known": range(1, 27)}, "total_variation", (0.0,)),
        ({"shares": False}, "forward_kl", (1.0, 0.0)),
        ({"known": range(1, 27), "unrolled_steps": 3}, "jeffreys", (0.0,)),
    ],
    ids=["shared encoder", "narrow head", "separate layers", "EAGLE head"],
)
def test_alpha_rises(texts, tmp_path, student, objective, temperatures):
    student = make_student(**student)
    options = {"objective": objective, "temperatures": temperatures, "checkpoint_period": 0}
    result = run(texts, tmp_path, 40, student=student, eval_period=20, **options)
    found = records(tmp_path)
    # The start is measured too, and each temperature.
    assert [line["step"] for line in found] == [s for s in (0, 20, 40) for _ in temperatures]
    for each, first in zip(result.best.dev, found, strict=False):
        before = first["held_out"]
        assert each.temperature == before["temperature"]
        assert each.alpha.value > before["alpha"]["value"] + 0.02
        assert each.loss < before["loss"]
        assert each.alpha.low < each.alpha.value < each.alpha.high
        assert each.expected_tokens == pytest.approx(expected_tokens(each.alpha.value, 4))
        assert each.curves()[f"held_out/alpha_T{each.temperature:g}"] == each.alpha.value
    # The best that was seen at the first temperature, not the last.
    best = max(line["held_out"]["alpha"]["value"] for line in found[:: len(temperatures)])
    assert result.best.dev[0].alpha.value == best


KNOWN = range(1, 30, 2)


def shifted(text):
    return np.pad(text[:, :-1], ((0, 0), (1, 0)))


def test_the_objectives_of_a_draft_without_some_tokens():
    student, known = make_student(known=KNOWN), np.asarray(KNOWN)
    rng = np.random.default_rng(0)
    text = rng.integers(1, 30, (2, 4))
    inputs = rng.integers(1, 30, (2, 5)), shifted(text), text

    @jax.jit
    def read():
        drafts = [
            each.logits(each.params, TARGET.params, inputs) for each in (student, make_student())
        ]
        return *drafts, network_logits(TARGET.config, TARGET.params, inputs)

    logits, expected, target_logits = read()

    def losses(objective, weight=1.0):
        learner = make_learner(student, objective=objective, distillation_weight=weight)

        @functools.partial(jax.value_and_grad, has_aux=True)
        def loss(logits):
            sums = learner.losses(logits, target_logits, text)
            return sums.loss, sums

        (_, sums), gradient = jax.jit(loss)(logits)
        assert np.isfinite(gradient[..., known]).all()
        return sums

    sums = losses("cross_entropy")
    # It begins with the target's output layer.
    np.testing.assert_allclose(logits[..., known], expected[..., known], rtol=1e-5, atol=1e-5)
    p, q = (np.asarray(jax.nn.softmax(each), np.float64) for each in (target_logits, logits))
    assert not np.any(q[..., ::2]) and np.any(p[..., ::2])
    # Other tokens of the text are skipped.
    is_known = np.isin(text, known)
    assert 0 < is_known.sum() < text.size
    of_text = np.take_along_axis(q, text[..., None], axis=-1)[..., 0][is_known]
    assert float(sums.loss) == pytest.approx(-np.log(of_text).sum(), rel=1e-5)
    mixed = losses("forward_kl", 0.5)
    assert mixed.num_tokens == sums.num_tokens == is_known.sum() and np.isfinite(mixed.loss)

    known_p, known_q = p[..., known], q[..., known]
    # The target's probabilities of the known tokens, normalized.
    rest = known_p / known_p.sum(axis=-1, keepdims=True)
    for objective, expected in {
        "forward_kl": rest * np.log(rest / known_q),
        "reverse_kl": known_q * np.log(known_q / known_p),
        "jeffreys": (rest - known_q) * np.log(rest / known_q),
        "total_variation": np.maximum(p - q, 0),
    }.items():
        sums = losses(objective)
        assert sums.num_tokens == text.size
        assert float(sums.loss) == pytest.approx(expected.sum(), rel=1e-4)


def test_the_tokens_of_a_text_take_the_steps_of_drafting_in_turn():
    student, params = make_student(unrolled_steps=3), TARGET.params
    own, _ = tiny_head(TARGET, LAYERS)
    text = np.random.default_rng(0).integers(1, 30, (2, 7))
    inputs = text[:, :5], shifted(text), text

    @jax.jit
    def read():
        found = read_target(TARGET, inputs)
        network, whole = EagleNetwork(student.config), {"params": student.whole(own, params)}
        given = found.encoded, *inputs[:2], found.states, 3
        unrolled = network.apply(whole, *given, method=unroll)
        steps = [network.apply(whole, states, method="logits") for states in unrolled]
        return student.logits(own, params, inputs, found), jnp.stack(steps)

    logits, steps = read()
    assert np.std(steps, axis=0)[:, 2:].mean() > 0.01
    # No token is drafted in a step that comes after it.
    for row, in_turn in enumerate(([0, 1, 2, 0, 1, 2, 0], [0, 1, 0, 1, 2, 0, 1])):
        expected = steps[np.array(in_turn), row, np.arange(7)]
        np.testing.assert_allclose(logits[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("unrolled_steps", "kind"), [(0, SharedEncoderDraft), (1, EagleDraft)])
def test_alpha_is_that_of_the_decoding_draft(texts, unrolled_steps, kind):
    """The draft of decoding reads the same texts with the target's cache."""
    temperature, settings = 1.0, sampling(1.0)
    student = make_student(unrolled_steps=unrolled_steps)
    if unrolled_steps:
        # A fusion that reads the states.
        noisy = jax.random.normal(jax.random.key(1), (32, 16)) * 16**-0.5
        params = {**student.params, "fusion": {"kernel": noisy}}
        student = dataclasses.replace(student, params=params)
    batches, learner = list(texts(temperature).one_pass()), make_learner(student)
    scored = [
        learner.score(student.params, TARGET.params, model_inputs(batch), settings)
        for batch in batches
    ]
    found = HeldOutAlpha.of(batches, jax.device_get(scored), temperature=temperature, gamma=4)
    draft = kind.create(student.params, student.config, LAYERS, TARGET)
    betas = []
    for batch in batches:
        source, _, text = model_inputs(batch)
        scores = score_texts(
            TARGET,
            {"draft": draft},
            source,
            jnp.zeros((len(source), 1), jnp.int32),
            jax.random.split(jax.random.key(0), len(source)),
            settings,
            max_decode_len=text.shape[1],
            max_decode_steps=np.count_nonzero(text, axis=1),
            texts=text,
        )
        betas.append(np.asarray(scores.betas["draft"][0])[text != 0])
    betas = np.concatenate(betas)
    assert found.alpha.count == betas.size and found.alpha.num_texts == 24
    assert found.alpha.value == pytest.approx(betas.mean(), abs=1e-5)


def test_a_run_out_of_time_resumes_as_though_it_had_not_stopped(texts, tmp_path):
    """The run stops between two evaluations: one there might find a best draft or end it."""
    whole, cut, recipe = tmp_path / "whole", tmp_path / "cut", {"patience": 2, "on_policy": 0.3}
    undisturbed = run(texts, whole, 10, **recipe)
    with a_minute_a_step():
        stopped = run(texts, cut, 10, **recipe, max_minutes=6.5)
    assert not stopped.finished and int(stopped.state.step) == 6
    resumed = run(texts, cut, 10, **recipe)
    assert resumed.best.step == undisturbed.best.step
    assert resumed.best.dev == undisturbed.best.dev
    assert_identical(undisturbed.state, resumed.state)
    assert [line["step"] for line in records(whole)] == [0, 4, 8, 10]
    assert records(cut) == records(whole)


def test_without_a_better_alpha_it_stops_and_returns_the_best(texts, tmp_path):
    """Steps so large that they do harm: the start is the best."""
    result = run(texts, tmp_path, 40, rate=1.0, patience=2)
    assert result.finished and int(result.state.step) == 8
    assert result.best.step == 0
    assert_identical(result.best.params, make_student().params)
    assert result.best.dev[0].record() == {"held_out": records(tmp_path)[0]["held_out"]}
    # The same command again takes no further step.
    again = run(texts, tmp_path, 40, rate=1.0, patience=2)
    assert int(again.state.step) == 8 and again.best.dev == result.best.dev


def test_on_policy_the_draft_reads_its_own_outputs(texts):
    student, batches = make_student(), texts(1.0).batches()
    learner = make_learner(student, DistillOptions(on_policy=0.5, temperature=0.0), seed=5)
    writer, own = T5Model.create(student.whole(student.params, TARGET.params), student.config), 0
    for step, batch in zip(range(8), batches, strict=False):
        source, shift, text = learner.inputs(student.params, TARGET.params, step, batch)
        np.testing.assert_array_equal(source, batch.encoder_input_tokens)
        np.testing.assert_array_equal(shift, shifted(text))
        if text is batch.decoder_target_tokens:
            continue
        own += 1
        expected = decoded(writer, jnp.asarray(source), jax.random.key(0), 0.0).tokens[:, 0]
        # As far as padding that the draft generated itself.
        np.testing.assert_array_equal(text, expected * np.cumprod(expected != 0, axis=1))
    assert 2 <= own <= 6


def decoded(model, sources, keys, temperature):
    starts = jnp.zeros((len(sources), 1), jnp.int32)
    return autoregressive_decode(
        model, sources, starts, keys, sampling(temperature), max_decode_len=10
    )


def test_samples_differ_by_step_and_seed_and_rows_without_a_pair_are_left_out(texts, monkeypatch):
    given = []

    def sample(model, sources, keys, settings, is_row, *, max_length):
        given.append((np.asarray(jax.random.key_data(keys)), settings, np.asarray(is_row)))
        return jnp.zeros((len(sources), max_length), jnp.int32)

    monkeypatch.setattr(distill, "sample_outputs", sample)
    batch = dataclasses.replace(next(texts(1.0).batches()), num_pairs=5)
    student = make_student()
    recipe = DistillOptions(on_policy=1.0, temperature=0.5)
    for step, seed in ((0, 0), (1, 0), (0, 1)):
        learner = make_learner(student, recipe, seed=seed)
        learner.inputs(student.params, TARGET.params, step, batch)
    keys = np.concatenate([keys for keys, *_ in given])
    assert len(np.unique(keys, axis=0)) == len(keys) == 3 * 8
    for _, settings, is_row in given:
        assert settings.temperature == 0.5 and is_row.tolist() == [True] * 5 + [False] * 3
    # The choice of steps follows from the seed, too.
    half, chosen = DistillOptions(on_policy=0.5), {}
    for seed in (0, 1):
        learner = make_learner(student, half, seed=seed)
        found = [learner.inputs(student.params, TARGET.params, i, batch)[2] for i in range(16)]
        chosen[seed] = [text is not batch.decoder_target_tokens for text in found]
    assert chosen[0] != chosen[1] and all(4 <= sum(each) <= 12 for each in chosen.values())


@pytest.mark.parametrize("unrolled_steps", [0, 2])
def test_a_draft_learns_with_dropout_and_the_targets_encoder_has_none(unrolled_steps, monkeypatch):
    student, encoded = make_student(unrolled_steps=unrolled_steps), []
    encode = Transformer.encode

    def noted(network, *given, **options):
        encoded.append(options.get("enable_dropout", False))
        return encode(network, *given, **options)

    monkeypatch.setattr(Transformer, "encode", noted)
    text = np.random.default_rng(0).integers(1, 30, (2, 4))
    inputs = text, shifted(text), text
    read = read_target(TARGET, inputs) if unrolled_steps else None
    keys = None, jax.random.key(0), jax.random.key(1)
    plain, first, second = (
        student.logits(student.params, TARGET.params, inputs, read, key) for key in keys
    )
    assert not np.allclose(first, plain) and not np.allclose(first, second)
    assert set(encoded) == {False}


@pytest.mark.parametrize("regularizers", [{"label_smoothing": 0.2}, {"z_loss": 0.1}])
def test_regularizers_count_in_training_and_not_on_held_out_texts(regularizers):
    text = np.random.default_rng(0).integers(1, 30, (2, 4))
    inputs, student = (text, shifted(text), text), make_student()
    options = {"objective": "cross_entropy", "z_loss": 0.0}
    bare, learner = (make_learner(student, **options | each) for each in ({}, regularizers))
    params = student.params, TARGET.params
    logits = student.logits(*params, inputs)
    expected = token_losses(logits, text, **regularizers).loss
    found = learner.loss(params[0], inputs, None, params[1])
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(found.loss - bare.loss(params[0], inputs, None, params[1]).loss)) > 0.1
    scored, betas = learner.score(*params, inputs, sampling(1.0))
    assert float(scored.loss) == pytest.approx(float(found.cross_entropy), rel=1e-5)
    assert betas.shape == text.shape


def test_held_out_figures_are_over_all_tokens():
    """The texts have 3, 1 and 4 tokens; padding has no beta."""
    targets = [np.array([[5, 6, 1], [1, 0, 0]]), np.array([[7, 8, 9, 1]])]
    batches = [batch_of(each, each, num_pairs=len(each)) for each in targets]
    betas = [np.array([[1.0, 0.5, 0.0], [0.25, 0.0, 0.0]]), np.full((1, 4), 0.5)]
    sums = [
        LossSums(loss=loss, cross_entropy=0.0, num_correct=0.0, num_tokens=4) for loss in (6.0, 2.0)
    ]
    scores = list(zip(sums, betas, strict=True))
    found = HeldOutAlpha.of(batches, scores, temperature=1.0, gamma=2)
    assert (found.loss, found.alpha.value) == (1.0, 3.75 / 8)
    assert (found.alpha.count, found.alpha.num_texts) == (8, 3)
    assert found.alpha.low == 0.25
    assert found.expected_tokens == pytest.approx(1 + 3.75 / 8 + (3.75 / 8) ** 2)
    assert "loss 1.0000  alpha 0.4688 (0.2500-" in str(found)
    empty = [batch_of(*[np.zeros((1, 2), np.int32)] * 2, num_pairs=0)]
    with pytest.raises(InputError, match="0 tokens to measure alpha on"):
        HeldOutAlpha.of(empty, [(sums[0], np.zeros((1, 2)))], temperature=1.0, gamma=2)


def test_a_sampled_text_ends_at_generated_padding():
    """Training would take all that follows for padding."""
    rows = 64
    sources = jnp.tile(jnp.array([[5, 6, 1]]), (rows, 1))
    keys, is_row = jax.random.split(jax.random.key(0), rows), jnp.arange(rows) < rows - 3
    tokens = sample_outputs(TARGET, sources, keys, sampling(3.0), is_row, max_length=10)
    raw = decoded(TARGET, sources, keys, 3.0)
    says_padding = (raw.tokens[:, 0] == 0) & (np.arange(10) < np.asarray(raw.lengths))
    assert says_padding.any()
    assert not np.any((tokens[:, :-1] == 0) & (tokens[:, 1:] != 0))
    assert not tokens[-3:].any()
    np.testing.assert_array_equal(tokens, np.where(tokens != 0, raw.tokens[:, 0], 0))
