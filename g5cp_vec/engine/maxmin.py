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
    BOTTLENECK,
    ERR_NO_PROGRESS,
    FASTEST,
    HEAD,
    LEVEL,
    LINK_STAMP,
    MATE_HEAD,
    MATE_NEXT,
    MATE_PREV,
    N_ADDED,
    N_FLOWS,
    N_LINK_VISITS,
    N_MATES,
    N_MATES_AFFECTED,
    N_OPENINGS,
    N_REMOVED,
    N_SOLVES,
    N_UPDATES,
    NEW_BOTTLENECK,
    NEW_RATE,
    NEXT,
    NONE,
    OK,
    OP_STAMP,
    PREV,
    RATE,
    RESIDUAL,
    STAMP,
    USED,
    WEIGHT,
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
    head = w.link_int[link, MATE_HEAD]
    w.op_int[op, BOTTLENECK] = link
    w.op_int[op, MATE_NEXT] = head
    w.op_int[op, MATE_PREV] = NONE
    if head != NONE:
        w.op_int[head, MATE_PREV] = op
    w.link_int[link, MATE_HEAD] = op
    w.link_int[link, N_MATES] += 1


@kernel
def _unlink_mate(w, op):
    link = w.op_int[op, BOTTLENECK]
    after, before = w.op_int[op, MATE_NEXT], w.op_int[op, MATE_PREV]
    if before == NONE:
        w.link_int[link, MATE_HEAD] = after
    else:
        w.op_int[before, MATE_NEXT] = after
    if after != NONE:
        w.op_int[after, MATE_PREV] = before
    w.link_int[link, N_MATES] -= 1
    w.op_int[op, BOTTLENECK] = NONE


@kernel
def link_flow(g, w, op):
    """Enter flow ``op``, still at rate 0, in the lists of the links it crosses."""
    w.op_real[op, RATE] = 0.0
    w.op_real[op, NEW_RATE] = -1.0
    w.op_int[op, BOTTLENECK] = NONE
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        head = w.link_int[link, HEAD]
        w.entry[p, NEXT] = head
        w.entry[p, PREV] = NONE
        if head != NONE:
            w.entry[head, PREV] = p
        w.link_int[link, HEAD] = p
        w.link_int[link, N_FLOWS] += 1


@kernel
def unlink_flow(g, w, op):
    """Take flow ``op`` out of the lists of the links it crosses, and its rate out of their sums."""
    _unlink_mate(w, op)
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        link = g.route_indices[p]
        after, before = w.entry[p, NEXT], w.entry[p, PREV]
        if before == NONE:
            w.link_int[link, HEAD] = after
        else:
            w.entry[before, NEXT] = after
        if after != NONE:
            w.entry[after, PREV] = before
        w.link_int[link, N_FLOWS] -= 1
        if w.link_int[link, N_FLOWS] == 0:
            w.link_real[link, USED], w.link_int[link, N_UPDATES] = 0.0, 0
        else:
            w.link_real[link, USED] -= g.route_count[p] * w.op_real[op, RATE]
            w.link_int[link, N_UPDATES] += 1


@kernel
def commit_rate(g, w, op):
    """Make the new rate and bottleneck of a flow its rate and bottleneck."""
    change = w.op_real[op, NEW_RATE] - w.op_real[op, RATE]
    if w.op_int[op, BOTTLENECK] != w.op_int[op, NEW_BOTTLENECK]:
        if w.op_int[op, BOTTLENECK] != NONE:
            _unlink_mate(w, op)
        _link_mate(w, op, w.op_int[op, NEW_BOTTLENECK])
    w.link_real[w.op_int[op, BOTTLENECK], LEVEL] = w.op_real[op, NEW_RATE]
    w.op_real[op, RATE] = w.op_real[op, NEW_RATE]
    if change != 0.0:
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            w.link_real[link, USED] += g.route_count[p] * change
            w.link_int[link, N_UPDATES] += 1


