"""`replay` against hand arithmetic, against the naive twin, and against properties that need neither."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import PLAIN, TIDY, sharing_problems, workloads

from g5cp_vec import replay
from g5cp_vec.errors import ConfigError

ROOT = str(Path(__file__).parent.parent)
RTOL = 1e-9
# Event times closer than this, yet not equal, are grouped by rounding: such cases say nothing about either side.
CLEAR_GAP = 1e-10


def compute(chip, secs, prio=0):
    return {"kind": "compute", "chip": chip, "secs": secs, "prio": prio}


def flow(route, n_bytes, lat=0):
    return {"kind": "flow", "route": route, "bytes": n_bytes, "lat": lat}


def workload(ops, deps=(), bw=(), chips=0, lat=None):
    links = [{"bw": b} for b in bw]
    for link, seconds in zip(links, lat or (), strict=False):
        link["lat"] = seconds
    return {"links": links, "chips": chips, "ops": list(ops), "deps": [list(dep) for dep in deps]}


def assert_times(actual, expected):
    """Every time within RTOL of itself: stricter than RTOL of the makespan, and attainable."""
    np.testing.assert_allclose(np.asarray(actual, float), [float(time) for time in expected], rtol=RTOL, atol=0)


def assert_same(result, makespan, start, finish):
    assert_times(result.finish, finish)
    assert_times(result.start, start)
    assert_times([result.makespan], [makespan])


def kernel(load):
    result = replay(load)
    return result.makespan, result.start, result.finish


# ---------------------------------------------------------------------------------------------------------------------
# By hand. Both the kernel and the twin must know these.

HAND = {
    # Nothing at all takes no time.
    "empty": (workload([]), [], []),
    # 3 s of work, alone.
    "one compute": (workload([compute(0, 3)], chips=1), [0], [3]),
    # 6 B at 2 B/s after own 0.5 s + link latencies 0.25 s and 1 s; the narrower link (2 B/s) decides: 1.75 + 3 = 4.75.
    "one flow": (workload([flow([0, 1], 6, 0.5)], bw=[2, 5], lat=[0.25, 1]), [0], [4.75]),
    # Link 10 B/s, 10 B and 30 B: 5 B/s each until 2 s, then the second has 20 B left at 10 B/s: 2 + 2 = 4.
    "two flows share": (workload([flow([0], 10), flow([0], 30)], bw=[10]), [0, 0], [2, 4]),
    # a = 1 B/s, b = 10 B/s; f0 on a, f1 on a and b, f2 on b. a saturates at 1/2 each, so f2 gets 9.5.
    # f2: 19 B / 9.5 = 2 s. f0: 1 B / 0.5 = 2 s, the same instant. f1 moved 1 of 3 B, is then alone at 1 B/s: 2 + 2 = 4.
    "two levels": (workload([flow([0], 1), flow([0, 1], 3), flow([1], 19)], bw=[1, 10]), [0, 0, 0], [2, 4, 2]),
    # Three levels, link capacities 3, 4, 9: f0 f1 f2 on a (1 each), f2 f3 on b (1, so 3), f3 f4 on c (3, so 6).
    # All bytes = rate * 2 s.
    "three levels": (
        workload([flow([0], 2), flow([0], 2), flow([0, 1], 2), flow([1, 2], 6), flow([2], 12)], bw=[3, 4, 9]),
        [0] * 5,
        [2] * 5,
    ),
    # A latency uses no bandwidth: f0 alone at 2 B/s until 3 s (6 of 10 B); then 1 B/s each. f0 has 4 B left: 7 s.
    # f1 has moved 4 of 6 B by then and ends alone at 2 B/s: 7 + 1 = 8.
    "latency leaves the link free": (workload([flow([0], 10), flow([0], 6, 3)], bw=[2]), [0, 0], [7, 8]),
    # No route, 1000 B, 0.5 s: only the latency counts; the compute behind it runs from 0.5 to 1.5.
    "empty route": (workload([flow([], 1000, 0.5), compute(0, 1)], [(0, 1)], chips=1), [0, 0.5], [0.5, 1.5]),
    # Zero bytes on a busy link end when their latency (1 + 2) has passed and do not disturb the 8 B at 1 B/s.
    "zero bytes": (workload([flow([0], 0, 1), flow([1], 8)], bw=[1, 1], lat=[2, 0]), [0, 0], [3, 8]),
    # Zero-length things of both kinds chained behind 2 s all end at 2 s, and the last op starts there.
    "zero-length chain": (
        workload(
            [compute(0, 2), flow([], 0), compute(1, 0), flow([0], 0), compute(0, 0), compute(0, 1)],
            [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
            bw=[1],
            chips=2,
        ),
        [0, 2, 2, 2, 2, 2],
        [2, 2, 2, 2, 2, 3],
    ),
    # One chip, all ready: lowest prio first (op 1), then ops 0 and 2 of equal prio by index: 2+3=5, 5+1=6.
    "list scheduling tie": (
        workload([compute(0, 3, 1), compute(0, 2, 0), compute(0, 1, 1)], chips=1),
        [2, 0, 5],
        [5, 2, 6],
    ),
    # The chip does not wait: op 1 (prio 9) starts at 0 although op 2 (prio 0) will be ready at 1; no preemption.
    "greedy": (workload([compute(1, 1), compute(0, 5, 9), compute(0, 1, 0)], [(0, 2)], chips=2), [0, 0, 5], [1, 5, 6]),
    # At 2 s flow and computes end together; the choice is made after all of them: op 3 (prio 0, behind the flow and
    # behind op 0) beats op 2 (prio 5, ready since 0).
    "ends before choices": (
        workload([compute(0, 2), flow([0], 2), compute(0, 4, 5), compute(0, 1, 0)], [(1, 3), (0, 3)], bw=[1], chips=1),
        [0, 0, 3, 2],
        [2, 2, 7, 3],
    ),
    # The fixpoint reaches through zero-length flows before the choice: op 2 (prio 0) is ready in time to beat op 3.
    "zero-length flow before choices": (
        workload([compute(0, 2), flow([], 0), compute(0, 1, 0), compute(0, 1, 5)], [(0, 1), (1, 2)], chips=1),
        [0, 2, 2, 3],
        [2, 2, 3, 4],
    ),
    # A zero-second compute is a choice, not an end: at 2 s chips 0 and 1 are free, chip 1 takes the zero-second op 1
    # while chip 0 takes op 3 (prio 5); op 2 (prio 0) is ready only after that and waits until 2 + 4 = 6.
    "zero-second compute after choices": (
        workload([compute(0, 2), compute(1, 0), compute(0, 1, 0), compute(0, 4, 5)], [(0, 1), (1, 2)], chips=2),
        [0, 2, 6, 2],
        [2, 2, 7, 6],
    ),
    # A repeated dependency counts once: 1 + 1.
    "repeated dependency": (
        workload([compute(0, 1), compute(0, 1)], [(0, 1), (0, 1), (0, 1)], chips=1),
        [0, 1],
        [1, 2],
    ),
    # Indices need not follow the dependencies: op 2, then 1, then 0.
    "backwards indices": (
        workload([compute(0, 1), compute(0, 2), compute(0, 4)], [(2, 1), (1, 0)], chips=1),
        [6, 4, 0],
        [7, 6, 4],
    ),
    # Flows occupy no chip: it computes 1 s beside a flow of 3 s.
    "flow beside compute": (
        workload([compute(0, 1), flow([0], 3), compute(0, 1)], bw=[1], chips=1),
        [0, 0, 1],
        [1, 3, 2],
    ),
    # 1e-13 s apart at 1 s: one instant, both carry the earlier time, so op 3 (prio 0) beats op 2 although it became
    # ready by the later end.
    "instant": (
        workload([compute(0, 1), compute(1, 1 + 1e-13), compute(0, 1, 5), compute(0, 1, 0)], [(1, 3)], chips=2),
        [0, 0, 2, 1],
        [1, 1, 3, 2],
    ),
    # 1e-9 s apart at 1 s: two instants, so the chip takes op 2 (prio 5), the only ready one.
    "two instants": (
        workload([compute(0, 1), compute(1, 1 + 1e-9), compute(0, 1, 5), compute(0, 1, 0)], [(1, 3)], chips=2),
        [0, 0, 1, 2],
        [1, 1 + 1e-9, 2, 3],
    ),
    # Not in the instant it starts: op 1 lasts 1e-12 s from 1e4 s, too little to tell the times apart.
    # Still it ends after chip 1 has chosen op 3 (prio 5), so op 2 (prio 0) waits for it.
    "short but not zero": (
        workload(
            [compute(0, 1e4), compute(0, 1e-12), compute(1, 1, 0), compute(1, 2, 5), flow([], 0, 1e4)],
            [(0, 1), (1, 2), (4, 3)],
            chips=2,
        ),
        [0, 1e4, 1e4 + 2, 1e4, 0],
        [1e4, 1e4, 1e4 + 3, 1e4 + 2, 1e4],
    ),
    # Zero seconds are done within the instant, 1e-12 s are not: at 1e4 s op 2 (no time) frees op 4 (prio 5) before op 1
    # ends, so chip 2 takes op 4 and op 3 (prio 0, behind op 1) waits for it until 1e4 + 2.
    "zero seconds before short ones": (
        workload(
            [compute(0, 1e4), compute(0, 1e-12), compute(1, 0), compute(2, 1, 0), compute(2, 2, 5)],
            [(0, 1), (0, 2), (1, 3), (2, 4)],
            chips=3,
        ),
        [0, 1e4, 1e4, 1e4 + 2, 1e4],
        [1e4, 1e4, 1e4, 1e4 + 3, 1e4 + 2],
    ),
}


@pytest.mark.parametrize("simulate", [kernel, naive.simulate, lambda load: naive.simulate(load, exact=False)])
@pytest.mark.parametrize("name", HAND)
def test_by_hand(name, simulate):
    load, start, finish = HAND[name]
    makespan, got_start, got_finish = simulate(load)
    assert_times(got_finish, finish)
    assert_times(got_start, start)
    assert makespan == max(got_finish, default=0)


@pytest.mark.parametrize("simulate", [kernel, naive.simulate])
@pytest.mark.parametrize("seconds", [1e-6, 1, 1e4])
@pytest.mark.parametrize("other", ["compute", "transfer", "latency"])
@pytest.mark.parametrize(("apart", "together"), [(0.9e-12, True), (1.1e-12, False)])
def test_width_of_an_instant(other, apart, together, seconds, simulate):
    # Chip 0 is free at `seconds`; an op of another kind ends `apart` later (relative) and frees op 3 (prio 0).
    later = seconds * (1 + apart)
    ender = {"compute": compute(1, later), "transfer": flow([0], later), "latency": flow([], 0, later)}[other]
    load = workload([compute(0, seconds), ender, compute(0, 1, 5), compute(0, 1, 0)], [(1, 3)], bw=[1], chips=2)
    _, start, finish = simulate(load)
    assert start[2 if not together else 3] == seconds
    assert (finish[1] == finish[0]) == together


@pytest.mark.parametrize("simulate", [kernel, naive.simulate])
def test_an_instant_is_measured_from_its_earliest_end(simulate):
    # At 1, 1 + 0.8e-12 and 1 + 1.6e-12 s: the first two are one instant, the third is 1.6e-12 from the earliest.
    _, _, finish = simulate(workload([compute(i, 1 + i * 0.8e-12) for i in range(3)], chips=3))
    assert finish[0] == finish[1] == 1
    assert finish[2] > 1


@pytest.mark.parametrize(("bandwidth", "makespan"), [(1, 80), (1.25, 82)])
def test_more_bandwidth_can_be_slower(bandwidth, makespan):
    # 20 B on a, then 20 B on b; beside it 15 s, then 5 B on b, then 60 s.
    # At 1 B/s: a is through at 20 s. The 5 B have b to themselves from 15 to 20 s, so the compute runs 20..80 s.
    # At 1.25 B/s: a is through at 16 s, when 1.25 of the 5 B have moved; 3.75 B at 0.625 B/s take until 22 s; 22 + 60.
    ops = [flow([0], 20), flow([1], 20), compute(0, 15), flow([1], 5), compute(0, 60)]
    load = workload(ops, [(0, 1), (2, 3), (3, 4)], bw=[bandwidth] * 2, chips=1)
    assert replay(load).makespan == pytest.approx(makespan, rel=RTOL)
    assert naive.simulate(load)[0] == makespan


def test_ends_of_one_instant_carry_one_float():
    # Meeting at 1 s up to rounding: 3 flows at 1/3 B/s, 10 at 1/10 B/s, ten computes of 0.1 s in a row.
    ops = [flow([0], 1 / 3) for _ in range(3)] + [flow([1], 0.1) for _ in range(10)]
    ops += [compute(0, 0.1) for _ in range(10)]
    finish = replay(workload(ops, bw=[1, 1], chips=1)).finish
    assert len({float(time) for time in finish[:13]} | {float(finish[-1])}) == 1


def test_result_is_arrays_of_floats():
    result = replay(HAND["two flows share"][0])
    assert isinstance(result.makespan, float)
    for times in (result.start, result.finish):
        assert isinstance(times, np.ndarray)
        assert times.dtype == np.float64
        assert times.shape == (2,)


def test_input_is_left_alone_and_may_be_a_path(tmp_path):
    load = HAND["latency leaves the link free"][0]
    before = deepcopy(load)
    expected = replay(load)
    assert load == before
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(load))
    for name in (path, str(path)):
        assert np.array_equal(replay(name).finish, expected.finish)


# ---------------------------------------------------------------------------------------------------------------------
# Against the twin.


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


# ---------------------------------------------------------------------------------------------------------------------
# Properties. The rate of a flow among others is measured: it gets 1 B and they get far more, so its end is the first.


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


# ---------------------------------------------------------------------------------------------------------------------
# Refusals: one line that names the place.

GOOD = workload(
    [compute(0, 1), flow([0, 1], 5, 0.5), compute(1, 2, 3)], [(0, 1), (1, 2)], bw=[1, 2], chips=2, lat=[0.1, 0.2]
)
GONE = object()
BAD_QUANTITIES = [math.nan, math.inf, -math.inf, -1, "3", None, True, [1]]


def bad(place, value, says=None):
    return pytest.param(place, value, says or place, id=f"{place}={'missing' if value is GONE else repr(value)}")


REFUSED = [
    *(bad(f"ops[{i}].{key}", v) for i, key in [(0, "secs"), (1, "bytes"), (1, "lat")] for v in BAD_QUANTITIES),
    *(bad("links[1].lat", v) for v in BAD_QUANTITIES),
    *(bad("links[1].bw", v) for v in [*BAD_QUANTITIES, 0, -0.0]),
    *(bad("ops[2].prio", v) for v in [True, "1", None, math.nan, [0]]),
    *(bad("ops[2].chip", v) for v in [2, -1, 0.5, True, "0", None, math.nan]),
    *(bad("ops[1].route[1]", v, "ops[1].route") for v in [2, -1, 0.5, True, "0", None, math.nan, 0]),
    *(bad("ops[1].route", v) for v in [0, None, "01", {"0": 1}]),
    *(bad("deps[1][0]", v, "deps[1]") for v in [3, -1, 0.5, True, "0", None]),
    *(bad("deps[1][1]", v, "deps[1]") for v in [3, -1, 1 << 40]),
    *(bad("deps[1]", v) for v in [[0], [0, 1, 2], [], 1, None, "01"]),
    *(bad("ops[1].kind", v) for v in ["copy", "", None, 1, True, "Flow"]),
    *(bad("chips", v) for v in [-1, 1.5, True, "2", None, math.nan]),
    *(bad(place, GONE) for place in ["links", "chips", "ops", "deps"]),
    *(bad(place, GONE) for place in ["links[0].bw", "ops[0].kind", "ops[0].chip", "ops[0].secs"]),
    *(bad(place, GONE) for place in ["ops[1].route", "ops[1].bytes"]),
    *(bad(place, v) for place in ["links", "ops", "deps"] for v in [None, 3, {"0": 1}, "[]"]),
    *(bad(place, v) for place in ["links[0]", "ops[1]"] for v in [None, 3, [], "flow"]),
    *(bad(place, 1) for place in ["links[0].bandwidth", "ops[0].bytes", "ops[1].latt", "dep"]),  # misspelt or misplaced
]


def broken(place, value):
    """GOOD with `value` at `place`, or without anything there."""
    load = deepcopy(GOOD)
    *path, last = [
        int(part) if part.isdigit() else part for part in place.replace("]", "").replace("[", ".").split(".")
    ]
    at = load
    for part in path:
        at = at[part]
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return load


def test_the_unbroken_one_is_fine():
    assert replay(GOOD).makespan == pytest.approx(float(naive.simulate(GOOD)[0]))


@pytest.mark.parametrize(("place", "value", "says"), REFUSED)
def test_refused_with_its_place(place, value, says):
    with pytest.raises(ConfigError) as caught:
        replay(broken(place, value))
    assert len(str(caught.value).splitlines()) == 1
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("load", "place"),
    [
        (workload([flow([0], 1)]), "ops[0].route"),
        (workload([compute(0, 1)]), "ops[0].chip"),
        (workload([], [(0, 0)]), "deps[0]"),
    ],
)
def test_there_is_nothing_to_name(load, place):
    with pytest.raises(ConfigError) as caught:
        replay(load)
    assert place in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    "load",
    [
        workload([flow([0], 1e308)], bw=[1e-300]),
        workload([compute(0, 1e308), compute(0, 1e308)], chips=1),
        workload([flow([0, 1], 1)], bw=[1, 1], lat=[1e308, 1e308]),
    ],
)
def test_ends_beyond_floats(load):
    with pytest.raises(ConfigError, match=r"ops\[") as caught:
        replay(load)
    assert len(str(caught.value).splitlines()) == 1


ENDLESS = """
from g5cp_vec import replay
from g5cp_vec.errors import G5cpError

