"""Real time at real size, with a given acceptance rate: never text, only time.

Weights are random, of any published size, and made on the device. A random draft is never
right, so the verdict's count is replaced by draws: each proposal is accepted with
probability alpha, whatever it is. All else is done: drafting, the target's call, the
verifier's own work, appending, rolling back. What is measured is what a trained pair of
these sizes and this alpha would take on this device, if acceptances are i.i.d. as in
Theorem 3.8. Nothing here returns a token.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.benchmark import machine
from spec_t5x.experiments.paper_tables import SpeedUp
from spec_t5x.loops import decode_state
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import RowStream, purpose_keys
from spec_t5x.sampling.verification import Verdict
from spec_t5x.theory import formulas
from spec_t5x.tuning.step_times import StepTimes, measure_step_times
from spec_t5x.types import PyTree
from spec_t5x.verifiers import TokenVerifier

# No token ends a row: the lengths are given.
_NO_EOS = -1
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class SyntheticVerifier(TokenVerifier):
    """Accepts each proposal with probability ``alpha``, one after the other.

    Algorithm 1 is worked out as well and its token taken, so that its time is in; only how
    many drafts stand is drawn. What comes of it is no text of any model.
    """

    alpha: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha is {self.alpha}: an acceptance rate is between 0 and 1")

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """A verdict for each row; the arguments are the base's."""
        real = super().__call__(stream, lengths, proposal, target_logits, target_probs, settings)
        _, keys, _ = purpose_keys(stream, lengths)
        gamma = proposal.tokens.shape[1]
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (gamma,)))(keys)
        proposed = jnp.arange(gamma)[None, :] < proposal.num_proposed[:, None]
        stands = jnp.cumprod((proposed & (uniforms < self.alpha)).astype(jnp.int32), axis=1)
        return real.replace(num_accepted=jnp.sum(stands, axis=1, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What is measured: a draft at an acceptance rate."""

    # A name of ``models.sizes``.
    draft: str
    temperature: float
    gamma: int
    alpha: float
    # The row of Table 2 that the numbers are from, if any.
    paper: SpeedUp | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Sizes, lengths and repeats."""

    # Names of ``models.sizes``.
    target: str = paper_tables.TARGET
    drafts: Sequence[str] = tuple(paper_tables.DRAFTS.values())
    # One acceptance rate for every draft, with ``gamma`` and ``temperature``; None takes
    # the paper's rows for these drafts.
    alpha: float | None = None
    gamma: int = 7
    temperature: float = 0.0
    # Encoder length, without padding, and tokens generated.
    source_len: int = 512
    decode_len: int = 128
    # Of plain and speculative decoding in turn, each time with other draws.
    repeats: int = 9
    # Timings of a step.
    step_repeats: int = 9
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self):
        drafts = (self.drafts,) if isinstance(self.drafts, str) else tuple(self.drafts)
        object.__setattr__(self, "drafts", drafts)
        for name in ("gamma", "source_len", "decode_len", "repeats", "step_repeats"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}: give at least 1")
        target = size(self.target)
        for name in drafts:
            if size(name).vocab_size != target.vocab_size:
                raise InputError(
                    f"draft {name} has {size(name).vocab_size} tokens and {self.target} "
                    f"{target.vocab_size}: choose a draft of the target's family"
                )
        if self.alpha is not None:
            SyntheticVerifier(alpha=self.alpha)
        if not self.rows():
            known = ", ".join(paper_tables.DRAFTS.values())
            raise InputError(
                f"drafts are {', '.join(drafts) or 'none'}: Table 2 has {known}; give one of "
                "these, or an alpha"
            )
        sampling(self.temperature)

    def rows(self) -> list[Row]:
        """What is measured, in the order of Table 2."""
        if self.alpha is not None:
            common = {"temperature": self.temperature, "gamma": self.gamma, "alpha": self.alpha}
            return [Row(draft=draft, **common) for draft in self.drafts]
        return [
            Row(
                draft=paper_tables.DRAFTS[row.draft],
                temperature=row.temperature,
                gamma=row.gamma,
                alpha=row.alpha,
                paper=row,
            )
            for row in paper_tables.TABLE_2
            if paper_tables.DRAFTS[row.draft] in self.drafts
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """A row's times and counts. Seconds are of every repeat."""

    row: Row
    # Tokens of each decode.
    num_tokens: int
    plain_seconds: list[float]
    speculative_seconds: list[float]
    # Of these, what comes before the first token: encoders, keys and values, empty caches.
    plain_setup_seconds: list[float]
    speculative_setup_seconds: list[float]
    plain_compile_seconds: float
    speculative_compile_seconds: float
    # Over all repeats: target calls, accepted drafts, positions that were decided on.
    target_calls: int
    accepted: int
    verified: int
    step_times: StepTimes

    @property
    def speed_up(self) -> float:
        """Of the whole decode, encoders included: ratio of the medians."""
        return statistics.median(self.plain_seconds) / statistics.median(self.speculative_seconds)

    @property
    def speed_up_range(self) -> tuple[float, float]:
        """Least and largest ratio of two decodes made one right after the other."""
        pairs = zip(self.plain_seconds, self.speculative_seconds, strict=True)
        ratios = [plain / speculative for plain, speculative in pairs]
        return min(ratios), max(ratios)

    @property
    def loop_speed_up(self) -> float:
        """The same without the set-up, of which Theorem 3.8 knows nothing."""
        plain, speculative, plain_setup, speculative_setup = map(
            statistics.median,
            (
                self.plain_seconds,
                self.speculative_seconds,
                self.plain_setup_seconds,
                self.speculative_setup_seconds,
            ),
        )
        return (plain - plain_setup) / (speculative - speculative_setup)

    @property
    def acceptance_rate(self) -> float:
        """Share of the decided positions at which the draft stood: alpha, by the draws."""
        return self.accepted / self.verified

    @property
    def block_efficiency(self) -> float:
        """Generated tokens for each target call."""
        return self.num_tokens * len(self.speculative_seconds) / self.target_calls

    @property
    def expected(self) -> float:
        """Theorem 3.8 with the row's alpha and the measured c."""
        return formulas.wall_time_improvement(self.row.alpha, self.row.gamma, self.step_times.c)

    @property
    def expected_with_verification(self) -> float:
        """The same with the measured cost of scoring gamma + 1 tokens."""
        return formulas.wall_time_improvement(
            self.row.alpha, self.row.gamma, self.step_times.c, self.step_times.verification_cost
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return dataclasses.asdict(self) | {
            "speed_up": self.speed_up,
            "speed_up_range": list(self.speed_up_range),
            "loop_speed_up": self.loop_speed_up,
            "acceptance_rate": self.acceptance_rate,
            "block_efficiency": self.block_efficiency,
            "c": self.step_times.c,
            "verification_cost": self.step_times.verification_cost,
            "expected": self.expected,
            "expected_with_verification": self.expected_with_verification,
        }


def run(
    options: SyntheticOptions, report: Callable[[int, int, str], None] | None = None
) -> Iterator[Timing]:
    """Measures row after row on JAX's default device.

    Args:
      options: sizes, lengths, repeats.
      report: ``report(done, total, what)`` is told of each row.

    Raises:
      InputError: the device cannot hold the weights and the caches.
    """
    rows = options.rows()
    check_memory(options)
    dtype = resolve_dtype(options.dtype)
    target = random_model(size(options.target), dtype, options.seed)
    drafts = {}
    for done, row in enumerate(rows):
        if report:
            what = f"{row.draft}, temperature {row.temperature:g}, gamma {row.gamma}"
            report(done, len(rows), what)
        if row.draft not in drafts:
            # One draft on the device at a time; Table 2 comes back to each.
            drafts.clear()
            drafts[row.draft] = random_model(size(row.draft), dtype, options.seed + 1)
        yield _measure(target, drafts[row.draft], row, options)
        jax.clear_caches()


def random_model(config: T5Config, dtype: str, seed: int) -> T5Model:
    """A model of these sizes with random weights, made on the device in ``dtype``.

    Each array is drawn in place: no float32 copy, nothing on the host. Scaled by fan-in,
    so that activations stay finite.
    """
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(expected_shapes(config)))
    flat = {
        path: _random_array(key, path.endswith("scale"), shape, dtype)
        for key, (path, shape) in zip(keys, expected_shapes(config).items(), strict=True)
    }
    params = unflatten_dict(flat, sep="/")
    return T5Model.create(params, dataclasses.replace(config, dtype=dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_array(key, is_scale: bool, shape: tuple[int, ...], dtype: str):
    if is_scale:
        return jnp.ones(shape, dtype)
    bound = (3 / shape[0]) ** 0.5
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)


def _measure(target: T5Model, draft: T5Model, row: Row, options: SyntheticOptions) -> Timing:
    programs = _programs(target, TransformerDraft(draft), row, options)
    compile_seconds = []
    for program in programs[:2]:
        first, second = program(options.seed)[0], program(options.seed)[0]
        compile_seconds.append(max(first - second, 0.0))
    runs = [[p(options.seed + repeat) for p in programs] for repeat in range(options.repeats)]
    seconds = [[run[0] for run in column] for column in zip(*runs, strict=True)]
    stats = [column[1][1] for column in runs]
    return Timing(
        row=row,
        num_tokens=options.decode_len,
        plain_seconds=seconds[0],
        speculative_seconds=seconds[1],
        plain_setup_seconds=seconds[2],
        speculative_setup_seconds=seconds[3],
        plain_compile_seconds=compile_seconds[0],
        speculative_compile_seconds=compile_seconds[1],
        target_calls=sum(int(s.target_calls.sum()) for s in stats),
        accepted=sum(int(s.accepted.sum()) for s in stats),
        verified=sum(int(s.verified.sum()) for s in stats),
        step_times=measure_step_times(
            target,
            TransformerDraft(draft),
            _sources(options),
            gamma=row.gamma,
            max_decode_len=options.decode_len,
            settings=sampling(row.temperature),
            repeats=options.step_repeats,
        ),
    )


def _programs(
    target: T5Model, draft: TransformerDraft, row: Row, options: SyntheticOptions
) -> list[Callable]:
    """Plain, speculative, and the set-up of either: ``seed -> (seconds, counts)``.

    The programs of one decode, told to generate everything or nothing.
    """
    arguments = (_sources(options), jnp.zeros((1, 1), jnp.int32))
    settings = sampling(row.temperature)
    common = {"max_decode_len": options.decode_len, "eos_id": _NO_EOS}

    def plain(seed, steps):
        return autoregressive_decode(
            target, *arguments, jax.random.key(seed), settings, max_decode_steps=steps, **common
        )

    def speculative(seed, steps):
        return speculative_decode(
            target,
            draft,
            *arguments,
            jax.random.key(seed),
            settings,
            max_decode_steps=steps,
            gamma=row.gamma,
            verifier=SyntheticVerifier(alpha=row.alpha),
            **common,
        )

    # On the device: a transfer is no part of either.
    lengths = [jnp.array([length], jnp.int32) for length in (options.decode_len, 0)]
    return [
        functools.partial(_timed, function, steps)
        for steps in lengths
        for function in (plain, speculative)
    ]


def _timed(function: Callable, steps, seed: int):
    """Seconds, and the counts alone of what was decoded."""
    start = time.perf_counter()
    decoded = jax.block_until_ready(function(seed, steps))
    return time.perf_counter() - start, jax.device_get(decoded.stats)


def _sources(options: SyntheticOptions):
    """Random ids, no padding among them."""
    ids = np.random.default_rng(options.seed).integers(3, 1000, (1, options.source_len))
    return jnp.asarray(ids, jnp.int32)


# --- memory --------------------------------------------------------------------


def check_memory(options: SyntheticOptions, available: int | None = None) -> None:
    """Raises ``InputError`` where the device cannot hold the shapes.

    Args:
      options: sizes and lengths.
      available: bytes; None asks the device. A device that does not say is tried.
    """
    available = free_memory() if available is None else available
    needed = bytes_needed(options)
    if available is not None and needed > available:
        raise InputError(
            f"{options.target} with {', '.join(options.drafts)} takes {needed / _GIB:.1f} GiB "
            f"and this device has {available / _GIB:.1f} free: choose smaller sizes"
        )


def bytes_needed(options: SyntheticOptions) -> int:
    """What decoding holds at a time, from shapes alone.

    The weights of the target and of the largest draft, the states of both loops twice
    (what a loop is given and what it makes), the encoder's attention (scores and
    probabilities of a layer, float32), and the logits of a block with what is made of
    them (probabilities, of draft and target, sorted or summed: six arrays).
    """
    dtype = resolve_dtype(options.dtype)
    rows = options.rows()
    target = _abstract(size(options.target), dtype)
    drafts = [_abstract(size(name), dtype) for name in options.drafts]
    gamma = max(row.gamma for row in rows)
    largest = max(drafts, key=_bytes)

    def init(target, draft, sources, prompts):
        stream = RowStream(row_keys(jax.random.key(0), 1))
        lengths = {"gamma": gamma, "max_decode_len": options.decode_len}
        return jax.tree.leaves(
            decode_state.init(target, draft, sources, prompts, stream, **lengths)
        )

    state = jax.eval_shape(
        init,
        target,
        TransformerDraft(largest),
        jax.ShapeDtypeStruct((1, options.source_len), jnp.int32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
    )
    heads = max(model.config.num_heads for model in (target, largest))
    attention = 2 * 4 * heads * options.source_len**2
    block = 6 * 4 * (gamma + 1) * target.vocab_size
    return _bytes(target) + _bytes(largest) + 2 * _bytes(state) + attention + block


def free_memory() -> int | None:
    """Bytes that JAX's default device has left; None where it does not say."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu":
        return None
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _abstract(config: T5Config, dtype: str) -> T5Model:
    flat = {
        path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in expected_shapes(config).items()
    }
    params = unflatten_dict(flat, sep="/")
    return T5Model(params, Transformer(dataclasses.replace(config, dtype=dtype)))


def _bytes(tree: PyTree) -> int:
    # Keys have a type of their own, and are small.
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not _is_key(leaf)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _is_key(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- tables ----------------------------------------------------------------------


def table(timings: Sequence[Timing]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| task | draft | temp. | gamma | alpha | drawn | block efficiency | c | T(verify) "
        "| expected¹ | T(verify) counted | measured | least–most | loop alone² | the paper's EXP "
        "| EMP |",
        "|" + "---|" * 16,
    ]
    for timing in timings:
        row, paper, times = timing.row, timing.row.paper, timing.step_times
        low, high = timing.speed_up_range
        cells = (
            paper.task if paper else "—",
            row.draft,
            f"{row.temperature:g}",
            row.gamma,
            f"{row.alpha:.2f}",
            f"{timing.acceptance_rate:.3f}",
            f"{timing.block_efficiency:.2f}",
            f"{times.c:.3f}",
            f"{times.verification_cost:.2f}",
            f"{timing.expected:.2f}",
            f"{timing.expected_with_verification:.2f}",
            f"{timing.speed_up:.2f}",
            f"{low:.2f}–{high:.2f}",
            f"{timing.loop_speed_up:.2f}",
            f"{paper.expected:.1f}" if paper else "—",
            f"{paper.measured:.1f}" if paper else "—",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "¹ Theorem 3.8 with alpha and the measured c. ² Without encoders, keys and values of the "
        "source and empty caches. Random weights and drawn verdicts: time, not text.",
    ]
    return "\n".join(lines)


def write_json(path: Path, options: SyntheticOptions, timings: Sequence[Timing]) -> None:
    """Keeps all figures, with the machine and the settings they were measured with."""
    report = {
        "machine": machine(),
        "options": dataclasses.asdict(options),
        "dtype": resolve_dtype(options.dtype),
        "rows": [timing.to_dict() for timing in timings],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
