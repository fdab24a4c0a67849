"""Speculative against plain decoding: same inputs, same process, compilation apart."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import (
    AUTO,
    Batch,
    GenerateOptions,
    Generation,
    Generator,
    Run,
    all_answered,
)
from spec_t5x.theory import formulas
from spec_t5x.tuning.step_times import StepTimes, measure_step_times
from spec_t5x.types import PAD_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where two texts that should be equal are not."""

    input: str
    # Index of the token.
    position: int
    plain_token: int
    speculative_token: int
    # The target's logit of the plain token minus that of the other one.
    margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison. Rates are medians over repeats of the whole set of inputs."""

    num_inputs: int
    # Drafts of an iteration; with gamma "auto" as many as were made on average, rounded.
    gamma: int
    temperature: float
    verifier: str
    # Generated tokens, end of sequence included, padding rows not.
    plain_tokens: int
    speculative_tokens: int
    # Seconds for all inputs, encoding included, compilation not: every repeat.
    plain_seconds: list[float]
    speculative_seconds: list[float]
    # Of these, what comes before the first token: dispatch, encoding, empty caches.
    plain_setup_seconds: list[float]
    speculative_setup_seconds: list[float]
    plain_compile_seconds: float
    speculative_compile_seconds: float
    target_calls: int
    alpha: float
    step_times: StepTimes
    # None when sampling: the texts are then different draws from one distribution.
    identical: bool | None
    divergences: list[Divergence]
    outputs: list[list[Generation]]

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding."""
        return self.plain_tokens / statistics.median(self.plain_seconds)

    @property
    def speculative_rate(self) -> float:
        """Tokens per second of speculative decoding."""
        return self.speculative_tokens / statistics.median(self.speculative_seconds)

    @property
    def block_efficiency(self) -> float:
        """Generated tokens for each target call of speculative decoding."""
        return self.speculative_tokens / self.target_calls

    @property
    def accepted_plus_one(self) -> float:
        """``1 + accepted / target_calls``, beside which Equation 1 is drawn.

        As if every iteration ended with a token of the target's own, which the end of a text
        keeps some from.
        """
        accepted = sum(generation.accepted for group in self.outputs for generation in group)
        return 1 + accepted / self.target_calls

    @property
    def speed_up(self) -> float:
        """Ratio of the rates."""
        return self.speculative_rate / self.plain_rate

    @property
    def loop_speed_up(self) -> float:
        """The same without the set-up of each input, of which Theorem 3.8 knows nothing."""
        plain = statistics.median(self.plain_seconds) - statistics.median(self.plain_setup_seconds)
        speculative = statistics.median(self.speculative_seconds) - statistics.median(
            self.speculative_setup_seconds
        )
        return (self.speculative_tokens / speculative) / (self.plain_tokens / plain)

    @property
    def predicted(self) -> float:
        """Theorem 3.8 with the measured alpha and c, verification as one step."""
        return formulas.wall_time_improvement(self.alpha, self.gamma, self.step_times.c)

    @property
    def predicted_with_verification(self) -> float:
        """The same with the measured cost of scoring gamma + 1 tokens."""
        return formulas.wall_time_improvement(
            self.alpha, self.gamma, self.step_times.c, self.step_times.verification_cost
        )

    @property
    def oracle(self) -> float:
        """What an oracle that knew when to stop drafting would give (section 3.5)."""
        return formulas.oracle_improvement(self.alpha, self.step_times.c)

    def to_dict(self) -> dict:
        """All of it but the outputs, as JSON can hold it."""
        fields = dataclasses.asdict(self)
        del fields["outputs"]
        return fields | {
            "plain_tokens_per_second": self.plain_rate,
            "speculative_tokens_per_second": self.speculative_rate,
            "block_efficiency": self.block_efficiency,
            "speed_up": self.speed_up,
            "loop_speed_up": self.loop_speed_up,
            "c": self.step_times.c,
            "verification_cost": self.step_times.verification_cost,
            "predicted_speed_up": self.predicted,
            "oracle_speed_up": self.oracle,
            "predicted_speed_up_with_verification": self.predicted_with_verification,
        }


