"""Fat trees and tiered machines: routes against slow obvious twins and by hand, and in whole deployments."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from checks import assert_closed_form, assert_conserved_and_reduced_exactly, assert_direct_exchange
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import fat_tree, mesh, ring, switch, tiered
from test_acceptance_tools import MOE, deploy, priced
from test_config_topology import complaints, fault, load, reason
from test_network import all_pairs, loads, routes
from test_reduction import assert_reduced_equals_full, prepare

from g5cp_vec.config.topology import load_topology
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure, structure_key
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template


def capacity_of(network):
    return {network.link_name(i): network.capacities()[network.link_capacity[i]] for i in range(network.n_links)}


# --- Fat tree: against switches that are built one by one -------------------------------------------------------------


def build_tree(levels, n_chips):
    """Parent of every node and links (name: bytes/s), from the switches up; a node is its name.

    A switch has as many cables up as down, or fewer by its oversubscription, each of the level above's bandwidth.
    """
    nodes = {f"chip{c}": Fraction(1) for c in range(n_chips)}  # cables up
    parent, capacity = {}, {}
    for height, (radix, bandwidth, _, *more) in enumerate(levels, start=1):
        switches = {}
        for place, (node, cables) in enumerate(nodes.items()):
            above = f"level{height}.switch{place // radix}"
            parent[node] = above
            for way in ("up", "down"):
                capacity[f"{node}.{way}"] = float(cables) * bandwidth
            # All ports of a switch have their cable, whether or not the deployment uses what hangs on them.
            switches[above] = cables * radix / Fraction(more[0] if more else 1)
        nodes = switches
    return parent, capacity


def climb(parent, node):
    path = [node]
    while path[-1] in parent:
        path.append(parent[path[-1]])
    return path


@st.composite
def trees(draw):
    depth = draw(st.integers(1, 4))
    levels = [
        (draw(st.integers(1, 4)), draw(st.sampled_from([1.0, 2.5])), draw(st.sampled_from([0.5, 0.7])),
         draw(st.sampled_from([1.0, 2.0, 1.5])) if level < depth - 1 else 1.0)
        for level in range(depth)
    ]  # fmt: skip
    return levels, draw(st.integers(1, math.prod(radix for radix, *_ in levels)))


@given(tree=trees())
def test_fat_tree_routes(tree):
    levels, n_chips = tree
    network = build_network(fat_tree(*levels), n_chips)
    parent, capacity = build_tree(levels, n_chips)
    found, latencies = routes(network, all_pairs(n_chips))
    for (src, dst), route, seconds in zip(all_pairs(n_chips), found, latencies, strict=True):
        ups, downs = climb(parent, f"chip{src}"), climb(parent, f"chip{dst}")
        shared = next(i for i, (a, b) in enumerate(zip(ups, downs, strict=True)) if a == b)
        assert route == [f"{n}.up" for n in ups[:shared]] + [f"{n}.down" for n in reversed(downs[:shared])]
        assert seconds == (levels[shared - 1][2] if shared else 0.0)
    assert len(set(capacity_of(network))) == network.n_links
    for name, bytes_per_s in capacity_of(network).items():
        assert bytes_per_s == pytest.approx(capacity[name], rel=1e-12)


def test_fat_tree_by_hand():
    """Leaves of four chips, half as wide upwards; two leaves to a switch; two of those to a core.

    A leaf has 4 * 10 bytes/s down, and 2 cables of 20 up. The switch over two leaves has 4 cables down, 4 of 5 up.
    """
    tree = fat_tree((4, 10.0, 1.0, 2.0), (2, 20.0, 2.0), (2, 5.0, 3.0))
    network = build_network(tree, 16)
    found, latencies = routes(network, [(0, 3), (0, 4), (5, 15)])
    assert found == [
        ["chip0.up", "chip3.down"],
        ["chip0.up", "level1.switch0.up", "level1.switch1.down", "chip4.down"],
        ["chip5.up", "level1.switch1.up", "level2.switch0.up", "level2.switch1.down", "level1.switch3.down",
         "chip15.down"],
    ]  # fmt: skip
    assert latencies == [1.0, 2.0, 3.0]
    capacity = capacity_of(network)
    assert (capacity["chip7.up"], capacity["level1.switch3.down"], capacity["level2.switch1.up"]) == (10.0, 40.0, 20.0)
    assert network.n_links == 2 * (16 + 4 + 2)
    # What no two chips in use need is not there: eight chips are under one switch of the second level.
    assert build_network(tree, 8).n_links == 2 * (8 + 2)
    assert build_network(tree, 4).n_links == 2 * 4


def test_a_fat_tree_of_one_level_is_a_switch():
    tree, plain = build_network(fat_tree((8, 3.0, 0.5)), 8), build_network(switch(3.0), 8)
    others = [pair for pair in all_pairs(8) if pair[0] != pair[1]]
    assert routes(tree, others)[0] == routes(plain, others)[0]
    assert tree.capacities() == plain.capacities()


def test_everyone_to_everyone_loads_a_fat_tree():
    """Of 8 chips in pairs of leaves of 2: a chip's link carries 7 messages, a leaf's 2 * 6, a middle switch's 4 * 4."""
    found = loads(build_network(fat_tree((2, 1.0, 0.0), (2, 1.0, 0.0), (2, 1.0, 0.0)), 8), all_pairs(8))
    for way in ("up", "down"):
        assert {found[f"chip{c}.{way}"] for c in range(8)} == {7}
        assert {found[f"level1.switch{s}.{way}"] for s in range(4)} == {12}
        assert {found[f"level2.switch{s}.{way}"] for s in range(2)} == {16}


