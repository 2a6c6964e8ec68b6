"""Rows that are played from a tape: the very floats of a simulation, wherever the tape says that it may be played."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import compute, flow, workload
from strategies import TIDY, workloads
from tapes import Recorded, assert_played_as_simulated, factors, recorded, scaled, with_amounts

from g5cp_vec.engine.arrays import Costs
from g5cp_vec.engine.measure import no_tags
from g5cp_vec.engine.playback import MAX_TAPES
from g5cp_vec.runner.simulate import run_graph
from g5cp_vec.runner.workload import compile_workload


@settings(max_examples=300)
@given(workloads(), st.lists(factors, min_size=1, max_size=6))
def test_what_is_played_is_what_is_simulated(load, rows):
    assert_played_as_simulated(*recorded(load), rows)


@settings(max_examples=150)
@given(workloads(regimes=(TIDY,), max_ops=24), st.lists(factors, min_size=1, max_size=6))
def test_what_is_played_is_what_is_simulated_where_ties_are_common(load, rows):
    assert_played_as_simulated(*recorded(load), rows)


@given(workloads(), st.integers(-3, 3))
def test_a_tape_holds_for_its_own_row_and_for_any_multiple(load, exponent):
    tape, costs = recorded(load)
    instant_s = tape.w.instant_s[: tape.tape.n_instants]
    # Instants that are nearly one are simulated: see `g5cp_vec.engine.tape`.
    assume(tape.is_whole and (np.diff(instant_s) > 1e-11 * instant_s[1:]).all())
    multiple = scaled(costs, [2.0**exponent])
    if all(np.isfinite(column).all() for column in multiple):
        played = tape.play(multiple)
        assert played is not None
        np.testing.assert_array_equal(played, np.array(tape.times) * 2.0**exponent)


# Chip 0 computes 4 s; beside it one flow moves 10 B alone at 10 B/s, then shares the link with one of 20 B, which a
# compute of half a second lets go. Then a compute of 1 s, and a latency.
SHARED = workload(
    [compute(0, 4), flow([0], 10), compute(1, 0.5), flow([0], 20), compute(2, 1), flow([], 0, 0.25)],
    deps=[(2, 3), (3, 4), (4, 5)],
    bw=[10],
    chips=3,
)


def test_by_hand():
    """10 B alone to 0.5 s, both at 5 B/s to 1.5 s, 15 B left alone to 3 s; compute to 4 s; 0.25 s of latency."""
    tape, costs = recorded(SHARED)
    np.testing.assert_allclose(tape.times[1], [4, 1.5, 0.5, 3, 4, 4.25])
    # 12 B: 7 B left at 0.5 s end at 1.9 s, when 13 B are left; they end at 3.2 s. Nothing changes places.
    played = tape.play(with_amounts(costs, {0: 4.2, 1: 12}))
    np.testing.assert_allclose(played[1], [4.2, 1.9, 0.5, 3.2, 4.2, 4.45])


@pytest.mark.parametrize(("n_bytes", "end_s"), [(4.0, 0.4), (5.0, 0.5)])
def test_a_flow_that_would_end_before_its_rate_changes(n_bytes, end_s):
    tape, costs = recorded(SHARED)
    shorter = with_amounts(costs, {1: n_bytes})
    assert tape.play(shorter) is None
    assert tape.simulate(shorter)[1][1] == end_s


@pytest.mark.parametrize(
    ("recorded_s", "other_s", "holds"),
    [
        ([1, 2], [1.5, 2], True),
        ([1, 2], [3, 2], True),
        ([1, 2], [2, 2], False),
        ([2, 2], [2.5, 2.5], True),
        ([2, 2], [2.5, 2], False),
    ],
)
def test_another_order_of_two_ends(recorded_s, other_s, holds):
    tape, costs = recorded(workload([compute(chip, s) for chip, s in enumerate(recorded_s)], chips=2))
    played = tape.play(with_amounts(costs, dict(enumerate(other_s))))
    assert (played is not None) == holds
    if holds:
        np.testing.assert_array_equal(played[1], other_s)


def test_instants_of_one_time():
    """A compute too short for the clock to move: two flows begin at one time, at two instants, one after the other."""
    ops = [compute(0, 1), flow([0], 10), compute(1, 1e-20), flow([1], 10)]
    tape, costs = recorded(workload(ops, deps=[(0, 1), (0, 2), (2, 3)], bw=[1, 1], chips=2))
    longer = with_amounts(costs, {2: 0.5})
    np.testing.assert_array_equal(tape.simulate(longer)[1], [1, 11, 1.5, 11.5])
    assert tape.play(longer) is None


def rows_of(load, seed, n_rows, spread):
    graph, costs = compile_workload(load)
    rng = np.random.default_rng(seed)
    tables = tuple(column * rng.uniform(1 - spread, 1 + spread, (n_rows, len(column))) for column in costs[:3])
    tags = no_tags(len(graph.op_kind), len(graph.chip_indptr) - 1)
    return graph, tags, (*tables, np.tile(costs.capacity_bytes_per_s, (n_rows, 1)))


@settings(max_examples=60)
@given(workloads(), st.integers(0, 99), st.sampled_from([0.0, 1e-13, 1e-12, 1e-9, 0.01, 0.3]))
def test_rows_do_not_depend_on_their_neighbours(load, seed, spread):
    graph, tags, tables = rows_of(load, seed, 3 * MAX_TAPES, spread)
    together = run_graph(graph, tags, tables, keep_times=True)
    for jobs in (2, 3):
        shared = run_graph(graph, tags, tables, jobs, keep_times=True)
        np.testing.assert_array_equal(shared[3].times_s, together[3].times_s)
        np.testing.assert_array_equal(shared[1], together[1])
    for row in range(0, 3 * MAX_TAPES, 5):
        alone = run_graph(graph, tags, tuple(table[row : row + 1] for table in tables), keep_times=True)
        np.testing.assert_array_equal(alone[3].times_s[0], together[3].times_s[row])
        assert alone[1][0] == together[1][row]


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_capacities_and_zeros_are_looked_at(column):
    """A row like the one before but for a capacity, or for a cost of nothing, is not played."""
    graph, tags, tables = rows_of(SHARED, 0, 4, 0.0)
    tables[column][1:3] *= 3.0 if column == 3 else 0.0
    together = run_graph(graph, tags, tables, keep_times=True)[3].times_s
    for row in range(4):
        alone = run_graph(graph, tags, tuple(table[row : row + 1] for table in tables), keep_times=True)
        np.testing.assert_array_equal(alone[3].times_s[0], together[row])
    assert not np.array_equal(together[0], together[1])
    np.testing.assert_array_equal(together[0], together[3])


def test_rates_that_change_too_often_to_be_recorded():
    """Each of forty ends changes the rates of all that are left: more changes than a tape holds."""
    load = workload([flow([0], 1 + i) for i in range(40)], bw=[1])
    graph, tags, tables = rows_of(load, 0, 4, 0.0)
    assert not Recorded(graph, Costs(*(table[0] for table in tables))).is_whole
    times_s = run_graph(graph, tags, tables, keep_times=True)[3].times_s
    np.testing.assert_allclose(times_s[:, 1, -1], 820)
    np.testing.assert_array_equal(times_s, times_s[:1].repeat(4, axis=0))
