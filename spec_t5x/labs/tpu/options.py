"""Options of ``compile-tpu``: models, shapes, verifiers and chips, in a module without JAX."""

import dataclasses
from typing import TYPE_CHECKING

from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.names import AUTO, INT4, INT8, KV, WEIGHTS
from spec_t5x.options import option

if TYPE_CHECKING:
    from spec_t5x.sampling.tree_shapes import Tree
    from spec_t5x.verifiers import Verifier

# Acceptance rates for which a pair's speed-up is shown.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Tokens per target call for which a tree's speed-up is shown, unless others are given.
BLOCK_EFFICIENCIES = (2.5, 3.0, 3.5, 4.0, 4.5)
VERIFIERS = ("token", "block", "multi", "tree")
# Drafts that are the target in fewer bits.
_ROUNDED = (INT8, INT4)
# EAGLE heads, as wide as the target or of a given width.
_HEAD = "eagle"
_HEADS = (_HEAD, f"{_HEAD}:WIDTH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Shapes of the batch that is decoded."""

    batch: int = option(1, "rows of the batch, over all replicas")
    # Padding included.
    source_len: int = option(512, "length of the source in tokens")
    # Caches have room for them.
    max_decode_len: int = option(128, "maximum length of the output in tokens")
    # Says whether tokens are decoded at temperature 0, rather than sampled.
    greedy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Models, shapes and chips to compile for."""

    topology: str = option(
        "v4:2x2x1", "TPU slice of v4, v5e, v5p or v6e, such as v6e:2x2", "CHIP:LAYOUT"
    )
    # Sizes are names of ``models.sizes``.
    target: str = option(paper_tables.TARGET, "published size of the target", "SIZE")
    # Drafts of other sizes are in bfloat16.
    weights: str = option(AUTO, "type of the target's weights; auto is bfloat16", WEIGHTS)
    kv: str = option(AUTO, "type of the source's keys and values; auto is bfloat16", KV)
    # An EAGLE head reads the states of the target's last layer.
    drafts: tuple[str, ...] = option(
        ("t5_1_1_small",),
        "published size of the draft; or int8 or int4 (the target's weights rounded), "
        f"{' or '.join(_HEADS)} (a head); repeatable",
        ["SIZE"],
    )
    gamma: int = option(7, "tokens proposed in an iteration, or a tree's depth")
    verifier: str = option(
        "block",
        "verifier; multi and tree are of trees, which transformers and heads propose",
        VERIFIERS,
    )
    # ``TreeVerifier.widths`` of each tree to compile for.
    widths: tuple[tuple[int, ...], ...] = option(
        (),
        "with verifier multi or tree, number of tokens to propose at each position, such as 3,2; "
        "repeatable",
        [tuple, "widths"],
    )
    # Empty takes ``BLOCK_EFFICIENCIES``.
    block_efficiencies: tuple[float, ...] = option(
        (),
        "tokens per target call to predict a tree's speed-up for; repeatable (default: 2.5, 3, "
        "3.5, 4 and 4.5)",
        [float, "block_efficiency"],
    )
    steps_only: bool = option(
        False, "leave out the whole loops and their memory, which takes minutes less"
    )
    # Meshes to compile for: the number of chips along the axes (data, model).
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    work: Workload = Workload()

    def __post_init__(self):
        self._check_drafts()
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
    def verifiers(self) -> "tuple[Verifier, ...]":
        """The verifier of chains, or one of each tree."""
        from spec_t5x.verifiers import verifier

        return tuple(verifier(self.verifier, widths=each) for each in self.widths or ((),))

    @property
    def trees(self) -> "tuple[Tree, ...]":
        """The trees to compile for; empty if the verifier is one of chains."""
        trees = (each.tree(self.gamma) for each in self.verifiers)
        return tuple(tree for tree in trees if tree is not None)

    @property
    def tokens_per_call(self) -> tuple[float, ...]:
        """The block efficiencies to predict for, none above what a tree can reach."""
        most = self.gamma + 1
        reached = tuple(each for each in BLOCK_EFFICIENCIES if each <= most)
        return self.block_efficiencies or reached or (float(most),)

    def _check_drafts(self) -> None:
        from spec_t5x.labs.benchmark.random_models import check_vocabulary
        from spec_t5x.labs.training.first_head import head_config
        from spec_t5x.models.sizes import known_sizes, size

        of_sizes = [name for name in self.drafts if name not in _ROUNDED and not is_head(name)]
        for name in of_sizes:
            check_choice("the draft's size", name, (*known_sizes(), *_ROUNDED, *_HEADS))
        check_vocabulary(self.target, size(self.target).vocab_size, of_sizes)
        for name in filter(is_head, self.drafts):
            head_config(size(self.target), (0,), head_width(name))

    def _check_trees(self) -> None:
        check_choice("verifier", self.verifier, VERIFIERS)
        rounded = [name for name in self.drafts if name in _ROUNDED]
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
    """Tells whether a draft's name is that of an EAGLE head."""
    return draft.partition(":")[0] == _HEAD


def head_width(draft: str) -> int | None:
    """Returns the width in a head's name; None for a head as wide as the target."""
    _, _, width = draft.partition(":")
    if width and not width.isdigit():
        raise InputError(f"draft {draft!r}: give {', or '.join(_HEADS)} such as {_HEAD}:1024")
    return int(width) if width else None
