"""Recipes of distillation side by side."""

import dataclasses
import json

import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments import objectives
from spec_t5x.experiments.objectives import ObjectivesOptions, Row
from spec_t5x.theory.estimates import Estimate
from spec_t5x.training.distill import DistillOptions
from spec_t5x.training.held_out_alpha import HeldOutAlpha
from spec_t5x.training.optimizers import OptimizerOptions
from spec_t5x.training.run_data import DataOptions
from spec_t5x.training.run_distill import KeptLayers
from spec_t5x.training.trainer import TrainOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")

RECIPES = (("cross_entropy", "references", 0.0), ("total_variation", "target", 0.5))


def measured(temperature, value, half_width):
    alpha = Estimate(
        value=value, low=value - half_width, high=value + half_width, count=90, num_texts=9
    )
    return HeldOutAlpha(temperature=temperature, loss=1.0, alpha=alpha, gamma=2)


def row(recipe, *held_out):
    objective, outputs, on_policy = recipe
    return Row(
        objective=objective, outputs=outputs, on_policy=on_policy, steps=5, held_out=held_out
    )


def test_the_table_marks_what_is_surely_above_the_first():
    rows = [
        row(RECIPES[0], measured(0.0, 0.5, 0.1), measured(1.0, 0.5, 0.05)),
        row(RECIPES[1], measured(0.0, 0.65, 0.1), measured(1.0, 0.65, 0.05)),
    ]
    text = objectives.table(rows)
    assert "| alpha, T=0 | expected tokens, gamma 2 | alpha, T=1 |" in text
    # (1 - alpha^3) / (1 - alpha) tokens (Equation 1).
    assert "| 0.500 (0.400\u20130.600) | 1.75 | 0.500 (0.450\u20130.550) | 1.75 |" in text
    assert (
        "| total variation | target, 50% the draft's own "
        "| 0.650 (0.550\u20130.750) | 2.07 | **0.650** (0.600\u20130.700) | 2.07 |" in text
    )


@pytest.fixture
def options(tmp_path):
    pairs = [("My sister", "Meine Schwester liest."), ("a bird", "ein Vogel"), ("We go", "Wir")]
    for name, some in {"train": pairs * 4, "dev": pairs}.items():
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in some))
    return ObjectivesOptions(
        output_dir=str(tmp_path / "runs"),
        cache_dir=str(tmp_path / "cache"),
        layers=KeptLayers(decoder="first:1"),
        data=DataOptions(
            directory=str(tmp_path),
            train_file="train.tsv",
            dev_file="dev.tsv",
            max_target_length=16,
            buckets=(16,),
            tokens_per_batch=64,
        ),
        optimizer=OptimizerOptions(warmup_steps=1),
        training=TrainOptions(steps=2, distillation_weight=1.0, eval_period=1),
        distillation=DistillOptions(),
        recipes=RECIPES,
    )


def test_recipes_are_trained_alike(options, tiny_pair, tmp_path, capfd):
    models = Models(target=str(tiny_pair / "target"))
    rows = list(objectives.run(options, models=models))
    assert [(row.objective, row.outputs, row.on_policy) for row in rows] == list(RECIPES)
    assert [row.steps for row in rows] == [2, 2]
    for found in rows:
        assert [each.temperature for each in found.held_out] == [0.0, 1.0]
    # Both begin as the same draft, and are measured on the same texts, written once.
    said = capfd.readouterr().err
    starts = [line for line in said.splitlines() if line.startswith("step 0  T=1:")]
    assert len(starts) == 2
    assert len({line.split("alpha")[1] for line in starts}) == 1
    assert len(list((tmp_path / "cache").glob("texts-*"))) == 3
    kept = json.loads(json.dumps(objectives.to_dict(rows)))["rows"]
    assert objectives.table_of(kept) == objectives.table(rows)

    # What is done is not done again, and says the same.
    again = list(objectives.run(options, models=models))
    assert objectives.to_dict(again) == objectives.to_dict(rows)


def test_a_run_without_time_is_no_result(options, tiny_pair):
    training = dataclasses.replace(options.training, max_minutes=1e-9)
    options = dataclasses.replace(options, training=training)
    with pytest.raises(InputError, match="0 of 2 steps: run the same command again"):
        list(objectives.run(options, models=Models(target=str(tiny_pair / "target"))))


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ((), "recipes is"),
        ((("forward_kl", "target"),), "a recipe is"),
        ((("backward", "target", 0.0),), "objective is 'backward'"),
        ((("forward_kl", "nobody", 0.0),), "outputs is 'nobody'"),
    ],
)
def test_recipes_that_are_none(options, recipes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(options, recipes=recipes)
