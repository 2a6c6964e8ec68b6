"""Names of a machine's links, in the order of their ids.

A topology names its links here, because its file may speak of them; `g5cp_vec.mapping.network` routes over the same
ids. In a pattern ``*`` stands for any text, and every other character for itself.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Links = NDArray[np.int64]

# Names looked through for a near one; a machine with more of them shows its first and its last.
_MOST_COMPARED = 4096

# Of one machine: as many as a full mesh of 4096 chips has.
MOST_LINKS = 1 << 24


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return whether a name is described by a pattern, as a function."""
    fits = re.compile(".*".join(re.escape(text) for text in pattern.split("*"))).fullmatch
    return lambda name: fits(name) is not None


class LinkNames(ABC):
    """Names of ``n_links`` links, each of them once.

    Attributes
    ----------
    n_links : int
    """

    n_links: int

    @abstractmethod
    def name(self, link: int) -> str:
        """Return the name of a link."""

    def matching(self, pattern: str) -> Links:
        """Return the links that a pattern describes, ascending."""
        fits = matcher(pattern)
        return np.array([link for link in range(self.n_links) if fits(self.name(link))], np.int64)

    def nearest(self, pattern: str) -> list[str]:
        """Return the three names most like a pattern, the nearest first."""
        half = _MOST_COMPARED // 2
        compared = range(self.n_links) if self.n_links <= _MOST_COMPARED else [*range(half), *range(-half, 0)]
        names = [self.name(link % self.n_links) for link in compared]
        return difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)


class PortNames(LinkNames):
    """``chip5.up`` of every chip, then ``chip5.down`` of every chip."""

    def __init__(self, n_chips: int) -> None:
        self.n_chips = n_chips
        self.n_links = 2 * n_chips

    def name(self, link: int) -> str:
        """Return ``chip5.up`` or ``chip5.down``."""
        return f"chip{link % self.n_chips}.{'up' if link < self.n_chips else 'down'}"


