"""Drafts of no use, and a target of a function, which several tests share."""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Cache, Context, Draft, Outcome, Proposal
from spec_t5x.labs.testing.toy_models import PrefixCache, PrefixTarget, TableTarget
from spec_t5x.labs.training.first_head import first_head, head_config
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import standardize, write_rows
from spec_t5x.types import Array, Float32, Int, PyTree


@flax.struct.dataclass
class ConstantDraft(Draft):
    """A draft that always proposes the same token, without distributions."""

    token: Int[Array, ""]
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        """Proposes the token ``gamma`` times."""
        tokens = jnp.full((context.lengths.shape[0], gamma), self.token, jnp.int32)
        return Proposal(tokens), state


@flax.struct.dataclass
class StubTarget(PrefixTarget):
    """A target made of a function ``(sources, prefixes) -> logits``, which is ``next_logits``."""

    function: Callable = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    def next_logits(self, sources, prefixes):
        """Calls the function."""
        return self.function(sources, prefixes)


@flax.struct.dataclass
class TableDraft(Draft):
    """A draft with a table like ``TableTarget``'s, looked up by source and text.

    Its state is the sources and the rows' lengths. If these are not the context's, because a loop
    left ``commit`` out or gave it other lengths, proposals are those of another source.
    """

    table: Float32[Array, "contexts vocab"]

    @classmethod
    def create(cls, seed: int, vocab_size: int, **law: int | float) -> "TableDraft":
        """Draws random logits; the arguments are those of ``TableTarget.create``."""
        return cls(TableTarget.create(seed, vocab_size, **law).table)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.table.shape[1]

    def prefill(self, inputs, prompts, max_length) -> PrefixCache:
        """Stores the sources and the prompts' lengths."""
        return PrefixCache(
            sources=jnp.asarray(inputs, jnp.int32),
            tokens=jnp.zeros((inputs.shape[0], 0), jnp.int32),
            lengths=prompt_lengths(prompts),
        )

    def propose(
        self, state: PrefixCache, context: Context, gamma: int
    ) -> tuple[Proposal, PrefixCache]:
        """Draws ``gamma`` tokens, each given the ones before it."""
        settings, lengths, text = context.settings, context.lengths, context.sequences
        agreed = (state.lengths == lengths)[:, None]
        sources = jnp.where(agreed, state.sources, state.sources + 1)
        tokens, probs, draws = [], [], context.draws
        for i in range(gamma):
            logits = TableTarget(self.table).next_logits(sources, text)
            here = jnp.take_along_axis(logits, (lengths + i)[:, None, None], axis=1)[:, 0]
            probs.append(standardize(here, settings))
            token, draws = draws.next(probs[i], settings)
            tokens.append(token)
            text = write_rows(text, token[:, None], lengths + i + 1)
        return Proposal(jnp.stack(tokens, 1), jnp.stack(probs, 1), draws.drawn), state

    def commit(self, state: PrefixCache, outcome: Outcome) -> PrefixCache:
        """Stores the rows' lengths."""
        return state.replace(lengths=outcome.lengths)

    def catch_up(self, state: PrefixCache, context: Context, width: int) -> PrefixCache:
        """Stores the rows' lengths."""
        return state.replace(lengths=context.lengths)


def tiny_head(
    target: T5Model,
    layers: Sequence[int],
    width: int | None = None,
    depths: Sequence[int] = (),
    **options: bool,
) -> tuple[PyTree, EagleConfig]:
    """Returns parameters and configuration of an EAGLE head with random maps of token and states.

    The arguments are those of ``head_config``, with the target in place of its configuration.
    """
    key = jax.random.key(4)
    config = head_config(target.config, layers, width, depths, **options)
    own = first_head(key, target.params, target.config, config, layers)
    for name in ("fusion", *(["reduction"] if depths else [])):
        shape = own[name]["kernel"].shape
        own[name] = {"kernel": jax.random.normal(key, shape) * config.emb_dim**-0.5}
    return own, config
