"""A network given link by link: shortest routes, tabulated as the next link from every node towards every chip.

Distances grow outwards from all destinations at once, a step at a time. From a node the next link is the first, in
order of the nodes entered, whose far end is one step nearer; so the route is the shortest one whose first differing
node comes first. Routes that cross links of the same latencies, equally often of each, share a latency id.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.topology import Graph
from g5cp_vec.mapping.network.base import Chips, Network, Routes, places_within

# Entries of the widest temporary: links by destinations.
_MOST_ENTRIES = 1 << 22
_NO_LINK = np.int32(2**31 - 1)


class Routing(NamedTuple):
    """Routes between all chips that take part.

    Attributes
    ----------
    distance : ndarray of int32, shape (n_nodes, n_chips)
        Links from a node to a chip, -1 where no route leads.
    next_link : ndarray of int32, shape (n_nodes, n_chips)
        Meaningless at the chip itself and where no route leads.
    latency : ndarray of int32, shape (n_chips, n_chips)
        Latency id of every route.
    crossed : list of tuple of int
        For each latency id, the latencies of the links crossed, as ids, ascending.
    """

    distance: NDArray[np.int32]
    next_link: NDArray[np.int32]
    latency: NDArray[np.int32]
    crossed: list[tuple[int, ...]]


class GraphNetwork(Network):
    """Shortest routes over the links of a graph; chips from ``n_chips`` on forward and do nothing else."""

    def __init__(self, topology: Graph, n_chips: int) -> None:
        super().__init__(n_chips, topology.links(n_chips))
        self.topology = topology
        self.wiring = topology.wiring
        self.link_capacity = self.wiring.capacity
        names = "\n".join(self.link_name(link) for link in range(self.n_links))
        self.shape = ("graph", n_chips, names, self.wiring.capacity.tobytes(), self.wiring.latency.tobytes())

    @cached_property
    def routing(self) -> Routing:
        """Routes of all pairs, made when first asked for."""
        return _route_all(self.topology, self.n_chips)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Walk all pairs, one link at a time."""
        r, ends = self.routing, self.wiring.ends
        indptr = np.zeros(len(src) + 1, np.int64)
        np.cumsum(r.distance[src, dst], out=indptr[1:])
        links = np.empty(indptr[-1], np.int32)
        walking, at, step = np.flatnonzero(src != dst), src.astype(np.int64), 0
        while len(walking):
            link = r.next_link[at[walking], dst[walking]]
            links[indptr[walking] + step] = link
            at[walking] = ends[link, 1]
            walking, step = walking[at[walking] != dst[walking]], step + 1
        return Routes(indptr, links, r.latency[src, dst])

    def capacities(self) -> list[float]:
        """Each different bandwidth of a link."""
        return self.wiring.bytes_per_s

    def latencies(self) -> list[float]:
        """By latency id, the sum over the links crossed."""
        return [fsum(self.wiring.seconds[i] for i in crossed) for crossed in self.routing.crossed]


@lru_cache(maxsize=2)  # an audit builds the network once more
def _route_all(topology: Graph, n_chips: int) -> Routing:
    ends, n_nodes = topology.wiring.ends, len(topology.wiring.nodes)
    width = max(1, _MOST_ENTRIES // max(len(ends), 1))
    parts = [
        _towards(np.arange(begin, min(begin + width, n_chips)), ends, n_nodes) for begin in range(0, n_chips, width)
    ]
    distance, next_link = (np.concatenate(tables, axis=1) for tables in zip(*parts, strict=True))
    latency, crossed = _latency_ids(distance, next_link, ends[:, 1], topology.wiring.latency)
    return Routing(distance, next_link, latency, crossed)


def _towards(
    chips: NDArray[np.int64], ends: NDArray[np.int64], n_nodes: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return distance and next link from every node (rows) towards each of some chips (columns)."""
    n = len(chips)
    distance = np.full(n_nodes * n, -1, np.int32)
    next_link = np.full(n_nodes * n, _NO_LINK, np.int32)
    leaves = ends[:, 0]
    into = np.argsort(ends[:, 1], kind="stable")
    n_into = np.bincount(ends[:, 1], minlength=n_nodes)
    first_into = np.cumsum(n_into) - n_into
    # Places in the tables: node * n + column.
    frontier, step = chips * n + np.arange(n), 0
    while len(frontier):
        distance[frontier] = step
        node, column = np.divmod(frontier, n)
        row, place = places_within(n_into[node])
        link = into[first_into[node][row] + place]
        before = leaves[link] * n + column[row]
        is_new = distance[before] < 0
        before, link = before[is_new], link[is_new]
        # Links are sorted by the node they leave, then by the one they enter.
        np.minimum.at(next_link, before, link)
        frontier, step = before[next_link[before] == link], step + 1
    return distance.reshape(n_nodes, n), next_link.reshape(n_nodes, n)


def _latency_ids(
    distance: NDArray[np.int32],
    next_link: NDArray[np.int32],
    enters: NDArray[np.int64],
    link_latency: NDArray[np.int32],
) -> tuple[NDArray[np.int32], list[tuple[int, ...]]]:
    """Return the latency id of the route of every two chips, and the link latencies that each id stands for.

    From the nearest nodes outwards: a route's latencies are its first link's and those of the route from there on.
    """
    n_nodes, n_chips = distance.shape
    ids: dict[tuple[int, ...], int] = {(): 0}
    crossed: list[tuple[int, ...]] = [()]
    of_route = np.zeros(n_nodes * n_chips, np.int64)
    order = np.argsort(distance, axis=None, kind="stable")
    steps = distance.ravel()[order]
    bounds = np.searchsorted(steps, np.arange(1, int(steps[-1]) + 2))
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        routes = order[begin:end]
        link = next_link.ravel()[routes]
        onwards = of_route[enters[link] * n_chips + routes % n_chips]
        n_known = len(crossed)
        distinct, which = np.unique(link_latency[link].astype(np.int64) * n_known + onwards, return_inverse=True)
        found = []
        for first, rest in (divmod(code, n_known) for code in distinct.tolist()):
            latencies = tuple(sorted((first, *crossed[rest])))
            if latencies not in ids:
                ids[latencies] = len(crossed)
                crossed.append(latencies)
            found.append(ids[latencies])
        of_route[routes] = np.array(found, np.int64)[which]
    between_chips = of_route.reshape(n_nodes, n_chips)[:n_chips]
    used, dense = np.unique(between_chips, return_inverse=True)
    return dense.reshape(n_chips, n_chips).astype(np.int32), [crossed[i] for i in used]
