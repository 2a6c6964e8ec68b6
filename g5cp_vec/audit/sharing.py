"""Solve the bandwidth shares again and see whether the recorded flows fit them.

The problem: given when each flow was active and how much it moved, decide whether max-min fair sharing gives just
that. The method: cut time at every change of the set of active flows; fill progressively in each interval; integrate
each flow's rate over its intervals. Flows with one route have one rate, so a set of flows is a multiset of routes;
sets recur, and each is solved once. Then every flow's rates are scaled until it meets its bytes, and no link may be
asked for more than it has. Float64 throughout: tolerances are those of the instant rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Two event times are one instant when they agree to this.
INSTANT_RTOL = 1e-12
# Allowed of the bytes concerned, and of an end time (at the link's capacity): float64 and instants allow no less.
BYTES_RTOL = 1e-9
END_RTOL = 4e-12
# Links whose fair shares differ by rounding saturate together.
SHARE_RTOL = 1e-14


class Flows(NamedTuple):
    """Flows that moved something.

    Attributes
    ----------
    route_indptr, route_links : ndarrays of int, shapes (n_flows + 1,) and (nnz,)
        Links that each flow crosses, at least one.
    bytes : ndarray of float64, shape (n_flows,)
    active_s, finish_s : ndarrays of float64, shape (n_flows,)
        When the latency had passed, and the recorded end.
    """

    route_indptr: Array
    route_links: Array
    bytes: Array
    active_s: Array
    finish_s: Array


class _Shares(NamedTuple):
    """Rates of one set of flows: distinct routes with the rate of each, and the links of these routes."""

    routes: Array
    rate: Array
    owner: Array
    links: Array


def fair_rates(owner: Array, links: Array, n_flows: Array, capacity: Array) -> Array:
    """Return the max-min fair rate of a flow on each route, by progressive filling.

    Parameters
    ----------
    owner, links : ndarrays of int, shape (nnz,)
        Route ``owner[i]`` crosses link ``links[i]``; every route crosses one.
    n_flows : ndarray of int, shape (n_routes,)
        Flows on each route, at least one.
    capacity : ndarray of float64, shape (n_links,)

    Returns
    -------
    rate : ndarray of float64, shape (n_routes,)
        In the unit of ``capacity``.
    """
    used, link = np.unique(links, return_inverse=True)
    room = capacity[used].astype(np.float64)
    rate = np.zeros(len(n_flows))
    level = 0.0
    while len(owner):
        load = np.bincount(link, weights=n_flows[owner], minlength=len(used))
        share = np.full(len(used), np.inf)
        np.divide(room, load, out=share, where=load > 0)
        # Rounding must not let the level sink.
        level = max(level, float(share.min()))
        frozen = np.zeros(len(n_flows), bool)
        frozen[owner[share[link] <= level * (1 + SHARE_RTOL)]] = True
        rate[frozen] = level
        gone = frozen[owner]
        room -= level * np.bincount(link[gone], weights=n_flows[owner[gone]], minlength=len(used))
        np.maximum(room, 0.0, out=room)
        owner, link = owner[~gone], link[~gone]
    return rate


def capacity_violations(flows: Flows, capacity: Array, event_s: Array) -> int:
    """Count flows whose bytes disagree with their fair rates, and (link, interval) pairs asked for too much.

    Parameters
    ----------
    flows : Flows
    capacity : ndarray of float64, shape (n_links,)
        Bytes/s.
    event_s : ndarray of float64, shape (n_events,)
        Other times at which something happened: what falls into one instant with them happened then.
    """
    if len(flows.bytes) == 0:
        return 0
    instant_s, (first, last) = _instants([flows.active_s, flows.finish_s], event_s)
    solver = _Solver(flows, capacity)
    length_s = np.diff(instant_s)
    moved = np.zeros(len(flows.bytes))
    for k, active in _active_sets(first, last, len(instant_s)):
        shares = solver.solve(active)
        moved[active] += length_s[k] * shares.rate[np.searchsorted(shares.routes, solver.route[active])]
    narrowest = np.minimum.reduceat(capacity[flows.route_links], flows.route_indptr[:-1])
    allowed = BYTES_RTOL * flows.bytes + END_RTOL * flows.finish_s * narrowest
    off = np.count_nonzero(~(np.abs(moved - flows.bytes) <= allowed))
    scale = np.ones_like(moved)
    np.divide(flows.bytes, moved, out=scale, where=moved > 0)
    return int(off) + _overloads(solver, scale, first, last, instant_s)


def _overloads(solver: _Solver, scale: Array, first: Array, last: Array, instant_s: Array) -> int:
    """Count (link, interval) pairs that cannot carry what the flows' scaled rates ask for."""
    # Fair rates fit every link; only a flow that has to be sped up can break one.
    hurried = scale > 1.0 + 0.5 * BYTES_RTOL
    n = len(instant_s)
    change = np.bincount(first[hurried], minlength=n) - np.bincount(last[hurried], minlength=n)
    suspect = np.cumsum(change) > 0
    n_over = 0
    for k, active in _active_sets(first, last, n) if hurried.any() else ():
        if not suspect[k]:
            continue
        shares = solver.solve(active)
        weight = np.bincount(
            np.searchsorted(shares.routes, solver.route[active]), weights=scale[active], minlength=len(shares.routes)
        )
        length_s = instant_s[k + 1] - instant_s[k]
        asked = length_s * np.bincount(
            shares.links, weights=(weight * shares.rate)[shares.owner], minlength=len(solver.capacity)
        )
        room = solver.capacity * (length_s * (1 + BYTES_RTOL) + END_RTOL * instant_s[k + 1])
        n_over += int(np.count_nonzero(asked > room))
    return n_over


