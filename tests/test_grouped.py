"""Grouped YAML of pod / rack / board / chip tools: what a file means, and whole deployments."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from checks import assert_closed_form, assert_conserved_and_reduced_exactly
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import deploy, priced
from test_network import all_pairs, loads, routes
from test_reduction import assert_reduced_equals_full

from g5cp_vec.cli import main
from g5cp_vec.config.topology import load_topology
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure, structure_key
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template

MACHINE = Path(__file__).parent / "data" / "pod_rack_board_chip.yaml"
BOARD = "pod_0/rack_0/board_{}"
C0, C1 = f"{BOARD.format(0)}/chip_0", f"{BOARD.format(0)}/chip_1"
CHIP = {
    "name": "SG2262",
    "frequency_ghz": 1.5,
    "cores": {"count": 4, "lanes_per_core": 64},
    "compute_units": {"cube": {"m": 16, "mac_per_lane": {"BF16": 500, "FP8": 1000, "TF32": 250}}},
    "memory": {"gmem": {"capacity_gb": 128, "bandwidth_gbps": 8601.6, "utilization": 0.75}, "lmem": {}},
}


def document(**changes):
    """The contents of `MACHINE`, some keys replaced."""
    return yaml.safe_load(MACHINE.read_text()) | changes


def written(folder, contents):
    path = folder / "machine.yaml"
    path.write_text(contents if isinstance(contents, str) else yaml.safe_dump(contents, sort_keys=False))
    return path


def load(folder, contents):
    return load_topology(str(written(folder, contents)))


def complaints(folder, contents, loader=load_topology):
    path = written(folder, contents)
    with pytest.raises(ConfigError) as caught:
        loader(str(path))
    assert all(line.startswith(f"{path}: ") and "\n" not in line and len(line) < 400 for line in caught.value.lines)
    return [line.removeprefix(f"{path}: ") for line in caught.value.lines]


def pods(*boards):
    """One pod with one rack of boards of so many chips."""
    groups = [{"count": 1, "chips": [{"name": "X", "count": n}]} for n in boards]
    return [{"count": 1, "racks": [{"count": 1, "boards": groups}]}]


def join(source, target, kind="c2c"):
    return {"source": source, "target": target, "type": kind}


# --- The machine in the file ------------------------------------------------------------------------------------------


def test_the_machine():
    """Two boards of four chips; c2c 400 GB/s and b2b 450 GB/s, of which 0.95 are used."""
    topology = load_topology(str(MACHINE))
    assert (topology.name, topology.n_chips, topology.max_chips()) == ("P1-R1-B2-C8", 8, 8)
    network = build_network(topology, 8)
    found, latencies = routes(network, [(0, 3), (5, 6), (0, 4), (7, 1), (2, 2)])
    assert found == [
        ["pod_0/rack_0/board_0/chip_0>pod_0/rack_0/board_0/chip_3"],
        ["pod_0/rack_0/board_1/chip_1>pod_0/rack_0/board_1/chip_2"],
        ["pod_0/rack_0/board_0>pod_0/rack_0/board_1"],
        ["pod_0/rack_0/board_1>pod_0/rack_0/board_0"],
        [],
    ]
    # Between boards a switch (1) and a cable (0.025) besides the link's own 0.35.
    assert latencies == pytest.approx([0.2e-6, 0.2e-6, 1.375e-6, 1.375e-6, 0.0], rel=1e-12, abs=0)
    capacity = {network.link_name(i): network.capacities()[c] for i, c in enumerate(network.link_capacity)}
    assert network.n_links == len(capacity) == 2 * 13
    assert {value for name, value in capacity.items() if "chip" in name} == {0.95 * 400e9}
    assert {value for name, value in capacity.items() if "chip" not in name} == {0.95 * 450e9}


def test_boards_share_one_link_each_way():
    network = build_network(load_topology(str(MACHINE)), 8)
    across = list(itertools.product(range(4), range(4, 8)))
    assert loads(network, across) == {f"{BOARD.format(0)}>{BOARD.format(1)}": 16}


def test_a_message_pays_once_and_every_link_pays(tmp_path):
    """Chips 0 - 1 - 2 in a row, then another board: two c2c links, one of type b2b, and one synchronisation."""
    contents = document(pods=pods(3, 1), connections=[
        join(f"{BOARD.format(0)}/chip_0", f"{BOARD.format(0)}/chip_1"),
        join(f"{BOARD.format(0)}/chip_1", f"{BOARD.format(0)}/chip_2"),
        join(f"{BOARD.format(0)}/chip_2", f"{BOARD.format(1)}/chip_0", "b2b"),
    ])  # fmt: skip
    contents["interconnect"]["comm_params"] |= {"sync_latency_us": 3, "switch_latency_us": 1, "cable_latency_us": 0.5}
    _, latencies = routes(build_network(load(tmp_path, contents), 4), [(0, 1), (0, 2), (0, 3)])
    assert latencies == pytest.approx([3.2e-6, 3.4e-6, 3.4e-6 + 1.85e-6], rel=1e-12, abs=0)


def test_racks_and_pods(tmp_path):
    """Two pods of two racks of one board of two chips, numbered in that order."""
    counts = [{"count": 2, "racks": [{"count": 2, "boards": [{"count": 1, "chips": [{"name": "X", "count": 2}]}]}]}]
    boards = [f"pod_{p}/rack_{r}/board_0" for p in range(2) for r in range(2)]
    connections = [join(f"{board}/chip_0", f"{board}/chip_1") for board in boards]
    connections += [join(f"pod_{p}/rack_0", f"pod_{p}/rack_1", "r2r") for p in range(2)]
    connections += [join("pod_0", "pod_1", "p2p")]
    network = build_network(load(tmp_path, document(pods=counts, connections=connections)), 8)
    found, latencies = routes(network, [(4, 5), (1, 2), (3, 4), (7, 0)])
    assert found == [
        ["pod_1/rack_0/board_0/chip_0>pod_1/rack_0/board_0/chip_1"],
        ["pod_0/rack_0>pod_0/rack_1"],
        ["pod_0>pod_1"],
        ["pod_1>pod_0"],
    ]
    assert latencies == pytest.approx([0.2e-6, 3.025e-6, 6.025e-6, 6.025e-6], rel=1e-12, abs=0)


def test_groups_are_numbered_one_after_another(tmp_path):
    """Boards of two, then of three chips, from two groups."""
    last = f"{BOARD.format(1)}/chip_2"
    connections = [join(BOARD.format(0), BOARD.format(1), "b2b")]
    topology = load(tmp_path, document(pods=pods(2, 3), connections=connections))
    assert topology.n_chips == 5
    (line,) = complaints(tmp_path, document(pods=pods(2, 3), connections=[*connections, join(last, last)]))
    assert line == f"connections[1].target: {last!r} is the source itself"


# --- Against every path tried -----------------------------------------------------------------------------------------


@st.composite
def machines(draw):
    """Boards of a few chips; some chips and some boards joined; all of it hangs together."""
    boards = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    chips = [f"{BOARD.format(b)}/chip_{c}" for b, n in enumerate(boards) for c in range(n)]
    units = chips + [BOARD.format(b) for b in range(len(boards))]
    order = draw(st.permutations(chips))
    pairs = {frozenset((order[draw(st.integers(0, i - 1))], order[i])) for i in range(1, len(order))}
    extra = [(a, b) for a, b in itertools.combinations(units, 2) if a.count("/") == b.count("/")]
    if extra:
        pairs |= {frozenset(pair) for pair in draw(st.lists(st.sampled_from(extra), max_size=6))}
    ordered = [sorted(pair) for pair in sorted(pairs, key=sorted)]
    connections = [join(*draw(st.permutations(pair)), draw(st.sampled_from(["c2c", "b2b", "r2r"]))) for pair in ordered]
    return boards, draw(st.permutations(connections))


def chips_of(boards, path):
    chips = [f"{BOARD.format(b)}/chip_{c}" for b, n in enumerate(boards) for c in range(n)]
    return [i for i, chip in enumerate(chips) if chip == path or chip.startswith(path + "/")]


@given(machine=machines(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_routes(machine, data, tmp_path_factory):
    boards, connections = machine
    contents = document(pods=pods(*boards), connections=connections)
    topology = load(tmp_path_factory.mktemp("machine"), contents)
    used = data.draw(st.integers(1, sum(boards)))
    network = build_network(topology, used)
    # Every way from chip to chip: the link taken and its type.
    ways = {}
    for one in connections:
        for a, b in ((one["source"], one["target"]), (one["target"], one["source"])):
            for src, dst in itertools.product(chips_of(boards, a), chips_of(boards, b)):
                ways.setdefault(src, []).append((dst, f"{a}>{b}", one["type"]))
    us = {"c2c": Fraction("0.2"), "b2b": Fraction("1.375"), "r2r": Fraction("3.025")}
    pairs = all_pairs(used)
    found, latencies = routes(network, pairs)
    for (src, dst), route, seconds in zip(pairs, found, latencies, strict=True):
        # Places reached and the links taken to there, one link more at a time.
        reached, seen = {src: [[]]}, {src}
        while dst not in reached:
            further = {}
            for chip, paths in reached.items():
                for to, link, kind in ways[chip]:
                    if to not in seen:
                        further.setdefault(to, []).extend([*path, (link, kind)] for path in paths)
            reached, seen = further, seen | set(further)
        shortest = {tuple(link for link, _ in path): [kind for _, kind in path] for path in reached[dst]}
        assert tuple(route) in shortest
        assert seconds * 1e6 == pytest.approx(float(sum(us[kind] for kind in shortest[tuple(route)])), rel=1e-12, abs=0)


@given(machine=machines(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_order_of_connections_does_not_matter(machine, data, tmp_path_factory):
    boards, connections = machine
    folder, n_chips = tmp_path_factory.mktemp("machine"), sum(boards)
    turned = [
        join(one["target"], one["source"], one["type"]) if data.draw(st.booleans()) else one for one in connections
    ]
    one, other = (
        build_network(load(folder, document(pods=pods(*boards), connections=listed)), n_chips)
        for listed in (connections, data.draw(st.permutations(turned)))
    )
    assert one.shape == other.shape
    assert routes(one, all_pairs(n_chips)) == routes(other, all_pairs(n_chips))
    assert one.link_capacity.tolist() == other.link_capacity.tolist()


# --- Deployments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [
    {"tp": 4, "dp": 2}, {"tp": 2, "cp": 4}, {"cp": 8}, {"cp": 2, "tp": 2, "pp": 2, "collective": "direct"},
    {"tp": 2, "cp": 2, "dp": 2, "phase": "decode", "rank_order": ("cp", "dp", "tp", "pp")}, {"tp": 4},
])  # fmt: skip
def test_deployments_are_conserved_and_reduced_exactly(keys):
    dep = deploy(topology=load_topology(str(MACHINE)), **keys)
    assert_conserved_and_reduced_exactly(dep)


@pytest.mark.parametrize("fault", [
    {"chip": [5], "factor": 0.8}, {"link": f"{BOARD.format(0)}>*", "factor": 0.5}, {"link": f"{C0}>{C1}", "factor": 0.5}
])  # fmt: skip
def test_reduced_equals_full_with_faults(fault, tmp_path):
    dep = deploy(topology=load(tmp_path, document(degrade=[fault])), tp=2, cp=4)
    assert dep.topology.is_degraded
    structure = build_structure(dep)
    assert_reduced_equals_full(structure, priced(dep, structure, 4096))


def test_the_closed_form_of_a_ring_on_each_board():
    assert_closed_form({"tp": 4, "dp": 2, "topology": load_topology(str(MACHINE))}, 8)


def test_boards_are_one_class():
    dep = deploy(topology=load_topology(str(MACHINE)), tp=4, dp=2)
    assert len(Template(build_structure(dep), reduced=True).chips) == 1


def test_numbers_are_no_part_of_a_structure(tmp_path):
    slow = document()
    slow["interconnect"]["links"]["b2b"] = {"bandwidth_gbps": 1, "latency_us": 9}
    keys = []
    for topology in (load_topology(str(MACHINE)), load(tmp_path, slow)):
        keys.append(structure_key(deploy(topology=topology, tp=4, dp=2), build_network(topology, 8)))
    assert keys[0] == keys[1]


def test_one_chip_needs_no_connection(tmp_path):
    topology = load(tmp_path, document(pods=pods(1), connections=[]))
    assert routes(build_network(topology, 1), [(0, 0)]) == ([[]], [0.0])
    dep = deploy(topology=topology)
    structure = build_structure(dep)
    assert simulate_point(Template(structure, reduced=True), priced(dep, structure, 1024), 0)[1].max() > 0


GRID = """
name = "machine"
[fixed]
model = "llama-3.1-8b"
chip = "{chip}"
topology = "machine.yaml"
n_chips = 8
seq_len = "8K"
[axes]
phase = ["prefill", "decode"]
tp = [2, 4]
cp = [1, 2]
"""


def test_a_grid_names_the_machine(tmp_path):
    written(tmp_path, document(chips={"SG2262": CHIP}))
    for chip in ("sg2262", "machine.yaml"):
        (tmp_path / "grid.toml").write_text(GRID.format(chip=chip))
        for command in (["check"], ["sweep", "-o", str(tmp_path / f"of {chip}"), "--audit", "all", "--quiet"]):
            result = CliRunner().invoke(main, [command[0], str(tmp_path / "grid.toml"), *command[1:]])
            assert result.exit_code == 0, result.output


def test_a_chip_without_rates_stops_a_grid(tmp_path):
    written(tmp_path, MACHINE.read_text())
    (tmp_path / "grid.toml").write_text(GRID.format(chip="machine.yaml"))
    result = CliRunner().invoke(main, ["check", str(tmp_path / "grid.toml")])
    assert result.exit_code == 2
    assert "chips.SG2262.compute_units.cube.mac_per_lane: missing" in result.output
    assert "Traceback" not in result.output
