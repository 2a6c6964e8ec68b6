"""Refining one block per distinct layer is refining the whole graph: the same classes, and the same times.

Classes are found on the blocks side by side. Copied along the chain they must be an equitable partition of the whole
graph, by the definition, and the coarsest there is, by refining the whole graph.
"""

from __future__ import annotations

import itertools
from typing import get_args

import naive
import numpy as np
import pytest
from machines import fat_tree, faulty, hgx, leaves_and_spine, mesh, ring, switch, tiered, torus
from test_acceptance_tools import EXPERTS, MOE, deploy, predecessors, priced, small_model
from test_attention_kinds import MIXED, structure_of
from test_engine_quotient import as_parts
from test_grouped import MACHINE

from g5cp_vec.config.topology import Topology, load_topology
from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.engine.quotient import refine
from g5cp_vec.mapping.reduce import _side_by_side
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template

N_CHIPS, SEQ_LEN = 8, 4096
TOPOLOGIES = {
    "switch": switch(1e10, 1e-6),
    "hgx": hgx(4, 4, up=4e10, nic=1e10),
    "hgx, chips share NICs": hgx(4, 2, up=4e10, nic=1e10),
    "hgx, shared spine": hgx(2, 2, up=4e10, nic=1e10, over=2),
    "hgx, one node in part": hgx(6, 3, up=4e10, nic=1e10),
    "ring": ring(1e10, 1e-6),
    "torus": torus(2, 2, 2, bandwidth=1e10, latency_s=1e-6),
    "torus of unlike dimensions": torus(4, 2, bandwidth=1e10, latency_s=1e-6),
    "full mesh": mesh(1e10, 1e-6),
    "graph": leaves_and_spine(N_CHIPS, 2, 1e-6),
    "fat tree": fat_tree((2, 2e10, 1e-6, 2.0), (2, 2e10, 2e-6), (4, 1e10, 3e-6)),
    "tiers": tiered(("board", 4, "ring", 4e10, 1e-6), ("rack", 2, "full_mesh", 1e10, 2e-6)),
    "boards in a file": load_topology(str(MACHINE)),
}
LAYOUTS = {
    "ring attention": {"cp": 8},
    "shards and stages": {"tp": 2, "cp": 2, "pp": 2, "model": small_model(n_layers=5)},
    "replicas, another order": {"tp": 2, "cp": 2, "dp": 2, "rank_order": ("dp", "cp", "tp", "pp")},
    "one shard each of experts": {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "model": MOE},
    "experts split over a shard group": {"tp": 4, "cp": 2, "ep": 2, "model": MOE},
    "experts split over replicas": {"tp": 2, "cp": 2, "dp": 2, "ep": 1, "model": MOE},
    "experts and stages": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "ep": 2,
        "model": small_model(n_layers=5, moe=EXPERTS, first_dense=2),
    },
    "windows beside full attention": {"tp": 2, "cp": 4, "model": MIXED["window"]},
    "linear attention and experts": {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "model": MIXED["delta"]},
    "sparse attention": {"cp": 4, "dp": 2, "ep": 2, "model": MIXED["sparse"]},
    "sequence split over shards": {"tp": 4, "dp": 2, "tp_sp": True},
}
FORMS = list(itertools.product(["prefill", "decode"], ["ring", "direct"]))
# A system for every topology and layout; what phase and collective it has, its place in the table decides.
SYSTEMS = [(t, layout, FORMS[(i + j) % 4]) for i, t in enumerate(TOPOLOGIES) for j, layout in enumerate(LAYOUTS)]


def deployment(topology, layout, form):
    phase, collective = form
    return deploy(topology=topology, phase=phase, collective=collective, **LAYOUTS[layout])


def whole_system(structure):
    """The whole graph as `naive.reductions` wants it: entries and exits have become edges."""
    ops, g = structure.ops, structure.ops.graph
    waits = predecessors(ops)
    listed = [
        {
            "label": (int(g.op_rank[op]), int(g.op_cost[op]), int(g.op_latency[op])),
            "kind": "compute" if g.op_kind[op] == COMPUTE else "flow",
            "chip": int(g.op_chip[op]),
            "preds": sorted(waits[op]),
            "entries": [],
            "route": g.route_indices[g.route_indptr[op] : g.route_indptr[op + 1]].tolist(),
        }
        for op in range(len(g.op_kind))
    ]
    chips = [{"label": int(rate), "exits": []} for rate in structure.network.chip_rate]
    return {"ops": listed, "chips": chips, "links": [{"label": int(c)} for c in structure.network.link_capacity]}


