"""What each packaged model's card says, and the commands that its figures are from."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json
from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

# Commands of ``spec-t5x evaluate`` are run in a folder of the data.
ENDE, SUMMARIES = "ende", "summarize"

_ENDE_DATA = """\
English-German pairs: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of
programs in Debian and Debian package descriptions (free-software licences of each
program), LibreOffice help (MPL 2.0). newstest2013 was never trained on."""
_SUMMARIES_DATA = """\
Descriptions and synopses of Debian packages (free-software licences of each package)."""
_LM_DATA = """\
The English sides of: Tatoeba (through manythings.org, CC BY 2.0 FR), messages of programs in
Debian and Debian package descriptions (free-software licences of each program), LibreOffice
help (MPL 2.0)."""

_ENDE_LIMITS = """\
A demonstration, small and briefly trained on a CPU: short everyday sentences and
software messages come out readable, news does not. It is here so that every claim
about speed and exactness can be checked without a download."""
_SUMMARIES_LIMITS = """\
A demonstration, small and briefly trained on a CPU: from a package's description (its
first 96 tokens) it writes a synopsis, which is often sensible and sometimes of another
package. It stands where the paper has CNN/DailyMail."""
_LM_LIMITS = """\
A demonstration, small and briefly trained on a CPU: lower-case lines of everyday and
software English, grammatical for a few words. It stands where the paper has a GPT-like
model of lm1b."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of ``spec-t5x evaluate``."""

    # Its key in figures.json.
    name: str
    # Of its row in the card.
    label: str
    # All of the command but its name.
    arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A packaged model."""

    title: str
    # What it is and what may be expected of it. {network} is filled in, or of tables
    # what was counted.
    about: str
    # How it was made: commands.
    training: str
    data: str
    # The folder that the measurements' files are in.
    folder: str
    measurements: tuple[Measurement, ...]


def _sets(draft: str, target: str, files: str, temperatures=(0, 1), label: str = "dev"):
    """A file at each temperature."""
    drafting = f"--draft {draft}" + ("" if draft == "none" else " --gamma 4")
    return tuple(
        Measurement(
            name=f"{label}, {draft}, {temperature}".replace(",", "").replace(" ", "_"),
            label=f"{label}, temperature {temperature}",
            arguments=f"--target {target} {drafting} {files} --temperature {temperature}",
        )
        for temperature in temperatures
    )


def _ende(draft: str, more: str = "", **options) -> tuple[Measurement, ...]:
    label, file = options.pop("label", "dev"), options.pop("file", "dev.tsv.gz")
    columns = "--source_column 1 --target_column 2 --num_columns 3 --batch_size 32"
    return _sets(draft, "ende-target", f"--data {file} {columns}{more}", label=label, **options)


def _newstest(draft: str) -> tuple[Measurement, ...]:
    return _ende(draft, temperatures=(0,), label="newstest2013", file="newstest2013.tsv.gz")


def _summaries(draft: str, more: str = "", **options) -> tuple[Measurement, ...]:
    files = "--data debian_dev.tsv.gz --metric rouge --truncate --max_decode_len 48 --batch_size 32"
    return _sets(draft, "summaries-target", files + more, **options)


def _lm(draft: str, more: str = " --limit 500", **options) -> tuple[Measurement, ...]:
    files = (
        "--data dev.tsv.gz --source_column 1 --target_column 1 --num_columns 3 --source_words 4 "
        f"--max_decode_len 64 --batch_size 32{more}"
    )
    return _sets(draft, "lm-target", files, label="dev, from 4 words on", **options)


def _tables(measure, more: str) -> tuple[Measurement, ...]:
    """The three drafts that are made of one file of tables."""
    return tuple(
        dataclasses.replace(each, label=f"{draft}, {each.label}")
        for draft in ("unigram", "bigram", "ngram")
        for each in measure(draft, more)
    )


_TABLES = """\
Trigrams, bigrams and unigrams, counted over the target's vocabulary in {texts:,} texts of
{tokens:,} tokens; of the longer ones those that occur {min_count} times or more, at most
{max_successors} for each context, with absolute discounting by 3/4 of an occurrence,
interpolated down to smoothed unigrams. No network is run to propose from them. The drafts
`unigram`, `bigram` and `ngram` all read this one file."""

CARDS: Mapping[str, Card] = {
    "ende-target": Card(
        title="English to German",
        about=f"{_ENDE_LIMITS}\n\nNetwork: {{network}}.",
        training="""\
