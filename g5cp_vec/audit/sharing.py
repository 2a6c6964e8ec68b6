"""Solve the bandwidth shares again and see whether the recorded flows fit them.

The problem: given when each flow was active and how much it moved, decide whether max-min fair sharing gives just
that. The method: cut time at every change of the set of active flows; fill progressively in each interval; integrate
each flow's rate over its intervals. Then every flow's rates are scaled until it meets its bytes, and no link may be
asked for more than it has. Float64 throughout: tolerances are those of the instant rule.

What makes it fast: flows of one route and size that are active over the same intervals are one *bundle*, bundles that
are active over the same intervals are a *wave*, and layer by layer the same waves come and go. So waves are numbered by
what they hold and intervals by the waves in them, comparing all of it, and each distinct set of flows is solved once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
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
# Active bundles that are looked at together, summed over intervals: bounds the memory.
BUNDLES_TOGETHER = 2**20


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


class _Waves(NamedTuple):
    """Bundles wave by wave, the waves, and the distinct routes.

    Attributes
    ----------
    n_flows, route : ndarrays of int64, shape (n_bundles,)
        Flows of a bundle, and the number of their route.
    bytes : ndarray of float64, shape (n_bundles,)
        Of one flow.
    indptr : ndarray of int64, shape (n_waves + 1,)
        Where each wave's bundles begin.
    first, last : ndarrays of int64, shape (n_waves,)
        Instants between which the flows are active.
    holds : ndarray of int64, shape (n_waves,)
        Number of what a wave holds: waves of one number have the same bundles, in the same order.
    route_indptr, route_links : ndarrays of int, shapes (n_routes + 1,) and (nnz,)
    """

    n_flows: Array
    route: Array
    bytes: Array
    indptr: Array
    first: Array
    last: Array
    holds: Array
    route_indptr: Array
    route_links: Array


class _Active(NamedTuple):
    """Some intervals with the waves in them, and the rates of these.

    Attributes
    ----------
    interval, wave : ndarrays of int64, shape (n_pairs,)
        Which wave is active when.
    begin : ndarray of int64, shape (n_pairs,)
        Where the rates of the wave's bundles in this interval begin.
    rate : ndarray of float64
        Bytes/s of one flow.
    least, most : ndarrays of float64, shape (n_pairs,)
        Of the wave's rates in this interval.
    """

    interval: Array
    wave: Array
    begin: Array
    rate: Array
    least: Array
    most: Array


def fair_rates(owner: Array, links: Array, n_flows: Array, capacity: Array) -> Array:
    """Return the max-min fair rate of a flow on each route, by progressive filling.

    A link whose fair share is the least that any of its flows is offered saturates at that share, whatever happens
    elsewhere: all others' shares can only grow as flows freeze. So all such links saturate in the same round.

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
    room = capacity.astype(np.float64)
    rate, level = np.zeros(len(n_flows)), np.zeros(len(capacity))
    while len(owner):
        load = np.bincount(links, weights=n_flows[owner], minlength=len(room))
        share = np.full(len(room), np.inf)
        np.divide(room, load, out=share, where=load > 0)
        # Rounding must not let a link's level sink.
        np.maximum(share, level, out=share)
        offered = np.full(len(n_flows), np.inf)
        np.minimum.at(offered, owner, share[links])
        least = np.full(len(room), np.inf)
        np.minimum.at(least, links, offered[owner])
        saturated = share <= least * (1 + SHARE_RTOL)
        frozen = np.zeros(len(n_flows), bool)
        frozen[owner[saturated[links]]] = True
        rate[frozen] = offered[frozen]
        gone = frozen[owner]
        taken = n_flows[owner[gone]] * rate[owner[gone]]
        room -= np.bincount(links[gone], weights=taken, minlength=len(room))
        np.maximum(room, 0.0, out=room)
        np.maximum.at(level, links[gone], rate[owner[gone]])
        owner, links = owner[~gone], links[~gone]
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
    # Neighbours are often alike, and looked at once.
    head = _heads(flows.active_s, flows.finish_s, flows.bytes)
    times_s = [flows.active_s[head], flows.finish_s[head]]
    instant_s, (first, last) = _instants(times_s, event_s[_heads(event_s)])
    waves = _gather_waves(flows, head, first, last, len(capacity))
    moved = _moved(waves, capacity, instant_s)
    narrowest = np.minimum.reduceat(capacity[waves.route_links], waves.route_indptr[:-1])[waves.route]
    end_s = np.repeat(instant_s[waves.last], np.diff(waves.indptr))
    allowed = BYTES_RTOL * waves.bytes + END_RTOL * end_s * narrowest
    off = waves.n_flows[~(np.abs(moved - waves.bytes) <= allowed)].sum()
    scale = np.ones_like(moved)
    np.divide(waves.bytes, moved, out=scale, where=moved > 0)
    return int(off) + _overloads(waves, scale, capacity, instant_s)


