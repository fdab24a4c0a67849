"""Objectives of distillation side by side: alpha after equal steps.

Each recipe trains a draft from the same start on the same sources (batches differ where the
lengths of the texts do), and is measured on the same held-out texts of the target. The first
recipe is what the others are compared with: training on the references alone.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.theory import formulas
from spec_t5x.theory.estimates import Estimate
from spec_t5x.training.distill import DistillOptions
from spec_t5x.training.distillation_losses import CROSS_ENTROPY
from spec_t5x.training.held_out_alpha import HeldOutAlpha
from spec_t5x.training.optimizers import OptimizerOptions
from spec_t5x.training.run_data import TrainingData
from spec_t5x.training.run_distill import KeptLayers, distill
from spec_t5x.training.trainer import TrainOptions

HELP = "alpha of a draft after equal steps down each objective of distillation"

# Objective, whose texts, and the share of steps on the draft's own.
RECIPES = (
    (CROSS_ENTROPY, "references", 0.0),
    ("forward_kl", "references", 0.0),
    (CROSS_ENTROPY, "target", 0.0),
    ("forward_kl", "target", 0.0),
    ("reverse_kl", "target", 0.0),
    ("jeffreys", "target", 0.0),
    ("total_variation", "target", 0.0),
    ("forward_kl", "target", 0.5),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectivesOptions:
    """What is trained alike, and the recipes that differ."""

    # Of each recipe a folder in it; a run that was cut goes on.
    output_dir: str
    # Texts of the target, which the recipes share, and tokenised pairs.
    cache_dir: str
    layers: KeptLayers
    data: TrainingData
    optimizer: OptimizerOptions
    training: TrainOptions
    distillation: DistillOptions
    recipes: tuple = RECIPES

    def __post_init__(self):
        if not self.recipes:
            raise InputError("recipes is (): give (objective, outputs, on_policy) of each")
        for recipe in self.recipes:
            if len(recipe) != 3:
                raise InputError(f"a recipe is {recipe!r}: give (objective, outputs, on_policy)")
            self.of(recipe)

    def of(self, recipe: Sequence) -> tuple[TrainOptions, DistillOptions]:
        """The settings of one recipe."""
        objective, outputs, on_policy = recipe
        # Measured at the end alone: which step was the best is not asked.
        training = dataclasses.replace(self.training, objective=objective, eval_period=0)
        distillation = dataclasses.replace(
            self.distillation, outputs=outputs, on_policy=on_policy, patience=0
        )
        return training, distillation


# As the command knows it (``cli.benchmark``).
Options = ObjectivesOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A draft of one recipe, after its last step."""

    objective: str
    outputs: str
    on_policy: float
    steps: int
    held_out: Sequence[HeldOutAlpha]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"held_out": [each.to_dict() for each in self.held_out]}


def run(
    options: ObjectivesOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: Any = None,
) -> Iterator[Row]:
    """Trains and measures recipe after recipe.

    Args:
      options: what to train.
      report: ``report(done, total, what)`` is told of each recipe.
      models: of it, the target (``cli.settings.Models``).
      decoding: not looked at.

    Raises:
      InputError: as ``run_distill.distill``, or a run's time was over before its steps.
    """
    del decoding
    for done, recipe in enumerate(options.recipes):
        objective, outputs, on_policy = recipe
        if report:
            report(done, len(options.recipes), f"{objective} on {outputs}")
        training, distillation = options.of(recipe)
        directory = Path(options.output_dir) / f"{objective}-{outputs}-{on_policy:g}"
        result = distill(
            output_dir=str(directory),
            target=models.target,
            data=options.data,
            optimizer=options.optimizer,
            options=training,
            distillation=distillation,
            layers=options.layers,
            vocabulary=models.vocabulary,
            cache_dir=options.cache_dir,
        )
        steps = int(result.state.step)
        if steps != training.steps:
            raise InputError(
                f"{directory} has taken {steps} of {training.steps} steps: run the same command "
                "again, or raise max_minutes"
            )
        yield Row(
            objective=objective,
            outputs=outputs,
            on_policy=on_policy,
            steps=steps,
            held_out=result.dev,
        )


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures, as JSON can hold them."""
    return {"rows": [row.to_dict() for row in rows]}


def table(rows: Sequence[Row]) -> str:
    """``table_of`` what was measured."""
    return table_of(to_dict(rows)["rows"])


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each recipe, in Markdown; ``to_dict``'s rows.

    Bold is an alpha whose interval lies above that of the first recipe.
    """
    temperatures = [each["temperature"] for each in rows[0]["held_out"]]
    gamma = rows[0]["held_out"][0]["gamma"]
    head = ["objective", "texts"]
    for temperature in temperatures:
        head += [f"alpha, T={temperature:g}", f"expected tokens, gamma {gamma}"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        own = row["on_policy"]
        texts = row["outputs"] + (f", {own:.0%} the draft's own" if own else "")
        cells = [row["objective"].replace("_", " "), texts]
        for first, each in zip(rows[0]["held_out"], row["held_out"], strict=True):
            cells += [
                _shown(each["alpha"], first["alpha"]),
                f"{formulas.expected_tokens(each['alpha']['value'], each['gamma']):.2f}",
            ]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shown(alpha: dict[str, Any], first: dict[str, Any]) -> str:
    estimate, least = Estimate(**alpha), Estimate(**first)
    text = f"{estimate.value:.3f}"
    if estimate.low is None:
        return text
    is_above = least.high is not None and estimate.low > least.high
    text = f"**{text}**" if is_above else text
    return f"{text} ({estimate.low:.3f}\u2013{estimate.high:.3f})"
