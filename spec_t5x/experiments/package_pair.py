"""Turns a trained target, its draft and its n-gram tables into packaged models with cards.

    python -m spec_t5x.experiments.package_pair ende --target runs/target/model \
      --draft runs/draft/model --data data/ende --output spec_t5x/pretrained

Evaluates the pair on the held-out files, and writes ``ende-target`` and ``ende-draft`` (with
``--ngram DIR`` also ``ende-ngram``): parameters in bfloat16, the figures in ``config.json``
and a ``README.md`` that says them to a reader.
"""

import argparse
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native import save_model
from spec_t5x.data.metrics import bleu_metric, rouge_metric
from spec_t5x.data.tsv import read_pairs
from spec_t5x.experiments.evaluation import EvaluationMetric, evaluate
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.models.t5 import T5Config

# The longest sources in training: longer ones are refused unless truncated.
MAX_SOURCE_LENGTH = 96
GAMMA = 4
# Words of a line that a language model is to go on from.
PROMPT_WORDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A held-out file."""

    # Of the figures in config.json, and of the row in the card.
    name: str
    label: str
    file: str
    # Source, target and number of columns, for ``read_pairs``.
    columns: tuple[int, int, int]
    temperature: float = 0.0
    # The first so many pairs; None takes all.
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A packaged target and its draft: what they are and how they are measured."""

    # Of the models: ``NAME-target``, ``NAME-draft`` and ``NAME-ngram``.
    name: str
    title: str
    # What a user may expect, and the texts it was trained on: ends of the cards.
    limits: str
    data: str
    held_out: Sequence[HeldOut]
    metric: EvaluationMetric
    # Longer sources are cut instead of left out.
    truncate: bool = False
    max_decode_len: int = 128
    # From a pair of texts to what the model is given.
    source: Callable[[tuple[str, str]], str] = lambda pair: pair[0]
    # Rows of the target's card: (name, text).
    quality: Callable[[LoadedModel, dict], list[tuple[str, str]]]

    @property
    def options(self) -> GenerateOptions:
        """How it is decoded."""
        return GenerateOptions(
            gamma=GAMMA, batch_size=32, max_decode_len=self.max_decode_len, truncate=self.truncate
        )


def _counted(figures: dict) -> str:
    skipped = figures["num_skipped"]
    return f"{figures['num_pairs']} pairs" + (f", {skipped} left out as too long" * bool(skipped))


def _bleu_rows(model: LoadedModel, figures: dict) -> list[tuple[str, str]]:
    del model
    rows = [
        (f"{label} BLEU", f"{figures[name]['bleu']:.1f} ({_counted(figures[name])})")
        for name, label in (("dev", "dev"), ("newstest2013", "newstest2013"))
    ]
    return [*rows, ("signature", f"`{figures['dev']['bleu_signature']}`")]


def _rouge_rows(model: LoadedModel, figures: dict) -> list[tuple[str, str]]:
    del model
    dev = figures["dev"]
    scores = ", ".join(f"{dev[key]:.1f}" for key in ("rouge1", "rouge2", "rougeLsum"))
    return [("dev ROUGE-1, -2, -Lsum", f"{scores} ({_counted(dev)})")]


def _perplexity_rows(model: LoadedModel, figures: dict) -> list[tuple[str, str]]:
    del figures
    loss = model.metadata["cross_entropy"]
    return [("dev perplexity of a token", f"{math.exp(loss):.1f} ({loss:.3f} nats)")]


_ENDE_DATA = """\
English-German pairs: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of
programs in Debian and Debian package descriptions (free-software licences of each
program), LibreOffice help (MPL 2.0). newstest2013 was never trained on."""

_ENDE_COLUMNS = (1, 2, 3)

