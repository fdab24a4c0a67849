"""Comparison of speculative with plain decoding: same inputs, same process, no compilation."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError, check_unused
from spec_t5x.generation import Batch, GenerateOptions, Generation, Generator
from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark.achieved import achieved
from spec_t5x.labs.benchmark.reliability import OtherPrograms
from spec_t5x.labs.benchmark.step_times import StepTimes, measure_step_times
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.labs.theory import formulas
from spec_t5x.loops.outputs import Decoded
from spec_t5x.names import AUTO
from spec_t5x.options import OF_SEARCH
from spec_t5x.sampling.rules import Places
from spec_t5x.tuning.interleaving import elapsed
from spec_t5x.types import PAD_ID, PyTree

Decode = Callable[[Batch], Decoded]
# The results of one round, one for each batch, by "plain" and "speculative".
Round = dict[str, list[Decoded]]


def time_in_turn(
    plain: Callable[[], Decode],
    speculative: Callable[[], Decode],
    rounds: Sequence[Sequence[Batch]],
) -> tuple[dict[str, Any], list[Round]]:
    """Times plain and speculative decoding in rounds: all batches one way, then all the other.

    If the ways alternated batch by batch, each program would find the other's code and weights in
    the processor's cache, which no user's program does. Rounds begin with either way in turn, so
    that drift of the machine affects both; each makes its functions anew, without an old pace.

    Returns:
      Fields of ``Comparison`` (seconds and ``beside``), and the results of each round.
    """
    ways = {"plain": plain, "speculative": speculative}
    # Batches of a language model differ only in their prompts.
    shapes = {(b.tokens.shape, b.prompts.shape): b for batches in rounds for b in batches}
    times: dict[str, Any] = {}
    for name, way in ways.items():
        decode = way()
        first, second = (
            sum(elapsed(partial(decode, batch))[0] for batch in shapes.values()) for _ in range(2)
        )
        times[f"{name}_compile_seconds"] = max(first - second, 0.0)
        times[f"{name}_seconds"] = [0.0] * len(rounds)
        times[f"{name}_setup_seconds"] = [0.0] * len(rounds)
    decoded: list[Round] = [{name: [] for name in ways} for _ in rounds]
    others = OtherPrograms()
    for number, batches in enumerate(rounds):
        decodes = {name: (way(), way()) for name, way in ways.items()}
        for name in sorted(ways, reverse=number % 2 == 1):
            whole, prefill = decodes[name]
            for batch in batches:
                taken, result = elapsed(partial(whole, batch))
                times[f"{name}_seconds"][number] += taken
                decoded[number][name].append(result)
            for batch in batches:
                # With nothing to generate, the time is the prefill's.
                steps = np.zeros_like(batch.max_decode_steps)
                bare = dataclasses.replace(batch, max_decode_steps=steps)
                times[f"{name}_setup_seconds"][number] += elapsed(partial(prefill, bare))[0]
    return times | {"beside": others.share}, decoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """First position where two outputs that should be equal differ."""

    input: str
    # Index of the token.
    position: int
    plain_token: int
    speculative_token: int
    # The target's logit of the plain token minus that of the speculative token.
    margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRounds:
    """Tokens and seconds of the same inputs, decoded plainly and another way in each round."""

    # Tokens generated in a round: ends of sequence count, padding rows do not.
    plain_tokens: int
    speculative_tokens: int
    # Seconds of every round, for all inputs, with encoding and without compilation.
    plain_seconds: list[float]
    speculative_seconds: list[float]

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding."""
        return self.plain_tokens / statistics.median(self.plain_seconds)

    @property
    def speculative_rate(self) -> float:
        """Tokens per second of speculative decoding."""
        return self.speculative_tokens / statistics.median(self.speculative_seconds)

    @property
    def speed_up(self) -> float:
        """Ratio of the speculative to the plain rate, each a median over rounds."""
        return self.speculative_rate / self.plain_rate

    @property
    def speed_up_range(self) -> tuple[float, float]:
        """Lowest and highest speed-up of a single round."""
        tokens = self.speculative_tokens / self.plain_tokens
        pairs = zip(self.plain_seconds, self.speculative_seconds, strict=True)
        ratios = [tokens * plain / speculative for plain, speculative in pairs]
        return min(ratios), max(ratios)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(TimedRounds):
    """Times, counts and outputs of the same inputs, decoded plainly and speculatively."""

    num_inputs: int
    # Drafts per iteration; for gamma "auto" the rounded mean, or 0 if both ways were plain.
    gamma: int
    temperature: float
    verifier: str
    # The part of these seconds that prefill takes: dispatch, encoding, empty caches.
    plain_setup_seconds: list[float]
    speculative_setup_seconds: list[float]
    plain_compile_seconds: float
    speculative_compile_seconds: float
    # Speculative decoding's counts of a round, means over rounds; plain steps have no drafts.
    target_calls: float
    plain_steps: float
    accepted: float
    verified: float
    # Mean of beta over verified drafts, None without any; the given rate if acceptances are
    # simulated. In a tree, beta is the chance of a node's first child.
    alpha: float | None
    step_times: StepTimes
    # True if all outputs are equal; None when sampling, since outputs are then different draws.
    identical: bool | None
    divergences: list[Divergence]
    # Speculative outputs of the last round, by input; empty if acceptances are simulated.
    outputs: list[list[Generation]]
    # Why gamma "auto" left the draft out, so that both ways were plain; None if it did not.
    left_out: str | None = None
    # For a tree: the share of verified positions at which a child was accepted, by depth.
    acceptance_by_position: list[float] | None = None
    # Inputs decoded together.
    batch_size: int = 1
    # The largest share of the processors that other programs used during a part of the timing.
    beside: float = 0.0
    # True if the verifier is lossy, so that the texts' distribution is not the target's.
    lossy: bool = False

    @property
    def block_efficiency(self) -> float:
        """Generated tokens of speculative decoding for each target call."""
        return self.speculative_tokens / self.target_calls

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the verified drafts that were accepted; None where none was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def is_noise(self) -> bool:
        """True if the speed-up exceeds its bound, the block efficiency, through noisy times.

        No iteration is faster than a plain step. If sampled texts are longer than the plain texts,
        one prefill serves more tokens, and the bound is at least the ratio of tokens. False if
        nothing was drafted, or for batches of rows, where the mean over rows is no bound.
        """
        if self.batch_size > 1 or self.left_out is not None:
            return False
        longer = self.speculative_tokens / self.plain_tokens
        return self.speed_up > max(self.block_efficiency, longer)

    @property
    def loop_speed_up(self) -> float | None:
        """Speed-up without the prefill, which Theorem 3.8 leaves out; None if noise hides it."""
        median = statistics.median
        plain = median(self.plain_seconds) - median(self.plain_setup_seconds)
        drafted = median(self.speculative_seconds) - median(self.speculative_setup_seconds)
        if min(plain, drafted) <= 0:
            return None
        return (self.speculative_tokens / drafted) / (self.plain_tokens / plain)

    @property
    def predicted(self) -> float:
        """Speed-up by Theorem 3.8 from the measured alpha and c, if verification took one step.

        Plain steps, which gamma "auto" takes, count as one token in one step each.
        """
        return self._predicted(1.0)

    @property
    def predicted_with_verification(self) -> float:
        """Speed-up by Theorem 3.8 from the measured alpha, c and time of a verification."""
        return self._predicted(self.step_times.verification_cost)

    def _predicted(self, cost: float) -> float:
        if self.acceptance_by_position is None:
            tokens = formulas.expected_tokens(self.alpha or 0.0, self.gamma)
        else:
            tokens = formulas.expected_tokens_by_position(np.asarray(self.acceptance_by_position))
        time = formulas.iteration_time(self.gamma, self.step_times.c, cost)
        plain, drafted = self.plain_steps, self.target_calls - self.plain_steps
        return float((plain + drafted * tokens) / (plain + drafted * time))

    def to_dict(self) -> dict:
        """Returns the fields but ``outputs``, and the figures derived from them, for JSON."""
        fields = dataclasses.asdict(self)
        del fields["outputs"]
        return fields | {
            "plain_tokens_per_second": self.plain_rate,
            "speculative_tokens_per_second": self.speculative_rate,
            "block_efficiency": self.block_efficiency,
            "acceptance_rate": self.acceptance_rate,
            "speed_up": self.speed_up,
            "speed_up_range": list(self.speed_up_range),
            "noise": self.is_noise,
            "loop_speed_up": self.loop_speed_up,
            "c": self.step_times.c,
            "verification_cost": self.step_times.verification_cost,
            "predicted_speed_up": self.predicted,
            "predicted_speed_up_with_verification": self.predicted_with_verification,
        }


