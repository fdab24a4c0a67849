"""What is compared: one target with its draft and inputs, prepared for everybody."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load, open_model
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.errors import InputError
from spec_t5x.experiments.benchmark import generator_of
from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.experiments.neighbours.options import NeighboursOptions
from spec_t5x.experiments.neighbours.random_weights import write_random
from spec_t5x.experiments.reproduction.example_texts import SENTENCES
from spec_t5x.experiments.text_source import read_texts
from spec_t5x.generation import GenerateOptions
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID

_TRANSFORMER = "transformer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A target and what it is to decode."""

    # Of the table.
    title: str
    job: Job
    config: T5Config
    # Token ids of every source, end of sequence included.
    inputs: list[list[int]]


def pair_with_texts(
    options: NeighboursOptions, models: Any, decoding: GenerateOptions, folder: Path
) -> Given:
    """The run's own target and draft, and real text.

    Args:
      options: which inputs, and the number of threads.
      models: ``cli.settings.Models``.
      decoding: lengths.
      folder: for the copies of the weights, in float32.

    Raises:
      InputError: a checkpoint, a file or a setting that cannot be used here.
    """
    _check(models, decoding)
    target = load(models.target, dtype="float32", vocabulary=models.vocabulary)
    if not isinstance(target.config, T5Config):
        raise InputError(f"target {models.target} is a decoder alone: compare an encoder-decoder")
    generator = generator_of(target)
    if options.data or options.mixture_or_task:
        texts = read_texts(options, generator, decoding, options.num_inputs)
    else:
        texts = SENTENCES[: options.num_inputs]
    convert(
        models.target, folder / "target", to="huggingface", dtype="float32",
        vocabulary=models.vocabulary,
    )  # fmt: skip
    draft = models.draft_name()
    job = Job(
        target=str(models.target),
        vocabulary=models.vocabulary,
        target_copy=str(folder / "target"),
        draft=draft,
        draft_copy=_copy_draft(models, draft, folder / "draft"),
        scratch=str(folder),
        max_source_len=decoding.max_source_len or generator.max_source_len,
        max_decode_len=decoding.max_decode_len,
        threads=options.num_threads,
    )
    return Given(
        title=" with ".join(Path(name).name for name in (models.target, draft) if name),
        job=job,
        config=target.config,
        inputs=[generator.tokenize(text, decoding) for text in texts],
    )


def sizes_with_random_weights(options: NeighboursOptions, folder: Path) -> Iterator[Given]:
    """One after the other; each finds its weights in ``folder`` while it is at hand."""
    draft = folder / "draft"
    write_random(draft, options.draft_size, options.seed + 1)
    for name in options.sizes:
        target = folder / name
        config = write_random(target, name, options.seed)
        draw = np.random.default_rng(options.seed).integers
        ids = draw(3, config.vocab_size, options.source_len - 1).tolist()
        job = Job(
            target=str(target),
            target_copy=str(target),
            # A model is no draft of itself.
            draft=None if name == options.draft_size else options.draft_size,
            draft_copy=str(draft),
            scratch=str(target),
            max_source_len=options.source_len,
            max_decode_len=options.target_len,
            threads=options.num_threads,
            alpha=options.alpha,
        )
        yield Given(title=name, job=job, config=config, inputs=[[*ids, EOS_ID]])
        # A large one takes gigabytes, and each implementation may have made another copy.
        shutil.rmtree(target)


def _check(models: Any, decoding: GenerateOptions) -> None:
    """Settings that not everybody has."""
    wrong = {
        "temperature": (decoding.temperature, 0.0),
        "beams": (decoding.beams, 0),
        "batch_size": (decoding.batch_size, 1),
        "num_decodes": (decoding.num_decodes, 1),
        "draft_temperature": (models.draft_temperature, None),
        "adaptive": (models.adaptive, None),
    }
    for name, (value, wanted) in wrong.items():
        if value != wanted:
            raise InputError(
                f"{name} is {value}: implementations are compared with {wanted}, leave it out"
            )


def _copy_draft(models: Any, draft: str | None, directory: Path) -> str | None:
    """The draft's weights in Hugging Face's format; None if it is no T5."""
    if draft is None:
        return None
    kind, _, argument = draft.partition(":")
    name = argument if kind == _TRANSFORMER else draft
    if not name:
        packaged = PACKAGED_DRAFTS.get(models.target, {})
        name = packaged.get(_TRANSFORMER, "")
    try:
        stored = open_model(name, vocabulary=models.vocabulary)
    except InputError:
        # Such as an n-gram table, or a draft that has no weights.
        return None
    if not isinstance(stored.config, T5Config):
        return None
    convert(name, directory, to="huggingface", dtype="float32", vocabulary=models.vocabulary)
    return str(directory)