def blockwise_colours(structure):
    """Colours of the whole graph's ops, chips and links by refining each distinct block once."""
    parts, first = _side_by_side(structure)
    ops, chips, links = refine(parts, 0)
    places = [
        (place, colour) for place, i in enumerate(structure.chain) for colour in ops[first[i] : first[i + 1]].tolist()
    ]
    return naive.numbered(places), chips.tolist(), links.tolist()


def assert_blocks_are_enough(dep):
    """Return the colours of the chips."""
    structure = structure_of(dep, SEQ_LEN)
    system, colours = whole_system(structure), blockwise_colours(structure)
    assert naive.is_equitable(system, *colours)
    assert [c.tolist() for c in refine(as_parts(system), 0)] == list(colours)
    rows = priced(dep, structure, SEQ_LEN)
    full = simulate_point(Template(structure, reduced=False), rows, 0)
    reduced = simulate_point(Template(structure, reduced=True), rows, 0)
    makespan = full[1].max()
    np.testing.assert_allclose(reduced, full, rtol=0, atol=1e-12 * makespan)
    # Even without reducing anything, ops of one class start and end together.
    first = np.unique(colours[0], return_index=True)[1]
    for times in full:
        np.testing.assert_allclose(times, times[first][colours[0]], rtol=0, atol=1e-12 * makespan)
    return colours[1]


def test_every_kind_of_topology_is_there():
    assert {type(topology) for topology in TOPOLOGIES.values()} == set(get_args(Topology))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_blocks_are_enough(topology, layout):
    for form in FORMS:
        assert_blocks_are_enough(deployment(TOPOLOGIES[topology], layout, form))


@pytest.mark.parametrize(("topology", "layout", "form"), SYSTEMS)
def test_blocks_are_enough_with_a_straggler(topology, layout, form):
    slow = 5
    dep = deployment(faulty(TOPOLOGIES[topology], {"chip": slow, "factor": 0.8}), layout, form)
    chips = assert_blocks_are_enough(dep)
    assert chips.count(chips[slow]) == 1


@pytest.mark.parametrize(("topology", "layout", "form"), SYSTEMS)
def test_blocks_are_enough_with_a_degraded_link(topology, layout, form):
    """A link that messages cross, alone and beside a straggler."""
    sound = structure_of(deployment(TOPOLOGIES[topology], layout, form), SEQ_LEN)
    crossed = np.unique(np.concatenate([block.route_links for block in sound.blocks]))
    link = {"link": sound.network.link_name(int(crossed[len(crossed) // 3])), "factor": 0.5}
    for faults in ([link], [link, {"chip": 2, "factor": 0.9}]):
        assert_blocks_are_enough(deployment(faulty(TOPOLOGIES[topology], *faults), layout, form))


@pytest.mark.parametrize("topology", [switch(1e10), faulty(switch(1e10), {"chip": 1, "factor": 0.5}), ring(1e10)])
@pytest.mark.parametrize("keys", [{"cp": 4}, {"tp": 2, "cp": 2, "phase": "decode"}, {"dp": 2, "tp": 2, "model": MOE}])
def test_the_whole_graph_refined_by_the_definition(topology, keys):
    structure = structure_of(deploy(topology=topology, **keys), SEQ_LEN)
    assert naive.refine(whole_system(structure)) == list(blockwise_colours(structure))


def test_symmetry_is_found_and_lost():
    """One class of chips where all are alike; a straggler tells a ring apart rank by rank."""
    one, other = (
        blockwise_colours(structure_of(deployment(topology, "ring attention", FORMS[0]), SEQ_LEN))[1]
        for topology in (TOPOLOGIES["switch"], faulty(TOPOLOGIES["switch"], {"chip": 5, "factor": 0.8}))
    )
    assert one == [0] * N_CHIPS
    assert other == list(range(N_CHIPS))
