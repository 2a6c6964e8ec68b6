"""Whole deployments on torus, full mesh and graph: conserved, reduced exactly, and as the closed form has them."""

from __future__ import annotations

import pytest
from checks import assert_closed_form, assert_conserved_and_reduced_exactly, assert_direct_exchange
from machines import graph, hgx, leaves_and_spine, mesh, ring, switch, torus
from test_acceptance_tools import MOE, deploy, play_point
from test_network import all_pairs, routes

from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure, structure_key
from g5cp_vec.runner.template import Template

# --- A kind written as another ----------------------------------------------------------------------------------------


def as_graph(topology, n_chips):
    """The links of a network of chips, one by one."""
    network = build_network(topology, n_chips)
    ends = [[int(end.removeprefix("chip")) for end in network.link_name(i).split(">")] for i in range(network.n_links)]
    return graph(n_chips, *((a, b, topology.link_bandwidth_bytes_per_s, topology.latency_s, False) for a, b in ends))


@pytest.mark.parametrize(
    ("topology", "n_chips"), [(ring(2.0, 0.5), 7), (mesh(2.0, 0.5), 6), (torus(2, bandwidth=2.0), 2)]
)
def test_without_ties_a_graph_routes_as_the_kind_it_spells(topology, n_chips):
    one, other = build_network(topology, n_chips), build_network(as_graph(topology, n_chips), n_chips)
    assert routes(one, all_pairs(n_chips)) == routes(other, all_pairs(n_chips))
    assert one.capacities() == other.capacities()


def test_a_star_is_a_switch():
    keys = {"tp": 2, "cp": 2, "dp": 2, "collective": "direct"}
    star = graph(8, *((chip, "hub", 1e9, 1e-6) for chip in range(8)))
    assert play_point(deploy(topology=star, **keys), 512) == pytest.approx(
        play_point(deploy(topology=switch(1e9, 2e-6), **keys), 512), rel=1e-12
    )


def test_two_chips_of_every_kind_are_alike():
    machines = [ring(1e9, 1e-6), torus(2, bandwidth=1e9, latency_s=1e-6), torus(1, 2, bandwidth=1e9, latency_s=1e-6),
                mesh(1e9, 1e-6), graph(2, (0, 1, 1e9, 1e-6)), switch(1e9, 1e-6)]  # fmt: skip
    times = [play_point(deploy(topology=topology, cp=2), 512) for topology in machines]
    assert times == pytest.approx([times[0]] * 6, rel=1e-12)


# --- Whole deployments ------------------------------------------------------------------------------------------------

MACHINES = {
    "torus": (torus(4, 4, bandwidth=5e10, latency_s=1e-6), 16),
    "torus of twos": (torus(2, 2, 2, bandwidth=5e10, latency_s=1e-6), 8),
    "mesh": (mesh(1e10, 1e-6), 8),
    "graph": (leaves_and_spine(16, 4, 5e-7), 16),
    "part of a graph": (leaves_and_spine(16, 4, 5e-7), 8),
}
KEYS = [
    {"tp": 4},
    {"tp": 2, "pp": 2, "collective": "direct"},
    {"model": MOE, "tp": 2, "ep": 4},
    {"tp": 2, "cp": 2, "phase": "decode", "rank_order": ("cp", "dp", "tp", "pp")},
    {"model": MOE, "cp": 4, "ep": 1, "phase": "decode"},
    {"tp": 2, "cp": 4},
]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MACHINES)
def test_deployments_are_conserved_and_reduced_exactly(name, keys):
    topology, n_chips = MACHINES[name]
    dep = deploy(topology=topology, n_chips=n_chips, dp="auto", **keys)
    assert_conserved_and_reduced_exactly(dep)


def test_a_symmetric_torus_is_one_class():
    dep = deploy(topology=torus(4, 4), tp=4, cp=4)
    assert len(Template(build_structure(dep), reduced=True).chips) == 1


def test_deployments_that_differ_in_numbers_share_a_structure():
    keys = {"tp": 4, "cp": 2}

    def key(topology):
        dep = deploy(topology=topology, **keys)
        return structure_key(dep, build_network(topology, 8))

    assert key(torus(4, 2)) == key(torus(4, 2, bandwidth=7.0, latency_s=0.1))
    assert key(torus(8)) == key(ring(3.0))
    assert len({key(torus(4, 2)), key(torus(2, 4)), key(torus(8)), key(mesh())}) == 4


@pytest.mark.parametrize("name", ["torus", "mesh", "graph"])
def test_the_closed_form_of_a_ring_of_neighbours(name):
    """Tensor-parallel rings of four neighbours meet nobody: the closed form is the simulation."""
    topology, n_chips = MACHINES[name]
    assert_closed_form({"tp": 4, "dp": n_chips // 4, "topology": topology}, n_chips)


@pytest.mark.parametrize(("topology", "n_messages"), [
    (switch(1e9), 3),  # a chip's own three leave by one link
    (mesh(1e9), 1),
    (torus(4, bandwidth=1e9), 3),  # around a ring: to the next, to the one after, and from the one before to the next
    (torus(2, 2, bandwidth=1e9), 2),  # beside, and across; or across, from beside
    (graph(4, *((chip, "hub", 1e9) for chip in range(4))), 3),
    (hgx(2, 2, up=1e11, nic=1e9), 2),  # to both chips of the other node
])  # fmt: skip
def test_the_closed_form_of_a_direct_exchange(topology, n_messages):
    assert_direct_exchange(topology, n_messages, 1e9)
