"""Tiny targets and drafts whose distributions are known exactly.

``StubTarget`` wraps a function of three lines, ``TableTarget`` looks its logits up
under a hash of the row's source and whole prefix. Both work from a cache that holds
nothing but tokens by position: a token written to the wrong place, or one that
outlives its rollback, shows as other logits. ``sequence_law`` enumerates what such a
target generates, so that your own loop, verifier or draft can be checked
against the exact law:

    target = TableTarget.create(seed=0, vocab_size=4, zeros=0.2)
    draft = TableDraft.create(seed=1, vocab_size=4)
    law = sequence_law(target, [2, 3], sampling(1.0), max_decode_len=3)
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import UInt32

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Context, Draft, Nodes, Outcome, Proposal
from spec_t5x.models.binding import Model, ModelConfig, bind, expected_shapes
from spec_t5x.models.eagle import EagleConfig, first_head, head_config
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.sampling.distributions import Sampling, standardize, write_rows
from spec_t5x.types import EOS_ID, PAD_ID, Array, EndOfSequence, Float32, Int, PyTree

# What a cache holds where nothing was written; no token.
UNWRITTEN = -1


@flax.struct.dataclass
class PrefixCache:
    """The tokens fed so far, each at the position it was fed to."""

    sources: Int[Array, "batch source"]
    tokens: Int[Array, "batch length"]
    # How many tokens are cached for each row.
    lengths: Int[Array, "batch"]


class PrefixTarget:
    """A target that recomputes its logits from source and prefix.

    Subclasses have a ``vocab_size`` and give the logits of whole sequences;
    ``score`` reads them off at the rows' positions.
    """

    def next_logits(
        self, sources: Int[Array, "batch source"], prefixes: Int[Array, "batch length"]
    ) -> Float32[Array, "batch length vocab"]:
        """Logits after each token of ``prefixes``, start token first."""
        raise NotImplementedError

    # They have no states, nor a limit.
    state_size = 0
    max_positions = None

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        max_length: int,
        prompts: Int[Array, "batch width"] | None = None,
    ) -> PrefixCache:
        """A cache for ``max_length`` tokens, with those of the prompts in it."""
        batch = inputs.shape[0]
        tokens = jnp.full((batch, max_length), UNWRITTEN, jnp.int32)
        lengths = jnp.zeros(batch, jnp.int32)
        if prompts is not None:
            tokens = write_rows(tokens, prompts[:, :max_length], lengths)
        return PrefixCache(jnp.asarray(inputs, jnp.int32), tokens, lengths)

    def score(
        self,
        cache: PrefixCache,
        tokens: Int[Array, "batch new"],
        num: Int[Array, ""] | None = None,
    ) -> tuple[Float32[Array, "batch new vocab"], Float32[Array, "batch new 0"], PrefixCache]:
        """Feeds new tokens at each row's length: logits after each, longer cache.

        Logits beyond the end of the cache are NaN.
        """
        new = tokens.shape[1]
        written = write_rows(cache.tokens, tokens, cache.lengths)
        positions = cache.lengths[:, None] + jnp.arange(new)[None, :]
        logits = self.next_logits(cache.sources, written)
        logits = jnp.take_along_axis(logits, positions[..., None], axis=1)
        cache = cache.replace(tokens=written, lengths=cache.lengths + new)
        return logits, logits[..., :0], cache

    def num_slots(self, cache: PrefixCache) -> int:
        """How many tokens of a row the cache has room for."""
        return cache.tokens.shape[1]

    def score_nodes(
        self, cache: PrefixCache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float32[Array, "batch nodes 0"], PrefixCache]:
        """Feeds tokens of a tree to their slots: logits after each, written cache."""
        slots = jax.vmap(lambda row, new, at: row.at[at].set(new))(
            cache.tokens, nodes.tokens, nodes.slots
        )
        length = cache.tokens.shape[1]

        def of_node(source, tokens, slot_positions, visible, position):
            # The node's own text, written out by position.
            places = jnp.where(visible, slot_positions, length)
            prefix = jnp.full(length, UNWRITTEN, jnp.int32).at[places].set(tokens, mode="drop")
            return self.next_logits(source[None], prefix[None])[0, position]

        of_row = jax.vmap(of_node, (None, None, None, 0, 0))
        logits = jax.vmap(of_row)(
            cache.sources, slots, nodes.slot_positions, nodes.visible, nodes.positions
        )
        return logits, logits[..., :0], cache.replace(tokens=slots)

    def move(
        self, cache: PrefixCache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> PrefixCache:
        """The cache with the contents of ``slots`` copied to the slots from ``starts`` on."""
        moved = jnp.take_along_axis(cache.tokens, slots, axis=1)
        return cache.replace(tokens=write_rows(cache.tokens, moved, starts))

    def rollback(self, cache: PrefixCache, lengths: Int[Array, "batch"]) -> PrefixCache:
        """The cache with each row's length set to ``lengths``; keeps the rest."""
        return cache.replace(lengths=lengths)


