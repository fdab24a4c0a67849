"""What to tune with: how much is measured, and how sure one wants to be."""

import dataclasses

from spec_t5x.errors import InputError

MAX_GAMMA = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Settings of the measurements and of the choice."""

    # Seconds of timing for each batch size; compiling, and looking at acceptance, come on top.
    budget: float = 20.0
    # Inputs that acceptance is taken from at most, and the largest gamma looked at.
    num_inputs: int = 32
    max_gamma: int = MAX_GAMMA
    # Those whose verification is timed besides the probes, 1 and the largest; in between lies
    # a straight line. Each takes a program.
    timed_gammas: tuple[int, ...] = (2, 4, 5, 11)
    # The gammas that whole texts are decoded with, for the overhead of the loop: around those
    # that mostly turn out best. Each takes a program.
    probes: tuple[int, ...] = (1, 3, 7)
    # Of the intervals, made of so many resamples of inputs and of timings.
    confidence: float = 0.95
    resamples: int = 400
    seed: int = 0
    # The lower end of a predicted speed-up must be above 1 by as much to be chosen.
    margin: float = 0.05

    def __post_init__(self):
        for name in ("num_inputs", "max_gamma", "resamples"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}: give a whole number from 1")
        for name in ("timed_gammas", "probes"):
            for gamma in getattr(self, name):
                if not isinstance(gamma, int) or gamma < 1:
                    raise InputError(f"{name} hold {gamma!r}: give whole numbers from 1")
        if not self.probes:
            raise InputError("probes are empty: give at least one gamma")
        if not isinstance(self.budget, int | float) or not 0 < self.budget < float("inf"):
            raise InputError(f"budget is {self.budget!r}: give seconds, more than 0")
        if not isinstance(self.confidence, float) or not 0 < self.confidence < 1:
            raise InputError(f"confidence is {self.confidence!r}: give a number between 0 and 1")
        if not isinstance(self.margin, int | float) or not 0 <= self.margin < 1:
            raise InputError(f"margin is {self.margin!r}: give a number from 0, below 1")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"seed is {self.seed!r}: give a whole number from 0")


# Of ``--gamma auto``, which stands between a user and the first text.
QUICK = TuningOptions(budget=8.0, num_inputs=8, timed_gammas=(2, 8), probes=(1, 4))