@kernel
def _refresh_used(g, w, link):
    """Sum the rates of a link's flows anew."""
    used = 0.0
    p = w.link_int[link, HEAD]
    while p != NONE:
        used += g.route_count[p] * w.op_real[g.route_op[p], RATE]
        p = w.entry[p, NEXT]
    w.link_real[link, USED], w.link_int[link, N_UPDATES] = used, 0


@kernel
def _affect(w, op, stamp, n_affected):
    """Add a flow to the affected set unless it is there; return the set's size."""
    if w.op_int[op, OP_STAMP] == stamp:
        return n_affected
    w.op_int[op, OP_STAMP] = stamp
    w.affected[n_affected] = op
    return n_affected + 1


@kernel
def _affect_mates(w, link, stamp, n_affected):
    """Add the flows whose bottleneck is ``link`` to the affected set; return its new size."""
    op = w.link_int[link, MATE_HEAD]
    while op != NONE:
        n_affected = _affect(w, op, stamp, n_affected)
        op = w.op_int[op, MATE_NEXT]
    return n_affected


@kernel
def _alone(g, w, op):
    """Whether no other flow crosses any link of ``op``."""
    for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
        if w.link_int[g.route_indices[p], N_FLOWS] != 1:
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
            w.op_int[op, NEW_BOTTLENECK] = link
    w.op_real[op, NEW_RATE] = rate


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
        w.op_real[op, NEW_RATE] = -1.0
        for p in range(g.route_indptr[op], g.route_indptr[op + 1]):
            link = g.route_indices[p]
            if w.link_int[link, LINK_STAMP] != round_:
                w.link_int[link, LINK_STAMP] = round_
                w.links[n_links] = link
                n_links += 1
                if w.link_int[link, N_UPDATES] > MAX_UPDATES:
                    _refresh_used(g, w, link)
                w.link_real[link, RESIDUAL] = capacity[g.link_capacity[link]] - w.link_real[link, USED]
                w.link_real[link, WEIGHT] = 0.0
                w.link_real[link, FASTEST] = 0.0
                w.link_int[link, N_MATES_AFFECTED] = 0
            w.link_real[link, RESIDUAL] += g.route_count[p] * w.op_real[op, RATE]
            w.link_real[link, WEIGHT] += g.route_count[p]
            if w.op_int[op, BOTTLENECK] == link:
                w.link_int[link, N_MATES_AFFECTED] += 1
    return n_links


@kernel
def _freeze_flow(g, w, op, link, share):
    w.op_real[op, NEW_RATE] = share
    w.op_int[op, NEW_BOTTLENECK] = link
    for q in range(g.route_indptr[op], g.route_indptr[op + 1]):
        other = g.route_indices[q]
        w.link_real[other, WEIGHT] -= g.route_count[q]
        w.link_real[other, RESIDUAL] -= g.route_count[q] * share
        w.link_real[other, FASTEST] = max(w.link_real[other, FASTEST], share)


@kernel
def _freeze_link(g, w, link, stamp, share, n_pending):
    """Freeze the unfrozen affected flows on ``link`` at ``share``; others that are faster must slow down.

    Returns the number of flows frozen and of flows noted in ``w.pending``.
    """
    n_frozen = 0
    bound = share * (1.0 + CHECK_RTOL)
    p = w.link_int[link, HEAD]
    while p != NONE:
        op = g.route_op[p]
        if w.op_int[op, OP_STAMP] == stamp:
            if w.op_real[op, NEW_RATE] < 0.0:
                _freeze_flow(g, w, op, link, share)
                n_frozen += 1
        elif w.op_real[op, RATE] > bound and w.op_int[op, OP_STAMP] != -stamp:
            w.op_int[op, OP_STAMP] = -stamp
            w.pending[n_pending] = op
            n_pending += 1
        p = w.entry[p, NEXT]
    return n_frozen, n_pending


