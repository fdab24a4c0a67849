"""BLEU, ROUGE, or a task's own metrics, of the texts that a model in training generates.

They are decoded greedily by the package's plain loop, with the parameters as they would be
exported, so that ``spec-t5x evaluate`` finds the same figures for the exported model.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import gin
import jax
import jax.numpy as jnp

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import check_at_least
from spec_t5x.generation import GenerateOptions, Generator, all_answered
from spec_t5x.machine.dtypes import AUTO, resolve_dtype
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.training.training_log import TrainingProgress
from spec_t5x.types import EOS_ID, PyTree

# Output ids for the ids of some sources, EOS included in both.
Write = Callable[[Sequence[list[int]]], Sequence[Sequence[int]]]
# Scores by task and name of the outputs after so many steps: ``TaskEvaluator.evaluate``.
Evaluate = Callable[[int, Write], dict[str, dict[str, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """When the outputs of a model in training are scored, and how many."""

    period: int = 0  # in steps; 0 scores at the end only
    examples: int | None = None  # the first so many held-out sources of each task; None is all
    batch_size: int = 32  # sources decoded together

    def __post_init__(self):
        check_at_least(self, examples=1, batch_size=1, period=0)


gin.external_configurable(MetricsOptions, module="spec_t5x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextMetrics:
    """Has a model's outputs scored."""

    evaluate: Evaluate
    config: T5Config
    vocabulary: Vocabulary
    options: MetricsOptions
    # Maximal tokens of a source and of an output, EOS included.
    longest: tuple[int, int]
    export_dtype: str

    def score(
        self, step: int, params: PyTree, progress: TrainingProgress
    ) -> dict[str, dict[str, float]]:
        """Scores by task and name after ``step`` steps; shows and records them."""
        computed = resolve_dtype(AUTO)
        config = dataclasses.replace(self.config, dtype=computed, dropout_rate=0.0)
        params = _rounded(params, stored=self.export_dtype, computed=computed)
        generator = Generator(
            target=T5Model.create(params, config),
            vocabulary=self.vocabulary,
            max_source_len=self.longest[0],
        )
        options = GenerateOptions(
            batch_size=self.options.batch_size,
            max_source_len=self.longest[0],
            max_decode_len=self.longest[1],
        )

        def write(sources: Sequence[list[int]]) -> list[list[int]]:
            # An empty source is one that says nothing.
            answers = generator.generate_ids((ids or [EOS_ID] for ids in sources), options)
            return [output.output_ids for (output,) in all_answered(answers)]

        found = self.evaluate(step, write)
        curves = {
            f"{task} {name}": value
            for task, values in found.items()
            for name, value in values.items()
        }
        text = "  ".join(f"{name} {value:.2f}" for name, value in curves.items())
        progress.note(step, text, curves, metrics=found)
        return found


@functools.partial(jax.jit, static_argnames=("stored", "computed"))
def _rounded(params: PyTree, stored: str, computed: str) -> PyTree:
    """The parameters as if they were stored in one type and read in another."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(stored)).astype(computed), params)
