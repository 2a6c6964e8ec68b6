"""`replay` and the naive twin against hand arithmetic."""

from __future__ import annotations

import json
from copy import deepcopy

import naive
import numpy as np
import pytest
from replays import RTOL, assert_times, compute, flow, kernel, workload

from g5cp_vec import replay

# Both the kernel and the twin must know these.
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
