"""Flows that begin together and meet only each other: one rate without a solution, until somebody comes."""

from __future__ import annotations

import itertools

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import CLEAR_GAP, assert_times, compute, flow, workload
from tapes import Recorded, assert_played_as_simulated, factors, recorded

from g5cp_vec.engine.arrays import N_SOLVES, Costs
from g5cp_vec.runner.workload import compile_workload

# Ports 0 to 2 lead out of three chips, 3 to 5 into them.
ALL_TO_ALL = [flow([a, 3 + b], 12) for a, b in itertools.permutations(range(3), 2)]

# Workload, ends, and how many solutions of rates it takes.
HAND = {
    # Two flows on every port of 12 B/s.
    "all to all": (workload(ALL_TO_ALL, bw=[12] * 6), [2] * 6, 0),
    # Half as fast into the chips, which is what bounds all of them.
    "narrow on one side": (workload(ALL_TO_ALL, bw=[12] * 3 + [6] * 3), [4] * 6, 0),
    # Two pairs that have nothing in common, 6 B/s each.
    "in two places": (
        workload([flow([link // 2, 2 + link], 12) for link in range(4)], bw=[12, 12, 9, 9, 9, 9]), [2] * 4, 0,
    ),
    # At 1 s all have 6 B left, and another comes with 6 B for chip 0: 4 B/s each there. The others still have 6 B/s and
    # end at 2 s, these three at 2.5 s.
    "one more": (workload([*ALL_TO_ALL, flow([3], 6, 1)], bw=[12] * 6), [2, 2, 2.5, 2, 2.5, 2, 2.5], 1),
    # The same from the start: 4 B/s each into chip 0, where the last has its 6 B at 1.5 s; then 6 B/s for the others,
    # 6 B until 2.5 s. When the four end at 2 s these could have more out of their chips.
    "one more at once": (workload([*ALL_TO_ALL, flow([3], 6)], bw=[12] * 6), [2, 2, 2.5, 2, 2.5, 2, 1.5], 3),
    # They end at 2 s, where the same begin anew.
    "one after another": (
        workload([*ALL_TO_ALL, *ALL_TO_ALL], [(a, 6 + a) for a in range(6)], bw=[12] * 6), [2] * 6 + [4] * 6, 0,
    ),
    # On the route of one of two: 6 B/s each, 4 B/s each from 1 s on, when 6 B are left of both; at 2.5 s 3 of its 9 B.
    "onto one's route": (
        workload([flow([0, 1], 12), flow([0], 12), flow([0], 9, 1)], bw=[12, 12]), [2.5, 2.5, 2.75], 1,
    ),
    # Shares of 6 and 12 B/s.
    "two rates": (
        workload([flow([link // 2, 2 + link], 12) for link in range(4)], bw=[12, 24, 30, 30, 30, 30]), [2, 2, 1, 1], 1,
    ),
    # One of the three has less elsewhere, 2 B/s, and leaves 5 for each of the others.
    "a slower one": (workload([flow([0], 10), flow([0], 10), flow([0, 1], 10)], bw=[12, 2]), [2, 2, 5], 1),
    # 6 B/s each, and the second is left alone with 12 B at 1 s.
    "two sizes": (workload([flow([0], 6), flow([0, 1], 18)], bw=[12, 24]), [1, 2], 1),
}  # fmt: skip


def in_sizes(load):
    """A tape of a workload in which equal amounts have one id, and costs by these ids."""
    graph, costs = compile_workload(load)
    amount, ids = np.unique(costs.bytes, return_inverse=True)
    costs = Costs(amount, amount, costs.latency_s, costs.capacity_bytes_per_s)
    return Recorded(graph._replace(op_cost=ids.astype(np.int32)), costs), costs


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name):
    load, ends, n_solves = HAND[name]
    tape, _ = in_sizes(load)
    assert_times(naive.simulate(load)[2], ends)
    assert_times(tape.times[1], ends)
    assert tape.w.counter[N_SOLVES] == n_solves


@pytest.mark.parametrize("n_bytes", [6.6, 6.0])
def test_what_is_a_crowd_does_not_depend_on_the_row(n_bytes):
    """Three flows of equal sizes, which are three sizes: a row in which they differ ends as it would by itself."""
    load = workload([flow([1], 6), flow([0, 1], 6), flow([0], 6), flow([1], 1, 0.1)], bw=[1.7, 1.7])
    tape, costs = recorded(load)
    amount = costs.bytes.copy()
    amount[2] = n_bytes
    changed = costs._replace(duration_s=amount, bytes=amount)
    np.testing.assert_array_equal(tape.play(changed), tape.simulate(changed))


@st.composite
def collectives(draw):
    """Flows between ports, alike and at one instant mostly, again and again; and some that come when they like."""
    n_ports = draw(st.integers(2, 4))
    links = [{"bw": draw(st.sampled_from([1, 1, 1, 2, 3]))} for _ in range(2 * n_ports)]
    ops, deps = [], []
    for wave in range(draw(st.integers(1, 3))):
        ops.append(compute(wave, draw(st.sampled_from([0, 1, 1, 1.5, 2.25]))))
        begin, n_bytes = len(ops) - 1, draw(st.sampled_from([1, 2, 2.5]))
        pairs = st.tuples(st.integers(0, n_ports - 1), st.integers(0, n_ports - 1))
        for a, b in draw(st.lists(pairs, min_size=1, max_size=8, unique=draw(st.booleans()))):
            ops.append(flow([a, n_ports + b], n_bytes if draw(st.integers(0, 9)) else 2 * n_bytes))
            deps.append([begin, len(ops) - 1])
    for _ in range(draw(st.integers(0, 3))):
        route = draw(st.lists(st.integers(0, 2 * n_ports - 1), min_size=1, max_size=3, unique=True))
        ops.append(flow(route, draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([0, 0.5, 1, 2, 3.25]))))
    order = draw(st.permutations(range(len(ops))))
    place = {op: i for i, op in enumerate(order)}
    return {
        "links": links,
        "chips": 3,
        "ops": [ops[op] for op in order],
        "deps": [[place[a], place[b]] for a, b in deps],
    }


@settings(max_examples=400)
@given(collectives())
def test_agrees_with_twin(load):
    _, start, finish, gap = naive.simulate_with_gap(load)
    assume(gap >= CLEAR_GAP)
    tape, _ = in_sizes(load)
    assert_times(tape.times[0], start)
    assert_times(tape.times[1], finish)


@settings(max_examples=200)
@given(collectives(), st.lists(factors, min_size=1, max_size=4), st.booleans())
def test_what_is_played_is_what_is_simulated(load, rows, by_size):
    assert_played_as_simulated(*(in_sizes(load) if by_size else recorded(load)), rows)
