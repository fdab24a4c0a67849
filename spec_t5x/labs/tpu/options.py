"""Options of ``compile-tpu``: models, shapes, verifiers and chips to compile for."""

import dataclasses

from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.random_models import check_vocabulary
from spec_t5x.labs.tpu.programs import Workload
from spec_t5x.labs.training.first_head import head_config
from spec_t5x.models.sizes import size
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, KV, WEIGHTS
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.verifiers import DEFAULT_WIDTHS, Verifier, verifier

# Acceptance rates for which a pair's speed-up is shown.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Tokens per target call for which a tree's speed-up is shown, unless others are given.
BLOCK_EFFICIENCIES = (2.5, 3.0, 3.5, 4.0, 4.5)
VERIFIERS = ("token", "block", *DEFAULT_WIDTHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Models, shapes and chips to compile for."""

    topology: str = "v4:2x2x1"
    # Names of ``models.sizes``. A draft may also be the target in "int8" or "int4", or an EAGLE
    # head of its last layer: "eagle", or "eagle:WIDTH" for a narrower one.
    target: str = paper_tables.TARGET
    drafts: tuple[str, ...] = ("t5_1_1_small",)
    # Type of the target's weights; "auto" is bfloat16. Drafts of other sizes are in bfloat16.
    weights: str = AUTO
    # Type of the source's keys and values in the target's cache; "auto" is bfloat16.
    kv: str = AUTO
    # Drafts of an iteration, or a tree's depth.
    gamma: int = 7
    # One of ``VERIFIERS``, and the widths (``TreeVerifier.widths``) of each tree to compile for.
    verifier: str = "block"
    widths: tuple[tuple[int, ...], ...] = ()
    # Tokens per target call to predict a tree's speed-up for; empty takes ``BLOCK_EFFICIENCIES``.
    block_efficiencies: tuple[float, ...] = ()
    # Whether to leave out the whole loops, whose memory is then not known.
    steps_only: bool = False
    # Meshes to compile for: the number of chips along the axes (data, model).
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    work: Workload = Workload()

    def __post_init__(self):
        of_sizes = [name for name in self.drafts if name not in BITS and not is_head(name)]
        check_vocabulary(self.target, of_sizes)
        for name in filter(is_head, self.drafts):
            head_config(size(self.target), (0,), head_width(name))
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("kv", self.kv, KV)
        check_at_least(self, gamma=1)
        self._check_trees()
        check_at_least(self.work, batch=1, source_len=1, max_decode_len=1)
        for data, model in self.meshes:
            if data < 1 or model < 1:
                raise InputError(f"mesh {data},{model}: give at least 1 for each axis")
            if self.work.batch % data:
                raise InputError(
                    f"batch {self.work.batch} does not divide over {data} replicas: give a "
                    f"multiple of {data}"
                )

    @property
    def verifiers(self) -> tuple[Verifier, ...]:
        """The verifier of chains, or one of each tree."""
        return tuple(verifier(self.verifier, widths=each) for each in self.widths or ((),))

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The trees to compile for; empty if the verifier is one of chains."""
        trees = (each.tree(self.gamma) for each in self.verifiers)
        return tuple(tree for tree in trees if tree is not None)

    @property
    def tokens_per_call(self) -> tuple[float, ...]:
        """The block efficiencies to predict for, none above what a tree can reach."""
        most = self.gamma + 1
        reached = tuple(each for each in BLOCK_EFFICIENCIES if each <= most)
        return self.block_efficiencies or reached or (float(most),)

    def _check_trees(self) -> None:
        check_choice("verifier", self.verifier, VERIFIERS)
        rounded = [name for name in self.drafts if name in BITS]
        if self.trees and rounded:
            raise InputError(
                f"draft {rounded[0]} proposes no trees: give a model or an EAGLE head, or "
                "verifier block"
            )
        if self.block_efficiencies and not self.trees:
            raise InputError(
                f"block efficiency is {self.block_efficiencies[0]:g} and verifier "
                f"{self.verifier!r}: give tree (widths of 1 are a chain)"
            )
        for tokens in self.block_efficiencies:
            if not 1 <= tokens <= self.gamma + 1:
                raise InputError(
                    f"block efficiency is {tokens:g}: give 1 to {self.gamma + 1}, the most tokens "
                    f"that a tree of depth {self.gamma} appends"
                )


def is_head(draft: str) -> bool:
    """Returns True for the name of an EAGLE head, "eagle" or "eagle:WIDTH"."""
    return draft.partition(":")[0] == "eagle"


def head_width(draft: str) -> int | None:
    """Returns the width in "eagle:WIDTH"; None for "eagle", a head as wide as the target."""
    _, _, width = draft.partition(":")
    if width and not width.isdigit():
        raise InputError(f"draft {draft!r}: give eagle, or eagle:WIDTH such as eagle:1024")
    return int(width) if width else None
