"""The audit's own max-min shares against their exact twin, and what it makes of flows that disagree with them."""

from __future__ import annotations

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sharing_problems

from g5cp_vec.audit.sharing import Flows, _instants, capacity_violations, fair_rates


def _csr(routes):
    return np.cumsum([0, *map(len, routes)]), np.concatenate([np.array(route, np.int64) for route in routes])


def violations(routes, capacity, n_bytes, finish_s, active_s=None, others=()):
    indptr, links = _csr(routes)
    active_s = np.zeros(len(routes)) if active_s is None else np.array(active_s, np.float64)
    flows = Flows(indptr, links, np.array(n_bytes, np.float64), active_s, np.array(finish_s, np.float64))
    return capacity_violations(flows, np.array(capacity, np.float64), np.array(others, np.float64))


@given(sharing_problems(), st.data())
def test_fair_rates_equal_their_twin(problem, data):
    routes, capacities = problem
    n_flows = data.draw(st.lists(st.integers(1, 4), min_size=len(routes), max_size=len(routes)))
    indptr, links = _csr(routes)
    owner = np.repeat(np.arange(len(routes)), np.diff(indptr))
    rate = fair_rates(owner, links, np.array(n_flows), np.array(capacities, np.float64))
    every_flow = [route for route, n in zip(routes, n_flows, strict=True) for _ in range(n)]
    exact = np.array([float(r) for r in naive.solve_maxmin(every_flow, capacities)])
    np.testing.assert_allclose(np.repeat(rate, n_flows), exact, rtol=1e-12)


@given(sharing_problems(), st.data())
def test_flows_as_the_twin_simulates_them_are_sound(problem, data):
    routes, capacities = problem
    size = st.sampled_from([1, 2, 3]) | st.floats(0.1, 10)
    n_bytes = [data.draw(size) for _ in routes]
    late = [data.draw(st.sampled_from([0, 0, 0.5, 1]) | st.floats(0, 3)) for _ in routes]
    workload = {
        "links": [{"bw": c} for c in capacities],
        "chips": 0,
        "ops": [
            {"kind": "flow", "route": route, "bytes": n, "lat": lat}
            for route, n, lat in zip(routes, n_bytes, late, strict=True)
        ],
        "deps": [],
    }
    _, _, finish = naive.simulate(workload)
    finish_s = [float(f) for f in finish]
    assert violations(routes, capacities, n_bytes, finish_s, late) == 0
    changed = data.draw(st.integers(0, len(routes) - 1))
    for factor in (0.999, 1.001):
        # A moment of its own transfer, so that no rounding of the instant hides it.
        moved = finish_s[changed] + (factor - 1) * (finish_s[changed] - late[changed])
        assert violations(routes, capacities, n_bytes, [*finish_s[:changed], moved, *finish_s[changed + 1 :]], late) > 0


@pytest.mark.parametrize(
    ("finish_s", "expected"),
    [
        ([2.0, 2.0], 0),
        ([4.0, 4.0], 2),  # two flows slower than their share
        ([1.0, 1.0], 3),  # two flows faster, and a link asked for twice what it has
        ([1.0, 2.0], 3),  # one faster, the other slower, and the link asked for 4/3 of what it has in the first second
    ],
)
def test_two_flows_on_one_link(finish_s, expected):
    assert violations([[0], [0]], [1.0], [1.0, 1.0], finish_s) == expected


def test_a_flow_that_moved_in_no_time():
    assert violations([[0]], [1.0], [1.0], [5.0], [5.0]) == 1
    assert violations([[0]], [1.0], [1.0], [4.0], [5.0]) == 1


def test_no_flows():
    assert violations([[]], [1.0], [], [], []) == 0


def test_times_within_1e_12_are_one_instant():
    t = 1.0 + 3e-13 * np.arange(9)
    instant_s, (a, b) = _instants([t[:5], np.array([2.0, t[8]])], np.array([0.5, 3.0, 2.0 * (1 - 1e-13)]))
    # Each instant reaches 1e-12 from its first time, and times of nobody's are left out.
    np.testing.assert_array_equal(instant_s, [t[0], t[4], t[8], 2.0 * (1 - 1e-13)])
    np.testing.assert_array_equal(a, [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(b, [3, 2])
