"""Quality and acceptance of a pair over a file of sentence pairs."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from spec_t5x.data.metrics import bleu
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a file of sentence pairs says about a target and its draft."""

    num_pairs: int
    # Pairs left out because their source is empty or longer than the encoder.
    num_skipped: int
    # Of the decoded text, with sacrebleu's signature.
    bleu: float
    bleu_signature: str
    # Generated tokens, end of sequence included.
    num_tokens: int
    target_calls: int
    # Over all sequences; None in plain decoding.
    mean_acceptance_length: float | None
    alpha: float | None
    # Share of iterations whose i-th draft was accepted.
    acceptance_by_position: list[float] | None


def evaluate(
    generator: Generator,
    pairs: Sequence[tuple[str, str]],
    options: GenerateOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Decodes the sources and scores the outputs against the references.

    Args:
      generator: decodes speculatively if it has a draft.
      pairs: ``(source, reference)``.
      options: ``num_decodes`` must be 1. Batches are filled with sources of about
        one length, which changes no output.
      progress: called with the number of inputs done and their total.

    Raises:
      InputError: no pair can be decoded, or ``num_decodes`` is not 1.
    """
    if options.num_decodes != 1:
        raise InputError(f"num_decodes is {options.num_decodes}: BLEU is of 1 output")
    usable = [pair for pair in pairs if _fits(generator, pair[0], options)]
    if not usable:
        raise InputError(f"none of {len(pairs)} sources can be decoded: give a file with text")
    usable.sort(key=lambda pair: len(pair[0]))
    outputs, stats = [], []
    for batch in generator.batches([source for source, _ in usable], options):
        decoded = jax.device_get(generator.decode(batch, options))
        outputs += [group[0] for group in generator.collect(batch, decoded)]
        stats.append(decoded.stats)
        progress(len(outputs), len(usable))
    score = bleu([g.output for g in outputs], [reference for _, reference in usable])
    return Evaluation(
        num_pairs=len(usable),
        num_skipped=len(pairs) - len(usable),
        bleu=score.score,
        bleu_signature=score.signature,
        num_tokens=sum(len(g.output_ids) for g in outputs),
        target_calls=sum(g.target_calls for g in outputs),
        **_acceptance(stats),
    )


def _fits(generator: Generator, source: str, options: GenerateOptions) -> bool:
    try:
        generator.tokenize(source, options)
    except InputError:
        return False
    return True


def _acceptance(stats: list) -> dict:
    if stats[0] is None:
        return {"mean_acceptance_length": None, "alpha": None, "acceptance_by_position": None}
    calls = sum(s.target_calls.sum() for s in stats)
    verified = sum(s.verified.sum() for s in stats)
    by_position = sum(s.accepted_by_position.sum(axis=(0, 1)) for s in stats) / calls
    return {
        "mean_acceptance_length": float(1 + sum(s.accepted.sum() for s in stats) / calls),
        "alpha": float(sum(s.beta_sum.sum() for s in stats) / verified) if verified else None,
        "acceptance_by_position": by_position.tolist(),
    }