# --- Tiered: against places in units within units ---------------------------------------------------------------------


def places(levels, chip):
    """Place of a chip in its board, of that in its rack, ..."""
    found = []
    for _, size, *_ in levels:
        found.append(chip % size)
        chip //= size
    return found


def walk_tiers(levels, src, dst):
    """Names of the links between two chips, and the latency."""
    mine, theirs = places(levels, src), places(levels, dst)
    if mine == theirs:
        return [], 0.0
    level = max(i for i in range(len(levels)) if mine[i] != theirs[i])
    _, size, connect, *numbers = levels[level]
    part = levels[level - 1][0] if level else "chip"
    width = math.prod(size for _, size, *_ in levels[:level])
    of_unit = src // width // size * size
    name = {place: f"{part}{of_unit + place}" for place in range(size)}
    at, to = mine[level], theirs[level]
    if connect == "full_mesh":
        route = [f"{name[at]}>{name[to]}"]
    elif connect == "switch":
        route = [f"{name[at]}.up", f"{name[to]}.down"]
    else:
        up = [(at + hop) % size for hop in range(size)]
        down = [(at - hop) % size for hop in range(size)]
        passed = up if up.index(to) <= down.index(to) else down
        passed = passed[: passed.index(to) + 1]
        route = [f"{name[a]}>{name[b]}" for a, b in itertools.pairwise(passed)]
    return route, numbers[1]


@st.composite
def tier_lists(draw):
    depth = draw(st.integers(1, 4))
    levels = [
        (["board", "rack", "pod", "site"][i], draw(st.integers(1, 5)),
         draw(st.sampled_from(["full_mesh", "ring", "switch"])), 1.0 + i, 0.5 + i)
        for i in range(depth)
    ]  # fmt: skip
    return levels, draw(st.integers(1, min(60, math.prod(size for _, size, *_ in levels))))


@given(tiers=tier_lists())
def test_tiered_routes(tiers):
    levels, n_chips = tiers
    network = build_network(tiered(*levels), n_chips)
    pairs = all_pairs(n_chips)
    found, latencies = routes(network, pairs)
    assert list(zip(found, latencies, strict=True)) == [walk_tiers(levels, *pair) for pair in pairs]
    bandwidth = {("chip", *(level[0] for level in levels))[i]: level[3] for i, level in enumerate(levels)}
    for name, bytes_per_s in capacity_of(network).items():
        assert bytes_per_s == bandwidth[name.split(">")[0].split(".")[0].rstrip("0123456789")]


@given(tiers=tier_lists())
def test_names_of_links_are_told_apart(tiers):
    levels, n_chips = tiers
    network = build_network(tiered(*levels), n_chips)
    assert len(capacity_of(network)) == network.n_links


