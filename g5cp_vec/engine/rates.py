"""What an instant changes on the links: flows that begin, bundles that grow or shrink, and all rates affected.

Listed flows are taken in order of the ops, so that rates depend on what falls on an instant and on nothing else.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    CROWD,
    LONE,
    N_ADDED,
    N_AFFECTED,
    N_CHANGED,
    NIL,
    PENDING,
    SHARED,
    SHARING,
    SINGLE,
    STAMP,
)
from g5cp_vec.engine.flows import (
    claim_links,
    commit_rate,
    find_alone,
    is_listed,
    join_bundle,
    link_flow,
    new_flow,
    set_bundle,
    unlist_alone,
)
from g5cp_vec.engine.heap import find_chain, flow_end_s, heap_set, join_chain
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
    """Let this instant's new flows move: lone ones until their end; the others are left in ``w.added``."""
    n = w.count[N_ADDED]
    for i in range(n):
        look_at(g, w, r, w.added[i])
        w.lone_rate[i] = claim_links(g, c, w, r, w.added[i])
    slot, slot_end_s, slot_rate = NIL, -1.0, 0.0
    n_left = 0
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if w.member[op]["slot"] != PENDING:
            w.added[n_left] = op
            n_left += 1
            continue
        rate = w.lone_rate[i]
        end_s = now_s + c.bytes[w.op[op]["cost"]] / rate
        if end_s != slot_end_s or rate != slot_rate:
            slot, slot_end_s, slot_rate = find_chain(w, op, LONE, rate, at, end_s), end_s, rate
            w.slot[slot]["since_s"] = now_s
        join_chain(w, slot, op)
        w.slot[slot]["n_ops"] += 1
        w.member[op]["slot"] = slot
    w.count[N_ADDED] = n_left


@kernel
def share_links(g, c, w, at, now_s):
    """Let the flows that come to others join their bundle, or be a crowd; else list them, by slots in ``w.added``."""
    n_listed, all_new = np.int64(0), True
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        is_new = w.member[op]["slot"] == SHARING
        if is_listed(g, w, op):
            w.added[n_listed] = op
            n_listed += 1
            all_new &= is_new
        else:
            if is_new:
                new_flow(c, w, op, now_s)
            join_bundle(g, w, op)
    w.count[N_ADDED] = n_listed
    if all_new and n_listed > 1 and _begin_crowd(g, c, w, at, now_s):
        w.count[N_ADDED] = 0
        return
    sort(w.added, n_listed)
    for i in range(n_listed):
        if w.member[w.added[i]]["slot"] == SHARING:
            new_flow(c, w, w.added[i], now_s)
        slot = w.member[w.added[i]]["slot"]
        link_flow(g, w, slot)
        w.added[i] = slot


@kernel
def _common_share(g, w):
    """Rate of all flows in ``w.added`` if they are a crowd, else 0.

    Each then crosses a link that has no more for the flows on it, and no link has less. Their size has one id,
    not just one value: a row is played as it was recorded whatever values it has.
    """
    w.counter[STAMP] += 1
    cost = w.op[w.added[0]]["cost"]
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if w.op[op]["cost"] != cost:
            return 0.0
        for p in range(w.op[op]["route"], w.op[op + 1]["route"]):
            b = w.link[g.route_indices[p]]
            if b["head"] != NIL:
                return 0.0
            if b["stamp"] != w.counter[STAMP]:
                b["stamp"] = w.counter[STAMP]
                b["weight"] = 0.0
            b["weight"] += g.route_count[p]
    common = 0.0
    for i in range(w.count[N_ADDED]):
        op, share = w.added[i], np.inf
        for p in range(w.op[op]["route"], w.op[op + 1]["route"]):
            b = w.link[g.route_indices[p]]
            share = min(share, b["capacity"] / b["weight"])
        if i > 0 and share != common:
            return 0.0
        common = share
    return common


@kernel
def _begin_crowd(g, c, w, at, now_s):
    """Let the flows in ``w.added`` move as a crowd, if they are one."""
    rate = _common_share(g, w)
    if rate == 0.0:
        return False
    op = w.added[0]
    slot = find_chain(w, op, CROWD, rate, at, now_s + c.bytes[w.op[op]["cost"]] / rate)
    w.slot[slot]["since_s"] = now_s
    w.slot[slot]["n_ops"] = w.count[N_ADDED]
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        join_chain(w, slot, op)
        w.member[op]["slot"] = slot
        for p in range(w.op[op]["route"], w.op[op + 1]["route"]):
            w.lone[g.route_indices[p]] = op
    return True


@kernel
def set_bundles(g, w, r, at, now_s):
    """Give the bundles that have changed their rates; a flow that shares nothing any more is one, too."""
    n_left = 0
    for i in range(w.count[N_CHANGED]):
        link = w.changed[i]
        if w.lone[link] == SHARED:
            slot = find_alone(g, w, r, link)
            if slot == NIL:
                w.changed[n_left] = link
                n_left += 1
                continue
            unlist_alone(w, slot)
        w.link[link]["is_changed"] = 0
        op = w.lone[link]
        if op != NIL and w.slot[w.member[op]["slot"]]["kind"] == SINGLE:
            set_bundle(g, w, r, op, at, now_s)
    w.count[N_CHANGED] = n_left
