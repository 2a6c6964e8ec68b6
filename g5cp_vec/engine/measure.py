"""What is read off a finished simulation: times of the rank that ends last, and what its ring held.

A rank's communication is the union of the intervals of the flows into or out of it; the part of that union during
which its chip computes nothing is exposed. Where repeated layers were left out, whatever falls into the window of
one period counts as often as it was left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import Graph, finish_s, start_s
from g5cp_vec.engine.fold import RUN_EXTRA

# Bits of an op's role; the engine needs no other knowledge of what an op is for.
ROLE_RING_FIRST = 1
ROLE_RING_LAST = 2
ROLE_RING_FLOW = 4

# Columns of a row of measures.
MAKESPAN_S = 0
CHIP = 1
COMM_S = 2
EXPOSED_COMM_S = 3
RING_S = 4
RING_COMM_S = 5
PEAK_RING_BLOCKS = 6
N_MEASURES = 7


class Tags(NamedTuple):
    """What `measure` needs beside the graph.

    Attributes
    ----------
    op_role : ndarray of int8, shape (n_ops,)
        Bits ``ROLE_*``.
    leave_indptr, leave_ops : CSR chips -> flows out of them
    arrive_indptr, arrive_ops : CSR chips -> flows into them
    has_ring : bool
        Whether any op has a role.
    runs : ndarray of int64, shape (n_runs, 4)
        Runs of which units were left out; see `g5cp_vec.engine.fold`.
    """

    op_role: NDArray[np.int8]
    leave_indptr: NDArray[np.int64]
    leave_ops: NDArray[np.int32]
    arrive_indptr: NDArray[np.int64]
    arrive_ops: NDArray[np.int32]
    has_ring: bool
    runs: NDArray[np.int64]


def no_tags(n_ops: int, n_chips: int) -> Tags:
    """Return the tags of a graph that does not say which chips its flows join, and repeats nothing."""
    nowhere = np.zeros(n_chips + 1, np.int64), np.zeros(0, np.int32)
    return Tags(np.zeros(n_ops, np.int8), *nowhere, *nowhere, False, np.zeros((0, 4), np.int64))


def make_scratch(g: Graph, t: Tags) -> NDArray[np.float64]:
    """Return scratch for `measure`: room for the most intervals that it gathers for one chip."""
    n_flows = np.diff(t.leave_indptr) + np.diff(t.arrive_indptr)
    return np.zeros((4, int(np.maximum(n_flows, np.diff(g.chip_indptr)).max(initial=0))))


@kernel
def _last_chip(g, times):
    """Chip whose last compute op ends last, the lowest on a tie."""
    n_chips = len(g.chip_indptr) - 1
    best, best_s = 0, -1.0
    for chip in range(n_chips):
        for p in range(g.chip_indptr[chip], g.chip_indptr[chip + 1]):
            end_s = finish_s(times, g.chip_ops[p])
            if end_s > best_s:
                best, best_s = chip, end_s
    return best


@kernel
def _sort_intervals(start, finish, n):
    """Sort intervals by start, in place; they arrive nearly sorted, so insertion is linear in practice."""
    for i in range(1, n):
        a, b = start[i], finish[i]
        j = i
        while j > 0 and start[j - 1] > a:
            start[j], finish[j] = start[j - 1], finish[j - 1]
            j -= 1
        start[j], finish[j] = a, b


@kernel
def _sort(values, n):
    for i in range(1, n):
        a = values[i]
        j = i
        while j > 0 and values[j - 1] > a:
            values[j] = values[j - 1]
            j -= 1
        values[j] = a


@kernel
def _gather_flows(t, chip, times, out_start, out_finish):
    """Intervals of the flows into and out of a chip, merged so that they come nearly sorted."""
    p, q = t.leave_indptr[chip], t.arrive_indptr[chip]
    n = 0
    while p < t.leave_indptr[chip + 1] or q < t.arrive_indptr[chip + 1]:
        if q == t.arrive_indptr[chip + 1] or (
            p < t.leave_indptr[chip + 1] and times.at[t.leave_ops[p]]["start"] <= times.at[t.arrive_ops[q]]["start"]
        ):
            flow = t.leave_ops[p]
            p += 1
        else:
            flow = t.arrive_ops[q]
            q += 1
        out_start[n], out_finish[n] = start_s(times, flow), finish_s(times, flow)
        n += 1
    return n


@kernel
def _gather_computes(g, chip, times, out_start, out_finish):
    n = 0
    for p in range(g.chip_indptr[chip], g.chip_indptr[chip + 1]):
        out_start[n], out_finish[n] = start_s(times, g.chip_ops[p]), finish_s(times, g.chip_ops[p])
        n += 1
    return n


@kernel
def _merge_intervals(start, finish, n):
    """Merge sorted intervals that touch, in place; return how many are left."""
    kept = 0
    for i in range(n):
        if kept > 0 and start[i] <= finish[kept - 1]:
            finish[kept - 1] = max(finish[kept - 1], finish[i])
        else:
            start[kept], finish[kept] = start[i], finish[i]
            kept += 1
    return kept


@kernel
def _union_and_exposed(comm_start, comm_finish, n_comm, busy_start, busy_finish, n_busy, from_s, to_s, weight, out):
    """Add the length of the union of communication and of its idle part, both inside [from_s, to_s].

    Both lists are sorted and without overlaps.
    """
    b = 0
    for i in range(n_comm):
        begin, end = max(comm_start[i], from_s), min(comm_finish[i], to_s)
        if end <= begin:
            continue
        out[COMM_S] += weight * (end - begin)
        while b < n_busy and busy_finish[b] <= begin:
            b += 1
        # A busy interval may reach into the next communication.
        at, k = begin, b
        while k < n_busy and busy_start[k] < end:
            if busy_start[k] > at:
                out[EXPOSED_COMM_S] += weight * (busy_start[k] - at)
            at = max(at, busy_finish[k])
            k += 1
        if at < end:
            out[EXPOSED_COMM_S] += weight * (end - at)


@kernel
def _measure_ring_steps(g, t, times, chip, from_s, to_s, weight, out):
    """Add the length of every layer's ring, as far as it lies inside [from_s, to_s]."""
    ring_from_s = 0.0
    for p in range(g.chip_indptr[chip], g.chip_indptr[chip + 1]):
        op = g.chip_ops[p]
        role = t.op_role[op]
        if role & ROLE_RING_FIRST:
            ring_from_s = start_s(times, op)
        if role & ROLE_RING_LAST:
            out[RING_S] += weight * max(min(finish_s(times, op), to_s) - max(ring_from_s, from_s), 0.0)


