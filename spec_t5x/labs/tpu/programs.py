"""The programs of decoding, compiled from shapes alone for any mesh.

Two whole loops, as they would run; and the three calls that Theorem 3.8 is about, each a
program of its own: a step of the target, a step of the draft's model, and a verification
(an iteration without the drafting).
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.interfaces import Draft, Proposal
from spec_t5x.loops import autoregressive, decode_state, speculative
from spec_t5x.loops.decode_state import DecodeState, Loop, NoDraft
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.cache import DecoderCache, LayerCache
from spec_t5x.models.eagle import DraftingCache, EagleNetwork, head_config
from spec_t5x.models.kept_layers import own_params
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.partitioning import (
    RULES,
    batch_sharding,
    param_shardings,
    partitioned,
    replicated,
)
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import RowStream
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The shapes that are decoded."""

    # Rows, over all replicas of the model.
    batch: int = 1
    # Encoder length, padding included.
    source_len: int = 512
    # Room for tokens of the output.
    max_decode_len: int = 128


def abstract_model(config: T5Config, mesh: Mesh, weights: str = AUTO) -> T5Model:
    """A model of shapes, sharded as the rules say.

    Its parameters are in bfloat16, its matrices in int8 or int4 if ``weights`` says so.
    """
    config = dataclasses.replace(config, dtype="bfloat16")
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding),
        abstract_params(config),
        param_shardings(config, mesh),
    )
    model = T5Model(weights=params, module=Transformer(config))
    return model if weights == AUTO else model.rounded(BITS[weights])


def abstract_head(target: T5Model, mesh: Mesh, width: int | None = None) -> EagleDraft:
    """An EAGLE head of the target's last layer, as shapes.

    Raises:
      InputError: a width that is not less than the target's.
    """
    layers = (target.config.num_decoder_layers - 1,)
    config = head_config(target.config, layers, width)
    own = own_params(abstract_model(config, mesh).params)
    weights = {**own, "token_embedder": target.weights["token_embedder"]}
    return EagleDraft(T5Model(weights=weights, module=EagleNetwork(config)), layers=layers)


def plain_loop(model: T5Model, work: Workload, mesh: Mesh) -> Compiled:
    """``autoregressive_decode``, whole."""
    decode = functools.partial(
        autoregressive.autoregressive_decode, max_decode_len=work.max_decode_len
    )
    return _compile(decode, mesh, model, *_inputs(work, mesh))


def speculative_loop(
    model: T5Model, draft: Draft, work: Workload, gamma: int, mesh: Mesh
) -> Compiled:
    """``speculative_decode``, whole."""
    decode = functools.partial(
        speculative.speculative_decode, max_decode_len=work.max_decode_len, gamma=gamma
    )
    return _compile(decode, mesh, model, draft, *_inputs(work, mesh))


def plain_step(model: T5Model, work: Workload, mesh: Mesh) -> tuple[Compiled, DecoderCache]:
    """One call for one token: scored, sampled, appended. Of the target or of the draft.

    Returns:
      The program, and the cache that it takes, as shapes.
    """
    *inputs, settings = _inputs(work, mesh)

    def init(model, inputs, prompts, keys):
        return _plain_state(model, inputs, prompts, keys, work)

    state = sharded_rows(jax.eval_shape(init, model, *inputs), mesh)
    compiled = _compile(
        functools.partial(_step_plainly, work), mesh, model, state, settings, donate=1
    )
    return compiled, state.target_cache


