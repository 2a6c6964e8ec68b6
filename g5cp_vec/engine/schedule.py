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
    DURATION,
    ERR_CYCLE,
    ERR_NO_PROGRESS,
    ERR_NOT_FINITE,
    FREE,
    INSTANT_RTOL,
    LATENCY,
    N_ADDED,
    N_AFFECTED,
    N_ASIDE,
    N_CHANGED,
    N_DONE,
    N_EVENTS,
    N_HEAP,
    N_QUEUE,
    N_TOUCHED,
    NIL,
    OK,
    RECENT,
    RECORDS,
    SINGLE,
    STAMP,
    TIMERS,
    TRANSFER,
)
from g5cp_vec.engine.chips import pop_ready, push_ready, touch_chip
from g5cp_vec.engine.flows import (
    free_links,
    is_listed,
    leave_bundle,
    unlink_flow,
)
from g5cp_vec.engine.heap import (
    find_chain,
    free_slot,
    join_chain,
    leaves,
    next_event_s,
    take_bucket,
)
from g5cp_vec.engine.maxmin import solve_rates
from g5cp_vec.engine.precedence import close, forget, look_at, note_choice, note_ready
from g5cp_vec.engine.rates import begin_added, set_bundles, set_rates, share_links
from g5cp_vec.engine.sorting import sort
from g5cp_vec.engine.tape import (
    next_instant,
    record_clock,
    record_listed,
)


@kernel
def _push_ended(w, op):
    w.queue[w.count[N_QUEUE]] = op
    w.count[N_QUEUE] += 1


@kernel
def _has_nothing_to_move(c, w, op):
    """Whether a flow whose latency has passed ends; else it is to begin to move its bytes."""
    if c.bytes[w.op[op]["cost"]] == 0.0 or w.op[op]["route"] == w.op[op + 1]["route"]:
        return True
    w.added[w.count[N_ADDED]] = op
    w.count[N_ADDED] += 1
    return False


@kernel
def _make_ready(c, w, r, op, at):
    chip = w.op[op]["chip"]
    if chip != NIL:
        push_ready(w, op, chip)
        note_ready(w, r, chip, w.op[op]["rank"], at)
        return
    w.at[op]["start"] = at
    latency_s = c.latency_s[w.op[op]["latency"]]
    if latency_s > 0.0:
        w.aside[w.count[N_ASIDE]] = op
        w.count[N_ASIDE] += 1
    elif _has_nothing_to_move(c, w, op):
        _push_ended(w, op)


@kernel
def _end_queued(g, c, w, r, head, at):
    """End the queued ops from position ``head`` on, with everything that ends because of them in no time."""
    while head < w.count[N_QUEUE]:
        op = w.queue[head]
        head += 1
        w.at[op]["finish"] = at
        chip = w.op[op]["chip"]
        if chip != NIL:
            w.chip[chip]["is_busy"] = 0
            touch_chip(w, chip)
            w.chip[chip]["freed"] = at
        for p in range(w.op[op]["succ"], w.op[op + 1]["succ"]):
            succ = g.succ_indices[p]
            n_left = w.pred_left[succ] - 1
            w.pred_left[succ] = n_left
            if n_left == 0:
                _make_ready(c, w, r, succ, at)
    return head


@kernel
def _dispatch(g, c, w, r, at, now_s):
    """Let every touched free chip start the first ready op of its order."""
    slot, slot_end_s = NIL, -1.0
    for i in range(w.count[N_TOUCHED]):
        chip = w.touched[i]
        state = w.chip[chip]
        state["is_touched"] = 0
        if state["is_busy"] != 0 or state["next_op"] == NIL:
            continue
        op = pop_ready(g, w, chip)
        state["is_busy"] = 1
        note_choice(w, r, chip, w.op[op]["rank"], at)
        w.at[op]["start"] = at
        duration_s = c.duration_s[w.op[op]["cost"]]
        if duration_s == 0.0:
            _push_ended(w, op)
            continue
        end_s = now_s + duration_s
        if end_s != slot_end_s:
            slot, slot_end_s = find_chain(w, op, TIMERS, 0.0, np.int64(0), end_s), end_s
        join_chain(w, slot, op)
    w.count[N_TOUCHED] = 0


