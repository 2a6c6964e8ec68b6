"""One simulation: list scheduling on chips, max-min fair sharing on links, one instant after another.

The problem: every op starts when its predecessors have ended; a chip runs one compute op at a time and takes the
ready one that comes first in its order; a flow waits its latency, then moves its bytes at its fair rate.

The loop: take every event of the next instant (within 1e-12 relative) off the heap; end those ops and whatever
ends with them in no time, to a fixpoint; let every free chip choose at once; end computes of zero seconds, and
repeat; then bring the rates up to date and move the ends of the flows whose rate changed.

Not modelled: preemption, chips that wait on purpose, flows that occupy chips.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    COMPUTE,
    ERR_CYCLE,
    ERR_NO_PROGRESS,
    ERR_NOT_FINITE,
    FLOW,
    HEAP_N,
    N_ADDED,
    N_COUNTERS,
    N_DONE,
    N_EVENTS,
    N_OPENINGS,
    N_QUEUE,
    N_REMOVED,
    N_TOUCHED,
    NEW_RATE,
    NONE,
    OK,
    RATE,
    REMAINING,
    SINCE_S,
    STAMP,
)
from g5cp_vec.engine.heap import heap_order, heap_put, heap_set, take_due
from g5cp_vec.engine.maxmin import commit_rate, link_flow, solve_rates, unlink_flow

# Two event times are one instant when they agree to this.
INSTANT_RTOL = 1e-12
# A rate that moved by less than a few roundings keeps its old value, and with it the flow's end.
RATE_RTOL = 1e-14
# Share of the heap, one in so many, from which ends are moved in bulk.
BULK = 6
# ``SINCE_S`` of a flow whose latency has not passed yet.
WAITING = -1.0


@kernel
def _touch_chip(w, chip):
    if w.is_touched[chip] == 0:
        w.is_touched[chip] = 1
        w.touched[w.count[N_TOUCHED]] = chip
        w.count[N_TOUCHED] += 1


@kernel
def _push_ready(g, w, op):
    """Enter a compute op in its chip's heap of ready ops, ordered by place in the chip's order."""
    chip = g.op_chip[op]
    base = g.chip_indptr[chip]
    rank = g.op_rank[op]
    pos = w.n_ready[chip]
    w.n_ready[chip] = pos + 1
    while pos > 0:
        parent = (pos - 1) >> 1
        if w.ready[base + parent] <= rank:
            break
        w.ready[base + pos] = w.ready[base + parent]
        pos = parent
    w.ready[base + pos] = rank
    _touch_chip(w, chip)


@kernel
def _pop_ready(g, w, chip):
    """Take the first op of the chip's order out of its ready heap."""
    base = g.chip_indptr[chip]
    first = w.ready[base]
    n = w.n_ready[chip] - 1
    w.n_ready[chip] = n
    last = w.ready[base + n]
    pos = 0
    while True:
        child = 2 * pos + 1
        if child >= n:
            break
        if child + 1 < n and w.ready[base + child + 1] < w.ready[base + child]:
            child += 1
        if w.ready[base + child] >= last:
            break
        w.ready[base + pos] = w.ready[base + child]
        pos = child
    w.ready[base + pos] = last
    return g.chip_ops[base + first]


@kernel
def _push_ended(w, op):
    w.queue[w.count[N_QUEUE]] = op
    w.count[N_QUEUE] += 1


@kernel
def _activate_or_end(g, c, w, op):
    """Let a flow whose latency has passed move its bytes, or end it when there is nothing to move."""
    if c.bytes[g.op_cost[op]] == 0.0 or g.route_indptr[op] == g.route_indptr[op + 1]:
        _push_ended(w, op)
    else:
        w.added[w.count[N_ADDED]] = op
        w.count[N_ADDED] += 1


