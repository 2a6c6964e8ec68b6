"""Max-min fair rates, updated where they change.

The problem: rates r >= 0 with sum over the flows on a link of count * r <= capacity for every link, such that
every flow crosses a saturated link on which no flow is faster (its *bottleneck*). That condition determines the
rates uniquely, so an allocation that satisfies it everywhere is the answer however it was found.

The algorithm: every link knows the sum of its rates and the flows it is the bottleneck of. When flows start or end,
only flows whose bottleneck is on a touched link are re-solved, by progressive filling against what the others leave.
Then the links they cross are checked: flows left alone whose link is no longer full, or no longer bounds the
fastest, and flows faster than a link that has just filled up, join the set, and the filling is repeated. The set only
grows, so this ends, at the latest with all flows in it. The work is proportional to the affected flows and to the
flows on the links that fill up, not to all flows.

Not modelled: weights, RTT unfairness, losses.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    ERR_NO_PROGRESS,
    LINK_STAMP,
    N_ADDED,
    N_LINK_VISITS,
    N_REMOVED,
    N_SOLVES,
    NONE,
    OK,
    STAMP,
)

# Shares this close saturate in one round. A missed tie costs a round, nothing else; it is far below the
# 1e-12 within which two event times are one instant.
TIE_RTOL = 1e-14
# A link this close to full counts as full, and a rate this close to another as equal, when allocations are checked.
CHECK_RTOL = 1e-13
# The sum of a link's rates is kept by adding and subtracting; it is made anew after so many changes, so that
# roundings do not pile up.
MAX_UPDATES = 256


@kernel
def _link_mate(w, op, link):
    """Enter ``op`` in the list of flows whose bottleneck is ``link``."""
    head = w.mate_head[link]
    w.bottleneck[op] = link
    w.mate_next[op] = head
    w.mate_prev[op] = NONE
    if head != NONE:
        w.mate_prev[head] = op
    w.mate_head[link] = op
    w.mate_n[link] += 1


@kernel
def _unlink_mate(w, op):
    link = w.bottleneck[op]
    after, before = w.mate_next[op], w.mate_prev[op]
    if before == NONE:
        w.mate_head[link] = after
    else:
        w.mate_next[before] = after
    if after != NONE:
        w.mate_prev[after] = before
    w.mate_n[link] -= 1
    w.bottleneck[op] = NONE


@kernel
def link_flow(g, w, op):
    """Enter flow ``op``, still at rate 0, in the lists of the links it crosses."""
    w.rate[op] = 0.0
    w.new_rate[op] = -1.0
    w.bottleneck[op] = NONE
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        head = w.link_head[link]
        w.entry_next[p] = head
        w.entry_prev[p] = NONE
        if head != NONE:
            w.entry_prev[head] = p
        w.link_head[link] = p
        w.link_n[link] += 1


@kernel
def unlink_flow(g, w, op):
    """Take flow ``op`` out of the lists of the links it crosses, and its rate out of their sums."""
    _unlink_mate(w, op)
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        after, before = w.entry_next[p], w.entry_prev[p]
        if before == NONE:
            w.link_head[link] = after
        else:
            w.entry_next[before] = after
        if after != NONE:
            w.entry_prev[after] = before
        w.link_n[link] -= 1
        if w.link_n[link] == 0:
            w.link_used[link], w.link_updates[link] = 0.0, 0
        else:
            w.link_used[link] -= g.route_count[p] * w.rate[op]
            w.link_updates[link] += 1


@kernel
def commit_rate(g, w, op):
    """Make the new rate and bottleneck of a flow its rate and bottleneck."""
    change = w.new_rate[op] - w.rate[op]
    if w.bottleneck[op] != w.new_bottleneck[op]:
        if w.bottleneck[op] != NONE:
            _unlink_mate(w, op)
        _link_mate(w, op, w.new_bottleneck[op])
    w.link_level[w.bottleneck[op]] = w.new_rate[op]
    w.rate[op] = w.new_rate[op]
    if change != 0.0:
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            w.link_used[link] += g.route_count[p] * change
            w.link_updates[link] += 1


@kernel
def _refresh_used(g, w, link):
    """Sum the rates of a link's flows anew."""
    used = 0.0
    p = w.link_head[link]
    while p != NONE:
        used += g.route_count[p] * w.rate[g.route_op[p]]
        p = w.entry_next[p]
    w.link_used[link], w.link_updates[link] = used, 0


