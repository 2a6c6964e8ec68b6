"""Which changes of order let a tape be played, and which do not: by hand, and as many as there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import compute, flow, workload
from strategies import PLAIN, workloads
from tapes import recorded, with_amounts

from g5cp_vec.engine.arrays import Costs

# Each: what is recorded, what of it is changed, and whether only instants without anything in common change places.
CASES = {
    "two chips": (
        workload([compute(0, 2), compute(1, 3)], chips=2), {0: 4}, True,
    ),
    "two links": (
        workload([flow([0], 2), flow([1], 3)], bw=[1, 1]), {0: 4}, True,
    ),
    "flows of a ring slide past its computes": (
        workload(
            [*(compute(0, 4) for _ in range(4)), *(flow([0], 3.1) for _ in range(3))],
            deps=[(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (4, 1), (5, 2), (6, 3)], bw=[1], chips=1,
        ),
        {4: 1.1, 5: 1.1, 6: 1.1}, True,
    ),
    "an op waits for both": (
        workload([compute(0, 2), compute(1, 3), compute(2, 1)], deps=[(0, 2), (1, 2)], chips=3), {0: 4.5}, False,
    ),
    "an op waits for two, and for a later third": (
        workload(
            [compute(0, 2), compute(1, 3), compute(2, 9), compute(3, 1)], deps=[(0, 3), (1, 3), (2, 3)], chips=4,
        ),
        {0: 4}, True,
    ),
    "a chip that was busy would be free": (
        workload([compute(0, 3), compute(1, 2), compute(0, 1)], deps=[(1, 2)], chips=2), {0: 1}, False,
    ),
    "a chip that was free would be busy": (
        workload([compute(0, 1), compute(1, 2), compute(0, 1)], deps=[(1, 2)], chips=2), {0: 3}, False,
    ),
    "an op is ready while others run before it": (
        workload([compute(0, 3), compute(0, 3), compute(1, 2), compute(0, 1, prio=1)], deps=[(2, 3)], chips=2),
        {2: 4}, True,
    ),
    "an op that comes first would be ready in time": (
        workload([compute(0, 3), compute(0, 3, prio=1), compute(1, 4), compute(0, 1)], deps=[(2, 3)], chips=2),
        {2: 2}, False,
    ),
    "an op that comes last would find the chip waiting": (
        workload(
            [compute(0, 1), compute(1, 3), compute(0, 2), compute(2, 4), compute(0, 1, prio=1)],
            deps=[(1, 2), (3, 4)], chips=3,
        ),
        {3: 2}, False,
    ),
    "flows on one link would meet": (
        workload([flow([0], 2), compute(0, 3), flow([0], 2)], deps=[(1, 2)], bw=[1], chips=1), {1: 1}, False,
    ),
    "flows on one link would not meet": (
        workload([flow([0], 2), compute(0, 1), flow([0], 2)], deps=[(1, 2)], bw=[1], chips=1), {1: 3}, False,
    ),
    "flows that share would end the other way round": (
        workload([flow([0], 2), flow([0], 3)], bw=[1]), {0: 4}, False,
    ),
    # The rates of all hang together through the flow on both links.
    "flows come to the ends of a chain of links": (
        workload(
            [flow([0, 1], 9), compute(0, 1), flow([0], 9), compute(1, 2), flow([1], 9)],
            deps=[(1, 2), (3, 4)], bw=[1, 1], chips=2,
        ),
        {1: 2, 3: 1}, False,
    ),
    # The first flow is slow on a link of its own, so nothing changes its rate; but it is left alone or it is not.
    "a flow would be left alone": (
        workload(
            [flow([0, 1, 2], 9), flow([0], 4), compute(0, 1), flow([1], 5)], deps=[(2, 3)], bw=[3, 3, 1], chips=1,
        ),
        {2: 3}, False,
    ),
    "flows come to links that nothing joins": (
        workload(
            [flow([0], 9), flow([1], 9.5), compute(0, 1), flow([0], 4), compute(1, 2), flow([1], 5)],
            deps=[(2, 3), (4, 5)], bw=[1, 1], chips=2,
        ),
        {2: 2.25, 4: 1.5}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    load, amounts, holds = CASES[case]
    tape, costs = recorded(load)
    assert tape.is_whole
    changed = with_amounts(costs, amounts)
    played = tape.play(changed)
    simulated = tape.simulate(changed)
    ends = np.concatenate(simulated)
    places, places_before = (np.unique(times, return_inverse=True)[1] for times in (ends, np.concatenate(tape.times)))
    assert (places != places_before).any(), "the case changes no order"
    assert (played is not None) == holds
    if holds:
        np.testing.assert_array_equal(played, simulated)


def side_by_side(one, other):
    """Two workloads that have nothing in common, as one."""
    n_links, n_ops, n_chips = len(one["links"]), len(one["ops"]), one["chips"]
    moved = [
        op
        | ({"chip": op["chip"] + n_chips} if op["kind"] == "compute" else {"route": [n_links + k for k in op["route"]]})
        for op in other["ops"]
    ]
    return {
        "links": one["links"] + other["links"],
        "chips": n_chips + other["chips"],
        "ops": one["ops"] + moved,
        "deps": one["deps"] + [[a + n_ops, b + n_ops] for a, b in other["deps"]],
    }


def instants(load):
    tape, _ = recorded(load)
    return tape.w.instant_s[1 : tape.tape.n_instants].copy()


def are_apart(*parts_s):
    times_s = np.sort(np.concatenate(parts_s))
    return bool((np.diff(times_s) > 1e-11 * times_s[1:]).all())


@settings(max_examples=200)
@given(workloads((PLAIN,), max_ops=8), workloads((PLAIN,), max_ops=8), st.integers(-4, 4))
def test_what_has_nothing_in_common_may_slide(one, other, exponent):
    """The second part all slower or faster: its instants change places with those of the first, not with each other."""
    n_ops, factor = len(one["ops"]), 2.0**exponent
    assume(are_apart(instants(one), instants(other)) and are_apart(instants(one), instants(other) * factor))
    tape, costs = recorded(side_by_side(one, other))
    times_s = np.array(tape.times)
    each = np.where(np.arange(len(costs.bytes)) < n_ops, 1.0, factor)
    played = tape.play(Costs(*(column * each for column in costs[:3]), costs.capacity_bytes_per_s))
    assert played is not None
    np.testing.assert_array_equal(played, times_s * each)