spec-t5x train --gin_file=gin_configs/runs/train_ende_target.gin \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/target'"
spec-t5x train --gin_file=gin_configs/runs/train_ende_target_more.gin \\
  --gin.CHECKPOINT_PATH="'runs/target/model'" \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/target-more'\"""",
        data=_ENDE_DATA,
        folder=ENDE,
        measurements=(
            *_ende("ende-draft", temperatures=(0,)),
            # What the test suite has the time for.
            *_ende("ende-draft", " --limit 200", temperatures=(0,), label="first 200 of dev"),
            *_newstest("ende-draft"),
        ),
    ),
    "ende-draft": Card(
        title="the draft of ende-target",
        about="Network: {network}. It encodes the source itself.",
        training="""\
spec-t5x distill --gin_file=gin_configs/runs/train_ende_draft.gin \\
  --gin.CHECKPOINT_PATH="'runs/target/model'" \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/draft'"
spec-t5x distill --gin_file=gin_configs/runs/distill_ende_draft.gin \\
  --gin.CHECKPOINT_PATH="'ende-target'" --gin.INITIAL_DRAFT="'runs/draft/draft'" \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/draft-more'\"""",
        data=_ENDE_DATA,
        folder=ENDE,
        measurements=(*_ende("ende-draft"), *_newstest("ende-draft")),
    ),
    "ende-ngram": Card(
        title="n-gram drafts for ende-target",
        about=_TABLES,
        training="""\
spec-t5x train-ngram --data train.tsv.gz --column 2 --num_columns 3 --vocabulary ende-target \\
  --order 3 --min_count 3 --output ende-ngram""",
        data=_ENDE_DATA,
        folder=ENDE,
        measurements=_tables(_ende, " --limit 200"),
    ),
    "ende-heads": Card(
        title="draft heads on ende-target",
        about="""\
4 heads with a hidden layer of 384, 1.2M parameters in bfloat16; embedding and output layer
are the target's. Head i (from 0) proposes the token i + 1 places after the last one, from
the state that the last one was predicted from and from its embedding: all in one call.
Nothing is proposed in a row's first iteration. They learnt the target's own distributions
over the training text, with the target frozen.""",
        training="""\
spec-t5x train-heads --gin_file=gin_configs/runs/train_ende_heads.gin \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/heads'" --gin.TARGET="'ende-target'\"""",
        data=_ENDE_DATA,
        folder=ENDE,
        measurements=_ende("medusa", " --limit 200"),
    ),
    "summaries-target": Card(
        title="one line for a software package",
        about=f"{_SUMMARIES_LIMITS}\n\nNetwork: {{network}}.",
        training="""\
spec-t5x train --gin_file=gin_configs/runs/train_summaries_target.gin \\
  --gin.train.initial_checkpoint="'runs/target/model'" \\
  --gin.DATA_DIR="'data/summarize'" --gin.OUTPUT_DIR="'runs/summaries-target'"
spec-t5x train --gin_file=gin_configs/runs/train_summaries_target_more.gin \\
  --gin.train.initial_checkpoint="'runs/summaries-target/model'" \\
  --gin.DATA_DIR="'data/summarize'" --gin.OUTPUT_DIR="'runs/summaries-target-more'\"""",
        data=_SUMMARIES_DATA,
        folder=SUMMARIES,
        measurements=_summaries("summaries-draft", temperatures=(0,)),
    ),
    "summaries-draft": Card(
        title="the draft of summaries-target",
        about="Network: {network}. It encodes the source itself.",
        training="""\
spec-t5x distill --gin_file=gin_configs/runs/train_summaries_draft.gin \\
  --gin.distill.initial_checkpoint="'runs/draft/draft'" \\
  --gin.CHECKPOINT_PATH="'runs/summaries-target/model'" \\
  --gin.DATA_DIR="'data/summarize'" --gin.OUTPUT_DIR="'runs/summaries-draft'"
spec-t5x distill --gin_file=gin_configs/runs/distill_summaries_draft.gin \\
  --gin.CHECKPOINT_PATH="'summaries-target'" \\
  --gin.INITIAL_DRAFT="'runs/summaries-draft/draft'" \\
  --gin.DATA_DIR="'data/summarize'" --gin.OUTPUT_DIR="'runs/summaries-draft-more'\"""",
        data=_SUMMARIES_DATA,
        folder=SUMMARIES,
        measurements=_summaries("summaries-draft"),
    ),
    "summaries-ngram": Card(
        title="n-gram drafts for summaries-target",
        about=_TABLES,
        training="""\
spec-t5x train-ngram --data debian_train.tsv.gz --column 1 --num_columns 2 \\
  --vocabulary summaries-target --order 3 --output summaries-ngram""",
        data=_SUMMARIES_DATA,
        folder=SUMMARIES,
        measurements=_tables(_summaries, " --limit 200"),
    ),
    "lm-target": Card(
        title="a language model of short English lines",
        about=f"{_LM_LIMITS}\n\nNetwork: {{network}}.",
        training="""\
spec-t5x train-lm --gin_file=gin_configs/runs/train_lm_target.gin \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/lm-target'\"""",
        data=_LM_DATA,
        folder=ENDE,
        # How well it goes on from a few words, no reference says.
        measurements=(),
    ),
    "lm-draft": Card(
        title="the draft of lm-target",
        about="Network: {network}.",
        training="""\
spec-t5x distill --gin_file=gin_configs/runs/train_lm_draft.gin \\
  --gin.CHECKPOINT_PATH="'lm-target'" \\
  --gin.DATA_DIR="'data/ende'" --gin.OUTPUT_DIR="'runs/lm-draft'\"""",
        data=_LM_DATA,
        folder=ENDE,
        measurements=_lm("lm-draft"),
    ),
    "lm-ngram": Card(
        title="n-gram drafts for lm-target",
        about=_TABLES,
        training="""\
spec-t5x train-ngram --data train.tsv.gz --column 1 --num_columns 3 --vocabulary lm-target \\
  --order 3 --output lm-ngram""",
        data=_LM_DATA,
        folder=ENDE,
        measurements=_tables(_lm, " --limit 200"),
    ),
}


