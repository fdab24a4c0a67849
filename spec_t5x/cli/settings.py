"""Options of commands: how flags are made, and how flags and gin become dataclasses.

Each value comes from its flag, else from gin, else from its default.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_t5x import registry
from spec_t5x.checkpoints.named_models import DEFAULT_TARGET, Models
from spec_t5x.cli import standard_streams
from spec_t5x.names import NO_DRAFT, VERIFIERS, WEIGHTS

# Where gamma has to be a number and none was given.
FIXED_GAMMA = 4


def gamma(text: str) -> int | str:
    """A number, or a word that ``GenerateOptions`` accepts or refuses."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 3,2") from error


def _early_stopping(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _folders(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


# Flags of ``Models`` and ``GenerateOptions``, as
# ``add_flags`` takes them. Not read off the classes: their modules import JAX, ``--help`` must not.
VOCABULARY = (
    "FILE",
    "of a T5X checkpoint, which has none: a SentencePiece model, FILE:100 with 100 extra ids, "
    "bytes, tokenizer.json, or another checkpoint",
)
_MODELS = {
    "target": (
        "NAME_OR_DIR",
        "checkpoint whose output is wanted: a directory, OWNER/NAME on the Hugging Face Hub, or a "
        f"packaged one (default: {DEFAULT_TARGET})",
    ),
    "vocabulary": VOCABULARY,
    "draft": (
        "NAME_OR_DIR",
        "what proposes: a checkpoint's directory or name, or "
        f"one of {', '.join(registry.names('draft'))}, with :ARGUMENT; "
        f"{NO_DRAFT} is plain decoding (default: a packaged target's own small model)",
    ),
    "task": (
        "NAME",
        "decode with the settings that the target's config.json has for this task "
        "(task_specific_params)",
    ),
    "draft_temperature": (float, "the draft's own, with the two that follow (the target's)"),
    "draft_top_k": (int, "the draft's own (0)"),
    "draft_top_p": (float, "the draft's own (0)"),
    "dtype": (
        ("auto", "float32", "bfloat16"),
        "what the networks compute in; auto is float32 on a CPU, else bfloat16 (auto)",
    ),
    "weights": (
        WEIGHTS,
        "the target's; auto is what the checkpoint has, the others round them: another model "
        "(auto)",
    ),
    "draft_weights": (WEIGHTS, "the same of a draft that is a model (auto)"),
}
_DECODING = {
    "gamma": (
        gamma,
        "tokens that the draft proposes in each iteration; auto is as many as pay, none where "
        "none pay (auto)",
    ),
    "temperature": (float, "0 is argmax (0)"),
    "top_k": (int, "sample from the k likeliest tokens; 0 from all (0)"),
    "top_p": (float, "sample from the nucleus of this mass; 0 from all (0)"),
    "num_decodes": (int, "outputs for each input (1)"),
    "seed": (
        int,
        "of the random draws (0); with a temperature, outputs depend on --gamma too, and with "
        "--gamma auto on what was measured here, except for --verifier coupled",
    ),
    "max_decode_len": (int, "tokens generated at most (the checkpoint's, or 128)"),
    "min_decode_len": (int, "tokens before one may end the output (the checkpoint's, or 0)"),
    "batch_size": (int, "inputs decoded together (1)"),
    "beams": (int, "beam search with N hypotheses; 0 does not search (0)"),
    "beam_alpha": (float, "exponent of its brevity penalty (0.6)"),
    "length_penalty": (
        float,
        "a beam search by transformers' rules in place of T5X's, with this exponent (the "
        "checkpoint's, if it has one)",
    ),
    "early_stopping": (
        _early_stopping,
        "of such a search: true, false or never (the checkpoint's, or false)",
    ),
    "max_source_len": (int, "longest input in tokens (the checkpoint's)"),
    "verifier": ("NAME", f"{', '.join(VERIFIERS[:-1])} or {VERIFIERS[-1]} (block)"),
    "lenience": (float, "below 1 the token verifier is lossy (1)"),
    "widths": (_numbers, "drafts for each position, such as 3,2, of multi and tree"),
    "stop": (["TEXT", "stop"], "outputs end before it; several may be given"),
    "output_prefix": ("TEXT", "what every output of an encoder-decoder begins with"),
    "repetition_penalty": (
        float,
        "above 1 makes tokens less likely that the output has (the checkpoint's, or 1)",
    ),
    "no_repeat_ngram_size": (
        int,
        "so many tokens come only once in the same order (the checkpoint's, or 0 for no such rule)",
    ),
    "suppress_tokens": (_numbers, "ids that never come, as 3,4 (the checkpoint's)"),
    "begin_suppress_tokens": (_numbers, "ids that do not come first (the checkpoint's)"),
    "forced_bos_token_id": (int, "the id that comes first, -1 for any (the checkpoint's)"),
    "forced_eos_token_id": (
        _numbers,
        "ids of which one comes last where an output is cut (the checkpoint's)",
    ),
    "bad_words_ids": (
        [_numbers, "bad_words_ids"],
        "ids that never come in this order; may be given several times (the checkpoint's)",
    ),
    "truncate": (bool, "cut longer inputs"),
    "rescale_log_probs": (bool, "scores under the sampled distribution, as T5X's default"),
}


# Of a seqio task, by T5X's names.
CACHES = {
    "use_cached_tasks": (bool, "read what seqio's caching has written, not the data"),
    "seqio_additional_cache_dirs": (_folders, "where cached tasks lie, as DIR,DIR"),
}
_TEXTS = {
    "data": ("FILE", "pairs, .tsv or .jsonl, gzipped or not"),
    "source_column": (int, "of a .tsv, from 0 (of two columns the first, of more the second)"),
    "target_column": (int, "of a .tsv, from 0 (the one after it)"),
    "num_columns": (int, "of each line of a .tsv (as of the first line)"),
    "limit": (int, "take the first N pairs only"),
    "source_words": (int, "of a file: take the first N words of each source only"),
    "source_field": ("NAME", "of a .jsonl (article)"),
    "target_field": ("NAME", "of a .jsonl (highlights)"),
    "prefix": ("TEXT", "put before every source of a file"),
    "mixture_or_task": ("NAME", "seqio's name, instead of a file"),
    "split": ("NAME", "of the task (validation)"),
    "task_module": (["MODULE"], "imported first, for the tasks that it registers"),
    **CACHES,
}


def add_flags(parser, flags: Mapping[str, tuple[Any, str]]) -> None:
    """Adds a flag for each option, None where it is left out, so that ``configured`` takes gin's.

    Args:
      parser: a parser, or a group of one.
      flags: ``{name: (kind, help)}``. A kind is ``bool`` for a switch, a tuple of choices, the
        metavar of a text, or a type (or a function of the text), shown as N. ``[kind]`` may be
        given several times; the option has the flag's name in the plural, or is the name that
        stands beside the kind.
    """
    for name, (kind, text) in flags.items():
        options: dict[str, Any] = {}
        if isinstance(kind, list):
            kind, *option = kind
            options = {"action": "append", "dest": option[0] if option else f"{name}s"}
        if kind is bool:
            options["action"] = "store_true"
        elif isinstance(kind, tuple):
            options["choices"] = kind
        elif isinstance(kind, str):
            options["metavar"] = kind
            if kind == "TEXT":
                options["type"] = standard_streams.text
        else:
            options |= {"type": kind, "metavar": "N"}
        parser.add_argument(f"--{name}", default=None, help=text, **options)


def add_text(parser: argparse.ArgumentParser) -> None:
    """Adds the inputs that are given as arguments."""
    text = "an input; more are more inputs"
    parser.add_argument("text", nargs="*", metavar="TEXT", type=standard_streams.text, help=text)


def add_gin(parser: argparse.ArgumentParser) -> None:
    """Adds ``--gin_file``; ``--gin.NAME=VALUE`` is taken by every command."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``Models`` and ``GenerateOptions``, and ``--gin_file``."""
    add_flags(parser.add_argument_group("models"), _MODELS)
    add_flags(parser.add_argument_group("decoding"), _DECODING)
    add_gin(parser)


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``labs.benchmark.text_source.TextSource``: a file, or a seqio task."""
    add_flags(parser.add_argument_group("texts"), _TEXTS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``, the file that keeps a measurement's figures."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def configured(args: argparse.Namespace, *classes: type) -> list[Any]:
    """An object of each dataclass: its defaults, then what gin binds, then the flags.

    Raises:
      InputError: gin files or bindings that cannot be parsed, or values that cannot be.
    """
    import gin

    from spec_t5x.cli.gin_files import parse_gin

    makers = [gin.external_configurable(cls, module="spec_t5x") for cls in classes]
    parse_gin(args.gin_file, args.gin_bindings)
    return [make(**given(args, cls)) for make, cls in zip(makers, classes, strict=True)]


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The flags that were given, of those that are fields of a dataclass."""
    values = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(cls)}
    # Lists are of flags that may be given several times.
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def read(args: argparse.Namespace, *classes: type) -> tuple[Any, ...]:
    """``Models``, ``GenerateOptions`` and an object of each other class, as ``configured``."""
    from spec_t5x.generation import GenerateOptions

    return tuple(configured(args, Models, GenerateOptions, *classes))
