"""Options of decoding, and the help of their flags; imports no JAX, for ``--help``."""

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from spec_t5x.errors import InputError, check_at_least, did_you_mean
from spec_t5x.names import AUTO, VERIFIERS, ours

if TYPE_CHECKING:
    from spec_t5x.sampling.distributions import Sampling
    from spec_t5x.verifiers import Verifier


def option(default: Any, help: str, kind: Any = None) -> Any:
    """Declares a field of a dataclass that a flag sets.

    Args:
      default: the field's; ``--help`` shows it after ``help``.
      help: a noun phrase, which the API pages show, too.
      kind: of the flag, as ``cli.settings.add_flags`` takes it; None follows from the annotation.
    """
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind})


# numpy's numbers as well; a gamma that is neither number nor word has its own message.
_NUMBERS = {
    int: numbers.Integral,
    float: numbers.Real,
    int | str: object,
    int | None: numbers.Integral | None,
    float | None: numbers.Real | None,
}

# Options that a checkpoint may set (``checkpoints.huggingface.generation_config``): their values
# where neither it nor the user does.
NEUTRAL = {
    "max_decode_len": 128,
    "min_decode_len": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": -1,
    "forced_eos_token_id": (),
    "bad_words_ids": (),
    "sequence_bias": (),
    "length_penalty": None,
    "early_stopping": False,
}
# Those of them that are no rules of decoding (``sampling.rules``).
_NO_RULES = ("max_decode_len", "length_penalty", "early_stopping")