@kernel
def _start_latencies(c, w, now_s):
    """Let the latencies of this instant's ready flows begin."""
    slot, slot_end_s = NIL, -1.0
    for i in range(w.count[N_ASIDE]):
        op = w.aside[i]
        end_s = now_s + c.latency_s[w.op[op]["latency"]]
        if end_s != slot_end_s:
            slot, slot_end_s = find_chain(w, op, TIMERS, 0.0, np.int64(0), end_s), end_s
        join_chain(w, slot, op)
    w.count[N_ASIDE] = 0


@kernel
def _settle(g, c, w, r, at, now_s):
    """Carry the instant to its fixpoint: ends, choices, ends of zero-second computes, and so on."""
    head = np.int64(0)
    while True:
        head = _end_queued(g, c, w, r, head, at)
        _dispatch(g, c, w, r, at, now_s)
        if head == w.count[N_QUEUE]:
            break
    _start_latencies(c, w, now_s)
    w.counter[N_DONE] += head
    w.count[N_QUEUE] = 0


@kernel
def _reset(pred_count, link_capacity, c, w):
    """Start a row: counters, predecessors, capacities; everything else is as the last finished row left it.

    Ops without predecessors are in ``affected``.
    """
    for i in range(RECENT):
        w.count[i] = 0
    w.count[FREE] = NIL
    for i in range(STAMP):
        w.counter[i] = 0
    for op in range(len(pred_count)):
        n_preds = pred_count[op]
        w.pred_left[op] = n_preds
        if n_preds == 0:
            w.affected[w.count[N_AFFECTED]] = op
            w.count[N_AFFECTED] += 1
    for link in range(len(link_capacity)):
        w.link[link]["capacity"] = c.capacity_bytes_per_s[link_capacity[link]]


@kernel
def _on_cycle(g, op_records, pred_left, before):
    """Find an op that waits for itself, given that some wait for ever: the predecessors of one that is not ready.

    ``before`` is overwritten: for each waiting op, one predecessor that waits too.
    """
    n_ops = len(pred_left)
    for op in range(n_ops):
        if pred_left[op] > 0:
            for p in range(op_records[op]["succ"], op_records[op + 1]["succ"]):
                before[g.succ_indices[p]] = op
    op = 0
    while pred_left[op] == 0:
        op += 1
    # After n_ops steps back one is on the cycle.
    for _ in range(n_ops):
        op = before[op]
    return op


@kernel
def simulate(graph, c, w, r, out_info):
    """Simulate one row of costs through a graph.

    Parameters
    ----------
    graph : Graph
    c : Costs
        Finite, non-negative; capacities > 0 (checked by the caller).
    w : Workspace
        Made by `make_workspace` for this graph, and used for none but rows that ended with OK. Afterwards
        ``w.counter`` holds ``N_EVENTS`` (instants but the first), ``N_SOLVES`` and ``N_LINK_VISITS``, and
        ``instant_s`` and ``at`` say when every op starts and ends. A flow starts when its
        predecessors have ended: its latency is part of its interval.
    r : Recorder
        Recorded on where ``w.counter[RECORDS]`` is 1; it is 0 afterwards where the simulation was too long for that.
    out_info : ndarray of int64, shape (2,)
        On failure: the op concerned.

    Returns
    -------
    status : int
        OK, ERR_CYCLE, ERR_NO_PROGRESS, ERR_NOT_FINITE.
    """
    g = w.entries
    n_ops = len(w.pred_left)
    _reset(graph.pred_count, graph.link_capacity, c, w)
    if w.counter[RECORDS] > 0:
        forget(w, r)
    now_s = 0.0
    for i in range(w.count[N_AFFECTED]):
        _make_ready(c, w, r, w.affected[i], np.int64(0))
    # Every instant takes at least one event; a compute op has one, a flow two.
    for at in range(2 * n_ops + 1):
        w.instant_s[at] = now_s
        _settle(g, c, w, r, at, now_s)
        if w.count[N_ADDED] > 0:
            begin_added(g, c, w, r, at, now_s)
        if w.count[N_ADDED] > 0:
            share_links(g, c, w, at, now_s)
        if w.count[N_CHANGED] > 0:
            set_bundles(g, w, r, at, now_s)
        if w.count[N_ADDED] > 0 or w.count[N_CHANGED] > 0:
            status = solve_rates(w)
            if status != OK:
                out_info[0] = w.slot[w.affected[0]]["op"]
                return status
            set_rates(g, w, r, at, now_s)
        if w.count[N_HEAP] == 0:
            break
        now_s = max(now_s, next_event_s(w))
        if not np.isfinite(now_s):
            out_info[0] = w.slot[w.heap[0]["slot"]]["op"]
            return ERR_NOT_FINITE
        w.counter[N_EVENTS] += 1
        next_instant(r, w.counter, at + 1)
        _take_instant(g, c, w, r, now_s)
        if w.count[N_ASIDE] > 0:
            _end_singles(g, w, r)
    if w.count[N_HEAP] > 0:
        out_info[0] = w.slot[w.heap[0]["slot"]]["op"]
        return ERR_NO_PROGRESS
    if w.counter[N_DONE] < n_ops:
        out_info[0] = _on_cycle(g, w.op, w.pred_left, w.queue)
        return ERR_CYCLE
    if w.counter[RECORDS] > 0:
        next_instant(r, w.counter, w.counter[N_EVENTS] + 1)
        close(g, w, r)
    return OK


