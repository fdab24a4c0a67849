"""Text in, text out: tokenising, batching and decoding with a target and a draft.

What the command line, the notebooks and the benchmarks call. Shapes are taken from
a short list, so that few programs are compiled: sources and prompts are padded to a
bucket, batches to ``batch_size``.

To an encoder-decoder a text is the source. To a decoder alone (``models.gpt``) it is the
prompt, which may be empty, and what comes out is how the text goes on, without the prompt.
"""

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.beams.hypotheses import BeamResult
from spec_t5x.beams.search import beam_search
from spec_t5x.beams.speculative import speculative_beam_search
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import DraftOptions, make_draft
from spec_t5x.checkpoints.storage.stored_model import Shardings
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import UNSOUND, Decoded
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import Iteration, speculative_decode, speculative_steps
from spec_t5x.machine.programs import Kept
from spec_t5x.models.binding import Model, bind
from spec_t5x.models.gpt import GPTModel
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.identity import identity
from spec_t5x.tuning.store import Store
from spec_t5x.types import EOS_ID, PAD_ID
from spec_t5x.verifiers import TreeVerifier, Verifier, verifier

# Where a checkpoint does not say how long its sources were in training.
DEFAULT_MAX_SOURCE_LENGTH = 512
_SMALLEST_BUCKET = 16
# numpy's count as well.
_NUMBERS = {int: numbers.Integral, float: numbers.Real, int | str: numbers.Integral | str}