PAIRS = {
    "ende": Pair(
        name="ende",
        title="English to German",
        limits="""\
A demonstration, small and briefly trained on a CPU: short everyday sentences and
software messages come out readable, news does not. It is here so that every claim
about speed and exactness can be checked without a download.""",
        data=_ENDE_DATA,
        held_out=(
            HeldOut(
                name="dev",
                label="dev, temperature 0",
                file="dev.tsv.gz",
                columns=_ENDE_COLUMNS,
            ),
            HeldOut(
                name="dev_sampled",
                label="dev, temperature 1",
                file="dev.tsv.gz",
                columns=_ENDE_COLUMNS,
                temperature=1.0,
            ),
            # What the test suite has the time for.
            HeldOut(
                name="dev_first",
                label="first 400 of dev, temperature 0",
                file="dev.tsv.gz",
                columns=_ENDE_COLUMNS,
                limit=400,
            ),
            HeldOut(
                name="newstest2013",
                label="newstest2013, temperature 0",
                file="newstest2013.tsv.gz",
                columns=_ENDE_COLUMNS,
            ),
        ),
        metric=bleu_metric,
        quality=_bleu_rows,
    ),
    "summaries": Pair(
        name="summaries",
        title="one line for a software package",
        limits="""\
A demonstration, small and briefly trained on a CPU: from a package's description (its
first 96 tokens) it writes a synopsis, which is often sensible and sometimes of another
package. It stands where the paper has CNN/DailyMail.""",
        data="""\
Descriptions and synopses of Debian packages (free-software licences of each package).""",
        held_out=(
            HeldOut(
                name="dev",
                label="dev, temperature 0",
                file="debian_dev.tsv.gz",
                columns=(0, 1, 2),
            ),
            HeldOut(
                name="dev_sampled",
                label="dev, temperature 1",
                file="debian_dev.tsv.gz",
                columns=(0, 1, 2),
                temperature=1.0,
            ),
        ),
        metric=rouge_metric,
        truncate=True,
        max_decode_len=48,
        quality=_rouge_rows,
    ),
    "lm": Pair(
        name="lm",
        title="a language model of short English lines",
        limits="""\
A demonstration, small and briefly trained on a CPU: lower-case lines of everyday and
software English, grammatical for a few words. It stands where the paper has a GPT-like
model of lm1b.""",
        data="""\
The English sides of: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of programs in
Debian and Debian package descriptions (free-software licences of each program), LibreOffice
help (MPL 2.0).""",
        held_out=(
            HeldOut(
                name="dev",
                label=f"dev, from {PROMPT_WORDS} words on, temperature 0",
                file="dev.tsv.gz",
                columns=_ENDE_COLUMNS,
                limit=500,
            ),
            HeldOut(
                name="dev_sampled",
                label=f"dev, from {PROMPT_WORDS} words on, temperature 1",
                file="dev.tsv.gz",
                columns=_ENDE_COLUMNS,
                temperature=1.0,
                limit=500,
            ),
        ),
        metric=lambda targets, predictions: {},
        max_decode_len=64,
        source=lambda pair: " ".join(pair[0].split()[:PROMPT_WORDS]),
        quality=_perplexity_rows,
    ),
}


