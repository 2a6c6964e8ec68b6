"""Max-min fair rates, updated where they change.

The problem: rates r >= 0 with sum over the flows on a link of count * r <= capacity for every link, such that
every flow crosses a saturated link on which no flow is faster (its *bottleneck*). That condition determines the
rates uniquely, so an allocation that satisfies it everywhere is the answer however it was found.

The algorithm: flows are kept in a list per link. When some start or end, only the flows whose bottleneck is on a
touched link are re-solved, by progressive filling against what the others leave. Then every touched link is
checked: a flow left alone that has lost its bottleneck, or is faster than a flow frozen on the same link,
joins the set and the filling is repeated. The set only grows, so this ends, at the latest with all flows in it.

Not modelled: weights, RTT unfairness, losses.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    ERR_NO_PROGRESS,
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


@kernel
def link_flow(g, w, op):
    """Enter flow ``op`` in the lists of the links it crosses."""
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
    """Take flow ``op`` out of the lists of the links it crosses."""
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        after = w.entry_next[p]
        before = w.entry_prev[p]
        if before == NONE:
            w.link_head[link] = after
        else:
            w.entry_next[before] = after
        if after != NONE:
            w.entry_prev[after] = before
        w.link_n[link] -= 1


@kernel
def _add_bottlenecked(g, w, link, stamp, n_affected):
    """Add the flows whose bottleneck is ``link`` to the affected set; return its new size."""
    p = w.link_head[link]
    while p != NONE:
        op = g.route_op[p]
        if w.bottleneck[op] == link and w.op_stamp[op] != stamp:
            w.op_stamp[op] = stamp
            w.affected[n_affected] = op
            n_affected += 1
        p = w.entry_next[p]
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
            w.bottleneck[op] = link
    w.new_rate[op] = rate


@kernel
def _seed(g, w, capacity, stamp):
    """Collect the flows that a change touches directly; return how many need a joint solution.

    New flows that share nothing are solved on the spot and sit at the end of ``w.added``'s range, outside the set.
    """
    n_affected = 0
    for i in range(w.count[N_REMOVED]):
        op = w.removed[i]
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            if w.link_n[link] > 0:
                n_affected = _add_bottlenecked(g, w, link, stamp, n_affected)
    for i in range(w.count[N_ADDED]):
        op = w.added[i]
        if _alone(g, w, op):
            _solve_alone(g, w, capacity, op)
            continue
        if w.op_stamp[op] != stamp:
            w.op_stamp[op] = stamp
            w.affected[n_affected] = op
            n_affected += 1
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            n_affected = _add_bottlenecked(g, w, g.route_indices[p], stamp, n_affected)
    return n_affected


@kernel
def _open_links(g, w, capacity, stamp, n_affected, n_links):
    """Capacity left by unaffected flows, and weight of affected ones, on every link these cross."""
    for i in range(n_affected):
        op = w.affected[i]
        w.new_rate[op] = -1.0
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            if w.link_stamp[link] != stamp:
                w.link_stamp[link] = stamp
                w.links[n_links] = link
                n_links += 1
    for i in range(n_links):
        link = w.links[i]
        left = capacity[g.link_capacity[link]]
        weight = 0.0
        p = w.link_head[link]
        while p != NONE:
            op = g.route_op[p]
            if w.op_stamp[op] == stamp:
                weight += g.route_count[p]
            else:
                left -= g.route_count[p] * w.rate[op]
            p = w.entry_next[p]
        w.residual[link] = left
        w.weight[link] = weight
        w.level[link] = np.inf
    return n_links


@kernel
def _freeze_link(g, w, link, stamp, share):
    """Freeze the unfrozen affected flows on ``link`` at ``share``; return how many."""
    w.level[link] = share
    n_frozen = 0
    p = w.link_head[link]
    while p != NONE:
        op = g.route_op[p]
        if w.op_stamp[op] == stamp and w.new_rate[op] < 0.0:
            w.new_rate[op] = share
            w.bottleneck[op] = link
            n_frozen += 1
            for q in range(g.route_indptr[op], g.route_indptr[op + 1]):
                other = g.route_indices[q]
                w.weight[other] -= g.route_count[q]
                w.residual[other] -= g.route_count[q] * share
        p = w.entry_next[p]
    return n_frozen


@kernel
def _fill(g, w, stamp, n_affected, n_links):
    """Progressive filling of the affected flows. Status: OK, ERR_NO_PROGRESS."""
    n_left = n_affected
    n_open = n_links
    floor = 0.0
    while n_left > 0:
        share, tightest = np.inf, NONE
        kept = 0
        # Links without an unfrozen flow left move behind the open ones, so later rounds do not see them.
        for i in range(n_open):
            link = w.links[i]
            if w.weight[link] > 0.5:
                if tightest == NONE or w.residual[link] / w.weight[link] < share:
                    share, tightest = w.residual[link] / w.weight[link], link
                w.links[i] = w.links[kept]
                w.links[kept] = link
                kept += 1
        n_open = kept
        if n_open == 0:
            return ERR_NO_PROGRESS
        w.count[N_LINK_VISITS] += n_open
        # Rounding, or capacity that unaffected flows still hold, may leave less than was given before.
        share = max(share, floor)
        floor = share
        bound = share * (1.0 + TIE_RTOL)
        # Frozen whatever rounding says of it, so every round makes progress.
        n_left -= _freeze_link(g, w, tightest, stamp, share)
        for i in range(n_open):
            link = w.links[i]
            if w.weight[link] > 0.5 and w.residual[link] <= bound * w.weight[link]:
                n_left -= _freeze_link(g, w, link, stamp, share)
    return OK


@kernel
def _check(g, w, capacity, stamp, n_affected, n_links):
    """Add every unaffected flow that the new rates have robbed of its bottleneck or must slow; return the set's size."""
    for i in range(n_links):
        link = w.links[i]
        used = 0.0
        fastest = 0.0
        n_others = 0
        p = w.link_head[link]
        while p != NONE:
            op = g.route_op[p]
            if w.op_stamp[op] == stamp and w.new_rate[op] >= 0.0:
                used += g.route_count[p] * w.new_rate[op]
                fastest = max(fastest, w.new_rate[op])
            else:
                used += g.route_count[p] * w.rate[op]
                n_others += 1
            p = w.entry_next[p]
        if n_others == 0:
            continue
        full = used >= capacity[g.link_capacity[link]] * (1.0 - CHECK_RTOL)
        p = w.link_head[link]
        while p != NONE:
            op = g.route_op[p]
            if w.op_stamp[op] != stamp:
                rate = w.rate[op]
                lost = w.bottleneck[op] == link and (not full or fastest > rate * (1.0 + CHECK_RTOL))
                if lost or rate > w.level[link] * (1.0 + CHECK_RTOL):
                    w.op_stamp[op] = stamp
                    w.new_rate[op] = -1.0
                    w.affected[n_affected] = op
                    n_affected += 1
            p = w.entry_next[p]
    return n_affected


