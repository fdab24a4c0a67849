"""A draft that is only a decoder, and uses the target's encoding of the source.

An encoder takes most of a small draft's time if sources are long and outputs short. A draft whose
decoder was made of the target's layers (``labs.training.kept_layers``) attends to the keys and
values of the source that the target's cache has for those layers.
"""

from collections.abc import Sequence
from typing import ClassVar

import flax.struct

from spec_t5x.drafts.sequential import check_cache
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Context, Proposal, Target, TreeProposal
from spec_t5x.machine.operations import FULL_PRECISION, XLA
from spec_t5x.models.cache import KVCache, LayerCache
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class SharedEncoderDraft(TransformerDraft):
    """``TransformerDraft`` without an encoder, which reads the source from the target's cache.

    The prefill computes nothing; the first proposal feeds the prompts. ``create`` binds a draft.
    """

    # The target's decoder layer that each of the draft's layers was made of.
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
        """Binds a draft's parameters to its target, whose embedding the draft shares.

        Args:
          own: the draft's own parameters, as of ``models.shared_params.own_params``.
          layers: the target's decoder layer that each of the draft's layers was made of.
          settings: what the draft samples with; None takes the target's.
          head: tokens of a narrow output layer, whose kernel is in ``own``; None for a whole one.

        Raises:
          InputError: the target lacks a layer, or the draft has another number of layers.
        """
        total = target.config.num_decoder_layers
        if len(layers) != config.num_decoder_layers or not all(0 <= i < total for i in layers):
            raise InputError(
                f"a draft of {config.num_decoder_layers} decoder layers shares layers "
                f"{list(layers)} of a target of {total}: give one target layer for each layer"
            )
        params = {name: each for name, each in own.items() if name != "narrow_head"}
        model = T5Model.create(params, config)
        by_xla = FULL_PRECISION if FULL_PRECISION.usable({}, config.dtype) else XLA
        model = model.replace(
            weights={"token_embedder": target.weights["token_embedder"], **model.weights},
            module=cls.network(config),
            operations=model.operations if model.operations is target.operations else by_xla,
        )
        if head is not None:
            model = NarrowT5.narrowed(model, head, own["narrow_head"]["kernel"])
        return cls(model, settings, layers=tuple(layers))

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the draft was made of a target of another class or size."""
        check_cache(self, target, T5Model, 1 + max(self.layers))

    def prefill(self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int) -> Cache:
        """Returns an empty cache of ``max_length`` positions; sources and prompts are not read."""
        return KVCache.empty(self.model.config, prompts.shape[0], max_length)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        state = self.catch_up(state, context, gamma + 1)
        proposal, cache = super().propose(self._with_source(state, context), context, gamma)
        return proposal, _without_source(cache)

    def propose_tree(
        self, state: Cache, context: Context, tree: Tree
    ) -> tuple[TreeProposal, Cache]:
        state = self.catch_up(state, context, tree.depth + 1)
        proposal, cache = super().propose_tree(self._with_source(state, context), context, tree)
        return proposal, _without_source(cache)

    def catch_up(self, state: Cache, context: Context, width: int) -> Cache:
        return _without_source(super().catch_up(self._with_source(state, context), context, width))

    def _with_source(self, own: KVCache, context: Context) -> KVCache:
        target = context.target_cache
        sources = (target.layers[layer] for layer in self.layers)
        layers = tuple(
            LayerCache(text.keys, text.values, source.cross_keys, source.cross_values)
            for text, source in zip(own.layers, sources, strict=True)
        )
        return KVCache(layers, own.lengths, target.source_mask)


def _without_source(cache: KVCache) -> KVCache:
    layers = tuple(LayerCache(layer.keys, layer.values) for layer in cache.layers)
    return KVCache(layers, cache.lengths)
