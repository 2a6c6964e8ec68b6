"""Building one rank of every orbit gives the classes that building all ranks gives, to the last number.

The symmetry is proven before it is used, so what breaks it (a fault, a group across nodes, an owner among equals) must
leave fewer or no orbits, and never another result.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from machines import faulty
from test_attention_kinds import structure_of
from test_reduction import FAULTS, MACHINES, SWITCH, prepare
from test_reduction_whole import FORMS, LAYOUTS, SEQ_LEN, TOPOLOGIES
from test_reduction_whole import deployment as small_deployment

from g5cp_vec.config.expansion import VALID
from g5cp_vec.config.grid import load_grid
from g5cp_vec.mapping import structure as structures
from g5cp_vec.mapping.graph import BlockBuilder
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.probe import Probe
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner.simulate import simulate_point, simulate_rows
from g5cp_vec.runner.template import TRAFFIC, Template


def node_machine(size, nics, oversubscription):
    return (
        f'kind = "hgx"\nnode_size = {size}\nscale_up_gbytes_per_s = 450.0\nscale_up_latency_us = 2.0\n'
        f"nics_per_node = {nics}\nnic_gbytes_per_s = 50.0\nscale_out_latency_us = 5.0\n"
        f"oversubscription = {oversubscription}\n"
    )


def torus(*dims):
    return f'kind = "torus"\ndims = {list(dims)}\nlink_bandwidth_gbytes_per_s = 90.0\nlatency_us = 1.0\n'


def fat_tree(*radices):
    level = "[[level]]\nradix = {}\nbandwidth_gbytes_per_s = 50.0\nlatency_us = 1.0\n"
    return 'kind = "fat_tree"\n' + "".join(level.format(radix) for radix in radices)


KINDS = {
    "switch": SWITCH,
    "ring": MACHINES["ring"],
    "full mesh": MACHINES["full mesh"],
    "graph": MACHINES["graph"],
    "fat tree": fat_tree(4, 2, 2),
    "fat tree of two levels": fat_tree(8, 2),
    **{f"torus {dims}": torus(*dims) for dims in ((16,), (8, 2), (4, 4), (2, 2, 4), (2, 2, 2, 2))},
    **{
        f"nodes {shape}": node_machine(*shape)
        for shape in ((4, 2, 1.0), (4, 4, 2.0), (6, 3, 1.0), (8, 2, 2.0), (16, 4, 1.0))
    },
}
BROKEN = {
    **FAULTS,
    "every fourth chip": "[[degrade]]\nchip = [1, 5, 9, 13]\nfactor = 0.5\n",
    "two unlike": "[[degrade]]\nchip = 3\nfactor = 0.5\n[[degrade]]\nchip = 11\nfactor = 0.75\n",
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """However few sends there are."""
    monkeypatch.setattr(structures, "FEWEST_SENDS", 0)


def deployment(machine, folder, **keys):
    path = folder / "machine.toml"
    path.write_text(machine)
    keys = {"chip": "h100-sxm", "phase": "prefill", "seq_len": "64K", "topology": str(path), **keys}
    expansion = load_grid({"name": "point", "fixed": keys}, point=True).expand()
    return expansion.deployments[0] if expansion.reason_code[0] == VALID else None


def in_order(block):
    """A block's arrays, those that are sets in one order; handles tell slots, which are numbered alike, and homes."""
    arrays = block._asdict()
    del arrays["handle"]
    for first, second in (("succ", "pred"), *((f"{n}_chip", f"{n}_op") for n in ("entry", "exit", "leave", "arrive"))):
        order = np.lexsort((arrays[second], arrays[first]))
        arrays[first], arrays[second] = arrays[first][order], arrays[second][order]
    return arrays