@kernel
def _sift_link(w, pos, n_open):
    """Sink the link at ``pos`` of the heap of links ordered by share."""
    link, share = w.links[pos], w.link_share[pos]
    while True:
        child = 2 * pos + 1
        if child >= n_open:
            break
        if child + 1 < n_open and w.link_share[child + 1] < w.link_share[child]:
            child += 1
        if w.link_share[child] >= share:
            break
        w.links[pos], w.link_share[pos] = w.links[child], w.link_share[child]
        pos = child
    w.links[pos], w.link_share[pos] = link, share


@kernel
def _fill(g, w, stamp, n_affected, n_links):
    """Fill the affected flows progressively; return the status (OK, ERR_NO_PROGRESS) and the number pending.

    Links wait in a heap by the share they can give each unfrozen flow. Freezing flows below a link's share only
    raises it, so a stale entry is too low and is put right when it comes to the top.
    """
    for pos in range(n_links):
        link = w.links[pos]
        w.link_share[pos] = w.link_real[link, RESIDUAL] / w.link_real[link, WEIGHT]
    for pos in range(n_links // 2 - 1, -1, -1):
        _sift_link(w, pos, n_links)
    n_left, n_open, n_pending = n_affected, n_links, 0
    floor = 0.0
    while n_left > 0:
        if n_open == 0:
            return ERR_NO_PROGRESS, n_pending
        w.count[N_LINK_VISITS] += 1
        link = w.links[0]
        is_open = w.link_real[link, WEIGHT] > 0.5
        if is_open:
            share = w.link_real[link, RESIDUAL] / w.link_real[link, WEIGHT]
            if share > w.link_share[0] * (1.0 + TIE_RTOL) and share > floor * (1.0 + TIE_RTOL):
                w.link_share[0] = share
                _sift_link(w, 0, n_open)
                continue
            # Equal up to rounding is equal; and rounding, or capacity that unaffected flows still hold, may leave
            # less than was given before.
            if share > floor * (1.0 + TIE_RTOL):
                floor = share
            n_frozen, n_pending = _freeze_link(g, w, link, stamp, floor, n_pending)
            n_left -= n_frozen
        # Done with: behind the open links, where the check still finds it.
        n_open -= 1
        w.links[0], w.link_share[0] = w.links[n_open], w.link_share[n_open]
        w.links[n_open] = link
        _sift_link(w, 0, n_open)
    return OK, n_pending


@kernel
def _check(g, w, capacity, stamp, n_affected, n_links, n_pending):
    """Add every unaffected flow that has lost its bottleneck or must slow down; return the set's size."""
    for i in range(n_pending):
        n_affected = _affect(w, w.pending[i], stamp, n_affected)
    for i in range(n_links):
        link = w.links[i]
        if w.link_int[link, N_MATES] == w.link_int[link, N_MATES_AFFECTED]:
            continue
        is_full = w.link_real[link, RESIDUAL] <= CHECK_RTOL * capacity[g.link_capacity[link]]
        if not is_full or w.link_real[link, FASTEST] > w.link_real[link, LEVEL] * (1.0 + CHECK_RTOL):
            n_affected = _affect_mates(w, link, stamp, n_affected)
    return n_affected


@kernel
def solve_rates(g, w, capacity):
    """Find the rates after flows were linked (``w.added``) and unlinked (``w.removed``).

    Parameters
    ----------
    g : Graph
    w : Workspace
        RATE holds the previous allocation; NEW_RATE and NEW_BOTTLENECK of the affected flows are written,
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
        w.count[N_OPENINGS] += 1
        n_links = _open_links(g, w, capacity, w.count[N_OPENINGS], n_affected)
        status, n_pending = _fill(g, w, stamp, n_affected, n_links)
        if status != OK:
            return status, n_affected
        n_before = n_affected
        n_affected = _check(g, w, capacity, stamp, n_affected, n_links, n_pending)
        if n_affected == n_before:
            return OK, n_affected
