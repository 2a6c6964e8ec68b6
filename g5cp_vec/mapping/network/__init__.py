"""A topology of a given size: its links, and the route of every pair of chips.

Link capacities, latencies and the speeds of chips appear as ids only, so that machines that differ in numbers share one
structure; `Network.capacities`, `Network.latencies` and `Network.rates` give the numbers of one topology by id.
"""

from __future__ import annotations

from g5cp_vec.config.topology import FatTree, FullMesh, Graph, Grouped, Hgx, Ring, Switch, Tiered, Topology, Torus
from g5cp_vec.mapping.network.base import Chips, Network, Routes
from g5cp_vec.mapping.network.degraded import DegradedNetwork
from g5cp_vec.mapping.network.direct import MeshNetwork, TorusNetwork
from g5cp_vec.mapping.network.graph import GraphNetwork
from g5cp_vec.mapping.network.grouped import GroupedNetwork
from g5cp_vec.mapping.network.switched import HgxNetwork, SwitchNetwork
from g5cp_vec.mapping.network.tiers import FatTreeNetwork, TieredNetwork

__all__ = ["Chips", "Network", "Routes", "build_network"]


def build_network(topology: Topology, n_chips: int) -> Network:
    """Return the network of a topology for ``n_chips`` chips, faults included.

    Raises
    ------
    InfeasibleError
        A fault hits a link or chip that this many chips do not have.
    """
    network = _sound(topology, n_chips)
    return DegradedNetwork(topology, network) if topology.is_degraded else network


def _sound(topology: Topology, n_chips: int) -> Network:
    if isinstance(topology, Switch):
        return SwitchNetwork(topology, n_chips)
    if isinstance(topology, Ring | Torus):
        return TorusNetwork(topology, n_chips)
    if isinstance(topology, FullMesh):
        return MeshNetwork(topology, n_chips)
    if isinstance(topology, Graph):
        return GraphNetwork(topology, n_chips)
    if isinstance(topology, FatTree):
        return FatTreeNetwork(topology, n_chips)
    if isinstance(topology, Tiered):
        return TieredNetwork(topology, n_chips)
    if isinstance(topology, Grouped):
        return GroupedNetwork(topology, n_chips)
    assert isinstance(topology, Hgx)
    return HgxNetwork(topology, n_chips)