for capacity in (1e-310, 5e-324):
    ops = [{"kind": "flow", "route": [0], "bytes": capacity, "lat": 0}] * 3
    try:
        replay({"links": [{"bw": capacity}], "chips": 0, "ops": ops, "deps": []})
    except G5cpError as error:
        print(error)
"""


def test_subnormal_shares_do_not_loop_for_ever():
    # A share below the smallest normal float does not fill its link again when multiplied back. In a process of its
    # own, since a kernel that loops cannot be interrupted.
    subprocess.run([sys.executable, "-c", ENDLESS], check=True, timeout=60, env={**os.environ, "PYTHONPATH": ROOT})


@pytest.mark.parametrize("load", [[], [GOOD], 3, None, True])
def test_not_an_object(load):
    with pytest.raises(ConfigError) as caught:
        replay(load)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("deps", [[(0, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 1)], [(2, 0), (0, 1), (1, 2)]])
def test_cycle(deps):
    with pytest.raises(ConfigError, match="cycle") as caught:
        replay({**GOOD, "deps": [list(dep) for dep in deps]})
    assert len(str(caught.value).splitlines()) == 1
    assert "ops[" in str(caught.value) or "deps" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"links": [}', "[]", '"links"', "NaN"])
def test_broken_file(tmp_path, text):
    path = tmp_path / "workload.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        replay(path)
    assert len(str(caught.value).splitlines()) == 1
    assert "workload.json" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        replay(tmp_path / "nowhere.json")
