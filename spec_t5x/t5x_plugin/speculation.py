"""A T5X model made to decode speculatively: what a gin include binds ``MODEL`` to."""

from t5x import models

from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.decoder_only import SpeculativeDecoderOnlyModel
from spec_t5x.t5x_plugin.drafts import DraftSource
from spec_t5x.t5x_plugin.encoder_decoder import SpeculativeEncoderDecoderModel
from spec_t5x.verifiers import verifier as make_verifier

# What a subclass of a stock model may not have changed, since decoding no longer asks it.
_DECODING = (
    "predict_batch_with_aux",
    "_compute_logits_from_slice",
    "_compute_kv_cache",
    "_get_decoder_causal_attention",
)
_SPECULATIVE = {
    models.EncoderDecoderModel: SpeculativeEncoderDecoderModel,
    models.DecoderOnlyModel: SpeculativeDecoderOnlyModel,
}


def speculate(
    model: models.BaseTransformerModel,
    draft: DraftSource,
    gamma: int = 7,
    verifier: str = "block",
    lenience: float = 1.0,
    widths: tuple = (),
    c: float | None = None,
    position: float = 0.0,
) -> SpeculativeEncoderDecoderModel | SpeculativeDecoderOnlyModel:
    """The same model, decoding with a draft.

    Network, vocabularies, ``decode_fn`` with what is bound to it, losses and features
    are the given model's.

    Args:
      model: a ``t5x.models.EncoderDecoderModel`` or ``DecoderOnlyModel``, or of a subclass
        that decodes as they do.
      draft: what proposes (``t5x_plugin.drafts``).
      gamma: tokens proposed in each iteration; 0 is plain decoding.
      verifier, lenience, widths: which proposals to keep (``verifiers.verifier``).
      c: time of a draft step in target steps. With it an iteration proposes as many tokens
        as pay, ``gamma`` at most, and none where none pay (``loops/pace.py``).
      position: of one more position in the target's call, in the same unit.

    Raises:
      InputError: a model that decodes in a way of its own, or settings that do not fit.
    """
    for stock, speculative in _SPECULATIVE.items():
        if isinstance(model, stock):
            _check_decodes_as(model, stock)
            # What a subclass has of its own (losses, features, …) stays: it is a base, too.
            bases = (speculative, type(model))
            made_of = speculative if type(model) is stock else type(speculative.__name__, bases, {})
            made = made_of.__new__(made_of)
            # Every attribute of the stock model, whatever built it.
            vars(made).update(vars(model))
            chosen = make_verifier(verifier, lenience=lenience, widths=widths)
            made.set_up(draft, gamma, chosen, c, position)
            return made
    raise InputError(
        f"model is a {type(model).__name__}: give a t5x.models.EncoderDecoderModel or "
        "DecoderOnlyModel"
    )


def _check_decodes_as(model: models.BaseTransformerModel, stock: type) -> None:
    for name in _DECODING:
        if getattr(type(model), name, None) is not getattr(stock, name, None):
            raise InputError(
                f"{type(model).__name__} overrides {stock.__name__}.{name}, which speculation "
                "would not call: give a model that decodes as the stock one"
            )
