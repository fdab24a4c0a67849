"""Drafts by name, as flags and gin files give them, made for a target.

    transformer[:DIR]    a smaller model (or just DIR)
    unigram[:DIR]        n-gram tables, from ``spec-t5x train-ngram``; also bigram and ngram
    copy[:MIN_MATCH]     the tokens that follow the output's last ones in the source or the output
    uniform              tokens drawn uniformly from the vocabulary
    eagle[:DIR]          a decoder layer on the target's states, from ``spec-t5x distill``
    shared_encoder[:DIR] a decoder that uses the target's encoder, from ``spec-t5x distill``
    early_exit[:LAYERS]  the target's first decoder layers, half of them by default
    int8, int4           the target's decoder with its weights rounded to 8 or 4 bits
    mixed[:DRAFT]        ``copy`` if it finds a match, else DRAFT (transformer by default)

and those that folders of ``contrib`` register. For a directory alone, the format in its config.json
selects the kind. DIR is any name that ``loading.load`` takes, and may be left out if a draft
of this kind is packaged with the target. A T5X checkpoint without a vocabulary takes the target's.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from spec_t5x import registry
from spec_t5x.checkpoints import loading
from spec_t5x.checkpoints.huggingface import hub
from spec_t5x.checkpoints.native.target_drafts import MARK
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_if_there
from spec_t5x.checkpoints.storage.locations import GcsPath, Location, locate
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.drafts.kinds import DraftKind, DraftOptions, Request
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, did_you_mean
from spec_t5x.interfaces import Draft
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.names import AUTO
from spec_t5x.options import GenerateOptions
from spec_t5x.verifiers import largest_limit

# The kind of a directory whose format belongs to no other kind: a smaller model.
TRANSFORMER = "transformer"
# For each packaged target, the names of its packaged drafts by kind. The first is the default.
PACKAGED_DRAFTS = {
    "t5-target": {"eagle": "t5-eagle", "transformer": "t5-draft", "ngram": "t5-ngram"},
    "lm-target": {"transformer": "lm-draft", "ngram": "lm-ngram"},
}


def make_draft(
    text: str | Path, target: LoadedModel, model: CachedModel, options: DraftOptions | None = None
) -> Draft:
    """Makes the draft that ``text`` describes (see above): a name, NAME:ARGUMENT or a directory.

    The draft is for ``target``, and may share parameters of ``model``, which is ``target`` bound.

    Raises:
      InputError: the name is unknown, the draft does not take the argument or a setting, the
        target lacks the encoder that it needs, or their vocabularies differ.
    """
    options, text = options or DraftOptions(), str(text)
    kind, argument = checked_parts(text, options, target.config.has_source)[0]

    def make(other: str, options: DraftOptions) -> Draft:
        # The weights may be those of the draft that takes the other one.
        weights = options.weights if any(k.has_weights for k, _ in _parts(other)) else AUTO
        return make_draft(other, target, model, dataclasses.replace(options, weights=weights))

    request = Request(target=target, model=model, options=options, make=make)
    return kind.make(request, _given(kind, argument, target.directory))


def checked_parts(
    text: str, options: DraftOptions, has_source: bool
) -> list[tuple[DraftKind, str]]:
    """Lists kind and argument of a draft and its inner drafts; refuses options that do not fit."""
    parts = list(_parts(text))
    if not has_source and any(kind.needs_encoder for kind, _ in parts):
        raise InputError(
            f"draft {text!r} is for encoder-decoders and the target is decoder-only: give "
            "transformer, an n-gram draft or copy"
        )
    if options.settings is not None and not any(kind.has_temperature for kind, _ in parts):
        raise InputError(f"draft {text!r} takes no temperature: leave draft_temperature out")
    if options.weights != AUTO and not any(kind.has_weights for kind, _ in parts):
        raise InputError(f"draft {text!r} has no weights of a model: leave draft_weights out")
    return parts


def packaged_drafts(target: Location) -> dict[str, str]:
    """Returns the names of a packaged target's drafts by kind; none for another target."""
    return PACKAGED_DRAFTS.get(target.name, {}) if target.parent == loading.PACKAGED_MODELS else {}