# Of gamma: as many drafts as pay (``loops/pace.py``).
AUTO = "auto"
# Of the draft's name: plain decoding.
NO_DRAFT = "none"
# Options that decide what a step costs.
_COSTLY = (
    "batch_size",
    "max_decode_len",
    "num_decodes",
    "rescale_log_probs",
    "top_k",
    "top_p",
    "verifier",
    "widths",
)
# Share of plain steps from which the draft counts as left out.
_LEFT_OUT = 0.8
# Batches that inputs are sorted by length for: more means less padding, and a longer wait.
_SORTED = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Settings of a run. The names are those of the command line and of gin."""

    # Tokens that the draft proposes in each iteration; 0 is plain decoding. "auto" is as many
    # as pay where and when it decodes, none where none do (``loops/pace.py``).
    gamma: int | str = AUTO
    # 0 is argmax. At most one of top_k and top_p, 0 for none.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    # Sequences for each input.
    num_decodes: int = 1
    seed: int = 0
    # Tokens generated at most.
    max_decode_len: int = 128
    # Inputs decoded together.
    batch_size: int = 1
    # Longest source in tokens, end of sequence included; None takes the checkpoint's. Of a
    # decoder alone, the longest prompt; None is what its positions leave room for.
    max_source_len: int | None = None
    # Cut longer sources at their end, longer prompts at their beginning, instead of refusing
    # them.
    truncate: bool = False
    # Scores under the sampled distribution instead of the model's own.
    rescale_log_probs: bool = False
    # Which drafts to keep, by name (``verifiers.VERIFIERS``).
    verifier: str = "block"
    # Below 1 the token verifier is lossy: no token comes with more than 1 / lenience
    # times its probability (section A.5).
    lenience: float = 1.0
    # Beam search with this many hypotheses, at temperature 0; 0 does not search. The
    # best ``num_decodes`` of them are returned.
    beams: int = 0
    # Exponent of the brevity penalty: larger values prefer longer texts.
    beam_alpha: float = 0.6
    # Drafts for the next places of the verifiers ``multi`` and ``tree``; () for the usual.
    widths: tuple = ()

    def __post_init__(self):
        if isinstance(self.widths, list):
            # gin's sequences.
            object.__setattr__(self, "widths", tuple(self.widths))
        self._check_gamma()
        for field in dataclasses.fields(self):
            # gin hands over whatever a file binds.
            value = getattr(self, field.name)
            if not isinstance(value, _NUMBERS.get(field.type, field.type)):
                raise InputError(
                    f"{field.name} is {value!r}: give a value of type "
                    f"{getattr(field.type, '__name__', field.type)}"
                )
        for name in ("num_decodes", "max_decode_len", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: give at least 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}: give 0 to {2**32 - 1}")
        if self.max_source_len is not None and self.max_source_len < 2:
            raise InputError(f"max_source_len is {self.max_source_len}: give at least 2")
        self.sampling()
        for name in ("top_k", "top_p"):
            if getattr(self, name) > 0 and not self.temperature:
                raise InputError(
                    f"{name} is {getattr(self, name)} and temperature 0, which takes the likeliest "
                    f"token: give a temperature, or leave {name} out"
                )
        self.make_verifier()
        self._check_beams()

    def _check_gamma(self) -> None:
        if self.gamma == AUTO:
            return
        if not isinstance(self.gamma, numbers.Integral):
            raise InputError(
                f"gamma is {self.gamma!r}: give a whole number from 0 (0 is plain decoding), or "
                f"{AUTO} for as many as pay"
            )
        if self.gamma < 0:
            raise InputError(f"gamma is {self.gamma}: give at least 0 (0 is plain decoding)")
        if self.gamma > self.max_decode_len:
            raise InputError(
                f"gamma is {self.gamma} and max_decode_len {self.max_decode_len}: give at most as "
                "many drafts as tokens"
            )

    def _check_beams(self) -> None:
        if self.beams < 0:
            raise InputError(f"beams is {self.beams}: give at least 0 (0 does not search)")
        if not 0 <= self.beam_alpha < float("inf"):
            raise InputError(f"beam_alpha is {self.beam_alpha}: give a finite number from 0")
        if not self.beams:
            return
        if self.temperature > 0:
            raise InputError(
                f"beams is {self.beams} and temperature {self.temperature}: a beam search does "
                "not sample; set one of them to 0"
            )
        if self.num_decodes > self.beams:
            raise InputError(
                f"num_decodes is {self.num_decodes} and beams {self.beams}: a search returns at "
                "most its beams"
            )

    def make_verifier(self) -> Verifier | TreeVerifier:
        """Which drafts to keep."""
        return verifier(self.verifier, lenience=self.lenience, widths=self.widths)

    def sampling(self) -> Sampling:
        """The distribution to sample from."""
        return _sampling(self.temperature, self.top_k, self.top_p)


# Kept: it holds a device array, which takes longer to make than a token.
_sampling = functools.lru_cache(sampling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One output. Counts are of this sequence alone; ``None`` in plain decoding."""

    input: str
    output: str
    # Generated token ids, end of sequence included, without a prompt's.
    output_ids: list[int]
    # Log-probability (natural logarithm); in a beam search over its brevity penalty.
    score: float
    # Calls for this sequence; in a beam search, for all hypotheses of the input.
    target_calls: int
    proposed: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] | None = None
    # Iterations in which a draft was verified at the position.
    verified_by_position: list[int] | None = None
    # Generated tokens for each target call; in a speculative beam search, tokens that the
    # hypotheses grow by.
    block_efficiency: float | None = None
    # Mean of sum min(p, q) over verified positions; None if there were none.
    alpha: float | None = None


class Answer(list[Generation]):
    """An input's outputs, the best first; or why there are none.

    Of an input that cannot be decoded it is empty, ``error`` says why, and asking for an
    output raises that.
    """

    def __init__(self, outputs: Iterable[Generation] = (), error: InputError | None = None):
        super().__init__(outputs)
        self.error = error

    def __getitem__(self, index):
        if self.error is not None:
            raise self.error
        return super().__getitem__(index)