def compare(
    generator: Generator, texts: Sequence[str], options: GenerateOptions, repeats: int = 3
) -> Comparison:
    """Decodes the inputs plainly and speculatively in turn, ``repeats`` times.

    Gamma "auto" is 0 if the draft pays only above the acceptance rate ``pace.OPTIMISM``.

    Raises:
      InputError: there is no draft, gamma is 0, beams are given, or an input cannot be decoded.
    """
    if generator.draft is None or options.gamma == 0:
        raise InputError("nothing to compare with: give a draft and a gamma of at least 1")
    check_unused(options, "a beam search is not compared", "beams")
    batches, plain, left_out = text_batches(generator, texts, options), generator.plain(), None
    if not pays(generator, batches[0], options):
        left_out = generator.engine(options).costs(batches[0]).where_it_pays
    drafted = plain if left_out else generator
    times, decoded = time_in_turn(
        lambda: plain.engine(options).decode,
        lambda: drafted.engine(options).decode,
        [batches] * repeats,
    )
    plain_outputs, outputs = (
        [
            # A list: reading an answer that is an error raises it.
            list(answer)
            for batch, of_batch in zip(batches, of_way, strict=True)
            for answer in generator.collect(batch, of_batch, options)
        ]
        for of_way in decoded[-1].values()
    )
    greedy = options.sampling().greedy
    divergences = _divergences(plain, plain_outputs, outputs, options) if greedy else []
    gamma, pace = options.gamma, decoded[-1]["speculative"][-1].pace
    if left_out or pace is not None:
        gamma = 0 if left_out else max(round(int(pace.drafted) / max(int(pace.iterations), 1)), 1)
    # If the pace took plain steps alone, nothing was verified and alpha is None.
    found = None if left_out else achieved(list(itertools.chain(*outputs)))
    alpha = found and found.alpha
    in_tree = found and options.make_verifier().tree(gamma) is not None
    return comparison_of(
        times,
        decoded,
        generator.target,
        generator.draft,
        jnp.asarray(batches[0].tokens),
        without_open(options, generator.defaults),
        num_inputs=len(texts),
        gamma=gamma,
        left_out=left_out,
        # Each plain call gives a token.
        plain_tokens=sum(output.target_calls for output in itertools.chain(*plain_outputs)),
        alpha=alpha.value if alpha else None,
        acceptance_by_position=found.acceptance_by_position if in_tree else None,
        identical=not divergences if greedy else None,
        divergences=divergences,
        outputs=outputs,
    )


