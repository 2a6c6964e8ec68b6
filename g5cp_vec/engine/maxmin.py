"""Max-min fair rates, updated where they change.

The problem: rates r >= 0 with sum over the flows on a link of count * r <= capacity for every link, such that
every flow crosses a saturated link on which no flow is faster (its *bottleneck*). That condition determines the
rates uniquely, so an allocation that satisfies it everywhere is the answer however it was found.

The algorithm: every link knows the sum of its rates and the flows it is the bottleneck of (its *mates*). When flows
are listed or end, these and the mates of the links they touch are solved anew, by progressive filling against what
all others leave; the others join while the water rises, at the moment when it shows that they must. A link that
fills up below the rate of other flows on it takes these in. A link whose mates are outside, and that is not full
when the water reaches their rate, takes them in too. Whoever joins is faster than the water, so nothing that was
frozen before has to be taken back, and one filling is enough. The work is proportional to the affected flows and to
the flows on the links that fill up, not to all flows.

Not modelled: weights, RTT unfairness, losses.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    ERR_NO_PROGRESS,
    ERR_NOT_FINITE,
    N_ADDED,
    N_AFFECTED,
    N_CHANGED,
    N_LINK_VISITS,
    N_OPEN,
    N_SOLVES,
    NIL,
    OK,
    STAMP,
)
from g5cp_vec.engine.flows import MAX_UPDATES, refresh_used

# Shares this close saturate in one round. A missed tie costs a round, nothing else; it is far below the
# 1e-12 within which two event times are one instant.
TIE_RTOL = 1e-14
# A link this close to full counts as full, and a rate this close to another as equal, where others might join.
CHECK_RTOL = 1e-13


@kernel
def _place(w, pos, link, key):
    w.open_links[pos]["link"] = link
    w.open_links[pos]["key"] = key
    w.link[link]["open_pos"] = pos


@kernel
def _sift_up(w, pos, link, key):
    """Move the hole at ``pos`` of the heap of open links up to where ``link`` belongs, and place it there."""
    while pos > 0:
        parent = (pos - 1) >> 1
        if w.open_links[parent]["key"] <= key:
            break
        _place(w, pos, w.open_links[parent]["link"], w.open_links[parent]["key"])
        pos = parent
    _place(w, pos, link, key)


@kernel
def _sift_down(w, pos, link, key):
    """Move the hole at ``pos`` of the heap of open links down to where ``link`` belongs, and place it there."""
    n = w.count[N_OPEN]
    child = 2 * pos + 1
    while child + 1 < n:
        child += w.open_links[child + 1]["key"] < w.open_links[child]["key"]
        if w.open_links[child]["key"] >= key:
            break
        _place(w, pos, w.open_links[child]["link"], w.open_links[child]["key"])
        pos = child
        child = 2 * pos + 1
    if child + 1 == n and w.open_links[child]["key"] < key:
        _place(w, pos, w.open_links[child]["link"], w.open_links[child]["key"])
        pos = child
    _place(w, pos, link, key)


@kernel
def _key(w, link):
    """Water level at which something happens on a link: it is full, or its mates outside wonder whether it is."""
    b = w.link[link]
    key = np.inf
    if b["weight"] > 0.5:
        key = b["residual"] / b["weight"]
    if b["n_mates"] > 0:
        # Links that fill up at the same level go first: they may leave nothing to wonder about.
        key = min(key, b["level"] * (1.0 + CHECK_RTOL))
    return key


@kernel
def _affect(w, slot, stamp):
    """Add a flow to the affected set unless it is there, and give back its rate to the links it crosses.

    Links come to the end of the heap of open links, above any key; `_order` or `_queue_links` must follow.
    """
    f = w.slot[slot]
    if f["new_rate"] != 0.0:
        return
    f["new_rate"] = -1.0
    w.affected[w.count[N_AFFECTED]] = slot
    w.count[N_AFFECTED] += 1
    for p in range(f["first"], f["first"] + f["n_hops"]):
        hop = w.hop[p]
        link = hop["link"]
        b = w.link[link]
        if b["stamp"] != stamp:
            if b["n_updates"] > MAX_UPDATES:
                refresh_used(w, link)
            if b["n_mates"] == 0:
                b["level"] = np.inf  # nothing is known of the fastest flow on it
            b["stamp"] = stamp
            b["residual"] = b["capacity"] - b["used"]
            b["weight"] = 0.0
            b["open_pos"] = NIL
        b["residual"] += hop["count"] * f["rate"]
        b["weight"] += hop["count"]
        if b["open_pos"] == NIL:
            pos = w.count[N_OPEN]
            w.count[N_OPEN] = pos + 1
            w.open_links[pos]["link"] = link
            w.open_links[pos]["key"] = np.inf
            b["open_pos"] = pos
    if f["bottleneck"] != NIL:
        w.link[f["bottleneck"]]["n_mates"] -= 1


@kernel
def _affect_mates(w, link, stamp):
    """Add the flows whose bottleneck is ``link`` to the affected set."""
    slot = w.link[link]["mate_head"]
    while slot != NIL:
        _affect(w, slot, stamp)
        slot = w.slot[slot]["mate_next"]


@kernel
def _affect_faster(w, link, rate, stamp):
    """Add the flows on ``link`` that are faster than ``rate`` to the affected set."""
    p = w.link[link]["head"]
    while p != NIL:
        if w.slot[w.hop[p]["slot"]]["rate"] > rate:
            _affect(w, w.hop[p]["slot"], stamp)
        p = w.hop[p]["next"]


@kernel
def _lowest_key(w):
    """Give every open link its key; return the lowest, or -1 when a link has mates outside the affected set."""
    w.counter[N_LINK_VISITS] += w.count[N_OPEN]
    lowest, has_mates = np.inf, False
    for pos in range(w.count[N_OPEN]):
        link = w.open_links[pos]["link"]
        key = _key(w, link)
        w.open_links[pos]["key"] = key
        lowest = min(lowest, key)
        has_mates |= w.link[link]["n_mates"] > 0
    return -1.0 if has_mates else lowest


@kernel
def _fill_at_once(w, share):
    """Freeze all affected flows at the lowest share, if all of them cross a link that has no more and nobody joins.

    It takes no heap. Whether it did; if not, nothing has changed.
    """
    n_frozen = 0
    limit = share * (1.0 + TIE_RTOL)
    nobody_joins = share > 0.0
    for pos in range(w.count[N_OPEN]):
        link = w.open_links[pos]["link"]
        if w.open_links[pos]["key"] > limit:
            continue
        p = w.link[link]["head"]
        while p != NIL:
            f = w.slot[w.hop[p]["slot"]]
            if f["new_rate"] < 0.0:
                f["new_rate"] = share
                f["new_bottleneck"] = link
                n_frozen += 1
            elif f["new_rate"] == 0.0 and f["rate"] > share * (1.0 + CHECK_RTOL):
                nobody_joins = False
            p = w.hop[p]["next"]
    if nobody_joins and n_frozen == w.count[N_AFFECTED]:
        return True
    for i in range(w.count[N_AFFECTED]):
        w.slot[w.affected[i]]["new_rate"] = -1.0
    return False


@kernel
def _order(w):
    """Put the open links in order, O(n)."""
    n = w.count[N_OPEN]
    for i in range(n // 2):
        pos = n // 2 - 1 - i
        _sift_down(w, pos, w.open_links[pos]["link"], w.open_links[pos]["key"])


@kernel
def _queue_links(w, begin):
    """Put the links of the affected flows from ``begin`` on to their places among the open ones."""
    for i in range(begin, w.count[N_AFFECTED]):
        f = w.slot[w.affected[i]]
        for p in range(f["first"], f["first"] + f["n_hops"]):
            link = w.hop[p]["link"]
            pos, key = np.int64(w.link[link]["open_pos"]), _key(w, link)
            if key < w.open_links[pos]["key"]:
                _sift_up(w, pos, link, key)


@kernel
def _seed(w, stamp):
    """Begin the affected set with the flows that a change touches directly."""
    for i in range(w.count[N_CHANGED]):
        link = w.changed[i]
        w.link[link]["is_changed"] = 0
        _affect_mates(w, link, stamp)
    w.count[N_CHANGED] = 0
    for i in range(w.count[N_ADDED]):
        slot = w.added[i]
        _affect(w, slot, stamp)
        f = w.slot[slot]
        for p in range(f["first"], f["first"] + f["n_hops"]):
            _affect_mates(w, w.hop[p]["link"], stamp)


@kernel
def _freeze(w, link, share):
    """Freeze the unfrozen affected flows on ``link`` at ``share``; return how many."""
    n_frozen = 0
    p = w.link[link]["head"]
    while p != NIL:
        f = w.slot[w.hop[p]["slot"]]
        if f["new_rate"] < 0.0:
            f["new_rate"] = share
            f["new_bottleneck"] = link
            for q in range(f["first"], f["first"] + f["n_hops"]):
                b = w.link[w.hop[q]["link"]]
                b["weight"] -= w.hop[q]["count"]
                b["residual"] -= w.hop[q]["count"] * share
            n_frozen += 1
        p = w.hop[p]["next"]
    return n_frozen


@kernel
def _is_short(w, link):
    """Whether a link that no unfrozen flow crosses has mates outside and is not full."""
    b = w.link[link]
    return b["n_mates"] > 0 and b["residual"] > CHECK_RTOL * b["capacity"]


@kernel
def _any_short(w):
    for pos in range(w.count[N_OPEN]):
        if _is_short(w, w.open_links[pos]["link"]):
            return True
    return False


@kernel
def _close_first(w):
    """Take the first link out of the heap of open links."""
    w.link[w.open_links[0]["link"]]["open_pos"] = NIL
    n = w.count[N_OPEN] - 1
    w.count[N_OPEN] = n
    if n > 0:
        _sift_down(w, np.int64(0), w.open_links[n]["link"], w.open_links[n]["key"])


@kernel
def _join(w, link, floor, stamp):
    """Take in the flows that the event on ``link`` calls for; return whether there are any."""
    b = w.link[link]
    if b["weight"] < 0.5:
        if not _is_short(w, link):
            return False
        _affect_mates(w, link, stamp)
        return True
    share = b["residual"] / b["weight"]
    if b["n_mates"] > 0 and abs(share - b["level"]) > CHECK_RTOL * b["level"]:
        _affect_mates(w, link, stamp)
        return True
    if max(share, floor) >= b["level"] * (1.0 - CHECK_RTOL):
        return False  # nobody was faster
    n_before = w.count[N_AFFECTED]
    _affect_faster(w, link, max(share, floor) * (1.0 + CHECK_RTOL), stamp)
    return w.count[N_AFFECTED] > n_before


@kernel
def _fill(w, stamp):
    """Fill the affected flows progressively; return the status (OK, ERR_NO_PROGRESS, ERR_NOT_FINITE).

    Open links wait in a heap by the water level at which something happens on them. Freezing flows below a link's
    share only raises it, so a stale key is too low and is put right when it comes to the top.
    """
    n_frozen = 0
    floor = 0.0
    while w.count[N_OPEN] > 0:
        if n_frozen == w.count[N_AFFECTED] and not _any_short(w):
            w.count[N_OPEN] = 0
            break
        w.counter[N_LINK_VISITS] += 1
        first = w.open_links[0]
        link = first["link"]
        key = _key(w, link)
        if key > first["key"] * (1.0 + TIE_RTOL) and key > floor * (1.0 + TIE_RTOL) and key < np.inf:
            _sift_down(w, np.int64(0), link, key)
            continue
        n_before = w.count[N_AFFECTED]
        if _join(w, link, floor, stamp):
            _queue_links(w, n_before)
            continue
        b = w.link[link]
        if b["weight"] > 0.5:
            share = b["residual"] / b["weight"]
            # Equal up to rounding is equal; and rounding, or capacity that unaffected flows still hold, may leave
            # less than was given before.
            if share > floor * (1.0 + TIE_RTOL):
                floor = share
            if not floor > 0.0:
                return ERR_NOT_FINITE
            n_frozen += _freeze(w, link, floor)
        _close_first(w)
    return OK if n_frozen == w.count[N_AFFECTED] else ERR_NO_PROGRESS


@kernel
def solve_rates(w):
    """Find the rates after flows were listed (``w.added``) and unlinked (from the links ``w.changed``).

    Parameters
    ----------
    w : Workspace
        ``rate`` holds the previous allocation; ``new_rate`` and ``new_bottleneck`` of the affected flows are
        written, which ``w.affected`` names; all flows just listed are among them. `commit_rate` makes them the
        current ones.

    Returns
    -------
    int
        OK, ERR_NO_PROGRESS, or ERR_NOT_FINITE where a share is below the smallest float.

    References
    ----------
    Bertsekas, Gallager, Data Networks, 2nd ed., section 6.5.2 (progressive filling and the bottleneck condition).
    """
    w.counter[STAMP] += 1
    stamp = w.counter[STAMP]
    w.count[N_AFFECTED] = 0
    w.count[N_OPEN] = 0
    _seed(w, stamp)
    if w.count[N_AFFECTED] == 0:
        return OK
    w.counter[N_SOLVES] += 1
    lowest = _lowest_key(w)
    if lowest >= 0.0 and _fill_at_once(w, lowest):
        return OK
    _order(w)
    return _fill(w, stamp)
