"""Function ``speculate`` for T5X models; a gin include binds ``MODEL`` to it."""

from collections.abc import Callable, Mapping
from typing import Any

import gin
from t5x import models, partitioning

from spec_t5x.errors import InputError, check_choice
from spec_t5x.names import AUTO
from spec_t5x.t5x_plugin.drafts import DraftSource
from spec_t5x.t5x_plugin.remaking import bindings_of, remade
from spec_t5x.t5x_plugin.speculative_model import (
    SpeculativeDecoderOnlyModel,
    SpeculativeEncoderDecoderModel,
    no_draft,
)
from spec_t5x.verifiers import verifier as make_verifier

# Methods of T5X's models that decoding no longer calls.
_UNUSED = (
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
    partitioner: Callable[[], partitioning.PjitPartitioner] | None = None,
    kv: str = AUTO,
    statistics: bool = True,
) -> SpeculativeEncoderDecoderModel | SpeculativeDecoderOnlyModel:
    """Returns a copy of a T5X model that decodes with a draft.

    Network, vocabularies, ``decode_fn``, losses, features, and methods with gin's bindings of them
    are the given model's.

    Args:
      model: a ``t5x.models.EncoderDecoderModel`` or ``DecoderOnlyModel``, or an instance of a
        subclass that does not override decoding.
      draft: proposes the tokens (``t5x_plugin.drafts``).
      gamma: tokens proposed in each iteration; 0 is plain decoding.
      verifier, lenience, widths: arguments of ``verifiers.verifier``.
      c: time of a draft step in target steps. If ``c`` is given, an iteration proposes as many
        tokens as pay, from 0 to ``gamma`` (``loops/pace.py``).
      position: time that one more position adds to a target call, in target steps.
      partitioner: makes the launch's partitioner, as ``@partitioning.PjitPartitioner`` does in
        gin. Without it, the mesh must divide the draft's heads (``placing``).
      kv: "int8" rounds the source's keys and values in the target's cache
        (``CachedModel.with_kv``): texts are those of that model. Losses stay the given model's.
      statistics: returns ``acceptance_aux`` beside the scores; give False to ``t5x.export``.

    Raises:
      InputError: a model that overrides decoding, or settings that do not fit.
    """
    stock = next((stock for stock in _SPECULATIVE if isinstance(model, stock)), None)
    if stock is None:
        raise InputError(
            f"model is a {type(model).__name__}: give a t5x.models.EncoderDecoderModel or "
            "DecoderOnlyModel"
        )
    if exported := bindings_of("export_lib.save", resolve_references=False):
        _check_export(exported, model, stock, statistics)
    evaluation = bindings_of("__main__.evaluate", resolve_references=False)
    by_aux = "AcceptanceEvaluator" in str(evaluation.get("inference_evaluator_cls"))
    if by_aux and type(model).predict_batch is not stock.predict_batch:
        raise InputError(
            f"{type(model).__name__} overrides predict_batch, which AcceptanceEvaluator does not "
            "call: bind evaluate.inference_evaluator_cls = @seqio.Evaluator"
        )
    made = remade(model, stock, _SPECULATIVE[stock], _UNUSED)
    check_choice("statistics", statistics, (True, False))
    chosen = make_verifier(verifier, lenience=lenience, widths=widths)
    made.set_up(draft, gamma, chosen, c, position, partitioner, kv, statistics)
    return made


@gin.config.register_finalize_hook
def _check_programs(_: Any) -> None:
    """Raises ``InputError`` for a training, or a program whose model is not ``speculate``'s."""
    if not bindings_of(speculate, resolve_references=False):
        return
    # Training would save the draft with the target, and start it from random parameters.
    for program in ("train", "precompile"):
        if bindings_of(f"__main__.{program}", resolve_references=False):
            raise InputError(f"speculate.gin does not train: leave it out of t5x.{program}")
    for program in ("__main__.infer", "__main__.evaluate", "export_lib.save"):
        model = bindings_of(program, resolve_references=False).get("model")
        while (name := repr(model)).startswith("%"):
            model = gin.query_parameter(name)
        made = getattr(getattr(model, "configurable", None), "wrapped", None)
        if isinstance(made, type) and issubclass(made, models.BaseTransformerModel):
            # To make a model would start JAX before a launcher connects its processes.
            raise no_draft(made)


def _check_export(bound: Mapping[str, Any], model: Any, stock: type, statistics: bool) -> None:
    """Raises ``InputError`` for bindings with which ``t5x.export`` would fail later."""
    if stock is models.DecoderOnlyModel:
        raise InputError("the model to export is decoder-only: leave speculate.gin out")
    if "partitioner" in bound and bound["partitioner"] is None:
        raise InputError(
            "export_lib.save.partitioner is None, with which T5X restores no draft: leave it out"
        )
    if bound.get("create_decoding_state_callback_fn") is not None:
        raise InputError(
            "export_lib.save.create_decoding_state_callback_fn is set, but speculation would skip "
            "its calls: leave it out"
        )
    given = [bindings_of(of.predict_batch_with_aux) for of in (type(model), _SPECULATIVE[stock])]
    given.append(bindings_of("export_lib.create_inference_function").get("model_fn_extra_kwargs"))
    if any((arguments or {}).get("prompt_with_targets") for arguments in given):
        raise InputError(
            "prompt_with_targets is True, and an exported program cannot refuse prompts with "
            "holes: leave it out, or speculate.gin"
        )
    if statistics and bound.get("inference_mode") == "predict":
        raise InputError(
            "STATISTICS is True and t5x.export takes only tokens and scores: give "
            "--gin_file=gin_configs/t5x/export.gin after speculate.gin"
        )
