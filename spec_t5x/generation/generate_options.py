"""What a run is set up with: the names are those of the command line and of gin."""

import dataclasses
import functools
import numbers
from typing import Any

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.names import AUTO
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.verifiers import Verifier, verifier

# numpy's count as well; a gamma that is neither number nor word has a message of its own.
_NUMBERS = {int: numbers.Integral, float: numbers.Real, int | str: object}

# Options that decide what a step costs.
_COSTLY = (
    "batch_size",
    "max_decode_len",
    "num_decodes",
    "rescale_log_probs",
    "top_k",
    "top_p",
    "verifier",
    "widths",
)


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
    # Tokens generated at most.
    max_decode_len: int = 128
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
    # Drafts for the next places of the verifiers ``multi`` and ``tree``; () for the usual.
    widths: tuple = ()
    # Texts of which the first that appears ends the output, which is what stands before it; ids
    # go up to the one that completes it. What was computed beyond is left out, but counts and
    # score are of all that was computed. A single text may stand for itself.
    stop: tuple | str = ()

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("widths", "stop"):
            if isinstance(value := getattr(self, name), list):
                # gin's sequences.
                object.__setattr__(self, name, tuple(value))
        for field in dataclasses.fields(self):
            # gin hands over whatever a file binds.
            value = getattr(self, field.name)
            if not isinstance(value, _NUMBERS.get(field.type, field.type)):
                wanted = getattr(field.type, "__name__", field.type)
                raise InputError(f"{field.name} is {value!r}: give a value of type {wanted}")
        self._check()

    def _check(self) -> None:
        gamma, length, beams = self.gamma, self.max_decode_len, self.beams
        check_at_least(self, num_decodes=1, max_decode_len=1, batch_size=1, max_source_len=2)
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
        return values | {"greedy": self.sampling().greedy}

    def make_verifier(self) -> Verifier:
        """Which drafts to keep."""
        return verifier(self.verifier, lenience=self.lenience, widths=self.widths)

    def sampling(self) -> Sampling:
        """The distribution to sample from."""
        return _sampling(self.temperature, self.top_k, self.top_p)


# Kept: it holds a device array, which takes longer to make than a token.
_sampling = functools.lru_cache(sampling)


def options_with(options: GenerateOptions | None, changes: dict) -> GenerateOptions:
    """The options, None for the usual ones, with the changes, each by its name."""
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise InputError(
            f"options are {options!r}: give GenerateOptions(…), or single ones by name"
        )
    known = [field.name for field in dataclasses.fields(options)]
    for name in changes:
        if name not in known:
            raise InputError(f"there is no option {name!r}: choose from {', '.join(known)}")
    return dataclasses.replace(options, **changes)