@kernel
def solve_rates(g, w, capacity):
    """Bring the rates up to date after flows were linked (``w.added``) and unlinked (``w.removed``).

    Parameters
    ----------
    g : Graph
    w : Workspace
        ``rate`` holds the previous allocation; ``new_rate`` and ``bottleneck`` of the affected flows are written,
        the first ``n`` of ``affected`` name them (new flows that share nothing are solved but not listed).
    capacity : ndarray of float64, shape (n_capacity_ids,)

    Returns
    -------
    status : int
        OK or ERR_NO_PROGRESS.
    n : int
        Size of the affected set.

    Notes
    -----
    One round costs O(links touched + flows on them); rounds = distinct fairness levels among the affected.

    References
    ----------
    Bertsekas, Gallager, Data Networks, 2nd ed., section 6.5.2 (progressive filling and the bottleneck condition).
    """
    w.count[STAMP] += 1
    stamp = w.count[STAMP]
    n_affected = _seed(g, w, capacity, stamp)
    if n_affected == 0:
        return OK, 0
    n_links = 0
    while True:
        w.count[N_SOLVES] += 1
        n_links = _open_links(g, w, capacity, stamp, n_affected, n_links)
        status = _fill(g, w, stamp, n_affected, n_links)
        if status != OK:
            return status, n_affected
        n_before = n_affected
        n_affected = _check(g, w, capacity, stamp, n_affected, n_links)
        if n_affected == n_before:
            return OK, n_affected