def head_step(
    target: T5Model, draft: EagleDraft, work: Workload, gamma: int, mesh: Mesh
) -> tuple[Compiled, DecoderCache]:
    """One step of an EAGLE head after its own state: scored, sampled, appended.

    Returns:
      The program, and the head's cache that it takes, as shapes.
    """
    *inputs, settings = _inputs(work, mesh)

    def init(target, draft, inputs, prompts, keys):
        room = work.max_decode_len + 1
        state = _plain_state(target, inputs, prompts, keys, work)
        own = draft.prefill(inputs, prompts, room).cache
        (text,), source = own.layers, state.target_cache.layers[draft.layers[0]]
        layer = LayerCache(text.keys, text.values, source.cross_keys, source.cross_values)
        cache = state.target_cache.replace(layers=(layer,))
        states = jnp.zeros((work.batch, draft.model.config.emb_dim), jnp.bfloat16)
        return state.replace(target_cache=DraftingCache.after(cache, states, gamma))

    state = sharded_rows(jax.eval_shape(init, target, draft, *inputs), mesh)
    compiled = _compile(
        functools.partial(_step_plainly, work), mesh, draft.model, state, settings, donate=1
    )
    return compiled, state.target_cache


def _plain_state(model: T5Model, inputs, prompts, keys, work: Workload) -> DecodeState:
    """The state of plain decoding, before its first step."""
    loop = Loop(gamma=0, max_decode_len=work.max_decode_len)
    draft = NoDraft(model.vocab_size)
    return decode_state.init(model, draft, inputs, prompts, RowStream(keys), loop)


def _step_plainly(
    work: Workload, model: T5Model, state: DecodeState, settings: Sampling
) -> DecodeState:
    loop = Loop(gamma=0, max_decode_len=work.max_decode_len)
    return speculative.step(model, NoDraft(model.vocab_size), state, settings, loop)[0]


def verification(
    model: T5Model, work: Workload, gamma: int, mesh: Mesh
) -> tuple[Compiled, DecoderCache]:
    """One iteration whose proposals are given: gamma + 1 tokens scored, verified, appended.

    Returns:
      The program, and the target's cache that it takes, as shapes.
    """
    *inputs, settings = _inputs(work, mesh)
    models = model, _given(model.vocab_size, work, gamma, mesh)
    loop = Loop(gamma=gamma, max_decode_len=work.max_decode_len)

    def init(model, draft, inputs, prompts, keys):
        return decode_state.init(model, draft, inputs, prompts, RowStream(keys), loop)

    state = sharded_rows(jax.eval_shape(init, *models, *inputs), mesh)
    step = functools.partial(speculative.step, loop=loop)
    return _compile(step, mesh, *models, state, settings, donate=2), state.target_cache


def sharded_rows(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes of a decoding state, all of which lead with the rows, with their shardings."""

    def shard(leaf):
        # Of four axes are the caches' keys and values, and nothing else.
        axes = cache_lib.AXES if leaf.ndim == 4 else ("batch", *[None] * (leaf.ndim - 1))
        spec = partition_spec(leaf.shape, axes, RULES, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shard, tree)


@flax.struct.dataclass
class _Given(Draft):
    """A draft whose proposals have been made elsewhere."""

    proposal: Proposal
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        return self.proposal.replace(drawn=gamma), state


def _given(vocab_size: int, work: Workload, gamma: int, mesh: Mesh) -> _Given:
    tokens = jax.ShapeDtypeStruct((work.batch, gamma), jnp.int32)
    probs = jax.ShapeDtypeStruct((*tokens.shape, vocab_size), jnp.float32)
    return _Given(sharded_rows(Proposal(tokens, probs), mesh), vocab_size)


def _inputs(work: Workload, mesh: Mesh):
    """Sources, prompts, keys and settings (of any temperature), as shapes."""

    def make():
        sources = jnp.zeros((work.batch, work.source_len), jnp.int32)
        prompts = jnp.zeros((work.batch, 1), jnp.int32)
        keys = jax.random.split(jax.random.key(0), work.batch)
        return sources, prompts, keys, Sampling(jnp.float32(1))

    *rows, settings = jax.eval_shape(make)
    everywhere = _with_sharding(settings, replicated(mesh))
    return *_with_sharding(rows, batch_sharding(mesh)), everywhere


def _with_sharding(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _compile(function: Callable, mesh: Mesh, *args, donate: int | None = None) -> Compiled:
    jitted = jax.jit(function, donate_argnums=() if donate is None else donate)
    platform = mesh.devices.flat[0].platform
    with partitioned(mesh):
        return jitted.trace(*args).lower(lowering_platforms=(platform,)).compile()
