"""Plain beam search: one target call for each step of all hypotheses.

T5X's search (``hypotheses.py`` has its rules) over a cache of slots that is never copied
(``cache_slots.py``). All hypotheses of an input are one row of the cache and share the
encoder's side of it. The baseline of speculative beam search, and its oracle.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.beams import cache_slots
from spec_t5x.beams import hypotheses as beams_lib
from spec_t5x.beams.hypotheses import BeamResult, Beams, BeamStats, Ranking
from spec_t5x.interfaces import Cache, Target, check_positions
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.sampling.rules import Rules
from spec_t5x.types import EOS_ID, Array, EndOfSequence, Float, Int, PyTree


@flax.struct.dataclass(kw_only=True)
class SearchState:
    """All that one step, or one iteration of a speculative search, hands to the next."""

    # Live and finished hypotheses.
    beams: Beams
    # Where the live hypotheses' tokens are cached, all but their last ones: at the same
    # places in both caches.
    lineages: Int[Array, "batch beams positions"]
    target_cache: Cache
    stats: BeamStats
    # None in a plain search.
    draft_cache: Cache | None = None


def init(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    *,
    beams: int,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    draft_model: Target | None = None,
    draft_beams: int | None = None,
    gamma: int = 0,
) -> SearchState:
    """Encodes the inputs and feeds the prompts, for both models where there is a draft."""
    batch = prompts.shape[0]
    # A row that has ended may stand at position max_decode_len, and the last tree reaches
    # gamma further.
    num_positions = max_decode_len + gamma + 1
    zeros = jnp.zeros(batch, jnp.int32)

    def prefill(model):
        return cache_slots.prefill(model, inputs, prompts, num_positions, draft_beams or beams)

    return SearchState(
        beams=beams_lib.start(prompts, beams, max_decode_len, max_decode_steps),
        # A prompt's tokens are at the first places.
        lineages=jnp.zeros((batch, beams, num_positions), jnp.int32),
        target_cache=prefill(target),
        stats=BeamStats(target_calls=zeros, steps=zeros),
        draft_cache=None if draft_model is None else prefill(draft_model),
    )


def step(
    target: Target,
    state: SearchState,
    ranking: Ranking,
    *,
    rules: Rules | None = None,
    eos_id: EndOfSequence = EOS_ID,
) -> SearchState:
    """One target call, one token more for the hypotheses of each row that goes on."""
    beams = state.beams
    batch, num = beams.live_log_probs.shape
    places = jnp.arange(num)
    lineages = cache_slots.settle(state.lineages, beams.lengths, places)
    positions = jnp.tile(beams.lengths[:, None], (1, num))
    nodes = cache_slots.nodes(
        beams.last_tokens,
        positions,
        jnp.tile(places[None], (batch, 1)),
        lineages,
        width=num,
    )
    logits, _, cache = target.score_nodes(state.target_cache, nodes)
    following = beams_lib.continuations(
        logits,
        beams_lib.num_candidates(num, eos_id),
        rules,
        beams.places(beams.live_sequences, positions),
    )
    extended, parents = beams_lib.extend(beams, following, ranking, eos_id)
    return SearchState(
        beams=extended,
        lineages=beams_lib.pick(lineages, parents),
        target_cache=cache,
        stats=BeamStats(
            target_calls=state.stats.target_calls + ~beams.ended,
            steps=state.stats.steps + ~beams.ended,
        ),
    )


def done(state: SearchState) -> Array:
    """Whether every row has ended."""
    return jnp.all(state.beams.ended)


@outputs_lib.refuses_holes
@functools.partial(jax.jit, static_argnames=("beams", "max_decode_len", "eos_id"))
def beam_search(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    *,
    beams: int,
    alpha: float | Float[Array, ""] = 0.6,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    eos_id: EndOfSequence = EOS_ID,
    ranking: Ranking | None = None,
    rules: Rules | None = None,
) -> BeamResult:
    """Searches the ``beams`` best texts for each input, as T5X does.

    Args:
      target: the model, a pytree that has ``score_nodes``.
      inputs: what ``target.prefill`` takes, e.g. encoder tokens ``[batch, source]``.
      prompts: ``[batch, 1 + prompt length]``, the start token first, padded with 0
        on the right; ``zeros([batch, 1])`` where nothing is forced.
      beams: hypotheses kept, and returned, for each input.
      alpha: exponent of the brevity penalty: 0 ranks texts by log-probability alone,
        larger values prefer longer texts. Changing it compiles nothing.
      max_decode_len: room for tokens, the prompt's included.
      max_decode_steps: tokens to generate at most, after the prompt: one number, or one
        for each input.
      eos_id: the token that ends a hypothesis, or several; in a prompt they do not.
      ranking: by what hypotheses are ranked, in place of T5X's brevity penalty with ``alpha``.
      rules: which tokens may follow a text (``sampling.rules.rules``).

    Raises:
      InputError: ``beams`` below 1 or above half of the vocabulary, prompts longer than
        ``max_decode_len``, or a target without ``score_nodes``.
    """
    check_arguments(target, prompts, beams, max_decode_len, eos_id)
    state = init(
        target,
        inputs,
        prompts,
        beams=beams,
        max_decode_len=max_decode_len,
        max_decode_steps=max_decode_steps,
    )
    ranking = ranking or Ranking(exponent=alpha)
    body = functools.partial(step, target, ranking=ranking, rules=rules, eos_id=eos_id)
    state = lax.while_loop(lambda state: ~done(state), body, state)
    return beams_lib.finish(state.beams, state.stats)


def check_arguments(
    target: Target, prompts, beams: int, max_decode_len: int, eos_id: EndOfSequence
) -> None:
    """Raises ``InputError`` for arguments that cannot be searched with."""
    cache_slots.check_scores_nodes(target)
    beams_lib.check_beams("beams", beams, target.vocab_size, eos_id)
    outputs_lib.check_prompts(prompts, max_decode_len)
    check_positions(target, max_decode_len)