# A batch that the device was set to work on.
Started = TypeVar("Started")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs ready for the device, padded to shapes that recur."""

    # The real inputs; rows beyond them are padding.
    texts: list[str]
    tokens: np.ndarray  # [batch, source] int32
    # Start token, then what the output begins with; padded with 0.
    prompts: np.ndarray  # [batch, 1 + prompt length] int32
    keys: jax.Array  # [batch] keys
    # 0 for padding rows, which end at once.
    max_decode_steps: np.ndarray  # [batch] int32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Generator:
    """A target, an optional draft and their vocabulary."""

    target: Model
    vocabulary: Vocabulary
    max_source_len: int
    draft: Draft | None = None
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
    ) -> "Generator":
        """Reads checkpoints: directories or the names of packaged models.

        Args:
          target: the model whose output is wanted.
          draft: what ``checkpoints.make_draft`` makes a draft of; None or "none" decodes plainly.
          options: settings of the draft; the target computes in its ``dtype`` too.
          vocabulary: of a target that holds none (``checkpoints.vocabularies``).
          shardings: where the target's parameters are to lie (``checkpoints.loading``).

        Raises:
          InputError: a checkpoint that cannot be read, or a draft whose vocabulary
            is not the target's.
        """
        options = options or DraftOptions()
        loaded = load(target, dtype=options.dtype, vocabulary=vocabulary, shardings=shardings)
        model = bind(loaded.params, loaded.config)
        return cls(
            target=model,
            vocabulary=loaded.vocabulary,
            max_source_len=loaded.metadata.get("max_source_length", DEFAULT_MAX_SOURCE_LENGTH),
            draft=None if draft in (None, NO_DRAFT) else make_draft(draft, loaded, model, options),
        )

    def with_draft(self, draft: Draft | None) -> "Generator":
        """The same with another draft."""
        return dataclasses.replace(self, draft=draft)

    def plain(self) -> "Generator":
        """The same without its draft."""
        return self.with_draft(None)

    def tokenize(self, text: str, options: GenerateOptions) -> list[int]:
        """Ids of one input: a source's end with end of sequence, a prompt's do not.

        Raises:
          InputError: what is no text, text that is no Unicode, an empty source, or text
            longer than ``max_source_len`` tokens or than the target has positions for,
            unless ``options.truncate``.
        """
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
        limit = options.max_source_len or self.max_source_len
        ids = self.vocabulary.encode(text)
        if len(ids) + 1 > limit and not options.truncate:
            raise InputError(
                f"the text has {len(ids) + 1} tokens and the encoder takes {limit} "
                f"({text[:40]!r}…): shorten it, raise max_source_len, or pass truncate"
            )
        return [*ids[: limit - 1], EOS_ID]

    @property
    def is_decoder_only(self) -> bool:
        """Whether the target goes on with a text instead of answering it."""
        return isinstance(self.target, GPTModel)

    def _tokenize_prompt(self, text: str, options: GenerateOptions) -> list[int]:
        limit = self._longest_prompt(options)
        ids = self.vocabulary.encode(text)
        if ids and not limit:
            raise InputError(
                f"max_decode_len is {options.max_decode_len} and leaves a prompt none of the "
                f"{self.target.max_positions} positions: lower max_decode_len"
            )
        if len(ids) > limit and not options.truncate:
            given = options.max_source_len == limit
            change = "raise max_source_len" if given else "lower max_decode_len"
            raise InputError(
                f"the prompt has {len(ids)} tokens and there is room for {limit} ({text[:40]!r}…): "
                f"shorten it, {change}, or pass truncate"
            )
        return ids[max(len(ids) - limit, 0) :]

    def _longest_prompt(self, options: GenerateOptions) -> int:
        room = self.target.max_positions - options.max_decode_len
        if room < 0:
            raise InputError(
                f"max_decode_len is {options.max_decode_len} and the target has "
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
        steps[: len(ids)] = options.max_decode_len
        # As many keys for every batch: their number is part of the program.
        padded = np.zeros(options.batch_size, np.uint32)
        padded[: len(places)] = places
        return Batch(
            texts=list(texts),
            tokens=tokens,
            prompts=prompts,
            keys=_keys(np.uint32(options.seed), padded),
            max_decode_steps=steps,
        )

    def _sources(self, ids: Sequence[list[int]], options: GenerateOptions):
        """Sources, and prompts of nothing but the start token."""
        limit = options.max_source_len or self.max_source_len
        width = bucket(max(map(len, ids)), limit)
        tokens = _padded(ids, options.batch_size, width)
        # A padding row needs something to attend to.
        tokens[:, 0] = np.where(tokens[:, 0] == PAD_ID, EOS_ID, tokens[:, 0])
        return tokens, np.full((options.batch_size, 1), PAD_ID, np.int32)

    def _prompts(self, ids: Sequence[list[int]], options: GenerateOptions):
        """A source of one token for each row, and prompts."""
        longest = max(map(len, ids))
        width = bucket(longest, self._longest_prompt(options)) if longest else 0
        start = np.full((options.batch_size, 1), PAD_ID, np.int32)
        prompts = np.hstack([start, _padded(ids, options.batch_size, width)])
        return np.full((options.batch_size, 1), EOS_ID, np.int32), prompts

    def decode(self, batch: Batch, options: GenerateOptions, pace: Pace | None = None) -> Decoded:
        """Decodes one batch on the device; returns at once, before it is done.

        Args:
          batch: the inputs.
          options: how to decode.
          pace: with gamma "auto", what to go on with from an earlier batch
            (``Decoded.pace``); None starts anew.

        Raises:
          InputError: the batch cannot be decoded.
        """
        if options.gamma == AUTO and pace is None:
            pace = self.pace(batch, options)
        common = _loop_options(batch, options)
        chosen = options.make_verifier()
        if self.draft is None or (options.gamma == AUTO and pace is None):
            return _decode_plainly(
                self.target,
                batch.tokens,
                batch.prompts,
                batch.keys,
                options.sampling(),
                coupled=chosen.coupled,
                **common,
            )
        return _decode_speculatively(
            self.target,
            self.draft,
            batch.tokens,
            batch.prompts,
            batch.keys,
            options.sampling(),
            gamma=options.gamma if pace is None else pace.largest,
            verifier=chosen,
            pace=pace,
            **common,
        )

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
        chosen = options.make_verifier()

        def decode(pace: Pace, tokens: int) -> Decoded:
            steps = np.minimum(np.asarray(batch.max_decode_steps), tokens).astype(np.int32)
            return self.decode(dataclasses.replace(batch, max_decode_steps=steps), options, pace)

        def measure() -> Costs:
            whole = isinstance(chosen, TreeVerifier)
            return costs_lib.measure(
                decode, costs_lib.largest_limit(self.draft, chosen), whole=whole
            )

        values = dataclasses.asdict(options)
        settings = {name: values[name] for name in _COSTLY}
        settings |= {"greedy": options.sampling().greedy, "max_source_len": self.max_source_len}
        key = identity(self.target, self.draft, settings)
        return costs_lib.remembered(key, measure, Store.of_user())

    def assume(self, options: GenerateOptions, costs: Costs) -> None:
        """Takes costs for known that somebody else has measured."""
        self._costs[options] = costs

    def pace(self, batch: Batch, options: GenerateOptions) -> Pace | None:
        """What to decode with where gamma is "auto"; None where no draft can ever pay."""
        if self.draft is None:
            return None
        costs = self.costs(batch, options)
        if math.isinf(costs.needed):
            return None
        return Pace.start(costs, rows=options.batch_size * options.num_decodes)

    def run(self, options: GenerateOptions) -> "Run":
        """Decodes batch after batch: with gamma "auto" each at the pace of those before it."""
        return Run(self, options)

    def search(self, batch: Batch, options: GenerateOptions) -> BeamResult:
        """Beam search for one batch on the device; returns at once, before it is done.

        Raises:
          InputError: a draft that is not a model.
        """
        arguments = (batch.tokens, batch.prompts)
        common = {
            "beams": options.beams,
            "alpha": options.beam_alpha,
            "max_decode_len": _room(batch, options),
            "max_decode_steps": batch.max_decode_steps,
        }
        if self.draft is None or options.gamma in (0, AUTO):
            return beam_search(self.target, *arguments, **common)
        if not isinstance(self.draft, TransformerDraft):
            raise InputError(
                f"beams is {options.beams} and the draft a {type(self.draft).__name__}: search "
                "with a transformer draft, or with none"
            )
        return speculative_beam_search(
            self.target, self.draft.model, *arguments, gamma=options.gamma, **common
        )

    def generate(
        self,
        texts: str | Iterable[str],
        options: GenerateOptions | None = None,
        *,
        first: int = 0,
        **changes,
    ) -> Iterator[Answer]:
        """Yields, for each input in order, its outputs, the best first.

        An input that cannot be decoded is its answer's ``error``; the others are decoded.

        Args:
          texts: the inputs, of which a few batches are looked at ahead; a string is one.
          options: how to decode.
          first: the place of the first input, which its random numbers depend on.
          changes: options that are to be other than in ``options``.

        Raises:
          InputError: options that do not fit together.
        """
        options = _options(options, changes)
        texts = [texts] if isinstance(texts, str) else texts
        return self._answers(((text, None) for text in texts), options, first)

    def generate_ids(
        self, ids: Iterable[list[int]], options: GenerateOptions, *, first: int = 0
    ) -> Iterator[Answer]:
        """``generate`` for inputs that are ids already: sources with EOS, prompts without."""
        return self._answers((("", row) for row in ids), options, first)

    def _answers(
        self, inputs: Iterable[tuple[str, list[int] | None]], options: GenerateOptions, first: int
    ) -> Iterator[Answer]:
        """The answer to each input (text, and ids if known) in order, decoded by length."""
        run, answers = self.run(options), {}
        size = options.batch_size * (_SORTED if options.batch_size > 1 else 1)

        def started():
            numbered = enumerate(inputs, first)
            while window := list(itertools.islice(numbered, size)):
                good = []
                for place, (text, ids) in window:
                    try:
                        ids = self.tokenize(text, options) if ids is None else ids
                        good.append((place, text, ids))
                    except InputError as error:
                        answers[place] = Answer(error=error)
                for places, batch in self.by_length(good, options):
                    yield places, run.start(batch)
                if not good:
                    yield (), lambda: ()

        following = first
        for places, finish in one_ahead(started()):
            answers.update(zip(places, finish(), strict=True))
            while following in answers:
                yield answers.pop(following)
                following += 1
        run.remember()

    def by_length(
        self, inputs: Iterable[tuple[int, str, list[int]]], options: GenerateOptions
    ) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Batches of inputs of about one length: a batch takes as long as its longest row.

        The longest inputs come first: what does not fit into memory fails early.

        Args:
          inputs: place among all inputs (which random numbers depend on), text and ids of each.
          options: how to decode.

        Yields:
          The places of a batch's inputs, and the batch.
        """
        ordered, size = sorted(inputs, key=lambda one: -len(one[2])), options.batch_size
        for start in range(0, len(ordered), size):
            places, texts, ids = zip(*ordered[start : start + size], strict=True)
            yield places, self.make_batch(texts, ids, places, options)

    def steps(
        self, text: str, options: GenerateOptions | None = None, place: int = 0
    ) -> Iterator[Iteration]:
        """Decodes one input, yielding after each iteration; returns its outputs.

        The text is the one that ``generate`` gives to the input at ``place``.

        Raises:
          InputError: there is no draft, or more than one decode was asked for; or the
            models compute what is not finite, before a token of it is yielded.
        """
        options = options or GenerateOptions()
        if self.draft is None:
            raise InputError("no draft to step with: give one, or use generate")
        if options.num_decodes != 1:
            raise InputError(f"num_decodes is {options.num_decodes}: stepping decodes 1")
        if options.beams:
            raise InputError(f"beams is {options.beams}: a search cannot be stepped through")
        (batch,) = self.batches([text], dataclasses.replace(options, batch_size=1), place)
        decoded = yield from self.iterations(batch, options)
        return next(all_answered(self.collect(batch, decoded)))

    def iterations(self, batch: Batch, options: GenerateOptions) -> Iterator[Iteration]:
        """``decode`` with a draft, yielding after each iteration; returns what it returns.

        Raises:
          InputError: as of ``decode``.
        """
        pace = Pace.start(self.costs(batch, options)) if options.gamma == AUTO else None
        return speculative_steps(
            self.target,
            self.draft,
            batch.tokens,
            batch.prompts,
            batch.keys,
            options.sampling(),
            gamma=options.gamma if pace is None else pace.largest,
            verifier=options.make_verifier(),
            pace=pace,
            **_loop_options(batch, options),
        )

    def collect(self, batch: Batch, decoded: Decoded) -> Iterator[Answer]:
        """Fetches a batch's results and turns them into text."""
        decoded = jax.device_get(decoded)
        skipped = _prompt_lengths(batch)
        for row, text in enumerate(batch.texts):
            error = _unsound("target", text, decoded.scores[row])
            if error is None and decoded.stats is not None:
                error = _unsound("draft", text, decoded.stats.beta_sum[row])
            # The loops have T5X's order, by increasing score.
            decodes = () if error else reversed(range(decoded.tokens.shape[1]))
            yield Answer(
                [self._generation(text, decoded, row, decode, skipped[row]) for decode in decodes],
                error,
            )

    def collect_beams(
        self, batch: Batch, result: BeamResult, options: GenerateOptions
    ) -> Iterator[Answer]:
        """As ``collect``, of a search."""
        result = jax.device_get(result)
        speculative = self.draft is not None and options.gamma not in (0, AUTO)
        skipped = _prompt_lengths(batch)
        for row, text in enumerate(batch.texts):
            calls = int(result.stats.target_calls[row])
            efficiency = float(result.stats.block_efficiency[row]) if speculative else None
            error, outputs = _unsound("target", text, result.scores[row]), []
            for beam in reversed(range(options.beams - options.num_decodes, options.beams)):
                ids = result.tokens[row, beam, skipped[row] : result.lengths[row, beam]].tolist()
                outputs.append(
                    Generation(
                        input=text,
                        output=self.vocabulary.decode(ids),
                        output_ids=ids,
                        score=float(result.scores[row, beam]),
                        target_calls=calls,
                        block_efficiency=efficiency,
                    )
                )
            yield Answer(() if error else outputs, error)

    def _generation(
        self, text: str, decoded: Decoded, row: int, decode: int, skipped: int
    ) -> Generation:
        """The output without the ``skipped`` tokens of its prompt."""
        at = (row, decode)
        ids = decoded.tokens[at][skipped : decoded.lengths[at]].tolist()
        common = {
            "input": text,
            "output": self.vocabulary.decode(ids),
            "output_ids": ids,
            "score": float(decoded.scores[at]),
        }
        if decoded.stats is None:
            return Generation(**common, target_calls=len(ids))
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


