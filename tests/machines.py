"""Topologies for tests: one byte/s a link and no latency unless told otherwise."""

from __future__ import annotations

from pathlib import Path

from g5cp_vec.config.tiers import FatTree, Tiered
from g5cp_vec.config.topology import Degrade, FullMesh, Graph, Hgx, Ring, Switch, Topology, Torus

# Presets without their calibration: durations are rooflines, as twins and formulas of tests compute them.
_CHIPS = Path(__file__).parent / "data" / "chips"
PLAIN_H100, PLAIN_H200, PLAIN_B200 = (str(_CHIPS / f"{name}-plain.toml") for name in ("h100", "h200", "b200"))


def switch(bandwidth: float = 1.0, latency_s: float = 0.0) -> Switch:
    return Switch(name="switch", chip_bandwidth_bytes_per_s=float(bandwidth), latency_s=float(latency_s))


def hgx(node_size: int, nics: int, *, up: float = 1.0, nic: float = 1.0, over: float = 1.0) -> Hgx:
    """Nodes without latency."""
    return Hgx(
        name="hgx", node_size=node_size, scale_up_bytes_per_s=float(up), scale_up_latency_s=0.0, nics_per_node=nics,
        nic_bytes_per_s=float(nic), scale_out_latency_s=0.0, oversubscription=float(over),
    )  # fmt: skip


def ring(bandwidth: float = 1.0, latency_s: float = 0.0) -> Ring:
    return Ring(name="ring", link_bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def torus(*dims: int, bandwidth: float = 1.0, latency_s: float = 0.0) -> Torus:
    return Torus(name="torus", dims=dims, link_bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def mesh(bandwidth: float = 1.0, latency_s: float = 0.0) -> FullMesh:
    return FullMesh(name="mesh", link_bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def graph(n_chips: int, *wires: tuple) -> Graph:
    """``wires``: (from, to[, bytes/s[, seconds[, both ways]]])."""
    keys = ("from", "to", "bandwidth_bytes_per_s", "latency_s", "both_ways")
    defaults = (1.0, 0.0, True)
    link = [dict(zip(keys, (*wire, *defaults[len(wire) - 2 :]), strict=True)) for wire in wires]
    return Graph.model_validate({"name": "graph", "n_chips": n_chips, "link": link})


def leaves_and_spine(n_chips: int, per_leaf: int, latency_s: float = 0.0) -> Graph:
    """Switches with chips on them, and a switch above: a chip's links carry 5e10 bytes/s, the others twice that."""
    chips = [(chip, f"leaf{chip // per_leaf}", 5e10, latency_s) for chip in range(n_chips)]
    return graph(n_chips, *chips, *((f"leaf{i}", "spine", 1e11, 2 * latency_s) for i in range(n_chips // per_leaf)))


def fat_tree(*levels: tuple) -> FatTree:
    """``levels``: (radix, bytes/s, seconds[, oversubscription])."""
    keys = ("radix", "bandwidth_bytes_per_s", "latency_s", "oversubscription")
    tables = [dict(zip(keys, (*level, 1.0)[:4], strict=True)) for level in levels]
    return FatTree.model_validate({"name": "tree", "level": tables})


def tiered(*levels: tuple) -> Tiered:
    """``levels``: (name, size, connect[, bytes/s[, seconds]])."""
    keys = ("name", "size", "connect", "bandwidth_bytes_per_s", "latency_s")
    tables = [dict(zip(keys, (*level, *(1.0, 0.0)[len(level) - 3 :]), strict=True)) for level in levels]
    return Tiered.model_validate({"name": "tiers", "level": tables})


def faulty(topology: Topology, *faults: dict) -> Topology:
    return topology.model_copy(update={"degrade": tuple(Degrade(**fault) for fault in faults)})
