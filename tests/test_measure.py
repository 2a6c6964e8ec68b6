"""What is read off a simulation, by hand and against a slow obvious twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g5cp_vec import replay
from g5cp_vec.engine.arrays import Costs, make_workspace
from g5cp_vec.engine.batch import run_rows
from g5cp_vec.engine.measure import (
    COMM_S,
    EXPOSED_COMM_S,
    PEAK_RING_BLOCKS,
    RING_COMM_S,
    RING_S,
    ROLE_RING_FIRST,
    ROLE_RING_FLOW,
    ROLE_RING_LAST,
    Tags,
    make_scratch,
)
from g5cp_vec.engine.playback import make_shelf
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.workload import compile_workload


def measures(workload, ends, roles):
    """Measures of a workload whose flow i goes from chip ends[i][0] to ends[i][1]."""
    graph, costs = compile_workload(workload)
    n_chips = workload["chips"]

    def by_chip(end):
        lists = [[op for op, pair in ends.items() if pair[end] == chip] for chip in range(n_chips)]
        indptr = np.concatenate([[0], np.cumsum([len(ops) for ops in lists])]).astype(np.int64)
        return indptr, np.array([op for ops in lists for op in ops], np.int32)

    role = np.array([roles.get(op, 0) for op in range(len(workload["ops"]))], np.int8)
    tags = Tags(role, *by_chip(0), *by_chip(1), bool(role.any()), np.zeros((0, 4), np.int64))
    out, events, status = np.zeros((1, 7)), np.zeros(1, np.int64), np.zeros((1, 2), np.int64)
    row = Costs(*(column[None] for column in costs))
    no_times, no_windows = np.zeros((0, 2, len(role))), np.zeros((1, 0, 2))
    scratch = make_workspace(graph), make_shelf(graph, 1), make_scratch(graph, tags)
    run_rows(graph, tags, *scratch, *row, 0, 1, out, events, status, no_times, no_windows)
    assert status[0, 0] == 0
    return out[0]


def compute(secs, prio, chip=0):
    return {"kind": "compute", "chip": chip, "secs": secs, "prio": prio}


def test_union_and_exposed_by_hand():
    # Chip 0 computes 0-4 and 10-11. Into or out of it: 2-5, 3-7 and 9-10 on links of their own.
    # Union: 2-7 and 9-10, 6 s. Busy of that: 2-4, 2 s. Exposed: 4 s. Flow 4-6 elsewhere does not count.
    ops = [
        compute(4, 0), compute(1, 1),
        {"kind": "flow", "route": [0], "bytes": 3, "lat": 0}, {"kind": "flow", "route": [1], "bytes": 4, "lat": 0},
        {"kind": "flow", "route": [2], "bytes": 1, "lat": 0}, {"kind": "flow", "route": [3], "bytes": 2, "lat": 0},
        compute(2, 0, 1), compute(1, 1, 1), compute(1, 2, 1), compute(5, 3, 1),
    ]  # fmt: skip
    deps = [[6, 2], [7, 3], [8, 5], [9, 4], [4, 1]]
    out = measures(
        {"links": [{"bw": 1}] * 4, "chips": 2, "ops": ops, "deps": deps}, {2: (1, 0), 3: (0, 1), 4: (1, 0)}, {}
    )
    assert out[COMM_S] == 6
    assert out[EXPOSED_COMM_S] == 4


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12),
)
def test_union_and_exposed_against_counting_seconds(flows, busy):
    # A clock chip starts each flow; the busy chip's gaps are computes of a third chip's making.
    ops, deps, ends = [], [], {}
    for start, length in flows:
        ops += [compute(start, len(ops), 1 + len(ops)), {"kind": "flow", "route": [], "bytes": 0, "lat": length}]
        deps.append([len(ops) - 2, len(ops) - 1])
        ends[len(ops) - 1] = (0, 1)
    for start, length in busy:
        ops += [compute(start, len(ops), 1 + len(ops)), compute(length, len(ops))]
        deps.append([len(ops) - 2, len(ops) - 1])
    # Chip 0 must end last to be the one reported.
    ops += [compute(1000, len(ops), 1 + len(ops)), compute(1, len(ops))]
    deps.append([len(ops) - 2, len(ops) - 1])
    workload = {"links": [], "chips": len(ops) + 2, "ops": ops, "deps": deps}
    times = replay(workload)
    in_flight = {second for op in ends for second in range(int(times.start[op]), int(times.finish[op]))}
    computing = {
        second
        for op, spec in enumerate(ops)
        if spec["kind"] == "compute" and spec["chip"] == 0
        for second in range(int(times.start[op]), int(times.finish[op]))
    }
    out = measures(workload, ends, {})
    assert out[COMM_S] == len(in_flight)
    assert out[EXPOSED_COMM_S] == len(in_flight - computing)


def ring(transfer_s, step_s):
    """Three blocks into chip 0, one after another; four steps, of which all but the first wait for a block."""
    ops = [compute(step_s, step) for step in range(4)]
    ops += [{"kind": "flow", "route": [0], "bytes": transfer_s, "lat": 0} for _ in range(3)]
    deps = [[0, 1], [1, 2], [2, 3], [4, 1], [5, 2], [6, 3], [4, 5], [5, 6]]
    roles = {0: ROLE_RING_FIRST, 3: ROLE_RING_LAST, 4: ROLE_RING_FLOW, 5: ROLE_RING_FLOW, 6: ROLE_RING_FLOW}
    workload = {"links": [{"bw": 1}], "chips": 2, "ops": ops, "deps": deps}
    return measures(workload, {4: (1, 0), 5: (1, 0), 6: (1, 0)}, roles)


@pytest.mark.parametrize(
    ("transfer_s", "step_s", "ring_s", "peak"),
    [
        # Steps of 5 hide transfers of 1: blocks arrive 0-1, 1-2, 2-3 and are attended 5-10, 10-15, 15-20: 3 held.
        (1, 5, 20, 3),
        # Transfers of 5, steps of 1: each block is attended (5-6, 10-11, 15-16) while the next one comes in: 2 held.
        (5, 1, 16, 2),
        # Blocks that take no time, attended in no time, are not held at all.
        (0, 0, 0, 1),
    ],
)
def test_ring_by_hand(transfer_s, step_s, ring_s, peak):
    out = ring(transfer_s, step_s)
    assert out[RING_S] == ring_s
    assert out[RING_COMM_S] == 3 * transfer_s
    assert out[PEAK_RING_BLOCKS] == peak


def test_the_op_named_is_on_the_cycle():
    ops = [compute(1, i) for i in range(3)]
    with pytest.raises(ConfigError, match=r"ops\[[12]\]"):
        replay({"links": [], "chips": 1, "ops": ops, "deps": [[1, 2], [2, 1], [1, 0]]})
