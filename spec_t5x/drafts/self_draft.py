"""Self-drafts: the target with fewer layers or coarser weights drafts for the target itself.

A self-draft uses the keys and values in the target's cache, so it has no encoder and no state.
Nothing has to be trained or loaded.
"""

import dataclasses
from typing import Any

import flax.struct

from spec_t5x.drafts.kinds import DraftKind, Request, no_argument, whole_number
from spec_t5x.drafts.sequential import check_cache, draft_tokens
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftState, Proposal, Target
from spec_t5x.machine.operations import KERNELS
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.models.weights import BITS
from spec_t5x.names import INT4, INT8
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array


@flax.struct.dataclass
class SelfDraft(Draft):
    """Draft that decodes with a cheaper form of the target: ``early_exit`` or ``rounded``."""

    # The target with fewer decoder layers or coarser weights, without its encoder.
    model: CachedModel
    # Settings that this draft samples with; None takes the target's.
    settings: Sampling | None = None

    @classmethod
    def early_exit(
        cls, target: T5Model, num_layers: int, settings: Sampling | None = None
    ) -> "SelfDraft":
        """Makes the draft that leaves ``target`` after ``num_layers`` decoder layers.

        The draft is a lossless form of CALM (Schuster et al. 2022). It shares the target's weights
        and cache, since keys and values of a layer do not depend on the layers above. Raises
        ``InputError`` if ``num_layers`` is not from 1 to below the target's number of layers.
        """
        if not isinstance(target, T5Model):
            raise InputError(f"the target is a {type(target).__name__}: give a T5Model")
        num_layers, tree = _layers(num_layers, target), _without_encoder(target.weights)
        config = dataclasses.replace(target.config, num_decoder_layers=num_layers)
        dropped = {f"layers_{i}" for i in range(num_layers, target.num_layers)}
        tree["decoder"] = {k: v for k, v in tree["decoder"].items() if k not in dropped}
        given = tree, Transformer(config), target.operations
        return cls(T5Model(*given, in_targets_cache=KERNELS.get()), settings)

    @classmethod
    def rounded(
        cls, target: CachedModel, bits: int = 8, settings: Sampling | None = None
    ) -> "SelfDraft":
        """Makes the draft with the target's matrices in 8 or 4 bits (``models.weights.Rounded``).

        In 8 bits alpha is above 0.98, where trained drafts have 0.6 to 0.8. A draft step saves
        time only in that it reads fewer bytes than a target step.
        """
        weights = _without_encoder(target.weights)
        model = target.replace(weights=weights, in_targets_cache=KERNELS.get())
        return cls(model.rounded(bits), settings)

    @property
    def vocab_size(self) -> int:
        """Number of logits of the model, which is the target's."""
        return self.model.vocab_size

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the draft was made of a target of another class or size."""
        check_cache(self, target, type(self.model), self.model.num_layers)

    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes ``gamma`` tokens, each sampled given those before it."""
        whole, model = context.target_cache, self.model
        layers, rest = whole.layers[: model.num_layers], whole.layers[model.num_layers :]
        cache = whole.replace(layers=layers, lengths=context.lengths)
        logits, _, cache = model.score(cache, context.last_tokens[:, None])
        given = logits[:, 0], context, self.settings, gamma
        proposal, cache = draft_tokens(model.score, cache, *given)
        # The target overwrites all of these positions before it reads them.
        written = whole.replace(layers=cache.layers + rest)
        return proposal.replace(target_cache=written), state


def _without_encoder(params: dict) -> dict[str, Array | dict]:
    return {n: tree for n, tree in params.items() if n not in ("encoder", "source_embedder")}


def _layers(argument: str | int, target: Any) -> int:
    """Returns a number of layers, "" being half; raises ``InputError`` if ``target`` lacks them."""
    total = target.config.num_decoder_layers
    layers = argument if str(argument) else (total + 1) // 2
    if not (str(layers).isdecimal() and 1 <= int(layers) < total):
        remedy = f"1 to {total - 1}" if total > 1 else "another draft"
        raise InputError(f"early exit after {layers} of {total} decoder layers: give {remedy}")
    return int(layers)


def _rounded(weights: str) -> DraftKind:
    def make(request: Request, argument: str) -> SelfDraft:
        return SelfDraft.rounded(request.model, BITS[weights], request.options.settings)

    return DraftKind(make=make, draft=SelfDraft, check=no_argument, has_temperature=True)


def _early_exit(request: Request, argument: str) -> SelfDraft:
    layers = _layers(argument, request.model)
    return SelfDraft.early_exit(request.model, layers, request.options.settings)


EARLY_EXIT = DraftKind(
    make=_early_exit,
    draft=SelfDraft,
    check=whole_number,
    open=_layers,
    needs_encoder=True,
    has_temperature=True,
)
IN_INT8, IN_INT4 = _rounded(INT8), _rounded(INT4)