@dataclasses.dataclass
class Run:
    """Batches of some options, decoded one after the other."""

    generator: Generator
    options: GenerateOptions
    # With gamma "auto": of the batch decoded last, on the device; None before the first one,
    # and where no draft can pay.
    pace: Pace | None = None
    # Of the sources that were decoded at a pace: each has a program of its own.
    _shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set, init=False)
    # The pace that was last looked at, and whether it takes plain steps.
    _judged: tuple[Pace | None, bool] = dataclasses.field(default=(None, False), init=False)
    # Plain steps that the pace has not been told of.
    _uncredited: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        if self.pace is None and self.repeats:
            self.pace = self.generator._paces.get(self.options)

    @property
    def repeats(self) -> bool:
        """Whether texts are the same at any pace."""
        return self.options.sampling().greedy or self.options.make_verifier().coupled

    def start(self, batch: Batch) -> Callable[[], Iterator[Answer]]:
        """Sets the device to work; the answers are waited for by calling."""
        generator, options = self.generator, self.options
        if options.beams:
            found = generator.search(batch, options)
            return functools.partial(generator.collect_beams, batch, found, options)
        if self._leaves_out_the_draft(batch):
            return functools.partial(self._credit, batch, generator.plain().decode(batch, options))
        return functools.partial(generator.collect, batch, self.decode(batch))

    def _leaves_out_the_draft(self, batch: Batch) -> bool:
        """Whether plain decoding is what the pace would do, in a program still to be made.

        To make or load one with the draft takes longer than one without.
        """
        shape = batch.tokens.shape
        if self.pace is not None and shape not in self._shapes:
            if self._uncredited:
                self.pace = _without_the_draft(self.pace, np.int32(self._uncredited))
                self._uncredited = 0
            if self._is_plain():
                return True
        self._shapes.add(shape)
        return False

    def _credit(self, batch: Batch, decoded: Decoded) -> Iterator[Answer]:
        """``Generator.collect`` of plain decoding, whose steps pay for looking at the draft."""
        decoded = jax.device_get(decoded)
        self._uncredited += int(np.max(decoded.lengths)) - min(_prompt_lengths(batch))
        yield from self.generator.collect(batch, decoded)

    def _is_plain(self) -> bool:
        """Whether the pace would take a plain step; waits for the batch that it is of."""
        if self._judged[0] is not self.pace:
            self._judged = self.pace, not _limit(self.pace)
        return self._judged[1]

    def decode(self, batch: Batch) -> Decoded:
        """``Generator.decode`` at this run's pace."""
        decoded = self.generator.decode(batch, self.options, self.pace)
        self.pace = decoded.pace
        return decoded

    def remember(self) -> None:
        """Begins the generator's next run of these options at the pace of this one."""
        if self.pace is not None and self.repeats:
            self.generator._paces[self.options] = self.pace

    @property
    def verdict(self) -> str | None:
        """Why the draft was left out, where it mostly was."""
        costs = self.generator._costs.get(self.options)
        if costs is None:
            return None
        one = next(cost for cost in costs.iteration[1:] if math.isfinite(cost))
        if math.isinf(costs.needed):
            return (
                f"the draft was left out: at batch size {self.options.batch_size} its iterations "
                f"take {one:.2f} plain steps and more, which no acceptance pays for"
            )
        if self.pace is None:
            return None
        pace = jax.device_get(self.pace)
        share = pace.plain_steps / max(pace.plain_steps + pace.iterations, 1)
        if share < _LEFT_OUT:
            return None
        pays = f"it pays here from an acceptance rate of about {costs.needed:.0%}"
        if not pace.iterations:
            return f"the draft was left out: {pays}"
        return (
            f"the draft was left out of {share:.0%} of the steps: {pays}, and "
            f"{float(pace.rates[0]):.0%} of its first tokens were accepted"
        )