@kernel
def _make_ready(g, c, w, op, now_s, out_start):
    if g.op_kind[op] == COMPUTE:
        _push_ready(g, w, op)
        return
    out_start[op] = now_s
    latency_s = c.latency_s[g.op_latency[op]]
    if latency_s == 0.0:
        _activate_or_end(g, c, w, op)
    else:
        w.op_real[op, SINCE_S] = WAITING
        heap_set(w, op, now_s + latency_s)


@kernel
def _end_queued(g, c, w, head, now_s, out_start, out_finish):
    """End the queued ops from position ``head`` on, with everything that ends because of them in no time."""
    while head < w.count[N_QUEUE]:
        op = w.queue[head]
        head += 1
        out_finish[op] = now_s
        w.count[N_DONE] += 1
        if g.op_kind[op] == COMPUTE:
            chip = g.op_chip[op]
            w.running[chip] = NONE
            _touch_chip(w, chip)
        for p in range(g.succ_indptr[op], g.succ_indptr[op + 1]):
            succ = g.succ_indices[p]
            w.pred_left[succ] -= 1
            if w.pred_left[succ] == 0:
                _make_ready(g, c, w, succ, now_s, out_start)
    return head


@kernel
def _dispatch(g, c, w, now_s, out_start):
    """Let every touched free chip start the first ready op of its order."""
    for i in range(w.count[N_TOUCHED]):
        chip = w.touched[i]
        w.is_touched[chip] = 0
        if w.running[chip] != NONE or w.n_ready[chip] == 0:
            continue
        op = _pop_ready(g, w, chip)
        w.running[chip] = op
        out_start[op] = now_s
        duration_s = c.duration_s[g.op_cost[op]]
        if duration_s == 0.0:
            _push_ended(w, op)
        else:
            heap_set(w, op, now_s + duration_s)
    w.count[N_TOUCHED] = 0


@kernel
def _settle(g, c, w, now_s, out_start, out_finish):
    """Carry the instant to its fixpoint: ends, choices, ends of zero-second computes, and so on."""
    head = 0
    while True:
        head = _end_queued(g, c, w, head, now_s, out_start, out_finish)
        _dispatch(g, c, w, now_s, out_start)
        if head == w.count[N_QUEUE]:
            break
    w.count[N_QUEUE] = 0


@kernel
def _set_rate(g, w, op, now_s, in_bulk):
    """Give a flow its new rate, account for what it moved at the old one, and move its end; return the status."""
    old = w.op_real[op, RATE]
    new = w.op_real[op, NEW_RATE]
    if new <= 0.0:
        return ERR_NOT_FINITE  # a share below the smallest float: the flow would never end
    if abs(new - old) <= RATE_RTOL * old:
        w.op_real[op, NEW_RATE] = old
        commit_rate(g, w, op)
        return OK
    w.op_real[op, REMAINING] -= old * (now_s - w.op_real[op, SINCE_S])
    w.op_real[op, SINCE_S] = now_s
    commit_rate(g, w, op)
    end_s = now_s + max(w.op_real[op, REMAINING], 0.0) / new
    if in_bulk:
        heap_put(w, op, end_s)
    else:
        heap_set(w, op, end_s)
    return OK


@kernel
def _update_rates(g, c, w, now_s, out_info):
    """Link this instant's new flows (ended ones are unlinked already) and reprice whoever is affected."""
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        link_flow(g, w, op)
        w.op_real[op, SINCE_S] = now_s
        w.op_real[op, REMAINING] = c.bytes[g.op_cost[op]]
    status, n_affected = solve_rates(g, w, c.capacity_bytes_per_s)
    if status != OK:
        out_info[0] = w.affected[0]
        return status
    # When many ends move, ordering them once costs less than moving each.
    in_bulk = BULK * n_affected > w.count[HEAP_N]
    for i in range(n_affected):
        status = _set_rate(g, w, w.affected[i], now_s, in_bulk)
        if status != OK:
            out_info[0] = w.affected[i]
            return status
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if w.op_real[op, RATE] == 0.0:
            status = _set_rate(g, w, op, now_s, in_bulk)
            if status != OK:
                out_info[0] = op
                return status
    if in_bulk:
        heap_order(w)
    w.count[N_ADDED] = 0
    w.count[N_REMOVED] = 0
    return OK


