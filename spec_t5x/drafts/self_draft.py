"""Early exit: the target's own first layers as its draft, and with its own cache.

A lossless form of CALM (Schuster et al. 2022): what the first layers would have said is
proposed, and the whole target verifies it.
"""

import dataclasses

import flax.struct

from spec_t5x.drafts.sequential import draft_tokens
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, DraftBase, DraftState, Proposal
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import Sampling


@flax.struct.dataclass
class _FirstLayers(T5Model):
    """Writes to the cache of its target, in this one's layout."""

    def score(self, cache, tokens):
        logits, cache = super().score(cache, tokens)
        return logits, cache.laid_out()


@flax.struct.dataclass
class EarlyExitDraft(DraftBase):
    """Decodes with the first decoder layers, the final norm and the output layer.

    Shares the target's parameters. Its keys and values of committed tokens are the
    target's: what the first layers wrote for a token does not depend on those above, so
    the target's cache is read, nothing is kept between iterations, and there is no
    encoder of its own to run.
    """

    # The target without its upper decoder layers; make it with ``create``.
    model: T5Model
    # How this draft samples; None takes the target's settings.
    settings: Sampling | None = None

    @classmethod
    def create(
        cls, target: T5Model, num_layers: int, settings: Sampling | None = None
    ) -> "EarlyExitDraft":
        """The draft that leaves ``target`` after ``num_layers`` decoder layers.

        Raises:
          InputError: ``num_layers`` is not below the target's number of layers.
        """
        total = target.config.num_decoder_layers
        if not 1 <= num_layers < total:
            raise InputError(
                f"early exit after {num_layers} of {total} decoder layers: give 1 to {total - 1}"
            )
        config = dataclasses.replace(target.config, num_decoder_layers=num_layers)
        dropped = {f"layers_{i}" for i in range(num_layers, total)}
        decoder = {k: v for k, v in target.params["decoder"].items() if k not in dropped}
        # Nothing is encoded: the encoder is left out of what is handed to the device.
        params = {
            "token_embedder": target.params["token_embedder"],
            "decoder": decoder,
        }
        return cls(_FirstLayers(params, Transformer(config), target.kernels), settings)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.model.vocab_size

    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """``gamma`` tokens, each sampled given the ones before it."""
        settings = context.settings if self.settings is None else self.settings
        whole, num_layers = context.target_cache, self.model.config.num_decoder_layers
        cache = whole.replace(layers=whole.layers[:num_layers], lengths=context.lengths)
        logits, cache = self.model.score(cache, context.last_tokens[:, None])
        proposal, cache = draft_tokens(self.model, cache, logits[:, 0], context, settings, gamma)
        # What was written the target writes again, the very same.
        written = whole.replace(layers=cache.layers + whole.layers[num_layers:])
        return proposal.replace(target_cache=written), state
