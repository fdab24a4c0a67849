"""Models and decoding options: the flags that several commands share.

Every value can come from a flag, from a gin file or from the default, in this
order of precedence.
"""

import argparse
import dataclasses
import sys

from spec_t5x.errors import InputError

DEFAULT_TARGET = "ende-target"
NO_DRAFT = "none"
# Where gamma has to be a number and none was given.
FIXED_GAMMA = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Which checkpoints to load; names as on the command line."""

    target: str = DEFAULT_TARGET
    draft: str | None = None
    # Of a target that holds none, as T5X checkpoints; as on the command line.
    vocabulary: str | None = None
    # What comes after the colon of ``NAME:ARGUMENT``, for gin, whose macros hold paths and
    # cannot be put together.
    draft_argument: str | int | None = None
    # What the networks compute in; "auto" is what the platform is quick in.
    dtype: str = "auto"
    # How the draft samples; None takes the target's temperature, top_k and top_p.
    draft_temperature: float | None = None
    draft_top_k: int = 0
    draft_top_p: float = 0.0
    # Adapts gamma: the time of a draft step in target steps (c of the paper). None does
    # not adapt.
    adaptive: float | None = None
    # With ``adaptive``: the time of one more position in the target's call, in target steps.
    # None is 0.1 on a CPU and 0 elsewhere.
    adaptive_position: float | None = None

    def __post_init__(self):
        for name in ("target", "draft", "vocabulary", "dtype"):
            value = getattr(self, name)
            may_be_absent = name in ("draft", "vocabulary")
            # gin hands over whatever a file binds.
            if not isinstance(value, str | None) or (value is None and not may_be_absent):
                raise InputError(f"Models.{name} is {value!r}: give a text in quotes")
        if self.adaptive is None and self.adaptive_position is not None:
            raise InputError(
                f"adaptive_position is {self.adaptive_position} without adaptive: give it too"
            )
        if self.draft_temperature is None and (self.draft_top_k or self.draft_top_p):
            raise InputError(
                f"draft_top_k is {self.draft_top_k} and draft_top_p {self.draft_top_p} without "
                "a draft_temperature: give it too"
            )

    def draft_options(self):
        """Settings of the draft."""
        from spec_t5x.checkpoints.make_draft import DraftOptions
        from spec_t5x.drafts.stopping import Stopping
        from spec_t5x.sampling.distributions import sampling

        temperature = self.draft_temperature
        own = (temperature, self.draft_top_k, self.draft_top_p)
        return DraftOptions(
            settings=None if temperature is None else sampling(*own),
            stopping=None
            if self.adaptive is None
            else Stopping(c=self.adaptive, position=self.adaptive_position),
            dtype=self.dtype,
        )

    def draft_name(self) -> str | None:
        """The draft's name or directory, None for plain decoding."""
        if self.draft == NO_DRAFT:
            return None
        name = self.draft or self._packaged_draft()
        return name if self.draft_argument is None else f"{name}:{self.draft_argument}"

    def _packaged_draft(self) -> str:
        from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS

        if self.target not in PACKAGED_DRAFTS:
            raise InputError(
                f"no --draft was given for --target {self.target}: give one, or --draft {NO_DRAFT}"
            )
        return PACKAGED_DRAFTS[self.target]["transformer"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; one that is left out takes its value from gin."""
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="NAME_OR_DIR",
        help=f"checkpoint whose output is wanted (default: the packaged {DEFAULT_TARGET})",
    )
    models.add_argument(
        "--vocabulary",
        metavar="FILE",
        help="of a T5X checkpoint, which has none: a SentencePiece model, FILE:100 with 100 extra "
        "ids, bytes, or another checkpoint",
    )
    models.add_argument(
        "--draft",
        metavar="NAME_OR_DIR",
        help="what proposes: a checkpoint's directory, or transformer, unigram, bigram, ngram, "
        "copy, uniform, medusa, early_exit, mixed or cascade, with :ARGUMENT; "
        f"{NO_DRAFT} is plain decoding (default: a packaged target's own small model)",
    )
    numbers = {
        "draft_temperature": (float, "the draft's own, with the two that follow (the target's)"),
        "draft_top_k": (int, "the draft's own (0)"),
        "draft_top_p": (float, "the draft's own (0)"),
        "adaptive": (float, "adapt gamma; N is the time of a draft step in target steps"),
        "adaptive_position": (float, "that of a position in the target's call (0.1; 0 off CPUs)"),
    }
    for name, (kind, text) in numbers.items():
        models.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    models.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="what the networks compute in; auto is float32 on a CPU, else bfloat16 (auto)",
    )
    _add_options(parser.add_argument_group("decoding"))
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")


def _add_options(group) -> None:
    numbers = {
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
            "of the random draws (0); with a temperature, texts depend on --gamma too, and auto "
            "on what was measured here, but for --verifier coupled",
        ),
        "max_decode_len": (int, "tokens generated at most (128)"),
        "batch_size": (int, "inputs decoded together (1)"),
        "beams": (int, "beam search with N hypotheses; 0 does not search (0)"),
        "beam_alpha": (float, "exponent of its brevity penalty (0.6)"),
        "max_source_len": (int, "longest input in tokens (the checkpoint's)"),
    }
    for name, (kind, text) in numbers.items():
        group.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    group.add_argument(
        "--verifier", metavar="NAME", help="token, block, coupled, rejection, multi or tree (block)"
    )
    group.add_argument(
        "--lenience", type=float, metavar="N", help="below 1 the token verifier is lossy (1)"
    )
    group.add_argument(
        "--widths", type=_widths, metavar="N,N", help="drafts for each place, of multi and tree"
    )
    group.add_argument("--truncate", action="store_true", default=None, help="cut longer inputs")
    group.add_argument(
        "--rescale_log_probs",
        action="store_true",
        default=None,
        help="scores under the sampled distribution, as T5X's default",
    )


def read(args: argparse.Namespace):
    """``Models`` and ``GenerateOptions``: defaults, then gin, then flags."""
    import gin

    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.generation import GenerateOptions

    make_models = gin.external_configurable(Models, module="spec_t5x")
    make_options = gin.external_configurable(GenerateOptions, module="spec_t5x")
    parse_gin(args.gin_file, args.gin_bindings)

    def given(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        # Some are gin's alone.
        return {n: getattr(args, n) for n in names if getattr(args, n, None) is not None}

    models, options = make_models(**given(Models)), make_options(**given(GenerateOptions))
    from spec_t5x.generation import AUTO

    if models.adaptive is not None and options.gamma == AUTO:
        # It decides by itself how much is drafted.
        options = dataclasses.replace(options, gamma=FIXED_GAMMA)
    return models, options


def say(text: str) -> None:
    """Tells the user something beside the output."""
    print(f"spec-t5x: {text}", file=sys.stderr, flush=True)


def gamma(text: str) -> int | str:
    """The value of ``--gamma``: a number, or "auto"."""
    from spec_t5x.generation import AUTO

    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no gamma: give a whole number from 0, or {AUTO} for as many as pay"
        ) from error


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 3,2") from error