@flax.struct.dataclass
class StubTarget(PrefixTarget):
    """A target from a function ``(sources, prefixes) -> logits``: ``next_logits``."""

    function: Callable = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    def next_logits(self, sources, prefixes):
        """What the function says."""
        return self.function(sources, prefixes)


@flax.struct.dataclass
class TableTarget(PrefixTarget):
    """Logits from a table, under a hash of the row's source and whole prefix.

    Padding of the source has no influence, as in a real model. Two targets of one
    shape share a compiled program: the table is an array.
    """

    # One row for each value of the hash; -inf for probability zero.
    table: Float32[Array, "contexts vocab"]

    @classmethod
    def create(
        cls,
        seed: int,
        vocab_size: int,
        *,
        contexts: int = 211,
        scale: float = 1.5,
        zeros: float = 0.0,
    ) -> "TableTarget":
        """Random logits.

        Args:
          seed: of the table.
          vocab_size: number of tokens, at least 2.
          contexts: rows of the table, 1 for a law that ignores the prefix.
          scale: standard deviation of the logits.
          zeros: share of the tokens that have probability zero; one token of each
            row, taken at random, is spared.
        """
        if vocab_size < 2:
            raise InputError(f"vocab_size is {vocab_size}: give at least 2")
        rng = np.random.default_rng(seed)
        logits = rng.normal(scale=scale, size=(contexts, vocab_size))
        is_zero = rng.random((contexts, vocab_size)) < zeros
        is_zero[np.arange(contexts), rng.integers(vocab_size, size=contexts)] = False
        return cls(jnp.asarray(np.where(is_zero, -np.inf, logits), jnp.float32))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.table.shape[1]

    def next_logits(self, sources, prefixes):
        """The table's rows; every token of the prefix and its place count."""
        return self.table[_contexts(sources, prefixes, self.table.shape[0])]


@flax.struct.dataclass
class TableDraft(Draft):
    """Proposes from a table like ``TableTarget``'s, read off the committed text.

    It keeps the sources and, at the lengths it was told, nothing else: a loop that
    forgets ``commit``, or reports other lengths than it proposes from, gets the
    proposals of another source.
    """

    table: Float32[Array, "contexts vocab"]
    # How this draft samples; None takes the target's settings.
    settings: Sampling | None = None

    @classmethod
    def create(
        cls, seed: int, vocab_size: int, *, settings: Sampling | None = None, **law: int | float
    ) -> "TableDraft":
        """Random logits; the arguments are those of ``TableTarget.create``."""
        return cls(TableTarget.create(seed, vocab_size, **law).table, settings)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.table.shape[1]

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        max_length: int,
    ) -> PrefixCache:
        """Remembers the sources and the prompts' lengths."""
        return PrefixCache(
            sources=jnp.asarray(inputs, jnp.int32),
            tokens=jnp.zeros((inputs.shape[0], 0), jnp.int32),
            lengths=jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32),
        )

    def propose(
        self, state: PrefixCache, context: Context, gamma: int
    ) -> tuple[Proposal, PrefixCache]:
        """``gamma`` tokens, each sampled given the ones before it."""
        settings = context.settings if self.settings is None else self.settings
        lengths, text = context.lengths, context.sequences
        agreed = (state.lengths == lengths)[:, None]
        sources = jnp.where(agreed, state.sources, state.sources + 1)
        tokens, probs, draws = [], [], context.draws
        for i in range(gamma):
            contexts = _contexts(sources, text, self.table.shape[0])
            at = (lengths + i)[:, None]
            here = self.table[jnp.take_along_axis(contexts, at, axis=1)[:, 0]]
            probs.append(standardize(here, settings))
            token, draws = draws.next(probs[i], settings)
            tokens.append(token)
            text = write_rows(text, token[:, None], lengths + i + 1)
        return Proposal(jnp.stack(tokens, 1), jnp.stack(probs, 1), draws.drawn), state

    def commit(self, state: PrefixCache, outcome: Outcome) -> PrefixCache:
        """Takes note of the rows' lengths."""
        return state.replace(lengths=outcome.lengths)

    def catch_up(self, state: PrefixCache, context: Context, width: int) -> PrefixCache:
        """Takes note of the rows' lengths."""
        return state.replace(lengths=context.lengths)