@kernel
def _affect(w, op, stamp, n_affected):
    """Add a flow to the affected set unless it is there; return the set's size."""
    if w.op_stamp[op] == stamp:
        return n_affected
    w.op_stamp[op] = stamp
    w.affected[n_affected] = op
    return n_affected + 1


@kernel
def _affect_mates(w, link, stamp, n_affected):
    """Add the flows whose bottleneck is ``link`` to the affected set; return its new size."""
    op = w.mate_head[link]
    while op != NONE:
        n_affected = _affect(w, op, stamp, n_affected)
        op = w.mate_next[op]
    return n_affected


@kernel
def _alone(g, w, op):
    """Whether no other flow crosses any link of ``op``."""
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        if w.link_n[g.route_indices[p]] != 1:
            return False
    return True


@kernel
def _solve_alone(g, w, capacity, op):
    """Rate of a flow that shares nothing: its narrowest link."""
    rate = np.inf
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        share = capacity[g.link_capacity[link]] / g.route_count[p]
        if share < rate:
            rate = share
            w.new_bottleneck[op] = link
    w.new_rate[op] = rate


@kernel
def _seed(g, w, capacity, stamp):
    """Collect the flows that a change touches directly; return how many need a joint solution.

    New flows that share nothing are solved on the spot and stay outside the set.
    """
    n_affected = 0
    for i in range(w.count[N_REMOVED]):
        op = w.removed[i]
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            n_affected = _affect_mates(w, g.route_indices[p], stamp, n_affected)
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if _alone(g, w, op):
            _solve_alone(g, w, capacity, op)
            continue
        n_affected = _affect(w, op, stamp, n_affected)
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            n_affected = _affect_mates(w, g.route_indices[p], stamp, n_affected)
    return n_affected


@kernel
def _open_links(g, w, capacity, round_, n_affected):
    """Give back the affected flows' rates to the links they cross; return how many links these are."""
    n_links = 0
    for i in range(n_affected):
        op = w.affected[i]
        w.new_rate[op] = -1.0
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            if w.link_stamp[link] != round_:
                w.link_stamp[link] = round_
                w.links[n_links] = link
                n_links += 1
                if w.link_updates[link] > MAX_UPDATES:
                    _refresh_used(g, w, link)
                w.residual[link] = capacity[g.link_capacity[link]] - w.link_used[link]
                w.weight[link] = 0.0
                w.fastest[link] = 0.0
                w.mate_affected[link] = 0
            w.residual[link] += g.route_count[p] * w.rate[op]
            w.weight[link] += g.route_count[p]
            if w.bottleneck[op] == link:
                w.mate_affected[link] += 1
    return n_links


@kernel
def _freeze_flow(g, w, op, link, share):
    w.new_rate[op] = share
    w.new_bottleneck[op] = link
    for q in range(g.route_indptr[op], g.route_indptr[op + 1]):
        other = g.route_indices[q]
        w.weight[other] -= g.route_count[q]
        w.residual[other] -= g.route_count[q] * share
        w.fastest[other] = max(w.fastest[other], share)


@kernel
def _freeze_link(g, w, link, stamp, share, n_pending):
    """Freeze the unfrozen affected flows on ``link`` at ``share``; others that are faster must slow down.

    Returns the number of flows frozen and of flows noted in ``w.pending``.
    """
    n_frozen = 0
    bound = share * (1.0 + CHECK_RTOL)
    p = w.link_head[link]
    while p != NONE:
        op = g.route_op[p]
        if w.op_stamp[op] == stamp:
            if w.new_rate[op] < 0.0:
                _freeze_flow(g, w, op, link, share)
                n_frozen += 1
        elif w.rate[op] > bound and w.op_stamp[op] != -stamp:
            w.op_stamp[op] = -stamp
            w.pending[n_pending] = op
            n_pending += 1
        p = w.entry_next[p]
    return n_frozen, n_pending


