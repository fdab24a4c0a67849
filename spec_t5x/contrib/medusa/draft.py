"""Heads on the target's last state as the draft: gamma tokens from one call.

Medusa (arXiv 2401.10774) with its chain of likeliest tokens; see ``network``.
"""

import flax.struct
import jax.numpy as jnp

from spec_t5x.contrib.medusa.checkpoints import FORMAT, load_heads
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.drafts.kinds import DraftKind, Request, one_checkpoint
from spec_t5x.drafts.sequential import draw_token
from spec_t5x.interfaces import Context, Draft, DraftTraits, Outcome, Proposal, TreeProposal
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Float32, Int, PyTree


@flax.struct.dataclass
class MedusaState:
    """What a ``MedusaDraft`` keeps."""

    # Each row's length before its first iteration: the target has no state until then.
    starts: Int[Array, "batch"]


@flax.struct.dataclass
class MedusaDraft(Draft):
    """Proposes with heads that look 1, 2, … tokens ahead, all at once.

    A head does not know what the heads before it propose: a call is cheap, and each
    further token less likely to be right. At most as many tokens are proposed as there
    are heads, and none in the first iteration.
    """

    heads: T5Heads
    # How this draft samples; None takes the target's settings.
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.heads.vocab_size

    @property
    def traits(self) -> DraftTraits:
        """A token for each head, from the target's states; none in the first iteration."""
        num = self.heads.num_heads
        return DraftTraits(varies=True, max_worthwhile=num, uses_target_states=True)

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> MedusaState:
        """Remembers the prompts' lengths."""
        return MedusaState(prompt_lengths(prompts))

    def propose(
        self, state: MedusaState, context: Context, gamma: int
    ) -> tuple[Proposal, MedusaState]:
        """A token of each of the first ``gamma`` heads, as far as there are heads."""
        num = min(gamma, self.heads.num_heads)
        settings = context.settings if self.settings is None else self.settings
        logits, draws = self.head_logits(context, num), context.draws
        tokens, probs = [], []
        for head in range(num):
            drafted = (
                jnp.stack(tokens, axis=1) if tokens else jnp.zeros((len(logits), 0), jnp.int32)
            )
            ruled = context.ruled(logits[:, head, None], drafted, head)[:, 0]
            token, of_head, draws = draw_token(ruled, draws, settings)
            tokens.append(token)
            probs.append(of_head)
        beyond = (0, gamma - num)
        if not settings.greedy:
            probs = jnp.pad(jnp.stack(probs, axis=1), ((0, 0), beyond, (0, 0)))
        return Proposal(
            tokens=jnp.pad(jnp.stack(tokens, axis=1), ((0, 0), beyond)),
            probs=None if settings.greedy else probs,
            drawn=draws.drawn,
            counts=jnp.where(context.lengths > state.starts, num, 0),
        ), state

    def propose_tree(
        self, state: MedusaState, context: Context, tree: Tree
    ) -> tuple[TreeProposal, MedusaState]:
        """Medusa's tree: under every node of a depth the same tokens, of that depth's head.

        They are drawn once, without replacement: a path meets the draws of a depth only
        once, so nothing is lost by sharing them.
        """
        known = min(tree.depth, self.heads.num_heads)
        settings = context.settings if self.settings is None else self.settings
        logits = self.head_logits(context, known)
        probs, draws = standardize(logits, settings), context.draws
        tokens, all_probs = [], []
        for depth, branching in enumerate(tree.branching):
            parents = tree.level_sizes[depth]
            # Beyond the last head nothing is proposed; what is there makes up the shape.
            head = min(depth, known - 1)
            if depth == head:
                children, draws = draws.next_distinct(
                    probs[:, head], logits[:, head], branching, settings
                )
            else:
                children = jnp.zeros((probs.shape[0], branching), jnp.int32)
            tokens.append(jnp.tile(children, (1, parents)))
            all_probs.append(jnp.repeat(probs[:, head, None], parents, axis=1))
        return TreeProposal(
            tokens=jnp.concatenate(tokens, axis=1),
            probs=None if settings.greedy else jnp.concatenate(all_probs, axis=1),
            depths=jnp.where(context.lengths > state.starts, known, 0),
        ), state

    def commit_tree(
        self, state: MedusaState, outcome: Outcome, path: Int[Array, "batch depth"]
    ) -> MedusaState:
        """Nothing to forget."""
        return state

    def head_logits(self, context: Context, num: int) -> Float32[Array, "batch num vocab"]:
        """Logits of the first ``num`` heads: of the tokens at lengths + 1, lengths + 2, …

        Their largest are the candidates of Medusa's tree. They mean nothing in a row's
        first iteration.
        """
        # Another draft may want states of more layers.
        states = context.last_states[:, : self.heads.module.config.emb_dim]
        return self.heads.head_logits(states, context.last_tokens, num)


def _make(request: Request, argument: str) -> MedusaDraft:
    params = load_heads(argument or request.packaged("medusa"), request.target)
    return MedusaDraft(T5Heads.create(params, request.model), request.options.settings)


KIND = DraftKind(make=_make, format=FORMAT, checkpoints=one_checkpoint, needs_encoder=True)
