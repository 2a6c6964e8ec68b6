"""Chips, and units of chips that share a link to one another: shortest routes, tabulated from every chip to every one.

A link leads from any chip of one unit to any chip of another. From a chip the next link is the first, by id, of those
that reach a chip one link nearer to the destination, and it is entered at the lowest such chip. Routes that cross
equally many links of each type share a latency id.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.topology import Grouped
from g5cp_vec.mapping.network.base import Chips, Network, Routes, places_within

# Entries of the widest temporary: links that chips may take, by destinations.
_MOST_ENTRIES = 1 << 22
_NONE = np.int32(2**31 - 1)


class Routing(NamedTuple):
    """Routes from every chip (rows) to every chip that takes part (columns).

    Attributes
    ----------
    distance : ndarray of int32, shape (n_all_chips, n_chips)
        Links crossed.
    link, chip : ndarrays of int32, shape (n_all_chips, n_chips)
        The first of them, and the chip at its end; meaningless from a chip to itself.
    latency : ndarray of int32, shape (n_all_chips, n_chips)
        Latency id.
    crossed : list of tuple of int
        For each latency id, how many links of each type are crossed.
    """

    distance: NDArray[np.int32]
    link: NDArray[np.int32]
    chip: NDArray[np.int32]
    latency: NDArray[np.int32]
    crossed: list[tuple[int, ...]]


class GroupedNetwork(Network):
    """The connections of a file; chips from ``n_chips`` on forward and do nothing else."""

    def __init__(self, topology: Grouped, n_chips: int) -> None:
        super().__init__(n_chips, topology.links(n_chips))
        self.topology = topology
        self.directed = tuple((*src[1:], *dst[1:], kind) for src, dst, kind in topology.directed)
        self.link_capacity = np.array([kind for *_, kind in self.directed], np.int32)
        names = "\n".join(self.link_name(link) for link in range(self.n_links))
        self.shape = ("grouped", n_chips, topology.n_chips, names, self.directed, len(topology.link_type))

    @cached_property
    def routing(self) -> Routing:
        """Routes of all pairs, made when first asked for."""
        return _route_all(self.directed, self.topology.n_chips, self.n_chips, len(self.topology.link_type))

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Walk all pairs, one link at a time."""
        r = self.routing
        indptr = np.zeros(len(src) + 1, np.int64)
        np.cumsum(r.distance[src, dst], out=indptr[1:])
        links = np.empty(indptr[-1], np.int32)
        walking, at, step = np.flatnonzero(src != dst), src.astype(np.int64), 0
        while len(walking):
            links[indptr[walking] + step] = r.link[at[walking], dst[walking]]
            at[walking] = r.chip[at[walking], dst[walking]]
            walking, step = walking[at[walking] != dst[walking]], step + 1
        return Routes(indptr, links, r.latency[src, dst])

    def capacities(self) -> list[float]:
        """By type of link; none in a machine of one chip counts as one."""
        return [kind.bandwidth_bytes_per_s for kind in self.topology.link_type] or [1.0]

    def latencies(self) -> list[float]:
        """By latency id: what every message pays, and what the links crossed do."""
        types, message_s = self.topology.link_type, self.topology.message_latency_s

        def seconds(crossed: tuple[int, ...]) -> float:
            return fsum(n * kind.latency_s for n, kind in zip(crossed, types, strict=True))

        return [message_s + seconds(crossed) if any(crossed) else 0.0 for crossed in self.routing.crossed]


@lru_cache(maxsize=2)  # an audit builds the network once more
def _route_all(directed: tuple[tuple[int, ...], ...], n_all: int, n_chips: int, n_types: int) -> Routing:
    ways = np.array(directed, np.int64).reshape(-1, 5)
    # Links that a chip may take, chip by chip, in order of their ids.
    link, place = places_within(ways[:, 1] - ways[:, 0])
    chip = ways[link, 0] + place
    order = np.lexsort((link, chip))
    chip, link = chip[order], link[order]
    width = max(1, _MOST_ENTRIES // max(len(link), n_all))
    parts = [
        _towards(np.arange(begin, min(begin + width, n_chips)), ways, chip, link, n_all)
        for begin in range(0, n_chips, width)
    ]
    distance, first, entered = (np.concatenate(tables, axis=1) for tables in zip(*parts, strict=True))
    latency, crossed = _latency_ids(distance, first, entered, ways[:, 4], n_types)
    return Routing(distance, first, entered, latency, crossed)


def _towards(
    towards: NDArray[np.int64], ways: NDArray[np.int64], chip: NDArray[np.int64], link: NDArray[np.int64], n_all: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return distance, next link and next chip from every chip (rows) towards some chips (columns)."""
    n = len(towards)
    distance = np.full((n_all, n), -1, np.int32)
    first, entered = np.zeros((n_all, n), np.int32), np.zeros((n_all, n), np.int32)
    distance[towards, np.arange(n)] = 0
    begins = np.flatnonzero(np.r_[True, chip[1:] != chip[:-1]]) if len(chip) else np.zeros(0, np.int64)
    movable, columns, step = chip[begins], np.arange(n), 0
    while len(movable) and (distance < 0).any():
        # The lowest chip at this distance from each chip on: what a link enters, if its unit reaches so far.
        nearest = np.full((n_all + 1, n), n_all, np.int64)
        nearest[:-1] = np.where(distance == step, np.arange(n_all)[:, None], n_all)
        nearest = np.minimum.accumulate(nearest[::-1], axis=0)[::-1]
        entry = nearest[ways[:, 2]]
        best = np.where((entry < ways[:, 3, None])[link], link[:, None].astype(np.int32), _NONE)
        best = np.minimum.reduceat(best, begins, axis=0)
        row, column = np.nonzero((best != _NONE) & (distance[movable] < 0))
        taken = best[row, column]
        distance[movable[row], column] = step + 1
        first[movable[row], column] = taken
        entered[movable[row], column] = entry[taken, columns[column]]
        step += 1
    return distance, first, entered


def _latency_ids(
    distance: NDArray[np.int32],
    first: NDArray[np.int32],
    entered: NDArray[np.int32],
    kind: NDArray[np.int64],
    n_types: int,
) -> tuple[NDArray[np.int32], list[tuple[int, ...]]]:
    """Return the latency id of every route, and how many links of each type each id stands for."""
    n_all, n_chips = distance.shape
    # Counts of all types in one number: none reaches n_all.
    digit = n_all ** np.arange(n_types, dtype=np.int64)
    code = np.zeros((n_all, n_chips), np.int64)
    for step in range(1, int(distance.max()) + 1):
        row, column = np.nonzero(distance == step)
        code[row, column] = digit[kind[first[row, column]]] + code[entered[row, column], column]
    codes, ids = np.unique(code[:n_chips], return_inverse=True)
    crossed = [tuple(int(value) // n_all**i % n_all for i in range(n_types)) for value in codes.tolist()]
    # Routes from chips that do not take part are passed through, and asked for by nobody.
    return ids.reshape(n_chips, n_chips).astype(np.int32), crossed