@kernel
def _fill(g, w, stamp, n_affected, n_links):
    """Fill the affected flows progressively; return the status (OK, ERR_NO_PROGRESS) and the number pending."""
    n_left, n_open, n_pending = n_affected, n_links, 0
    floor = 0.0
    while n_left > 0:
        share, tightest = np.inf, NONE
        kept = 0
        # Links without an unfrozen flow left move behind the open ones, so later rounds do not see them.
        for i in range(n_open):
            link = w.links[i]
            if w.weight[link] > 0.5:
                if tightest == NONE or w.residual[link] < share * w.weight[link]:
                    share, tightest = w.residual[link] / w.weight[link], link
                w.links[i] = w.links[kept]
                w.links[kept] = link
                kept += 1
        n_open = kept
        if n_open == 0:
            return ERR_NO_PROGRESS, n_pending
        w.count[N_LINK_VISITS] += n_open
        # Rounding, or capacity that unaffected flows still hold, may leave less than was given before.
        share = max(share, floor)
        floor = share
        bound = share * (1.0 + TIE_RTOL)
        # Frozen whatever rounding says of it, so every round makes progress.
        n_frozen, n_pending = _freeze_link(g, w, tightest, stamp, share, n_pending)
        n_left -= n_frozen
        for i in range(n_open):
            link = w.links[i]
            if w.weight[link] > 0.5 and w.residual[link] <= bound * w.weight[link]:
                n_frozen, n_pending = _freeze_link(g, w, link, stamp, share, n_pending)
                n_left -= n_frozen
    return OK, n_pending


@kernel
def _check(g, w, capacity, stamp, n_affected, n_links, n_pending):
    """Add every unaffected flow that has lost its bottleneck or must slow down; return the set's size."""
    for i in range(n_pending):
        n_affected = _affect(w, w.pending[i], stamp, n_affected)
    for i in range(n_links):
        link = w.links[i]
        if w.mate_n[link] == w.mate_affected[link]:
            continue
        is_full = w.residual[link] <= CHECK_RTOL * capacity[g.link_capacity[link]]
        if not is_full or w.fastest[link] > w.link_level[link] * (1.0 + CHECK_RTOL):
            n_affected = _affect_mates(w, link, stamp, n_affected)
    return n_affected


@kernel
def solve_rates(g, w, capacity):
    """Find the rates after flows were linked (``w.added``) and unlinked (``w.removed``).

    Parameters
    ----------
    g : Graph
    w : Workspace
        ``rate`` holds the previous allocation; ``new_rate`` and ``new_bottleneck`` of the affected flows are written,
        the first ``n`` of ``affected`` name them (new flows that share nothing are solved but not listed).
        `commit_rate` makes them the current ones.
    capacity : ndarray of float64, shape (n_capacity_ids,)

    Returns
    -------
    status : int
        OK or ERR_NO_PROGRESS.
    n : int
        Size of the affected set.

    References
    ----------
    Bertsekas, Gallager, Data Networks, 2nd ed., section 6.5.2 (progressive filling and the bottleneck condition).
    """
    w.count[STAMP] += 1
    stamp = w.count[STAMP]
    n_affected = _seed(g, w, capacity, stamp)
    if n_affected == 0:
        return OK, 0
    while True:
        w.count[N_SOLVES] += 1
        # Links are opened afresh each time round; flows stay in the set.
        w.count[LINK_STAMP] += 1
        n_links = _open_links(g, w, capacity, w.count[LINK_STAMP], n_affected)
        status, n_pending = _fill(g, w, stamp, n_affected, n_links)
        if status != OK:
            return status, n_affected
        n_before = n_affected
        n_affected = _check(g, w, capacity, stamp, n_affected, n_links, n_pending)
        if n_affected == n_before:
            return OK, n_affected
