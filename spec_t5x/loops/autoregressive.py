"""Plain decoding: one target call for each token.

The baseline that every speed-up is quoted against and the oracle of the tests. It
shares all that decides the text (distributions, end of sequence, limits, keys)
with the speculative loop, and gets the same care.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.interfaces import Cache, Target, check_positions
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.outputs import Decoded, Outputs
from spec_t5x.sampling import rules
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import Stream, sample_next
from spec_t5x.sampling.log_probs import token_log_probs
from spec_t5x.types import EOS_ID, Array, EndOfSequence, Int, Key, PyTree


@flax.struct.dataclass(kw_only=True)
class AutoregressiveState:
    """All that one step hands to the next."""

    outputs: Outputs
    # Holds every token of a row but its last one.
    cache: Cache
    # Where the rows' random numbers come from.
    stream: Stream


def init(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    stream: Stream,
    *,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    num_decodes: int = 1,
    room: int | None = None,
) -> AutoregressiveState:
    """Encodes the inputs, feeds the prompts, makes ``num_decodes`` rows of each.

    The cache has ``room`` for so many tokens; None for all that may be written.
    """
    outputs = outputs_lib.start(prompts, max_decode_len, max_decode_steps, room=1)
    cache = prefill(target, inputs, prompts, outputs.lengths, room or max_decode_len + 1)
    outputs, cache = outputs_lib.repeat_rows((outputs, cache), num_decodes)
    return AutoregressiveState(outputs=outputs, cache=cache, stream=stream)


def prefill(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    lengths: Int[Array, "batch"],
    max_length: int,
) -> Cache:
    """The target's cache with every prompt token in it but each row's last one."""
    forced = prompts if prompts.shape[1] > 1 else None
    return target.rollback(target.prefill(inputs, max_length, forced), lengths)


def step(
    target: Target, state: AutoregressiveState, settings: Sampling, **options
) -> AutoregressiveState:
    """One target call, one token for each row that has not ended; ``write_token``'s options."""
    outputs, cache, *_ = write_token(
        target, state.outputs, state.cache, state.stream, settings, **options
    )
    return state.replace(outputs=outputs, cache=cache)


def write_token(
    target: Target,
    outputs: Outputs,
    cache: Cache,
    stream: Stream,
    settings: Sampling,
    *,
    coupled: bool = False,
    eos_id: EndOfSequence = EOS_ID,
    rescale_log_probs: bool = True,
):
    """The rows and the cache after one target call; its states, the tokens, how many count.

    The tokens are ``[batch, 1]``.
    """
    logits, states, cache = target.score(cache, outputs.last_tokens[:, None])
    logits = rules.apply(settings.rules, logits, outputs.ends)
    probs = standardize(logits, settings)
    tokens = sample_next(stream, outputs.lengths, probs[:, 0], settings, coupled)[:, None]
    log_probs = token_log_probs(logits, probs, tokens, settings, rescale_log_probs)
    outputs, num_appended = outputs_lib.append(
        outputs, tokens, jnp.ones_like(tokens[:, 0]), log_probs, eos_id
    )
    # An ended row keeps overwriting the same position.
    return outputs, target.rollback(cache, outputs.lengths), states, tokens, num_appended


def done(state: AutoregressiveState) -> Array:
    """Whether every row has ended."""
    return jnp.all(state.outputs.ended)


@outputs_lib.refuses_holes
@functools.partial(
    jax.jit,
    static_argnames=("max_decode_len", "num_decodes", "coupled", "eos_id", "rescale_log_probs"),
)
def autoregressive_decode(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    *,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    num_decodes: int = 1,
    coupled: bool = False,
    eos_id: EndOfSequence = EOS_ID,
    rescale_log_probs: bool = True,
) -> Decoded:
    """Decodes with the target alone, in one compiled program.

    Args:
      target: the model, a pytree.
      inputs: what ``target.prefill`` takes, e.g. encoder tokens ``[batch, source]``.
      prompts: ``[batch, 1 + prompt length]``, the start token first, padded with 0
        on the right; ``zeros([batch, 1])`` where nothing is forced.
      rng: one key, or one for each input (``outputs.row_keys``); or a stream made for
        all rows (``draws.t5x_stream``).
      settings: the distribution to sample from (``distributions.sampling``).
      max_decode_len: room for tokens, the prompt's included.
      max_decode_steps: tokens to generate at most, after the prompt.
      num_decodes: sequences for each input.
      coupled: sample with the noise that the coupled verifier uses, which gives the
        text that it gives (and T5X's, with T5X's stream).
      eos_id: the token that ends a row, or several of them; in a prompt they do not.
      rescale_log_probs: whether scores are under the sampled distribution (T5X's
        default: argmax scores 0) or under the model's own.

    Raises:
      InputError: prompts longer than ``max_decode_len``, or T5X's stream without
        ``coupled``.
    """
    outputs_lib.check_prompts(prompts, max_decode_len)
    check_positions(target, max_decode_len)
    stream = outputs_lib.row_stream(rng, prompts.shape[0], num_decodes, coupled, max_decode_len)
    settings = settings.repeat(num_decodes)
    if coupled:
        settings = settings.keep_ties()
    lengths = {"max_decode_len": max_decode_len, "max_decode_steps": max_decode_steps}
    state = init(target, inputs, prompts, stream, num_decodes=num_decodes, **lengths)
    options = {"coupled": coupled, "eos_id": eos_id, "rescale_log_probs": rescale_log_probs}
    state = lax.while_loop(
        lambda state: ~done(state), lambda state: step(target, state, settings, **options), state
    )
    return outputs_lib.finish(state.outputs, num_decodes, max_decode_len)
