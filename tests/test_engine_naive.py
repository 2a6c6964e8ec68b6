"""`replay` against the naive twin, and against properties that need neither."""

from __future__ import annotations

import random
from copy import deepcopy

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import CLEAR_GAP, RTOL, assert_same, compute, flow, workload
from strategies import PLAIN, TIDY, sharing_problems, workloads

from g5cp_vec import replay


@given(workloads())
def test_agrees_with_twin(load):
    makespan, start, finish, gap = naive.simulate_with_gap(load)
    assume(gap >= CLEAR_GAP)
    assert_same(replay(load), makespan, start, finish)


@given(workloads(regimes=(TIDY,), max_ops=24))
def test_agrees_with_twin_where_ties_are_common(load):
    makespan, start, finish, gap = naive.simulate_with_gap(load)
    assume(gap >= CLEAR_GAP)
    assert_same(replay(load), makespan, start, finish)


def busy_workload(seed, values, n_ops=300):
    """A few hundred ops with deep queues and a link that dozens of flows cross at once."""
    rng = random.Random(seed)
    links = [{"bw": b, "lat": lat} for b, lat in (values() for _ in range(12))]
    ops = []
    for _ in range(n_ops):
        if rng.random() < 0.4:
            ops.append(compute(rng.randrange(3), rng.choice([0, 0.5, 1, 2]) * values()[0], rng.randrange(4)))
        else:
            route = rng.sample(range(1, 12), rng.randrange(0, 4))
            route = [0, *route] if rng.random() < 0.5 else route
            ops.append(flow(route, rng.choice([0, 1, 2, 5, 30]) * values()[0], values()[1]))
    order = rng.sample(range(n_ops), n_ops)
    deps = []
    for after in range(40, n_ops):
        deps += [[order[rng.randrange(max(0, after - 120), after)], order[after]] for _ in range(rng.randrange(3))]
    return {"links": links, "chips": 3, "ops": ops, "deps": deps}


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_twin_on_a_few_hundred_ops(seed):
    rng = random.Random(seed)
    if seed % 2:
        load = busy_workload(seed, lambda: (rng.choice([1, 2, 4]), rng.choice([0, 0, 1])))
    else:
        load = busy_workload(seed, lambda: (rng.uniform(1, 3), rng.choice([0, rng.random()])))
    makespan, start, finish, gap = naive.simulate_with_gap(load, exact=False)
    assert gap >= CLEAR_GAP, "choose another seed"
    assert_same(replay(load), makespan, start, finish)


# --- Properties -------------------------------------------------------------------------------------------------------
#
# The rate of a flow among others is measured: it gets 1 B and they get far more, so its end is the first.


def measured_rates(routes, capacities):
    plenty = 1e6 * max(capacities) / min(capacities)
    rates = []
    for probe in range(len(routes)):
        ops = [flow(route, 1 if f == probe else plenty) for f, route in enumerate(routes)]
        finish = replay(workload(ops, bw=capacities)).finish
        assert finish[probe] == min(finish)
        rates.append(1 / finish[probe])
    return np.array(rates)


@given(sharing_problems())
def test_rates_are_max_min_fair(problem):
    routes, capacities = problem
    rates = measured_rates(routes, capacities)
    load = np.zeros(len(capacities))
    fastest = np.zeros(len(capacities))
    for route, rate in zip(routes, rates, strict=True):
        load[route] += rate
        fastest[route] = np.maximum(fastest[route], rate)
    assert np.all(load <= np.array(capacities) * (1 + RTOL))
    saturated = load >= np.array(capacities) * (1 - RTOL)
    for route, rate in zip(routes, rates, strict=True):
        assert any(saturated[link] and fastest[link] <= rate * (1 + RTOL) for link in route)


@given(sharing_problems())
def test_rates_equal_those_of_the_twin(problem):
    routes, capacities = problem
    rates = [float(rate) for rate in naive.solve_maxmin(routes, capacities)]
    np.testing.assert_allclose(measured_rates(routes, capacities), rates, rtol=RTOL)


@given(sharing_problems(), st.floats(0.1, 10))
def test_flows_sized_to_their_rates_end_together(problem, seconds):
    routes, capacities = problem
    rates = naive.solve_maxmin(routes, capacities)
    ops = [flow(route, float(rate) * seconds) for route, rate in zip(routes, rates, strict=True)]
    finish = replay(workload(ops, bw=capacities)).finish
    np.testing.assert_allclose(finish, seconds, rtol=RTOL)
    assert len(set(finish.tolist())) == 1


