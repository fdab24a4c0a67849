"""Class ``Generator``: text in, text out, the entry for users."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_t5x.checkpoints.huggingface import generation_config
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import check_draft, find_models, make_draft
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, Shardings, StoredModel
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.errors import InputError, check_choice, check_jax, check_numbers, check_unused
from spec_t5x.generation.answers import Answer, Answers
from spec_t5x.generation.batches import Batch
from spec_t5x.generation.decoder import BatchDecoder
from spec_t5x.generation.engine import Engine, costly
from spec_t5x.generation.streaming import StreamEvent, stream
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.names import AUTO, KV, NO_DRAFT, WEIGHTS
from spec_t5x.options import GenerateOptions, options_with

# Tokens of a source, for checkpoints that do not say how long sources were in training.
DEFAULT_MAX_SOURCE_LENGTH = 512
# Batches whose inputs are sorted by length together: more mean less padding and a longer wait.
_SORTED = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Generator(BatchDecoder):
    """A target, an optional draft and their vocabulary, which decode texts or ids."""

    # The costs of speculation, and the pace after the last texts, by ``costly`` options.
    _costs: dict[tuple, Costs] = dataclasses.field(default_factory=dict, init=False)
    _paces: dict[tuple, Pace | None] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def load(
        cls,
        target: str | Path | StoredModel,
        draft: str | Path | None = None,
        options: DraftOptions | None = None,
        vocabulary: VocabularyLike | None = None,
        shardings: Shardings | None = None,
        weights: str = AUTO,
        task: str | None = None,
        kv: str = AUTO,
    ) -> "Generator":
        """Reads checkpoints: directories, the names of packaged models, or of the Hugging Face Hub.

        A name on the Hub is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, as in
        ``Generator.load("google/flan-t5-xl", "google/flan-t5-small")``; it is downloaded once.
        All models are found, and downloaded, before any is loaded. The decoding settings of a
        Hugging Face checkpoint hold unless an option replaces them; at the first decoding a warning
        names those that are not applied.

        Args:
          target: the model whose output is wanted, or the one that ``open`` returned.
          draft: a draft's name, for ``checkpoints.make_draft``; None or "none" decodes plainly.
          options: settings of the draft; the target computes in their ``dtype`` too.
          vocabulary: for a checkpoint that holds none (``checkpoints.storage.vocabularies``).
          shardings: those of the parameters of the target and of a draft model
            (``checkpoints.loading``).
          weights: "int8" and "int4" round the target's matrices, and outputs are those of the
            rounded model; "auto" reads the checkpoint's format.
          task: name of the decoding settings in the target's config.json
            (``task_specific_params``).
          kv: "int8" rounds the keys and values of the source that the target's cache has, with a
            scale for each head and position, and outputs are those of that model.

        Raises:
          InputError: a checkpoint that cannot be found, downloaded or read, or a draft whose
            vocabulary is not the target's.
        """
        check_jax()
        for name, model, other in (("target", target, StoredModel), ("draft", draft, type(None))):
            if not isinstance(model, str | os.PathLike | other):
                raise InputError(
                    f"{name} is a {type(model).__name__}: give a directory (save_pretrained makes "
                    "one of a model of transformers) or a name; a draft made here goes to "
                    "with_draft"
                )
        check_choice("weights", weights, WEIGHTS)
        check_choice("kv", kv, KV)
        options = options or DraftOptions()
        if not isinstance(options, DraftOptions):
            raise InputError(f"options is {type(options).__name__}: give DraftOptions")
        if options.shardings is None:
            options = dataclasses.replace(options, shardings=shardings)
        drafts = () if draft in (None, NO_DRAFT) else (draft,)
        if not isinstance(target, StoredModel):
            check = functools.partial(cls.of, task=task, kv=kv)
            target, vocabulary = find_models(target, drafts, options, vocabulary, check), None
        stored = {"shardings": shardings, "weights": weights, "vocabulary": vocabulary}
        loaded, generator = cls.load_target(target, options.dtype, task, kv, **stored)
        if not drafts:
            return generator
        return generator.with_draft(make_draft(draft, loaded, generator.target, options))

    @classmethod
    def open(
        cls, models: Models, drafts: Collection[str | None], options: GenerateOptions, *texts: str
    ) -> tuple[StoredModel, "Generator"]:
        """Opens a command's models, with ``drafts`` in place of its draft.

        Returns the target, and a generator without weights and draft, which tokenizes. Raises
        ``InputError`` before a download for ``options`` or ``texts`` that it cannot decode.
        """
        for draft in filter(None, drafts):
            check_draft(draft, options, models.draft_options())
        make = functools.partial(cls.of, task=models.task, kv=models.kv)
        named = models.target, drafts, models.draft_options(), models.vocabulary
        stored = find_models(*named, check=lambda target: make(target).check(options, texts))
        return stored, make(stored.unread())

    @classmethod
    def load_target(
        cls,
        target: str | Path | StoredModel,
        dtype: str,
        task: str | None = None,
        kv: str = AUTO,
        **stored: Any,
    ) -> tuple[LoadedModel, "Generator"]:
        """Returns a target's checkpoint, for ``make_draft``, and a generator without a draft.

        The arguments are as in ``load``; ``stored`` are ``vocabulary``, ``shardings``, ``weights``.
        """
        loaded = load(target, dtype=dtype, for_decoding=True, **stored)
        generator = cls.of(loaded, task=task, kv=kv)
        # The parameters are held once, as the model has them.
        return dataclasses.replace(loaded, params=generator.target.weights), generator

    @classmethod
    def load_named(cls, models: Models, opened: StoredModel | None = None, **more) -> "Generator":
        """Loads the models that a command names; ``more`` are further arguments of ``load``."""
        named = models.draft_name(), models.draft_options(), None if opened else models.vocabulary
        of_target = {"weights": models.weights, "task": models.task, "kv": models.kv}
        return cls.load(opened or models.target, *named, **of_target, **more)

    @classmethod
    def of(
        cls, target: LoadedModel, weights: str = AUTO, task: str | None = None, kv: str = AUTO
    ) -> "Generator":
        """Makes a generator without a draft; the other arguments are as in ``load``."""
        vocabulary = target.vocabulary
        defaults, left_out = generation_config.options_of(
            target.metadata.get(generation_config.GENERATION, {}),
            str(target.directory),
            task=task,
            to_ours=vocabulary.from_theirs if isinstance(vocabulary, MappedVocabulary) else list,
            num_ids=getattr(vocabulary, "num_ids", target.config.vocab_size),
            is_decoder_only=not target.config.has_source,
        )
        return cls(
            target=target.bind(weights, kv),
            vocabulary=vocabulary,
            max_source_len=target.metadata.get("max_source_length", DEFAULT_MAX_SOURCE_LENGTH),
            defaults=defaults,
            left_out=left_out,
        )

    def generate(
        self,
        texts: str | Iterable[str | InputError],
        options: GenerateOptions | None = None,
        *,
        first: int = 0,
        **changes,
    ) -> Answers:
        """Returns the answers to the inputs in order, which are decoded while iterated over.

        If an input cannot be decoded, its answer has the ``error``; the others are decoded.

        Args:
          texts: the inputs; a string is one. They are read ahead of the answers (one input or, if
            ``batch_size`` is above 1, 16 batches), so no input can depend on an earlier answer. An
            ``InputError`` in place of an input becomes its answer's ``error``.
          options, changes: how to decode; ``changes`` replace options by their names.
          first: place (index) of the first input, below 2**31; random numbers depend on places.

        Raises:
          InputError: texts are no strings, or options are unknown or do not fit together.
        """
        options = options_with(options, changes)
        texts = [texts] if isinstance(texts, str) else texts
        _check_several("texts", texts, "a string, or a list of strings", first)
        return Answers(self._answers(texts, self.tokenize, options, first))

    def generate_ids(
        self,
        ids: Iterable[Sequence[int] | np.ndarray | jax.Array],
        options: GenerateOptions | None = None,
        *,
        first: int = 0,
        **changes,
    ) -> Answers:
        """Generates as ``generate`` for inputs that are ids: sources with EOS, prompts without.

        The other arguments are those of ``generate``. If an input is empty or too long, or an id is
        0 (padding) or the target lacks it, the answer has an ``error``.
        """
        options = options_with(options, changes)
        _check_several("ids", ids, "a list with the ids of each input", first)
        return Answers(self._answers(ids, self._checked_ids, options, first))

    def _checked_ids(
        self, ids: Sequence[int] | np.ndarray | jax.Array, options: GenerateOptions
    ) -> list[int]:
        size = self.target.vocab_size
        ids = ids.tolist() if isinstance(ids, np.ndarray | jax.Array) else ids
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise InputError(f"an input is {ids!r}: give a list of ids")
        for one in ids:
            # Id 0 is padding, which ends a prompt and is masked in a source.
            check_numbers(1, size - 1, **{"an input's id": one})
        if not ids and not self.is_decoder_only:
            raise InputError("an input has no ids: give at least the end of sequence")
        return self.fit([int(one) for one in ids], str(ids[:8]), options)

    def _answers(
        self, inputs: Iterable, encode: Callable, options: GenerateOptions, first: int
    ) -> Iterator[Answer]:
        """Yields answers in the inputs' order; ``encode`` makes ids, which are sorted by length."""
        engine, answers, errors = self.engine(options, resumes=True), {}, []
        size = options.batch_size * (_SORTED if options.batch_size > 1 else 1)

        def read() -> Iterator[tuple[int, Any]]:
            try:
                yield from enumerate(inputs, first)
            except Exception as error:
                errors.append(error)

        def batches() -> Iterator[tuple[tuple[int, ...], Batch]]:
            numbered = read()
            while window := list(itertools.islice(numbered, size)):
                good = []
                for place, one in window:
                    try:
                        text = one if isinstance(one, str) else ""
                        good.append((place, text, encode(one, options)))
                    except InputError as error:
                        answers[place] = Answer(error=error)
                yield from self.by_length(good, options)

        following = first
        for places, found in engine.answers(batches()):
            answers.update(zip(places, found, strict=True))
            while following in answers:
                yield answers.pop(following)
                following += 1
        # An error of the inputs comes after the answers to those before it.
        for error in errors:
            raise error

    def stream(
        self, text: str, options: GenerateOptions | None = None, *, place: int = 0, **changes
    ) -> Iterator[StreamEvent]:
        """Decodes one input; yields an event after each call of the target.

        The output is that of ``generate`` for this input alone at ``place``. The host drives every
        call, which takes longer. Without a draft each event has one token.

        Args:
          options, changes: as for ``generate``; ``batch_size`` does not matter.
          place: index below 2**31 that the input's random numbers depend on.

        Raises:
          InputError: at the call, an input or options that cannot be decoded, several decodes
            or a beam search; while iterating, logits that are not finite, before a token of
            them is yielded.
        """
        check_numbers(0, 2**31 - 1, place=place)
        options = dataclasses.replace(options_with(options, changes), batch_size=1)
        check_unused(options, "a stream decodes one output at a time", "num_decodes", "beams")
        batch = self.make_batch([text], [self.tokenize(text, options)], [place], options)
        return stream(self.engine(options, resumes=True), batch)

    def engine(self, options: GenerateOptions, *, resumes: bool = False) -> Engine:
        """Makes an engine, which ``resumes`` the pace of earlier texts if none depends on it.

        Raises ``InputError`` as ``check``.
        """
        self.check(options)
        return Engine(self, options, self._costs, self._paces if resumes else None)

    def verdict(self, options: GenerateOptions) -> str | None:
        """Returns why most steps of the last call had no draft, for a message; None if they had."""
        return self.engine(options, resumes=True).verdict

    def assume(self, options: GenerateOptions, costs: Costs) -> None:
        """Stores the costs of these options as known, so that none are measured."""
        self._costs[costly(options)] = costs
        self._paces.pop(costly(options), None)


def _check_several(name: str, inputs: Any, wanted: str, first: int) -> None:
    check_numbers(0, 2**31 - 1, first=first)
    # NumPy's and JAX's arrays of no dimensions are Iterables, too.
    is_one = isinstance(inputs, str | bytes | Mapping) or getattr(inputs, "ndim", 1) == 0
    if is_one or not isinstance(inputs, Iterable):
        raise InputError(f"{name} are {repr(inputs)[:40]}: give {wanted}")
