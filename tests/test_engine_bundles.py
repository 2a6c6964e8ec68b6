"""Flows that queue up on one route: rates without a solution, whoever comes and goes, and how they end up listed."""

from __future__ import annotations

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import CLEAR_GAP, assert_same, assert_times, compute, flow, workload
from strategies import TIDY, queues
from tapes import Recorded, assert_played_as_simulated, factors, recorded

from g5cp_vec import replay
from g5cp_vec.engine.arrays import N_SOLVES
from g5cp_vec.runner.workload import compile_workload

# Workload, ends, and how many solutions of rates it takes.
HAND = {
    # 10 B/s: 10 B gone when the second comes at 1 s, then 5 B/s each. The second has its 20 B at 5 s; the first has
    # 10 B left then, alone: 6 s.
    "two": (workload([flow([0, 1], 40), flow([0, 1], 20, 1)], bw=[20, 10]), [6, 5], 0),
    # 12 B/s: 24 B left at 1 s; 6 B/s each until 2 s: 18 and 6 left; 4 B/s each. The second ends at 3.5 s, 12 and 24
    # are left; 6 B/s each until the first ends at 5.5 s; 12 B are left for 12 B/s.
    "three": (workload([flow([0], 36), flow([0], 12, 1), flow([0], 30, 2)], bw=[12]), [5.5, 3.5, 6.5], 0),
    # The same three at once at 1 s, behind a compute: 4 B/s each until 4 s, 6 B/s until 7 s, and 6 B are left.
    "three at once": (
        workload(
            [compute(0, 1), flow([0], 36), flow([0], 12), flow([0], 30)], [(0, 1), (0, 2), (0, 3)], bw=[12], chips=1
        ),
        [1, 7.5, 4, 7],
        0,
    ),
    # Two on both links, 6 B/s each. At 1 s a third comes to the second link: 4 B/s each, until it has its 6 B at 2.5 s.
    # 12 and 24 are left: 6 B/s each until 4.5 s, then 12 B/s. At 5 s 6 are left and another comes, 6 B/s each until
    # 6 s, and 12 of its 18 B are left. What the third changes is solved: when it comes and when it goes.
    "a third route": (
        workload([flow([0, 1], 24), flow([0, 1], 36), flow([1], 6, 1), flow([0, 1], 18, 5)], bw=[12, 12]),
        [4.5, 6, 2.5, 7],
        2,
    ),
    # 6 B/s each until the first ends at 2 s, where another comes: 6 B/s each still, its 6 B until 3 s; 6 left.
    "one for another": (workload([flow([0], 12), flow([0], 24), flow([0], 6, 2)], bw=[12]), [2, 3.5, 3], 0),
    # The first ends at 2 s, where one comes to the second link only: the other two have 6 B/s each there; 2 s for 12 B.
    "one of another route for another": (
        workload([flow([0, 1], 12), flow([0, 1], 24), flow([1], 12, 2)], bw=[12, 12]),
        [2, 4, 4],
        1,
    ),
    # All of three routes at one instant: 4 B/s each on the first link, which leaves 8 on the second.
    "part of a route": (
        workload([flow([0, 1], 8), flow([0], 8), flow([0], 8), flow([1], 16)], bw=[12, 12]),
        [2, 2, 2, 2],
        1,
    ),
    # One route is the other backwards: links alike, but not in order, are shared as any.
    "backwards": (workload([flow([0, 1], 12), flow([1, 0], 18)], bw=[12, 24]), [2, 2.5], 1),
    # A longer route that begins alike: 6 B/s each until 1 s; the longer has 5 B/s on its last link: at 2 s 6 + 7 = 13.
    "longer": (workload([flow([0], 14), flow([0, 1], 10)], bw=[12, 5]), [2, 2], 1),
}


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name):
    load, ends, n_solves = HAND[name]
    tape, _ = recorded(load)
    assert_times(tape.times[1], ends)
    assert_times(naive.simulate(load)[2], ends)
    assert tape.w.counter[N_SOLVES] == n_solves


def test_order_of_ops_is_of_no_consequence():
    load, ends, _ = HAND["a third route"]
    for shift in range(1, 4):
        ops = load["ops"][shift:] + load["ops"][:shift]
        assert_times(replay(load | {"ops": ops}).finish, ends[shift:] + ends[:shift])


def with_counts(load, counts):
    """Times of a workload with ``counts[op]`` flows of each op on every link of its route, and solutions of rates."""
    graph, costs = compile_workload(load)
    of_entry = np.repeat(np.array(counts, float), np.diff(graph.route_indptr))
    tape = Recorded(graph._replace(route_count=of_entry), costs)
    return *tape.times, tape.w.counter[N_SOLVES]


def test_counts_by_hand():
    """12 B/s for two flows of each class: 6 B/s until 1 s, then 3 B/s each, and 6 + 6 B more take until 3 s."""
    load = workload([flow([0], 12), flow([0], 12, 1)], bw=[12])
    _, finish, n_solves = with_counts(load, [2, 2])
    assert_times(finish, [3, 4])
    assert n_solves == 0


def test_other_counts_by_hand():
    """12 B/s for two flows and one: 6 B/s until 1 s, then 4 B/s each: 6 B until 2.5 s, and 6 B left at 12 B/s."""
    load = workload([flow([0], 12), flow([0], 12, 1)], bw=[12])
    _, finish, n_solves = with_counts(load, [2, 1])
    assert_times(finish, [2.5, 3])
    assert n_solves == 1


def in_copies(load, counts):
    """Return the workload with every op so many times, and where each one's copies begin."""
    first = np.cumsum([0, *counts]).tolist()
    ops = [op for op, n in zip(load["ops"], counts, strict=True) for _ in range(n)]
    deps = [
        [a, b]
        for before, after in load["deps"]
        for a in range(first[before], first[before + 1])
        for b in range(first[after], first[after + 1])
    ]
    return load | {"ops": ops, "deps": deps}, first[:-1]


@settings(max_examples=300)
@given(queues())
def test_agrees_with_twin(load):
    makespan, start, finish, gap = naive.simulate_with_gap(load)
    assume(gap >= CLEAR_GAP)
    assert_same(replay(load), makespan, start, finish)


@given(queues(max_ops=8), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_a_class_of_flows_is_so_many_flows(load, counts):
    counts = [n if op["kind"] == "flow" else 1 for op, n in zip(load["ops"], counts, strict=False)]
    copies, first = in_copies(load, counts)
    _, start, finish, gap = naive.simulate_with_gap(copies)
    assume(gap >= CLEAR_GAP)
    got_start, got_finish, _ = with_counts(load, counts)
    assert_times(got_start, [start[op] for op in first])
    assert_times(got_finish, [finish[op] for op in first])


@settings(max_examples=200)
@given(queues(regimes=(TIDY,)) | queues(max_ops=24), st.lists(factors, min_size=1, max_size=4))
def test_what_is_played_is_what_is_simulated(load, rows):
    assert_played_as_simulated(*recorded(load), rows)