def assert_same_classes(dep):
    """Return the order of the symmetry."""
    whole = structure_of(dep, SEQ_LEN)
    orbits = build_structure(dep, whole.network, whole.reach, symmetric=True)
    assert whole.symmetry.order == 1
    assert len(orbits.symmetry.chips) * orbits.symmetry.order == dep.n_chips
    one, other = Template(whole, reduced=True), Template(orbits, reduced=True)
    assert one.n_ops == other.n_ops
    for name in ("chips", "links", "link_capacity"):
        np.testing.assert_array_equal(getattr(one.quotient, name), getattr(other.quotient, name))
    for i, blocks in enumerate(zip(one.quotient.blocks, other.quotient.blocks, strict=True)):
        expected, found = (in_order(block) for block in blocks)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        np.testing.assert_array_equal(other.quotient.op_class[i][orbits.orbit_of_ops(i)], one.quotient.op_class[i])
    for column, counts in one.computes.items():
        np.testing.assert_array_equal(other.computes[column], counts)
    for column in TRAFFIC:
        np.testing.assert_array_equal(other.sent(column), one.sent(column))
    for expected, found in zip(one.loads, other.loads, strict=True):
        np.testing.assert_array_equal(found, expected)
    return orbits.symmetry.order


SYSTEMS = {
    "model": st.sampled_from(["llama-3.1-8b", "deepseek-v3-671b", "qwen3-235b-a22b"]),
    "phase": st.sampled_from(["prefill", "decode"]),
    "tp": st.sampled_from([1, 2, 3, 4, 8]),
    "cp": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "pp": st.integers(1, 3),
    "dp": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "ep": st.sampled_from([1, 2, 4, 8, 16]),
    "collective": st.sampled_from(["ring", "direct"]),
    "rank_order": st.permutations(["tp", "cp", "pp", "dp"]),
}


@given(
    machine=st.sampled_from(sorted(KINDS)), fault=st.sampled_from(sorted(BROKEN)), keys=st.fixed_dictionaries(SYSTEMS)
)
def test_orbits_give_the_same_classes(machine, fault, keys, tmp_path_factory):
    n_chips = keys["tp"] * keys["cp"] * keys["pp"] * keys["dp"]
    # Most machines here are of 16 chips.
    assume(2 <= n_chips <= 48)
    dep = deployment(KINDS[machine] + BROKEN[fault], tmp_path_factory.mktemp("machine"), n_chips=n_chips, **keys)
    assume(dep is not None)
    assert_same_classes(dep)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_orbits_of_every_layout(topology, layout):
    for form in FORMS:
        assert_same_classes(small_deployment(TOPOLOGIES[topology], layout, form))
        assert_same_classes(small_deployment(faulty(TOPOLOGIES[topology], {"chip": 5, "factor": 0.8}), layout, form))


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layout", [(2, 4, 2, 1), (4, 1, 4, 4), (4, 1, 4, 1), (2, 2, 4, 2), (4, 2, 2, 8), (8, 1, 2, 4)])
@pytest.mark.parametrize("machine", KINDS)
def test_orbits_on_every_machine(machine, layout, phase, collective, tmp_path):
    tp, cp, dp, ep = layout
    keys = {"tp": tp, "cp": cp, "dp": dp, "ep": ep, "n_chips": 16, "phase": phase, "collective": collective}
    dep = deployment(KINDS[machine], tmp_path, model="deepseek-v3-671b", **keys)
    order = assert_same_classes(dep)
    if machine == "graph":
        assert order == 1
    if machine in ("switch", "full mesh"):
        # All ranks of a switch are alike, but for owners, and for the shards in a ring over several replicas.
        alike = dp if collective == "ring" and dp > ep else dp * tp
        assert order == alike * (cp if phase == "prefill" else 1)


@pytest.mark.parametrize(
    ("fault", "order"), [("straggler", 1), ("two stragglers", 2), ("every fourth chip", 4), ("two unlike", 1)]
)
def test_faults_leave_the_symmetry_that_they_have(fault, order, tmp_path):
    dep = deployment(SWITCH + BROKEN[fault], tmp_path, model="llama-3.1-8b", n_chips=16, tp=2, cp=2, dp=4)
    assert assert_same_classes(dep) == order


@pytest.mark.parametrize(("link", "order"), [("chip3.up", 1), ("chip*.down", 16), ("chip7.*", 1)])
def test_degraded_links_leave_the_symmetry_that_they_have(link, order, tmp_path):
    fault = f'[[degrade]]\nlink = "{link}"\nfactor = 0.25\n'
    dep = deployment(SWITCH + fault, tmp_path, model="deepseek-v3-671b", n_chips=16, tp=2, cp=2, dp=4, ep=4)
    assert assert_same_classes(dep) == order