def _given(kind: DraftKind, argument: str, target: Location) -> str:
    """Returns a draft's argument or, in place of "", the name of a packaged target's draft."""
    if argument or kind.packaged is None:
        return argument
    drafts, name = packaged_drafts(target), kind.packaged
    if name not in drafts:
        raise InputError(f"draft {name!r} is not packaged for {target}: give {name}:DIR")
    return drafts[name]


def find_models(
    target: str | Path | GcsPath,
    drafts: Iterable[str | Path | None],
    options: DraftOptions | None = None,
    vocabulary: VocabularyLike | None = None,
    check: Callable[[LoadedModel], object] = lambda target: None,
) -> StoredModel:
    """Finds and opens a target, and its drafts' models; downloads weights that are on the Hub.

    Before a download, which may take an hour, all is opened and compared but the weights, and
    ``check`` is called with the target. This is repeated with the weights, which are not read.
    """
    directory, has_source, parts = loading.find(target), loading.has_source(target), []
    for draft in (str(each) for each in drafts if each is not None):
        for kind, argument in checked_parts(draft, options or DraftOptions(), has_source):
            parts.append((kind, _given(kind, argument, directory)))
    models = [argument for kind, argument in parts if kind.has_checkpoint]
    for name in models:
        loading.find(name)

    def opened() -> StoredModel:
        stored = loading.open_model(target, vocabulary=vocabulary, downloads=False)
        check(stored.unread())
        marked = stored.unread(MARK) if parts else None
        stored.drafts.update({(kind, name): kind.open(name, marked) for kind, name in parts})
        return stored

    if absent := list(filter(loading.is_absent, dict.fromkeys([target, *models]))):
        opened()
        hub.download_weights(*absent)
    return opened()


def check_draft(text: str, options: GenerateOptions, given: DraftOptions) -> None:
    """Raises ``InputError`` for trees or a search that the draft lacks, and for too large a tree.

    If a kind does not name the class of its drafts, the loops check the draft.
    """
    kind = next(_parts(text))[0].draft
    if kind is None or options.gamma == 0:
        return
    searches = kind is TransformerDraft and given.settings is None
    if options.beams and options.gamma != AUTO and not searches:
        raise InputError(
            f"beams is {options.beams}, gamma {options.gamma} and draft {text!r}, but in a beam "
            "search only a model without draft_temperature drafts: give a separate one, or gamma 0"
        )
    verifier = options.make_verifier()
    if verifier.tree(1) is not None and not hasattr(kind, "propose_tree"):
        raise InputError(
            f"verifier is {options.verifier!r} and draft {text!r} proposes no trees: give a "
            "verifier of chains, or a draft that proposes trees, such as a model or eagle"
        )
    # Both raise for a tree that is too large.
    largest_limit(verifier, of_chains=1) if options.gamma == AUTO else verifier.tree(options.gamma)


def _parts(text: str) -> Iterator[tuple[DraftKind, str]]:
    """Yields kind and checked argument of a draft and of the drafts that it names."""
    kind = registry.find("draft", kind_of(text))
    # A directory's name is itself the argument.
    argument = text.partition(":")[2] if _is_named(text) else text
    if not isinstance(kind, DraftKind):
        raise InputError(f"draft {kind_of(text)!r} is registered as {kind!r}: give a DraftKind")
    kind.check(text, argument)
    yield kind, argument
    for inner in kind.drafts(argument):
        yield from _parts(inner)


def kind_of(text: str) -> str:
    """Returns a draft's kind: the name in ``text``, or its directory's (else a transformer)."""
    if _is_named(text):
        return text.partition(":")[0]
    if isinstance(locate(text), GcsPath):
        return TRANSFORMER
    try:
        directory = loading.find_directory(text)
    except InputError as error:
        if loading.is_on_hub(text):
            raise
        kinds, word = registry.names("draft"), text.partition(":")[0]
        models = sorted({*loading.packaged_names()} - {*PACKAGED_DRAFTS})
        hint = did_you_mean(word, kinds) or did_you_mean(word, models, cutoff=0.85)
        raise InputError(
            f"no draft {text!r}{hint}: give the directory of a checkpoint, OWNER/NAME of one on "
            f"the Hugging Face Hub, or one of {', '.join([*kinds, *models])}"
        ) from error
    format = read_if_there(directory / CONFIG_NAME).get("format")
    kinds = registry.find_all("draft").items() if format else ()
    return next((name for name, kind in kinds if kind.format == format), TRANSFORMER)


