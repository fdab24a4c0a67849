"""Losses, schedules, optimizers, and the training loop."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training.distillation_losses import DIVERGENCES
from spec_t5x.labs.training.interfaces import TrainOptions, model_inputs
from spec_t5x.labs.training.learners import Network, network_logits
from spec_t5x.labs.training.losses import DevMetrics, cross_entropy, token_losses
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.trainer import init_state, make_train_step
from tests.labs.training.toys import Copier, assert_identical, copy_batches, toy_config, train_toy

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_loss_decreases_and_is_recorded(tmp_path, caplog):
    caplog.set_level("INFO", logger="spec_t5x")
    result = train_toy(tmp_path, 40, dev=copy_batches(), log_period=10, eval_period=20)
    assert result.finished and int(result.state.step) == 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    losses, dev = ([line[name] for line in lines if name in line] for name in ("loss", "dev_loss"))
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    assert len(dev) == 2 and dev[1] < dev[0]
    assert result.dev[0].cross_entropy == pytest.approx(dev[1])
    assert "40 of 40 steps, loss" in caplog.text


def test_the_result_measures_the_parameters_that_are_exported(tmp_path):
    batches = copy_batches()
    result = train_toy(tmp_path, 2, dev=batches, export_dtype="bfloat16")
    params = result.state.params
    exported = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    unrounded, expected = (
        Copier(TrainOptions(steps=2)).evaluate(each, None, batches, lambda inputs: inputs)
        for each in (params, exported)
    )
    assert result.dev == expected != unrounded


def test_a_run_that_is_cut_or_finished_resumes_where_it_was(tmp_path):
    run, periods = tmp_path / "run", {"checkpoint_period": 4}
    out_of_time = train_toy(run, 6, max_minutes=1e-9, **periods)
    assert not out_of_time.finished and int(out_of_time.state.step) == 0
    cut, again = (train_toy(run, 3, **periods) for _ in range(2))
    assert_identical(again.state, cut.state)
    resumed = train_toy(run, 6, **periods)
    assert_identical(resumed.state, train_toy(tmp_path / "undisturbed", 6, **periods).state)


def test_a_limit_of_no_time_is_refused():
    with pytest.raises(InputError, match="max_minutes is 0.0: give a number above 0, or None"):
        TrainOptions(steps=1, max_minutes=0.0)


def test_another_run_cannot_resume_it(tmp_path):
    train_toy(tmp_path, 2)
    others = "step 2 is of other pairs, another seed or batches"
    for change, message in (
        ({"batches": copy_batches(seed=1)}, others),
        ({"batches": copy_batches(rows=2)}, others),
        ({"batches": copy_batches(12)}, others),
        ({"optimizer": optax.adafactor}, "another model or optimizer"),
        ({"learner": functools.partial(Copier, width=6)}, "another model or optimizer"),
    ):
        with pytest.raises(InputError, match=message):
            train_toy(tmp_path, 3, **change)


def test_in_bfloat16_only_the_network_computes():
    """Parameters, the optimizer's averages and the loss stay in float32."""
    transformation = OptimizerOptions(name="adafactor").optimizer(lambda step: 1e-2)
    learner = Network(toy_config(dtype="bfloat16"), TrainOptions(steps=1))
    state, step = init_state(learner, transformation), make_train_step(learner, transformation)
    inputs = model_inputs(next(copy_batches().batches()))
    lowered = step.lower(state, inputs, jax.random.key(0), None)
    # Products are in bfloat16.
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products and sum("bf16" in line for line in products) > len(products) / 2
    state, sums = step(state, inputs, jax.random.key(0), None)
    averages = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    types = {leaf.dtype for leaf in jax.tree.leaves((state.params, sums, averages))}
    assert averages and types == {jnp.dtype(jnp.float32)}


