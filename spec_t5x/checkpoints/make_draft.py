"""Drafts by name: what ``--draft`` and gin say, made into a draft for a target.

    transformer[:DIR]    a smaller model (or just DIR)
    unigram[:DIR]        n-gram tables, from ``spec-t5x train-ngram``
    bigram[:DIR]
    ngram[:DIR]
    copy[:MIN_MATCH]     the source, from where the output has come to in it
    uniform              any token
    medusa[:DIR]         heads on the target, from ``spec-t5x train-heads``
    eagle[:DIR]          a layer that goes on from the target's states, from ``spec-t5x distill``
    early_exit[:LAYERS]  the target's own first decoder layers, half of them by default
    int8                 the target's own decoder with its weights rounded to 8 bits
    int4                 the same in 4 bits
    mixed[:DRAFT]        copy where it proposes something, DRAFT (transformer) elsewhere
    cascade[:DIR,DRAFT]  the model in DIR, or the target in int8 or int4, itself sped up by
                         DRAFT (bigram)

A directory alone may also hold n-gram tables, heads, or a draft that shares its target's
encoder (``spec-t5x distill``). A model may be named as ``loading.load`` names it, as OWNER/NAME on
the Hugging Face Hub. DIR may be left out where the target is a packaged one. A
T5X checkpoint, which has no vocabulary, is taken to have the target's.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.fitting import fitted
from spec_t5x.checkpoints.loading import (
    PACKAGED_MODELS,
    find_all,
    find_directory,
    is_on_hub,
    open_model,
)
from spec_t5x.checkpoints.own import ngram_tables, target_drafts
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json
from spec_t5x.checkpoints.storage.locations import GcsPath, locate
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.drafts.cascade import CascadeDraft
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.heads import MedusaDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.binding import Model
from spec_t5x.models.gpt import GPTConfig
from spec_t5x.models.heads import T5Heads
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, INT4, INT8
from spec_t5x.sampling.distributions import Sampling

# The packaged targets and their packaged drafts, by kind.
PACKAGED_DRAFTS = {
    "ende-target": {"transformer": "ende-draft", "ngram": "ende-ngram", "eagle": "ende-eagle"},
    "summaries-target": {
        "transformer": "summaries-draft",
        "ngram": "summaries-ngram",
        "eagle": "summaries-eagle",
    },
    "lm-target": {"transformer": "lm-draft", "ngram": "lm-ngram"},
    # What it writes is mostly in its source: it is copied.
    "correct-target": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Settings that drafts share."""

    # How the draft samples; None takes the target's settings.
    settings: Sampling | None = None
    # What its networks compute in; "auto" is the type that the platform is quick in.
    dtype: str = "auto"
    # Of a model that drafts: "auto" is what the checkpoint has; "int8", "int4" round its matrices.
    weights: str = AUTO

    def __post_init__(self):
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))


def make_draft(
    text: str | Path, target: LoadedModel, model: Model, options: DraftOptions | None = None
) -> Draft:
    """The draft that ``text`` describes (see above).

    Args:
      text: a name, ``NAME:ARGUMENT``, or a directory.
      target: the checkpoint that the draft is for.
      model: the same, bound for decoding; some drafts share its parameters.
      options: settings of the draft.

    Raises:
      InputError: an unknown name, an argument or a setting that it does not take, or a
        checkpoint of another vocabulary.
    """
    return _Maker(target, model, options or DraftOptions()).make(str(text))


def find_models(target: str | Path | GcsPath, drafts: Iterable[str | Path]) -> None:
    """Finds what a target and its drafts are read from, before any of it is loaded.

    What lies on the Hugging Face Hub is downloaded.

    Raises:
      InputError: there is no such checkpoint, or it cannot be downloaded.
    """
    find_all(target, *(name for draft in drafts for name in _checkpoints_of(str(draft))))


def _checkpoints_of(text: str) -> list[str]:
    """The checkpoints that a draft's text names."""
    name = kind_of(text)
    if not _is_named(text):
        return [text]
    argument = text.partition(":")[2]
    if name == "mixed":
        return _checkpoints_of(argument) if argument else []
    if name == "cascade":
        middle, _, inner = argument.partition(",")
        own = [middle] if middle and middle not in BITS else []
        return own + (_checkpoints_of(inner) if inner else [])
    return [argument] if argument and name in _WITH_DIRECTORY else []


