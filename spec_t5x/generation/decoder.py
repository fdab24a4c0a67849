"""Decoder that makes batches of texts, runs the loops and makes texts of their tokens."""

import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from spec_t5x.beams.hypotheses import BeamResult, Ranking, TransformersRanking, check_beams
from spec_t5x.beams.search import beam_search
from spec_t5x.checkpoints.huggingface.generation_config import LeftOut
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, check_jax, check_unicode, check_unused, one_line
from spec_t5x.generation.answers import Answer, Generation
from spec_t5x.generation.batches import Batch, Input, bucket, padded, prompt_lengths, random_keys
from spec_t5x.generation.stop_strings import first_stop
from spec_t5x.interfaces import Draft, check_fits, check_positions
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import Loop, NoDraft
from spec_t5x.loops.outputs import UNSOUND, Decoded
from spec_t5x.loops.pace import Pace
from spec_t5x.loops.speculative import Iteration, speculative_decode, speculative_steps
from spec_t5x.models.cached_model import CachedModel, TextModel
from spec_t5x.names import AUTO
from spec_t5x.options import NO_RULES, GenerateOptions
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.rules import Rules, rules
from spec_t5x.types import EOS_ID, PAD_ID

Kind = TypeVar("Kind", bound="BatchDecoder")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BatchDecoder:
    """A target, an optional draft and their vocabulary, which decode batches."""

    target: CachedModel
    vocabulary: Vocabulary
    max_source_len: int
    draft: Draft | None = None
    # Options of the checkpoint, for those that a user leaves None (``GenerateOptions.settled``).
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Settings of the checkpoint without effect here, which the first batches name.
    left_out: LeftOut | None = None

    def __post_init__(self):
        if not hasattr(self.vocabulary, "eos_ids"):
            raise InputError(f"vocabulary is {one_line(repr(self.vocabulary))}: give a Vocabulary")
        if isinstance(draft := self.draft, str | os.PathLike):
            raise InputError(f"draft is {str(draft)!r}: give a Draft, or a name to Generator.load")
        if draft is not None:
            check_fits(draft, self.target)

    def __repr__(self) -> str:
        models = {"target": self.target}
        if self.draft is not None:
            models[type(self.draft).__name__] = self.draft
        sizes = {name: sum(x.size for x in jax.tree.leaves(m)) for name, m in models.items()}
        shown = (f"{name} of {size / 1e6:.1f}M parameters" for name, size in sizes.items())
        return f"{type(self).__name__}({', '.join(shown)}, {self.vocabulary.vocab_size} ids)"

    def with_draft(self: Kind, draft: Draft | None) -> Kind:
        """Returns a copy with another draft or None; raises ``InputError`` if it does not fit."""
        return dataclasses.replace(self, draft=draft)

    def plain(self: Kind) -> Kind:
        """Returns a copy of this decoder without a draft."""
        return self.with_draft(None)

    @property
    def is_decoder_only(self) -> bool:
        """True if the target is decoder-only: its input is a prompt, which the output continues."""
        return isinstance(self.target, TextModel)

    def check(self, options: GenerateOptions, texts: Iterable[str] = ()) -> None:
        """Raises ``InputError`` for options with which the target decodes no input, or a text."""
        check_jax()
        if self.is_decoder_only:
            check_unused(options, "a decoder-only model's prompt comes first", "output_prefix")
        # The copy compares gamma and ``min_decode_len`` with the checkpoint's limit.
        limit = self.max_decode_len(options)
        dataclasses.replace(options, max_decode_len=limit)
        check_positions(self.target, limit)
        self.sampling(options)
        check_beams(self.target.vocab_size, self.vocabulary.eos_ids, 0, beams=options.beams)
        has_penalty = options.settled(self.defaults)["length_penalty"] is not None
        if options.early_stopping is not None and not has_penalty:
            raise InputError(
                f"early_stopping is {options.early_stopping!r}, which T5X's ranking does not use: "
                "give a length_penalty as well, or leave early_stopping out"
            )
        if has_penalty and options.beams:
            check_unused(options, "a length_penalty replaces it", "beam_alpha")
        for text in texts:
            self.tokenize(text, options)

    # Texts to batches

    def tokenize(self, text: str | InputError, options: GenerateOptions) -> list[int]:
        """Encodes an input: a source with the ids that frame it (such as EOS), a prompt without.

        Raises:
          InputError: ``text`` is an ``InputError``, not Unicode, an empty source or, without
            ``options.truncate``, longer than ``max_source_len`` or the target's positions.
        """
        if isinstance(text, InputError):
            raise text
        if not isinstance(text, str):
            raise InputError(f"a text is {text!r}: give a string")
        check_unicode("the text", text)
        if not self.is_decoder_only and not text.strip():
            raise InputError("the text is empty: give at least one word")
        ids = self._encode("text", text)
        return self.fit(ids if self.is_decoder_only else self.vocabulary.framed(ids), text, options)

    def fit(self, ids: list[int], text: str, options: GenerateOptions) -> list[int]:
        """Returns an input's ids; ``options.truncate`` cuts them to the limit.

        A source keeps its EOS, and a prompt is cut at its beginning. Raises ``InputError`` if there
        are too many ids and ``options.truncate`` is off.
        """
        if self.is_decoder_only:
            return self._fit_prompt(ids, text, options)
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

    def _fit_prompt(self, ids: list[int], text: str, options: GenerateOptions) -> list[int]:
        if ids and options.forced_bos_token_id != -1:
            check_unused(options, "the prompt comes first", "forced_bos_token_id")
        limit = self._longest_prompt(options)
        if len(ids) > limit and not options.truncate:
            given = options.max_source_len == limit
            change = "raise max_source_len" if given else "lower max_decode_len"
            raise InputError(
                f"the prompt has {len(ids)} tokens and there is room for {limit} ({text[:40]!r}…): "
                f"shorten it, {change}, or pass truncate"
            )
        return ids[max(len(ids) - limit, 0) :]

    def _longest_prompt(self, options: GenerateOptions) -> int:
        max_decode_len, positions = self.max_decode_len(options), self.target.max_positions
        check_positions(self.target, max_decode_len)
        room = sys.maxsize if positions is None else positions - max_decode_len
        # An encoder-decoder's ``max_source_len`` does not limit the ``output_prefix``.
        given = options.max_source_len if self.is_decoder_only else None
        return room if given is None else min(room, given)

    def by_length(
        self, inputs: Iterable[Input], options: GenerateOptions
    ) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Yields batches of inputs of similar length, each after the places of its inputs.

        A batch takes as long as its longest row. The longest inputs come first, so that a batch
        that does not fit into memory fails early.
        """
        ordered, size = sorted(inputs, key=lambda one: -len(one[2])), options.batch_size
        for start in range(0, len(ordered), size):
            places, texts, ids = zip(*ordered[start : start + size], strict=True)
            yield places, self.make_batch(texts, ids, places, options)

    def make_batch(
        self,
        texts: Sequence[str],
        ids: Sequence[list[int]],
        places: Sequence[int],
        options: GenerateOptions,
    ) -> Batch:
        """Makes a batch of at most ``options.batch_size`` inputs, with padding rows up to it.

        ``places`` are the inputs' indices among all inputs, which decide their random keys.
        """
        if self.left_out is not None and self.left_out.texts:
            self.left_out.warn(texts, options)
        rows, given = options.batch_size, ids
        if self.is_decoder_only:
            # The target ignores its source.
            tokens = np.full((rows, 1), EOS_ID, np.int32)
        else:
            limit = options.max_source_len or self.max_source_len
            tokens = padded(ids, rows, bucket(max(map(len, ids)), limit))
            # A padding row needs something to attend to.
            tokens[:, 0] = np.where(tokens[:, 0] == PAD_ID, EOS_ID, tokens[:, 0])
            given = [self.prefix_ids(options)] * rows
        longest = max(map(len, given))
        width = bucket(longest, self._longest_prompt(options)) if longest else 0
        prompts = np.hstack([np.full((rows, 1), PAD_ID, np.int32), padded(given, rows, width)])
        steps = np.zeros(rows, np.int32)
        steps[: len(ids)] = self.max_decode_len(options)
        # Keys for padding rows too: their number is part of the compiled program.
        numbers = np.zeros(rows, np.uint32)
        numbers[: len(places)] = places
        return Batch(
            texts=list(texts),
            tokens=tokens,
            prompts=prompts,
            keys=random_keys(np.uint32(options.seed), numbers),
            max_decode_steps=steps,
        )

    def prefix_ids(self, options: GenerateOptions) -> list[int]:
        """Encodes ``options.output_prefix``; returns [] without one."""
        prefix = options.output_prefix
        return self._encode("output_prefix", prefix) if prefix else []

    def _encode(self, name: str, text: str) -> list[int]:
        ids, size = self.vocabulary.encode(text), self.target.vocab_size
        if max(ids, default=0) >= size:
            what = f"the {name} has id {max(ids)} and the target has {size} ids"
            raise InputError(f"{what}: give the target's vocabulary")
        return ids

    # The loops

    def max_decode_len(self, options: GenerateOptions) -> int:
        """Returns the most tokens generated for an input: the options', the checkpoint's or 128."""
        return int(options.settled(self.defaults)["max_decode_len"])

    def longest(self, batch: Batch, options: GenerateOptions) -> int:
        """Returns the largest length that a row of the batch can reach, padded prompt included."""
        return batch.prompts.shape[1] - 1 + self.max_decode_len(options)

    def room(self, batch: Batch, options: GenerateOptions) -> int:
        """Returns the ``max_decode_len`` that a loop is compiled for: ``longest``, rounded up.

        Similar limits share a program, which gets the exact one as ``max_decode_steps``.
        """
        room = batch.prompts.shape[1] - 1 + bucket(self.max_decode_len(options), sys.maxsize)
        try:
            check_positions(self.target, room)
            if self.draft is not None:
                self.draft.check(self.target, room)
        except InputError:
            # A model has fewer positions than the rounded limit.
            return self.longest(batch, options)
        return room

    def follows_pace(self, options: GenerateOptions) -> bool:
        """Returns True if gamma is "auto" and there is a draft, which a pace may leave out."""
        return self.draft is not None and options.gamma == AUTO

    def most_drafts(self, options: GenerateOptions, pace: Pace | None) -> int:
        """Returns the most drafts in an iteration: gamma, the pace's, or 0 without a draft."""
        gamma = options.gamma if pace is None else pace.largest
        return 0 if self.draft is None else gamma

    def loop(self, batch: Batch, options: GenerateOptions, gamma: int) -> Loop:
        """Returns the settings of a batch's loop, with at most ``gamma`` drafts in an iteration."""
        return Loop(gamma=gamma, verifier=options.make_verifier(), **self._of_loop(batch, options))

    def _of_loop(self, batch: Batch, options: GenerateOptions) -> dict[str, Any]:
        return {
            "eos_id": self.vocabulary.eos_ids,
            "max_decode_len": self.room(batch, options),
            "num_decodes": options.num_decodes,
            "rescale_log_probs": options.rescale_log_probs,
        }

    def sampling(self, options: GenerateOptions) -> Sampling:
        """Returns the settings of sampling, with the rules of decoding if there are any."""
        settings, found = options.sampling(), self.rules(options)
        if found is not None and (not callable(found) or jax.tree_util.all_leaves([found])):
            raise InputError(f"rules are {one_line(repr(found))}: give a flax.struct.dataclass")
        return settings if found is None else settings.replace(rules=found)

    def rules(self, options: GenerateOptions) -> Rules | None:
        """Returns the rules of decoding by the options or the checkpoint; None if there are none.

        Raises ``InputError`` if a rule has tokens that the model does not have.
        """
        settled = options.settled(self.defaults)
        return _rules(
            self.target.vocab_size,
            self.vocabulary.eos_ids,
            start_id=self.vocabulary.start_in_text,
            **{name: value for name, value in settled.items() if name not in NO_RULES},
        )

    def _loop_arguments(
        self, batch: Batch, options: GenerateOptions, pace: Pace | None
    ) -> tuple[Draft | None, tuple, dict]:
        """Returns the draft, None in plain decoding, and positional and named loop arguments."""
        draft = None if pace is None and self.follows_pace(options) else self.draft
        placed = batch.tokens, batch.prompts, batch.keys, self.sampling(options)
        named = self._of_loop(batch, options) | {"max_decode_steps": batch.max_decode_steps}
        if draft is not None:
            gamma, verifier = self.most_drafts(options, pace), options.make_verifier()
            named |= {"gamma": gamma, "verifier": verifier, "pace": pace}
        return draft, placed, named

    def decode(self, batch: Batch, options: GenerateOptions, pace: Pace | None = None) -> Decoded:
        """Starts decoding a batch on the device, and returns arrays that the device will fill.

        With gamma "auto" the number of drafts follows ``pace``; without a pace decoding is plain.
        Raises ``InputError`` if the batch cannot be decoded.
        """
        draft, placed, named = self._loop_arguments(batch, options, pace)
        if draft is None:
            coupled = options.make_verifier().coupled
            return autoregressive_decode(self.target, *placed, coupled=coupled, **named)
        return speculative_decode(self.target, draft, *placed, **named)

    def steps(
        self, batch: Batch, options: GenerateOptions, pace: Pace | None
    ) -> Iterator[Iteration]:
        """Decodes as ``decode``, driven from the host: yields each iteration, returns the result.

        The result has statistics even in plain decoding (``loops.speculative_steps``).
        """
        draft, placed, named = self._loop_arguments(batch, options, pace)
        if draft is None:
            draft = NoDraft(self.target.vocab_size)
            named |= {"gamma": 0, "verifier": options.make_verifier()}
        return speculative_steps(self.target, draft, *placed, **named)

    def search(self, batch: Batch, options: GenerateOptions) -> BeamResult:
        """Starts a beam search on the device, and returns arrays that the device will fill.

        Raises ``InputError`` if gamma is neither 0 nor "auto", and the draft is no transformer.
        """
        settled = options.settled(self.defaults)
        # The end of a search by T5X's rules depends on the longest text that it has room for.
        room = self.longest(batch, options)
        if settled["length_penalty"] is None:
            # The limit of each row follows from its prompt alone, whatever prompts are beside it.
            prompts = np.asarray(prompt_lengths(batch), np.int32)
            longest = prompts + self.max_decode_len(options) + 1
            ranking = Ranking(exponent=float(options.beam_alpha), longest=longest)
        else:
            ranking = TransformersRanking(
                exponent=float(settled["length_penalty"]), early_stopping=settled["early_stopping"]
            )
            room = self.room(batch, options)
        named = {
            "beams": options.beams,
            "ranking": ranking,
            "rules": self.rules(options),
            "eos_id": self.vocabulary.eos_ids,
            "max_decode_len": room,
            "max_decode_steps": batch.max_decode_steps,
        }
        if self._searches_speculatively(options):
            if type(self.draft) is not TransformerDraft or self.draft.settings is not None:
                raise InputError(
                    f"beams is {options.beams} and gamma {options.gamma}, but in a beam search "
                    "only a model without draft_temperature drafts: give a separate one, or gamma 0"
                )
            named |= {"draft_model": self.draft.model, "gamma": options.gamma}
        return beam_search(self.target, batch.tokens, batch.prompts, **named)

    def _searches_speculatively(self, options: GenerateOptions) -> bool:
        return self.draft is not None and options.gamma not in (0, AUTO)

    # Results to texts

    def collect(self, batch: Batch, decoded: Decoded, options: GenerateOptions) -> Iterator[Answer]:
        """Waits for a batch's results and yields the answer to each input."""
        # The pace stays on the device.
        decoded = jax.device_get(decoded.replace(pace=None))
        for row, (text, given) in enumerate(zip(batch.texts, prompt_lengths(batch), strict=False)):
            yield self.answer(text, given, decoded, row, options)

    def answer(
        self, text: str, skipped: int, decoded: Decoded, row: int, options: GenerateOptions
    ) -> Answer:
        """Makes the answer to an input, with an ``error`` if its logits were not finite.

        ``decoded`` is on the host, ``row`` an index into it, ``skipped`` the prompt's length.
        """
        error, stats = _unsound("target", text, decoded.scores[row]), decoded.stats
        if error is None and stats is not None:
            error = _unsound("draft", text, stats.beta_sum[row])
        if error is not None:
            return Answer(error=error)
        answer = Answer()
        # The loops have T5X's order, by increasing score.
        for at in ((row, decode) for decode in reversed(range(decoded.tokens.shape[1]))):
            counts = {"target_calls": int(decoded.lengths[at]) - skipped}
            if stats is not None:
                verified = stats.verified[at]
                counts = {
                    "target_calls": int(stats.target_calls[at]),
                    "proposed": int(stats.proposed[at]),
                    "accepted": int(stats.accepted[at]),
                    "accepted_by_position": stats.accepted_by_position[at].tolist(),
                    "verified_by_position": stats.verified_by_position[at].tolist(),
                    "block_efficiency": float(stats.block_efficiency[at]),
                    "alpha": float(stats.beta_sum[at] / verified) if verified else None,
                }
            answer.append(self._generation(text, skipped, decoded, at, options.stop, **counts))
        return answer

    def collect_beams(
        self, batch: Batch, result: BeamResult, options: GenerateOptions
    ) -> Iterator[Answer]:
        """Waits for the results of a beam search and yields the answer to each input."""
        result = jax.device_get(result)
        speculative, lengths = self._searches_speculatively(options), prompt_lengths(batch)
        best = range(options.beams - options.num_decodes, options.beams)
        for row, text in enumerate(batch.texts):
            error = _unsound("target", text, result.scores[row])
            counts = {"target_calls": int(result.stats.target_calls[row])}
            if speculative:
                counts["block_efficiency"] = float(result.stats.block_efficiency[row])
            outputs = (
                self._generation(text, lengths[row], result, (row, beam), (), **counts)
                for beam in reversed(() if error else best)
            )
            yield Answer(outputs, error)

    def _generation(
        self,
        text: str,
        skipped: int,
        decoded: Decoded | BeamResult,
        at: tuple[int, int],
        stop: tuple[str, ...],
        **counts,
    ) -> Generation:
        """Makes the output at index ``at``, which ends at a ``stop`` text; omits a prompt."""
        decode = self.vocabulary.decode
        # The prefix of an encoder-decoder's output is part of it.
        first = skipped if self.is_decoder_only else 0
        ids = decoded.tokens[at][first : decoded.lengths[at]].tolist()
        given = skipped - first
        stopped = first_stop(decode, ids[:given], ids[given:], stop, given)
        if stopped is not None:
            ids = ids[: given + stopped.count]
        return Generation(
            input=text,
            output=decode(ids) if stopped is None else stopped.text,
            output_ids=ids,
            score=float(decoded.scores[at]),
            **counts,
        )


def _unsound(model: str, text: str, values: np.ndarray) -> InputError | None:
    """Returns an error for an input if any of a model's values is not finite, else None."""
    if np.all(np.isfinite(values)):
        return None
    return InputError(f"the {model}'s logits are not finite for {text[:40]!r}: {UNSOUND}")


@functools.lru_cache
def _rules(*args: Any, **values: Any) -> Rules | None:
    """Returns cached ``rules``, which hold device arrays, also where a function is traced."""
    with jax.ensure_compile_time_eval():
        return rules(*args, **values)
