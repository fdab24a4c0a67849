"""Programs of decoding, compiled from shapes alone for any mesh.

They are the whole loops and, each separately, the three calls of Theorem 3.8: a step of the target,
a step of the draft's model, and a verification (an iteration without the drafting).
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
from spec_t5x.loops import decode_state, speculative
from spec_t5x.loops.autoregressive import autoregressive_decode
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
    """Shapes of the batch that is decoded."""

    # Rows, over all replicas of the model.
    batch: int = 1
    # Encoder length, padding included.
    source_len: int = 512
    # Most tokens of an output, which caches have room for.
    max_decode_len: int = 128


def abstract_model(config: T5Config, mesh: Mesh, weights: str = AUTO) -> T5Model:
    """Returns a model that has sharded shapes in place of parameters.

    Parameters are in bfloat16; ``weights`` "int8" or "int4" rounds the matrices.
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
    """Returns an EAGLE head on the target's last layer, with shapes in place of parameters.

    Raises:
      InputError: a width that is not less than the target's.
    """
    layers = (target.config.num_decoder_layers - 1,)
    config = head_config(target.config, layers, width)
    own = own_params(abstract_model(config, mesh).params)
    weights = {**own, "token_embedder": target.weights["token_embedder"]}
    return EagleDraft(T5Model(weights=weights, module=EagleNetwork(config)), layers=layers)


def loop(model: T5Model, draft: Draft | None, work: Workload, gamma: int, mesh: Mesh) -> Compiled:
    """Compiles ``speculative_decode``, or ``autoregressive_decode`` if there is no draft."""
    room = {"max_decode_len": work.max_decode_len}
    inputs = _inputs(work, mesh)
    if draft is None:
        return _compile(functools.partial(autoregressive_decode, **room), mesh, model, *inputs)
    decode = functools.partial(speculative.speculative_decode, gamma=gamma, **room)
    return _compile(decode, mesh, model, draft, *inputs)


def plain_step(model: T5Model, work: Workload, mesh: Mesh) -> tuple[Compiled, DecoderCache]:
    """Compiles one plain step of a target or a draft's model: one token a row, sampled, appended.

    Returns:
      The program, and its cache argument, as shapes.
    """
    given = model, NoDraft(model.vocab_size)
    first = functools.partial(_first_state, work, 0)
    return _compile_step(functools.partial(_plain, work), given, first, given, work, mesh)


def head_step(
    target: T5Model, draft: EagleDraft, work: Workload, gamma: int, mesh: Mesh
) -> tuple[Compiled, DecoderCache]:
    """Compiles one step of an EAGLE head from its last state: one token a row, sampled, appended.

    Returns:
      The program, and its cache argument (the head's, for ``gamma`` drafts), as shapes.
    """
    nothing = NoDraft(draft.model.vocab_size)

    def first(target, draft, inputs, prompts, keys):
        state = _first_state(work, 0, target, nothing, inputs, prompts, keys)
        own = draft.prefill(inputs, prompts, work.max_decode_len + 1)
        (text,), source = own.layers, state.target_cache.layers[draft.layers[0]]
        layer = LayerCache(text.keys, text.values, source.cross_keys, source.cross_values)
        cache = state.target_cache.replace(layers=(layer,))
        states = jnp.zeros((work.batch, draft.model.config.emb_dim), jnp.bfloat16)
        return state.replace(target_cache=DraftingCache.after(cache, states, gamma))

    step, models = functools.partial(_plain, work), (draft.model, nothing)
    return _compile_step(step, models, first, (target, draft), work, mesh)


def verification(
    model: T5Model, work: Workload, gamma: int, mesh: Mesh
) -> tuple[Compiled, DecoderCache]:
    """Compiles an iteration with given proposals: gamma + 1 tokens scored, verified, appended.

    Returns:
      The program, and its cache argument (the target's), as shapes.
    """
    given = model, _given(model.vocab_size, work, gamma, mesh)
    step = functools.partial(speculative.step, loop=_loop(work, gamma))
    return _compile_step(
        step, given, functools.partial(_first_state, work, gamma), given, work, mesh
    )


def _loop(work: Workload, gamma: int) -> Loop:
    return Loop(gamma=gamma, max_decode_len=work.max_decode_len)


def _first_state(
    work: Workload, gamma: int, model: T5Model, draft: Draft, inputs, prompts, keys
) -> DecodeState:
    return decode_state.init(model, draft, inputs, prompts, RowStream(keys), _loop(work, gamma))


def _plain(
    work: Workload, model: T5Model, draft: NoDraft, state: DecodeState, settings: Sampling
) -> DecodeState:
    return speculative.step(model, draft, state, settings, _loop(work, 0))[0]


def _compile_step(
    step: Callable, models: tuple, first: Callable, given: tuple, work: Workload, mesh: Mesh
) -> tuple[Compiled, DecoderCache]:
    """Compiles ``step(*models, state, settings)`` for the shapes of ``first(*given, *inputs)``."""
    *inputs, settings = _inputs(work, mesh)
    state = sharded_rows(jax.eval_shape(first, *given, *inputs), mesh)
    compiled = _compile(step, mesh, *models, state, settings, donate=len(models))
    return compiled, state.target_cache


def sharded_rows(tree: PyTree, mesh: Mesh) -> PyTree:
    """Adds shardings to the arrays of a decoding state, whose first axis is the batch."""

    def shard(leaf):
        # Only the caches' keys and values have four axes.
        axes = cache_lib.AXES if leaf.ndim == 4 else ("batch", *[None] * (leaf.ndim - 1))
        spec = partition_spec(leaf.shape, axes, RULES, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shard, tree)


@flax.struct.dataclass
class _Given(Draft):
    """Draft whose proposal is an argument of the program."""

    proposal: Proposal
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        return self.proposal.replace(drawn=gamma), state


def _given(vocab_size: int, work: Workload, gamma: int, mesh: Mesh) -> _Given:
    tokens = jax.ShapeDtypeStruct((work.batch, gamma), jnp.int32)
    probs = jax.ShapeDtypeStruct((*tokens.shape, vocab_size), jnp.float32)
    return _Given(sharded_rows(Proposal(tokens, probs), mesh), vocab_size)


def _inputs(work: Workload, mesh: Mesh):
    """Returns the sharded shapes of sources, prompts, keys and settings of sampling."""

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