@dataclasses.dataclass(frozen=True)
class _Maker:
    target: LoadedModel
    model: Model
    options: DraftOptions

    def make(self, text: str) -> Draft:
        name = kind_of(text)
        argument = text.partition(":")[2] if _is_named(text) else text
        self._check(name, text)
        return (NAMES | {_SHARED: _Maker._shared_encoder})[name](self, argument)

    def _check(self, name: str, text: str) -> None:
        """Refuses the options and the target that a draft cannot have."""
        if self.options.settings is not None and name in _WITHOUT_TEMPERATURE:
            raise InputError(f"draft {text!r} has no temperature of its own: leave it out")
        if name in _OF_ENCODER_DECODERS and isinstance(self.target.config, GPTConfig):
            raise InputError(
                f"draft {text!r} is for encoder-decoder targets and {self.target.directory} is a "
                "decoder alone: use transformer, an n-gram draft or copy"
            )

    def _transformer(self, argument: str) -> Draft:
        name = argument or self._packaged("transformer")
        stored = open_model(name)
        rows, own_rows = self.target.config.vocab_size, stored.config.vocab_size
        if stored.vocabulary is None and own_rows != rows:
            raise InputError(
                f"target {self.target.directory} embeds {rows} ids and draft {stored.directory}, "
                f"which has no vocabulary, {own_rows}: convert it with its vocabulary, or give a "
                "draft of the target's"
            )
        # A T5X checkpoint has no vocabulary; the target's must be its own in any case.
        stored = dataclasses.replace(stored, vocabulary=stored.vocabulary or self.target.vocabulary)
        if type(stored.config) is not type(self.target.config):
            raise InputError(
                f"target {self.target.directory} has a {type(self.target.config).__name__} and "
                f"draft {stored.directory} a {type(stored.config).__name__}: give a draft of the "
                "target's kind"
            )
        stored = fitted(stored, self.target)
        loaded = stored.load(dtype=self.options.dtype, for_decoding=True)
        return TransformerDraft(
            loaded.bind(self.options.weights),
            settings=self.options.settings,
        )

    def _ngram(self, argument: str, order: int | None = None) -> Draft:
        directory = argument or self._packaged("ngram")
        draft = ngram_tables.load_ngram(directory, self.target, order=order)
        return draft.replace(settings=self.options.settings)

    def _copy(self, argument: str = "") -> Draft:
        min_match = _number("copy", argument) if argument else CopyDraft.min_match
        vocabulary = self.target.vocabulary
        return CopyDraft(
            self.model.vocab_size,
            min_match,
            max(min_match, CopyDraft.max_match),
            None if vocabulary is None else np.packbits(vocabulary.word_starts()).tobytes(),
        )

    def _uniform(self, argument: str) -> Draft:
        _refuse_argument("uniform", argument)
        return UniformDraft(self.model.vocab_size)

    def _medusa(self, argument: str) -> Draft:
        params = target_drafts.load_heads(argument or self._packaged("medusa"), self.target)
        return MedusaDraft(T5Heads.create(params, self.model), self.options.settings)

    def _eagle(self, argument: str) -> Draft:
        directory = argument or self._packaged("eagle")
        return self._shared_encoder(directory, target_drafts.EAGLE, EagleDraft)

    def _shared_encoder(
        self,
        argument: str,
        kind: str = target_drafts.SHARED,
        draft: type[SharedEncoderDraft] = SharedEncoderDraft,
    ) -> Draft:
        loaded = target_drafts.load_shared_draft(argument, self.target, kind)
        made = draft.create(
            loaded.params,
            loaded.config,
            loaded.layers,
            self.model,
            settings=self.options.settings,
            head=loaded.head,
        )
        weights = self.options.weights
        return made if weights == AUTO else made.replace(model=made.model.rounded(BITS[weights]))

    def _early_exit(self, argument: str) -> Draft:
        half = (self.model.config.num_decoder_layers + 1) // 2
        layers = _number("early_exit", argument) if argument else half
        return SelfDraft.early_exit(self.model, layers, self.options.settings)

    def _rounded(self, argument: str, weights: str) -> Draft:
        _refuse_argument(weights, argument)
        return SelfDraft.rounded(self.model, BITS[weights], self.options.settings)

    def _mixed(self, argument: str) -> Draft:
        # Beside a model only what follows a match: 2.80 tokens a call on the packaged summaries,
        # where the model alone brings 2.73 and copying on a venture 2.16.
        copies = self._copy("2").replace(patience=0)
        return MixedDraft(copies, self.make(argument or "transformer"))

    def _cascade(self, argument: str) -> Draft:
        directory, _, inner = argument.partition(",")
        if directory in BITS:
            middle = self.model.rounded(BITS[directory])
        else:
            middle = self._transformer(directory).model
        own = DraftOptions(dtype=self.options.dtype, weights=self.options.weights)
        cheap = dataclasses.replace(self, options=own)
        cheapest = cheap.make(inner or "bigram")
        if isinstance(cheapest, SharedEncoderDraft):
            raise InputError(
                f"draft {inner} shares the encoder of its target, and in a cascade it would draft "
                f"for {directory or 'another model'}: give a draft that shares nothing"
            )
        return CascadeDraft(middle, cheapest, settings=self.options.settings)

    def _packaged(self, kind: str) -> str:
        directory = self.target.directory
        drafts = PACKAGED_DRAFTS.get(directory.name, {})
        if directory != PACKAGED_MODELS / directory.name or kind not in drafts:
            raise InputError(
                f"draft {kind!r} of target {directory}: give its directory, as in {kind}:DIR"
            )
        return drafts[kind]


