"""Topologies link by link and chip by chip: what a file may say, the names of links, and who is refused why."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_acceptance_tools import DENSE, H200, hgx, switch

from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.grid import load_grid
from g5cp_vec.config.links import MeshNames, TorusNames, matcher
from g5cp_vec.config.topology import Degrade, FullMesh, Graph, Ring, Torus, load_topology
from g5cp_vec.errors import ConfigError, InfeasibleError

TORUS = 'kind = "torus"\ndims = [4, 2]\nlink_bandwidth_gbytes_per_s = 50\nlatency_us = 1\n'
MESH = 'kind = "full_mesh"\nlink_bandwidth_gbytes_per_s = 50\nlatency_us = 1\n'
GRAPH = 'kind = "graph"\nn_chips = 3\n'
HGX = (
    'kind = "hgx"\nnode_size = 8\nscale_up_gbytes_per_s = 450\nscale_up_latency_us = 2\nnics_per_node = 8\n'
    "nic_gbytes_per_s = 50\nscale_out_latency_us = 5\n"
)


def wire(src, dst, more=""):
    return f"[[link]]\nfrom = {src}\nto = {dst}\nbandwidth_gbytes_per_s = 50\nlatency_us = 1\n{more}\n"


def fault(text):
    return f"[[degrade]]\n{text}\n"


def load(tmp_path, text):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return load_topology(str(path))


def complaints(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    prefix = f"{tmp_path / 'lab.toml'}: "
    assert all(line.startswith(prefix) and "\n" not in line for line in caught.value.lines)
    return [line.removeprefix(prefix) for line in caught.value.lines]


def deployed(topology, n_chips, **keys):
    fixed = {"phase": "prefill", "model": DENSE, "chip": H200, "topology": topology, "cp": 1, "dp": n_chips}
    return build_deployment({**fixed, "n_chips": n_chips, **keys})


def reason(topology, n_chips, **keys):
    with pytest.raises(InfeasibleError) as caught:
        deployed(topology, n_chips, **keys)
    return str(caught.value)


# --- What is read -----------------------------------------------------------------------------------------------------


def test_torus(tmp_path):
    assert load(tmp_path, TORUS) == Torus(name="lab", dims=(4, 2), link_bandwidth_bytes_per_s=50e9, latency_s=1e-6)
    assert load(tmp_path, TORUS).max_chips() == 8


def test_full_mesh(tmp_path):
    mesh = load(tmp_path, MESH + "n_chips = 6\nprotocol_efficiency = 0.5\n")
    assert mesh == FullMesh(
        name="lab", n_chips=6, link_bandwidth_bytes_per_s=25e9, latency_s=1e-6, protocol_efficiency=0.5
    )
    assert mesh.max_chips() == 6


def test_graph(tmp_path):
    graph = load(tmp_path, "protocol_efficiency = 0.5\n" + GRAPH + wire(0, '"sw"') + wire('"2"', '"sw"') + wire(1, 2))
    # Payload gets half of every link.
    assert [link.bandwidth_bytes_per_s for link in graph.link] == [25e9] * 3
    assert [link.latency_s for link in graph.link] == [1e-6] * 3
    assert graph.wiring.nodes == ["chip0", "chip1", "chip2", "sw"]
    assert graph.wiring.ends.tolist() == [[0, 3], [1, 2], [2, 1], [2, 3], [3, 0], [3, 2]]
    assert graph.max_chips() == 3


def test_a_chip_may_be_spelled_three_ways(tmp_path):
    spelled = [load(tmp_path, GRAPH + wire(0, 1) + wire(1, chip)) for chip in ("2", '"2"', '"chip2"')]
    assert spelled[0] == spelled[1] == spelled[2]
    assert spelled[0].fingerprint == spelled[2].fingerprint


def test_a_link_may_lead_one_way(tmp_path):
    around = [wire(i, (i + 1) % 3, "both_ways = false") for i in range(3)]
    assert load(tmp_path, GRAPH + "".join(around)).wiring.ends.tolist() == [[0, 1], [1, 2], [2, 0]]


def test_links_and_their_order_in_the_file_name_one_machine(tmp_path):
    a = load(tmp_path, GRAPH + wire(0, '"sw"') + wire(1, '"sw"') + wire(2, '"sw"'))
    b = load(tmp_path, GRAPH + wire('"sw"', 2) + wire(1, '"sw"') + wire('"sw"', 0))
    assert a.wiring.nodes == b.wiring.nodes
    assert a.wiring.ends.tolist() == b.wiring.ends.tolist()


def test_faults(tmp_path):
    ring = 'kind = "ring"\nlink_bandwidth_gbytes_per_s = 50\nlatency_us = 1\n'
    topology = load(tmp_path, ring + fault('link = "chip0>chip1"\nfactor = 0.5') + fault("chip = [1, 2]\nfactor = 1"))
    assert topology.degrade == (Degrade(link="chip0>chip1", factor=0.5), Degrade(chip=(1, 2), factor=1))
    assert topology.is_degraded
    assert not load(tmp_path, ring + fault("chip = 1\nfactor = 1")).is_degraded
    # A fault is part of what a point is, and survives a copy.
    assert topology.fingerprint != load(tmp_path, ring).fingerprint
    assert topology.model_copy(update={"latency_s": 0.0}).degrade == topology.degrade


# --- What is refused in the file --------------------------------------------------------------------------------------

WRONG = {
    "no dims": (TORUS.replace("dims = [4, 2]\n", ""), "dims: missing"),
    "empty dims": (TORUS.replace("[4, 2]", "[]"), "dims: expected a list of sizes, got []"),
    "dims no list": (TORUS.replace("[4, 2]", "8"), "dims: expected a list of sizes, got 8"),
    "dim of nothing": (TORUS.replace("[4, 2]", "[4, 0]"), "dims[1]: expected greater than 0, got 0"),
    "dim of text": (TORUS.replace("[4, 2]", '[4, "2"]'), "dims[1]: expected an integer, got '2'"),
    "dim true": (TORUS.replace("[4, 2]", "[true]"), "dims[0]: expected an integer, got true"),
    "near key": (TORUS + "dim = [2]", "dim: unknown key 'dim'; did you mean 'dims'?"),
    "SI key": (
        MESH + "link_bandwidth_bytes_per_s = 1",
        "link_bandwidth_bytes_per_s: unknown key 'link_bandwidth_bytes_per_s'; "
        "did you mean 'link_bandwidth_gbytes_per_s'?",
    ),
    "huge mesh": (MESH + "n_chips = 5000", "n_chips: expected less than or equal to 4096, got 5000"),
    "no n_chips": ('kind = "graph"\n', "n_chips: missing"),
    "huge graph": (GRAPH.replace("3", "5000"), "n_chips: expected less than or equal to 4096, got 5000"),
    "link no list": (GRAPH + "link = 3", "link: expected a list of tables, got 3"),
    "link no table": (GRAPH + "link = [3]", "link[0]: expected a table, got 3"),
    "no to": (GRAPH + wire(0, 1).replace("to = 1\n", ""), "link[0].to: missing"),
    "near link key": (GRAPH + wire(0, 1, "both_way = true"), "link[0].both_way: unknown key 'both_way'; did you mean"),
    "SI link key": (GRAPH + wire(0, 1) + wire(1, 2, "latency_s = 1"), "link[1].latency_s: unknown key 'latency_s'; di"),
    "python's name": (GRAPH + wire(0, 1, "src = 1"), "link[0].src: unknown key 'src'"),
    "backwards": (GRAPH + wire(0, 1).replace("us = 1", "us = -1"), "link[0].latency_us: expected greater than or eq"),
    "no bandwidth": (GRAPH + wire(0, 1).replace("50", "0"), "link[0].bandwidth_gbytes_per_s: expected greater than 0"),
    "true chip": (GRAPH + wire("true", 1), "link[0].from: expected the number of a chip, from 0, or the name of a swi"),
    "negative chip": (GRAPH + wire(0, -1), "link[0].to: expected the number of a chip, from 0, or the name of a switc"),
    "odd switch": (GRAPH + wire(0, '"a>b"'), "link[0].to: expected the number of a chip, from 0, or the name of a swi"),
    "no such chip": (GRAPH + wire(0, 3), "link[0].to: chip 3 does not exist, n_chips = 3"),
    "itself": (GRAPH + wire(1, '"chip1"'), "link[0]: joins chip1 to itself"),
    "parallel": (
        GRAPH + wire(0, 1) + wire(1, 2) + wire(1, 0, "both_ways = false"),
        "link[2]: link[0] leads from chip1 to chip0 already; give one link their bandwidth",
    ),
    "island": (GRAPH + wire(0, 1) + wire(2, '"sw"'), "link: no route from chip 0 to chip 2"),
    "no way back": (
        GRAPH + wire(0, 1) + wire(1, 2, "both_ways = false"),
        "link: no route from chip 2 to chip 0",
    ),
    "no links": (GRAPH, "link: no route from chip 0 to chip 1"),
    "faults no list": (TORUS + "degrade = 0.5", "degrade: expected a list of tables, got 0.5"),
    "no factor": (TORUS + fault("chip = 1"), "degrade[0].factor: missing"),
    "dead": (TORUS + fault("chip = 1\nfactor = 0"), "degrade[0].factor: expected greater than 0, got 0"),
    "faster": (TORUS + fault("chip = 1\nfactor = 1.5"), "degrade[0].factor: expected less than or equal to 1, got 1.5"),
    "hits both": (
        TORUS + fault('chip = 1\nlink = "chip0>chip1"\nfactor = 1'), "degrade[0]: expected either link or chip, got bo"
    ),
    "hits nothing": (TORUS + fault("factor = 1"), "degrade[0]: expected either link or chip, got neither"),
    "fault key": (TORUS + fault("chips = 1\nchip = 1\nfactor = 1"), "degrade[0].chips: unknown key 'chips'; did you m"),
    "chip of text": (TORUS + fault('chip = "1"\nfactor = 1'), "degrade[0].chip: expected the number of a chip, from 0"),
    "chip true": (TORUS + fault("chip = [0, true]\nfactor = 1"), "degrade[0].chip: expected the number of a chip, fro"),
    "no chip": (TORUS + fault("chip = []\nfactor = 1"), "degrade[0].chip: expected the number of a chip, from 0, or a"),
    "link number": (TORUS + fault("link = 3\nfactor = 1"), "degrade[0].link: expected the name of a link, with * for"),
    "link empty": (TORUS + fault('link = ""\nfactor = 1'), "degrade[0].link: expected the name of a link, with * for"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case, tmp_path):
    text, message = WRONG[case]
    (line,) = complaints(tmp_path, text)
    assert line.startswith(message)


def test_every_wrong_link_is_named_at_once(tmp_path):
    lines = complaints(tmp_path, GRAPH + wire(0, 7) + wire(1, 1) + wire(0, '"sw"') + wire('"sw"', 0))
    assert [line.split(":")[0] for line in lines] == ["link[0].to", "link[1]", "link[3]", "link[3]"]


# --- What is refused in a deployment ----------------------------------------------------------------------------------


def test_a_torus_is_used_whole():
    torus = Torus(name="t", dims=(4, 4, 2), link_bandwidth_bytes_per_s=1.0, latency_s=0.0)
    assert deployed(torus, 32).n_chips == 32
    assert reason(torus, 16) == "n_chips = 16, but topology t has exactly 4*4*2 = 32 chips"
    assert reason(torus, 64) == "n_chips = 64, but topology t has exactly 4*4*2 = 32 chips"


def test_meshes_and_graphs_have_so_many_chips(tmp_path):
    mesh = FullMesh(name="m", n_chips=4, link_bandwidth_bytes_per_s=1.0, latency_s=0.0)
    assert deployed(mesh, 3).n_chips == 3
    assert reason(mesh, 5) == "n_chips = 5, but topology m has 4 chips"
    endless = mesh.model_copy(update={"n_chips": None})
    assert reason(endless, 8192) == "n_chips = 8192, but a full mesh is modelled with up to 4096 chips"
    graph = load(tmp_path, GRAPH + wire(0, 1) + wire(1, 2))
    assert deployed(graph, 2).n_chips == 2
    assert reason(graph, 4) == "n_chips = 4, but topology lab has 3 chips"


def test_a_fault_in_a_chip_that_is_not_there():
    topology = switch().model_copy(update={"degrade": (Degrade(chip=(0, 5), factor=0.5),)})
    assert deployed(topology, 6).n_chips == 6
    assert reason(topology, 5) == "n_chips = 5, but topology switch degrades chip 5 (degrade[0])"


def test_a_fault_in_a_link_that_is_not_there_names_the_nearest():
    topology = hgx(4, 4).model_copy(
        update={"degrade": (Degrade(chip=0, factor=0.5), Degrade(link="node0.nik2.out", factor=0.5))}
    )
    assert reason(topology, 8) == (
        "topology hgx with n_chips = 8 has no link 'node0.nik2.out' (degrade[1]); "
        "nearest: node0.nic2.out, node1.nic2.out, node0.nic3.out"
    )
    mesh = FullMesh(
        name="m", link_bandwidth_bytes_per_s=1.0, latency_s=0.0, degrade=(Degrade(link="chip0>1", factor=0.5),)
    )
    assert reason(mesh, 1).endswith("nearest: none, there are no links")
    assert "nearest: chip0>chip1, " in reason(mesh, 4)


def test_a_grid_records_the_sizes_that_lack_the_faulty_link(tmp_path):
    (tmp_path / "lab.toml").write_text(HGX + fault('link = "node0.nic2.*"\nfactor = 0.5'))
    fixed = {
        "phase": "prefill", "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": str(tmp_path / "lab.toml"),
        "cp": 1, "seq_len": 1024,
    }  # fmt: skip
    grid = load_grid({"fixed": fixed, "axes": {"n_chips": [8, 16], "path": ["g5", "math"]}})
    expansion = grid.expand()
    reasons = [expansion.reasons[code] if code >= 0 else "" for code in expansion.reason_code]
    assert reasons[0].startswith("topology lab with n_chips = 8 has no link 'node0.nic2.*' (degrade[0]); nearest: ")
    assert reasons[2] == ""
    assert {reasons[1], reasons[3]} == {'the analytic path does not know degraded machines like lab: use path = "g5"'}


# --- Names of links ---------------------------------------------------------------------------------------------------


def names(links):
    return [links.name(link) for link in range(links.n_links)]


def test_names_of_a_torus():
    # 3 by 2: both ways along the first dimension, one way along the second, where both lead to the same chip.
    assert names(TorusNames((3, 2))) == [
        "chip0>chip1", "chip1>chip2", "chip2>chip0", "chip3>chip4", "chip4>chip5", "chip5>chip3",
        "chip0>chip2", "chip1>chip0", "chip2>chip1", "chip3>chip5", "chip4>chip3", "chip5>chip4",
        "chip0>chip3", "chip1>chip4", "chip2>chip5", "chip3>chip0", "chip4>chip1", "chip5>chip2",
    ]  # fmt: skip


@pytest.mark.parametrize("dims", [(1,), (2,), (7,), (1, 1), (2, 2), (4, 1, 3), (2, 3, 4), (5, 2, 2)])
def test_a_torus_has_a_link_for_every_neighbour(dims):
    links = names(TorusNames(dims))
    assert len(set(links)) == len(links) == math.prod(dims) * sum(min(size - 1, 2) for size in dims)


def test_a_ring_is_a_torus_of_one_dimension():
    ring = Ring(name="r", link_bandwidth_bytes_per_s=1.0, latency_s=0.0)
    assert names(ring.links(5)) == names(TorusNames((5,)))


def test_names_of_a_mesh():
    assert names(MeshNames(3)) == [
        "chip0>chip1", "chip0>chip2", "chip1>chip0", "chip1>chip2", "chip2>chip0", "chip2>chip1"
    ]  # fmt: skip
    assert names(MeshNames(1)) == []


def test_names_of_a_graph_are_those_of_its_nodes(tmp_path):
    graph = load(tmp_path, GRAPH + wire(0, 1) + wire(1, '"leaf.1"') + wire('"leaf.1"', 2, "both_ways = false")
                 + wire(2, 0, "both_ways = false"))  # fmt: skip
    assert names(graph.links(2)) == ["chip0>chip1", "chip1>chip0", "chip1>leaf.1", "chip2>chip0", "leaf.1>chip1",
                                     "leaf.1>chip2"]  # fmt: skip


def described(pattern, name):
    """Whether a pattern describes a name: its texts between stars occur in order, the first and last at the ends."""
    first, *others = pattern.split("*")
    if not others:
        return pattern == name
    *middle, last = others
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    rest = name[len(first) : len(name) - len(last)]
    for text in middle:
        if text not in rest:
            return False
        rest = rest[rest.index(text) + len(text) :]
    return True


PATTERN = st.lists(st.sampled_from(["chip", "c", "1", "12", "3", ">", "*", "*", ".", "?"]), max_size=6).map("".join)


@given(pattern=PATTERN | st.just("chip1*>chip*"), n_chips=st.integers(1, 14))
def test_patterns(pattern, n_chips):
    mesh = MeshNames(n_chips)
    wanted = [link for link in range(mesh.n_links) if described(pattern, mesh.name(link))]
    assert mesh.matching(pattern).tolist() == wanted
    torus = TorusNames((n_chips, 2))
    assert torus.matching(pattern).tolist() == [
        link for link in range(torus.n_links) if described(pattern, torus.name(link))
    ]


@pytest.mark.parametrize("pattern", ["a.b", "a[b]", "a?", "(a", "a\\"])
def test_only_stars_are_special(pattern):
    assert matcher(pattern)(pattern)
    assert not matcher(pattern)("ab")
    assert matcher("*")(pattern)


def test_names_of_a_degraded_spine():
    """A full spine limits nothing and has no links, until a fault hits one of them."""
    sound = hgx(4, 4)
    assert sound.links(8).n_links == 2 * 8 + 2 * 8
    for pattern, is_hit in [("node0.up", True), ("node*.down", True), ("node1*", True), ("node0.nic0.out", False)]:
        faulty = sound.model_copy(update={"degrade": (Degrade(link=pattern, factor=0.5),)})
        assert faulty.links(8).n_links == 2 * 8 + 2 * 8 + (4 if is_hit else 0)
        assert not any(re.fullmatch(r"node\d\.(up|down)", name) for name in names(faulty.links(4)))


def test_a_graph_is_copied_with_its_links(tmp_path):
    graph = load(tmp_path, GRAPH + wire(0, 1) + wire(1, 2))
    assert isinstance(graph, Graph)
    assert graph.model_copy(update={"name": "other"}).link == graph.link
    again = load(tmp_path, GRAPH + wire(0, 1) + wire(1, 2))
    assert len(graph.wiring.ends) == len(again.wiring.ends) == 4
    assert graph == again
    assert hash(graph) == hash(again)
