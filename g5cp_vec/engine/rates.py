"""What an instant changes on the links: flows that begin to move, flows left alone, and the rates of all affected.

Shared links are taken in order of the ops, so that rates depend on what falls on an instant and on nothing else.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import CONTENDING, LONE, N_ADDED, N_AFFECTED, N_ASIDE, N_CHANGED, NIL
from g5cp_vec.engine.flows import claim_links, commit_rate, disturb, find_alone, link_flow, set_alone
from g5cp_vec.engine.heap import find_chain, flow_end_s, heap_set, join_chain, take_slot
from g5cp_vec.engine.precedence import look_at
from g5cp_vec.engine.sorting import sort
from g5cp_vec.engine.tape import note_rate

# A rate that moved by less than a few roundings keeps its old value, and with it the flow's end.
RATE_RTOL = 1e-14


@kernel
def _set_rate(g, w, r, slot, at, now_s):
    """Give a flow its new rate, account for what it moved at the old one, and move its end."""
    f = w.slot[slot]
    look_at(g, w, r, f["op"])
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
def set_rates(g, w, r, at, now_s):
    """Give all affected flows the rates that were found."""
    for i in range(w.count[N_AFFECTED]):
        _set_rate(g, w, r, w.affected[i], at, now_s)
    w.count[N_ADDED] = 0


@kernel
def begin_added(g, c, w, r, at, now_s):
    """Let this instant's new flows move: lone ones until their end, the others listed, and left for a solution."""
    for i in range(w.count[N_ADDED]):
        look_at(g, w, r, w.added[i])
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
            slot, slot_end_s, slot_rate = find_chain(w, op, LONE, rate, at, end_s), end_s, rate
            w.slot[slot]["since_s"] = now_s
        join_chain(w, slot, op)
        w.slot[slot]["n_ops"] += 1
        w.member[op]["slot"] = slot
    w.count[N_ADDED] = n_listed


@kernel
def list_contending(g, c, w, r, now_s):
    """List the new flows that share links, which become ``w.added``, and the lone ones whose links they come to."""
    sort(w.aside, w.count[N_ASIDE])
    for i in range(w.count[N_ASIDE]):
        disturb(g, c, w, r, w.aside[i])
    w.count[N_ASIDE] = 0
    sort(w.added, w.count[N_ADDED])
    for i in range(w.count[N_ADDED]):
        slot = take_slot(w, w.added[i])
        w.slot[slot]["since_s"] = now_s
        link_flow(g, c, w, slot)
        w.added[i] = slot


@kernel
def free_changed(g, w, r, at, now_s):
    """Flows that share nothing any more have their rate at once, and their links leave the list of the changed."""
    n_left = 0
    for i in range(w.count[N_CHANGED]):
        link = w.changed[i]
        if w.link[link]["is_changed"] == 0:
            continue  # its flow has its rate from another of its links
        slot = find_alone(g, w, r, link)
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