def _moved(waves: _Waves, capacity: Array, instant_s: Array) -> Array:
    """Return the bytes that a flow of each bundle moves at its fair rates."""
    length_s, n_waves = np.diff(instant_s), len(waves.first)
    by_all, by_each = np.zeros(n_waves), np.zeros(len(waves.route))
    for active in _active_waves(waves, capacity, np.ones(len(length_s), np.bool_)):
        alike = active.least == active.most
        amount = length_s[active.interval] * active.most
        by_all += np.bincount(active.wave[alike], weights=amount[alike], minlength=n_waves)
        pair, bundle, rate = _unroll(waves, active, np.flatnonzero(~alike))
        by_each += np.bincount(bundle, weights=length_s[active.interval[pair]] * rate, minlength=len(by_each))
    moved: Array = by_each + np.repeat(by_all, np.diff(waves.indptr))
    return moved


def _overloads(waves: _Waves, scale: Array, capacity: Array, instant_s: Array) -> int:
    """Count (link, interval) pairs that cannot carry what the flows' scaled rates ask for."""
    # Fair rates fit every link; only a flow that has to be sped up can break one.
    hurried = np.logical_or.reduceat(scale > 1.0 + 0.5 * BYTES_RTOL, waves.indptr[:-1])
    if not hurried.any():
        return 0
    n, n_links, length_s = len(instant_s), len(capacity), np.diff(instant_s)
    change = np.bincount(waves.first[hurried], minlength=n) - np.bincount(waves.last[hurried], minlength=n)
    n_over = 0
    for active in _active_waves(waves, capacity, np.cumsum(change)[:-1] > 0):
        pair, bundle, rate = _unroll(waves, active, np.arange(len(active.wave)))
        asked = length_s[active.interval[pair]] * rate * scale[bundle] * waves.n_flows[bundle]
        owner, at = _rows(waves.route_indptr, waves.route[bundle])
        cells, cell = np.unique(active.interval[pair[owner]] * n_links + waves.route_links[at], return_inverse=True)
        k = cells // n_links
        room = capacity[cells % n_links] * (length_s[k] * (1 + BYTES_RTOL) + END_RTOL * instant_s[k + 1])
        n_over += int(np.count_nonzero(np.bincount(cell, weights=asked[owner], minlength=len(cells)) > room))
    return n_over


def _unroll(waves: _Waves, active: _Active, pairs: Array) -> tuple[Array, Array, Array]:
    """Return pair, bundle and rate of every bundle that is active in some of the pairs of wave and interval."""
    owner, bundle = _rows(waves.indptr, active.wave[pairs])
    pair = pairs[owner]
    return pair, bundle, active.rate[active.begin[pair] + bundle - waves.indptr[active.wave[pair]]]


def _active_waves(waves: _Waves, capacity: Array, wanted: NDArray[np.bool_]) -> Iterator[_Active]:
    """Yield the waves that are active in each interval that is wanted, with their rates, some intervals together."""
    n_instants = len(wanted) + 1
    # In the order of what they hold, so that equal sets of waves are equal lists.
    order = np.argsort(waves.holds, kind="stable")
    order = order[waves.first[order] < waves.last[order]]
    first, last, size = waves.first[order], waves.last[order], np.diff(waves.indptr)[order]
    change = np.bincount(first, weights=size, minlength=n_instants) - np.bincount(last, size, minlength=n_instants)
    work = np.cumsum(np.cumsum(change))
    begin = done = 0
    while begin < n_instants - 1:
        end = max(int(np.searchsorted(work, done + BUNDLES_TOGETHER, side="right")), begin + 1)
        here = np.flatnonzero((first < end) & (last > begin))
        since, until = np.maximum(first[here], begin), np.minimum(last[here], end)
        owner, interval = _spread(since, until - since)
        bits = len(here).bit_length()
        key = np.sort(((interval << bits) | owner)[wanted[interval]])
        if len(key):
            yield _with_rates(waves, capacity, key >> bits, order[here][key & ((1 << bits) - 1)])
        begin, done = end, work[min(end, n_instants) - 1]


def _with_rates(waves: _Waves, capacity: Array, interval: Array, wave: Array) -> _Active:
    """Solve the distinct sets of waves among those of some intervals; pairs are in the order of the intervals."""
    head = _heads(interval)
    n_waves = np.diff(head, append=len(interval))
    state = _number_rows(np.append(head, len(interval)), waves.holds[wave])
    example = np.zeros(int(state.max()) + 1, np.int64)
    example[state] = np.arange(len(state))
    which, pair = _spread(head[example], n_waves[example])
    size = waves.indptr[wave[pair] + 1] - waves.indptr[wave[pair]]
    owner, bundle = _spread(waves.indptr[wave[pair]], size)
    crossing, at = _rows(waves.route_indptr, waves.route[bundle])
    # The links of one set have nothing to do with those of another.
    cells = which[owner[crossing]] * len(capacity) + waves.route_links[at]
    used, link = np.unique(cells, return_inverse=True)
    rate = fair_rates(crossing, link, waves.n_flows[bundle], capacity[used % len(capacity)])
    begin = np.cumsum(size) - size
    least, most = np.minimum.reduceat(rate, begin), np.maximum.reduceat(rate, begin)
    # The example's waves stand in the same order.
    same = _spread((np.cumsum(n_waves[example]) - n_waves[example])[state], n_waves)[1]
    return _Active(interval, wave, begin[same], rate, least[same], most[same])


