"""A target, its draft and their vocabulary: texts to batches, and what is decoded to texts."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import numbers
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_t5x.beams.hypotheses import BeamResult, Ranking, TransformersRanking
from spec_t5x.beams.search import beam_search
from spec_t5x.beams.speculative_search import speculative_beam_search
from spec_t5x.checkpoints.huggingface import generation_config
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import DraftOptions, find_models, make_draft
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, Shardings
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.generation.answers import Answer, Answers, Generation
from spec_t5x.generation.batch_run import Input, Run
from spec_t5x.generation.batches import Batch, bucket, padded, prompt_lengths, random_keys
from spec_t5x.generation.generate_options import GenerateOptions, options_with
from spec_t5x.generation.stop_strings import first_stop
from spec_t5x.generation.streaming import StreamEvent, stream
from spec_t5x.interfaces import Draft, check_positions
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, Loop
from spec_t5x.loops.outputs import UNSOUND, Decoded
from spec_t5x.loops.pace import OPTIMISM, Costs, Pace
from spec_t5x.loops.speculative import Iteration, speculative_decode, speculative_steps
from spec_t5x.machine.programs import Kept
from spec_t5x.models.binding import Model
from spec_t5x.models.cached_model import TextModel
from spec_t5x.names import AUTO, NO_DRAFT
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.rules import Rules, rules
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.identity import fingerprint, identity
from spec_t5x.tuning.store import Store
from spec_t5x.types import EOS_ID, PAD_ID, EndOfSequence

log = logging.getLogger(__name__)

# Where a checkpoint does not say how long its sources were in training.
DEFAULT_MAX_SOURCE_LENGTH = 512
# Batches that inputs are sorted by length for: more means less padding, and a longer wait.
_SORTED = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Generator:
    """A target, an optional draft and their vocabulary."""

    target: Model
    vocabulary: Vocabulary
    max_source_len: int
    draft: Draft | None = None
    # Options that the checkpoint sets where a user does not (``GenerateOptions.settled``).
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # What speculation costs with some options, and the pace that texts were last decoded at.
    _costs: dict[GenerateOptions, Costs] = dataclasses.field(default_factory=dict, init=False)
    _paces: dict[GenerateOptions, Pace] = dataclasses.field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        sizes = {"target": _num_parameters(self.target)}
        if self.draft is not None:
            sizes[type(self.draft).__name__] = _num_parameters(self.draft)
        models = ", ".join(
            f"{name} of {size / 1e6:.1f}M parameters" for name, size in sizes.items()
        )
        return f"Generator({models}, {self.vocabulary.vocab_size} ids)"

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        options: DraftOptions | None = None,
        vocabulary: VocabularyLike | None = None,
        shardings: Shardings | None = None,
        weights: str = AUTO,
        task: str | None = None,
    ) -> "Generator":
        """Reads checkpoints: directories, the names of packaged models, or of the Hugging Face Hub.

        A name on the Hub is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, as in
        ``Generator.load("google/flan-t5-xl", "google/flan-t5-small")``; it is downloaded once.
        Whatever is named is found, and downloaded, before anything is loaded.

        Args:
          target: the model whose output is wanted.
          draft: what ``checkpoints.make_draft`` makes a draft of; None or "none" decodes plainly.
          options: settings of the draft; the target computes in its ``dtype`` too.
          vocabulary: of a target that holds none (``checkpoints.vocabularies``).
          shardings: where the target's parameters are to lie (``checkpoints.loading``).
          weights: "int8" and "int4" round the target's matrices: another model, whose output it
            then is.
          task: whose decoding settings the target's checkpoint is to be taken with
            (``task_specific_params`` of its config.json).

        What a Hugging Face checkpoint says of decoding holds where no option says otherwise; a
        warning names what is left out.

        Raises:
          InputError: a checkpoint that cannot be found, downloaded or read, or a draft whose
            vocabulary is not the target's.
        """
        for name, model in {"target": target, "draft": draft or NO_DRAFT}.items():
            _check_named(name, model)
        options = options or DraftOptions()
        find_models(target, () if draft in (None, NO_DRAFT) else (draft,))
        loaded = load(
            target,
            dtype=options.dtype,
            vocabulary=vocabulary,
            shardings=shardings,
            for_decoding=True,
        )
        generator = cls.of(loaded, weights, task)
        model = generator.target
        if draft in (None, NO_DRAFT):
            return generator
        # The parameters are held once, as the model has them.
        loaded = dataclasses.replace(loaded, params=model.weights)
        return generator.with_draft(make_draft(draft, loaded, model, options))

    @classmethod
    def load_named(cls, models: Models, **options) -> "Generator":
        """``load`` of what a command was given; ``options`` are more of its arguments."""
        named = models.target, models.draft_name(), models.draft_options(), models.vocabulary
        return cls.load(*named, weights=models.weights, task=models.task, **options)

    @classmethod
    def of(cls, target: LoadedModel, weights: str = AUTO, task: str | None = None) -> "Generator":
        """A target that was loaded, without a draft; ``weights`` and ``task`` as of ``load``."""
        return cls(
            target=target.bind(weights),
            vocabulary=target.vocabulary,
            max_source_len=target.metadata.get("max_source_length", DEFAULT_MAX_SOURCE_LENGTH),
            defaults=_defaults(target, task),
        )

    def with_draft(self, draft: Draft | None) -> "Generator":
        """The same with another draft."""
        return dataclasses.replace(self, draft=draft)

    def plain(self) -> "Generator":
        """The same without its draft."""
        return dataclasses.replace(self, draft=None)

    def tokenize(self, text: str | InputError, options: GenerateOptions) -> list[int]:
        """Ids of one input: a source's in the vocabulary's frame, a prompt's without.

        Raises:
          InputError: no Unicode text, an empty source, or without ``options.truncate`` text
            that is longer than ``max_source_len`` or the target's positions.
        """
        if isinstance(text, InputError):
            raise text
        if not isinstance(text, str):
            raise InputError(f"a text is {text!r}: give a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # Bytes that Python could not decode, from a pipe or the command line.
            raise InputError(f"the text {text[:40]!r} is not UTF-8: give UTF-8 text") from error
        if self.is_decoder_only:
            return self._tokenize_prompt(text, options)
        if not text.strip():
            raise InputError("the text is empty: give at least one word")
        return self.fit(self.vocabulary.framed(self.vocabulary.encode(text)), text, options)

    def fit(self, ids: list[int], text: str, options: GenerateOptions) -> list[int]:
        """A source's ids, cut where they are too many and ``options.truncate`` allows it.

        Raises:
          InputError: they are too many.
        """
        limit = options.max_source_len or self.max_source_len
        if len(ids) <= limit:
            return ids
        if options.truncate:
            _, after = self.vocabulary.source_frame
            return [*ids[: limit - len(after)], *after]
        raise InputError(
            f"the text has {len(ids)} tokens and the encoder takes {limit} ({text[:40]!r}…): "
            "shorten it, raise max_source_len, or pass truncate"
        )

    @property
    def is_decoder_only(self) -> bool:
        """Whether the target continues a text instead of answering it."""
        return isinstance(self.target, TextModel)

    def _tokenize_prompt(self, text: str, options: GenerateOptions) -> list[int]:
        limit = self._longest_prompt(options)
        ids = self.vocabulary.encode(text)
        if len(ids) > limit and not options.truncate:
            given = options.max_source_len == limit
            change = "raise max_source_len" if given else "lower max_decode_len"
            raise InputError(
                f"the prompt has {len(ids)} tokens and there is room for {limit} ({text[:40]!r}…): "
                f"shorten it, {change}, or pass truncate"
            )
        return ids[max(len(ids) - limit, 0) :]

    def _longest_prompt(self, options: GenerateOptions) -> int:
        max_decode_len = self.max_decode_len(options)
        room = self.target.max_positions - max_decode_len
        if room < 0:
            raise InputError(
                f"max_decode_len is {max_decode_len} and the target has "
                f"{self.target.max_positions} positions: lower max_decode_len"
            )
        return room if options.max_source_len is None else min(room, options.max_source_len)

    def batches(
        self, texts: Sequence[str], options: GenerateOptions, first: int = 0
    ) -> list[Batch]:
        """The inputs in order, in batches of ``options.batch_size``.

        Each input has a random key of its own, by its place among ``texts`` (the first
        of which is at place ``first``): a sampled text does not depend on the batch it
        is in.
        """
        ids = [self.tokenize(text, options) for text in texts]
        places, size = range(first, first + len(texts)), options.batch_size
        return [
            self.make_batch(texts[i : i + size], ids[i : i + size], places[i : i + size], options)
            for i in range(0, len(texts), size)
        ]

    def make_batch(
        self,
        texts: Sequence[str],
        ids: Sequence[list[int]],
        places: Sequence[int],
        options: GenerateOptions,
    ) -> Batch:
        """A batch of at most ``options.batch_size`` inputs.

        ``places`` are those of the inputs among all, which their random keys depend on.
        """
        if self.is_decoder_only:
            tokens, prompts = self._prompts(ids, options)
        else:
            tokens, prompts = self._sources(ids, options)
        steps = np.zeros(options.batch_size, np.int32)
        steps[: len(ids)] = self.max_decode_len(options)
        # As many keys for every batch: their number is part of the program.
        padded = np.zeros(options.batch_size, np.uint32)
        padded[: len(places)] = places
        return Batch(
            texts=list(texts),
            tokens=tokens,
            prompts=prompts,
            keys=random_keys(np.uint32(options.seed), padded),
            max_decode_steps=steps,
        )

    def _sources(self, ids: Sequence[list[int]], options: GenerateOptions):
        """Sources, and prompts of nothing but the start token."""
        limit = options.max_source_len or self.max_source_len
        width = bucket(max(map(len, ids)), limit)
        tokens = padded(ids, options.batch_size, width)
        # A padding row needs something to attend to.
        tokens[:, 0] = np.where(tokens[:, 0] == PAD_ID, EOS_ID, tokens[:, 0])
        start = [PAD_ID, *self.prefix_ids(options)]
        return tokens, np.tile(np.asarray(start, np.int32), (options.batch_size, 1))

    def prefix_ids(self, options: GenerateOptions) -> list[int]:
        """Ids of the text that every output begins with; none of a decoder alone."""
        if self.is_decoder_only or not options.output_prefix:
            return []
        return self.vocabulary.encode(options.output_prefix)

    def _prompts(self, ids: Sequence[list[int]], options: GenerateOptions):
        """A source of one token for each row, and prompts."""
        longest = max(map(len, ids))
        width = bucket(longest, self._longest_prompt(options)) if longest else 0
        start = np.full((options.batch_size, 1), PAD_ID, np.int32)
        prompts = np.hstack([start, padded(ids, options.batch_size, width)])
        return np.full((options.batch_size, 1), EOS_ID, np.int32), prompts

    def decode(self, batch: Batch, options: GenerateOptions, pace: Pace | None = None) -> Decoded:
        """Decodes one batch on the device; returns at once, before it is done.

        With gamma "auto" ``pace`` is that of an earlier batch (``Decoded.pace``); None starts a
        new one.

        Raises:
          InputError: the batch cannot be decoded.
        """
        if options.gamma == AUTO and pace is None:
            pace = self.pace(batch, options)
        rows, common = self._loop_arguments(batch, options)
        if self.draft is None or (options.gamma == AUTO and pace is None):
            coupled = options.make_verifier().coupled
            return _decode_plainly(self.target, *rows, coupled=coupled, **common)
        common |= _draft_options(options, pace)
        return _decode_speculatively(self.target, self.draft, *rows, **common)

    @property
    def eos_id(self) -> EndOfSequence:
        """What ends an output, as the loops take it."""
        ids = self.vocabulary.eos_ids
        return ids if len(ids) > 1 else ids[0]

    def max_decode_len(self, options: GenerateOptions) -> int:
        """Tokens generated at most."""
        return options.settled(self.defaults)["max_decode_len"]

    def longest(self, batch: Batch, options: GenerateOptions) -> int:
        """Tokens of the longest row that a batch may come to, its prompt included."""
        return batch.prompts.shape[1] - 1 + self.max_decode_len(options)

    def sampling(self, options: GenerateOptions) -> Sampling:
        """The distribution to sample from, by the rules of decoding."""
        settings, found = options.sampling(), self.rules(options)
        return settings if found is None else settings.replace(rules=found)

    def rules(self, options: GenerateOptions) -> Rules | None:
        """The rules of decoding: the options', or the checkpoint's.

        Raises:
          InputError: tokens that the model does not have.
        """
        return _rules(
            self.target.vocab_size,
            self.vocabulary.eos_ids,
            start_id=self.vocabulary.start_in_text,
            **options.rules(self.defaults),
        )

    def _loop_arguments(self, batch: Batch, options: GenerateOptions) -> tuple[tuple, dict]:
        """What every loop takes, by place and by name."""
        return (batch.tokens, batch.prompts, batch.keys, self.sampling(options)), {
            "eos_id": self.eos_id,
            "max_decode_len": self.room(batch, options),
            "max_decode_steps": batch.max_decode_steps,
            "num_decodes": options.num_decodes,
            "rescale_log_probs": options.rescale_log_probs,
        }

    def loop(self, batch: Batch, options: GenerateOptions, gamma: int) -> Loop:
        """The loop of a batch, with ``gamma`` drafts in an iteration at most."""
        return Loop(
            gamma=gamma,
            eos_id=self.eos_id,
            max_decode_len=self.room(batch, options),
            num_decodes=options.num_decodes,
            verifier=options.make_verifier(),
            rescale_log_probs=options.rescale_log_probs,
        )

    def room(self, batch: Batch, options: GenerateOptions) -> int:
        """The loops' ``max_decode_len``, which counts the prompt.

        Limits that are near one another share a program: the exact one is ``max_decode_steps``.
        """
        with contextlib.suppress(InputError):
            room = batch.prompts.shape[1] - 1 + bucket(self.max_decode_len(options), sys.maxsize)
            check_positions(self.target, room)
            if self.draft is not None:
                self.draft.check(self.target, room)
            return room
        # Models of fewer positions.
        return self.longest(batch, options)

    def steps(
        self, batch: Batch, options: GenerateOptions, pace: Pace | None
    ) -> Iterator[Iteration]:
        """``decode``, driven from the host: yields each iteration, returns what it decoded.

        With gamma "auto" and no ``pace`` it decodes plainly. Statistics are made even then.
        """
        rows, common = self._loop_arguments(batch, options)
        if self.draft is None or (options.gamma == AUTO and pace is None):
            verifier = options.make_verifier()
            # A tree has no gamma 0.
            common |= {"gamma": 0, "verifier": verifier if verifier.coupled else DEFAULT_VERIFIER}
            nobody = UniformDraft(self.target.vocab_size)
            return speculative_steps(self.target, nobody, *rows, **common)
        common |= _draft_options(options, pace)
        return speculative_steps(self.target, self.draft, *rows, **common)

    def costs(self, batch: Batch, options: GenerateOptions) -> Costs:
        """What speculation costs for batches like this one: measured once, and remembered.

        Raises:
          InputError: there is no draft, or the batch cannot be decoded.
        """
        if self.draft is None:
            raise InputError("there is no draft whose costs could be measured: give one")
        if options not in self._costs:
            self._costs[options] = self._measured_costs(batch, options)
        return self._costs[options]

    def _measured_costs(self, batch: Batch, options: GenerateOptions) -> Costs:
        loop = self.loop(
            batch, options, costs_lib.largest_limit(self.draft, options.make_verifier())
        )
        measure = functools.partial(
            costs_lib.measure, self.target, self.draft, batch.tokens, self.sampling(options), loop
        )
        key = identity(
            target=fingerprint(self.target),
            draft=fingerprint(self.draft),
            settings={**options.costly, "max_source_len": self.max_source_len},
        )
        return costs_lib.remembered(key, measure, Store.of_user())

    def assume(self, options: GenerateOptions, costs: Costs) -> None:
        """Takes costs as known that another process has measured."""
        self._costs[options] = costs

    def pace(self, batch: Batch, options: GenerateOptions) -> Pace | None:
        """What to decode with where gamma is "auto"; None where no draft can ever pay."""
        if self.draft is None:
            return None
        costs = self.costs(batch, options)
        return Pace.start(costs) if costs.needed <= OPTIMISM else None

    def run(self, options: GenerateOptions) -> Run:
        """Decodes batch after batch: with gamma "auto" each at the pace of those before it."""
        return Run(self, options)

    def search(self, batch: Batch, options: GenerateOptions) -> BeamResult:
        """Beam search for one batch on the device; returns at once, before it is done.

        Raises:
          InputError: a draft that is not a model.
        """
        arguments, ranking = (batch.tokens, batch.prompts), self._ranking(options)
        # When a search of T5X's ends depends on the longest text that it has room for.
        room = self.room if isinstance(ranking, TransformersRanking) else self.longest
        common = {
            "beams": options.beams,
            "ranking": ranking,
            "rules": self.rules(options),
            "eos_id": self.eos_id,
            "max_decode_len": room(batch, options),
            "max_decode_steps": batch.max_decode_steps,
        }
        if self.draft is None or options.gamma in (0, AUTO):
            return beam_search(self.target, *arguments, **common)
        if type(self.draft) is not TransformerDraft:
            raise InputError(
                f"beams is {options.beams} and the draft a {type(self.draft).__name__}: search "
                "with a transformer draft, or with none"
            )
        return speculative_beam_search(
            self.target, self.draft.model, *arguments, gamma=options.gamma, **common
        )

    def _ranking(self, options: GenerateOptions) -> Ranking:
        """The ranking of a search: by T5X's brevity penalty, or by transformers' rules."""
        settled = options.settled(self.defaults)
        if settled["length_penalty"] is None:
            return Ranking(exponent=options.beam_alpha)
        return TransformersRanking(
            exponent=settled["length_penalty"],
            early_stopping=settled["early_stopping"],
        )

    def generate(
        self,
        texts: str | Iterable[str | InputError],
        options: GenerateOptions | None = None,
        *,
        first: int = 0,
        **changes,
    ) -> Answers:
        """Gives, for each input in order, its outputs, the best first, while iterated over.

        An input that cannot be decoded is its answer's ``error``; the others are decoded.

        Args:
          texts: the inputs, of which a few batches are looked at ahead; a string is one. An
            error in place of an input is its answer.
          options: how to decode.
          first: the place of the first input, which its random numbers depend on.
          changes: options that are to be other than in ``options``.

        Raises:
          InputError: options that do not fit together.
        """
        options = options_with(options, changes)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping):
            raise InputError(f"texts are {repr(texts)[:40]}: give a string, or a list of strings")
        inputs = ((text, None) for text in texts)
        return Answers(self._answers(inputs, options, first), _count(texts))

    def generate_ids(
        self,
        ids: Iterable[Sequence[int] | np.ndarray],
        options: GenerateOptions | None = None,
        *,
        first: int = 0,
        **changes,
    ) -> Answers:
        """``generate`` for inputs that are ids already: sources with EOS, prompts without.

        The other arguments are those of ``generate``. An input without ids, or with one that the
        target does not have, is its answer's ``error``.
        """
        inputs = (("", row) for row in ids)
        return Answers(self._answers(inputs, options_with(options, changes), first), _count(ids))

    def _checked_ids(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        size = self.target.vocab_size
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if not isinstance(ids, Sequence):
            raise InputError(f"an input is {ids!r}: give a list of ids")
        for one in ids:
            if not (isinstance(one, numbers.Integral) and 0 <= one < size):
                raise InputError(f"an input has the id {one!r}: give numbers from 0 to {size - 1}")
        if not ids and not self.is_decoder_only:
            raise InputError("an input has no ids: give at least the end of sequence")
        return [int(one) for one in ids]

    def _answers(
        self,
        inputs: Iterable[tuple[str | InputError, Sequence[int] | np.ndarray | None]],
        options: GenerateOptions,
        first: int,
    ) -> Iterator[Answer]:
        """The answer to each input (text, and ids if known) in order, decoded by length."""
        run, answers = self.run(options), {}
        size = options.batch_size * (_SORTED if options.batch_size > 1 else 1)

        def windows() -> Iterator[list[Input]]:
            numbered = enumerate(inputs, first)
            while window := list(itertools.islice(numbered, size)):
                good = []
                for place, (text, ids) in window:
                    try:
                        known = (
                            self.tokenize(text, options) if ids is None else self._checked_ids(ids)
                        )
                        good.append((place, text, known))
                    except InputError as error:
                        answers[place] = Answer(error=error)
                yield good

        following = first
        # Once more at the end: there may be errors after the last batch.
        for places, found in itertools.chain(run.answers(windows()), [((), [])]):
            answers.update(zip(places, found, strict=True))
            while following in answers:
                yield answers.pop(following)
                following += 1
        run.remember()

    def by_length(
        self, inputs: Iterable[Input], options: GenerateOptions
    ) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Batches of inputs of about one length: a batch takes as long as its longest row.

        The longest inputs come first: what does not fit into memory fails early. Yields the
        places of each batch's inputs, and the batch.
        """
        ordered, size = sorted(inputs, key=lambda one: -len(one[2])), options.batch_size
        for start in range(0, len(ordered), size):
            places, texts, ids = zip(*ordered[start : start + size], strict=True)
            yield places, self.make_batch(texts, ids, places, options)

    def stream(
        self, text: str, options: GenerateOptions | None = None, *, place: int = 0, **changes
    ) -> Iterator[StreamEvent]:
        """Decodes one input, yielding after each call of the target what it brought.

        The output is the one that ``generate`` gives to this input alone at ``place``. Driven
        from the host, call by call, it takes longer. Without a draft each event has one token.

        Args:
          text: the input.
          options: how to decode; ``batch_size`` does not matter.
          place: of the input, which its random numbers depend on.
          changes: options that are to be other than in ``options``.

        Raises:
          InputError: at the call, an input or options that cannot be decoded, several decodes
            or a beam search; later, models that compute what is not finite, before a token
            of it is yielded.
        """
        options = dataclasses.replace(options_with(options, changes), batch_size=1)
        if options.num_decodes != 1:
            raise InputError(f"num_decodes is {options.num_decodes}: a stream has 1")
        if options.beams:
            raise InputError(f"beams is {options.beams}: a search cannot be streamed")
        (batch,) = self.batches([text], options, place)
        return stream(self.run(options), batch)

    def collect(self, batch: Batch, decoded: Decoded, options: GenerateOptions) -> Iterator[Answer]:
        """Fetches a batch's results and turns them into text."""
        # The pace stays on the device.
        decoded = jax.device_get(decoded.replace(pace=None))
        for row, (text, skipped) in enumerate(
            zip(batch.texts, prompt_lengths(batch), strict=False)
        ):
            yield self.answer(text, skipped, decoded, row, options)

    def answer(
        self, text: str, skipped: int, decoded: Decoded, row: int, options: GenerateOptions
    ) -> Answer:
        """The answer to one input, without the ``skipped`` tokens of its prompt.

        ``decoded`` is on the host; ``row`` is the input's there.
        """
        error = _unsound("target", text, decoded.scores[row])
        if error is None and decoded.stats is not None:
            error = _unsound("draft", text, decoded.stats.beta_sum[row])
        # The loops have T5X's order, by increasing score.
        decodes = () if error else reversed(range(decoded.tokens.shape[1]))
        return Answer(
            [
                self._generation(text, decoded, (row, decode), skipped, options.stop)
                for decode in decodes
            ],
            error,
        )

    def collect_beams(
        self, batch: Batch, result: BeamResult, options: GenerateOptions
    ) -> Iterator[Answer]:
        """As ``collect``, of a search."""
        result = jax.device_get(result)
        speculative = self.draft is not None and options.gamma not in (0, AUTO)
        skipped = prompt_lengths(batch)
        for row, text in enumerate(batch.texts):
            error = _unsound("target", text, result.scores[row])
            efficiency = float(result.stats.block_efficiency[row]) if speculative else None
            best = range(options.beams - options.num_decodes, options.beams)
            outputs = [
                Generation(
                    **self._output(text, result, (row, beam), skipped[row]),
                    target_calls=int(result.stats.target_calls[row]),
                    block_efficiency=efficiency,
                )
                for beam in reversed(() if error else best)
            ]
            yield Answer(outputs, error)

    def _output(
        self,
        text: str,
        decoded: Decoded | BeamResult,
        at: tuple[int, int],
        skipped: int,
        stop: tuple[str, ...] = (),
    ) -> dict:
        """Gives the fields of every output, without the ``skipped`` tokens that it continues."""
        decode = self.vocabulary.decode
        # The prefix of an encoder-decoder's output is part of it.
        first = skipped if self.is_decoder_only else 0
        ids = decoded.tokens[at][first : decoded.lengths[at]].tolist()
        stopped = first_stop(decode, [], ids, stop)
        if stopped is not None:
            ids = ids[: stopped.count]
        return {
            "input": text,
            "output": decode(ids) if stopped is None else stopped.text,
            "output_ids": ids,
            "score": float(decoded.scores[at]),
        }

    def _generation(
        self,
        text: str,
        decoded: Decoded,
        at: tuple[int, int],
        skipped: int,
        stop: tuple[str, ...],
    ) -> Generation:
        common = self._output(text, decoded, at, skipped, stop)
        if decoded.stats is None:
            return Generation(**common, target_calls=int(decoded.lengths[at]) - skipped)
        stats = decoded.stats
        verified = stats.verified[at]
        return Generation(
            **common,
            target_calls=int(stats.target_calls[at]),
            proposed=int(stats.proposed[at]),
            accepted=int(stats.accepted[at]),
            accepted_by_position=stats.accepted_by_position[at].tolist(),
            verified_by_position=stats.verified_by_position[at].tolist(),
            block_efficiency=float(stats.block_efficiency[at]),
            alpha=float(stats.beta_sum[at] / verified) if verified else None,
        )