@flax.struct.dataclass
class ConstantDraft(Draft):
    """Proposes the same token for ever, and says so."""

    token: Int[Array, ""]
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        """``gamma`` times the token."""
        tokens = jnp.full((context.lengths.shape[0], gamma), self.token, jnp.int32)
        return Proposal(tokens), state


def conditionals(
    target: PrefixTarget,
    source: Sequence[int],
    settings: Sampling,
    *,
    max_decode_len: int,
    prompt: Sequence[int] = (),
) -> dict[tuple[int, ...], np.ndarray]:
    """Distribution of the next token after every text shorter than ``max_decode_len``.

    In float64, by text (the tokens after the start token). Nothing of the loops takes
    part: logits come from whole prefixes. The arguments are ``sequence_law``'s.
    """
    if settings.temperature.ndim:
        raise InputError("settings have a temperature for each row: give one for one row")
    tokens = range(target.vocab_size)
    continuations = itertools.product(tokens, repeat=max_decode_len - 1 - len(prompt))
    texts = [(*prompt, *continuation) for continuation in continuations]
    prefixes = np.array([[PAD_ID, *text] for text in texts], np.int32)
    sources = np.tile(np.asarray(source, np.int32), (len(texts), 1))
    probs = np.asarray(_next_probs(type(target), target, sources, prefixes, settings), np.float64)
    probs /= probs.sum(axis=-1, keepdims=True)
    return {
        text[:length]: probs[row, length]
        for row, text in enumerate(texts)
        for length in range(len(prompt), max_decode_len)
    }


@functools.partial(jax.jit, static_argnums=0)
def _next_probs(kind, target, sources, prefixes, settings):
    # By ``kind`` too: JAX takes classes with the same fields for one another.
    return standardize(target.next_logits(sources, prefixes), settings)


def sequence_law(
    target: PrefixTarget,
    source: Sequence[int],
    settings: Sampling,
    *,
    max_decode_len: int,
    prompt: Sequence[int] = (),
    eos_id: EndOfSequence = EOS_ID,
) -> dict[tuple[int, ...], float]:
    """Probability of each text that a row can end with, by enumeration.

    Texts are the tokens after the start token, the prompt's included, up to the
    end-of-sequence token or ``max_decode_len`` tokens. Texts of probability zero are
    left out.

    Args:
      target: whose texts; of a small vocabulary.
      source: the row's source tokens.
      settings: the distribution sampled from, with one temperature.
      max_decode_len: length at which a text ends; more than the prompt's.
      prompt: tokens that every text begins with.
      eos_id: the token that ends a text after the prompt, or several.
    """
    by_text = conditionals(target, source, settings, max_decode_len=max_decode_len, prompt=prompt)
    eos_ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    law, under_way = {}, [(tuple(prompt), 1.0)]
    while under_way:
        text, probability = under_way.pop()
        for token in np.flatnonzero(by_text[text]).tolist():
            longer = (*text, token), probability * by_text[text][token]
            if token in eos_ids or len(longer[0]) == max_decode_len:
                law[longer[0]] = longer[1]
            else:
                under_way.append(longer)
    return law


