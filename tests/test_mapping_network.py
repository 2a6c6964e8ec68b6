"""Routes by hand: which links a message crosses, what they carry, and how long it takes on its own."""

from __future__ import annotations

import numpy as np
import pytest
from test_acceptance_tools import hgx, switch

from g5cp_vec.config.topology import Hgx, Ring, load_topology
from g5cp_vec.mapping.network import build_network


def routes(network, pairs):
    """Names of the links of each route, and its latency."""
    src, dst = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    found = network.routes(src, dst)
    names = [
        [network.link_name(int(link)) for link in found.links[found.indptr[i] : found.indptr[i + 1]]]
        for i in range(len(pairs))
    ]
    return names, [network.latencies()[i] for i in found.latency]


def capacity_of(network, name):
    names = [network.link_name(link) for link in range(network.n_links)]
    assert len(set(names)) == network.n_links
    return network.capacities()[network.link_capacity[names.index(name)]]


def test_switch():
    network = build_network(switch(7.0, 0.5), 4)
    names, latencies = routes(network, [(0, 3), (2, 1)])
    assert names == [["chip0.up", "chip3.down"], ["chip2.up", "chip1.down"]]
    assert latencies == [0.5, 0.5]
    assert network.n_links == 8
    assert capacity_of(network, "chip3.down") == 7.0


def test_ring_takes_the_shorter_way_and_goes_up_on_a_tie():
    network = build_network(Ring(name="r", link_bandwidth_bytes_per_s=3.0, latency_s=0.25), 6)
    names, latencies = routes(network, [(0, 1), (1, 0), (0, 2), (5, 1), (0, 3), (3, 0), (1, 5)])
    assert names == [
        ["chip0>chip1"],
        ["chip1>chip0"],
        ["chip0>chip1", "chip1>chip2"],
        ["chip5>chip0", "chip0>chip1"],
        ["chip0>chip1", "chip1>chip2", "chip2>chip3"],
        ["chip3>chip4", "chip4>chip5", "chip5>chip0"],
        ["chip1>chip0", "chip0>chip5"],
    ]
    # Per link.
    assert latencies == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 0.5]


def test_nodes_with_a_nic_per_chip():
    network = build_network(hgx(4, 4, up=9.0, nic=2.0), 8)
    names, _ = routes(network, [(0, 3), (1, 6), (7, 0)])
    # Across nodes: NICs only, no scale-up link; a spine that never blocks has no links of its own.
    assert names == [
        ["node0.chip0.up", "node0.chip3.down"],
        ["node0.nic1.out", "node1.nic2.in"],
        ["node1.nic3.out", "node0.nic0.in"],
    ]
    assert (capacity_of(network, "node1.chip2.up"), capacity_of(network, "node1.nic3.in")) == (9.0, 2.0)


def test_chips_share_nics():
    """Chip i of a node uses NIC floor(i * nics / chips used): of 8 chips and 2 NICs, chips 0-3 the first."""
    network = build_network(hgx(8, 2), 16)
    names, _ = routes(network, [(chip, 8 + chip) for chip in range(8)])
    assert [route[0] for route in names] == ["node0.nic0.out"] * 4 + ["node0.nic1.out"] * 4
    assert [route[1] for route in names] == ["node1.nic0.in"] * 4 + ["node1.nic1.in"] * 4
    network = build_network(hgx(5, 3), 10)
    names, _ = routes(network, [(chip, 5) for chip in range(5)])
    # floor(0, 0.6, 1.2, 1.8, 2.4)
    assert [route[0][9] for route in names] == ["0", "0", "1", "1", "2"]


def test_an_oversubscribed_spine_has_a_link_per_node():
    """Each node's NICs share nics * rate / oversubscription up and down: 4 * 2 / 2.5 = 3.2."""
    network = build_network(hgx(4, 4, nic=2.0, over=2.5), 8)
    names, _ = routes(network, [(0, 1), (1, 6)])
    assert names == [
        ["node0.chip0.up", "node0.chip1.down"],
        ["node0.nic1.out", "node0.up", "node1.down", "node1.nic2.in"],
    ]
    assert capacity_of(network, "node1.down") == 3.2


def test_latency_is_that_of_the_tier():
    t = Hgx(
        name="t", node_size=2, scale_up_bytes_per_s=1.0, scale_up_latency_s=2e-6, nics_per_node=2, nic_bytes_per_s=1.0,
        scale_out_latency_s=5e-6, oversubscription=2.0,
    )  # fmt: skip
    assert routes(build_network(t, 4), [(0, 1), (0, 2)])[1] == [2e-6, 5e-6]


def test_one_node_needs_no_nics():
    network = build_network(load_topology("nvl72"), 72)
    assert network.n_links == 2 * 72
    assert capacity_of(network, "node0.chip71.up") == 900e9


def test_racks_of_72_lend_64_chips_each():
    network = build_network(load_topology("nvl72"), 128)
    names, _ = routes(network, [(0, 63), (63, 64), (64, 127)])
    assert names[0] == ["node0.chip0.up", "node0.chip63.down"]
    assert names[1][0].startswith("node0.nic")
    assert names[2] == ["node1.chip0.up", "node1.chip63.down"]


@pytest.mark.parametrize(("name", "n_chips"), [("flat-450", 16), ("hgx-8", 64), ("hgx-8-oversub2", 32), ("nvl72", 128)])
def test_no_link_occurs_twice_in_a_route(name, n_chips):
    network = build_network(load_topology(name), n_chips)
    src, dst = (side.ravel().astype(np.int32) for side in np.meshgrid(range(n_chips), range(n_chips)))
    apart = src != dst
    found = network.routes(src[apart], dst[apart])
    for begin, end in zip(found.indptr[:-1], found.indptr[1:], strict=True):
        links = found.links[begin:end]
        assert 2 <= len(links) == len(set(links.tolist())) <= 4


def test_protocol_efficiency_takes_its_share(tmp_path):
    path = tmp_path / "net.toml"
    lines = ["chip_bandwidth_gbytes_per_s = 100.0", "latency_us = 1.0", "protocol_efficiency = 0.8"]
    path.write_text("\n".join(['kind = "switch"', *lines]))
    network = build_network(load_topology(str(path)), 2)
    assert network.capacities() == [80e9]
    assert network.latencies() == [1e-6]
