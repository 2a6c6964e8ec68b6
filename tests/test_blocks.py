"""What building blocks side by side rests on, each against its plain definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_symmetry import DESCRIPTIONS, probe_of

from g5cp_vec.config.grid import load_grid
from g5cp_vec.engine.csr import group_by, join_rows
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.probe import Probe
from g5cp_vec.mapping.reduce import MAX_UNIT, find_runs
from g5cp_vec.mapping.sends import Exchange
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.mapping.symmetry import generated_symmetry

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12)


def int32s(numbers):
    return np.array(numbers, np.int32)


@given(left=PAIRS, right=PAIRS)
def test_rows_are_joined_as_loops_join_them(left, right):
    indptr, indices = group_by(4, int32s([row for row, _ in left]), int32s([entry for _, entry in left]))
    found = join_rows(indptr, indices, int32s([row for row, _ in right]), int32s([column for _, column in right]))
    expected = [(entry, column) for row, column in right for other, entry in left if other == row]
    assert list(zip(*(side.tolist() for side in found), strict=True)) == expected


def longest_runs(chain):
    """Runs by trying every unit, the shortest of those that repeat longest."""
    runs, at = [], 0
    while at < len(chain):
        stretches = []
        for unit in range(1, MAX_UNIT + 1):
            repeats = 1
            while chain[at + repeats * unit : at + (repeats + 1) * unit] == chain[at : at + unit]:
                repeats += 1
            if repeats > 1 and at + unit <= len(chain):
                stretches.append((unit * repeats, -unit, repeats))
        length, negative, repeats = max(stretches, default=(1, -1, 1))
        if repeats > 1:
            runs.append((at, -negative, repeats))
        at += length
    return runs


@given(
    st.one_of(
        st.lists(st.integers(0, 2), max_size=40),
        # Patterns of patterns.
        st.builds(
            lambda head, inner, n, mark, m: head + (inner * n + mark) * m,
            *[st.lists(st.integers(0, 2), min_size=1, max_size=3), st.lists(st.integers(0, 1), min_size=1, max_size=3)],
            st.integers(1, 5),
            st.lists(st.integers(0, 2), max_size=2),
            st.integers(1, 4),
        ),
    )
)
def test_runs_are_the_longest_that_any_unit_makes(chain):
    assert [tuple(run) for run in find_runs(chain)] == longest_runs(chain)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 4, 2), (1, 5)])
def test_orbits_are_what_repeated_moves_reach(shape):
    chips = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    # The axis turned first is the slowest one; links are two to a chip, of which one stays under every move.
    for turned in {tuple(axes), tuple(axes[::-1]), tuple(axes[:1])}:
        moves = [np.roll(chips, -1, axis=axis).ravel() for axis in turned]
        links = [np.concatenate([move, np.full(1, chips.size, np.int32)]) for move in moves]
        found = generated_symmetry(moves, links, [shape[axis] for axis in turned])
        for own, of_each, every in ((found.chips, found.chip_orbit, moves), (found.links, found.link_orbit, links)):
            reached = [{i} for i in range(len(every[0]))]
            for members in reached:
                while more := {int(move[i]) for move, i in product(every, members)} - members:
                    members |= more
            assert own.tolist() == sorted({min(members) for members in reached})
            assert own[of_each].tolist() == [min(members) for members in reached]
        assert found.n_fixing[found.link_orbit[-1]] == found.order == np.prod([shape[axis] for axis in turned])


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_power_of_what_holds_holds(name, tmp_path):
    """Knowing that the second move is the first one twice changes nothing of what holds."""
    describe, holds = DESCRIPTIONS[name]
    plain, chips = probe_of(8, tmp_path)
    probe = Probe(plain.network, np.stack([np.roll(chips, -1), np.roll(chips, -2)]), np.array([[0, 1], [0, 0]], bool))
    describe(probe, chips)
    assert probe.holds.tolist() == holds


@pytest.mark.parametrize("digits", [(6,), (2, 3), (3, 2)])
def test_what_is_sent_in_an_exchange_is_received(digits):
    n_chips, groups = 15, [[3, 1, 4, 14, 5, 9], [2, 6, 0, 8, 7, 10]]
    exchange = Exchange(int32s(groups), digits, n_chips)
    every = int32s(groups).ravel()
    receivers, sent = exchange.sent(every)
    received = exchange.received(every)
    handles = {}
    for (group, place), to, found in zip(product(groups, range(6)), receivers.tolist(), sent.tolist(), strict=True):
        assert to == [group[(place + k) % 6] for k in range(1, 6)]
        for k, handle in enumerate(found, 1):
            # Its slot is the distance in each digit of the places.
            ends = (np.unravel_index(at, digits) for at in (place, (place + k) % 6))
            apart = [int(b - a) % digit for a, b, digit in zip(*ends, digits, strict=True)]
            assert handle == (np.ravel_multi_index(apart, digits) - 1) * n_chips + group[place]
            handles[group[place], group[(place + k) % 6]] = handle
    for (group, place), found in zip(product(groups, range(6)), received.tolist(), strict=True):
        assert found == [handles[group[(place - k) % 6], group[place]] for k in range(1, 6)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("pp", [1, 3])
def test_blocks_are_cut_where_they_begin(symmetric, pp):
    fixed = {
        "model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 128 * pp, "tp": 4, "cp": 4, "pp": pp, "ep": 16,
        "collective": "direct", "chip": "h100-sxm", "phase": "prefill", "dp": "auto", "seq_len": "32K",
    }  # fmt: skip
    (dep,) = load_grid({"name": "point", "fixed": fixed}, point=True).expand().deployments
    structure = build_structure(dep, build_network(dep.topology, dep.n_chips), symmetric=symmetric)
    assert (structure.symmetry.order > 1) == symmetric
    whole, first_op, n_prio = structure.side_by_side
    assert len(structure.blocks) == len(n_prio) == len(set(structure.chain))
    for i, block in enumerate(structure.blocks):
        first, end = first_op[i], first_op[i + 1]
        assert len(block.kind) == end - first
        links = np.repeat(np.arange(len(whole.kind)), whole.route_length)
        of_block = {"route_links": (links >= first) & (links < end)}
        for name, op in (("pred", "succ"), *((f"{n}_chip", f"{n}_op") for n in ("entry", "exit", "leave", "arrive"))):
            of_block[name] = of_block[op] = (getattr(whole, op) >= first) & (getattr(whole, op) < end)
        for name in block._fields:
            if name == "n_prio":
                assert block.n_prio == n_prio[i]
                continue
            column = getattr(whole, name)
            own = column[of_block[name]] if name in of_block else None
            if own is None:
                own = column[of_block["route_links"]] if name == "route_count" else column[first:end]
            shift = first if name in ("pred", "succ") or name.endswith("_op") else 0
            np.testing.assert_array_equal(getattr(block, name), own - shift)
        # Nothing of a block is elsewhere.
        assert ((block.pred >= 0) & (block.pred < block.succ) & (block.succ < len(block.kind))).all()