BOARDS = [("board", 4, "full_mesh", 8.0, 1.0), ("rack", 3, "ring", 4.0, 2.0), ("pod", 2, "switch", 2.0, 3.0)]


def test_tiered_by_hand():
    """Chip 7 is the last of board 1; board 2 is the neighbour of board 0 in a ring of three; pods have a switch."""
    network = build_network(tiered(*BOARDS), 24)
    found, latencies = routes(network, [(0, 3), (1, 7), (1, 8), (14, 21), (0, 23), (23, 12), (5, 5)])
    assert found == [
        ["chip0>chip3"],
        ["board0>board1"],
        ["board0>board2"],
        ["board3>board5"],
        ["rack0.up", "rack1.down"],
        ["board5>board3"],
        [],
    ]
    assert latencies == [1.0, 2.0, 2.0, 2.0, 3.0, 2.0, 0.0]
    assert network.n_links == 6 * 12 + 2 * 6 + 4
    assert build_network(tiered(*BOARDS), 12).n_links == 3 * 12 + 6
    # Board 2 holds no chip in use, but the ring of three closes through it.
    assert build_network(tiered(*BOARDS), 8).n_links == 2 * 12 + 6
    assert build_network(tiered(*BOARDS), 4).n_links == 12


def test_boards_share_the_link_between_them():
    """All 16 messages from one board of four to the next cross one link, and no link on the boards."""
    network = build_network(tiered(*BOARDS), 8)
    across = list(itertools.product(range(4), range(4, 8)))
    assert loads(network, across) == {"board0>board1": 16}


def test_tiers_of_one_kind_are_the_plain_kinds():
    for connect, plain in (("full_mesh", mesh(3.0, 0.5)), ("ring", ring(3.0)), ("switch", switch(3.0))):
        network, other = build_network(tiered(("node", 6, connect, 3.0, 0.5)), 6), build_network(plain, 6)
        pairs = [pair for pair in all_pairs(6) if pair[0] != pair[1]]
        assert routes(network, pairs)[0] == routes(other, pairs)[0]
        assert network.capacities() == other.capacities()


# --- What is read and refused -----------------------------------------------------------------------------------------

TREE = (
    'kind = "fat_tree"\n'
    "[[level]]\nradix = 4\nbandwidth_gbytes_per_s = 50\nlatency_us = 2\noversubscription = 2.0\n"
    "[[level]]\nradix = 4\nbandwidth_gbytes_per_s = 100\nlatency_us = 3\n"
)
TIERS = (
    'kind = "tiered"\n'
    '[[level]]\nname = "board"\nsize = 4\nconnect = "full_mesh"\nbandwidth_gbytes_per_s = 400\nlatency_us = 0.2\n'
    '[[level]]\nname = "rack"\nsize = 4\nconnect = "switch"\nbandwidth_gbytes_per_s = 200\nlatency_us = 2\n'
)


def test_files_are_read(tmp_path):
    tree = load(tmp_path, "protocol_efficiency = 0.5\n" + TREE)
    assert tree.max_chips() == 16
    # Payload gets half: 4 chips share (4 / 2) * 100 * 0.5.
    assert tree.bytes_per_s == [25e9, 100e9]
    tiers = load(tmp_path, TIERS)
    assert tiers == tiered(("board", 4, "full_mesh", 400e9, 0.2 / 1e6), ("rack", 4, "switch", 200e9, 2e-6)).model_copy(
        update={"name": "lab"}
    )