def _is_named(text: str) -> bool:
    """Tells whether a draft's text begins with a kind's name, and is no directory here."""
    return text.partition(":")[0] in registry.names("draft") and not Path(text).is_dir()


def _open(argument: str, target: LoadedModel, downloads: bool = False) -> StoredModel:
    """Opens the model ``argument``, resized to the target's ids."""
    stored = loading.open_model(argument, downloads=downloads)
    rows, own_rows = target.config.vocab_size, stored.config.vocab_size
    if stored.vocabulary is None and own_rows != rows:
        raise InputError(
            f"target {target.directory} embeds {rows} ids and draft {stored.directory} {own_rows}, "
            "and has no vocabulary: convert it with one, or give a draft of as many ids"
        )
    stored = dataclasses.replace(stored, vocabulary=stored.vocabulary or target.vocabulary)
    if type(stored.config) is not type(target.config):
        raise InputError(
            f"target {target.directory} has a {type(target.config).__name__} and "
            f"draft {stored.directory} a {type(stored.config).__name__}: give a draft of the "
            "target's kind"
        )
    return fitted(stored, target)


def fitted(draft: StoredModel, target: LoadedModel) -> StoredModel:
    """Returns the draft with the target's number of ids; refuses ids that differ in meaning.

    Models that share a vocabulary may embed different numbers of ids: T5's have 32100 or 32128.
    The target stays as it is, and so does its distribution. A larger draft loses its last rows; a
    smaller one gets rows of zeros with masked logits, unless it is decoder-only, which is refused.
    """
    loading.check_same_vocabulary(target, draft)
    draft.check()
    size, added = target.config.vocab_size, draft.config.added_rows
    more = size - draft.config.vocab_size
    if not more:
        return draft
    changes = {"vocab_size": size}
    if not draft.config.has_source:
        if more > 0:
            raise InputError(
                f"target {target.directory} embeds {size} ids and draft {draft.directory} "
                f"{draft.config.vocab_size}: give a draft with at least as many"
            )
    elif added or more > 0:
        # ``added_rows`` counts id 0, which it masks, too: padding, which no text contains.
        changes["added_rows"] = max(max(added, 1) + more, 1)
    config = dataclasses.replace(draft.config, **changes)
    shapes = expected_shapes(config)
    tensors = draft.tensors and {
        path: _resized(tensor, shapes[path]) for path, tensor in draft.tensors.items()
    }
    return dataclasses.replace(draft, config=config, tensors=tensors, vocabulary=target.vocabulary)


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Cuts a tensor to ``shape``, or pads it with zeros, at the end of each axis."""

    def read(index):
        bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
        kept = np.minimum(bounds, np.reshape(tensor.shape, (-1, 1)))
        part = tensor.read(tuple(slice(*each) for each in kept.tolist()))
        return np.pad(part, [(0, missing) for missing in np.diff(bounds - kept)[:, 0]])

    return tensor if shape == tensor.shape else dataclasses.replace(tensor, shape=shape, read=read)


def model_draft(request: Request, argument: str) -> TransformerDraft:
    """Loads the model ``argument``, resized to the target's ids."""
    options, target = request.options, request.target
    stored = target.drafts.pop((KIND, argument), None) or _open(argument, target, downloads=True)
    given = {"shardings": options.shardings, "weights": options.weights}
    loaded = stored.load(dtype=options.dtype, for_decoding=True, **given, option="draft_weights")
    return TransformerDraft(loaded.bind(), settings=options.settings)


KIND = DraftKind(
    make=model_draft,
    draft=TransformerDraft,
    open=_open,
    has_checkpoint=True,
    packaged=TRANSFORMER,
    has_temperature=True,
    has_weights=True,
)