def without_open(options: GenerateOptions, of_checkpoint: Mapping[str, Any]) -> GenerateOptions:
    """Returns the options with ``settled``'s values in place of None."""
    settled = options.settled(of_checkpoint)
    longest = settled["max_decode_len"]
    if options.min_decode_len is None:
        # A checkpoint's minimum may be above these options' maximum.
        settled["min_decode_len"] = min(settled["min_decode_len"], longest)
    # A checkpoint's first id gives way to a prefix or a prompt; an option would be refused.
    unused = ["forced_bos_token_id", *(() if options.beams else OF_SEARCH)]
    used = {name: value for name, value in settled.items() if name not in unused}
    return dataclasses.replace(options, **used)


def pays(generator: Generator, batch: Batch, options: GenerateOptions) -> bool:
    """Returns False if gamma is "auto" and the draft pays only above ``pace.OPTIMISM``."""
    return options.gamma != AUTO or generator.engine(options).first_pace(batch) is not None


def comparison_of(
    times: dict[str, Any],
    decoded: list[Round],
    target: Target,
    draft: Draft,
    inputs: PyTree,
    options: GenerateOptions,
    *,
    gamma: int,
    **values: Any,
) -> Comparison:
    """Makes a ``Comparison`` of what ``time_in_turn`` returned; measures the step times for it.

    ``inputs``, a batch's sources, are for the step times. Gamma 0 says that both ways decoded
    plainly. ``values`` are the fields that do not follow from the other arguments.
    """
    tokens = float(values["plain_tokens"])
    mean = {"appended": tokens, "target_calls": tokens, "plain_steps": tokens}
    mean |= {"accepted": 0.0, "verified": 0.0}
    if gamma:
        # Means over the rounds of the sums over a round's batches.
        stats = [[each.stats for each in one["speculative"]] for one in jax.device_get(decoded)]
        mean = {
            name: statistics.fmean(
                sum(float(np.sum(getattr(each, name))) for each in of_round) for of_round in stats
            )
            for name in mean
        }
    others = OtherPrograms()
    step_times = measure_step_times(
        target,
        draft,
        inputs,
        gamma=max(gamma, 1),
        max_decode_len=options.max_decode_len,
        settings=options.sampling(),
        verifier=options.make_verifier(),
    )
    times = times | {"beside": max(times["beside"], others.share)}
    if not gamma:
        # At gamma 0 a verification is a plain step.
        step_times = dataclasses.replace(step_times, verification=step_times.target)
    return Comparison(
        gamma=gamma,
        temperature=options.temperature,
        verifier=options.verifier,
        lossy=options.make_verifier().lossy,
        batch_size=options.batch_size,
        speculative_tokens=round(mean.pop("appended")),
        step_times=step_times,
        **times,
        **mean,
        **values,
    )


