"""Drafts by name, as ``--draft`` and gin have them, made for a target.

    transformer[:DIR]    a smaller model (or just DIR)
    unigram[:DIR]        n-gram tables, from ``spec-t5x train-ngram``; also bigram and ngram
    copy[:MIN_MATCH]     the source, after the tokens that the output ends with
    uniform              any token
    eagle[:DIR]          a layer on the target's states, from ``spec-t5x distill``
    shared_encoder[:DIR] the same without states: a draft that shares its target's encoder
    early_exit[:LAYERS]  the target's first decoder layers, half of them by default
    int8, int4           the target's decoder with its weights rounded to so many bits
    mixed[:DRAFT]        copy where it proposes something, DRAFT (transformer) elsewhere

and those that the folders of ``contrib`` register. A directory alone may also hold n-gram tables or
another draft with a format. DIR is any name that ``loading.load`` takes, and may be left out where
the target is a packaged one. A T5X checkpoint, which has no vocabulary, takes the target's.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from spec_t5x import registry
from spec_t5x.checkpoints.fitting import fitted
from spec_t5x.checkpoints.huggingface import hub
from spec_t5x.checkpoints.loading import (
    PACKAGED_MODELS,
    find,
    find_directory,
    is_on_hub,
    open_model,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_if_there
from spec_t5x.checkpoints.storage.locations import GcsPath, locate
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.drafts.kinds import DraftKind, DraftOptions, Request, one_checkpoint
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.models.binding import Model

# A smaller model, which a directory of no other format holds.
TRANSFORMER = "transformer"
# The packaged targets and their packaged drafts, by kind.
PACKAGED_DRAFTS = {
    "ende-target": {"transformer": "ende-draft", "ngram": "ende-ngram", "eagle": "ende-eagle"},
    "summaries-target": {
        "transformer": "summaries-draft",
        "ngram": "summaries-ngram",
        "eagle": "summaries-eagle",
    },
    "lm-target": {"transformer": "lm-draft", "ngram": "lm-ngram"},
    # Most of its output is in its source: it is copied.
    "correct-target": {},
}


def make_draft(
    text: str | Path, target: LoadedModel, model: Model, options: DraftOptions | None = None
) -> Draft:
    """Makes the draft that ``text`` describes (see above).

    Args:
      text: a name, ``NAME:ARGUMENT``, or a directory.
      target: the checkpoint that the draft is for.
      model: the same, bound for decoding; some drafts share its parameters.
      options: settings of the draft.

    Raises:
      InputError: an unknown name, an argument or a setting that it does not take, or a
        checkpoint of another vocabulary.
    """
    options, text = options or DraftOptions(), str(text)
    kind = registry.find("draft", kind_of(text))
    if options.settings is not None and not kind.has_temperature:
        raise InputError(f"draft {text!r} has no temperature of its own: leave it out")
    if kind.needs_encoder and not target.config.has_source:
        raise InputError(
            f"draft {text!r} is for encoder-decoder targets and {target.directory} is a "
            "decoder alone: use transformer, an n-gram draft or copy"
        )

    def packaged(name: str) -> str:
        directory = target.directory
        drafts = PACKAGED_DRAFTS.get(directory.name, {})
        if directory != PACKAGED_MODELS / directory.name or name not in drafts:
            raise InputError(
                f"draft {name!r} of target {directory}: give its directory, as in {name}:DIR"
            )
        return drafts[name]

    request = Request(
        target=target,
        model=model,
        options=options,
        make=lambda other, options: make_draft(other, target, model, options),
        packaged=packaged,
    )
    return kind.make(request, text.partition(":")[2] if _is_named(text) else text)


def find_models(target: str | Path | GcsPath, drafts: Iterable[str | Path]) -> None:
    """Finds a target and the models of its drafts, and then downloads those on the Hub."""
    names = [target, *(name for draft in drafts for name in _checkpoints_of(str(draft)))]
    for name in names:
        find(name)
    for name in filter(is_on_hub, names):
        hub.download_weights(name)


def _checkpoints_of(text: str) -> list[str]:
    """Lists the checkpoints that a draft's text names, those of its inner drafts included."""
    name = kind_of(text)
    if not _is_named(text):
        return [text]
    kind, argument = registry.find("draft", name), text.partition(":")[2]
    inner = (found for draft in kind.drafts(argument) for found in _checkpoints_of(draft))
    return [*kind.checkpoints(argument), *inner]


def kind_of(text: str) -> str:
    """Finds the kind of a draft by its name, or by its directory's format."""
    if _is_named(text):
        return text.partition(":")[0]
    if isinstance(locate(text), GcsPath):
        return TRANSFORMER
    try:
        directory = find_directory(text)
    except InputError as error:
        if is_on_hub(text):
            raise
        raise InputError(
            f"no draft {text!r}: give the directory of a checkpoint, OWNER/NAME of one on the "
            f"Hugging Face Hub, or one of {', '.join(registry.names('draft'))}"
        ) from error
    format = read_if_there(directory / CONFIG_NAME).get("format")
    kinds = registry.find_all("draft").items() if format else ()
    return next((name for name, kind in kinds if kind.format == format), TRANSFORMER)


def _is_named(text: str) -> bool:
    """Tells whether a draft's text begins with a name, and is no directory of that name."""
    known = registry.names("draft")
    return text.partition(":")[0] in known and not Path(text).expanduser().is_dir()


def model_draft(request: Request, argument: str) -> TransformerDraft:
    """Makes a draft of the model named ``argument``, with its tables fitted to the target's."""
    target, name = request.target, argument or request.packaged(TRANSFORMER)
    stored = open_model(name)
    rows, own_rows = target.config.vocab_size, stored.config.vocab_size
    if stored.vocabulary is None and own_rows != rows:
        raise InputError(
            f"target {target.directory} embeds {rows} ids and draft {stored.directory}, "
            f"which has no vocabulary, {own_rows}: convert it with its vocabulary, or give a "
            "draft of the target's"
        )
    stored = dataclasses.replace(stored, vocabulary=stored.vocabulary or target.vocabulary)
    if type(stored.config) is not type(target.config):
        raise InputError(
            f"target {target.directory} has a {type(target.config).__name__} and "
            f"draft {stored.directory} a {type(stored.config).__name__}: give a draft of the "
            "target's kind"
        )
    options = request.options
    loaded = fitted(stored, target).load(dtype=options.dtype, for_decoding=True)
    return TransformerDraft(loaded.bind(options.weights), settings=options.settings)


KIND = DraftKind(make=model_draft, checkpoints=one_checkpoint)
