"""Static trees of drafts: several proposals for one position, verified in one call."""

import dataclasses
import functools
import itertools

import numpy as np

from spec_t5x.errors import InputError

# Nodes of one call beyond which a tree costs more than it can bring.
MAX_NODES = 256


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree in which all nodes of a depth have the same number of children.

    Nodes are numbered level by level, and within a level in the order of their parents
    and of their draws. Node 0 is the root, the row's last token.

    >>> tree = Tree((2, 1))
    >>> tree.parents.tolist(), tree.depths.tolist()
    ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2])
    """

    # Children of each node by its depth: (2, 1) is two drafts, each continued by one.
    branching: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "branching", tuple(self.branching))
        if not self.branching or min(self.branching) < 1:
            raise InputError(f"tree {self.branching}: give at least one level of 1 child or more")
        if self.num_nodes > MAX_NODES:
            raise InputError(
                f"tree {self.branching} has {self.num_nodes} nodes: give at most {MAX_NODES}"
            )

    @property
    def depth(self) -> int:
        """Levels below the root: tokens that one iteration may accept."""
        return len(self.branching)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of each depth, the root's included."""
        return (1, *itertools.accumulate(self.branching, lambda size, b: size * b))

    @property
    def level_starts(self) -> tuple[int, ...]:
        """Number of the first node of each depth."""
        return (0, *itertools.accumulate(self.level_sizes))[:-1]

    @property
    def num_nodes(self) -> int:
        """All nodes, the root included."""
        return sum(self.level_sizes)

    @property
    def num_inner(self) -> int:
        """Nodes that have children: the first ones."""
        return self.level_starts[-1]

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """Depth of each node ``[nodes]``."""
        return np.repeat(np.arange(self.depth + 1), self.level_sizes)

    @functools.cached_property
    def first_children(self) -> np.ndarray:
        """The first child of each inner node ``[inner]``; its others follow."""
        firsts = [
            start + branching * np.arange(size)
            for start, size, branching in zip(
                self.level_starts[1:], self.level_sizes, self.branching, strict=False
            )
        ]
        return np.concatenate(firsts)

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """The parent of each node ``[nodes]``; the root's is the root."""
        parents = np.zeros(self.num_nodes, np.int32)
        for node, first in enumerate(self.first_children):
            parents[first : first + self.branching[self.depths[node]]] = node
        return parents

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """Whether the second node lies on the path to the first ``[nodes, nodes]``.

        A node is on its own path.
        """
        ancestors = np.eye(self.num_nodes, dtype=bool)
        for node in range(1, self.num_nodes):
            ancestors[node] |= ancestors[self.parents[node]]
        return ancestors

    @functools.cached_property
    def paths(self) -> np.ndarray:
        """The node at each depth of the path to a node ``[nodes, depth + 1]``.

        Beyond a node's own depth the node itself.
        """
        paths = np.zeros((self.num_nodes, self.depth + 1), np.int32)
        for node in range(1, self.num_nodes):
            paths[node] = paths[self.parents[node]]
            paths[node, self.depths[node] :] = node
        return paths
