"""Chips joined to chips: torus (a ring is one of one dimension) and full mesh. Every link adds its latency."""

from __future__ import annotations

import numpy as np

from g5cp_vec.config.topology import FullMesh, Ring, Torus
from g5cp_vec.mapping.network.base import Chips, Links, Network, Routes, padded_routes, places_within


class TorusNetwork(Network):
    """Dimension by dimension, first to last, the shorter way round and upwards on a tie."""

    def __init__(self, topology: Ring | Torus, n_chips: int) -> None:
        names = topology.links(n_chips)
        assert names.n_chips == n_chips
        super().__init__(n_chips, names)
        self.topology = topology
        self.dims, self.strides, self.first = names.dims, names.strides, names.first
        # A dimension of one adds no link and no step.
        self.shape = ("torus", tuple(size for size in self.dims if size > 1))
        self.link_capacity = np.zeros(self.n_links, np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Cross |distance| links along each dimension; the latency id is their number."""
        at, to = src.astype(np.int64), dst.astype(np.int64)
        ups = [(to // stride - at // stride) % size for size, stride in zip(self.dims, self.strides, strict=True)]
        hops = [np.minimum(up, size - up) for up, size in zip(ups, self.dims, strict=True)]
        n_hops = np.sum(hops, axis=0)
        indptr = np.zeros(len(src) + 1, np.int64)
        np.cumsum(n_hops, out=indptr[1:])
        links = np.empty(indptr[-1], np.int32)
        begin = indptr[:-1].copy()
        for axis, (size, stride) in enumerate(zip(self.dims, self.strides, strict=True)):
            coordinate, is_down = at // stride % size, 2 * ups[axis] > size
            pair, hop = places_within(hops[axis])
            passed = (coordinate[pair] + np.where(is_down[pair], -hop, hop)) % size
            chip = at[pair] + (passed - coordinate[pair]) * stride
            links[begin[pair] + hop] = self.first[axis, is_down[pair].astype(np.int64)] + chip
            begin += hops[axis]
            at = at + ((coordinate + ups[axis]) % size - coordinate) * stride
        return Routes(indptr, links, n_hops.astype(np.int32))

    def moved_links(self, chips: Chips) -> Links | None:
        """Ask that all chips move the same way along every dimension."""
        at = np.arange(self.n_chips)
        for size, stride in zip(self.dims, self.strides, strict=True):
            if len(np.unique((chips // stride - at // stride) % size)) > 1:
                return None
        firsts = np.sort(self.first[self.first >= 0])
        return (firsts[:, None] + chips).ravel().astype(np.int32)

    def capacities(self) -> list[float]:
        """One: a link."""
        return [self.topology.link_bandwidth_bytes_per_s]

    def latencies(self) -> list[float]:
        """By number of links, up to half of every dimension."""
        return [hops * self.topology.latency_s for hops in range(sum(size // 2 for size in self.dims) + 1)]


class MeshNetwork(Network):
    """The link from a chip to another is their route."""

    def __init__(self, topology: FullMesh, n_chips: int) -> None:
        super().__init__(n_chips, topology.links(n_chips))
        self.topology = topology
        self.shape = ("full_mesh", n_chips)
        self.link_capacity = np.zeros(self.n_links, np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """One link; none from a chip to itself. The latency id is their number."""
        link = np.where(src == dst, -1, src * (self.n_chips - 1) + dst - (dst > src))
        return padded_routes([link.astype(np.int32)], (src != dst).astype(np.int32))

    def moved_links(self, chips: Chips) -> Links:
        """Send links along with their ends."""
        src, dst = np.nonzero(~np.eye(self.n_chips, dtype=np.bool_))
        src, dst = chips[src].astype(np.int64), chips[dst].astype(np.int64)
        return (src * (self.n_chips - 1) + dst - (dst > src)).astype(np.int32)

    def capacities(self) -> list[float]:
        """One: a link."""
        return [self.topology.link_bandwidth_bytes_per_s]

    def latencies(self) -> list[float]:
        """By number of links, 0 or 1."""
        return [0.0, self.topology.latency_s]
