"""Evaluation of a target and its draft on text pairs: quality of the outputs, and acceptance."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from spec_t5x.errors import InputError, check_unused
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.achieved import achieved
from spec_t5x.labs.benchmark.text_source import encoded, fits
from spec_t5x.labs.metrics import TextPairs, metric_intervals, signature


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Quality and acceptance of a target and its draft on a set of text pairs."""

    num_pairs: int
    # Further pairs, which were left out because their source is empty or too long.
    num_skipped: int
    # Scores of the decoded text: {"bleu": 27.3}, or what the task's own metrics return.
    metrics: dict[str, float]
    # sacreBLEU's signature, which makes its score reproducible; None for other metrics.
    bleu_signature: str | None
    # Generated tokens, end of sequence included.
    num_tokens: int
    target_calls: int
    # Generated tokens for each target call, and mean of beta; None in plain decoding.
    block_efficiency: float | None
    alpha: float | None
    # Share of the verified i-th drafts that were accepted, by i; None in plain decoding.
    acceptance_by_position: list[float] | None
    # 95 % intervals, bootstrapped over texts, by the name of the figure, if it has one.
    intervals: dict[str, tuple[float, float]]

    def to_dict(self) -> dict:
        """Returns the fields for JSON, with each metric as a key beside them."""
        fields = dataclasses.asdict(self)
        metrics = fields.pop("metrics")
        fields["intervals"] = {name: list(ends) for name, ends in self.intervals.items()}
        if self.bleu_signature is None:
            del fields["bleu_signature"]
        return metrics | fields


def check_options(options: GenerateOptions) -> None:
    """Raises ``InputError`` for options that ``evaluate`` does not take."""
    check_unused(options, "one text of each source is scored", "num_decodes", "beams")


def check_texts(generator: Generator, texts: TextPairs, options: GenerateOptions) -> None:
    """Raises ``InputError``, the first source's own, if the generator takes none of the sources."""
    if not (sources := _sources(texts)):
        raise InputError("there are no sources: give a file with text")
    if not any(fits(generator, source, options) for source in sources):
        encoded(generator, sources[0], options)


def evaluate(
    generator: Generator,
    texts: TextPairs,
    options: GenerateOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Decodes the sources and scores the outputs against the references ("targets").

    Args:
      generator: decodes speculatively if it has a draft.
      texts: the pairs and their metric; sources that are empty or too long are skipped.
      options: without beams, and ``num_decodes`` 1.
      progress: called with the number of inputs done and their total.

    Raises:
      InputError: no source can be decoded, decoding fails for one, ``num_decodes`` is not 1,
        or beams are given.
    """
    check_options(options)
    decode = generator.generate if texts.ids is None else generator.generate_ids
    sources = _sources(texts)
    usable = [i for i, source in enumerate(sources) if fits(generator, source, options)]
    if not usable:
        # Raises the first source's own error.
        check_texts(generator, texts, options)
    outputs = []
    for (output,) in decode([sources[i] for i in usable], options):
        outputs.append(output)
        progress(len(outputs), len(usable))
    written, targets = [each.output for each in outputs], [texts.pairs[i][1] for i in usable]
    # The outputs begin with the prefix, which is not generated.
    given = len(generator.prefix_ids(options))
    intervals = texts.intervals or functools.partial(metric_intervals, texts.metric)
    ends = intervals(targets, written)
    figures = dict.fromkeys(("block_efficiency", "alpha", "acceptance_by_position"))
    if drafted := [each for each in outputs if each.proposed is not None]:
        found = achieved(drafted)
        figures["acceptance_by_position"] = found.acceptance_by_position
        for name in ("block_efficiency", "alpha"):
            if estimate := getattr(found, name):
                figures[name] = estimate.value
                if estimate.low is not None:
                    ends |= {name: (estimate.low, estimate.high)}
    return Evaluation(
        num_pairs=len(usable),
        num_skipped=len(texts.pairs) - len(usable),
        metrics=texts.metric(targets, written),
        bleu_signature=signature(texts.metric),
        num_tokens=sum(len(each.output_ids) - given for each in outputs),
        target_calls=sum(each.target_calls for each in outputs),
        intervals=ends,
        **figures,
    )


def _sources(texts: TextPairs) -> Sequence[str | list[int]]:
    return [source for source, _ in texts.pairs] if texts.ids is None else texts.ids