WRONG = {
    "no levels": ('kind = "tiered"', "level: missing"),
    "empty": ('kind = "fat_tree"\nlevel = []', "level: expected a list of tables, at least one, got []"),
    "no table": ('kind = "fat_tree"\nlevel = 3', "level: expected a list of tables, at least one, got 3"),
    "wide top": (
        TREE.replace("latency_us = 3", "latency_us = 3\noversubscription = 2.0"),
        "level[1].oversubscription = 2.0, but switches of the highest level have no links up: give it to a level below",
    ),
    "undersubscribed": (TREE.replace("= 2.0", "= 0.5"), "level[0].oversubscription: expected greater than or equal to"),
    "huge": (TREE.replace("radix = 4", "radix = 5000"), "level: the radices multiply to 25000000 chips, expected at"),
    "near": (TREE + "radius = 3", "level[1].radius: unknown key 'radius'; did you mean 'radix'?"),
    "no name": (TIERS.replace('name = "rack"\n', ""), "level[1].name: missing"),
    "twice": (TIERS.replace("rack", "board"), "level[1].name = 'board' names level[0] already"),
    "a chip": (TIERS.replace("rack", "chip"), "level[1].name: expected a name of letters, _ and -, not 'chip'"),
    "numbered": (TIERS.replace("rack", "rack1"), "level[1].name: expected a name of letters, _ and -, not 'chip'"),
    "star": (TIERS.replace('"switch"', '"star"'), "level[1].connect: expected 'full_mesh', 'ring' or 'switch'"),
    "many links": (
        TIERS.replace("size = 4\nconnect = \"full_mesh\"", "size = 5000\nconnect = \"full_mesh\""),
        "level: 99980008 links in all, expected at most 16777216",
    ),
    "endless": (TIERS.replace("size = 4", "size = 1000000000"), "level: "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case, tmp_path):
    text, message = WRONG[case]
    (line,) = complaints(tmp_path, text)
    assert line.startswith(message)


def test_so_many_chips():
    assert reason(fat_tree((4, 1.0, 0.0), (2, 1.0, 0.0)), 9) == "n_chips = 9, but topology tree has 8 chips"
    assert reason(tiered(*BOARDS), 25) == "n_chips = 25, but topology tiers has 24 chips"


@pytest.mark.parametrize(("text", "pattern", "factor_of"), [
    (TREE, "level1.switch*.up", "level1.switch2.up"),
    (TREE, "chip5.*", "chip5.down"),
    (TIERS, "board1.*", "board1.down"),
    (TIERS, "chip4>*", "chip4>chip7"),
])  # fmt: skip
def test_faults_hit_links_by_name(text, pattern, factor_of, tmp_path):
    sound = capacity_of(build_network(load(tmp_path, text), 16))
    slow = capacity_of(build_network(load(tmp_path, text + fault(f'link = "{pattern}"\nfactor = 0.25')), 16))
    assert slow[factor_of] == sound[factor_of] / 4
    assert {name for name in sound if slow[name] != sound[name]} != set(sound)


def test_a_fault_on_what_is_not_there(tmp_path):
    topology = load(tmp_path, TIERS + fault('link = "board3.up"\nfactor = 0.5'))
    assert "has no link 'board3.up' (degrade[0]); nearest: " in reason(topology, 4)


# --- Deployments ------------------------------------------------------------------------------------------------------

MACHINES = {
    "tree": fat_tree((4, 5e10, 1e-6, 2.0), (2, 5e10, 2e-6, 1.5), (2, 5e10, 3e-6)),
    "tiers": tiered(
        ("board", 4, "full_mesh", 4e11, 2e-7), ("rack", 2, "ring", 4.5e11, 4e-7), ("pod", 2, "switch", 1e11, 2e-6)
    ),
    "rings of rings": tiered(("board", 4, "ring", 1e11, 2e-7), ("rack", 4, "ring", 5e10, 4e-7)),
}
KEYS = [
    {"tp": 4},
    {"tp": 2, "pp": 2, "collective": "direct"},
    {"model": MOE, "tp": 2, "ep": 4},
    {"tp": 2, "cp": 2, "phase": "decode", "rank_order": ("cp", "dp", "tp", "pp")},
    {"tp": 2, "cp": 4},
]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MACHINES)
def test_deployments_are_conserved_and_reduced_exactly(name, keys):
    dep = deploy(topology=MACHINES[name], n_chips=16, dp="auto", **keys)
    assert_conserved_and_reduced_exactly(dep)


@pytest.mark.parametrize("more", ["", fault("chip = 5\nfactor = 0.8"), "link"])
@pytest.mark.parametrize("text", [TREE, TIERS])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_reduced_equals_full(text, more, phase, tmp_path):
    if more == "link":
        more = fault(f'link = "{"level1.switch1.up" if text == TREE else "board1.up"}"\nfactor = 0.5')
    path = tmp_path / "machine.toml"
    path.write_text(text + more)
    prepared = prepare(model="llama-3.1-8b", topology=str(path), n_chips=16, tp=2, cp=4, phase=phase, seq_len="64K")
    assert_reduced_equals_full(*prepared)


