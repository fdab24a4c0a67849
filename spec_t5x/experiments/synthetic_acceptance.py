"""Time with a given acceptance rate, at any size: random weights and drawn verdicts, no text.

Weights are random and made on the device. A random draft is never right, so how many of its
tokens are accepted is drawn: each with probability alpha. All else is computed: drafting, the
target call, verification, appending, rolling back. That is the time of a trained pair of these
sizes and this alpha, if acceptances are i.i.d. as in Theorem 3.8.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import Comparison, comparison_of, time_in_turn
from spec_t5x.generation import Batch, GenerateOptions
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import Decoded, row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.description import free_memory
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.sampling.draws import purpose_keys
from spec_t5x.sampling.verification import Verdict
from spec_t5x.types import Int
from spec_t5x.verifiers import TokenVerifier

# No token ends a row: the lengths are given.
_NO_EOS = -1
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class SyntheticVerifier(TokenVerifier):
    """Accepts each proposal with probability ``alpha``, one after the other.

    Algorithm 1 is computed as well and its token taken, so that its time counts; only the
    number of accepted drafts is drawn. The output is not text of any model.
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


def compare_drawn(
    target: Target,
    draft: Draft,
    options: GenerateOptions,
    *,
    alpha: float,
    source_len: int,
    repeats: int,
    step_repeats: int = 9,
) -> Comparison:
    """Plain against speculative decoding of random sources, with drawn verdicts.

    Args:
      target, draft: any weights.
      options: gamma, temperature, batch size, and ``max_decode_len``, the tokens of each row.
      alpha: chance that a draft is accepted.
      source_len: encoder length, without padding.
      repeats: of both ways in turn, each with other draws.
      step_repeats: timings of a step.
    """
    settings, verifier = options.sampling(), SyntheticVerifier(alpha=alpha)
    length, rows = options.max_decode_len, options.batch_size
    common = {"max_decode_len": length, "eos_id": _NO_EOS}

    def plain(batch: Batch) -> Decoded:
        steps = {"max_decode_steps": batch.max_decode_steps}
        return autoregressive_decode(
            target, batch.tokens, batch.prompts, batch.keys, settings, **steps, **common
        )

    def drafted(batch: Batch) -> Decoded:
        return speculative_decode(
            target,
            draft,
            batch.tokens,
            batch.prompts,
            batch.keys,
            settings,
            gamma=options.gamma,
            verifier=verifier,
            max_decode_steps=batch.max_decode_steps,
            **common,
        )

    sources = random_sources(target, rows, source_len, options.seed)
    batches = [
        Batch(
            texts=[""] * rows,
            tokens=sources,
            prompts=np.zeros((rows, 1), np.int32),
            keys=row_keys(jax.random.key(options.seed + repeat), rows),
            max_decode_steps=np.full(rows, length, np.int32),
        )
        for repeat in range(repeats)
    ]
    times = time_in_turn([lambda: plain, lambda: drafted], [[batch] for batch in batches])
    return comparison_of(
        times,
        target,
        draft,
        jnp.asarray(sources),
        options,
        gamma=options.gamma,
        step_repeats=step_repeats,
        num_inputs=rows,
        plain_tokens=rows * length,
        alpha=alpha,
        identical=None,
        divergences=[],
        outputs=[],
    )


def random_sources(target: Target, rows: int, length: int, seed: int) -> Int[np.ndarray, "..."]:
    """Random ids ``[rows, length]``, no padding among them."""
    draw = np.random.default_rng(seed).integers
    return draw(3, min(target.vocab_size, 1000), (rows, length), dtype=np.int32)


def random_model(config: T5Config, dtype: str, seed: int) -> T5Model:
    """A model of these sizes with random weights, made on the device in ``dtype``.

    Each array is drawn in place: no float32 copy, nothing on the host. Scaled by fan-in, so
    that activations stay finite.
    """
    shapes = expected_shapes(config)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    flat = {
        path: _random_array(key, path.endswith("scale"), shape, dtype)
        for key, (path, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = unflatten_dict(flat, sep="/")
    return T5Model.create(params, dataclasses.replace(config, dtype=dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_array(key, is_scale: bool, shape: tuple[int, ...], dtype: str):
    if is_scale:
        return jnp.ones(shape, dtype)
    bound = (3 / shape[0]) ** 0.5
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)


# --- memory --------------------------------------------------------------------


def check_fits(
    target: str, drafts: Sequence[str], dtype: str, *, available: int | None = None
) -> None:
    """Raises ``InputError`` where the device cannot hold these sizes.

    Args:
      target, drafts, dtype: as of ``bytes_needed``.
      available: bytes; None asks the device. A device that does not report them is tried.
    """
    available = free_memory() if available is None else available
    needed = bytes_needed(target, drafts, dtype)
    if available is not None and needed > available:
        raise InputError(
            f"{target} with {', '.join(drafts)} takes {needed / _GIB:.1f} GiB and this device has "
            f"{available / _GIB:.1f} free: choose smaller sizes"
        )


def bytes_needed(target: str, drafts: Sequence[str], dtype: str) -> int:
    """The weights of the target and of the largest draft, and a tenth for all else.

    Args:
      target, drafts: names of ``models.sizes``; one draft is held at a time.
      dtype: of weights.
    """
    numbers = [
        sum(map(math.prod, expected_shapes(size(name)).values())) for name in (target, *drafts)
    ]
    return round(1.1 * (numbers[0] + max(numbers[1:])) * jnp.dtype(dtype).itemsize)


def check_vocabulary(target: str, drafts: Sequence[str]) -> None:
    """Raises ``InputError`` for a draft with another vocabulary than the target's."""
    wanted = size(target).vocab_size
    for name in drafts:
        if size(name).vocab_size != wanted:
            raise InputError(
                f"draft {name} has {size(name).vocab_size} tokens and {target} {wanted}: choose a "
                "draft of the target's family"
            )
