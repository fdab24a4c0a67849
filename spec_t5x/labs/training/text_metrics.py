"""BLEU, ROUGE, or a task's metrics of the texts that a model in training generates.

Plain decoding at temperature 0 generates the texts, with the parameters rounded as an export rounds
them, so that ``spec-t5x evaluate`` computes the same figures for the exported model.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import gin
import jax

from spec_t5x.checkpoints.native import rounded
from spec_t5x.checkpoints.storage.tensors import array_tensors, read_params, read_tensors
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import check_at_least
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.labs.training.training_log import TrainingProgress
from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.dtypes import AUTO, resolve_dtype
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.names import INT8
from spec_t5x.options import check_types
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Options of scoring the texts that a model in training generates."""

    period: int = 0  # steps between scorings; 0 scores at the end only
    examples: int | None = None  # number of held-out pairs of each task, from the first; None: all
    batch_size: int = 32  # number of sources decoded together

    def __post_init__(self):
        check_types(self)
        check_at_least(self, examples=1, batch_size=1, period=0)


gin.external_configurable(MetricsOptions, module="spec_t5x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextMetrics:
    """A scorer of a model in training, which stores the texts in ``directory/predictions/``."""

    sets: Sequence[TextPairs]  # with ids
    directory: Path
    config: NetworkConfig
    vocabulary: Vocabulary
    options: MetricsOptions
    # Maximal numbers of tokens of a source and of an output, EOS included.
    longest: tuple[int, int]
    export_dtype: str

    def score(
        self, step: int, params: PyTree, progress: TrainingProgress
    ) -> dict[str, dict[str, float]]:
        """Returns scores, by task and metric, of texts generated with ``params``; records them.

        Raises:
            InputError: the predictions cannot be written.
        """
        computed = resolve_dtype(AUTO)
        config = dataclasses.replace(self.config, dtype=computed, dropout_rate=0.0)
        params = rounded_params(params, stored=self.export_dtype, computed=computed)
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
        found, curves = {}, {}
        for each in self.sets:
            answers = generator.generate_ids(each.ids, options)
            texts = [output.output for (output,) in answers]
            found[each.name] = each.metric([target for _, target in each.pairs], texts)
            curves |= {f"{each.name} {name}": value for name, value in found[each.name].items()}
            self._write(step, each, texts)
        text = "  ".join(f"{name} {value:.2f}" for name, value in curves.items())
        progress.note(step, text, curves, metrics=found)
        return found

    def _write(self, step: int, scored: TextPairs, texts: Sequence[str]) -> None:
        path = self.directory / "predictions" / f"{scored.name}-{step:06}.jsonl"
        lines = (
            # The keys of seqio's JSONLogger.
            {"input": {"inputs_pretokenized": source}, "prediction": text, "target": str(target)}
            for (source, target), text in zip(scored.pairs, texts, strict=True)
        )
        with reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(line).encode() + b"\n" for line in lines))


def rounded_params(params: PyTree, stored: str, computed: str) -> PyTree:
    """Rounds parameters to dtype ``stored``, as an export does, and converts to ``computed``."""
    if stored != INT8:
        return jax.tree.map(lambda leaf: leaf.astype(stored).astype(computed), params)
    arrays = read_tensors(array_tensors(params), "the parameters", "float32")
    split = array_tensors(dict(rounded.split_exactly(arrays)))
    joined = rounded.join(split, "the parameters", "bfloat16")
    # On the same devices as before: one device may not hold all.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return read_params(joined, "the parameters", dtype=computed, shardings=shardings)
