"""Routes and loads of torus, full mesh and graph: against slow obvious twins and by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import graph, mesh, ring, torus
from test_acceptance_tools import deploy

from g5cp_vec.mapping.graph import REASON
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure


def routes(network, pairs):
    """Names of the links of each route, and its latency in seconds."""
    src, dst = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    found = network.routes(src, dst)
    assert (found.indptr.dtype, found.links.dtype, found.latency.dtype) == (np.int64, np.int32, np.int32)
    links = [found.links[begin:end].tolist() for begin, end in itertools.pairwise(found.indptr)]
    return [[network.link_name(link) for link in route] for route in links], [
        network.latencies()[i] for i in found.latency
    ]


def all_pairs(n_chips):
    return list(itertools.product(range(n_chips), repeat=2))


def loads(network, pairs):
    """How many routes cross each link that any crosses."""
    return Counter(name for route in routes(network, pairs)[0] for name in route)


def chips_passed(route):
    """The chips or switches that the links of a route leave, and the last that they enter; each link starts there."""
    ends = [name.split(">") for name in route]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    return [ends[0][0], *(end for _, end in ends)]


# --- Torus ------------------------------------------------------------------------------------------------------------


def walk_torus(dims, src, dst):
    """Links crossed from one chip to another, coordinate by coordinate."""

    def number(place):
        n = 0
        for size, x in reversed(list(zip(dims, place, strict=True))):
            n = n * size + x
        return n

    def coordinates(chip):
        place = []
        for size in dims:
            place.append(chip % size)
            chip //= size
        return place

    at, to, crossed = coordinates(src), coordinates(dst), []
    for axis, size in enumerate(dims):
        up = [(at[axis] + hops) % size for hops in range(size)].index(to[axis])
        down = [(at[axis] - hops) % size for hops in range(size)].index(to[axis])
        while at[axis] != to[axis]:
            before = number(at)
            at[axis] = (at[axis] + (1 if up <= down else -1)) % size
            crossed.append(f"chip{before}>chip{number(at)}")
    return crossed


@given(dims=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_torus_routes(dims, data):
    n_chips = math.prod(dims)
    network = build_network(torus(*dims, latency_s=0.25), n_chips)
    chip = st.integers(0, n_chips - 1)
    pairs = data.draw(st.lists(st.tuples(chip, chip), min_size=1, max_size=20))
    found, latencies = routes(network, pairs)
    assert found == [walk_torus(dims, *pair) for pair in pairs]
    assert latencies == [0.25 * len(route) for route in found]


@pytest.mark.parametrize("dims", [(1,), (2,), (5,), (4, 4), (2, 2, 2), (3, 1, 4), (1, 1)])
def test_torus_routes_of_all_pairs(dims):
    pairs = all_pairs(math.prod(dims))
    assert routes(build_network(torus(*dims), math.prod(dims)), pairs)[0] == [walk_torus(dims, *pair) for pair in pairs]


def test_torus_by_hand():
    """Chip 5 of 4 by 3 is (1, 1), chip 11 is (3, 2): two links upwards (a tie), then one upwards."""
    found, latencies = routes(build_network(torus(4, 3, latency_s=1e-6), 12), [(5, 11), (0, 3), (0, 8), (0, 11)])
    assert found == [
        ["chip5>chip6", "chip6>chip7", "chip7>chip11"],
        ["chip0>chip3"],  # once around the first dimension
        ["chip0>chip8"],  # once around the second
        ["chip0>chip3", "chip3>chip11"],
    ]
    assert latencies == [3e-6, 1e-6, 1e-6, 2e-6]


def test_ranks_that_follow_one_another_are_neighbours():
    """Tensor-parallel groups of four lie along the first dimension: each step of their rings is one link."""
    dep = deploy(topology=torus(4, 2), tp=4, dp=2)
    structure = build_structure(dep)
    ops = structure.ops
    lengths = np.diff(ops.graph.route_indptr)[ops.op_reason == REASON["tp"]]
    assert set(lengths.tolist()) == {1}
    # With replicas first, chips 0, 2, 4 and 6 are a group: (0, 0), (2, 0), (0, 1), (2, 1).
    across = build_structure(deploy(topology=torus(4, 2), tp=4, dp=2, rank_order=("dp", "tp", "cp", "pp"))).ops
    assert set(np.diff(across.graph.route_indptr)[across.op_reason == REASON["tp"]].tolist()) == {2, 3}


@pytest.mark.parametrize("n_chips", [1, 2, 3, 4, 9, 10])
def test_a_ring_is_a_torus_of_one_dimension(n_chips):
    one, other = (
        build_network(ring(3.0, 0.5), n_chips),
        build_network(torus(n_chips, bandwidth=3.0, latency_s=0.5), n_chips),
    )
    assert routes(one, all_pairs(n_chips)) == routes(other, all_pairs(n_chips))
    assert one.shape == other.shape
    assert (one.capacities(), one.latencies()) == (other.capacities(), other.latencies())


def test_neighbours_share_no_link():
    """Everyone sends upwards to its neighbour along a dimension: every link of that way carries one message."""
    network, dims = build_network(torus(5, 4), 20), (5, 4)
    for axis, stride in enumerate((1, 5)):
        following = [(c, c + ((c // stride + 1) % dims[axis] - c // stride % dims[axis]) * stride) for c in range(20)]
        assert loads(network, following) == {f"chip{src}>chip{dst}": 1 for src, dst in following}


@pytest.mark.parametrize(("n_chips", "up", "down"), [(5, 3, 3), (6, 6, 3), (2, 1, 0), (3, 1, 1)])
def test_everyone_to_everyone_around_a_ring(n_chips, up, down):
    """Distances 1, 2, ... load each upward link once, twice, ...; half way round counts upwards.

    Of 5: 1 + 2 each way. Of 6: 1 + 2 + 3 upwards, 1 + 2 downwards. Of 2: half way is 1, upwards.
    """
    found = loads(build_network(torus(n_chips), n_chips), all_pairs(n_chips))
    wanted = {f"chip{c}>chip{(c + 1) % n_chips}": up for c in range(n_chips)}
    wanted |= {f"chip{(c + 1) % n_chips}>chip{c}": down for c in range(n_chips) if down}
    assert found == wanted


def test_a_dimension_of_two_has_one_link_each_way():
    """2 bytes there, 2 bytes back, at 1 byte/s: 2 s, not shared. Two messages the same way share: 4 s."""
    network = build_network(torus(2, latency_s=0.5), 2)
    assert network.n_links == 2
    assert [network.link_name(link) for link in range(2)] == ["chip0>chip1", "chip1>chip0"]
    assert routes(network, [(0, 1), (1, 0), (0, 0)]) == ([["chip0>chip1"], ["chip1>chip0"], []], [0.5, 0.5, 0.0])
    assert loads(network, [(0, 1), (1, 0), (0, 1)]) == {"chip0>chip1": 2, "chip1>chip0": 1}


# --- Full mesh --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_chips", [1, 2, 3, 8])
def test_mesh_routes(n_chips):
    network = build_network(mesh(latency_s=0.25), n_chips)
    pairs = all_pairs(n_chips)
    found, latencies = routes(network, pairs)
    assert found == [[] if src == dst else [f"chip{src}>chip{dst}"] for src, dst in pairs]
    assert latencies == [0.0 if src == dst else 0.25 for src, dst in pairs]
    # One message on every link, and no link besides.
    assert loads(network, pairs) == {network.link_name(link): 1 for link in range(network.n_links)}


# --- Graph ------------------------------------------------------------------------------------------------------------


def chip_number(node):
    return int(node.removeprefix("chip")) if node.startswith("chip") else math.inf


def best_path(ways, src, dst):
    """Of all shortest paths, found by trying every one, the first in order of nodes: chips, then switches by name."""
    following = {}
    for a, b in ways:
        following.setdefault(a, []).append(b)
    waiting, found = deque([[src]]), []
    while waiting and not (found and len(waiting[0]) >= len(found[0])):
        path = waiting.popleft()
        for node in following.get(path[-1], []):
            if node == dst:
                found.append([*path, node])
            elif node not in path:
                waiting.append([*path, node])
    return min((p for p in found if len(p) == len(found[0])), key=lambda p: [(chip_number(n), n) for n in p])


@st.composite
def graphs(draw):
    """A strongly connected graph of a few chips and switches; latencies of few values, some links one way."""
    n_chips, n_switches = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    nodes = [*range(n_chips), *(f"sw{'abc'[i]}" for i in range(n_switches))]
    order = draw(st.permutations(nodes))
    # A tree holds it together; some more links, each way or one way.
    ends = {(order[draw(st.integers(0, i - 1))], order[i]): True for i in range(1, len(order))}
    for a, b in draw(st.lists(st.tuples(st.sampled_from(nodes), st.sampled_from(nodes)), max_size=10)):
        both = draw(st.booleans())
        taken = {(x, y) for (x, y), two in ends.items()} | {(y, x) for (x, y), two in ends.items() if two}
        if a != b and (a, b) not in taken and not (both and (b, a) in taken):
            ends[a, b] = both
    wires = [
        (a, b, draw(st.sampled_from([1.0, 2.0])), draw(st.sampled_from([0.1, 0.2, 0.7])), both)
        for (a, b), both in ends.items()
    ]
    return n_chips, draw(st.permutations(wires))


def spelled(node):
    return f"chip{node}" if isinstance(node, int) else node


@given(given_graph=graphs(), data=st.data())
def test_graph_routes(given_graph, data):
    n_chips, wires = given_graph
    used = data.draw(st.integers(1, n_chips))
    network = build_network(graph(n_chips, *wires), used)
    latency = {(spelled(a), spelled(b)): s for a, b, _, s, _ in wires}
    latency |= {(spelled(b), spelled(a)): s for a, b, _, s, both in wires if both}
    pairs = [pair for pair in all_pairs(used) if pair[0] != pair[1]]
    if not pairs:
        assert routes(network, [(0, 0)]) == ([[]], [0.0])
        return
    found, latencies = routes(network, pairs)
    for (src, dst), route, seconds in zip(pairs, found, latencies, strict=True):
        path = best_path(latency, f"chip{src}", f"chip{dst}")
        assert chips_passed(route) == path
        assert seconds == float(sum(Fraction(latency[step]) for step in itertools.pairwise(path)))


@given(given_graph=graphs(), data=st.data())
@settings(max_examples=50)
def test_the_order_of_the_list_does_not_matter(given_graph, data):
    n_chips, wires = given_graph
    turned = [(b, a, *rest) if rest[-1] and data.draw(st.booleans()) else (a, b, *rest) for a, b, *rest in wires]
    one = build_network(graph(n_chips, *wires), n_chips)
    other = build_network(graph(n_chips, *data.draw(st.permutations(turned))), n_chips)
    assert one.shape == other.shape
    assert routes(one, all_pairs(n_chips)) == routes(other, all_pairs(n_chips))
    assert (one.capacities(), one.latencies()) == (other.capacities(), other.latencies())
    assert one.link_capacity.tolist() == other.link_capacity.tolist()


@given(parents=st.lists(st.integers(0, 30), min_size=1, max_size=7), data=st.data())
@settings(max_examples=50)
def test_relabelled_chips_take_relabelled_routes(parents, data):
    """On a tree, where there is one route, another numbering of the chips renames the links and nothing else."""
    n_chips = len(parents) + 1
    new = data.draw(st.permutations(range(n_chips)))
    edges = [(parent % (i + 1), i + 1) for i, parent in enumerate(parents)]
    one = build_network(graph(n_chips, *((a, b, 1.0 + a, 0.5 * b) for a, b in edges)), n_chips)
    other = build_network(graph(n_chips, *((new[a], new[b], 1.0 + a, 0.5 * b) for a, b in edges)), n_chips)
    pairs = all_pairs(n_chips)
    found, latencies = routes(one, pairs)
    renamed, same = routes(other, [(new[a], new[b]) for a, b in pairs])
    assert latencies == same

    def rename(name):
        return ">".join(f"chip{new[int(end.removeprefix('chip'))]}" for end in name.split(">"))

    assert [[rename(name) for name in route] for route in found] == renamed


def test_graph_by_hand():
    """Two leaves under two spines: the first spine of two equal ones; a direct link where there is one."""
    leaves = [(chip, f"leaf{chip // 2}", 4.0, 1e-6) for chip in range(4)]
    spines = [(f"leaf{leaf}", f"spine{s}", 8.0, 2e-6) for leaf in range(2) for s in "ab"]
    network = build_network(graph(4, *leaves, *spines, (1, 2, 1.0, 5e-6)), 4)
    found, latencies = routes(network, [(0, 1), (0, 3), (3, 0), (1, 2), (0, 2)])
    assert found == [
        ["chip0>leaf0", "leaf0>chip1"],
        ["chip0>leaf0", "leaf0>spinea", "spinea>leaf1", "leaf1>chip3"],
        ["chip3>leaf1", "leaf1>spinea", "spinea>leaf0", "leaf0>chip0"],
        ["chip1>chip2"],
        ["chip0>leaf0", "leaf0>chip1", "chip1>chip2"],  # chips forward; three links against four
    ]
    assert latencies == pytest.approx([2e-6, 6e-6, 6e-6, 5e-6, 7e-6], rel=1e-15)
    by_name = {network.link_name(link): network.capacities()[network.link_capacity[link]] for link in range(18)}
    assert (by_name["leaf0>chip1"], by_name["spinea>leaf1"], by_name["chip2>chip1"]) == (4.0, 8.0, 1.0)


def test_capacities_and_latencies_are_as_many_as_differ():
    network = build_network(graph(3, (0, "s", 5.0, 1.0), (1, "s", 5.0, 2.0), (2, "s", 7.0, 1.0)), 3)
    assert sorted(network.capacities()) == [5.0, 7.0]
    # Not one for every pair: there and back cross the same latencies.
    assert sorted(network.latencies()) == [0.0, 2.0, 3.0]


def test_idle_chips_stay_in_place():
    """The last chip is not used, but the way between the others leads through it."""
    network = build_network(graph(3, (0, 2), (2, 1)), 2)
    assert routes(network, [(0, 1)])[0] == [["chip0>chip2", "chip2>chip1"]]


def test_shape_tells_wiring_from_numbers():
    wires = [(0, 1, 1.0, 1.0), (1, 2, 1.0, 1.0), (2, 0, 2.0, 1.0)]
    base = build_network(graph(3, *wires), 3)
    faster = build_network(graph(3, *((a, b, 10 * bw, s / 3) for a, b, bw, s in wires)), 3)
    assert base.shape == faster.shape
    assert faster.capacities() == [10.0, 20.0]
    others = [
        graph(3, *((a, b, 1.0, s) for a, b, _, s in wires)),
        graph(3, *((a, b, bw, 1.0 + a) for a, b, bw, s in wires)),
        graph(3, *wires[:2]),
        graph(4, *wires, (3, 0, 2.0, 1.0)),
    ]
    shapes = [build_network(other, 3).shape for other in others] + [
        build_network(topology, n).shape
        for topology, n in [(ring(), 3), (mesh(), 3), (torus(3, 1, 2), 6), (torus(6), 6)]
    ]
    assert len({base.shape, *shapes}) == 9
    assert build_network(torus(3, 1, 2), 6).shape == build_network(torus(3, 2), 6).shape


def test_a_long_chain_and_a_wide_star():
    chain = build_network(graph(300, *((i, i + 1, 1.0, 1.0) for i in range(299))), 300)
    found, latencies = routes(chain, [(0, 299), (299, 0), (17, 18)])
    assert [len(route) for route in found] == latencies == [299, 299, 1]
    star = build_network(graph(300, *((i, "hub", 1.0, 1.0 + i) for i in range(300))), 300)
    assert routes(star, [(7, 299)]) == ([["chip7>hub", "hub>chip299"]], [308.0])