def _says_ours(cls: type) -> type:
    """Makes a dataclass's constructor refuse unknown names as ``_check_names`` does."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args, **given):
        _check_names(given)
        init(self, *args, **given)

    cls.__init__ = checked
    return cls


@_says_ours
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Settings of decoding. The names are those of the command line and of gin."""

    gamma: int | str = option(
        AUTO,
        "tokens that the draft proposes in each iteration; 0 is plain decoding, auto as many as "
        "pay, none where none pay",
    )
    temperature: float = option(0.0, "sampling temperature; 0 is argmax")
    top_k: int = option(0, "sample from the k likeliest tokens; 0 is all")
    top_p: float = option(0.0, "sample from the nucleus of this mass; 0 is all")
    num_decodes: int = option(1, "outputs for each input")
    seed: int = option(
        0,
        "seed of the random draws; sampled outputs depend on gamma, too, and with auto on measured "
        "costs, except with verifier coupled",
    )
    max_decode_len: int | None = option(
        None, "tokens generated at most (default: the checkpoint's, or 128)"
    )
    min_decode_len: int | None = option(
        None, "tokens before one may end the output (default: the checkpoint's, or 0)"
    )
    batch_size: int = option(1, "inputs decoded together, of infer 16")
    beams: int = option(
        0, "beam search with N hypotheses, of which the best num_decodes are returned; 0 is none"
    )
    beam_alpha: float = option(0.6, "exponent of a search's brevity penalty; above prefers length")
    length_penalty: float | None = option(
        None,
        "exponent of the length that divides scores, in a search by transformers' rules in place "
        "of T5X's (default: the checkpoint's, or T5X's)",
    )
    early_stopping: bool | str | None = option(
        None,
        "end of such a search: true with its first finished hypotheses, false when better ones are "
        "unlikely, never when impossible (default: the checkpoint's, or false)",
    )
    max_source_len: int | None = option(
        None,
        "longest source in tokens, end of sequence included; of a decoder alone the longest prompt "
        "(default: the checkpoint's)",
    )
    verifier: str = option("block", "rule by which drafts are accepted", VERIFIERS)
    lenience: float = option(
        1.0,
        "below 1 the token verifier is lossy: no token comes with more than 1 / lenience times its "
        "probability (section A.5)",
    )
    widths: tuple = option((), "drafts for each position, such as 3,2, of multi and tree")
    stop: tuple | str = option(
        (),
        "end outputs before this text; repeatable. Ids go up to the one that completes it, counts "
        "and score are of all that was computed",
        ["TEXT", "stop"],
    )
    output_prefix: str = option("", "beginning of every output of an encoder-decoder", "TEXT")
    repetition_penalty: float | None = option(
        None,
        "above 1 makes tokens less likely that the output has (default: the checkpoint's, or 1)",
    )
    no_repeat_ngram_size: int | None = option(
        None, "length of n-grams that come only once; 0 is none (default: the checkpoint's, or 0)"
    )
    suppress_tokens: tuple | None = option(
        None, "ids that never come, such as 3,4 (default: the checkpoint's)"
    )
    begin_suppress_tokens: tuple | None = option(
        None, "ids that do not come first (default: the checkpoint's)"
    )
    forced_bos_token_id: int | None = option(
        None, "id that comes first; -1 is any (default: the checkpoint's)"
    )
    forced_eos_token_id: tuple | None = option(
        None,
        "ids of which one comes last in outputs cut by max_decode_len (default: the checkpoint's)",
    )
    bad_words_ids: tuple | None = option(
        None,
        "ids that never come in this order; repeatable (default: the checkpoint's)",
        [tuple, "bad_words_ids"],
    )
    # Pairs of ids in order and what is added to the logit of the last one; None takes the
    # checkpoint's.
    sequence_bias: tuple | None = None
    truncate: bool = option(
        False, "cut longer sources at their end, longer prompts at their beginning"
    )
    rescale_log_probs: bool = option(
        False, "score under the sampled distribution, as is T5X's default, not under the model's"
    )

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in dataclasses.fields(self):
            # gin passes any value that a file binds, and lists for tuples.
            value = _tuples(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if not isinstance(value, _NUMBERS.get(field.type, field.type)):
                wanted = getattr(field.type, "__name__", field.type)
                raise InputError(f"{field.name} is {value!r}: give a value of type {wanted}")
        self._check()

    def _check(self) -> None:
        gamma, beams = self.gamma, self.beams
        length = self.settled({})["max_decode_len"]
        at_least = {"num_decodes": 1, "max_decode_len": 1, "batch_size": 1, "max_source_len": 2}
        check_at_least(self, **at_least, min_decode_len=0, no_repeat_ngram_size=0)
        if gamma != AUTO and not (isinstance(gamma, numbers.Integral) and 0 <= gamma <= length):
            raise InputError(
                f"gamma is {gamma!r} and max_decode_len {length}: give a whole number of at most "
                f"that, from 0 (0 is plain decoding), or {AUTO} for as many as pay"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}: give 0 to {2**32 - 1}")
        # They check their own arguments.
        self.sampling()
        self.make_verifier()
        for name in ("top_k", "top_p"):
            value = getattr(self, name)
            if value > 0 and not self.temperature:
                raise InputError(
                    f"{name} is {value} and temperature 0, which takes the likeliest token: give "
                    f"a temperature, or leave {name} out"
                )
        if not 0 <= self.beam_alpha < float("inf"):
            raise InputError(f"beam_alpha is {self.beam_alpha}: give a finite number from 0")
        if self.early_stopping not in (None, True, False, "never"):
            raise InputError(
                f"early_stopping is {self.early_stopping!r}: give True, False or 'never'"
            )
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise InputError(f"stop has {string!r}: give texts of at least one character")
        if beams < 0:
            raise InputError(f"beams is {beams}: give at least 0 (0 does not search)")
        if beams and self.stop:
            raise InputError(
                f"beams is {beams} and stop {self.stop}: a beam search ends no output early; "
                "leave one of them out"
            )
        if beams and self.temperature > 0:
            raise InputError(
                f"beams is {beams} and temperature {self.temperature}: a beam search does not "
                "sample; set one of them to 0"
            )
        if beams and self.num_decodes > beams:
            raise InputError(
                f"num_decodes is {self.num_decodes} and beams {beams}: a search returns at most "
                "its beams"
            )

    @property
    def repeats(self) -> bool:
        """True if texts do not depend on the number of drafts in each iteration."""
        return self.sampling().greedy or self.make_verifier().coupled

    def settled(self, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of ``NEUTRAL``: given ones, else a checkpoint's, else neutral."""
        given = {name: getattr(self, name) for name in NEUTRAL}
        return {
            name: of_checkpoint.get(name, NEUTRAL[name]) if value is None else value
            for name, value in given.items()
        }

    def without_open(self, of_checkpoint: Mapping[str, Any]) -> "GenerateOptions":
        """Returns these options with the values of ``settled`` in place of None."""
        return dataclasses.replace(self, **self.settled(of_checkpoint))

    def rules(self, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``sampling.rules.rules`` for these options; hashable values."""
        settled = self.settled(of_checkpoint)
        values = {name: value for name, value in settled.items() if name not in _NO_RULES}
        values["min_length"] = values.pop("min_decode_len")
        if values["forced_bos_token_id"] < 0:
            values["forced_bos_token_id"] = None
        return values

    def make_verifier(self) -> "Verifier":
        """Makes the verifier."""
        from spec_t5x.verifiers import verifier

        return verifier(self.verifier, lenience=self.lenience, widths=self.widths)

    def sampling(self) -> "Sampling":
        """Returns temperature, top-k and top-p as the loops take them."""
        return _sampling(self.temperature, self.top_k, self.top_p)


def _tuples(value):
    """Converts lists to tuples, at all depths."""
    if isinstance(value, list | tuple):
        return tuple(_tuples(each) for each in value)
    return value


# Cached, because it holds a device array, which takes longer to make than a token.
@functools.lru_cache
def _sampling(*settings) -> "Sampling":
    from spec_t5x.sampling.distributions import sampling

    return sampling(*settings)


def options_with(options: GenerateOptions | None, changes: dict) -> GenerateOptions:
    """Returns the options, or the defaults for None, with ``changes``, values by name."""
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise InputError(
            f"options are {options!r}: give GenerateOptions(…), or single ones by name"
        )
    _check_names(changes)
    return dataclasses.replace(options, **changes)


def _check_names(given: Iterable[str]) -> None:
    """Raises ``InputError`` for an unknown option, with the one that is meant."""
    known = [field.name for field in dataclasses.fields(GenerateOptions)]
    for name in given:
        if name not in known:
            choices = f": choose from {', '.join(known)}"
            hint = ours(name, known) or did_you_mean(name, known) or choices
            raise InputError(f"there is no option {name!r}{hint}")
