"""Grouped YAML of pod / rack / board / chip tools: what a file means, what is refused, and whole deployments."""

from __future__ import annotations

import contextlib
import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import deploy, priced
from test_audit import SOUND
from test_network import all_pairs, assert_closed_form, loads, routes
from test_reduction import assert_reduced_equals_full

from g5cp_vec.audit.conservation import audit
from g5cp_vec.cli import main
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.topology import load_topology
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure, structure_key
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template

MACHINE = Path(__file__).parent / "data" / "pod_rack_board_chip.yaml"
BOARD = "pod_0/rack_0/board_{}"


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


# --- What is refused --------------------------------------------------------------------------------------------------

C0, C1 = f"{BOARD.format(0)}/chip_0", f"{BOARD.format(0)}/chip_1"
WRONG = {
    "no pods": (lambda d: d.pop("pods"), "pods: missing"),
    "no count": (lambda d: d["pods"][0].pop("count"), "pods[0].count: missing"),
    "count true": (lambda d: d["pods"][0].update(count=True), "pods[0].count: expected an integer, got true"),
    "count 0": (lambda d: d["pods"][0].update(count=0), "pods[0].count: expected greater than 0, got 0"),
    "count text": (
        lambda d: d["pods"][0]["racks"][0].update(count="1e9"), "pods[0].racks[0].count: expected an integer, got '1e9'"
    ),
    "many": (
        lambda d: d["pods"][0].update(count=10**9), "pods: 8000000000 chips, expected at most 4096"
    ),
    "endless": (lambda d: d["pods"][0].update(count=10**4000), "pods: more than 10^18 chips, expected at most 4096"),
    "no boards": (
        lambda d: d["pods"][0]["racks"][0].update(boards=[]),
        "pods[0].racks[0].boards: expected a list of tables, at least one, got []",
    ),
    "racks no list": (
        lambda d: d["pods"][0].update(racks={"count": 1}), "pods[0].racks: expected a list of tables, at least one, got"
    ),
    "odd key": (
        lambda d: d["pods"][0]["racks"][0]["boards"][0].update(sockets=2),
        "pods[0].racks[0].boards[0].sockets: unknown key 'sockets'",
    ),
    "two kinds": (
        lambda d: d["pods"][0]["racks"][0]["boards"][0]["chips"].append({"name": "H100", "count": 1}),
        "pods: chips 'SG2262', 'H100', expected one kind in all of a machine",
    ),
    "odd parameter": (
        lambda d: d["interconnect"]["comm_params"].update(noc_latency_us=1),
        "interconnect.comm_params.noc_latency_us: unknown key 'noc_latency_us'",
    ),
    "too much used": (
        lambda d: d["interconnect"]["comm_params"].update(bandwidth_utilization=1.5),
        "interconnect.comm_params.bandwidth_utilization: expected less than or equal to 1, got 1.5",
    ),
    "early": (
        lambda d: d["interconnect"]["comm_params"].update(sync_latency_us=-1),
        "interconnect.comm_params.sync_latency_us: expected greater than or equal to 0, got -1",
    ),
    "not a number": (
        lambda d: d["interconnect"]["links"]["c2c"].update(bandwidth_gbps=float("nan")),
        "interconnect.links.c2c.bandwidth_gbps: expected a finite number, got nan",
    ),
    "no bandwidth": (
        lambda d: d["interconnect"]["links"]["c2c"].pop("bandwidth_gbps"),
        "interconnect.links.c2c.bandwidth_gbps: missing",
    ),
    "odd link": (
        lambda d: d["interconnect"]["links"].update(d2d={}), "interconnect.links.d2d: unknown key 'd2d'; known: c2c,"
    ),
    "no rates": (
        lambda d: d["interconnect"]["links"].pop("b2b"),
        "connections[12].type: interconnect.links.b2b is missing, which has its bandwidth and latency",
    ),
    "no type": (lambda d: d["connections"][0].pop("type"), "connections[0].type: missing"),
    "odd type": (
        lambda d: d["connections"][0].update(type="nvlink"),
        "connections[0].type: expected 'c2c', 'b2b', 'r2r' or 'p2p', got 'nvlink'",
    ),
    "no such chip": (
        lambda d: d["connections"][0].update(target=f"{BOARD.format(0)}/chip_9"),
        "connections[0].target: no 'pod_0/rack_0/board_0/chip_9', pod_0/rack_0/board_0 has no chip_9",
    ),
    "no such rack": (
        lambda d: d["connections"][0].update(source="pod_0/rack_7/board_0/chip_1"),
        "connections[0].source: no 'pod_0/rack_7/board_0/chip_1', pod_0 has no rack_7",
    ),
    "no such pod": (
        lambda d: d["connections"][0].update(source="pod_3"), "connections[0].source: no 'pod_3', the machine has no po"
    ),
    "no path": (
        lambda d: d["connections"][0].update(target="board_0/chip_1"),
        "connections[0].target: expected a path like pod_0/rack_0/board_0/chip_0 or the beginning of one, got 'board_0",
    ),
    "padded": (lambda d: d["connections"][0].update(target=C1.replace("chip_1", "chip_01")), "connections[0].target: "),
    "number": (lambda d: d["connections"][0].update(target=3), "connections[0].target: expected a string, got 3"),
    "itself": (lambda d: d["connections"][0].update(target=C0), f"connections[0].target: {C0!r} is the source itself"),
    "unequal": (
        lambda d: d["connections"][0].update(target=BOARD.format(1)),
        "connections[0].target: 'pod_0/rack_0/board_1' is a board and the source a chip; join equals",
    ),
    "twice": (
        lambda d: d["connections"].append(join(C1, C0, "b2b")),
        f"connections[13]: joins {C1} and {C0} as connections[0] does; keep one",
    ),
    "cut off": (
        lambda d: d["connections"].pop(),
        f"connections: no route from {C0} to pod_0/rack_0/board_1/chip_0",
    ),
    "none": (
        lambda d: d.pop("connections"),
        "connections: missing; list what joins what, or describe the machine in TOML with kind = 'tiered'",
    ),
    "no list": (lambda d: d.update(connections=C0), "connections: expected a list of tables, got 'pod_0/rack_0/boar"),
    "chips no table": (lambda d: d.update(chips=[1]), "chips: "),
    "SI key": (
        lambda d: d["interconnect"]["links"]["c2c"].update(latency_s=1), "interconnect.links.c2c.latency_s: unknown ke"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_machines(case, tmp_path):
    change, message = WRONG[case]
    contents = document()
    change(contents)
    if case == "endless":  # beyond what may be shown, and read back, as digits
        contents = json.dumps(document()).replace('"count": 1, "racks"', f'"count": {"9" * 4000}, "racks"')
    (line,) = complaints(tmp_path, contents)
    assert line.startswith(message)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
BROKEN = {
    "bomb": (BOMB, "is not YAML that can be read: more than 2097152 values, aliases written out (line 2"),
    "itself": ("pods: &a [*a]\n", "is not YAML that can be read: alias *a stands inside what it stands for, or before"),
    "unknown": ("pods: *a\n", "is not YAML that can be read: "),
    "deep": ("pods: " + "[" * 5000, "is not YAML that can be read: "),
    "nested": ("pods: " + "[" * 500 + "]" * 500, "is not YAML that can be read: is nested too deeply (line 1"),
    "twice": ("name: a\nname: b\n", "is not YAML that can be read: key 'name' stands twice (line 2, column 1)"),
    "no text": ("5: a\n", "is not YAML that can be read: a key that is no text (line 1, column 1)"),
    "table as key": ("{a: b}: c\n", "is not YAML that can be read: a key that is no text"),
    "object": (
        "name: !!python/object/apply:os.system ['true']\n",
        "is not YAML that can be read: could not determine a",
    ),
    "open": ("pods: [", "is not YAML that can be read: "),
    "two": ("a: 1\n---\nb: 2\n", "is not YAML that can be read: "),
    "list": ("- a\n", "holds no keys, expected a YAML table"),
    "empty": ("", "holds no keys, expected a YAML table"),
    "bell": ("name: \a\n", "is not valid YAML: "),
    "no date": ("name: 2024-99-99\n", "is not valid YAML: "),
    "date": ("name: 2024-01-01\npods: 3\n", "name: expected a string, got "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_yaml(case, tmp_path):
    text, message = BROKEN[case]
    assert complaints(tmp_path, text)[0].startswith(message)


def test_aliases_are_what_they_stand_for(tmp_path):
    """As tools write tables that occur twice."""
    text = (
        MACHINE.read_text()
        .replace("c2c: {bandwidth_gbps: 400, latency_us: 0.2}", "c2c: &c {bandwidth_gbps: 400, latency_us: 0.2}")
        .replace("{bandwidth_gbps: 200, latency_us: 2}", "*c")
    )
    assert "*c" in text
    assert load(tmp_path, text).link_type == load_topology(str(MACHINE)).link_type


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 24) + b"\n")
    for name, problem in (("folder", "is a directory"), ("latin", "is not UTF-8"), ("large", "has 16777217 bytes")):
        with pytest.raises(ConfigError, match=problem):
            load_topology(str(tmp_path / f"{name}.yaml"))
    with pytest.raises(ConfigError, match=r"no such topology file"):
        load_topology(str(tmp_path / "absent.yaml"))


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_refused_in_lines(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "machine.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(ConfigError):
        load_topology(str(path))


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@given(data=st.data(), leaf=LEAVES)
@settings(max_examples=100, deadline=None)
def test_any_value_anywhere_is_read_or_refused(data, leaf, tmp_path_factory):
    contents = document()
    place = contents
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 4)) == 0:
            break
        place = place[key]
    place[key] = leaf
    path = written(tmp_path_factory.mktemp("any"), contents)
    for loader in (load_topology, load_chip):
        with contextlib.suppress(ConfigError):
            loader(str(path))


# --- The chip in the file ---------------------------------------------------------------------------------------------

CHIP = {
    "name": "SG2262",
    "frequency_ghz": 1.5,
    "cores": {"count": 4, "lanes_per_core": 64},
    "compute_units": {"cube": {"m": 16, "mac_per_lane": {"BF16": 500, "FP8": 1000, "TF32": 250}}},
    "memory": {"gmem": {"capacity_gb": 128, "bandwidth_gbps": 8601.6, "utilization": 0.75}, "lmem": {}},
}


def test_a_chip(tmp_path):
    """4 cores of 64 lanes of 500 multiply-adds at 1.5 GHz: 384 TFLOP/s, and twice that in fp8."""
    chip = load_chip(str(written(tmp_path, document(chips={"SG2262": CHIP}))))
    assert (chip.name, chip.hbm_bytes, chip.hbm_bandwidth_bytes_per_s) == ("SG2262", 128 * 10**9, 8601.6e9)
    assert chip.peak_flops == (("bf16", 384e12), ("fp8", 768e12))
    assert (chip.efficiency.memory, chip.efficiency.gemm) == (0.75, 0.70)
    chip = load_chip(str(written(tmp_path, document(chips={"SG2262": CHIP | {"compute_efficiency": 0.9}}))))
    assert (chip.efficiency.gemm, chip.efficiency.attention) == (0.9, 0.9)


CHIPLESS = {
    "no rates": (
        lambda c: c.pop("compute_units"),
        "chips.SG2262.compute_units.cube.mac_per_lane: missing, and peak ra",
    ),
    "no bf16": (
        lambda c: c["compute_units"]["cube"].update(mac_per_lane={"FP8": 1}),
        "chips.SG2262.compute_units.cube.mac_per_lane.BF16: missing, other types without a rate",
    ),
    "no memory": (
        lambda c: c["memory"]["gmem"].pop("capacity_gb"),
        "chips.SG2262.memory.gmem.capacity_gb: missing, ex",
    ),
    "memory text": (
        lambda c: c["memory"]["gmem"].update(capacity_gb="128"),
        "chips.SG2262.memory.gmem.capacity_gb: expected a number from 1e-06 to 1e+15, got '128'",
    ),
    "cores no table": (lambda c: c.update(cores=4), "chips.SG2262.cores: expected a table, got 4"),
    "too well used": (
        lambda c: c["memory"]["gmem"].update(utilization=2),
        "chips.SG2262.memory.gmem.utilization: expected a number from 1e-06 to 1, got 2",
    ),
}


@pytest.mark.parametrize("case", CHIPLESS)
def test_chips_that_lack_something(case, tmp_path):
    change, message = CHIPLESS[case]
    chip = json.loads(json.dumps(CHIP))
    change(chip)
    assert complaints(tmp_path, document(chips={"SG2262": chip}), load_chip)[0].startswith(message)


@pytest.mark.parametrize(("chips", "found"), [
    (None, "missing"), ({}, "[]"), ({"A": CHIP, "B": CHIP}, "['A', 'B']"), (3, "3"),
])  # fmt: skip
def test_one_kind_of_chip(chips, found, tmp_path):
    (line,) = complaints(tmp_path, document(chips=chips), load_chip)
    assert line == f"chips: expected a table that describes one kind of chip, got {found}"


def test_the_chip_of_the_machine_lacks_peak_rates():
    with pytest.raises(ConfigError, match="mac_per_lane: missing"):
        load_chip(str(MACHINE))


# --- Deployments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [
    {"tp": 4, "dp": 2}, {"tp": 2, "cp": 4}, {"cp": 8}, {"cp": 2, "tp": 2, "pp": 2, "collective": "direct"},
    {"tp": 2, "cp": 2, "dp": 2, "phase": "decode", "rank_order": ("cp", "dp", "tp", "pp")}, {"tp": 4},
])  # fmt: skip
def test_deployments_are_conserved_and_reduced_exactly(keys):
    dep = deploy(topology=load_topology(str(MACHINE)), **keys)
    structure = build_structure(dep)
    rows = priced(dep, structure, 4096)
    start, finish = simulate_point(Template(structure, reduced=False), rows, 0)
    assert audit(dep, structure, 4096, 1, 0, start, finish) == SOUND
    reduced = simulate_point(Template(structure, reduced=True), rows, 0)
    np.testing.assert_allclose(reduced, (start, finish), rtol=0, atol=1e-11 * finish.max())


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
