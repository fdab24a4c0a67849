"""Turns trained draft heads into packaged ones with a measured card.

    python -m spec_t5x.experiments.package_heads --heads runs/heads/heads \
      --data data/ende --output spec_t5x/pretrained

Decodes the first held-out sentences with the packaged target, and writes ``ende-heads``:
parameters in bfloat16, the figures in ``config.json`` and a ``README.md`` that says them
to a reader.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from spec_t5x.checkpoints.heads import LoadedHeads, load_heads, save_heads
from spec_t5x.checkpoints.loading import load
from spec_t5x.data.tsv import read_pairs
from spec_t5x.drafts.heads import MedusaDraft
from spec_t5x.experiments.evaluation import evaluate
from spec_t5x.generation import GenerateOptions, Generator

TARGET = "ende-target"
NUM_PAIRS = 150
OPTIONS = GenerateOptions(gamma=4, batch_size=32, max_decode_len=128)
# Names in config.json, rows of the card.
TEMPERATURES = {"dev": 0.0, "dev_sampled": 1.0}


def main(arguments=None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.package_heads")
    for name in ("heads", "data", "output"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    args = parser.parse_args(arguments)
    target = load(TARGET)
    loaded = load_heads(args.heads, target)
    figures = measure(loaded, args.data / "dev.tsv.gz")
    directory = args.output / "ende-heads"
    save_heads(
        directory,
        loaded.params,
        target,
        extra={
            "training_steps": loaded.metadata["step"],
            "gamma": OPTIONS.gamma,
            "evaluation": figures,
        },
        overwrite=True,
    )
    (directory / "README.md").write_text(card(loaded, figures), encoding="utf-8")
    return 0


def measure(
    heads: LoadedHeads, data: Path, temperatures: Mapping[str, float] = TEMPERATURES
) -> dict[str, dict]:
    """Figures of the first ``NUM_PAIRS`` pairs of ``data`` at each temperature, by name."""
    generator = Generator.load(TARGET)
    draft = MedusaDraft.create(heads.params, generator.target)
    generator = dataclasses.replace(generator, draft=draft)
    pairs = list(read_pairs(data, 1, 2, 3))[:NUM_PAIRS]
    figures = {}
    for name, temperature in temperatures.items():
        print(f"evaluating {data.name} at temperature {temperature:g}", file=sys.stderr)
        options = dataclasses.replace(OPTIONS, temperature=temperature)
        figures[name] = dataclasses.asdict(evaluate(generator, pairs, options))
    return figures


def card(heads: LoadedHeads, figures: dict[str, dict]) -> str:
    """README.md."""
    config = heads.config
    num_params = sum(leaf.size for leaf in heads.params.values())
    rows = "\n".join(
        f"| dev, temperature {temperature:g} | {figures[name]['alpha']:.3f} | "
        f"{figures[name]['mean_acceptance_length']:.2f} | "
        f"{', '.join(f'{rate:.2f}' for rate in figures[name]['acceptance_by_position'])} |"
        for name, temperature in TEMPERATURES.items()
    )
    return f"""\
# ende-heads: draft heads on ende-target

{config.num_heads} heads with a hidden layer of {config.hidden_dim}, \
{num_params / 1e6:.1f}M parameters in bfloat16; embedding
and output layer are the target's. Head i (from 0) proposes the token i + 1 places after
the last one, from the state that the last one was predicted from and from its embedding:
all in one call. Nothing is proposed in a row's first iteration.

Training: {heads.metadata["step"]} steps towards the target's own distributions over the \
training text, with
the target frozen:

    spec-t5x train-heads --gin_file=gin_configs/runs/train_ende_heads.gin \\
      --gin.DATA_DIR='"data/ende"' --gin.OUTPUT_DIR='"runs/heads"' \\
      --gin.TARGET='"ende-target"'

Measured at gamma {OPTIONS.gamma} on the first {NUM_PAIRS} pairs of dev.tsv.gz \
({figures["dev"]["num_skipped"]} left out as too
long); alpha is the mean of sum min(p, q) over verified positions, the last column the
share of iterations whose i-th draft was accepted:

| text | alpha | mean acceptance length | by position |
|---|---|---|---|
{rows}

English-German pairs: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of
programs in Debian and Debian package descriptions (free-software licences of each
program), LibreOffice help (MPL 2.0).

Figures: `python -m spec_t5x.experiments.package_heads`.
"""


if __name__ == "__main__":
    sys.exit(main())