@kernel
def _reset(g, w):
    """Start a row: counters and predecessors; everything else is as the last finished row left it."""
    for i in range(N_COUNTERS):
        if i not in (STAMP, N_OPENINGS):
            w.count[i] = 0
    for op in range(len(g.op_kind)):
        w.pred_left[op] = g.pred_count[op]


@kernel
def _on_cycle(g, w):
    """Find an op that waits for itself, given that some wait for ever: the predecessors of one that is not ready."""
    n_ops = len(g.op_kind)
    # ``queue`` is free now: for each waiting op, one predecessor that waits too.
    w.queue[:] = NONE
    for op in range(n_ops):
        if w.pred_left[op] > 0:
            for p in range(g.succ_indptr[op], g.succ_indptr[op + 1]):
                w.queue[g.succ_indices[p]] = op
    op = 0
    while w.pred_left[op] == 0:
        op += 1
    # After n_ops steps back one is on the cycle.
    for _ in range(n_ops):
        op = w.queue[op]
    return op


@kernel(entry=True)
def simulate(g, c, w, out_start, out_finish, out_info):
    """Simulate one row of costs through a graph.

    Parameters
    ----------
    g : Graph
    c : Costs
        Finite, non-negative; capacities > 0 (checked by the caller).
    w : Workspace
        Made by `make_workspace` for this graph, and used for none but rows that ended with OK. Afterwards
        ``w.count`` holds the counters
        ``N_EVENTS`` (instants), ``N_SOLVES`` and ``N_LINK_VISITS``.
    out_start, out_finish : ndarrays of float64, shape (n_ops,)
        Seconds. A flow starts when its predecessors have ended: its latency is part of its interval.
    out_info : ndarray of int64, shape (2,)
        On failure: the op concerned.

    Returns
    -------
    status : int
        OK, ERR_CYCLE, ERR_NO_PROGRESS, ERR_NOT_FINITE.
    """
    n_ops = len(g.op_kind)
    _reset(g, w)
    now_s = 0.0
    for op in range(n_ops):
        if w.pred_left[op] == 0:
            _make_ready(g, c, w, op, now_s, out_start)
    # Every instant takes at least one event; a compute op has one, a flow two.
    for _ in range(2 * n_ops + 1):
        _settle(g, c, w, now_s, out_start, out_finish)
        if w.count[N_ADDED] > 0 or w.count[N_REMOVED] > 0:
            status = _update_rates(g, c, w, now_s, out_info)
            if status != OK:
                return status
        if w.count[HEAP_N] == 0:
            break
        now_s = max(now_s, w.heap_key_s[0])
        if not np.isfinite(now_s):
            out_info[0] = w.heap[0]
            return ERR_NOT_FINITE
        w.count[N_EVENTS] += 1
        _take_instant(g, c, w, now_s)
    if w.count[HEAP_N] > 0:
        out_info[0] = w.heap[0]
        return ERR_NO_PROGRESS
    if w.count[N_DONE] < n_ops:
        out_info[0] = _on_cycle(g, w)
        return ERR_CYCLE
    return OK


@kernel
def _take_instant(g, c, w, now_s):
    """Take the events of this instant: computes and transfers end, latencies turn into transfers."""
    # ``affected`` is free between rate updates and serves as the list of due ops.
    n_due = take_due(w, now_s * (1.0 + INSTANT_RTOL), w.affected)
    for i in range(n_due):
        op = w.affected[i]
        if g.op_kind[op] == FLOW and w.op_real[op, SINCE_S] == WAITING:
            w.op_real[op, SINCE_S] = now_s
            _activate_or_end(g, c, w, op)
            continue
        if g.op_kind[op] == FLOW:
            unlink_flow(g, w, op)
            w.removed[w.count[N_REMOVED]] = op
            w.count[N_REMOVED] += 1
        _push_ended(w, op)
