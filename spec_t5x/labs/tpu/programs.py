"""Programs of decoding, compiled from shapes alone for any mesh.

They are the whole loops and, each separately, the three calls of Theorem 3.8: a step of the target,
a step of the draft's model, and a verification (an iteration without the drafting). With a tree of
drafts, the draft makes a step over the nodes of each depth.
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
from spec_t5x.drafts.sequential import draft_tree
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.interfaces import Draft, Proposal, TreeDraft, TreeProposal
from spec_t5x.labs.tpu.options import Workload
from spec_t5x.labs.training.first_head import head_config
from spec_t5x.loops import decode_state, speculative
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, DecodeState, Loop, NoDraft
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.models import cache as cache_lib
from spec_t5x.models import partitioning
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.cache import KVCache, LayerCache
from spec_t5x.models.eagle import DraftingCache, EagleNetwork
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import RowStream
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import PyTree
from spec_t5x.verifiers import TreeVerifier, Verifier


def abstract_model(config: T5Config, mesh: Mesh, weights: str = AUTO, kv: str = AUTO) -> T5Model:
    """Returns a model that has sharded shapes in place of parameters.

    Parameters are in bfloat16; ``weights`` "int8" or "int4" rounds the matrices, ``kv`` "int8" the
    source's keys and values.
    """
    config = dataclasses.replace(config, dtype="bfloat16")
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding),
        abstract_params(config),
        partitioning.param_shardings(config, mesh),
    )
    model = T5Model(weights=params, module=Transformer(config), kv=kv)
    return model if weights == AUTO else model.rounded(BITS[weights])


def abstract_head(target: T5Model, mesh: Mesh, width: int | None) -> EagleDraft:
    """Returns an EAGLE head on the target's last layer, with shapes in place of parameters.

    Raises:
      InputError: a width that is not less than the target's.
    """
    layers = (target.config.num_decoder_layers - 1,)
    config = head_config(target.config, layers, width)
    own = own_params(abstract_model(config, mesh).params)
    weights = {**own, "token_embedder": target.weights["token_embedder"]}
    return EagleDraft(T5Model(weights=weights, module=EagleNetwork(config)), layers=layers)


def loop(
    model: T5Model,
    draft: Draft | None,
    work: Workload,
    gamma: int,
    mesh: Mesh,
    verifier: Verifier = DEFAULT_VERIFIER,
    costs: Costs | None = None,
) -> Compiled:
    """Compiles ``speculative_decode``, or ``autoregressive_decode`` if there is no draft.

    With ``costs``, the loop has a pace that begins with them.
    """
    room = {"max_decode_len": work.max_decode_len}
    inputs = _inputs(work, mesh)
    if draft is None:
        return _compile(functools.partial(autoregressive_decode, **room), mesh, model, *inputs)
    decode = functools.partial(
        speculative.speculative_decode, gamma=gamma, verifier=verifier, **room
    )
    if costs is None:
        return _compile(decode, mesh, model, draft, *inputs)
    pace = with_sharding(jax.eval_shape(lambda: Pace.start(costs)), partitioning.replicated(mesh))

    def at_pace(pace, *arguments):
        return decode(*arguments, pace=pace)

    return _compile(at_pace, mesh, pace, model, draft, *inputs)


def plain_step(model: T5Model, work: Workload, mesh: Mesh) -> tuple[Compiled, KVCache]:
    """Compiles one plain step of a target or a draft's model: one token a row, sampled, appended.

    Returns:
      The program, and its cache argument, as shapes.
    """
    given = model, NoDraft(model.vocab_size)
    first = functools.partial(_first_state, _loop(work, 0))
    return _compile_step(functools.partial(_plain, work), given, first, given, work, mesh)


def head_step(
    target: T5Model, draft: EagleDraft, work: Workload, gamma: int, mesh: Mesh
) -> tuple[Compiled, KVCache]:
    """Compiles one step of an EAGLE head from its last state: one token a row, sampled, appended.

    Returns:
      The program, and its cache argument (the head's, for ``gamma`` drafts), as shapes.
    """
    first = functools.partial(_head_state, work, work.max_decode_len + 1, gamma)
    step, models = functools.partial(_plain, work), (draft.model, NoDraft(draft.vocab_size))
    return _compile_step(step, models, first, (target, draft), work, mesh)


def level_step(
    target: T5Model, draft: TransformerDraft, work: Workload, tree: Tree, depth: int, mesh: Mesh
) -> tuple[Compiled, KVCache]:
    """Compiles a draft's step over a tree's nodes of one depth: one call, and each node's children.

    The program drafts a tree of two levels, the second of which is this step; the first adds the
    draw of the nodes from one distribution.

    Returns:
      The program, and its cache argument (the draft's, with room for ``tree``), as shapes.
    """
    level = Tree((tree.level_sizes[depth], tree.branching[depth]))
    loop = _loop(work, tree.depth, TreeVerifier(tree.branching))
    models = draft.model, NoDraft(draft.vocab_size)
    first, given = functools.partial(_first_state, loop), models
    if isinstance(draft, EagleDraft):
        first = functools.partial(_head_state, work, loop.max_length, tree.num_nodes)
        given = target, draft
    return _compile_step(functools.partial(_level, level), models, first, given, work, mesh)


def verification(
    model: T5Model, work: Workload, gamma: int, mesh: Mesh, verifier: Verifier = DEFAULT_VERIFIER
) -> tuple[Compiled, KVCache]:
    """Compiles an iteration with given proposals: all their tokens scored, verified, appended.

    Returns:
      The program, and its cache argument (the target's), as shapes.
    """
    loop = _loop(work, gamma, verifier)
    given = model, _given(model.vocab_size, work, loop, mesh)
    step = functools.partial(speculative.step, loop=loop)
    return _compile_step(step, given, functools.partial(_first_state, loop), given, work, mesh)


def _loop(work: Workload, gamma: int, verifier: Verifier = DEFAULT_VERIFIER) -> Loop:
    return Loop(gamma=gamma, max_decode_len=work.max_decode_len, verifier=verifier)


def _first_state(loop: Loop, model: T5Model, draft: Draft, inputs, prompts, keys) -> DecodeState:
    return decode_state.init(model, draft, inputs, prompts, RowStream(keys), loop)


def _head_state(
    work: Workload, max_length: int, room: int, target, draft: EagleDraft, *inputs
) -> DecodeState:
    """Returns the first state with the head's cache of ``max_length`` slots as the target's."""
    state = _first_state(_loop(work, 0), target, NoDraft(draft.vocab_size), *inputs)
    sources, prompts, _ = inputs
    own = draft.prefill(sources, prompts, max_length)
    (text,), source = own.layers, state.target_cache.layers[draft.layers[0]]
    layer = LayerCache(text.keys, text.values, source.cross_keys, source.cross_values)
    cache = state.target_cache.replace(layers=(layer,))
    states = jnp.zeros((work.batch, draft.model.config.emb_dim), jnp.bfloat16)
    return state.replace(target_cache=DraftingCache.after(cache, states, room))


def _plain(
    work: Workload, model: T5Model, draft: NoDraft, state: DecodeState, settings: Sampling
) -> DecodeState:
    return speculative.step(model, draft, state, settings, _loop(work, 0))[0]


def _level(
    level: Tree, model: T5Model, draft: NoDraft, state: DecodeState, settings: Sampling
) -> tuple[TreeProposal, DecodeState]:
    context = decode_state.make_context(state, settings, coupled=False)
    logits = jnp.zeros((context.lengths.shape[0], model.vocab_size), jnp.float32)
    proposal, cache = draft_tree(model, state.target_cache, logits, context, settings, level)
    # All of the state, since it is donated.
    return proposal, state.replace(target_cache=cache)


def _compile_step(
    step: Callable, models: tuple, first: Callable, given: tuple, work: Workload, mesh: Mesh
) -> tuple[Compiled, KVCache]:
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
        spec = partition_spec(leaf.shape, axes, partitioning.RULES, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shard, tree)


@flax.struct.dataclass
class _Given(TreeDraft):
    """Draft whose proposal, a chain or a tree, is an argument of the program."""

    proposal: Proposal | TreeProposal
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        return self.proposal.replace(drawn=gamma), state

    def propose_tree(self, state, context, tree):
        return self.proposal, state


def _given(vocab_size: int, work: Workload, loop: Loop, mesh: Mesh) -> _Given:
    tree = loop.verifier.tree(loop.gamma)
    tokens = jax.ShapeDtypeStruct((work.batch, loop.num_nodes - 1), jnp.int32)
    num_drawn_from = tree.num_inner if tree else loop.gamma
    probs = jax.ShapeDtypeStruct((work.batch, num_drawn_from, vocab_size), jnp.float32)
    if tree is None:
        proposal = Proposal(tokens, probs)
    else:
        depths = jax.ShapeDtypeStruct((work.batch,), jnp.int32)
        proposal = TreeProposal(tokens=tokens, probs=probs, depths=depths)
    return _Given(sharded_rows(proposal, mesh), vocab_size)


def _inputs(work: Workload, mesh: Mesh):
    """Returns the sharded shapes of sources, prompts, keys and settings of sampling."""

    def make():
        sources = jnp.zeros((work.batch, work.source_len), jnp.int32)
        prompts = jnp.zeros((work.batch, 1), jnp.int32)
        keys = jax.random.split(jax.random.key(0), work.batch)
        return sources, prompts, keys, Sampling(jnp.float32(not work.greedy), greedy=work.greedy)

    *rows, settings = jax.eval_shape(make)
    everywhere = with_sharding(settings, partitioning.replicated(mesh))
    return *with_sharding(rows, partitioning.batch_sharding(mesh)), everywhere


def with_sharding(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Returns the shapes of a tree's arrays, or shapes, each with the sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _compile(function: Callable, mesh: Mesh, *args, donate: int | None = None) -> Compiled:
    jitted = jax.jit(function, donate_argnums=() if donate is None else donate)
    platform = mesh.devices.flat[0].platform.replace("gpu", "cuda")
    with partitioning.partitioned(mesh):
        return jitted.trace(*args).lower(lowering_platforms=(platform,)).compile()
