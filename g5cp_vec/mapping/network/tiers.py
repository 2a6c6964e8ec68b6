"""Switches over switches, and units within units; the rules of both stand in `g5cp_vec.config.tiers`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.tiers import FatTree, Tiered
from g5cp_vec.mapping.network.base import Chips, Links, Network, Routes, moved_units, padded_routes, places_within

Crossed = tuple[NDArray[np.int64], NDArray[np.int64]]


def _highest(src: Chips, dst: Chips, sizes: tuple[int, ...]) -> NDArray[np.int32]:
    """Return the level at which a route turns round: how many kinds of unit do not hold both chips, less one.

    -1 from a chip to itself, which every unit holds.
    """
    apart = np.stack([src // size != dst // size for size in sizes])
    highest: NDArray[np.int32] = apart.sum(axis=0, dtype=np.int32) - np.int32(1)
    return highest


class FatTreeNetwork(Network):
    """Up to the lowest switch over both chips, and down. Ids of capacities and latencies are those of the levels."""

    def __init__(self, topology: FatTree, n_chips: int) -> None:
        names = topology.links(n_chips)
        super().__init__(n_chips, names)
        self.topology = topology
        self.sizes, self.first = names.sizes, names.first
        self.shape = ("fat_tree", n_chips, self.sizes)
        blocks = np.append(self.first.ravel(), self.n_links)
        self.link_capacity = np.repeat(np.repeat(np.arange(len(self.sizes), dtype=np.int32), 2), np.diff(blocks))

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Cross a link up for each level, then a link down for each."""
        top = _highest(src, dst, self.sizes)
        levels = list(enumerate(zip(self.sizes, self.first.tolist(), strict=True)))
        ups = [np.where(level <= top, up + src // size, -1) for level, (size, (up, _)) in levels]
        downs = [np.where(level <= top, down + dst // size, -1) for level, (size, (_, down)) in levels]
        return padded_routes([column.astype(np.int32) for column in [*ups, *reversed(downs)]], top + np.int32(1))

    def moved_links(self, chips: Chips) -> Links | None:
        """Ask that chips of a switch of any level go to one switch."""
        at = np.arange(self.n_chips, dtype=np.int32)
        moved = [moved_units(at // size, chips // size, -(-self.n_chips // size)) for size in self.sizes]
        found = [first + to for firsts, to in zip(self.first, moved, strict=True) if to is not None for first in firsts]
        return np.concatenate(found).astype(np.int32) if len(found) == 2 * len(moved) else None

    def switch_of(self, chips: Chips) -> Chips:
        """Name the switch that the lowest level leads up to."""
        return chips // np.int32(self.sizes[1]) if len(self.sizes) > 1 else np.zeros_like(chips)

    def capacities(self) -> list[float]:
        """By level that a link leads up to."""
        return self.topology.bytes_per_s[: len(self.sizes)]

    def latencies(self) -> list[float]:
        """From a chip to itself, then by highest level."""
        return [0.0, *(level.latency_s for level in self.topology.level[: len(self.sizes)])]


class TieredNetwork(Network):
    """Between two parts of the smallest unit that holds both chips. Ids of capacities and latencies are as above."""

    def __init__(self, topology: Tiered, n_chips: int) -> None:
        names = topology.links(n_chips)
        super().__init__(n_chips, names)
        self.topology = topology
        self.sizes, self.first, self.per_unit = names.sizes, names.first, names.per_unit
        self.tiers = topology.level[: len(self.sizes)]
        self.shape = ("tiered", n_chips, tuple((tier.size, tier.connect) for tier in self.tiers))
        self.link_capacity = np.repeat(np.arange(len(self.sizes), dtype=np.int32), np.diff(self.first))

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Level by level, the pairs whose route is there."""
        top = _highest(src, dst, self.sizes)
        indptr = np.zeros(len(src) + 1, np.int64)
        crossed: list[tuple[NDArray[np.int64], Crossed]] = []
        for level in range(len(self.sizes)):
            pairs = np.flatnonzero(top == level)
            part = self._crossed(level, src[pairs].astype(np.int64), dst[pairs].astype(np.int64))
            indptr[pairs + 1] = part[0]
            crossed.append((pairs, part))
        np.cumsum(indptr, out=indptr)
        links = np.empty(indptr[-1], np.int32)
        for pairs, (lengths, found) in crossed:
            pair, place = places_within(lengths)
            links[indptr[pairs][pair] + place] = found
        return Routes(indptr, links, top + np.int32(1))

    def _crossed(self, level: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> Crossed:
        """Return how many links of a level each route crosses, and which, route by route."""
        size, connect, chips = self.tiers[level].size, self.tiers[level].connect, self.sizes[level]
        begin = self.first[level] + src // (chips * size) * self.per_unit[level]
        at, to = src // chips % size, dst // chips % size
        if connect == "full_mesh":
            return np.ones(len(src), np.int64), begin + at * (size - 1) + to - (to > at)
        if connect == "switch":
            return np.full(len(src), 2), np.stack([begin + at, begin + size + to], axis=1).ravel()
        up = (to - at) % size
        is_down = 2 * up > size
        hops = np.where(is_down, size - up, up)
        route, hop = places_within(hops)
        passed = (at[route] + np.where(is_down[route], -hop, hop)) % size
        return hops, begin[route] + is_down[route] * size + passed

    def capacities(self) -> list[float]:
        """By level."""
        return [tier.bandwidth_bytes_per_s for tier in self.tiers]

    def latencies(self) -> list[float]:
        """From a chip to itself, then by level."""
        return [0.0, *(tier.latency_s for tier in self.tiers)]
