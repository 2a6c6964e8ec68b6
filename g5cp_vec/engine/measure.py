"""What is read off a finished simulation: times of the rank that ends last, and what its ring held.

A rank's communication is the union of the intervals of the flows into or out of it; the part of that union during
which its chip computes nothing is exposed.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import FLOW, NONE

# Bits of an op's role; the engine needs no other knowledge of what an op is for.
ROLE_ATTENTION = 1
ROLE_RING_STEP = 2
ROLE_RING_FIRST = 4
ROLE_RING_LAST = 8
ROLE_RING_FLOW = 16

# Columns of a row of measures.
MAKESPAN_S = 0
CHIP = 1
COMPUTE_S = 2
N_COMPUTES = 3
ATTENTION_S = 4
COMM_S = 5
EXPOSED_COMM_S = 6
RING_S = 7
RING_COMPUTE_S = 8
RING_COMM_S = 9
PEAK_RING_BLOCKS = 10
N_MEASURES = 11


@kernel
def _last_chip(g, finish_s):
    """Chip whose last compute op ends last, the lowest on a tie."""
    n_chips = len(g.chip_indptr) - 1
    best, best_s = 0, -1.0
    for chip in range(n_chips):
        end_s = -1.0
        for p in range(g.chip_indptr[chip], g.chip_indptr[chip + 1]):
            end_s = max(end_s, finish_s[g.chip_ops[p]])
        if end_s > best_s:
            best, best_s = chip, end_s
    return best


@kernel
def _measure_computes(g, op_role, duration_s, start_s, finish_s, chip, out):
    ring_from_s = 0.0
    for p in range(g.chip_indptr[chip], g.chip_indptr[chip + 1]):
        op = g.chip_ops[p]
        role = op_role[op]
        op_s = duration_s[g.op_cost[op]]
        out[COMPUTE_S] += op_s
        out[N_COMPUTES] += 1.0
        if role & ROLE_ATTENTION:
            out[ATTENTION_S] += op_s
        if role & ROLE_RING_STEP:
            out[RING_COMPUTE_S] += op_s
        if role & ROLE_RING_FIRST:
            ring_from_s = start_s[op]
        if role & ROLE_RING_LAST:
            out[RING_S] += finish_s[op] - ring_from_s


@kernel(allocates=True)
def _sorted_computes(g, chip, start_s, finish_s):
    ops = g.chip_ops[g.chip_indptr[chip] : g.chip_indptr[chip + 1]]
    order = np.argsort(start_s[ops])
    return start_s[ops][order], finish_s[ops][order]


@kernel(allocates=True)
def _flows_of(g, op_src, op_dst, chip):
    """Flows into or out of a chip, in op order."""
    n = 0
    for op in range(len(op_src)):
        if g.op_kind[op] == FLOW and (op_src[op] == chip or op_dst[op] == chip):
            n += 1
    flows = np.empty(n, np.int32)
    n = 0
    for op in range(len(op_src)):
        if g.op_kind[op] == FLOW and (op_src[op] == chip or op_dst[op] == chip):
            flows[n] = op
            n += 1
    return flows


@kernel
def _union_and_exposed(flow_start, flow_finish, busy_start, busy_finish, out):
    """Length of the union of the flows' intervals, and of its part outside the busy ones (both sorted by start)."""
    n_flows, n_busy = len(flow_start), len(busy_start)
    i, b = 0, 0
    while i < n_flows:
        begin, end = flow_start[i], flow_finish[i]
        i += 1
        while i < n_flows and flow_start[i] <= end:
            end = max(end, flow_finish[i])
            i += 1
        out[COMM_S] += end - begin
        # Busy intervals do not overlap each other; one may reach into the next union interval.
        while b < n_busy and busy_finish[b] <= begin:
            b += 1
        at, k = begin, b
        while k < n_busy and busy_start[k] < end:
            if busy_start[k] > at:
                out[EXPOSED_COMM_S] += busy_start[k] - at
            at = max(at, busy_finish[k])
            k += 1
        if at < end:
            out[EXPOSED_COMM_S] += end - at


@kernel(allocates=True)
def _measure_ring(g, op_role, op_dst, flows, start_s, finish_s, chip, out):
    """Time of the incoming ring flows, and the most blocks held at once.

    A block is held from the start of its flow until every op that waits for it (the attention over it and the flow
    that forwards it) has ended.
    """
    n = 0
    for flow in flows:
        if op_role[flow] & ROLE_RING_FLOW and op_dst[flow] == chip:
            n += 1
    held_from, held_to = np.empty(n), np.empty(n)
    n = 0
    for flow in flows:
        if op_role[flow] & ROLE_RING_FLOW and op_dst[flow] == chip:
            out[RING_COMM_S] += finish_s[flow] - start_s[flow]
            held_from[n] = start_s[flow]
            held_to[n] = finish_s[flow]
            for p in range(g.succ_indptr[flow], g.succ_indptr[flow + 1]):
                held_to[n] = max(held_to[n], finish_s[g.succ_indices[p]])
            n += 1
    held_from.sort()
    held_to.sort()
    released = 0
    for taken in range(n):
        while held_to[released] <= held_from[taken]:
            released += 1
        out[PEAK_RING_BLOCKS] = max(out[PEAK_RING_BLOCKS], taken + 1 - released)


@kernel(allocates=True)
def measure(g, op_src, op_dst, op_role, duration_s, start_s, finish_s, out):
    """Measure one finished simulation.

    Parameters
    ----------
    g : Graph
    op_src, op_dst : ndarrays of int32, shape (n_ops,)
    op_role : ndarray of int8, shape (n_ops,)
        Bits ``ROLE_*``.
    duration_s : ndarray of float64, shape (n_duration_ids,)
    start_s, finish_s : ndarrays of float64, shape (n_ops,)
    out : ndarray of float64, shape (N_MEASURES,)
        Overwritten.
    """
    out[:] = 0.0
    out[MAKESPAN_S] = finish_s.max() if len(finish_s) > 0 else 0.0
    if len(g.chip_ops) == 0:
        out[CHIP] = NONE
        return
    chip = _last_chip(g, finish_s)
    out[CHIP] = chip
    _measure_computes(g, op_role, duration_s, start_s, finish_s, chip, out)
    flows = _flows_of(g, op_src, op_dst, chip)
    order = np.argsort(start_s[flows])
    busy_start, busy_finish = _sorted_computes(g, chip, start_s, finish_s)
    _union_and_exposed(start_s[flows][order], finish_s[flows][order], busy_start, busy_finish, out)
    _measure_ring(g, op_role, op_dst, flows, start_s, finish_s, chip, out)