class _Solver:
    """Fair rates of sets of flows, each set of routes solved once."""

    def __init__(self, flows: Flows, capacity: Array) -> None:
        self.capacity = capacity
        self.route, self.representative = _distinct_routes(flows, len(capacity))
        self._flows = flows
        self._known: dict[bytes, _Shares] = {}

    def solve(self, active: Array) -> _Shares:
        """Return the shares of a set of flows."""
        set_of_routes = np.sort(self.route[active])
        key = set_of_routes.tobytes()
        if key not in self._known:
            routes, n_flows = np.unique(set_of_routes, return_counts=True)
            owner, links = select_rows(self._flows.route_indptr, self._flows.route_links, self.representative[routes])
            self._known[key] = _Shares(routes, fair_rates(owner, links, n_flows, self.capacity), owner, links)
        return self._known[key]


def select_rows(indptr: Array, indices: Array, rows: Array) -> tuple[Array, Array]:
    """Return the entries of some rows of a CSR matrix: position in ``rows``, and column, of each."""
    begin, length = indptr[rows], indptr[rows + 1] - indptr[rows]
    owner = np.repeat(np.arange(len(rows)), length)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
    return owner, indices[begin[owner] + within]


def _distinct_routes(flows: Flows, n_links: int) -> tuple[Array, Array]:
    """Return a number per distinct route for every flow, and by number one flow that takes the route."""
    begin, length = flows.route_indptr[:-1], np.diff(flows.route_indptr)
    route = np.unique(length, return_inverse=True)[1].astype(np.int64)
    for hop in range(int(length.max())):
        there = hop < length
        link = np.zeros(len(length), np.int64)
        link[there] = 1 + flows.route_links[begin[there] + hop]
        route = np.unique(route * (n_links + 1) + link, return_inverse=True)[1]
    return route, np.unique(route, return_index=True)[1]


def _instants(times: list[Array], others: Array) -> tuple[Array, list[Array]]:
    """Merge times into instants; return those at which ``times`` fall, in order, and the instant of each of them."""
    t, places = np.unique(np.concatenate([*times, others]), return_inverse=True)
    opens = np.ones(len(t), bool)
    opens[1:] = t[1:] > t[:-1] * (1 + INSTANT_RTOL)
    # An instant reaches 1e-12 from its first time: a longer run of close times is several.
    begin = np.flatnonzero(opens)
    end = np.append(begin[1:], len(t))
    for i in np.flatnonzero(t[end - 1] > t[begin] * (1 + INSTANT_RTOL)):
        at = begin[i]
        while (at := at + np.searchsorted(t[at : end[i]], t[at] * (1 + INSTANT_RTOL), side="right")) < end[i]:
            opens[at] = True
    instant = (np.cumsum(opens) - 1)[places]
    n = [len(part) for part in times]
    used, mine = np.unique(instant[: sum(n)], return_inverse=True)
    return t[opens][used], np.split(mine, np.cumsum(n)[:-1])


def _active_sets(first: Array, last: Array, n_instants: int) -> Iterator[tuple[int, Array]]:
    """Yield every interval between instants in which flows are active, and these."""
    order = np.argsort(first, kind="stable")
    begin = np.searchsorted(first[order], np.arange(n_instants + 1))
    active = np.zeros(0, np.int64)
    for k in range(n_instants - 1):
        active = np.concatenate([active, order[begin[k] : begin[k + 1]]])
        active = active[last[active] > k]
        if len(active):
            yield k, active
