"""What a run is set up with: the names are those of the command line and of gin."""

import dataclasses
import functools
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from spec_t5x.errors import InputError, check_at_least, did_you_mean
from spec_t5x.generation.batches import bucket
from spec_t5x.names import AUTO, ours
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.verifiers import Verifier, verifier

# numpy's count as well; a gamma that is neither number nor word has a message of its own.
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
# Those of them that are rules of decoding, by their names in ``sampling.rules``.
_RULES = {"min_decode_len": "min_length"} | {
    name: name
    for name in (
        *("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("bad_words_ids", "sequence_bias"),
    )
}

# Options that decide what a step costs.
_COSTLY = (
    "batch_size",
    "max_decode_len",
    "no_repeat_ngram_size",
    "num_decodes",
    "repetition_penalty",
    "rescale_log_probs",
    "top_k",
    "top_p",
    "verifier",
    "widths",
)


def _says_ours(cls: type) -> type:
    """A dataclass whose constructor refuses a name that is no field's as ``_check_names`` does."""
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
    """Settings of a run. The names are those of the command line and of gin."""

    # Tokens that the draft proposes in each iteration; 0 is plain decoding. "auto" is as many
    # as pay where and when it decodes, none where none do (``loops/pace.py``).
    gamma: int | str = AUTO
    # 0 is argmax. At most one of top_k and top_p, 0 for none.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    # Sequences for each input.
    num_decodes: int = 1
    seed: int = 0
    # Tokens generated at most; None takes the checkpoint's, or 128.
    max_decode_len: int | None = None
    # Inputs decoded together.
    batch_size: int = 1
    # Longest source in tokens, end of sequence included; None takes the checkpoint's. Of a
    # decoder alone, the longest prompt; None is what its positions leave room for.
    max_source_len: int | None = None
    # Cut longer sources at their end, longer prompts at their beginning, instead of refusing
    # them.
    truncate: bool = False
    # Scores under the sampled distribution instead of the model's own.
    rescale_log_probs: bool = False
    # Which drafts to keep, by name (``verifiers.VERIFIERS``).
    verifier: str = "block"
    # Below 1 the token verifier is lossy: no token comes with more than 1 / lenience
    # times its probability (section A.5).
    lenience: float = 1.0
    # Beam search with this many hypotheses, at temperature 0; 0 does not search. The
    # best ``num_decodes`` of them are returned.
    beams: int = 0
    # Exponent of the brevity penalty: larger values prefer longer texts.
    beam_alpha: float = 0.6
    # In place of it transformers' rules for a search: a score is the log-probability divided by
    # the generated tokens to this power, and the search is over with its first ``beams`` finished
    # hypotheses (True), when better ones are unlikely (False) or impossible ("never"). None takes
    # the checkpoint's.
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    # Rules of decoding (``sampling/rules.py``), for draft and target alike; None takes the
    # checkpoint's. Tokens are ids as ``Generation.output_ids`` has them.
    # Tokens generated before one may end the output.
    min_decode_len: int | None = None
    # Above 1 makes tokens less likely that the output has; 1 is none.
    repetition_penalty: float | None = None
    # So many tokens come only once in the same order; 0 for no such rule.
    no_repeat_ngram_size: int | None = None
    # Tokens that never come, and those that do not come first.
    suppress_tokens: tuple | None = None
    begin_suppress_tokens: tuple | None = None
    # The first token, -1 for any; and the last ones, of outputs that reach ``max_decode_len``.
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple | None = None
    # Texts that never come, each a tuple of tokens.
    bad_words_ids: tuple | None = None
    # Pairs of such a text and what is added to the logit of its last token.
    sequence_bias: tuple | None = None
    # What every output of an encoder-decoder begins with.
    output_prefix: str = ""
    # Drafts for the next places of the verifiers ``multi`` and ``tree``; () for the usual.
    widths: tuple = ()
    # Texts of which the first that appears ends the output, which is what stands before it; ids
    # go up to the one that completes it. What was computed beyond is left out, but counts and
    # score are of all that was computed. A single text may stand for itself.
    stop: tuple | str = ()

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("widths", "stop", *_RULES):
            if isinstance(value := getattr(self, name), list | tuple):
                # gin's sequences.
                object.__setattr__(self, name, _tuples(value))
        for field in dataclasses.fields(self):
            # gin hands over whatever a file binds.
            value = getattr(self, field.name)
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
        # They check what they are made of.
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
        if beams and self.stop:
            raise InputError(
                f"beams is {beams} and stop {self.stop}: a beam search ends no output early; "
                "leave one of them out"
            )
        if beams < 0:
            raise InputError(f"beams is {beams}: give at least 0 (0 does not search)")
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
        """Whether texts are the same whatever is drafted when."""
        return self.sampling().greedy or self.make_verifier().coupled

    @property
    def costly(self) -> dict[str, Any]:
        """What decides how long a step takes, as JSON can hold it."""
        values = {name: getattr(self, name) for name in _COSTLY}
        # Programs are shared by limits that are near one another.
        room = self.max_decode_len and bucket(self.max_decode_len, sys.maxsize)
        return values | {"greedy": self.sampling().greedy, "max_decode_len": room}

    def settled(self, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The options that a checkpoint may set, with its values where they are None."""
        given = {name: getattr(self, name) for name in NEUTRAL}
        return {
            name: of_checkpoint.get(name, NEUTRAL[name]) if value is None else value
            for name, value in given.items()
        }

    def without_open(self, of_checkpoint: Mapping[str, Any]) -> "GenerateOptions":
        """The same options with a checkpoint's values in place of None."""
        return dataclasses.replace(self, **self.settled(of_checkpoint))

    def rules(self, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``sampling.rules.rules`` for these options; hashable values."""
        settled = self.settled(of_checkpoint)
        values = {theirs: settled[ours] for ours, theirs in _RULES.items()}
        if values["forced_bos_token_id"] < 0:
            values["forced_bos_token_id"] = None
        return values

    def make_verifier(self) -> Verifier:
        """Which drafts to keep."""
        return verifier(self.verifier, lenience=self.lenience, widths=self.widths)

    def sampling(self) -> Sampling:
        """The distribution to sample from."""
        return _sampling(self.temperature, self.top_k, self.top_p)


def _tuples(value):
    """Sequences as tuples, those in them, too."""
    if isinstance(value, list | tuple):
        return tuple(_tuples(each) for each in value)
    return value


# Kept: it holds a device array, which takes longer to make than a token.
_sampling = functools.lru_cache(sampling)


def options_with(options: GenerateOptions | None, changes: dict) -> GenerateOptions:
    """The options, None for the usual ones, with the changes, each by its name."""
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise InputError(
            f"options are {options!r}: give GenerateOptions(…), or single ones by name"
        )
    _check_names(changes)
    return dataclasses.replace(options, **changes)


def _check_names(given: Iterable[str]) -> None:
    """Raises ``InputError`` for a name that is no option's, and says which one is meant."""
    known = [field.name for field in dataclasses.fields(GenerateOptions)]
    for name in given:
        if name not in known:
            hint = (
                ours(name, known)
                or did_you_mean(name, known)
                or f": choose from {', '.join(known)}"
            )
            raise InputError(f"there is no option {name!r}{hint}")
