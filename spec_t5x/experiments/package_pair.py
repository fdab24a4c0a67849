"""Turns a trained target and draft into packaged models with measured cards.

    python -m spec_t5x.experiments.package_pair --target runs/target/model \
      --draft runs/draft/model --data data/ende --output spec_t5x/pretrained

Evaluates the pair on the held-out files, and writes ``ende-target`` and
``ende-draft``: parameters in bfloat16, the figures in ``config.json`` (the test
suite checks them) and a ``README.md`` that says them to a reader.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native import save_model
from spec_t5x.data.tsv import read_pairs
from spec_t5x.experiments.evaluation import evaluate
from spec_t5x.generation import GenerateOptions, Generator

# The longest sources in training: longer ones are refused unless truncated.
MAX_SOURCE_LENGTH = 96
OPTIONS = GenerateOptions(gamma=4, batch_size=32, max_decode_len=128)

_DATA = """\
English-German pairs: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of
programs in Debian and Debian package descriptions (free-software licences of each
program), LibreOffice help (MPL 2.0). newstest2013 was never trained on."""

_LIMITS = """\
A demonstration, small and briefly trained on a CPU: short everyday sentences and
software messages come out readable, news does not. It is here so that every claim
about speed and exactness can be checked without a download."""


def main(arguments=None) -> int:
    """Evaluates and writes both models."""
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.package_pair")
    for name in ("target", "draft", "data", "output"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    args = parser.parse_args(arguments)
    target, draft = load(args.target), load(args.draft)
    figures = measure(Generator.load(args.target, args.draft), args.data)
    write(args.output / "ende-target", target, figures, _target_card(target, figures))
    write(args.output / "ende-draft", draft, figures, _draft_card(draft, figures))
    return 0


def measure(generator: Generator, data: Path) -> dict:
    """Figures of the pair: dev at temperatures 0 and 1, newstest2013 at 0."""
    generator = dataclasses.replace(generator, max_source_len=MAX_SOURCE_LENGTH)
    figures = {}
    for name, file, temperature in (
        ("dev", "dev.tsv.gz", 0.0),
        ("dev_sampled", "dev.tsv.gz", 1.0),
        ("newstest2013", "newstest2013.tsv.gz", 0.0),
    ):
        print(f"evaluating {file} at temperature {temperature:g}", file=sys.stderr)
        options = dataclasses.replace(OPTIONS, temperature=temperature)
        pairs = list(read_pairs(data / file, 1, 2, 3))
        figures[name] = evaluate(generator, pairs, options).to_dict()
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
            "gamma": OPTIONS.gamma,
            "evaluation": figures,
        },
        overwrite=True,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def _target_card(model: LoadedModel, figures: dict) -> str:
    dev, news = figures["dev"], figures["newstest2013"]
    return f"""\
# ende-target: English to German

{_LIMITS}

| | |
|---|---|
| network | {_network(model)} |
| training | {model.metadata.get("step")} steps, `gin_configs/runs/train_ende_target.gin` |
| dev BLEU | {_bleu(dev, "left out as too long")} |
| newstest2013 BLEU | {_bleu(news, "left out")} |
| signature | `{dev["bleu_signature"]}` |

{_DATA}

Figures: `python -m spec_t5x.experiments.package_pair`; again by
`spec-t5x evaluate --data dev.tsv.gz --source_column 1 --target_column 2
--num_columns 3 --batch_size 32`.
"""


def _bleu(figures: dict, skipped: str) -> str:
    return (
        f"{figures['bleu']:.1f} ({figures['num_pairs']} pairs, {figures['num_skipped']} {skipped})"
    )


def _draft_card(model: LoadedModel, figures: dict) -> str:
    rows = "\n".join(
        f"| {label} | {e['alpha']:.3f} | {e['mean_acceptance_length']:.2f} | "
        f"{', '.join(f'{rate:.2f}' for rate in e['acceptance_by_position'])} |"
        for label, e in (
            ("dev, temperature 0", figures["dev"]),
            ("dev, temperature 1", figures["dev_sampled"]),
            ("newstest2013, temperature 0", figures["newstest2013"]),
        )
    )
    return f"""\
# ende-draft: the draft of ende-target

Network: {_network(model)}. Training: {model.metadata.get("step")} steps of
`gin_configs/runs/train_ende_draft.gin` towards the target's own distributions over
the training text (word-level distillation).

Measured at gamma {OPTIONS.gamma}; alpha is the mean of sum min(p, q) over verified
positions, the last column the share of iterations whose i-th draft was accepted:

| text | alpha | mean acceptance length | by position |
|---|---|---|---|
{rows}

{_DATA}
"""


def _network(model: LoadedModel) -> str:
    c = model.config
    return (
        f"{c.num_encoder_layers} encoder and {c.num_decoder_layers} decoder layers of "
        f"{c.emb_dim}, {c.num_heads} heads of {c.head_dim}, feed-forward {c.mlp_dim}, "
        f"{c.vocab_size} pieces, {model.num_params / 1e6:.1f}M parameters in bfloat16"
    )


if __name__ == "__main__":
    sys.exit(main())
