"""The flows under way: which cross a link, what they use of it, and which of them it bounds.

Every link has two doubly linked lists, so that a flow comes and goes in a time proportional to its route: the flows
that cross it, chained through their hops, and its *mates*, the flows whose bottleneck it is.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_CHANGED, NIL

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
def link_flow(g, w, slot):
    """Enter a flow, still at rate 0, in the lists of the links it crosses.

    While no other flow crosses any of them, its rate can only be that of the narrowest: it is kept as ``new_rate``,
    which is 0 for a flow that shares a link.
    """
    f = w.slot[slot]
    op = f["op"]
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    first = slot * w.max_hops
    f["first"] = first
    f["n_hops"] = end - begin
    f["rate"] = 0.0
    f["bottleneck"] = NIL
    rate, narrowest, is_alone = np.inf, NIL, True
    p = first
    for at in range(begin, end):
        link, count = g.route_indices[at], g.route_count[at]
        hop, b = w.hop[p], w.link[link]
        head = b["head"]
        hop["count"] = count
        hop["link"] = link
        hop["slot"] = slot
        hop["next"] = head
        hop["prev"] = NIL
        b["head"] = p
        if head != NIL:
            w.hop[head]["prev"] = p
            w.slot[w.hop[head]["slot"]]["new_rate"] = 0.0
            is_alone = False
        share = b["capacity"] / count
        if share < rate:
            rate, narrowest = share, link
        p += 1
    f["new_rate"] = rate if is_alone else 0.0
    f["new_bottleneck"] = narrowest


@kernel
def find_alone(w, link):
    """Return the flow that a link was left with, if it shares none of its links now, with its rate as ``new_rate``.

    NIL when there is none, or when others have to be asked.
    """
    p = w.link[link]["head"]
    if p == NIL or w.hop[p]["next"] != NIL:
        return NIL
    slot = w.hop[p]["slot"]
    f = w.slot[slot]
    rate, narrowest = np.inf, NIL
    for p in range(f["first"], f["first"] + f["n_hops"]):
        hop = w.hop[p]
        if hop["next"] != NIL or hop["prev"] != NIL:
            return NIL
        share = w.link[hop["link"]]["capacity"] / hop["count"]
        if share < rate:
            rate, narrowest = share, hop["link"]
    f["new_rate"] = rate
    f["new_bottleneck"] = narrowest
    return slot


@kernel
def set_alone(w, slot):
    """Give a flow that shares nothing the rate that was found for it."""
    f = w.slot[slot]
    rate, link = f["new_rate"], f["new_bottleneck"]
    f["rate"] = rate
    f["new_rate"] = 0.0
    if f["bottleneck"] != NIL:
        _unlink_mate(w, slot)
        w.link[f["bottleneck"]]["n_mates"] = 0
    _link_mate(w, slot, link)
    b = w.link[link]
    b["n_mates"] = 1
    b["level"] = rate
    for p in range(f["first"], f["first"] + f["n_hops"]):
        w.link[w.hop[p]["link"]]["used"] = w.hop[p]["count"] * rate


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