@given(n_chips=st.sampled_from([8, 12, 16]), machine=st.sampled_from(sorted(KINDS)), data=st.data())
def test_links_move_as_routes_do(n_chips, machine, data, tmp_path_factory):
    """By the definition, for every pair of chips; a permutation that moves nothing oddly is found too, now and then."""
    dep = deployment(
        KINDS[machine], tmp_path_factory.mktemp("machine"), model="llama-3.1-8b", n_chips=n_chips, tp=1, cp=1, dp="auto"
    )
    assume(dep is not None)
    network = build_network(dep.topology, n_chips)
    stride = data.draw(st.sampled_from([n for n in range(1, n_chips + 1) if n_chips % n == 0]))
    turn = data.draw(st.integers(0, n_chips // stride - 1))
    by_stride = np.arange(n_chips, dtype=np.int32).reshape(-1, stride)
    if data.draw(st.booleans()):
        chips = np.roll(by_stride, turn, axis=0).ravel()
    else:
        chips = np.roll(by_stride, turn % stride, axis=1).ravel()
    links = network.moved_links(chips)
    if machine == "switch":
        assert links is not None
    assume(links is not None)
    assert sorted(links.tolist()) == list(range(network.n_links))
    np.testing.assert_array_equal(network.link_capacity[links], network.link_capacity)
    src, dst = (ends.ravel().astype(np.int32) for ends in np.meshgrid(range(n_chips), range(n_chips)))
    distinct = src != dst
    before, after = (
        network.routes(to[src[distinct]], to[dst[distinct]]) for to in (np.arange(n_chips, dtype=np.int32), chips)
    )
    np.testing.assert_array_equal(after.indptr, before.indptr)
    np.testing.assert_array_equal(after.links, links[before.links])
    np.testing.assert_array_equal(after.latency, before.latency)


def probe_of(n_chips, tmp_path):
    dep = deployment(SWITCH, tmp_path, model="llama-3.1-8b", n_chips=n_chips, tp=1, cp=1, dp="auto")
    network = build_network(dep.topology, n_chips)
    chips = np.arange(n_chips, dtype=np.int32)
    return Probe(network, np.stack([np.roll(chips, -1), np.roll(chips, -2)])), chips


def ops(b, chips):
    return b.compute(chips, 0, "ffn")


ZIGZAG = [0, 2, 1, 3, 4, 6, 5, 7]
CROSSED = [1, 0, 2, 3, 4, 5, 6, 7]
# What is described of eight chips, and whether turning by one and by two leaves it as it is.
DESCRIPTIONS = {
    "a chip that computes alone": (lambda b, c: ops(b, c[:1]), [False, False]),
    "every other chip computes": (lambda b, c: ops(b, c[::2]), [False, True]),
    "all send to the next": (lambda b, c: b.flow(c, np.roll(c, -1), 0, "tp"), [True, True]),
    "pairs swap": (lambda b, c: b.flow(c, c ^ 1, 0, "tp"), [False, True]),
    "one sends to all": (lambda b, c: b.flow(np.zeros_like(c[1:]), c[1:], 0, "tp"), [False, False]),
    "all wait for their own": (lambda b, c: b.edge(ops(b, c), ops(b, c)), [True, True]),
    "one waits": (lambda b, c: b.edge(ops(b, c)[:1], ops(b, c)[:1]), [False, False]),
    "every other one waits": (lambda b, c: b.edge(ops(b, c)[::2], ops(b, c)[::2]), [False, True]),
    "two wait for each other's": (lambda b, c: b.edge(ops(b, c), ops(b, c)[CROSSED]), [False, False]),
    "odd ones wait for a first op, even ones for a second": (
        lambda b, c: b.edge(np.where(c % 2, ops(b, c), ops(b, c)), ops(b, c)),
        [False, True],
    ),
    "all wait for all": (lambda b, c: b.edge(ops(b, c)[:, None], ops(b, c)[None]), [True, True]),
    "all wait for one": (lambda b, c: b.edge(ops(b, c)[:1, None], ops(b, c)[None]), [False, False]),
    "a ring": (lambda b, c: b.relay(c, np.roll(c, -1), 7, 0, "tp", in_order=True), [True, True]),
    "a ring to and fro": (
        lambda b, c: b.relay(c[ZIGZAG], np.roll(c[ZIGZAG], -1), 7, 0, "tp", in_order=True),
        [False, False],
    ),
    "an exchange": (lambda b, c: b.exchange(c[None], [ops(b, c[None])], (8,), 0, "ep"), [True, True]),
    "an exchange by other digits": (lambda b, c: b.exchange(c[None], [], (2, 4), 0, "ep"), [False, False]),
    "two exchanges": (lambda b, c: b.exchange(c.reshape(4, 2).T, [], (4,), 0, "ep"), [True, True]),
    "two exchanges of neighbours": (lambda b, c: b.exchange(c.reshape(2, 4), [], (4,), 0, "ep"), [False, False]),
    "one delivers": (lambda b, c: b.exit(ops(b, c)[:1], c[:1]), [False, False]),
    "one waits at the entry": (lambda b, c: b.entry(ops(b, c)[:1], c[:1]), [False, False]),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_probe_drops_what_does_not_hold(name, tmp_path):
    describe, holds = DESCRIPTIONS[name]
    probe, chips = probe_of(8, tmp_path)
    describe(probe, chips)
    assert probe.holds.tolist() == holds


def test_a_form_that_tells_ranks_apart_has_no_symmetry(monkeypatch, tmp_path):
    """Whatever a layer does, known here or not: one more wait at one chip, and all ranks are built."""
    dep = deployment(SWITCH, tmp_path, model="llama-3.1-8b", n_chips=16, tp=2, cp=2, dp=4)
    assert build_structure(dep, symmetric=True).symmetry.order == 16
    add_layer = structures.add_layer

    def uneven(b: BlockBuilder, ranks, *args):
        add_layer(b, ranks, *args)
        b.compute(ranks.ravel()[5:6], 0, "ffn")

    monkeypatch.setattr(structures, "add_layer", uneven)
    assert build_structure(dep, symmetric=True).symmetry.order == 1


@given(
    keys=st.fixed_dictionaries(
        {**SYSTEMS, "topology": st.sampled_from(["flat-450", "hgx-8", "hgx-8-oversub2", "nvl72"])}
    )
)
@example(
    {
        "model": "deepseek-v3-671b", "topology": "hgx-8", "phase": "prefill", "tp": 4, "cp": 1, "pp": 1, "dp": 4,
        "ep": 1, "collective": "direct", "rank_order": ["tp", "cp", "pp", "dp"],
    }
)  # fmt: skip
def test_times_are_the_same(keys):
    n_chips = keys["tp"] * keys["cp"] * keys["pp"] * keys["dp"]
    assume(2 <= n_chips <= 32)
    prepared = prepare(n_chips=n_chips, **{**keys, "rank_order": list(keys["rank_order"])})
    assume(prepared is not None)
    whole, costs = prepared
    orbits = build_structure(whole.dep, whole.network, symmetric=True)
    one, other = Template(whole, reduced=True), Template(orbits, reduced=True)
    expected, found = simulate_rows(one, costs), simulate_rows(other, costs)
    np.testing.assert_allclose(found.measures, expected.measures, rtol=1e-12)
    np.testing.assert_array_equal(found.n_ops, expected.n_ops)
    for a, b in zip(simulate_point(one, costs, 0), simulate_point(other, costs, 0), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 * expected.measures[0, 0])


@pytest.mark.parametrize(("cp", "ep"), [(1, 256), (4, 1)])
def test_large_exchanges_are_not_built_flow_by_flow(cp, ep):
    """Experts over 256 ranks, or split over 1,024, of 4,096: over 100 million ops, a few thousand of them built."""
    tp, keys = 8, {"model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 4096, "dp": "auto"}
    keys |= {"tp": tp, "cp": cp, "ep": ep, "collective": "direct"}
    fixed = {**keys, "chip": "h200-sxm", "phase": "prefill", "seq_len": "128K"}
    (dep,) = load_grid({"name": "point", "fixed": fixed}, point=True).expand().deployments
    structure = build_structure(dep, symmetric=True)
    assert sum(len(block.kind) for block in structure.blocks) < 5000
    # By hand: projections and ring, two all-reduces, FFN or three ops of experts and their exchanges; embedding, head.
    moe_tp = dep.dp * tp // ep
    layer = 2 + cp + (cp - 1) + 4 * (tp - 1)
    experts = 3 + 2 * (ep - 1) + (2 * (moe_tp - 1) if moe_tp > tp else 0)
    n_ops = dep.n_chips * (2 + 61 * layer + 3 + 58 * experts)
    assert Template(structure, reduced=True).n_ops == n_ops > 10**8