class TorusNames(LinkNames):
    """``chip5>chip6`` between neighbours: for each dimension, upwards from every chip, then downwards from every chip.

    In a dimension of two chips both ways lead to the same neighbour: there is one link. One of size 1 has none.

    Attributes
    ----------
    dims : tuple of int
    strides : tuple of int
        Difference between the numbers of neighbours in each dimension; the first varies fastest.
    first : ndarray of int64, shape (n_dims, 2)
        Link of chip 0 in each dimension, upwards and downwards; -1 where there is none.
    """

    def __init__(self, dims: Sequence[int]) -> None:
        self.dims = tuple(dims)
        self.n_chips = math.prod(dims)
        self.strides = tuple(math.prod(dims[:axis]) for axis in range(len(dims)))
        self._ways = [(axis, way) for axis, size in enumerate(dims) for way in range(min(size - 1, 2))]
        self.n_links = self.n_chips * len(self._ways)
        self.first = np.full((len(dims), 2), -1, np.int64)
        for place, way in enumerate(self._ways):
            self.first[way] = place * self.n_chips

    def name(self, link: int) -> str:
        """Return ``chip5>chip6``."""
        (axis, way), chip = self._ways[link // self.n_chips], link % self.n_chips
        size, stride = self.dims[axis], self.strides[axis]
        at = chip // stride % size
        to = (at - 1 if way else at + 1) % size
        return f"chip{chip}>chip{chip + (to - at) * stride}"


class MeshNames(LinkNames):
    """``chip0>chip3`` between every two chips, by source, then by destination."""

    def __init__(self, n_chips: int) -> None:
        self.n_chips = n_chips
        self.n_links = n_chips * (n_chips - 1)

    def name(self, link: int) -> str:
        """Return ``chip0>chip3``."""
        src, to = divmod(link, self.n_chips - 1)
        return f"chip{src}>chip{to + (to >= src)}"

    def matching(self, pattern: str) -> Links:
        """Return the links that a pattern describes, without looking at every one of them.

        The one ``>`` of a name is met by one in the pattern or by one of its stars: the ends then match on their own.
        """
        chips = [f"chip{chip}" for chip in range(self.n_chips)]
        found = np.zeros((self.n_chips, self.n_chips), np.bool_)
        for before, after in self._halves(pattern):
            src, dst = ([*map(matcher(half), chips)] for half in (before, after))
            found |= np.outer(src, dst)
        np.fill_diagonal(found, False)
        src_chips, dst_chips = np.nonzero(found)
        return src_chips * (self.n_chips - 1) + dst_chips - (dst_chips > src_chips)

    @staticmethod
    def _halves(pattern: str) -> Iterator[tuple[str, str]]:
        if ">" in pattern:
            before, _, after = pattern.partition(">")
            yield before, after
        for star in (place for place, letter in enumerate(pattern) if letter == "*" and ">" not in pattern):
            yield pattern[: star + 1], pattern[star:]


class NodeNames(LinkNames):
    """Links of nodes of chips: chip up, chip down, NIC out, NIC in, node up, node down.

    Attributes
    ----------
    first : ndarray of int64, shape (7,)
        First link of each of the six blocks, then the number of links.
    """

    def __init__(self, n_chips: int, per_node: int, nics_per_node: int, *, has_spine: bool) -> None:
        self.per_node, self.nics_per_node = per_node, nics_per_node
        n_nodes = -(-n_chips // per_node)
        n_nics = n_nodes * nics_per_node if n_nodes > 1 else 0
        n_spine = n_nodes if has_spine and n_nodes > 1 else 0
        self.first = np.cumsum([0, n_chips, n_chips, n_nics, n_nics, n_spine, n_spine])
        self.n_links = int(self.first[-1])

    def name(self, link: int) -> str:
        """Return ``node0.chip3.up``, ``node0.nic2.out`` or ``node0.up``."""
        block = int(np.searchsorted(self.first, link, side="right")) - 1
        i = link - int(self.first[block])
        way = ("up", "down", "out", "in", "up", "down")[block]
        if block < 2:
            return f"node{i // self.per_node}.chip{i % self.per_node}.{way}"
        if block < 4:
            return f"node{i // self.nics_per_node}.nic{i % self.nics_per_node}.{way}"
        return f"node{i}.{way}"


def n_levels_used(n_chips: int, sizes: Sequence[int]) -> int:
    """Return how many levels lie between the chips in use and the smallest unit that holds them all, at least one.

    Parameters
    ----------
    n_chips : int
    sizes : sequence of int
        Chips in a unit of each level, from 1 on.
    """
    return max(1, sum(size < n_chips for size in sizes))


class TreeNames(LinkNames):
    """``chip5.up`` of every chip and ``chip5.down``, then ``level1.switch2.up`` and ``.down`` of every switch in use.

    Level 1 is that of the switches next to the chips. A switch over all chips in use has no links up.

    Attributes
    ----------
    sizes : tuple of int
        Chips under what the links of each level used lead up from: 1, then those of a switch of level 1, ...
    first : ndarray of int64, shape (n_levels, 2)
        First link up and first link down of each level used.
    """

    def __init__(self, n_chips: int, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes[: n_levels_used(n_chips, sizes)])
        n_lower = [-(-n_chips // size) for size in self.sizes]
        bounds = np.cumsum([0, *(n for n in n_lower for _ in range(2))])
        self.first = bounds[:-1].reshape(-1, 2)
        self.n_links = int(bounds[-1])

    def name(self, link: int) -> str:
        """Return ``chip5.up`` or ``level1.switch2.down``."""
        block = int(np.searchsorted(self.first.ravel(), link, side="right")) - 1
        level, is_down = divmod(block, 2)
        unit = f"level{level}.switch" if level else "chip"
        return f"{unit}{link - int(self.first[level, is_down])}.{'down' if is_down else 'up'}"


class TierNames(LinkNames):
    """Of the parts of every unit in use: ``chip0>chip3`` between chips of a board, ``board2.up`` of a board, ...

    Parameters
    ----------
    n_chips : int
    tiers : sequence of (str, int, str, int)
        Name of a unit, parts of it, how they are joined, and how many links that takes; from the chips outwards.

    Attributes
    ----------
    sizes : tuple of int
        Chips in a part of each level used: 1, then those of a unit of the first level, ...
    first : ndarray of int64, shape (n_levels + 1,)
        First link of each level used, then the number of links.
    per_unit : tuple of int
        Links of a unit of each level used.
    """

    def __init__(self, n_chips: int, tiers: Sequence[tuple[str, int, str, int]]) -> None:
        products = [math.prod(size for _, size, *_ in tiers[:level]) for level in range(len(tiers))]
        used = tiers[: n_levels_used(n_chips, products)]
        self.sizes = tuple(products[: len(used)])
        self._parts = [("chip", *used[0][1:3])] + [
            (below[0], *tier[1:3]) for below, tier in zip(used, used[1:], strict=False)
        ]
        self.per_unit = tuple(tier[3] for tier in used)
        n_units = [-(-n_chips // (size * tier[1])) for size, tier in zip(self.sizes, used, strict=True)]
        self.first = np.cumsum([0, *(n * links for n, links in zip(n_units, self.per_unit, strict=True))])
        self.n_links = int(self.first[-1])

    def name(self, link: int) -> str:
        """Return ``chip0>chip3`` or ``board2.up``."""
        level = int(np.searchsorted(self.first, link, side="right")) - 1
        part, size, connect = self._parts[level]
        unit, place = divmod(link - int(self.first[level]), self.per_unit[level])
        if connect == "full_mesh":
            src, to = divmod(place, size - 1)
            dst = to + (to >= src)
        else:
            is_down, src = divmod(place, size)
            if connect == "switch":
                return f"{part}{unit * size + src}.{'down' if is_down else 'up'}"
            dst = (src - 1 if is_down else src + 1) % size
        return f"{part}{unit * size + src}>{part}{unit * size + dst}"


class WireNames(LinkNames):
    """``chip0>leaf1``, as listed.

    Parameters
    ----------
    nodes : sequence of str
    ends : ndarray of int64, shape (n_links, 2)
        Nodes that each link leaves and enters.
    """

    def __init__(self, nodes: Sequence[str], ends: NDArray[np.int64]) -> None:
        self._names = [f"{nodes[src]}>{nodes[dst]}" for src, dst in ends.tolist()]
        self.n_links = len(self._names)

    def name(self, link: int) -> str:
        """Return ``chip0>leaf1``."""
        return self._names[link]
