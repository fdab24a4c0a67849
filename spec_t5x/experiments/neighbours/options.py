"""What the comparison with other implementations is to measure."""

import dataclasses

from spec_t5x.errors import InputError
from spec_t5x.experiments.floor import usable_threads
from spec_t5x.experiments.synthetic_acceptance import SyntheticVerifier
from spec_t5x.experiments.text_source import TextSource
from spec_t5x.models.sizes import size

# The run's own draft with the default verifier.
OWN_DRAFT = ("draft/own",)
IMPLEMENTATIONS = ("transformers", "ctranslate2", "t5x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursOptions(TextSource):
    """A pair of checkpoints with real inputs, or published sizes with random weights.

    Without a file or a task the inputs are sentences that come with the package.
    """

    # The first that the encoder takes, and how often all of them are decoded.
    num_inputs: int = 20
    repeats: int = 5
    # Our own rows: ``DRAFT/VERIFIER`` pairs, as of ``BenchmarkOptions``, each with every gamma.
    pairs: tuple = OWN_DRAFT
    gammas: tuple = (4,)
    # The others; what is not installed is a line that says so.
    implementations: tuple = IMPLEMENTATIONS
    # Processors and threads of each; None takes all that this process may run on.
    threads: int | None = None
    # Names of ``models.sizes``, of random weights, instead of the pair. One of ``draft_size``
    # then drafts, verdicts are drawn with ``alpha``, and of inputs there is one.
    sizes: tuple = ()
    draft_size: str = "t5_1_1_small"
    alpha: float = 0.75
    source_len: int = 64
    target_len: int = 64
    seed: int = 0
    # First each method in a process of its own, for its compile time and its memory.
    alone: bool = True
    # Between two calls, for threads that still spin.
    settle_seconds: float = 0.02

    def __post_init__(self):
        for name in ("pairs", "gammas", "implementations", "sizes"):
            value = getattr(self, name)
            # gin's sequences.
            object.__setattr__(self, name, tuple(value))
        for name in ("num_inputs", "repeats", "source_len", "target_len"):
            self._check_number(name, getattr(self, name))
        for gamma in self.gammas:
            self._check_number("gamma", gamma)
        if self.threads is not None:
            self._check_number("threads", self.threads)
            if self.threads > usable_threads():
                raise InputError(
                    f"threads is {self.threads} and this process may use {usable_threads()}: "
                    "lower it"
                )
        self._check_names()
        SyntheticVerifier(alpha=self.alpha)
        if self.settle_seconds < 0:
            raise InputError(f"settle_seconds is {self.settle_seconds}: give at least 0")

    @property
    def num_threads(self) -> int:
        """Of every implementation."""
        return usable_threads() if self.threads is None else self.threads

    def _check_names(self) -> None:
        for pair in self.pairs:
            if "/" not in str(pair):
                raise InputError(f"pair {pair!r}: write DRAFT/VERIFIER")
        for name in self.implementations:
            if name not in IMPLEMENTATIONS:
                raise InputError(
                    f"implementation {name!r}: choose among {', '.join(IMPLEMENTATIONS)}"
                )
        if not self.sizes:
            return
        if self.data or self.mixture_or_task:
            raise InputError(
                f"sizes are {', '.join(self.sizes)} and data {self.data or self.mixture_or_task}: "
                "random weights read no text, leave one of them out"
            )
        if self.pairs != OWN_DRAFT:
            raise InputError(
                f"sizes are {', '.join(self.sizes)} and pairs {self.pairs}: sizes have draft_size "
                "for their draft, leave pairs out"
            )
        for name in self.sizes:
            if size(name).vocab_size != size(self.draft_size).vocab_size:
                raise InputError(
                    f"draft_size {self.draft_size} has {size(self.draft_size).vocab_size} tokens "
                    f"and {name} {size(name).vocab_size}: choose a draft of its family"
                )

    def _check_number(self, name: str, value) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} is {value!r}: give at least 1")
