"""Drafts that did not pay before: loaded only once that cannot cost much.

A process that decodes for seconds spends more on loading a draft than the draft wins back. What
one process learned of a draft, the next one reads before it loads anything. Unless speculation was
clearly faster than plain decoding, the draft is loaded after so many plain steps that loading it
takes the pace's tolerance of their time, and is then looked at like any other.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spec_t5x.checkpoints.fingerprints import fingerprint
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.generation.generate_options import GenerateOptions
from spec_t5x.interfaces import Draft
from spec_t5x.loops.pace import TOLERANCE, Costs, Pace
from spec_t5x.names import AUTO
from spec_t5x.tuning import costs
from spec_t5x.tuning.identity import identity
from spec_t5x.tuning.store import Store

# Speculation from this factor on wins back what loading takes within seconds.
_CLEARLY = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What a process learned of a draft at some options."""

    costs: Costs
    # Tokens of the best iteration over its cost in plain steps, at the rates of acceptance last
    # counted; 0 where none can be enough.
    factor: float = math.inf
    # How often a first draft was accepted; None where none was tried.
    rate: float | None = None
    # Seconds that loading the draft took, and making or loading the program with it.
    loading: float = 0.0
    # Drafts per iteration for all of a run, where texts depend on when they are drafted; None
    # where they do not, and the pace decides.
    gamma: int | None = None

    @property
    def plain_steps(self) -> int:
        """To take before the draft is loaded; 0 where it pays from the start."""
        if self.factor >= _CLEARLY or not self.costs.step:
            return 0
        return math.ceil(self.loading / (TOLERANCE * self.costs.step))

    @property
    def verdict(self) -> str:
        """Why the draft was not loaded."""
        seen = "" if self.rate is None else f", and before {self.rate:.0%} of first tokens were"
        return f"the draft was left out: {self.costs.where_it_pays}{seen}"

    @classmethod
    def parse(cls, values: Any) -> "Learned":
        """What ``dataclasses.asdict`` gave, after JSON."""
        return cls(**{**values, "costs": Costs.parse(values["costs"])})


class Memory:
    """What is known of a draft at some options, here and in the user's cache."""

    def __init__(self, key: Mapping[str, Any], learned: Learned | None = None):
        """``learned`` is known; None takes what the user's cache has for ``key``."""
        self._key, self._store = key, Store.of_user()
        if learned is None:
            learned = self._store.load(key, Learned.parse)
            if learned is not None and costs.outdated(learned.costs):
                learned = None
        self.learned = learned
        # Plain steps that texts took while the draft was not loaded.
        self.steps = 0
        # What makes the draft, and the generator with it once it is loaded.
        self.make: Callable[[], Draft] | None = None
        self.generator: Any = None
        self._loading = 0.0

    @classmethod
    def of(
        cls, models: Models, options: GenerateOptions, learned: Learned | None = None
    ) -> "Memory | None":
        """The memory of a pair; None where its draft is to be loaded whatever is known.

        That is at a fixed gamma, and where drafts decide which of the possible texts are drawn.
        ``learned`` is as above.
        """
        draft = models.draft_name()
        if draft is None or options.gamma != AUTO or options.beams or not options.repeats:
            return None
        names = {"target": models.target, "draft": draft, "vocabulary": models.vocabulary}
        content = {role: fingerprint(name)["content"] for role, name in names.items()}
        key = identity(
            models=dataclasses.asdict(models) | content,
            options=options.costly | {"max_source_len": options.max_source_len},
        )
        return cls(key, learned)

    @property
    def steps_left(self) -> int:
        """Plain steps to take before the draft is loaded."""
        if self.learned is None:
            return 0
        return max(self.learned.plain_steps - self.steps, 0)

    def load(self) -> Draft:
        """The draft; what making it takes is remembered."""
        start = time.perf_counter()
        draft = self.make()
        self._loading = time.perf_counter() - start
        return draft

    def keep(self, measured: Costs, pace: Pace | None, program_seconds: float) -> None:
        """Tells later processes what was learned; without a pace, that no draft can pay.

        ``program_seconds`` is what making or loading programs with the draft took.
        """
        factor, rate = 0.0, None
        if pace is not None:
            pace = jax.device_get(pace)
            factor = float(max(pace.factors))
            rate = float(pace.rates[0]) if pace.iterations else None
        loading = self._loading + program_seconds
        learned = Learned(costs=measured, factor=factor, rate=rate, loading=loading)
        self._store.save(self._key, dataclasses.asdict(learned))
