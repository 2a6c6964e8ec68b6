"""Faults on top of a network: some links carry less, some chips compute more slowly; routes stay as they were."""

from __future__ import annotations

import numpy as np

from g5cp_vec.config.topology import Topology
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.network.base import Chips, Links, Network, Routes


class DegradedNetwork(Network):
    """A network with the faults of its topology.

    Capacity ids beyond those of the sound network stand for (id, factor) pairs, rate ids beyond 0 for factors, both
    numbered in order of first use.
    """

    def __init__(self, topology: Topology, sound: Network) -> None:
        super().__init__(sound.n_chips, sound.names)
        if (obstacle := topology.obstacle(sound.n_chips)) is not None:
            raise InfeasibleError(obstacle)
        self.sound = sound
        of_link, of_chip = np.ones(sound.n_links), np.ones(sound.n_chips)
        for fault in topology.degrade:
            for pattern in fault.link:
                of_link[sound.names.matching(pattern)] *= fault.factor
            of_chip[list(fault.chip)] *= fault.factor
        self.link_capacity = sound.link_capacity.copy()
        n_sound, extra = len(sound.capacities()), dict[tuple[int, float], int]()
        for link in np.flatnonzero(of_link < 1).tolist():
            pair = (int(sound.link_capacity[link]), float(of_link[link]))
            self.link_capacity[link] = extra.setdefault(pair, n_sound + len(extra))
        self._extra = list(extra)
        rates = {1.0: 0}
        for chip in np.flatnonzero(of_chip < 1).tolist():
            self.chip_rate[chip] = rates.setdefault(float(of_chip[chip]), len(rates))
        self._rates = list(rates)
        self.shape = (sound.shape, self.link_capacity.tobytes(), self.chip_rate.tobytes())

    def routes(self, src: Chips, dst: Chips) -> Routes:
        """As on the sound network."""
        return self.sound.routes(src, dst)

    def moved_links(self, chips: Chips) -> Links | None:
        """Ask, beside what the sound network does, that every fault goes where there is one like it."""
        links = self.sound.moved_links(chips)
        if links is None or (self.chip_rate[chips] != self.chip_rate).any():
            return None
        return None if (self.link_capacity[links] != self.link_capacity).any() else links

    def nodes(self, chips: Chips) -> Chips:
        """As on the sound network."""
        return self.sound.nodes(chips)

    def switch_of(self, chips: Chips) -> Chips | None:
        """As on the sound network."""
        return self.sound.switch_of(chips)

    def capacities(self) -> list[float]:
        """Those of the sound network, then the reduced ones."""
        capacities = self.sound.capacities()
        return capacities + [capacities[i] * factor for i, factor in self._extra]

    def latencies(self) -> list[float]:
        """As on the sound network."""
        return self.sound.latencies()

    def rates(self) -> list[float]:
        """1, then the reduced ones."""
        return self._rates
