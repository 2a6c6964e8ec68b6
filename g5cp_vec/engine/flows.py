"""The flows under way: which cross a link, what they use of it, and which of them it bounds.

Most flows of a deployment share nothing with another. Such a *lone* flow is only noted at its links (``w.lone``): its
rate and its end are known when it begins, and it waits for that end in a chain with others, as a compute does. When
another flow comes to one of its links, it leaves the chain and is listed as that one is.

Every link has two doubly linked lists, so that a flow comes and goes in a time proportional to its route: the flows
that cross it, chained through their hops, and its *mates*, the flows whose bottleneck it is.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import CONTENDING, LISTED, N_ASIDE, N_CHANGED, NIL, PENDING, SHARED
from g5cp_vec.engine.heap import heap_push, take_slot
from g5cp_vec.engine.precedence import look_at
from g5cp_vec.engine.tape import note_rate

# The sum of a link's rates is kept by adding and subtracting; it is made anew after so many changes, so that
# roundings do not pile up.
MAX_UPDATES = 256


@kernel
def _link_mate(w, slot, link):
    """Enter ``slot`` in the list of flows whose bottleneck is ``link``."""
    f, b = w.slot[slot], w.link[link]
    head = b["mate_head"]
    f["bottleneck"] = link
    f["mate_next"] = head
    f["mate_prev"] = NIL
    if head != NIL:
        w.slot[head]["mate_prev"] = slot
    b["mate_head"] = slot


@kernel
def _unlink_mate(w, slot):
    f = w.slot[slot]
    after, before = f["mate_next"], f["mate_prev"]
    if before == NIL:
        w.link[f["bottleneck"]]["mate_head"] = after
    else:
        w.slot[before]["mate_next"] = after
    if after != NIL:
        w.slot[after]["mate_prev"] = before


@kernel
def claim_links(g, w, op):
    """Let a flow that begins to move have its links to itself, unless others are there: then all of these share.

    Lone flows that must share their links from now on are put aside. Returns the rate that the flow has while it is
    alone.
    """
    w.member[op]["slot"] = PENDING
    rate = np.inf
    for at in range(w.op[op]["route"], w.op[op + 1]["route"]):
        link = g.route_indices[at]
        rate = min(rate, w.link[link]["capacity"] / g.route_count[at])
        holder = w.lone[link]
        if holder == NIL:
            w.lone[link] = op
            continue
        w.member[op]["slot"] = CONTENDING
        if holder == SHARED:
            continue
        if w.member[holder]["slot"] < CONTENDING:
            w.aside[w.count[N_ASIDE]] = holder
            w.count[N_ASIDE] += 1
            for p in range(w.op[holder]["route"], w.op[holder + 1]["route"]):
                w.lone[g.route_indices[p]] = SHARED
        else:
            w.member[holder]["slot"] = CONTENDING
    return rate


@kernel
def disturb(g, c, w, r, op):
    """Let a flow that had its links to itself share them: it leaves its chain, at the rate and end it has."""
    look_at(g, w, r, op)
    slot = w.member[op]["slot"]
    f = w.slot[slot]
    if f["n_ops"] > 1:
        f["n_ops"] -= 1
        since, since_s, key_s = f["since"], f["since_s"], f["key_s"]
        slot = take_slot(w, op)
        f = w.slot[slot]
        f["since"] = since
        f["since_s"] = since_s
        heap_push(w, slot, key_s)
    f["op"] = op
    link_flow(g, c, w, slot)
    set_alone(w, slot)
    note_rate(r, w.counter, f, np.int64(f["since"]))


@kernel
def free_links(g, w, op):
    """Take a lone flow off its links; whether it was one, and had not been disturbed."""
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    if w.lone[g.route_indices[begin]] != op:
        return False
    for at in range(begin, end):
        w.lone[g.route_indices[at]] = NIL
    return True


@kernel
def link_flow(g, c, w, slot):
    """Enter a flow, with all its bytes and still at rate 0, in the lists of the links it crosses."""
    f = w.slot[slot]
    op = f["op"]
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    p = slot * w.max_hops
    f["kind"] = LISTED
    f["first"] = p
    f["n_hops"] = end - begin
    f["rate"] = 0.0
    f["new_rate"] = 0.0
    f["remaining"] = c.bytes[w.op[op]["cost"]]
    f["bottleneck"] = NIL
    f["noted"] = NIL
    w.member[op]["slot"] = slot
    for at in range(begin, end):
        link = g.route_indices[at]
        hop, b = w.hop[p], w.link[link]
        head = b["head"]
        hop["count"] = g.route_count[at]
        hop["link"] = link
        hop["slot"] = slot
        hop["next"] = head
        hop["prev"] = NIL
        b["head"] = p
        if head != NIL:
            w.hop[head]["prev"] = p
        w.lone[link] = SHARED
        p += 1


@kernel
def find_alone(g, w, r, link):
    """Return the flow that a link was left with if it shares none of its links now, else NIL."""
    p = w.link[link]["head"]
    if p == NIL or w.hop[p]["next"] != NIL:
        return NIL
    slot = w.hop[p]["slot"]
    f = w.slot[slot]
    look_at(g, w, r, f["op"])
    for p in range(f["first"], f["first"] + f["n_hops"]):
        if w.hop[p]["next"] != NIL or w.hop[p]["prev"] != NIL:
            return NIL
    return slot


@kernel
def set_alone(w, slot):
    """Give a flow in lists that no other is in the rate of the narrowest link."""
    f = w.slot[slot]
    rate, narrowest = np.inf, NIL
    for p in range(f["first"], f["first"] + f["n_hops"]):
        share = w.link[w.hop[p]["link"]]["capacity"] / w.hop[p]["count"]
        if share < rate:
            rate, narrowest = share, w.hop[p]["link"]
    f["rate"] = rate
    if f["bottleneck"] != NIL:
        _unlink_mate(w, slot)
        w.link[f["bottleneck"]]["n_mates"] = 0
    _link_mate(w, slot, narrowest)
    b = w.link[narrowest]
    b["n_mates"] = 1
    b["level"] = rate
    for p in range(f["first"], f["first"] + f["n_hops"]):
        b = w.link[w.hop[p]["link"]]
        b["used"] = w.hop[p]["count"] * rate
        b["is_changed"] = 0


@kernel
def unlink_flow(w, slot):
    """Take a flow out of the lists of the links it crosses, and its rate out of their sums; note who shared them."""
    f = w.slot[slot]
    _unlink_mate(w, slot)
    w.link[f["bottleneck"]]["n_mates"] -= 1
    for p in range(f["first"], f["first"] + f["n_hops"]):
        hop = w.hop[p]
        b = w.link[hop["link"]]
        after, before = hop["next"], hop["prev"]
        if before == NIL:
            b["head"] = after
        else:
            w.hop[before]["next"] = after
        if after != NIL:
            w.hop[after]["prev"] = before
        if b["head"] == NIL:
            b["used"] = 0.0
            b["n_updates"] = 0
            w.lone[hop["link"]] = NIL
            continue
        b["used"] -= hop["count"] * f["rate"]
        b["n_updates"] += 1
        if b["is_changed"] == 0:
            b["is_changed"] = 1
            w.changed[w.count[N_CHANGED]] = hop["link"]
            w.count[N_CHANGED] += 1


@kernel
def commit_rate(w, slot):
    """Make the new rate and bottleneck of a flow its rate and bottleneck; it leaves the affected set."""
    f = w.slot[slot]
    change = f["new_rate"] - f["rate"]
    link = f["new_bottleneck"]
    if f["bottleneck"] != link:
        if f["bottleneck"] != NIL:
            _unlink_mate(w, slot)
        _link_mate(w, slot, link)
    b = w.link[link]
    b["n_mates"] += 1
    b["level"] = f["new_rate"]
    f["rate"] = f["new_rate"]
    f["new_rate"] = 0.0
    if change != 0.0:
        for p in range(f["first"], f["first"] + f["n_hops"]):
            b = w.link[w.hop[p]["link"]]
            b["used"] += w.hop[p]["count"] * change
            b["n_updates"] += 1


@kernel
def refresh_used(w, link):
    """Sum the rates of a link's flows anew."""
    used = 0.0
    p = w.link[link]["head"]
    while p != NIL:
        used += w.hop[p]["count"] * w.slot[w.hop[p]["slot"]]["rate"]
        p = w.hop[p]["next"]
    w.link[link]["used"] = used
    w.link[link]["n_updates"] = 0