@given(sharing_problems())
def test_links_are_never_overdrawn_between_ends(problem):
    routes, capacities = problem
    n_bytes = [1 + 3 * f for f in range(len(routes))]
    finish = replay(workload([flow(r, b) for r, b in zip(routes, n_bytes, strict=True)], bw=capacities)).finish
    for link, capacity in enumerate(capacities):
        ends = sorted((finish[f], n_bytes[f]) for f, route in enumerate(routes) if link in route)
        for upto in range(1, len(ends) + 1):  # all flows start at 0: what has ended by then has gone through by then
            assert sum(b for _, b in ends[:upto]) <= capacity * ends[upto - 1][0] * (1 + RTOL)


def scaled(load, k):
    """Durations and latencies times k, bandwidths divided by k."""
    load = deepcopy(load)
    for link in load["links"]:
        link["bw"] /= k
        if "lat" in link:
            link["lat"] *= k
    for op in load["ops"]:
        for key in ("secs", "lat"):
            if key in op:
                op[key] *= k
    return load


@given(workloads(regimes=(TIDY, PLAIN)), st.sampled_from([0.5, 3, 1e-6, 1e6, 0.7]))
def test_scaling_law(load, k):
    assume(naive.min_event_gap(load) >= CLEAR_GAP)
    one, other = replay(load), replay(scaled(load, k))
    assert_same(other, one.makespan * k, one.start * k, one.finish * k)


def relabelled(load, links, chips, ops):
    """The same workload with new names: element i becomes element links[i], chips[i], ops[i]."""
    new = {"links": [None] * len(links), "chips": load["chips"], "ops": [None] * len(ops)}
    for old, name in enumerate(links):
        new["links"][name] = load["links"][old]
    for old, name in enumerate(ops):
        op = dict(load["ops"][old])
        if "chip" in op:
            op["chip"] = chips[op["chip"]]
        else:
            op["route"] = [links[link] for link in reversed(op["route"])]
        new["ops"][name] = op
    new["deps"] = [[ops[before], ops[after]] for before, after in reversed(load["deps"])]
    return new


@given(workloads(distinct_prio=True), st.data())
def test_names_do_not_matter(load, data):
    assume(naive.min_event_gap(load) >= CLEAR_GAP)
    links = data.draw(st.permutations(range(len(load["links"]))))
    chips = data.draw(st.permutations(range(load["chips"])))
    ops = data.draw(st.permutations(range(len(load["ops"]))))
    one, other = replay(load), replay(relabelled(load, links, chips, ops))
    assert_same(other, one.makespan, [one.start[ops.index(i)] for i in range(len(ops))],
                [one.finish[ops.index(i)] for i in range(len(ops))])  # fmt: skip


@given(workloads())
def test_bounds_and_order(load):
    result = replay(load)
    links, ops = load["links"], load["ops"]
    slack = RTOL * max(result.makespan, 1e-300)
    carried = np.zeros(len(links))
    for index, op in enumerate(ops):
        if op["kind"] == "compute":
            alone = op["secs"]
            # A compute takes its duration and not a moment longer.
            assert result.finish[index] - result.start[index] == pytest.approx(alone, abs=slack)
        else:
            alone = op["lat"] + sum(links[link].get("lat", 0) for link in op["route"])
            if op["route"]:
                alone += op["bytes"] / min(links[link]["bw"] for link in op["route"])
                carried[op["route"]] += op["bytes"]
            assert result.finish[index] - result.start[index] >= alone - slack
            # A flow starts at the very moment its last predecessor ends.
            assert result.start[index] == max((result.finish[b] for b, a in load["deps"] if a == index), default=0)
    for before, after in load["deps"]:  # with the durations above: makespan >= critical path
        assert result.finish[before] <= result.start[after]
    for link, n_bytes in zip(links, carried, strict=True):
        assert result.makespan >= n_bytes / link["bw"] - slack
    for chip in range(load["chips"]):
        mine = sorted((result.start[i], result.finish[i]) for i, op in enumerate(ops) if op.get("chip") == chip)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:], strict=False))
    assert result.makespan == max(result.finish)


@settings(max_examples=50)
@given(workloads())
def test_same_input_same_bits(load):
    one, other = replay(load), replay(deepcopy(load))
    assert one.start.tobytes() == other.start.tobytes()
    assert one.finish.tobytes() == other.finish.tobytes()