def main(arguments=None) -> int:
    """Evaluates and writes the models."""
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.package_pair")
    parser.add_argument("pair", choices=PAIRS)
    for name in ("target", "draft", "data", "output"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--ngram", type=Path, metavar="DIR", help="of spec-t5x train-ngram")
    args = parser.parse_args(arguments)
    pair, target, draft = PAIRS[args.pair], load(args.target), load(args.draft)
    figures = measure(pair, Generator.load(args.target, args.draft), args.data)
    names = {kind: f"{pair.name}-{kind}" for kind in ("target", "draft", "ngram")}
    write(args.output / names["target"], target, figures, target_card(pair, target, figures))
    write(args.output / names["draft"], draft, figures, draft_card(pair, draft, figures))
    if args.ngram:
        directory = args.output / names["ngram"]
        drafts = {
            kind: measure(pair, Generator.load(args.target, f"{kind}:{args.ngram}"), args.data)
            for kind in ("unigram", "bigram", "ngram")
        }
        shutil.copytree(args.ngram, directory, dirs_exist_ok=True)
        (directory / "README.md").write_text(ngram_card(pair, drafts), encoding="utf-8")
    return 0


def measure(pair: Pair, generator: Generator, data: Path) -> dict[str, dict]:
    """Figures of the pair on each held-out file, by name."""
    generator = dataclasses.replace(generator, max_source_len=MAX_SOURCE_LENGTH)
    figures = {}
    for held_out in pair.held_out:
        print(f"evaluating {held_out.label}", file=sys.stderr)
        options = dataclasses.replace(pair.options, temperature=held_out.temperature)
        texts = list(read_pairs(data / held_out.file, *held_out.columns))[: held_out.limit]
        texts = [(pair.source(text), text[1]) for text in texts]
        figures[held_out.name] = evaluate(generator, texts, options, metric=pair.metric).to_dict()
    return figures


def write(directory: Path, model: LoadedModel, figures: dict, card: str) -> None:
    """Saves a model under a packaged name, with its figures and card."""
    save_model(
        directory,
        model.params,
        model.config,
        model.vocabulary,
        extra={
            "max_source_length": MAX_SOURCE_LENGTH,
            "training_steps": model.metadata.get("step"),
            "gamma": GAMMA,
            "evaluation": figures,
        },
        overwrite=True,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def target_card(pair: Pair, model: LoadedModel, figures: dict) -> str:
    """README.md of the target."""
    rows = [
        ("network", _network(model)),
        ("training", f"{model.metadata.get('step')} steps, {_gin_file(pair, 'target')}"),
        *pair.quality(model, figures),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return f"""\
# {pair.name}-target: {pair.title}

{pair.limits}

| | |
|---|---|
{table}

{pair.data}

Figures: `python -m spec_t5x.experiments.package_pair {pair.name}`.
"""


def draft_card(pair: Pair, model: LoadedModel, figures: dict) -> str:
    """README.md of the draft."""
    return f"""\
# {pair.name}-draft: the draft of {pair.name}-target

Network: {_network(model)}.
Training: {model.metadata.get("step")} steps of {_gin_file(pair, "draft")} towards the
target's own distributions over the training text (word-level distillation).

{_acceptance_table(pair, {"": figures})}

{pair.data}
"""


def ngram_card(pair: Pair, figures: dict[str, dict]) -> str:
    """README.md of the n-gram tables; ``figures`` are those of each draft made of them."""
    return f"""\
# {pair.name}-ngram: n-gram drafts for {pair.name}-target

Trigrams, bigrams and unigrams of the training text's targets, counted over the target's
vocabulary by `spec-t5x train-ngram`; no network is run to propose from them. The drafts
`unigram`, `bigram` and `ngram` all read this one file.

{_acceptance_table(pair, figures)}

{pair.data}
"""


def _acceptance_table(pair: Pair, drafts: dict[str, dict]) -> str:
    rows = "\n".join(
        f"| {', '.join(filter(None, (draft, held_out.label)))} | {e['alpha']:.3f} | "
        f"{e['mean_acceptance_length']:.2f} | "
        f"{', '.join(f'{rate:.2f}' for rate in e['acceptance_by_position'])} |"
        for draft, figures in drafts.items()
        for held_out in pair.held_out
        for e in (figures[held_out.name],)
    )
    return f"""\
Measured at gamma {GAMMA}; alpha is the mean of sum min(p, q) over verified positions, the last
column the share of iterations whose i-th draft was accepted:

| text | alpha | mean acceptance length | by position |
|---|---|---|---|
{rows}"""


def _gin_file(pair: Pair, model: str) -> str:
    return f"`gin_configs/runs/train_{pair.name}_{model}.gin`"


def _network(model: LoadedModel) -> str:
    c = model.config
    if isinstance(c, T5Config):
        layers = f"{c.num_encoder_layers} encoder and {c.num_decoder_layers} decoder layers"
    else:
        layers = f"{c.num_layers} decoder layers"
    return (
        f"{layers} of {c.emb_dim}, {c.num_heads} heads, feed-forward {c.mlp_dim}, "
        f"{c.vocab_size} pieces, {model.num_params / 1e6:.1f}M parameters in bfloat16"
    )


if __name__ == "__main__":
    sys.exit(main())