@kernel
def _measure_ring_flows(t, times, chip, from_s, to_s, weight, out):
    """Add the time of incoming ring flows, as far as it lies inside [from_s, to_s]."""
    for p in range(t.arrive_indptr[chip], t.arrive_indptr[chip + 1]):
        flow = t.arrive_ops[p]
        if t.op_role[flow] & ROLE_RING_FLOW:
            in_s, out_s = max(start_s(times, flow), from_s), min(finish_s(times, flow), to_s)
            out[RING_COMM_S] += weight * max(out_s - in_s, 0.0)


@kernel
def _peak_blocks(g, t, times, chip, held_from, held_to, out):
    """Most ring blocks held at once.

    A block is held from the start of its flow until every op that waits for it (the attention over it and the flow
    that forwards it) has ended.
    """
    n = np.int64(0)
    for p in range(t.arrive_indptr[chip], t.arrive_indptr[chip + 1]):
        flow = t.arrive_ops[p]
        if t.op_role[flow] & ROLE_RING_FLOW:
            held_from[n] = start_s(times, flow)
            released_s = finish_s(times, flow)
            for q in range(g.succ_indptr[flow], g.succ_indptr[flow + 1]):
                released_s = max(released_s, finish_s(times, g.succ_indices[q]))
            held_to[n] = released_s
            n += 1
    _sort(held_from, n)
    _sort(held_to, n)
    released = 0
    for taken in range(n):
        # A block held for no time is released as it is taken.
        while released < taken and held_to[released] <= held_from[taken]:
            released += 1
        out[PEAK_RING_BLOCKS] = max(out[PEAK_RING_BLOCKS], taken + 1 - released)


@kernel
def measure(g, t, times, windows_s, scratch, out):
    """Measure one finished simulation.

    Parameters
    ----------
    g : Graph
    t : Tags
    times : Instants
    windows_s : ndarray of float64, shape (n_runs, 2)
        One period of each run.
    scratch : ndarray of float64, from `make_scratch`
    out : ndarray of float64, shape (N_MEASURES,)
        Overwritten.
    """
    out[:] = 0.0
    out[MAKESPAN_S] = times.end_s  # no instant without an end
    for r in range(len(t.runs)):
        out[MAKESPAN_S] += t.runs[r, RUN_EXTRA] * (windows_s[r, 1] - windows_s[r, 0])
    if len(g.chip_ops) == 0:
        out[CHIP] = -1.0
        return
    chip = _last_chip(g, times)
    out[CHIP] = chip
    n_comm = _gather_flows(t, chip, times, scratch[0], scratch[1])
    _sort_intervals(scratch[0], scratch[1], n_comm)
    n_comm = _merge_intervals(scratch[0], scratch[1], n_comm)
    n_busy = _gather_computes(g, chip, times, scratch[2], scratch[3])
    _sort_intervals(scratch[2], scratch[3], n_busy)
    n_busy = _merge_intervals(scratch[2], scratch[3], n_busy)
    for r in range(-1, len(t.runs)):
        from_s, to_s, weight = 0.0, np.inf, 1.0
        if r >= 0:
            from_s, to_s, weight = windows_s[r, 0], windows_s[r, 1], float(t.runs[r, RUN_EXTRA])
        _union_and_exposed(scratch[0], scratch[1], n_comm, scratch[2], scratch[3], n_busy, from_s, to_s, weight, out)
        if t.has_ring:
            _measure_ring_steps(g, t, times, chip, from_s, to_s, weight, out)
            _measure_ring_flows(t, times, chip, from_s, to_s, weight, out)
    if t.has_ring:
        _peak_blocks(g, t, times, chip, scratch[0], scratch[1], out)
