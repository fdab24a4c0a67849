"""BLEU, ROUGE, or what a task reports, of the texts that a model in training writes.

The texts are decoded greedily by the package's plain loop, with the parameters as they
would be exported: the figures are those that ``spec-t5x evaluate`` finds of the exported
model.
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

# Ids of the texts that a model writes for the ids of some sources, EOS included in both.
Write = Callable[[Sequence[list[int]]], Sequence[Sequence[int]]]


@runtime_checkable
class Evaluator(Protocol):
    """Has sources, and scores texts for them: ``data.task_evaluator.TaskEvaluator``."""

    def evaluate(self, step: int, write: Write) -> dict[str, dict[str, float]]:
        """Figures by task and name of what is written after ``step`` steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """When a training's texts are scored, and how many."""

    # In steps; always at the end, and with 0 only there.
    period: int = 0
    # The first so many of what is held out, of each task; None is all.
    examples: int | None = None
    # Sources decoded together.
    batch_size: int = 32

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
        """Scores what a model writes.

        Args:
            evaluator: has the sources and the metrics.
            config: the model.
            vocabulary: its ids.
            options: when, and how.
            longest: tokens of a source and of a text at most, EOS included.
            export_dtype: 'bfloat16' or 'float32'.
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
    """Of parameters: stored in one type and read in another."""

    @jax.jit
    def as_exported(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(stored)).astype(computed), params)

    return as_exported
