"""A topology of a given size: its links, and the route of every pair of chips.

Link capacities and latencies appear as ids only, so that machines that differ in bandwidth share one structure;
`Network.capacities` and `Network.latencies` give the numbers of one topology by id.
A latency is that of one whole route inside its tier, except in a ring, where each link adds its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.topology import Hgx, Ring, Switch

Chips = NDArray[np.int32]


class Routes(NamedTuple):
    """Routes of several pairs of chips in CSR form.

    Attributes
    ----------
    indptr : ndarray of int64, shape (n_pairs + 1,)
    links : ndarray of int32, shape (nnz,)
    latency : ndarray of int32, shape (n_pairs,)
        Latency id of each route.
    """

    indptr: NDArray[np.int64]
    links: NDArray[np.int32]
    latency: NDArray[np.int32]


class Network(ABC):
    """Links and routes of ``n_chips`` chips; ``shape`` is equal exactly when all of these are."""

    shape: Hashable
    n_links: int
    link_capacity: NDArray[np.int32]

    @abstractmethod
    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Return the route of every pair (``src[i]``, ``dst[i]``); both int32, shape (n_pairs,)."""

    @abstractmethod
    def link_name(self, link: int) -> str:
        """Return the name shown for a link."""

    @abstractmethod
    def capacities(self) -> list[float]:
        """Bytes/s of each capacity id."""

    @abstractmethod
    def latencies(self) -> list[float]:
        """Seconds of each latency id."""


def _padded_routes(columns: list[NDArray[np.int32]], latency: NDArray[np.int32]) -> Routes:
    """Routes from columns of links, -1 where a route has no link in that place."""
    table = np.stack(columns, axis=1)
    used = table >= 0
    indptr = np.zeros(len(table) + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=indptr[1:])
    return Routes(indptr, table[used].astype(np.int32), latency.astype(np.int32))


