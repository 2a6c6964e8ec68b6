"""Grouped YAML of pod / rack / board / chip tools: what is refused, and the chip that a file describes."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grouped import BOARD, C0, C1, CHIP, MACHINE, complaints, document, join, load, written

from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.topology import load_topology
from g5cp_vec.errors import ConfigError

# --- What is refused --------------------------------------------------------------------------------------------------

WRONG = {
    "no pods": (lambda d: d.pop("pods"), "pods: missing"),
    "no count": (lambda d: d["pods"][0].pop("count"), "pods[0].count: missing"),
    "count true": (lambda d: d["pods"][0].update(count=True), "pods[0].count: expected an integer, got true"),
    "count 0": (lambda d: d["pods"][0].update(count=0), "pods[0].count: expected greater than 0, got 0"),
    "count text": (
        lambda d: d["pods"][0]["racks"][0].update(count="9e"), "pods[0].racks[0].count: expected an integer, got '9e'"
    ),
    "many": (
        lambda d: d["pods"][0].update(count=10**9), "pods: 8000000000 chips, expected at most 4096"
    ),
    "endless": (
        lambda d: d["pods"][0].update(count=10**4000),
        "pods[0].count: expected less than or equal to 1000000000000000000, got 9999",
    ),
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
    for name, problem in (
        ("folder", "is a directory"),
        ("latin", "is not UTF-8"),
        ("large", "more than 16777216 bytes"),
    ):
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
        "chips.SG2262.memory.gmem.capacity_gb: expected a number from 1e-06 to 1e+09, got '128'",
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


@pytest.mark.parametrize("number", ["1e3", "1E3", "+1e+3", "1.0e3", "1.0e+3", "1000", "1000.0"])
def test_numbers_are_those_of_json(tmp_path, number):
    text = json.dumps(document())
    (tmp_path / "m.yaml").write_text(text.replace('"bandwidth_gbps": 400', f'"bandwidth_gbps": {number}'))
    rates = [kind.bandwidth_bytes_per_s for kind in load_topology(str(tmp_path / "m.yaml")).link_type]
    assert 0.95e12 in rates
