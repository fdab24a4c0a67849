"""BLEU, ROUGE, or a task's own metrics, of the texts that a model in training generates.

They are decoded greedily by the package's plain loop, with the parameters as they would be
exported, so that ``spec-t5x evaluate`` finds the same figures for the exported model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import gin
import jax
import jax.numpy as jnp

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator, all_answered
from spec_t5x.machine.dtypes import AUTO, resolve_dtype
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.types import EOS_ID, PyTree

# Output ids for the ids of some sources, EOS included in both.
Write = Callable[[Sequence[list[int]]], Sequence[Sequence[int]]]


@runtime_checkable
class Evaluator(Protocol):
    """Has sources, and scores texts for them: ``data.task_evaluator.TaskEvaluator``."""

    def evaluate(self, step: int, write: Write) -> dict[str, dict[str, float]]:
        """Scores by task and name of the outputs after ``step`` steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """When the outputs of a model in training are scored, and how many."""

    period: int = 0  # in steps; 0 scores at the end only
    examples: int | None = None  # the first so many held-out sources of each task; None is all
    batch_size: int = 32  # sources decoded together

    def __post_init__(self):
        for name in ("examples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"MetricsOptions.{name} is {value}: give at least 1")
        if self.period < 0:
            raise InputError(
                f"MetricsOptions.period is {self.period}: give steps, or 0 for the end only"
            )


gin.external_configurable(MetricsOptions, module="spec_t5x")


class TextMetrics:
    """A ``trainer.Scorer`` by the metrics of tasks."""

    def __init__(
        self,
        evaluator: Evaluator,
        config: T5Config,
        vocabulary: Vocabulary,
        options: MetricsOptions,
        *,
        longest: tuple[int, int],
        export_dtype: str,
    ):
        """Takes the evaluator, the model's sizes, and how it decodes and is exported.

        ``longest`` are the maximal tokens of a source and of an output, EOS included.
        """
        self.period = options.period
        self._evaluator, self._vocabulary = evaluator, vocabulary
        computed = resolve_dtype(AUTO)
        self._config = dataclasses.replace(config, dtype=computed, dropout_rate=0.0)
        self._as_exported = _rounding(export_dtype, computed)
        self._options = GenerateOptions(
            batch_size=options.batch_size,
            max_source_len=longest[0],
            max_decode_len=longest[1],
        )

    def score(
        self, step: int, params: PyTree, reporter: ProgressReporter
    ) -> dict[str, dict[str, float]]:
        """The figures of each task, which are printed and recorded."""
        generator = Generator(
            target=T5Model.create(self._as_exported(params), self._config),
            vocabulary=self._vocabulary,
            max_source_len=self._options.max_source_len,
        )

        def write(sources: Sequence[list[int]]) -> list[list[int]]:
            # An empty source is one that says nothing.
            answers = generator.generate_ids((ids or [EOS_ID] for ids in sources), self._options)
            return [output.output_ids for (output,) in all_answered(answers)]

        found = self._evaluator.evaluate(step, write)
        curves = {
            f"{task} {name}": value
            for task, values in found.items()
            for name, value in values.items()
        }
        text = "  ".join(f"{name} {value:.2f}" for name, value in curves.items())
        reporter.note(step, text, curves, metrics=found)
        return found


def _rounding(stored: str, computed: str) -> Callable[[PyTree], PyTree]:
    """Rounds parameters as if they were stored in one type and read in another."""

    @jax.jit
    def as_exported(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(stored)).astype(computed), params)

    return as_exported