def test_a_network_learns_with_its_regularizers_and_dropout():
    config, options = toy_config(dropout_rate=0.5), {"label_smoothing": 0.1, "z_loss": 0.01}
    learner = Network(config, TrainOptions(steps=1, **options))
    inputs = model_inputs(next(copy_batches().batches()))
    keys = None, jax.random.key(1), jax.random.key(2)

    @jax.jit
    def losses():
        params = learner.init(jax.random.key(0))
        expected = token_losses(network_logits(config, params, inputs), inputs[2], **options)
        return expected.loss, *(learner.loss(params, inputs, key).loss for key in keys)

    expected, plain, *dropped = map(float, losses())
    assert plain == pytest.approx(expected, rel=1e-5)
    assert len({plain, *dropped}) == 3


def test_each_step_has_its_own_dropout_and_reports_the_gradients_norm():
    learner, optimizer = Copier(TrainOptions(steps=1)), optax.sgd(0.5)
    step, inputs = make_train_step(learner, optimizer), model_inputs(next(copy_batches().batches()))

    def loss_at(number):
        state = init_state(learner, optimizer)
        before = jax.tree.map(np.array, state.params)
        state = state.replace(step=jnp.int32(number))
        state, sums = step(state, inputs, jax.random.key(3), None)
        moved = jax.tree.map(np.subtract, before, jax.tree.map(np.array, state.params))
        assert float(sums.gradient_norm) == pytest.approx(2 * float(optax.global_norm(moved)))
        return float(sums.loss)

    first, second, again = map(loss_at, (0, 1, 0))
    assert first == again != second
    # Another seed begins with other parameters.
    starts = [init_state(Copier(TrainOptions(steps=1, seed=seed)), optimizer) for seed in (0, 1)]
    assert np.any(starts[0].params["decoder"]["kernel"] != starts[1].params["decoder"]["kernel"])


def test_dev_metrics_are_means_over_tokens():
    # Sums of cross-entropy, correct tokens and tokens of two batches.
    found = DevMetrics.of([(3.0, 2.0, 6.0), (1.0, 1.0, 2.0)])
    assert (found.cross_entropy, found.accuracy, found.num_tokens) == (0.5, 0.375, 8)
    assert found.perplexity == pytest.approx(1.6487, abs=1e-4)
    with pytest.raises(InputError, match="0 tokens to evaluate on"):
        DevMetrics.of([(0.0, 0.0, 0.0)])


