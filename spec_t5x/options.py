"""Options of decoding and the help of their flags; imports no JAX, so that ``--help`` is fast."""

import dataclasses
import functools
import math
import numbers
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spec_t5x import errors, registry
from spec_t5x.errors import InputError
from spec_t5x.names import AUTO, MOST_SEED, hint_for

if TYPE_CHECKING:
    from spec_t5x.sampling.distributions import Sampling
    from spec_t5x.verifiers import Verifier


def option(default: Any, help: str, kind: Any = None) -> Any:
    """Declares a field of a dataclass that a flag sets.

    Args:
      default: the field's default, which ``--help`` shows after ``help``.
      help: a noun phrase, which the API pages also show.
      kind: the flag's kind (``cli.settings.add_flags``); None takes the field's annotation. A
        repeatable flag's is ``[kind, flag]``, or ``[kind]`` if the field is the flag's plural.
    """
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind})


# Accepted types by annotation: NumPy's numbers, too. ``_check_lengths`` has gamma's message.
_NUMBERS = {
    int: numbers.Integral,
    float: numbers.Real,
    int | str: object,
    int | None: numbers.Integral | None,
    float | None: numbers.Real | None,
}

# Options that a checkpoint may set (``checkpoints.huggingface.generation_config``), with their
# values if neither the checkpoint nor the user sets them.
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
# Names in ``NEUTRAL`` that are not rules of decoding (``sampling.rules``).
NO_RULES = ("max_decode_len", "length_penalty", "early_stopping")
# Logits and larger biases leave the range of float32.
MOST_BIAS = 1e30
# Options that are lists of whole numbers.
_LISTS = ("widths", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
# Options that only a beam search has, and those that it does without.
OF_SEARCH = ("beam_alpha", "length_penalty", "early_stopping")
_OF_SAMPLING = ("temperature", "verifier", "lenience", "widths", "stop", "rescale_log_probs")


def _says_ours(cls: type) -> type:
    """Decorates a dataclass so that its constructor tells which option an unknown name means."""
    init, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked(self, *args, **given):
        for name in given:
            if name not in known:
                choices = f": choose from {', '.join(known)}"
                hint = hint_for(name, known) or errors.did_you_mean(name, known) or choices
                raise InputError(f"there is no option {name!r}{hint}")
        init(self, *args, **given)

    cls.__init__ = checked
    return cls


@_says_ours
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of decoding, with the same names on the command line, in gin and in Python."""

    gamma: int | str = option(
        AUTO,
        "tokens that the draft proposes in each iteration; 0 decodes without draft and verifier, "
        "auto chooses the fastest number",
    )
    temperature: float = option(0.0, "sampling temperature; 0 is argmax")
    top_k: int = option(0, "sample from the k likeliest tokens only; 0 keeps all")
    top_p: float = option(0.0, "sample from the likeliest tokens of this total mass; 0 keeps all")
    num_decodes: int = option(1, "outputs for each input")
    seed: int = option(
        0,
        "random seed; sampled outputs also depend on gamma, with auto on measured costs, unless "
        "the verifier is coupled",
    )
    max_decode_len: int | None = option(
        None, "maximum number of generated tokens (default: the checkpoint's, or 128)"
    )
    min_decode_len: int | None = option(
        None, "minimum number of tokens before an output ends (default: the checkpoint's, or 0)"
    )
    batch_size: int = option(1, "inputs decoded together; infer uses 16 unless it is given")
    beams: int = option(
        0, "hypotheses of a beam search, which returns the best num_decodes; 0 does not search"
    )
    beam_alpha: float = option(0.6, "exponent of the brevity penalty; more favours longer outputs")
    length_penalty: float | None = option(
        None,
        "rank hypotheses as transformers does, by log-probability over length to this power, not "
        "as T5X does (default: the checkpoint's, or T5X's ranking)",
    )
    early_stopping: bool | str | None = option(
        None,
        "with length_penalty, when a search ends: true with enough finished hypotheses, false once "
        "better ones are unlikely, never once impossible (default: the checkpoint's, or false)",
    )
    max_source_len: int | None = option(
        None,
        "maximum length of a source in tokens, end of sequence included, or of a decoder-only "
        "model's prompt (default: the checkpoint's, or 512)",
    )
    verifier: str = option("block", "rule that accepts drafted tokens", registry.names("verifier"))
    lenience: float = option(
        1.0,
        "below 1 the token verifier accepts more but is lossy: a token's probability grows by a "
        "factor of at most 1 / lenience; at temperature 0 those pass that are at least lenience "
        "times as likely as the likeliest (section A.5)",
    )
    widths: tuple = option(
        (), "with verifier multi or tree, number of tokens to propose at each position, such as 3,2"
    )
    stop: tuple | str = option(
        (),
        "end outputs before this text; repeatable. output_ids end with the token that completes "
        "it; counts and score include later tokens that were computed",
        ["TEXT", "stop"],
    )
    output_prefix: str = option("", "text that outputs of an encoder-decoder begin with", "TEXT")
    repetition_penalty: float | None = option(
        None,
        "above 1 makes tokens in the output so far less likely (default: the checkpoint's, or 1)",
    )
    no_repeat_ngram_size: int | None = option(
        None, "length of n-grams that may not repeat; 0 is off (default: the checkpoint's, or 0)"
    )
    suppress_tokens: tuple | None = option(
        None, "ids that are never generated, such as 3,4 (default: the checkpoint's)"
    )
    begin_suppress_tokens: tuple | None = option(
        None, "ids that are not generated first (default: the checkpoint's)"
    )
    forced_bos_token_id: int | None = option(
        None, "id that is always generated first; -1 forces none (default: the checkpoint's)"
    )
    forced_eos_token_id: tuple | None = option(
        None, "ids, one of which ends outputs that reach max_decode_len (default: the checkpoint's)"
    )
    bad_words_ids: tuple | None = option(
        None,
        "ids that are never generated in this order; repeatable (default: the checkpoint's)",
        [tuple, "bad_words_ids"],
    )
    # Pairs (ids, bias): the bias is added to the logit of the last id where the others precede
    # it. None takes the checkpoint's.
    sequence_bias: tuple | None = None
    truncate: bool = option(
        False, "cut inputs that are too long: sources at their end, prompts at their beginning"
    )
    rescale_log_probs: bool = option(
        False, "score outputs by probabilities after temperature, top_k and top_p (T5X's default)"
    )

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_types(self)
        self._check()

    def _check(self) -> None:
        self._check_lengths()
        self._check_ids()
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        biased = [ids for ids, _ in self.sequence_bias or ()]
        errors.check_rules(penalty, bad_words_ids=self.bad_words_ids or (), sequence_bias=biased)
        # Called because they check their arguments.
        self.sampling()
        self.make_verifier()
        if not self.temperature:
            errors.check_unused(
                self, "temperature 0, which takes the likeliest token", "top_k", "top_p"
            )
        self._check_texts()
        self._check_search()
        if (gamma := self.gamma) != AUTO and 0 < gamma < len(self.widths):
            raise InputError(
                f"gamma is {gamma} and widths are {self.widths}: give at most {gamma} widths"
            )

    def _check_lengths(self) -> None:
        gamma, most, limit = self.gamma, 2**30, self.max_decode_len
        # If it is None, the limit is the checkpoint's, for which ``BatchDecoder.check`` calls this.
        length = most if limit is None else limit
        sizes = {"num_decodes": self.num_decodes, "batch_size": self.batch_size}
        # Their sums and roundings have to fit in 32 bits.
        errors.check_numbers(1, most, max_decode_len=length, **sizes)
        errors.check_at_least(self, beams=0, min_decode_len=0, no_repeat_ngram_size=0)
        errors.check_at_least(self, max_source_len=2, forced_bos_token_id=-1)
        is_whole = errors.is_number(gamma, numbers.Integral)
        if gamma != AUTO and not (is_whole and 0 <= gamma <= length):
            beside = "" if limit is None else f" and max_decode_len {limit}"
            raise InputError(
                f"gamma is {gamma!r}{beside}: give a whole number from 0 (plain decoding) to "
                f"max_decode_len, or {AUTO} for the fastest"
            )
        if (self.min_decode_len or 0) > length:
            raise InputError(
                f"min_decode_len is {self.min_decode_len} and outputs have at most {length} "
                "tokens: give a larger max_decode_len"
            )

    def _check_texts(self) -> None:
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise InputError(f"stop is {string!r}: give texts of at least one character")
        for name in ("stop", "output_prefix"):
            errors.check_unicode(name, "".join(getattr(self, name)))
        if self.output_prefix and self.forced_bos_token_id != -1:
            errors.check_unused(self, "an output_prefix comes first", "forced_bos_token_id")

    def _check_search(self) -> None:
        """Raises ``InputError`` for options that a beam search has not, or that only one has."""
        beams, num_decodes = self.beams, self.num_decodes
        if not 0 <= self.beam_alpha < math.inf:
            raise InputError(f"beam_alpha is {self.beam_alpha}: give a finite number from 0")
        if not math.isfinite(self.length_penalty or 0):
            raise InputError(f"length_penalty is {self.length_penalty}: give a finite number")
        if self.early_stopping is not None:
            errors.check_choice("early_stopping", self.early_stopping, (True, False, "never"))
        if beams:
            errors.check_unused(self, f"beams {beams}, a search that ignores it", *_OF_SAMPLING)
        else:
            errors.check_unused(self, "beams 0, which does not search", *OF_SEARCH)
        if beams and num_decodes > beams:
            raise InputError(f"num_decodes is {num_decodes} and beams {beams}: give more beams")
        if not beams and num_decodes > 1 and self.sampling().greedy:
            raise InputError(
                f"num_decodes is {num_decodes}, temperature {self.temperature} and top_k "
                f"{self.top_k}, which gives one text: sample, or give beams"
            )

    def _check_ids(self) -> None:
        """Raises ``InputError`` unless ids and widths are whole numbers in lists of their depth."""
        pairs = self.sequence_bias or ()
        for pair in pairs:
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            if not (is_pair and errors.is_number(pair[1]) and abs(pair[1]) <= MOST_BIAS):
                raise InputError(f"sequence_bias has {pair!r}: give pairs (ids, number up to 1e30)")
        lists = {name: (getattr(self, name) or (),) for name in _LISTS}
        lists |= {"bad_words_ids": self.bad_words_ids or (), "sequence_bias": [p[0] for p in pairs]}
        for name, several in lists.items():
            for ids in several:
                if not (isinstance(ids, tuple) and all(map(_is_id, ids))):
                    raise InputError(f"{name} has {ids!r}: give a list of whole numbers from 0")

    @property
    def repeats(self) -> bool:
        """True if outputs do not depend on how many tokens are proposed in each iteration."""
        verifier = self.make_verifier()
        return self.sampling().greedy and not verifier.lossy or verifier.coupled

    def settled(self, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options in ``NEUTRAL``: as set here, else by the checkpoint, else neutral."""
        given = {name: getattr(self, name) for name in NEUTRAL}
        return {
            name: of_checkpoint.get(name, NEUTRAL[name]) if value is None else value
            for name, value in given.items()
        }

    def make_verifier(self) -> "Verifier":
        """Makes the verifier that ``verifier``, ``lenience`` and ``widths`` describe."""
        from spec_t5x.verifiers import verifier

        return verifier(self.verifier, lenience=self.lenience, widths=self.widths)

    def sampling(self) -> "Sampling":
        """Returns temperature, top-k and top-p as the loops' settings, without rules."""
        return _sampling(self.temperature, self.top_k, self.top_p)


def check_types(options: Any) -> None:
    """Raises ``InputError`` for a wrong type, seed or size; converts values as ``_plain`` does."""
    for field in dataclasses.fields(options):
        # gin passes any value that a file binds, and lists for tuples.
        value = _plain(getattr(options, field.name))
        object.__setattr__(options, field.name, value)
        kind = _NUMBERS.get(field.type, field.type)
        is_boolean = isinstance(value, bool) and kind not in (field.type, object)
        if is_boolean or not isinstance(value, kind):
            wanted = getattr(field.type, "__name__", field.type)
            raise InputError(f"{field.name} is {value!r}: give a value of type {wanted}")
        if field.name == "seed":
            errors.check_numbers(0, MOST_SEED, seed=value)
        # JAX converts no larger ones to 32 bits. Infinity has its option's own message.
        most = 3e38 if field.type in (float, float | None) else 2**63 - 1
        if isinstance(value, int | float) and most < abs(value) < math.inf:
            raise InputError(f"{field.name} is {value}: give a number of at most {most}")


def _is_id(value: Any) -> bool:
    return errors.is_number(value, numbers.Integral) and value >= 0


def _plain(value):
    """Converts nested lists and ranges to tuples, NumPy numbers to Python's, and paths to str."""
    if isinstance(value, list | tuple | range):
        return tuple(_plain(each) for each in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


# Cached, because making the device array in it takes longer than decoding a token.
@functools.lru_cache
def _sampling(*settings) -> "Sampling":
    errors.check_jax()
    import jax

    from spec_t5x.sampling.distributions import sampling

    # Options may be made where a function is traced, but other calls use the arrays, too.
    with jax.ensure_compile_time_eval():
        return sampling(*settings)


def options_with(options: GenerateOptions | None, changes: dict) -> GenerateOptions:
    """Returns ``options``, or the defaults if None, with the values in ``changes`` by name."""
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise InputError(f"options are {options!r}: give GenerateOptions(…), or options by name")
    return dataclasses.replace(options, **changes)
