"""Acceptance statistics in T5X's log and output files.

``t5x.infer`` writes the outputs of ``predict_with_aux`` for each example and ``t5x.eval`` writes
metrics; the functions here add the totals of a run.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import seqio
from absl import logging
from t5x import infer as t5x_infer

from spec_t5x.t5x_plugin.remaking import bindings_of, configurable

# Statistics that are summed over the sequences of a run.
_COUNTS = ("target_calls", "appended", "proposed", "accepted", "verified", "beta_sum", "steps")


def totals(aux: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Returns the statistics of all examples together; empty without target calls.

    ``aux`` has for each name a value of each example, as ``predict_batch_with_aux`` returns them.

    The statistics are ``target_calls`` and ``block_efficiency`` (generated tokens for each target
    call; in a beam search, tokens that the hypotheses grow by); for sampling also
    ``acceptance_rate`` (accepted for each verified, up to the first rejection) and ``alpha``
    (Corollary 3.6). A rate over 0 counts is left out.
    """
    sums = {name: float(np.sum(aux[name])) for name in _COUNTS if name in aux}
    if not (calls := sums.get("target_calls")):
        return {}
    generated = sums["steps"] if "steps" in sums else sums["appended"]
    found = {"target_calls": calls, "block_efficiency": generated / calls}
    if sums.get("verified"):
        found["acceptance_rate"] = sums["accepted"] / sums["verified"]
        found["alpha"] = sums["beta_sum"] / sums["verified"]
    return found


def write_inferences(path: str, inferences: Any, *args: Any, **kwargs: Any) -> None:
    """Logs acceptance, then calls T5X's ``write_inferences_to_file`` with gin's bindings of it.

    gin binds ``infer.write_fn`` to this function. In mode ``predict_with_aux`` the file has each
    example's statistics under ``aux``.
    """
    _, aux = inferences
    _log(path, totals(aux))
    write = t5x_infer.write_inferences_to_file
    # Gin files bind the function of the running program, ``__main__``, not the imported one.
    write = configurable(getattr(sys.modules["__main__"], write.__name__, write))
    write(path, inferences, *args, **kwargs)


class AcceptanceEvaluator(seqio.Evaluator):
    """``seqio.Evaluator`` that writes acceptance beside the metrics of each task.

    gin binds ``evaluate.inference_evaluator_cls`` to this class. Arguments that are not given are
    those that gin binds to ``seqio.Evaluator``.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**{**bindings_of(seqio.Evaluator), **kwargs})

    def evaluate(
        self,
        *,
        predict_fn: Callable | None = None,
        predict_with_aux_fn: Callable | None = None,
        step: int | None = None,
        **kwargs: Any,
    ):
        """Evaluates as ``seqio.Evaluator``; plain predictions come from ``predict_with_aux_fn``."""
        if predict_with_aux_fn is not None:
            predict_with_aux_fn = functools.partial(self._predict, predict_with_aux_fn, step)
            if predict_fn is not None:

                def predict_fn(dataset):
                    return predict_with_aux_fn(dataset)[0]

        return super().evaluate(
            predict_fn=predict_fn, predict_with_aux_fn=predict_with_aux_fn, step=step, **kwargs
        )

    def _predict(self, predict_with_aux_fn: Callable, step: int | None, dataset: Any):
        outputs, aux = predict_with_aux_fn(dataset)
        (name,) = [task for task, held in self.cached_model_datasets.items() if held is dataset]
        found = totals(aux)
        _log(name, found)
        metrics = {f"speculation/{key}": seqio.metrics.Scalar(v) for key, v in found.items()}
        unused = dict.fromkeys(("dataset", "inferences", "targets"))
        # The processes share the loggers' files, so that one process logs, as in seqio.
        for logger in self.loggers if jax.process_index() == 0 else ():
            logger(task_name=name, step=step, metrics=metrics, **unused)
        return outputs, aux


def _log(what: str, found: dict[str, float]) -> None:
    values = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    logging.info("Speculative decoding of %s: %s", what, values or "no statistics")