@given(machine=st.sampled_from([*MACHINES]), tp=st.sampled_from([1, 2, 4]), cp=st.integers(1, 4),
       order=st.permutations(["tp", "cp", "pp", "dp"]), dp=st.integers(1, 3))  # fmt: skip
@settings(max_examples=15)
def test_reduced_equals_full_at_random(machine, tp, cp, order, dp):
    if tp * cp * dp > 16:
        return
    dep = deploy(topology=MACHINES[machine], tp=tp, cp=cp, dp=dp, rank_order=tuple(order))
    structure = build_structure(dep)
    assert_reduced_equals_full(structure, priced(dep, structure, 2048))


@pytest.mark.parametrize("name", MACHINES)
def test_boards_that_keep_to_themselves_are_one_class(name):
    """Chips of a ring are the same chip, except at the ends of what is no ring: on a mesh they send to the next one."""
    dep = deploy(topology=MACHINES[name], tp=4, dp=4)
    assert len(Template(build_structure(dep), reduced=True).chips) == 1


@pytest.mark.parametrize("name", MACHINES)
def test_the_closed_form_of_a_ring_of_neighbours(name):
    assert_closed_form({"tp": 4, "dp": 4, "topology": MACHINES[name]}, 16)


@pytest.mark.parametrize(("topology", "n_messages", "bytes_per_s"), [
    (fat_tree((4, 1e9, 0.0)), 3, 1e9),  # a chip's own three leave by one link
    (fat_tree((2, 1e11, 0.0, 2.0), (2, 1e9, 0.0)), 4, 1e9),  # two chips to two over the one cable of their leaf
    (tiered(("board", 2, "full_mesh", 1e11), ("rack", 2, "full_mesh", 1e9)), 4, 1e9),
    (tiered(("board", 4, "full_mesh", 1e9)), 1, 1e9),
])  # fmt: skip
def test_the_closed_form_of_a_direct_exchange(topology, n_messages, bytes_per_s):
    assert_direct_exchange(topology, n_messages, bytes_per_s)


def test_machines_that_differ_in_numbers_share_a_structure():
    def key(topology):
        return structure_key(deploy(topology=topology, tp=4, cp=2), build_network(topology, 8))

    tree, other = fat_tree((4, 1.0, 0.0), (2, 1.0, 0.0)), fat_tree((4, 9.0, 1.0, 3.0), (8, 2.0, 1.0))
    assert key(tree) == key(other)
    assert key(tree) != key(fat_tree((2, 1.0, 0.0), (4, 1.0, 0.0)))
    one, two = tiered(*BOARDS), tiered(*[(f"un{name}", size, how, 3.0) for name, size, how, *_ in BOARDS])
    assert key(one) == key(two)
    assert len({key(tiered(("a", 8, how))) for how in ("ring", "full_mesh", "switch")}) == 3


def test_more_of_a_shared_link_is_no_slower():
    """The link between two boards is the limit: twice its bandwidth saves time, and without end still more."""

    def seconds(bytes_per_s):
        topology = tiered(("board", 4, "full_mesh", 1e12), ("rack", 2, "full_mesh", bytes_per_s))
        dep = deploy(topology=topology, tp=4, cp=2)
        structure = build_structure(dep)
        return simulate_point(Template(structure, reduced=True), priced(dep, structure, 8192), 0)[1].max()

    slow, fast, endless = seconds(1e9), seconds(2e9), seconds(1e15)
    assert slow > fast > endless


def test_presets_of_several_tiers_are_as_said():
    tree, tiers = load_topology("fat-tree-1024"), load_topology("pod-rack-board-chip")
    assert (tree.max_chips(), tiers.max_chips()) == (1024, 256)
    # 16 chips of 50 GB/s under a leaf that is twice oversubscribed; 128 of them under the next.
    assert tree.bytes_per_s == [50e9, 400e9, 3200e9]