def _unsound(model: str, text: str, values: np.ndarray) -> InputError | None:
    """Why an input has no text, where what a model computed for it is not finite."""
    if np.all(np.isfinite(values)):
        return None
    return InputError(f"the {model}'s logits are not finite for {text[:40]!r}: {UNSOUND}")


def _count(inputs: Iterable) -> int | None:
    """How many there are; None where they do not say."""
    return len(inputs) if isinstance(inputs, Sized) else None


def _check_named(name: str, model: Any) -> None:
    """Raises ``InputError`` for a model in place of the name of one."""
    if not isinstance(model, str | os.PathLike):
        raise InputError(
            f"{name} is a {type(model).__name__}: give a directory (save_pretrained makes one of a "
            "model of transformers) or a name; a draft made here goes to with_draft"
        )


def _num_parameters(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _defaults(target: LoadedModel, task: str | None) -> dict[str, Any]:
    """The options that a checkpoint sets; warns of what it asks for and does not get."""
    vocabulary = target.vocabulary
    decoding = generation_config.understood(
        target.metadata.get(generation_config.GENERATION, {}),
        str(target.directory),
        task=task,
        to_ours=vocabulary.from_theirs if isinstance(vocabulary, MappedVocabulary) else list,
        is_decoder_only=not target.config.has_source,
    )
    if decoding.left_out:
        log.warning(
            "%s asks for decoding that is left out: %s",
            target.directory,
            ", ".join(decoding.left_out),
        )
    return decoding.options


# Kept: they hold device arrays.
_rules = functools.lru_cache(rules)


def _draft_options(options: GenerateOptions, pace: Pace | None) -> dict:
    """What the loops with a draft take beside that."""
    gamma = options.gamma if pace is None else pace.largest
    return {"gamma": gamma, "verifier": options.make_verifier(), "pace": pace}


# Loaded whole where a process before has made them.
_decode_plainly = Kept(
    autoregressive_decode,
    ("coupled", "eos_id", "max_decode_len", "num_decodes", "rescale_log_probs"),
)
_decode_speculatively = Kept(
    speculative_decode,
    ("eos_id", "gamma", "max_decode_len", "num_decodes", "rescale_log_probs", "verifier"),
)
