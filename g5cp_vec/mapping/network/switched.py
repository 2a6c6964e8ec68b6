"""Chips behind switches: one for all, or one per node with interfaces between nodes."""

from __future__ import annotations

import numpy as np

from g5cp_vec.config.topology import Hgx, Switch
from g5cp_vec.mapping.network.base import Chips, Links, Network, Routes, moved_units, padded_routes


class SwitchNetwork(Network):
    """One non-blocking switch: an up and a down link per chip."""

    def __init__(self, topology: Switch, n_chips: int) -> None:
        super().__init__(n_chips, topology.links(n_chips))
        self.topology = topology
        self.shape = ("switch", n_chips)
        self.link_capacity = np.zeros(self.n_links, np.int32)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Up, down."""
        return padded_routes([src, dst + self.n_chips], np.zeros(len(src), np.int32))

    def moved_links(self, chips: Chips) -> Links:
        """Send ports along with their chips."""
        return np.concatenate([chips, chips + np.int32(self.n_chips)])

    def switch_of(self, chips: Chips) -> Chips:
        """One over all."""
        return np.zeros_like(chips)

    def capacities(self) -> list[float]:
        """One: the chip's port."""
        return [self.topology.chip_bandwidth_bytes_per_s]

    def latencies(self) -> list[float]:
        """One: through the switch."""
        return [self.topology.latency_s]


class HgxNetwork(Network):
    """Nodes of chips on a scale-up switch, joined by NICs and a spine.

    Inside a node: chip up, chip down. Across: NIC out, node up, node down, NIC in, where the node links exist only
    for a spine that may limit (`Hgx.has_spine`).
    """

    def __init__(self, topology: Hgx, n_chips: int) -> None:
        names = topology.links(n_chips)
        super().__init__(n_chips, names)
        self.topology = topology
        self.used = topology.used_per_node(n_chips)
        self.has_spine = topology.has_spine(n_chips)
        self.first = names.first.astype(np.int32)
        self.link_capacity = np.repeat(np.array([0, 0, 1, 1, 2, 2], np.int32), np.diff(self.first))
        nics = topology.nics_per_node if n_chips > self.used else 0
        self.shape = ("hgx", n_chips, self.used, nics, self.has_spine)
        node, place = np.divmod(np.arange(n_chips, dtype=np.int32), np.int32(self.used))
        per_node = np.int32(topology.nics_per_node)
        self._node, self._nic = node, node * per_node + place * per_node // np.int32(self.used)

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Scale-up inside a node, scale-out across nodes."""
        first, src_node, dst_node = self.first, self._node[src], self._node[dst]
        inside = src_node == dst_node
        columns = [
            np.where(inside, first[0] + src, first[2] + self._nic[src]),
            np.where(inside, first[1] + dst, first[3] + self._nic[dst]),
        ]
        if self.has_spine:
            columns.insert(1, np.where(inside, np.int32(-1), first[4] + src_node))
            columns.insert(2, np.where(inside, np.int32(-1), first[5] + dst_node))
        return padded_routes(columns, ~inside)

    def moved_links(self, chips: Chips) -> Links | None:
        """Ask that chips of a node go to one node, and those that share a NIC to ones that do."""
        n_units = np.diff(self.first)
        moved: list[Links | None] = [chips, chips]
        if self.n_chips > self.used:
            nics = moved_units(self._nic, self._nic[chips], int(n_units[2]))
            nodes = moved_units(self._node, self._node[chips], int(self._node[-1]) + 1)
            moved += [nics, nics, nodes, nodes]
        found = [first + to[:n] for first, to, n in zip(self.first, moved, n_units, strict=False) if to is not None]
        return np.concatenate(found) if len(found) == len(moved) else None

    def nodes(self, chips: Chips) -> Chips:
        """Consecutive chips share a node."""
        return chips // np.int32(self.used)

    def switch_of(self, chips: Chips) -> Chips:
        """One in each node."""
        return self.nodes(chips)

    def capacities(self) -> list[float]:
        """Chip port, NIC, node port of the spine."""
        t = self.topology
        nic = t.nic_bytes_per_s * t.scale_out_efficiency
        return [t.scale_up_bytes_per_s * t.scale_up_efficiency, nic, t.nics_per_node * nic / t.oversubscription]

    def latencies(self) -> list[float]:
        """Scale-up, scale-out."""
        return [self.topology.scale_up_latency_s, self.topology.scale_out_latency_s]
