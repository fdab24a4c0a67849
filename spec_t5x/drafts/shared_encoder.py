"""A draft that reads the source with its target's encoder: only a decoder of its own.

An encoder is most of a small draft's cost where sources are long and texts short. A draft
whose decoder was made of the target's layers (``models.kept_layers``) finds all that it
needs of a source in the target's cache: the keys and values of those layers.
"""

from collections.abc import Sequence
from typing import ClassVar

import flax.struct

from spec_t5x.drafts.transformer import TransformerDraft, TransformerState
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Proposal, TreeProposal
from spec_t5x.machine.operations import XLA
from spec_t5x.models.cache import DecoderCache, DecoderOnlyCache, KeysValues, LayerCache
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class SharedEncoderDraft(TransformerDraft):
    """A ``TransformerDraft`` whose source is in the target's cache, and whose text in its own.

    Nothing is encoded, and no prompt is fed before the first proposal: then the target's
    cache is there, and the draft catches up with the text. Its model has no encoder; make it
    with ``create``.
    """

    # Which decoder layer of the target's each of the draft's was.
    layers: tuple[int, ...] = flax.struct.field(pytree_node=False, kw_only=True)

    network: ClassVar[type[Transformer]] = Transformer

    @classmethod
    def create(
        cls,
        own: PyTree,
        config: T5Config,
        layers: Sequence[int],
        target: T5Model,
        settings: Sampling | None = None,
        head: NarrowHead | None = None,
    ) -> "SharedEncoderDraft":
        """Binds a draft's own parameters to its target.

        Args:
          own: ``models.kept_layers.own_params``.
          config: of the draft.
          layers: which decoder layer of the target's each of the draft's was.
          target: gives the embedding, too.
          settings: as of ``TransformerDraft``.
          head: which tokens the draft knows, where its output layer is a narrow one
            (``models.narrow_head.narrowed_params``).

        Raises:
          InputError: layers that the target does not have, or not one for each of the
            draft's.
        """
        total = target.config.num_decoder_layers
        if len(layers) != config.num_decoder_layers or not all(0 <= i < total for i in layers):
            raise InputError(
                f"a draft of {config.num_decoder_layers} decoder layers shares layers "
                f"{list(layers)} of a target of {total}: give one of the target's for each"
            )
        params = {name: each for name, each in own.items() if name != "narrow_head"}
        model = T5Model.create(params, config)
        embedding = {"token_embedder": target.weights["token_embedder"]}
        model = model.replace(
            weights={**embedding, **model.weights},
            module=cls.network(config),
            operations=model.operations if model.operations is target.operations else XLA,
        )
        if head is not None:
            model = NarrowT5.narrowed(model, head, own["narrow_head"]["kernel"])
        return cls(model, settings, layers=tuple(layers))

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> TransformerState:
        """Room for a text; neither source nor prompts are looked at."""
        config, batch = self.model.config, prompts.shape[0]
        cache = DecoderOnlyCache.empty(config, config.num_decoder_layers, batch, max_length)
        return TransformerState(cache)

    def propose(
        self, state: TransformerState, context: Context, gamma: int
    ) -> tuple[Proposal, TransformerState]:
        """Up to ``gamma`` tokens, each sampled given the ones before it."""
        state = self.catch_up(state, context, gamma + 1)
        proposal, state = super().propose(self._with_source(state, context), context, gamma)
        return proposal, _without_source(state)

    def propose_tree(
        self, state: TransformerState, context: Context, tree: Tree
    ) -> tuple[TreeProposal, TransformerState]:
        """A token for each node, as of ``TransformerDraft``."""
        state = self.catch_up(state, context, tree.depth + 1)
        proposal, state = super().propose_tree(self._with_source(state, context), context, tree)
        return proposal, _without_source(state)

    def catch_up(self, state: TransformerState, context: Context, width: int) -> TransformerState:
        """Feeds what is missing before the tokens that ``propose`` feeds."""
        state = super().catch_up(self._with_source(state, context), context, width)
        return _without_source(state)

    def _with_source(self, state: TransformerState, context: Context) -> TransformerState:
        own, of_target = state.cache, context.target_cache
        sources = (of_target.layers[layer] for layer in self.layers)
        layers = tuple(
            LayerCache(text.keys, text.values, source.cross_keys, source.cross_values)
            for text, source in zip(own.layers, sources, strict=True)
        )
        return state.replace(cache=DecoderCache(layers, of_target.source_mask, own.lengths))


def _without_source(state: TransformerState) -> TransformerState:
    cache = state.cache
    layers = tuple(KeysValues(layer.keys, layer.values) for layer in cache.layers)
    return state.replace(cache=DecoderOnlyCache(layers, cache.lengths))
