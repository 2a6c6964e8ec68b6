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
    ERR_CYCLE,
    ERR_NO_PROGRESS,
    ERR_NOT_FINITE,
    N_ADDED,
    N_AFFECTED,
    N_CHANGED,
    N_COUNTERS,
    N_DONE,
    N_EVENTS,
    N_HEAP,
    N_LISTS,
    N_QUEUE,
    N_TOUCHED,
    NIL,
    OK,
    STAMP,
    unsigned,
)
from g5cp_vec.engine.chips import pop_ready, push_ready, touch_chip
from g5cp_vec.engine.flows import commit_rate, find_alone, link_flow, set_alone, unlink_flow
from g5cp_vec.engine.heap import (
    TIMER,
    flow_end_s,
    free_slot,
    heap_push,
    heap_set,
    leaves,
    next_event_s,
    set_timer,
    take_bucket,
    take_slot,
)
from g5cp_vec.engine.maxmin import solve_rates

# Two event times are one instant when they agree to this.
INSTANT_RTOL = 1e-12
# A rate that moved by less than a few roundings keeps its old value, and with it the flow's end.
RATE_RTOL = 1e-14


@kernel
def _push_ended(w, op):
    w.queue[w.count[N_QUEUE]] = op
    w.count[N_QUEUE] += 1


@kernel
def _activate_or_end(c, w, op):
    """Let a flow whose latency has passed move its bytes, or end it when there is nothing to move."""
    n_bytes = c.bytes[w.op[op]["cost"]]
    if n_bytes == 0.0 or w.op[op]["route"] == w.op[op + 1]["route"]:
        _push_ended(w, op)
        return
    slot = take_slot(w, op)
    w.slot[slot]["remaining"] = n_bytes
    w.added[w.count[N_ADDED]] = slot
    w.count[N_ADDED] += 1


@kernel
def _make_ready(c, w, op, now_s, out_start):
    chip = w.op[op]["chip"]
    if chip != NIL:
        push_ready(w, op, chip)
        return
    out_start[op] = now_s
    latency_s = c.latency_s[w.op[op]["latency"]]
    if latency_s > 0.0:
        set_timer(w, op, now_s + latency_s)
    else:
        _activate_or_end(c, w, op)


@kernel
def _end_queued(g, c, w, head, now_s, out_start, out_finish):
    """End the queued ops from position ``head`` on, with everything that ends because of them in no time."""
    while head < w.count[N_QUEUE]:
        op = w.queue[head]
        head += 1
        out_finish[op] = now_s
        chip = w.op[op]["chip"]
        if chip != NIL:
            w.chip[chip]["is_busy"] = 0
            touch_chip(w, chip)
        for p in range(w.op[op]["succ"], w.op[op + 1]["succ"]):
            succ = g.succ_indices[p]
            n_left = w.pred_left[succ] - 1
            w.pred_left[succ] = n_left
            if n_left == 0:
                _make_ready(c, w, succ, now_s, out_start)
    return head


@kernel
def _dispatch(g, c, w, now_s, out_start):
    """Let every touched free chip start the first ready op of its order."""
    for i in range(w.count[N_TOUCHED]):
        chip = w.touched[i]
        state = w.chip[chip]
        state["is_touched"] = 0
        if state["is_busy"] != 0 or state["next_op"] == NIL:
            continue
        op = pop_ready(g, w, chip)
        state["is_busy"] = 1
        out_start[op] = now_s
        duration_s = c.duration_s[w.op[op]["cost"]]
        if duration_s == 0.0:
            _push_ended(w, op)
        else:
            set_timer(w, op, now_s + duration_s)
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
    w.counter[N_DONE] += head
    w.count[N_QUEUE] = 0


@kernel
def _set_rate(w, slot, now_s):
    """Give a flow its new rate, account for what it moved at the old one, and move its end."""
    f = w.slot[slot]
    old = f["rate"]
    if abs(f["new_rate"] - old) <= RATE_RTOL * old:
        f["new_rate"] = old
        commit_rate(w, slot)
        return
    f["remaining"] -= old * (now_s - f["since_s"])
    f["since_s"] = now_s
    commit_rate(w, slot)
    heap_set(w, slot, flow_end_s(w, slot))


@kernel
def _link_added(g, w, now_s):
    """Link this instant's new flows; those that share nothing have their rate at once and leave the list."""
    for i in range(w.count[N_ADDED]):
        w.slot[w.added[i]]["since_s"] = now_s
        link_flow(g, w, w.added[i])
    n_sharing = 0
    for i in range(w.count[N_ADDED]):
        slot = w.added[i]
        if w.slot[slot]["new_rate"] > 0.0:
            set_alone(w, slot)
            heap_push(w, slot, flow_end_s(w, slot))
        else:
            w.added[n_sharing] = slot
            n_sharing += 1
    w.count[N_ADDED] = n_sharing