def tiny_t5(seed: int, **changes) -> T5Model:
    """A T5 1.1 of about 6,000 random parameters that writes varied texts.

    Seed 0, at temperature 0, ends some of its texts within 16 tokens.

    Args:
      seed: of the parameters.
      **changes: fields of ``T5Config`` to set otherwise.
    """
    sizes = {
        "vocab_size": 30,
        "emb_dim": 16,
        "num_heads": 2,
        "head_dim": 8,
        "mlp_dim": 24,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "mlp_activations": ("gelu", "linear"),
        "logits_via_embedding": False,
        # Few and close together, so that short texts reach all of them.
        "relpos_num_buckets": 8,
        "relpos_max_distance": 12,
    }
    config = T5Config(**{**sizes, **changes})

    def scaled(path, noise):
        if noise.ndim == 1:
            return 1 + 0.2 * noise
        if "rel_embedding" in path:
            return 2 * noise
        if "embedding" in path or "logits_dense" in path:
            return noise
        return 1.5 * noise / np.sqrt(len(noise))

    return T5Model.create(random_params(config, seed, scaled), config)


def tiny_head(
    target: T5Model,
    layers: Sequence[int],
    width: int | None = None,
    depths: Sequence[int] = (),
    **options: bool,
) -> tuple[PyTree, EagleConfig]:
    """An EAGLE head's own parameters, which mix token and states at random, and its sizes.

    The arguments are those of ``head_config``.
    """
    key = jax.random.key(4)
    config = head_config(target.config, layers, width, depths, **options)
    own = first_head(key, target.params, target.config, config, layers)
    for name in ("fusion", *(["reduction"] if depths else [])):
        shape = own[name]["kernel"].shape
        own[name] = {"kernel": jax.random.normal(key, shape) * config.emb_dim**-0.5}
    return own, config


def disturbed(model: Model, amount: float, seed: int = 0) -> Model:
    """A model that often agrees with another: the same parameters, with noise.

    Args:
      model: the other.
      amount: standard deviation of the noise, as a share of each parameter's size.
      seed: of the noise.
    """
    rng = np.random.default_rng(seed)

    def disturb(leaf):
        return leaf * (1 + amount * rng.normal(size=leaf.shape)).astype(np.float32)

    return bind(jax.tree.map(disturb, model.params), model.config)


def random_params(
    config: ModelConfig, seed: int, scaled: Callable[[str, np.ndarray], np.ndarray]
) -> PyTree:
    """Normal draws, each tensor as ``scaled(path, draws)``."""
    rng = np.random.default_rng(seed)
    shapes = sorted(expected_shapes(config).items())
    flat = {path: scaled(path, rng.normal(size=shape)) for path, shape in shapes}
    return unflatten_dict({path: x.astype(np.float32) for path, x in flat.items()}, sep="/")


def _contexts(
    sources: Int[Array, "batch source"], prefixes: Int[Array, "batch length"], num: int
) -> Int[Array, "batch length"]:
    """A number below ``num`` for the source and the prefix up to each position."""
    of_source = jnp.where(sources == PAD_ID, 0, _hash_tokens(sources))
    of_source = _mix(jnp.sum(of_source, axis=1, dtype=jnp.uint32))
    of_prefix = jnp.cumsum(_hash_tokens(prefixes), axis=1, dtype=jnp.uint32)
    return (_mix(of_source[:, None] + of_prefix) % jnp.uint32(num)).astype(jnp.int32)


def _hash_tokens(tokens: Int[Array, "batch length"]) -> UInt32[Array, "batch length"]:
    """A number for each token at its position; the sum of them tells texts apart."""
    positions = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.uint32)[None, :]
    return _mix(positions * jnp.uint32(1 << 16) + (tokens + 2).astype(jnp.uint32))


def _mix(values: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The finalizer of MurmurHash3: every bit of the input reaches every bit."""
    values = (values ^ (values >> 16)) * jnp.uint32(0x85EBCA6B)
    values = (values ^ (values >> 13)) * jnp.uint32(0xC2B2AE35)
    return values ^ (values >> 16)