def random_logits(seed=0, shape=(2, 3, 7)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


TARGETS = jnp.array([[3, 1, 0], [6, 2, 1]])


def reference_loss(logits, label_smoothing, z_loss):
    log_probs = jax.nn.log_softmax(logits)
    labels = jax.nn.one_hot(TARGETS, logits.shape[-1])
    labels = (1 - label_smoothing) * labels + label_smoothing / logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return -jnp.sum(labels * log_probs, axis=-1) + z_loss * log_z**2


def test_cross_entropy_and_its_gradient():
    logits, weights, options = random_logits(), random_logits(1, (2, 3)), (0.1, 1e-2)
    (ours, plain), pull = jax.vjp(lambda x: cross_entropy(x, TARGETS, *options), logits)
    expected, pull_expected = jax.vjp(lambda x: reference_loss(x, *options), logits)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(plain, reference_loss(logits, 0.0, 0.0), rtol=1e-5)
    gradients = pull((weights, jnp.zeros_like(weights))), pull_expected(weights)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_padding_does_not_count_and_accuracy_does():
    logits = random_logits()
    sums = token_losses(logits, TARGETS)
    assert sums.num_tokens == 5
    # Minus infinity: also where it has no chance.
    for padding in (logits.at[0, 2].set(100.0), logits.at[0, 2, 0].set(-jnp.inf)):
        assert_identical(sums, token_losses(padding, TARGETS))
        gradient = jax.grad(lambda logits: token_losses(logits, TARGETS).loss)(padding)
        assert np.isfinite(gradient).all() and not gradient[0, 2].any()
    logits = 5.0 * jax.nn.one_hot(TARGETS, 7).at[0, 0].set(0.0).at[0, 0, 5].set(1.0)
    assert token_losses(logits, TARGETS).num_correct == 4


def test_divergence_and_cross_entropy_are_mixed():
    student, teacher = random_logits(0), random_logits(1)
    weights = (TARGETS > 0).astype(jnp.float32)
    for objective, divergence in DIVERGENCES.items():
        taught = {"target_logits": teacher, "objective": objective}
        sums = token_losses(student, TARGETS, distillation_weight=0.75, **taught)
        expected = 0.25 * cross_entropy(student, TARGETS)[0] + 0.75 * divergence(teacher, student)
        np.testing.assert_allclose(sums.loss, (expected * weights).sum(), rtol=1e-5)
    # The cross-entropy alone does not use the target.
    taught = {"target_logits": teacher, "distillation_weight": 1.0, "objective": "cross_entropy"}
    assert_identical(token_losses(student, TARGETS, **taught), token_losses(student, TARGETS))
    assert not TrainOptions(steps=1, objective="cross_entropy").uses_target


def test_schedule_values():
    options = OptimizerOptions(learning_rate=0.8, warmup_steps=4, cooldown_steps=5)
    schedule = options.schedule(20)
    values = [float(schedule(step)) for step in range(20)]
    expected = [0.2, 0.4, 0.6, *[0.8] * 13, 0.64, 0.48, 0.32, 0.16]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    schedule = OptimizerOptions(learning_rate=1.0, warmup_steps=25, decay="rsqrt").schedule(1000)
    values = [float(schedule(step)) for step in (0, 24, 25, 100, 400)]
    np.testing.assert_allclose(values, [0.04, 1.0, 1.0, 0.5, 0.25], rtol=1e-6)


def test_two_steps_of_adamw_by_hand():
    """The first step is but the sign of the gradient; the second shows clipping and averages."""
    params = {"matrix": jnp.full((2, 2), 3.0), "vector": jnp.full(2, 3.0)}
    # Global norms of 5 and 0.5, of which the first is clipped to 1.
    steps = [{"matrix": jnp.full((2, 2), 2.0), "vector": jnp.array([3.0, 0.0])}]
    steps.append(jax.tree.map(lambda leaf: -0.1 * leaf, steps[0]))
    optimizer = OptimizerOptions(clip_norm=1.0, weight_decay=0.1).optimizer(lambda step: 0.01)
    state, found = optimizer.init(params), []
    for gradients in steps:
        updates, state = optimizer.update(gradients, state, params)
        found.append(updates)
    mean = square = 0.0
    for number, (updates, gradient) in enumerate(zip(found, (2.0 / 5.0, -0.2), strict=True), 1):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        scaled = mean / (1 - 0.9**number) / np.sqrt(square / (1 - 0.98**number))
        np.testing.assert_allclose(updates["matrix"], -0.01 * (scaled + 0.1 * 3.0), rtol=1e-5)
        # Vectors do not decay.
        np.testing.assert_allclose(updates["vector"], [-0.01 * scaled, 0.0], rtol=1e-5)


def test_adafactor_moves_a_parameter_by_a_share_of_its_size():
    optimizer = OptimizerOptions(name="adafactor").optimizer(lambda step: 0.01)
    params = {"small": jnp.full((2, 2), 0.5), "large": jnp.full((2, 2), -4.0)}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.ones_like, params), optimizer.init(params), params
    )
    for name, size in (("small", 0.5), ("large", 4.0)):
        np.testing.assert_allclose(updates[name], -0.01 * size, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "cosine"}, "cosine"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1: give at least 0"),
        ({"name": "sgd"}, "optimizer is 'sgd'"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": math.nan}, "clip_norm is nan"),
        ({"name": "adafactor", "weight_decay": 0.1}, "weight_decay is 0.1 and adafactor has none"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(InputError, match=message):
        OptimizerOptions(**{"warmup_steps": 1} | changes)


def test_warm_up_and_cool_down_fit_into_a_training():
    options = OptimizerOptions(warmup_steps=8, cooldown_steps=3)
    with pytest.raises(InputError, match="into 10 steps: lower OptimizerOptions.warmup"):
        options.build(10)