class SwitchNetwork(Network):
    """One non-blocking switch: an up and a down link per chip."""

    def __init__(self, topology: Switch, n_chips: int) -> None:
        self.topology = topology
        self.n_chips = n_chips
        self.shape = ("switch", n_chips)
        self.n_links = 2 * n_chips
        self.link_capacity = np.zeros(self.n_links, np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Up, down."""
        return _padded_routes([src, dst + self.n_chips], np.zeros(len(src), np.int32))

    def link_name(self, link: int) -> str:
        """``chip5.up``, ``chip5.down``."""
        return f"chip{link % self.n_chips}.{'up' if link < self.n_chips else 'down'}"

    def capacities(self) -> list[float]:
        """One: the chip's port."""
        return [self.topology.chip_bandwidth_bytes_per_s]

    def latencies(self) -> list[float]:
        """One: through the switch."""
        return [self.topology.latency_s]


class RingNetwork(Network):
    """A ring of chips, a link each way between neighbours; the shorter way, upwards on a tie."""

    def __init__(self, topology: Ring, n_chips: int) -> None:
        self.topology = topology
        self.n_chips = n_chips
        self.shape = ("ring", n_chips)
        self.n_links = 2 * n_chips
        self.link_capacity = np.zeros(self.n_links, np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Link i goes from chip i to i + 1, link n + i from chip i to i - 1."""
        n = self.n_chips
        up = (dst.astype(np.int64) - src) % n
        upwards = 2 * up <= n
        hops = np.where(upwards, up, n - up)
        indptr = np.zeros(len(src) + 1, np.int64)
        np.cumsum(hops, out=indptr[1:])
        hop = np.arange(indptr[-1]) - np.repeat(indptr[:-1], hops)
        at = np.where(np.repeat(upwards, hops), np.repeat(src, hops) + hop, np.repeat(src, hops) - hop) % n
        links = at + np.where(np.repeat(upwards, hops), 0, n)
        return Routes(indptr, links.astype(np.int32), hops.astype(np.int32))

    def link_name(self, link: int) -> str:
        """``chip5>chip6``."""
        chip, step = link % self.n_chips, 1 if link < self.n_chips else -1
        return f"chip{chip}>chip{(chip + step) % self.n_chips}"

    def capacities(self) -> list[float]:
        """One: a link."""
        return [self.topology.link_bandwidth_bytes_per_s]

    def latencies(self) -> list[float]:
        """By number of hops, 0 to n / 2."""
        return [hops * self.topology.latency_s for hops in range(self.n_chips // 2 + 1)]


class HgxNetwork(Network):
    """Nodes of chips on a scale-up switch, joined by NICs and a spine.

    Inside a node: chip up, chip down. Across: NIC out, node up, node down, NIC in, where the node links exist only
    for an oversubscribed spine (a full one never limits more than the NICs do).
    """

    def __init__(self, topology: Hgx, n_chips: int) -> None:
        self.topology = topology
        self.n_chips = n_chips
        self.used = topology.used_per_node(n_chips)
        self.n_nodes = -(-n_chips // self.used)
        self.has_spine = topology.oversubscription > 1.0 and self.n_nodes > 1
        n_nics = self.n_nodes * topology.nics_per_node if self.n_nodes > 1 else 0
        # Link blocks: chip up, chip down, NIC out, NIC in, node up, node down.
        n_spine = self.n_nodes if self.has_spine else 0
        sizes = [n_chips, n_chips, n_nics, n_nics, n_spine, n_spine]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        self.n_links = int(self.first[-1])
        self.link_capacity = np.repeat(np.array([0, 0, 1, 1, 2, 2], np.int32), sizes)
        nics = topology.nics_per_node if self.n_nodes > 1 else 0
        self.shape = ("hgx", n_chips, self.used, nics, self.has_spine)

    def _nic(self, chip: Chips) -> NDArray[np.int32]:
        per_node = self.topology.nics_per_node
        return (chip // self.used * per_node + chip % self.used * per_node // self.used).astype(np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Scale-up inside a node, scale-out across nodes."""
        first = self.first
        inside = src // self.used == dst // self.used
        columns = [
            np.where(inside, first[0] + src, first[2] + self._nic(src)),
            np.where(inside, first[1] + dst, first[3] + self._nic(dst)),
        ]
        if self.has_spine:
            columns.insert(1, np.where(inside, -1, first[4] + src // self.used))
            columns.insert(2, np.where(inside, -1, first[5] + dst // self.used))
        return _padded_routes([c.astype(np.int32) for c in columns], np.where(inside, 0, 1))

    def link_name(self, link: int) -> str:
        """``node0.chip3.up``, ``node0.nic2.out``, ``node0.up``."""
        block = int(np.searchsorted(self.first, link, side="right")) - 1
        i = link - int(self.first[block])
        way = ("up", "down", "out", "in", "up", "down")[block]
        if block < 2:
            return f"node{i // self.used}.chip{i % self.used}.{way}"
        if block < 4:
            per_node = self.topology.nics_per_node
            return f"node{i // per_node}.nic{i % per_node}.{way}"
        return f"node{i}.{way}"

    def capacities(self) -> list[float]:
        """Chip port, NIC, node port of the spine."""
        t = self.topology
        spine = t.nics_per_node * t.nic_bytes_per_s / t.oversubscription
        return [t.scale_up_bytes_per_s, t.nic_bytes_per_s, spine]

    def latencies(self) -> list[float]:
        """Scale-up, scale-out."""
        return [self.topology.scale_up_latency_s, self.topology.scale_out_latency_s]


def build_network(topology: Switch | Ring | Hgx, n_chips: int) -> Network:
    """Return the network of a topology for ``n_chips`` chips."""
    if isinstance(topology, Switch):
        return SwitchNetwork(topology, n_chips)
    if isinstance(topology, Ring):
        return RingNetwork(topology, n_chips)
    return HgxNetwork(topology, n_chips)
