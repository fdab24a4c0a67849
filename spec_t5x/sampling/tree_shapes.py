"""Static trees of drafts: several proposals for one position, verified in one call."""

import dataclasses
import functools
import itertools

import numpy as np

from spec_t5x.errors import InputError, one_line

# The most nodes of a tree: a target call over more costs more than they can gain.
MAX_NODES = 256


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree in which all nodes of a depth have the same number of children.

    Nodes are numbered level by level; within a level in the order of their parents, and siblings
    in the order of their draws. Node 0 is the root, the row's last token.

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
                f"tree {one_line(self.branching)} has {self.num_nodes} nodes: give at most "
                f"{MAX_NODES}"
            )

    @property
    def depth(self) -> int:
        """Number of levels below the root: tokens that one iteration may accept."""
        return len(self.branching)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes at each depth; the root is alone at depth 0."""
        return tuple(itertools.accumulate((1, *self.branching), lambda size, num: size * num))

    @property
    def level_starts(self) -> tuple[int, ...]:
        """Index of the first node at each depth."""
        return tuple(itertools.accumulate((0, *self.level_sizes)))[:-1]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return sum(self.level_sizes)

    @property
    def num_inner(self) -> int:
        """Number of nodes that have children; these nodes have the lowest indices."""
        return self.level_starts[-1]

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """Depth of each node ``[nodes]``; the root's is 0."""
        return np.repeat(np.arange(self.depth + 1), self.level_sizes)

    @functools.cached_property
    def first_children(self) -> np.ndarray:
        """Index of each inner node's first child ``[inner]``; its siblings have the next ones."""
        return 1 + np.searchsorted(self.parents[1:], np.arange(self.num_inner))

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """Index of each node's parent ``[nodes]``; 0 for the root itself."""
        num_children = np.take(self.branching, self.depths[: self.num_inner])
        parents = np.repeat(np.arange(self.num_inner), num_children)
        return np.append(0, parents).astype(np.int32)

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """Mask ``[nodes, nodes]``: row i marks the nodes on the path from the root to node i."""
        ancestors = np.zeros((self.num_nodes, self.num_nodes), bool)
        np.put_along_axis(ancestors, self.paths, True, axis=1)
        return ancestors

    @functools.cached_property
    def paths(self) -> np.ndarray:
        """Path from the root to each node, repeated up to full depth ``[nodes, depth + 1]``."""
        paths = np.zeros((self.num_nodes, self.depth + 1), np.int32)
        for node in range(1, self.num_nodes):
            paths[node] = paths[self.parents[node]]
            paths[node, self.depths[node] :] = node
        return paths