# A smaller model.
TRANSFORMER = "transformer"
# What makes a draft of each name, from what stands after the colon.
NAMES: dict[str, Callable[[_Maker, str], Draft]] = {
    TRANSFORMER: _Maker._transformer,
    "unigram": lambda maker, argument: maker._ngram(argument, 1),
    "bigram": lambda maker, argument: maker._ngram(argument, 2),
    "ngram": _Maker._ngram,
    "copy": _Maker._copy,
    "uniform": _Maker._uniform,
    "medusa": _Maker._medusa,
    "eagle": _Maker._eagle,
    "early_exit": _Maker._early_exit,
    INT8: lambda maker, argument: maker._rounded(argument, INT8),
    INT4: lambda maker, argument: maker._rounded(argument, INT4),
    "mixed": _Maker._mixed,
    "cascade": _Maker._cascade,
}
# What a directory of each format holds; of any other it is a model.
_SHARED = "shared encoder"
FORMATS = {
    ngram_tables.FORMAT: "ngram",
    target_drafts.HEADS: "medusa",
    target_drafts.SHARED: _SHARED,
    target_drafts.EAGLE: "eagle",
}
_WITH_DIRECTORY = ("transformer", "unigram", "bigram", "ngram", "medusa", "eagle")
_WITHOUT_TEMPERATURE = ("copy", "uniform")
_OF_ENCODER_DECODERS = ("medusa", "eagle", "early_exit", _SHARED)


def kind_of(text: str) -> str:
    """Finds the name of a draft, of one in a directory, here or in a bucket, or of a packaged one.

    Raises:
      InputError: no such draft.
    """
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
            f"Hugging Face Hub, or one of {', '.join(NAMES)}"
        ) from error
    config = directory / CONFIG_NAME
    kind = read_json(config).get("format") if config.is_file() else None
    return FORMATS.get(kind, TRANSFORMER)


def _is_named(text: str) -> bool:
    """Tells whether a draft's text begins with a name, and is no directory of that name."""
    return text.partition(":")[0] in NAMES and not Path(text).expanduser().is_dir()


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise InputError(f"draft {name}:{argument}: {name} takes no argument")


def _number(name: str, argument: str) -> int:
    if not argument.isdigit():
        raise InputError(f"draft {name}:{argument}: give a whole number after the colon")
    return int(argument)
