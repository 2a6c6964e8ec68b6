"""What an instant changes on the links: flows that begin to move, flows left alone, and the rates of all affected.

Shared links are taken in order of the ops, so that rates depend on what falls on an instant and on nothing else.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import CONTENDING, LONE, N_ADDED, N_AFFECTED, N_ASIDE, N_CHANGED, NIL
from g5cp_vec.engine.flows import claim_links, commit_rate, disturb, find_alone, link_flow, set_alone
from g5cp_vec.engine.heap import find_chain, flow_end_s, heap_set, join_chain, take_slot
from g5cp_vec.engine.tape import note_rate

# A rate that moved by less than a few roundings keeps its old value, and with it the flow's end.
RATE_RTOL = 1e-14
# Moves of an insertion sort per op, after which it gives up.
MOST_MOVES = 8


@kernel
def _set_rate(w, r, slot, at, now_s):
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
    note_rate(r, w.counter, f, at)
    heap_set(w, slot, flow_end_s(w, slot))


@kernel
def set_rates(w, r, at, now_s):
    """Give all affected flows the rates that were found."""
    for i in range(w.count[N_AFFECTED]):
        _set_rate(w, r, w.affected[i], at, now_s)
    w.count[N_ADDED] = 0


@kernel
def begin_added(g, c, w, at, now_s):
    """Let this instant's new flows move: lone ones until their end, the others listed, and left for a solution."""
    for i in range(w.count[N_ADDED]):
        w.lone_rate[i] = claim_links(g, w, w.added[i])
    slot, slot_end_s, slot_rate = NIL, -1.0, 0.0
    n_listed = 0
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if w.member[op]["slot"] == CONTENDING:
            w.added[n_listed] = op
            n_listed += 1
            continue
        rate = w.lone_rate[i]
        end_s = now_s + c.bytes[w.op[op]["cost"]] / rate
        if end_s != slot_end_s or rate != slot_rate:
            slot, slot_end_s, slot_rate = find_chain(w, op, LONE, rate, now_s, end_s), end_s, rate
            w.slot[slot]["since"] = at
        join_chain(w, slot, op)
        w.slot[slot]["n_ops"] += 1
        w.member[op]["slot"] = slot
    w.count[N_ADDED] = n_listed


@kernel
def list_contending(g, c, w, r, now_s):
    """List the new flows that share links, which become ``w.added``, and the lone ones whose links they come to."""
    sort(w.aside, w.count[N_ASIDE], w.affected)
    for i in range(w.count[N_ASIDE]):
        disturb(g, c, w, r, w.aside[i])
    w.count[N_ASIDE] = 0
    sort(w.added, w.count[N_ADDED], w.affected)
    for i in range(w.count[N_ADDED]):
        slot = take_slot(w, w.added[i])
        w.slot[slot]["since_s"] = now_s
        link_flow(g, c, w, slot)
        w.added[i] = slot


@kernel
def free_changed(w, r, at, now_s):
    """Flows that share nothing any more have their rate at once, and their links leave the list of the changed."""
    n_left = 0
    for i in range(w.count[N_CHANGED]):
        link = w.changed[i]
        if w.link[link]["is_changed"] == 0:
            continue  # its flow has its rate from another of its links
        slot = find_alone(w, link)
        if slot == NIL:
            w.changed[n_left] = link
            n_left += 1
            continue
        f = w.slot[slot]
        f["remaining"] -= f["rate"] * (now_s - f["since_s"])
        f["since_s"] = now_s
        set_alone(w, slot)
        note_rate(r, w.counter, f, at)
        heap_set(w, slot, flow_end_s(w, slot))
    w.count[N_CHANGED] = n_left


@kernel(inlines=False)
def sort(ops, n, buffer):
    """Sort the first ``n`` ops in place.

    What happens to shared links at one instant is taken in this order, so that rates depend on what falls on an
    instant and on nothing else. Mostly an op is at its place or very near; if not, what is in order is merged.
    """
    n_moves = 0
    for i in range(1, n):
        op = ops[i]
        if ops[i - 1] <= op:
            continue
        j = i
        while j > 0 and ops[j - 1] > op:
            ops[j] = ops[j - 1]
            j -= 1
        ops[j] = op
        n_moves += i - j
        if n_moves > MOST_MOVES * n:
            _merge_runs(ops, n, buffer)
            return


@kernel
def _merge_runs(ops, n, buffer):
    """Sort by merging neighbouring runs, over and over."""
    begin = 0
    while True:
        middle = begin + 1
        while middle < n and ops[middle - 1] <= ops[middle]:
            middle += 1
        if middle >= n:
            if begin == 0:
                return
            begin = 0  # once more from the front, with half as many runs
            continue
        end = middle + 1
        while end < n and ops[end - 1] <= ops[end]:
            end += 1
        _merge(ops, begin, middle, end, buffer)
        begin = end if end < n else 0


@kernel
def _merge(ops, begin, middle, end, buffer):
    """Merge two neighbouring runs."""
    for i in range(begin, middle):
        buffer[i] = ops[i]
    i, j = begin, middle
    for k in range(begin, end):
        if i == middle:
            break
        if j < end and ops[j] < buffer[i]:
            ops[k] = ops[j]
            j += 1
        else:
            ops[k] = buffer[i]
            i += 1
