"""The flows under way: which cross a link, what they use of it, and which of them it bounds.

Most flows of a deployment share nothing with another. Such a *lone* flow is only noted at its links (``w.lone``): its
rate and its end are known when it begins, and it waits for that end in a chain with others, as a compute does.

Flows that queue up on one route, with no other on its links, are a *bundle*: n flows have an nth of a lone one's rate
each. They are chained from the one that came last, which is noted at the links.

Flows of one size that begin together, meet nobody but each other, and all get one rate are a *crowd*, as those of a
collective in lockstep are: one chain, which all leave when another comes to a link of any of them.

Other flows that share links are *listed*. Every link has two doubly linked lists, so that a flow comes and goes in a
time proportional to its route: the flows that cross it, chained through their hops, and its *mates*, the flows whose
bottleneck it is. A flow leaves its chain when another comes to one of its links, and its bundle when one comes that
has another route; a listed flow that is left alone is a bundle of one again.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import CROWD, N_ADDED, N_CHANGED, NIL, PENDING, SHARED, SHARING, SINGLE
from g5cp_vec.engine.heap import flow_end_s, heap_push, heap_set, take_slot
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
def lone_rate(g, w, op):
    """Rate of a flow that has its links to itself."""
    rate = np.inf
    for at in range(w.op[op]["route"], w.op[op + 1]["route"]):
        rate = min(rate, w.link[g.route_indices[at]]["capacity"] / g.route_count[at])
    return rate


@kernel
def _has_route_of(g, w, op, other):
    """Whether two flows load the same links alike, in the same order."""
    p, q = w.op[op]["route"], w.op[other]["route"]
    n = w.op[op + 1]["route"] - p
    if w.op[other + 1]["route"] - q != n:
        return False
    for i in range(n):
        if g.route_indices[p + i] != g.route_indices[q + i] or g.route_count[p + i] != g.route_count[q + i]:
            return False
    return True


@kernel
def _leave_chain(c, w, r, op):
    """Let a flow have a slot of its own: it leaves its chain, if it is in one, at the rate and end it has."""
    slot = w.member[op]["slot"]
    if slot >= SHARING:
        w.member[op]["slot"] = SHARING  # it has just come, and gets its slot with the other new ones
        return
    f = w.slot[slot]
    if f["kind"] == SINGLE:
        return
    if f["n_ops"] > 1:
        f["n_ops"] -= 1
        rate, since, since_s, key_s = f["rate"], f["since"], f["since_s"], f["key_s"]
        slot = take_slot(w, op)
        f = w.slot[slot]
        f["rate"] = rate
        f["since"] = since
        f["since_s"] = since_s
        heap_push(w, slot, key_s)
    _have_slot(c, w, slot, op)
    note_rate(r, w.counter, f, np.int64(f["since"]))


@kernel
def _have_slot(c, w, slot, op):
    """Let a slot stand for a flow with all its bytes, which no other has joined."""
    f = w.slot[slot]
    f["kind"] = SINGLE
    f["op"] = op
    f["remaining"] = c.bytes[w.op[op]["cost"]]
    f["noted"] = NIL
    f["mate_next"] = NIL
    f["mate_prev"] = NIL
    w.member[op]["slot"] = slot


@kernel
def new_flow(c, w, op, now_s):
    """Take a slot for a flow that begins to move, still at rate 0."""
    slot = take_slot(w, op)
    _have_slot(c, w, slot, op)
    w.slot[slot]["rate"] = 0.0
    w.slot[slot]["since_s"] = now_s


@kernel
def claim_links(g, c, w, r, op):
    """Let a flow that begins to move have its links to itself, unless others are there.

    Where those there have its route, it is to join them. Otherwise all of them are to be listed, and those that have
    moved already are added to the new flows. Returns the rate that the flow has while it is alone.
    """
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    rate, is_free = np.inf, True
    for at in range(begin, end):
        link = g.route_indices[at]
        rate = min(rate, w.link[link]["capacity"] / g.route_count[at])
        is_free &= w.lone[link] == NIL
    if is_free:
        w.member[op]["slot"] = PENDING
        for at in range(begin, end):
            w.lone[g.route_indices[at]] = op
        return rate
    w.member[op]["slot"] = SHARING
    holder = w.lone[g.route_indices[begin]]
    if holder < SHARED and not _is_crowded(w, holder) and _has_route_of(g, w, op, holder):
        _leave_chain(c, w, r, holder)
        return rate
    for at in range(begin, end):
        link = g.route_indices[at]
        holder = w.lone[link]
        w.lone[link] = SHARED
        if holder < SHARED:
            _disperse(g, c, w, r, holder)
    return rate


@kernel
def _is_crowded(w, op):
    """Whether a flow that is noted at its links is one of a crowd."""
    slot = w.member[op]["slot"]
    return slot < SHARING and w.slot[slot]["kind"] == CROWD


@kernel
def _disperse(g, c, w, r, op):
    """Let the flows of the bundle with ``op`` at its head, or of its crowd, be listed."""
    last = op
    if _is_crowded(w, op):
        f = w.slot[w.member[op]["slot"]]
        op, last = f["op"], f["last"]
    while True:
        after = w.member[op]["after"]
        _disperse_bundle(g, c, w, r, op)
        if op == last:
            break
        op = after


@kernel
def _disperse_bundle(g, c, w, r, op):
    look_at(g, w, r, op)
    _leave_chain(c, w, r, op)
    for at in range(w.op[op]["route"], w.op[op + 1]["route"]):
        w.lone[g.route_indices[at]] = SHARED
    slot = w.member[op]["slot"]
    while slot < SHARING:
        w.added[w.count[N_ADDED]] = w.slot[slot]["op"]
        w.count[N_ADDED] += 1
        slot = w.slot[slot]["mate_next"]


@kernel
def free_links(g, w, op):
    """Take a flow that ends with its chain off its links."""
    for at in range(w.op[op]["route"], w.op[op + 1]["route"]):
        w.lone[g.route_indices[at]] = NIL


@kernel
def is_listed(g, w, op):
    """Whether a flow with a slot of its own is, or is to be, in the lists of its links."""
    return w.lone[g.route_indices[w.op[op]["route"]]] == SHARED


@kernel
def _mark_changed(w, link):
    b = w.link[link]
    if b["is_changed"] == 0:
        b["is_changed"] = 1
        w.changed[w.count[N_CHANGED]] = link
        w.count[N_CHANGED] += 1


@kernel
def join_bundle(g, w, op):
    """Put a flow at the head of the bundle on its route; the first is one."""
    slot = w.member[op]["slot"]
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    holder = w.lone[g.route_indices[begin]]
    head = w.member[holder]["slot"]
    if holder != op and head < SHARING:
        w.slot[slot]["mate_next"] = head
        w.slot[head]["mate_prev"] = slot
    for at in range(begin, end):
        w.lone[g.route_indices[at]] = op
    _mark_changed(w, g.route_indices[begin])


@kernel
def leave_bundle(g, w, slot):
    """Take a flow out of its bundle."""
    f = w.slot[slot]
    op, after, before = f["op"], f["mate_next"], f["mate_prev"]
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    holder = NIL
    if after != NIL:
        w.slot[after]["mate_prev"] = before
        holder = w.slot[after]["op"]
    if before != NIL:
        w.slot[before]["mate_next"] = after
    else:
        for at in range(begin, end):
            w.lone[g.route_indices[at]] = holder
    if before != NIL or after != NIL:
        _mark_changed(w, g.route_indices[begin])


@kernel
def set_bundle(g, w, r, op, at, now_s):
    """Give each flow of the bundle with ``op`` at its head its part of what a lone one would have.

    Where that is below the smallest float they never end, which the loop finds when nothing else is left.
    """
    n = 0
    head = w.member[op]["slot"]
    slot = head
    while slot != NIL:
        n += 1
        slot = w.slot[slot]["mate_next"]
    rate = lone_rate(g, w, op) / n
    slot = head
    while slot != NIL:
        f = w.slot[slot]
        if f["rate"] != rate or rate == 0.0:
            f["remaining"] -= f["rate"] * (now_s - f["since_s"])
            f["since_s"] = now_s
            f["rate"] = rate
            note_rate(r, w.counter, f, at)
            heap_set(w, slot, flow_end_s(w, slot))
        slot = f["mate_next"]


@kernel
def link_flow(g, w, slot):
    """Enter a flow in the lists of the links it crosses."""
    f = w.slot[slot]
    op = f["op"]
    begin, end = w.op[op]["route"], w.op[op + 1]["route"]
    p = slot * w.max_hops
    f["first"] = p
    f["n_hops"] = end - begin
    f["new_rate"] = 0.0
    f["bottleneck"] = NIL
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
        b["used"] += hop["count"] * f["rate"]
        if head != NIL:
            w.hop[head]["prev"] = p
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
def unlist_alone(w, slot):
    """Make the only flow in the lists of its links a bundle of one."""
    f = w.slot[slot]
    b = w.link[f["bottleneck"]]
    b["mate_head"] = NIL
    b["n_mates"] = 0
    f["mate_next"] = NIL
    f["mate_prev"] = NIL
    for p in range(f["first"], f["first"] + f["n_hops"]):
        link = w.hop[p]["link"]
        _empty(w, link)
        w.lone[link] = f["op"]


@kernel
def _empty(w, link):
    """Leave no flow in the list of a link."""
    b = w.link[link]
    b["head"] = NIL
    b["used"] = 0.0
    b["n_updates"] = 0
    w.lone[link] = NIL


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
            _empty(w, hop["link"])
            continue
        b["used"] -= hop["count"] * f["rate"]
        b["n_updates"] += 1
        _mark_changed(w, hop["link"])


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