@kernel
def _free_changed(w, now_s):
    """Flows that share nothing any more have their rate at once, and their links leave the list of the changed."""
    n_left = 0
    for i in range(w.count[N_CHANGED]):
        link = w.changed[i]
        slot = find_alone(w, link)
        if slot == NIL:
            w.changed[n_left] = link
            n_left += 1
            continue
        w.link[link]["is_changed"] = 0
        f = w.slot[slot]
        f["remaining"] -= f["rate"] * (now_s - f["since_s"])
        f["since_s"] = now_s
        set_alone(w, slot)
        heap_set(w, slot, flow_end_s(w, slot))
    w.count[N_CHANGED] = n_left


@kernel
def _update_rates(g, w, now_s):
    """Bring in this instant's new flows (ended ones are unlinked already) and reprice whoever is affected."""
    _link_added(g, w, now_s)
    _free_changed(w, now_s)
    if w.count[N_ADDED] == 0 and w.count[N_CHANGED] == 0:
        return OK
    status = solve_rates(w)
    if status != OK:
        return status
    for i in range(w.count[N_AFFECTED]):
        _set_rate(w, w.affected[i], now_s)
    w.count[N_ADDED] = 0
    return OK


@kernel
def _reset(g, c, w):
    """Start a row: counters, predecessors, capacities; everything else is as the last finished row left it."""
    for i in range(N_LISTS):
        w.count[i] = 0
    for i in range(N_COUNTERS):
        if i != STAMP:
            w.counter[i] = 0
    for op in range(len(g.op_kind)):
        w.pred_left[op] = g.pred_count[op]
    for link in range(len(g.link_capacity)):
        w.link[link]["capacity"] = c.capacity_bytes_per_s[g.link_capacity[link]]


@kernel
def _on_cycle(g, w):
    """Find an op that waits for itself, given that some wait for ever: the predecessors of one that is not ready."""
    n_ops = len(g.op_kind)
    # ``queue`` is free now: for each waiting op, one predecessor that waits too.
    w.queue[:] = NIL
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
def simulate(graph, c, w, out_start, out_finish, out_info):
    """Simulate one row of costs through a graph.

    Parameters
    ----------
    graph : Graph
    c : Costs
        Finite, non-negative; capacities > 0 (checked by the caller).
    w : Workspace
        Made by `make_workspace` for this graph, and used for none but rows that ended with OK. Afterwards
        ``w.counter`` holds ``N_EVENTS`` (instants), ``N_SOLVES`` and ``N_LINK_VISITS``.
    out_start, out_finish : ndarrays of float64, shape (n_ops,)
        Seconds. A flow starts when its predecessors have ended: its latency is part of its interval.
    out_info : ndarray of int64, shape (2,)
        On failure: the op concerned.

    Returns
    -------
    status : int
        OK, ERR_CYCLE, ERR_NO_PROGRESS, ERR_NOT_FINITE.
    """
    g = unsigned(graph)
    n_ops = len(g.op_kind)
    _reset(g, c, w)
    now_s = 0.0
    for op in range(n_ops):
        if w.pred_left[op] == 0:
            _make_ready(c, w, np.uint32(op), now_s, out_start)
    # Every instant takes at least one event; a compute op has one, a flow two.
    for _ in range(2 * n_ops + 1):
        _settle(g, c, w, now_s, out_start, out_finish)
        if w.count[N_ADDED] > 0 or w.count[N_CHANGED] > 0:
            status = _update_rates(g, w, now_s)
            if status != OK:
                out_info[0] = w.slot[w.affected[0]]["op"]
                return status
        if w.count[N_HEAP] == 0:
            break
        now_s = max(now_s, next_event_s(w))
        if not np.isfinite(now_s):
            out_info[0] = w.slot[w.heap[0]["slot"]]["op"]
            return ERR_NOT_FINITE
        w.counter[N_EVENTS] += 1
        _take_instant(c, w, now_s)
    if w.count[N_HEAP] > 0:
        out_info[0] = w.slot[w.heap[0]["slot"]]["op"]
        return ERR_NO_PROGRESS
    if w.counter[N_DONE] < n_ops:
        out_info[0] = _on_cycle(g, w)
        return ERR_CYCLE
    return OK


@kernel
def _take_instant(c, w, now_s):
    """Take the events of this instant: computes and transfers end, latencies turn into transfers."""
    limit_s = now_s * (1.0 + INSTANT_RTOL)
    while w.count[N_HEAP] > 0 and w.heap[0]["key_s"] <= limit_s:
        head = take_bucket(w)
        slot = head
        while True:
            after = w.slot[slot]["after"]
            if leaves(w, slot):
                _take_event(c, w, slot)
            slot = after
            if slot == head:
                break


@kernel
def _take_event(c, w, slot):
    f = w.slot[slot]
    if f["since_s"] != TIMER:
        unlink_flow(w, slot)
        _push_ended(w, f["op"])
        free_slot(w, slot)
        return
    for p in range(f["first"], f["first"] + f["n_hops"]):
        op = w.timer[p]
        if w.op[op]["chip"] != NIL:
            _push_ended(w, op)
        else:
            _activate_or_end(c, w, op)
    free_slot(w, slot)