# Figures that a card shows, and how; those of texts are shown of targets.
_QUALITY = {"bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-Lsum"}
COMPARED = (*_QUALITY, "alpha", "block_efficiency")


def card_of(name: str) -> Card:
    """The card of a packaged model.

    Raises:
      InputError: no such model.
    """
    if name not in CARDS:
        raise InputError(f"no packaged model {name!r}: choose of {', '.join(CARDS)}")
    return CARDS[name]


def rendered(name: str, directory: Path, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """README.md of a packaged model.

    Args:
      name: of ``CARDS``.
      directory: holds the model.
      figures: what each measurement printed, by name.
    """
    card = card_of(name)
    parts = [
        f"# {name}: {card.title}",
        card.about.format(**_facts(directory)),
        _made(directory),
        _tables_of(name, card, figures),
        card.data,
        f"Made by\n\n{_as_commands([card.training])}",
    ]
    if card.measurements:
        commands = [f"spec-t5x evaluate {each.arguments}" for each in card.measurements]
        parts += [
            f"and measured, in `data/{card.folder}`, by\n\n{_as_commands(commands)}",
            f"`python -m spec_t5x.experiments.packaging check --data data {name}` measures again "
            "and compares.",
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _as_commands(lines: Sequence[str]) -> str:
    return "\n".join(["```bash", *lines, "```"])


def _facts(directory: Path) -> dict[str, Any]:
    config = read_json(directory / CONFIG_NAME)
    if "counted" in config:
        return config["counted"]
    return {"network": _network(load(directory, on_host=True))} if "model" in config else {}


def _network(model: LoadedModel) -> str:
    config = model.config
    if isinstance(config, T5Config):
        layers = (
            f"{config.num_encoder_layers} encoder and {config.num_decoder_layers} decoder "
            f"layers of {config.emb_dim}, {config.num_heads} heads of {config.head_dim}"
        )
    else:
        layers = f"{config.num_layers} layers of {config.emb_dim}, {config.num_heads} heads"
    num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return (
        f"{layers}, feed-forward {config.mlp_dim}, {config.vocab_size} pieces, "
        f"{num_params / 1e6:.1f}M parameters in {model.metadata['stored_dtype']}"
    )


def _made(directory: Path) -> str:
    """How long it was trained, where that is known, and with which loss it ended."""
    config = read_json(directory / CONFIG_NAME)
    lines = []
    if config.get("training_steps"):
        lines.append(f"Trained for {config['training_steps']} steps.")
    if loss := config.get("cross_entropy"):
        lines.append(f"Perplexity of a token of the dev set: {math.exp(loss):.1f}.")
    return " ".join(lines)


def _tables_of(name: str, card: Card, figures: Mapping[str, Mapping[str, Any]]) -> str:
    if not card.measurements:
        return ""
    is_target = name.endswith("-target")
    table = (_quality_table if is_target else _acceptance_table)(card, figures)
    return f"{table}\n\nIn brackets are 95 % intervals over texts."


def _quality_table(card: Card, figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows, signatures = ["| text | pairs | quality |", "|---|---|---|"], set()
    for each in card.measurements:
        found = figures[each.name]
        scores = ", ".join(
            f"{label} {_with_interval(found, key, 1)}"
            for key, label in _QUALITY.items()
            if key in found
        )
        signatures.add(found.get("bleu_signature"))
        rows.append(f"| {each.label} | {_counted(found)} | {scores} |")
    signed = [f"\nBLEU: `{signature}`." for signature in signatures - {None}]
    return "\n".join(rows + signed)


def _acceptance_table(card: Card, figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        "Measured at gamma 4; alpha is the mean of sum min(p, q) over verified positions, block",
        "efficiency the generated tokens for each target call, the last column how often the i-th",
        "draft was accepted where it was verified:\n",
        "| text | pairs | alpha | block efficiency | by position |",
        "|---|---|---|---|---|",
    ]
    for each in card.measurements:
        found = figures[each.name]
        by_position = found.get("acceptance_by_position", ())
        rates = ", ".join(f"{rate:.2f}" for rate in by_position) or "not measured"
        rows.append(
            f"| {each.label} | {_counted(found)} | {_with_interval(found, 'alpha', 3)} | "
            f"{_with_interval(found, 'block_efficiency', 2)} | {rates} |"
        )
    return "\n".join(rows)


def _counted(found: Mapping[str, Any]) -> str:
    skipped = found["num_skipped"]
    return str(found["num_pairs"]) + (f" ({skipped} left out as too long)" if skipped else "")


def _with_interval(found: Mapping[str, Any], key: str, places: int) -> str:
    text = f"{found[key]:.{places}f}"
    if key not in found["intervals"]:
        return text
    low, high = found["intervals"][key]
    return f"{text} ({low:.{places}f}\u2013{high:.{places}f})"