def compare(
    generator: Generator, texts: Sequence[str], options: GenerateOptions, repeats: int = 3
) -> Comparison:
    """Decodes the inputs both ways, batch by batch in turn, ``repeats`` times.

    Raises:
      InputError: the generator has no draft, gamma is 0 or comes to it, or an input cannot
        be decoded.
    """
    if generator.draft is None or options.gamma == 0:
        raise InputError("nothing to compare with: give a draft and a gamma of at least 1")
    if options.beams:
        raise InputError(f"beams is {options.beams}: a beam search is not compared here")
    batches = generator.batches(texts, options)
    if options.gamma == AUTO and generator.pace(batches[0], options) is None:
        raise InputError(
            f"gamma is {AUTO} and comes to 0, since no acceptance pays here: give it a number"
        )
    undrafted = generator.plain()
    plain, speculative = undrafted.run(options), generator.run(options)
    plain_compile = sum(_warm_up(plain, batches))
    speculative_compile = sum(_warm_up(speculative, batches))
    # By program (plain, speculative; the same with nothing to generate), then repeat.
    seconds = [[], [], [], []]
    for _ in range(repeats):
        runs = [_timed_runs(plain, speculative, batch) for batch in batches]
        for index, column in enumerate(seconds):
            column.append(sum(run[index][0] for run in runs))

    plain_outputs, outputs = (
        [
            outputs
            for batch, run in zip(batches, runs, strict=True)
            for outputs in all_answered(generator.collect(batch, run[index][1]))
        ]
        for index in range(2)
    )
    greedy = options.sampling().greedy
    divergences = _divergences(undrafted, plain_outputs, outputs, options) if greedy else []
    flat = [generation for group in outputs for generation in group]
    gamma = options.gamma if speculative.pace is None else speculative.pace.typical_limit
    return Comparison(
        num_inputs=len(texts),
        gamma=gamma,
        temperature=options.temperature,
        verifier=options.verifier,
        plain_tokens=sum(len(g.output_ids) for group in plain_outputs for g in group),
        speculative_tokens=sum(len(g.output_ids) for g in flat),
        plain_seconds=seconds[0],
        speculative_seconds=seconds[1],
        plain_setup_seconds=seconds[2],
        speculative_setup_seconds=seconds[3],
        plain_compile_seconds=plain_compile,
        speculative_compile_seconds=speculative_compile,
        target_calls=sum(g.target_calls for g in flat),
        alpha=_alpha(runs),
        step_times=measure_step_times(
            generator.target,
            generator.draft,
            jnp.asarray(batches[0].tokens),
            gamma=gamma,
            max_decode_len=options.max_decode_len,
            settings=options.sampling(),
            verifier=options.make_verifier(),
        ),
        identical=not divergences if greedy else None,
        divergences=divergences,
        outputs=outputs,
    )


def _warm_up(run: Run, batches: list[Batch]) -> list[float]:
    """Compiles every shape; seconds of first run minus second, for each."""
    seconds, seen = [], set()
    for batch in batches:
        if batch.tokens.shape not in seen:
            seen.add(batch.tokens.shape)
            first, _ = _timed(run, batch)
            second, _ = _timed(run, batch)
            seconds.append(max(first - second, 0.0))
    return seconds


def _timed_runs(plain: Run, speculative: Run, batch: Batch) -> list:
    """Seconds and results: plain, speculative, and the set-up alone of either."""
    nothing = dataclasses.replace(batch, max_decode_steps=np.zeros_like(batch.max_decode_steps))
    return [_timed(which, inputs) for inputs in (batch, nothing) for which in (plain, speculative)]


def _timed(run: Run, batch: Batch):
    start = time.perf_counter()
    decoded = jax.block_until_ready(run.decode(batch))
    return time.perf_counter() - start, decoded


def _alpha(runs) -> float:
    """Mean beta over all verified positions of all sequences."""
    stats = [jax.device_get(run[1][1].stats) for run in runs]
    alpha = sum(s.beta_sum.sum() for s in stats) / sum(s.verified.sum() for s in stats)
    # Rounding takes a draft that equals the target above 1.
    return min(float(alpha), 1.0)


def _divergences(
    generator: Generator, plain: list[list[Generation]], speculative, options
) -> list[Divergence]:
    pairs = [
        (ours, theirs)
        for plain_group, group in zip(plain, speculative, strict=True)
        for ours, theirs in zip(plain_group, group, strict=True)
        if ours.output_ids != theirs.output_ids
    ]
    return [_divergence(generator, ours, theirs, options) for ours, theirs in pairs]


def _divergence(
    generator: Generator, plain: Generation, other: Generation, options: GenerateOptions
) -> Divergence:
    """Where two outputs part, and by how little the target preferred the first."""
    ours, theirs = plain.output_ids, other.output_ids
    width = max(len(ours), len(theirs))
    padded = np.full((2, width), PAD_ID, np.int32)
    padded[0, : len(ours)], padded[1, : len(theirs)] = ours, theirs
    position = int(np.argmax(padded[0] != padded[1]))
    (batch,) = generator.batches([plain.input], dataclasses.replace(options, batch_size=1))
    prompt = batch.prompts[0, 1:]
    prompt = prompt[prompt != PAD_ID]
    prefix = jnp.asarray([[PAD_ID, *prompt, *padded[0, :position]]], jnp.int32)
    cache = generator.target.prefill(batch.tokens, prefix.shape[1])
    logits, _ = generator.target.score(cache, prefix)
    first, second = int(padded[0, position]), int(padded[1, position])
    return Divergence(
        input=plain.input,
        position=position,
        plain_token=first,
        speculative_token=second,
        margin=float(logits[0, -1, first] - logits[0, -1, second]),
    )