@kernel
def _take_instant(g, c, w, r, now_s):
    """Take the events of this instant: computes and transfers end, latencies turn into transfers.

    Flows with a slot of their own that end are put aside.
    """
    limit_s = now_s * (1.0 + INSTANT_RTOL)
    while w.count[N_HEAP] > 0 and w.heap[0]["key_s"] <= limit_s:
        head = take_bucket(w)
        slot = head
        while True:
            after = w.slot[slot]["after"]
            if leaves(w, slot):
                if w.slot[slot]["kind"] == SINGLE:
                    w.aside[w.count[N_ASIDE]] = w.slot[slot]["op"]
                    w.count[N_ASIDE] += 1
                else:
                    _take_chain(g, c, w, r, slot)
            slot = after
            if slot == head:
                break


@kernel
def _take_chain(g, c, w, r, slot):
    """End the ops of a chain, or let the flows among them whose latency it is begin to move."""
    f = w.slot[slot]
    op, last, moves, records = f["op"], f["last"], f["kind"] != TIMERS, w.counter[RECORDS] > 0
    last_kind, last_cost, last_since = 0, NIL, NIL
    n = w.count[N_QUEUE]
    while True:
        after = w.member[op]["after"]
        if moves:
            ends = w.member[op]["slot"] == slot
            if ends:
                look_at(g, w, r, op)
                free_links(g, w, op)
        else:
            ends = w.op[op]["chip"] != NIL or _has_nothing_to_move(c, w, op)
        if records and (ends or not moves):
            kind, cost = _what_ends(w.op[op], moves)
            since = f["since"] if moves else w.at[op]["start"]
            if cost != last_cost or kind != last_kind or since != last_since:
                record_clock(r, w.counter, kind, cost, since, f["rate"])
                last_kind, last_cost, last_since = kind, cost, since
        if ends:
            w.queue[n] = op
            n += 1
        if op == last:
            break
        op = after
    w.count[N_QUEUE] = n
    free_slot(w, slot)


@kernel
def _what_ends(op, moves):
    """Tell what it is of an op in a chain that ends: kind of clock, and id of its cost."""
    if moves:
        return TRANSFER, op["cost"]
    if op["chip"] != NIL:
        return DURATION, op["cost"]
    return LATENCY, op["latency"]


@kernel
def _end_singles(g, w, r):
    """End the flows with a slot of their own that have moved their bytes."""
    n_listed = np.int64(0)
    for i in range(w.count[N_ASIDE]):
        op = w.aside[i]
        slot = w.member[op]["slot"]
        look_at(g, w, r, op)
        if w.counter[RECORDS] > 0:
            record_listed(r, w.counter, w.slot[slot], w.op[op]["cost"])
        if is_listed(g, w, op):
            w.aside[n_listed] = op
            n_listed += 1
        else:
            leave_bundle(g, w, slot)
            free_slot(w, slot)
            _push_ended(w, op)
    sort(w.aside, n_listed)
    for i in range(n_listed):
        _push_ended(w, w.aside[i])
        slot = w.member[w.aside[i]]["slot"]
        unlink_flow(w, slot)
        free_slot(w, slot)
    w.count[N_ASIDE] = 0