def _gather_waves(flows: Flows, head: Array, first: Array, last: Array, n_links: int) -> _Waves:
    """Gather flows that are active between the same instants; runs of flows that begin at ``head`` are alike."""
    n = len(flows.bytes)
    n_instants = int(max(first.max(), last.max())) + 1
    spans, span = _number(first * n_instants + last)
    sizes, size = np.unique(flows.bytes[head], return_inverse=True)
    alike, run = _number(span * len(sizes) + size)
    route, example = _number_routes(flows, n_links)
    bits = len(example).bit_length()
    code = np.sort((np.repeat(run, np.diff(head, append=n)) << bits) | route)
    begin = _heads(code)
    (wave, size), route = np.divmod(alike[code[begin] >> bits], len(sizes)), code[begin] & ((1 << bits) - 1)
    n_flows = np.diff(begin, append=n)
    indptr = np.append(_heads(wave), len(wave))
    holds = _number_rows(indptr, route, size, n_flows)
    length = flows.route_indptr[example + 1] - flows.route_indptr[example]
    links = flows.route_links[_spread(flows.route_indptr[example], length)[1]].astype(np.int64)
    route_indptr = np.concatenate([[0], np.cumsum(length)])
    return _Waves(n_flows, route, sizes[size], indptr, *np.divmod(spans, n_instants), holds, route_indptr, links)


def _number_routes(flows: Flows, n_links: int) -> tuple[Array, Array]:
    """Return a number per distinct route for every flow, and by number one flow that takes the route."""
    begin, length = flows.route_indptr[:-1], np.diff(flows.route_indptr)
    code, n_codes = np.zeros(len(length), np.int64), 1
    for hop in range(int(length.max())):
        if n_codes >= 2**62 // (n_links + 1):
            kept, code = _number(code)
            n_codes = len(kept)
        link = flows.route_links[np.minimum(begin + hop, len(flows.route_links) - 1)]
        code = code * (n_links + 1) + np.where(hop < length, link + 1, 0)
        n_codes *= n_links + 1
    kept, route = _number(code)
    example = np.zeros(len(kept), np.int64)
    example[route] = np.arange(len(route))
    return route, example


def _number(codes: Array) -> tuple[Array, Array]:
    """Return the distinct codes (at least 0), in order, and which of them each is."""
    n_codes = int(codes.max()) + 1
    if n_codes > 4 * len(codes):
        return np.unique(codes, return_inverse=True)
    there = np.zeros(n_codes, np.bool_)
    there[codes] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[codes]


def _number_rows(indptr: Array, *columns: Array) -> Array:
    """Return a number per distinct row for every row of a CSR matrix whose entries have columns of small numbers."""
    contents = np.stack(columns, axis=1, dtype=np.int32, casting="same_kind").tobytes()
    known: dict[bytes, int] = {}
    ends = (indptr * (4 * len(columns))).tolist()
    return np.array([known.setdefault(contents[a:b], len(known)) for a, b in pairwise(ends)], np.int64)


def _heads(*columns: Array) -> Array:
    """Return where each run of neighbours that are equal in all columns begins."""
    opens = np.ones(len(columns[0]), np.bool_)
    opens[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(opens)


def _rows(indptr: Array, rows: Array) -> tuple[Array, Array]:
    """Return the entries of some rows of a CSR matrix: position in ``rows``, and position in the matrix, of each."""
    return _spread(indptr[rows], indptr[rows + 1] - indptr[rows])


def _spread(begin: Array, length: Array) -> tuple[Array, Array]:
    """Return i and what it counts for all of ``begin[i]``, ``begin[i] + 1`` ... ``begin[i] + length[i] - 1``."""
    owner = np.repeat(np.arange(len(begin)), length)
    return owner, np.arange(len(owner)) + np.repeat(begin - (np.cumsum(length) - length), length)


def _instants(times: list[Array], others: Array) -> tuple[Array, list[Array]]:
    """Merge times into instants; return those at which ``times`` fall, in order, and the instant of each of them."""
    t = np.unique(np.concatenate([*times, others]))
    opens = np.ones(len(t), np.bool_)
    opens[1:] = t[1:] > t[:-1] * (1 + INSTANT_RTOL)
    # An instant reaches 1e-12 from its first time: a longer run of close times is several.
    begin = np.flatnonzero(opens)
    end = np.append(begin[1:], len(t))
    for i in np.flatnonzero(t[end - 1] > t[begin] * (1 + INSTANT_RTOL)):
        at = begin[i]
        while (at := at + np.searchsorted(t[at : end[i]], t[at] * (1 + INSTANT_RTOL), side="right")) < end[i]:
            opens[at] = True
    instant_s, instant = t[opens], np.cumsum(opens) - 1
    mine = [instant[np.searchsorted(t, part)] for part in times]
    used, numbers = _number(np.concatenate(mine))
    return instant_s[used], np.split(numbers, np.cumsum([len(part) for part in times])[:-1])