def all_answered(answers: Iterable[Answer]) -> Iterator[Answer]:
    """The outputs of each input; raises the first ``InputError`` among them."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        yield answer


def one_ahead(started: Iterable[Started]) -> Iterator[Started]:
    """Yields each once the next one is started, which the device goes on with meanwhile."""
    waiting: list[Started] = []
    for batch in started:
        yield from waiting
        waiting = [batch]
    yield from waiting


def _unsound(model: str, text: str, values: np.ndarray) -> InputError | None:
    """Why an input has no text, where what a model computed for it is not finite."""
    if np.all(np.isfinite(values)):
        return None
    return InputError(f"the {model}'s logits are not finite for {text[:40]!r}: {UNSOUND}")


def bucket(length: int, limit: int) -> int:
    """The padded length of a source or prompt: the next power of two, at least 16.

    >>> [bucket(n, 96) for n in (3, 17, 60, 90)]
    [16, 32, 64, 96]
    """
    size = _SMALLEST_BUCKET
    while size < length:
        size *= 2
    return max(length, min(size, limit))


def _options(options: GenerateOptions | None, changes: dict) -> GenerateOptions:
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise InputError(
            f"options are {options!r}: give GenerateOptions(…), or single ones by name"
        )
    known = [field.name for field in dataclasses.fields(options)]
    for name in changes:
        if name not in known:
            raise InputError(f"there is no option {name!r}: choose from {', '.join(known)}")
    return dataclasses.replace(options, **changes)


# Loaded whole where a process before has made them.
_decode_plainly = Kept(
    autoregressive_decode, ("coupled", "max_decode_len", "num_decodes", "rescale_log_probs")
)
_decode_speculatively = Kept(
    speculative_decode,
    ("gamma", "max_decode_len", "num_decodes", "rescale_log_probs", "verifier"),
)

_limit = Kept(jax.jit(Pace.limit), ())
_without_the_draft = Kept(jax.jit(Pace.without_the_draft), ())


@jax.jit
def _keys(seed, places):
    """A random key for each input, by its place among all."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(places))


def _num_parameters(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _padded(ids: Sequence[list[int]], rows: int, width: int) -> np.ndarray:
    """The ids of each row, then padding, ``[rows, width]``."""
    padded = np.full((rows, width), PAD_ID, np.int32)
    for row, row_ids in enumerate(ids):
        padded[row, : len(row_ids)] = row_ids
    return padded


def _prompt_lengths(batch: Batch) -> list[int]:
    """Tokens of each row's prompt after the start token."""
    return np.count_nonzero(np.asarray(batch.prompts)[:, 1:] != PAD_ID, axis=1).tolist()


def _room(batch: Batch, options: GenerateOptions) -> int:
    """The loops' ``max_decode_len``, which counts the prompt."""
    return batch.prompts.shape[1] - 1 + options.max_decode_len


def _loop_options(batch: Batch, options: GenerateOptions) -> dict:
    return {
        "max_decode_len": _room(batch, options),
        "max_decode_steps": batch.max_decode_steps,
        "num_decodes": options.num_decodes,
        "rescale_log_probs": options.rescale_log_probs,
    }