def _divergences(
    generator: Generator,
    plain: list[list[Generation]],
    speculative: list[list[Generation]],
    options: GenerateOptions,
) -> list[Divergence]:
    pairs = zip(itertools.chain(*plain), itertools.chain(*speculative), strict=True)
    return [
        _divergence(generator, ours, theirs, options)
        for ours, theirs in pairs
        if ours.output_ids != theirs.output_ids
    ]


def _divergence(
    generator: Generator, plain: Generation, other: Generation, options: GenerateOptions
) -> Divergence:
    """Finds the first tokens that differ; scores the text before them for the logits' margin."""
    tokens = itertools.zip_longest(plain.output_ids, other.output_ids, fillvalue=PAD_ID)
    position, (first, second) = next(
        (position, pair) for position, pair in enumerate(tokens) if pair[0] != pair[1]
    )
    (batch,) = text_batches(generator, [plain.input], dataclasses.replace(options, batch_size=1))
    prompt = batch.prompts[0, 1:]
    prompt = prompt[prompt != PAD_ID]
    # The output ids of an encoder-decoder include the forced prefix already.
    before = prompt if generator.is_decoder_only else []
    prefix = jnp.asarray([[PAD_ID, *before, *plain.output_ids[:position]]], jnp.int32)
    cache = generator.target.prefill(batch.tokens, prefix.shape[1])
    logits, *_ = generator.target.score(cache, prefix)
    place = Places(
        tokens=prefix[:, None],
        lengths=jnp.asarray([[prefix.shape[1] - 1]]),
        starts=jnp.asarray([len(prompt)]),
        limits=jnp.asarray([len(prompt) + generator.max_decode_len(options)]),
    )
    logits = logits[:, -1:]
    if (rules := generator.rules(options)) is not None:
        logits = rules(logits, place)
    return Divergence(
        input=plain.input,
        position=position,
        plain_token=first,
        speculative_token=second,
        margin=float(logits[0, -1, first] - logits[0, -1, second]),
    )
