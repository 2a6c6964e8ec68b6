"""Recorded simulations: what ends at which instant, so that a row that unfolds alike needs no search.

What happens in a simulation (which ops start and end together, which flows have which rate from when to when) often
is the same for many rows of costs through one graph. A tape holds it: for every instant the distinct *clocks* that
run out there, a clock being an instant at which something began and what it has to wait or to move since. Given other
durations, latencies and bytes, the instants follow one after another from the clocks alone.

It happens to the other row, too, when all clocks of an instant run out together, those of no two instants do, and
instants with something in common (`g5cp_vec.engine.precedence`) keep their order. That is checked, while the instants
are found; where it does not hold for certain, the row is simulated. Capacities must be equal, so that rates are, and
nothing may be zero that was not, because what is zero ends in the instant in which it begins. Rows that are played get
the very floats that a simulation gives: flows that come to shared links or leave them at one instant are taken in
order of their numbers, so rates depend on the order of the instants only, and times come from the same operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import (
    CHANGE,
    CLOCK,
    DURATION,
    FIRST,
    INSTANT_RTOL,
    LATENCY,
    N_CHANGES,
    N_CLOCKS,
    N_EVENTS,
    N_NOTES,
    NIL,
    PAIR,
    RECORDS,
    TRANSFER,
    Graph,
)

# Clocks of an instant, or notes, looked at for an equal one.
N_COMPARED = 4
# Room for pairs beyond one an op: small graphs that stand for large ones have many instants.
MOST_SMALL_PAIRS = 2**15 - 1
# Places per instant that instants may be moved by, to put them in order.
MOST_SLIDES = 16
# By how much of the time a flow must miss the instant at which its rate changes to be certain not to end there.
MARGIN = 4 * INSTANT_RTOL


class Recorder(NamedTuple):
    """What the simulation under way is recorded on; how much there is of it, `RECORDS` and so on count.

    Attributes
    ----------
    first, clock, change, before
        As of `Tape`.
    note : ndarray of `CHANGE`
        Rates of all listed flows, each with the one that the flow had before.
    pair : ndarray of `PAIR`, shape (a power of two,)
        Each at the first free place from the one that follows from it.
    looked_at : ndarray of uint32, shape (n_links,)
        Last instant that looked at each link.
    """

    first: NDArray[np.void]
    clock: NDArray[np.void]
    change: NDArray[np.void]
    before: NDArray[np.uint32]
    note: NDArray[np.void]
    pair: NDArray[np.void]
    looked_at: NDArray[np.uint32]


def make_recorder(g: Graph, *, records: bool = True) -> Recorder:
    """Allocate what a simulation of a graph is recorded on; the system provides only what is touched."""
    n_ops = len(g.op_kind) if records else 0
    n_pairs = 2 ** (max(n_ops, min(8 * n_ops, MOST_SMALL_PAIRS))).bit_length()
    return Recorder(
        first=np.empty(2 * n_ops + 2, FIRST),
        clock=np.empty(2 * n_ops, CLOCK),
        change=np.empty(4 * n_ops, CHANGE),
        before=np.empty(n_pairs // 2, np.uint32),
        note=np.empty(4 * n_ops, CHANGE),
        pair=np.empty(n_pairs, PAIR),
        looked_at=np.empty(len(g.link_capacity), np.uint32),
    )


class Tape(NamedTuple):
    """A recorded simulation.

    Attributes
    ----------
    n_instants : int
    first : ndarray of `FIRST`, shape (at least n_instants + 1,)
        Where the clocks of each instant begin, and the instants before it.
    clock : ndarray of `CLOCK`
        What runs out at an instant.
    change : ndarray of `CHANGE`
        Rates of the transfers that have had several, from the first to the last.
    before : ndarray of uint32
        Instants that must come before an instant.
    order : ndarray of uint32, shape (at least n_instants,)
        The instants in order of the row played last, or of the one recorded.
    """

    n_instants: int
    first: NDArray[np.void]
    clock: NDArray[np.void]
    change: NDArray[np.void]
    before: NDArray[np.uint32]
    order: NDArray[np.uint32]


@kernel
def note_rate(r, counter, flow, at):
    """Note that a listed flow has its present rate from instant ``at`` on.

    Flows with one history share its notes, as far as these are among the last.
    """
    if counter[RECORDS] == 0:
        return
    n = counter[N_NOTES]
    for i in range(n - 1, max(n - N_COMPARED, 0) - 1, -1):
        note = r.note[i]
        if note["rate"] == flow["rate"] and note["since"] == at and note["before"] == flow["noted"]:
            flow["noted"] = i
            return
    if n == len(r.note):
        counter[RECORDS] = 0  # too long to be worth it
        return
    note = r.note[n]
    note["rate"] = flow["rate"]
    note["since"] = at
    note["before"] = flow["noted"]
    flow["noted"] = n
    counter[N_NOTES] = n + 1


@kernel
def next_instant(r, counter, at):
    """Let the clocks recorded from now on be those of instant ``at``."""
    if counter[RECORDS] > 0:
        r.first[at]["clock"] = counter[N_CLOCKS]


@kernel
def _is_known(r, counter, kind, cost, since, rate, note):
    """Whether a clock is among the last few of this instant."""
    n = counter[N_CLOCKS]
    first = max(int(r.first[counter[N_EVENTS]]["clock"]), n - N_COMPARED)
    for i in range(n - 1, first - 1, -1):
        clock = r.clock[i]
        if (
            clock["since"] == since
            and clock["cost"] == cost
            and clock["kind"] == kind
            and clock["rate"] == rate
            and clock["note"] == note
        ):
            return True
    return False


@kernel
def _add_clock(r, counter, kind, cost, since, rate, note, n_changes):
    """Add a clock, whose changes have been added."""
    n = counter[N_CLOCKS]
    clock = r.clock[n]
    clock["kind"] = kind
    clock["cost"] = cost
    clock["since"] = since
    clock["rate"] = rate
    clock["note"] = note
    clock["n_changes"] = n_changes
    clock["first"] = counter[N_CHANGES] - n_changes
    counter[N_CLOCKS] = n + 1


@kernel
def record_clock(r, counter, kind, cost, since, rate):
    """Record that a compute, the latency of a flow, or a flow at the one rate it has had, ends now."""
    if not _is_known(r, counter, kind, cost, since, rate, NIL):
        _add_clock(r, counter, kind, cost, since, rate, NIL, np.int64(0))


@kernel
def record_listed(r, counter, flow, cost):
    """Record that a listed flow ends now, with all the rates it has had."""
    last = flow["noted"]
    since, rate = r.note[last]["since"], r.note[last]["rate"]
    if _is_known(r, counter, TRANSFER, cost, since, rate, last):
        return
    n_changes, p = np.int64(1), r.note[last]["before"]
    while p != NIL:
        n_changes += 1
        p = r.note[p]["before"]
    begin = counter[N_CHANGES]
    if begin + n_changes > len(r.change):
        counter[RECORDS] = 0
        return
    p = last
    for i in range(begin + n_changes - 1, begin - 1, -1):
        r.change[i]["rate"] = r.note[p]["rate"]
        r.change[i]["since"] = r.note[p]["since"]
        p = r.note[p]["before"]
    counter[N_CHANGES] += n_changes
    _add_clock(r, counter, TRANSFER, cost, since, rate, last, n_changes)


@kernel
def _transfer_end_s(clock, changes, n_bytes, instant_s):
    """End of a transfer, -1 where it might have ended at an earlier change of its rate."""
    if clock["n_changes"] == 0:
        return instant_s[clock["since"]] + n_bytes / clock["rate"]
    first = changes[clock["first"]]
    rate, since_s, left = first["rate"], instant_s[first["since"]], n_bytes
    for i in range(clock["first"] + 1, clock["first"] + clock["n_changes"]):
        at_s = instant_s[changes[i]["since"]]
        left -= rate * (at_s - since_s)
        if not left > rate * at_s * MARGIN:
            return -1.0
        rate, since_s = changes[i]["rate"], at_s
    return since_s + max(left, 0.0) / rate


@kernel
def _end_s(tape, clock, c, instant_s):
    """When a clock runs out, -1 for a transfer that might have ended at an earlier change of its rate."""
    if clock["kind"] == DURATION:
        return instant_s[clock["since"]] + c.duration_s[clock["cost"]]
    if clock["kind"] == LATENCY:
        return instant_s[clock["since"]] + c.latency_s[clock["cost"]]
    return _transfer_end_s(clock, tape.change, c.bytes[clock["cost"]], instant_s)


@kernel
def _put_in_order(tape, instant_s):
    """Bring ``tape.order`` up to date, whose instants are nearly in order if a row played before was nearly this one.

    Returns
    -------
    n_moves : int
        Places by which instants were moved; -1 where that would be too much, or two instants are one.
    """
    order, n_moves = tape.order, 0
    before_s = instant_s[order[0]]
    for i in range(1, tape.n_instants):
        at = order[i]
        at_s = instant_s[at]
        if at_s > before_s * (1.0 + INSTANT_RTOL):
            before_s = at_s
            continue
        j = i
        while instant_s[order[j - 1]] > at_s:  # the first instant is 0, and no other is
            order[j] = order[j - 1]
            j -= 1
        order[j] = at
        n_moves += i - j
        is_one = at_s <= instant_s[order[j - 1]] * (1.0 + INSTANT_RTOL)
        if i > j:
            is_one |= instant_s[order[j + 1]] <= at_s * (1.0 + INSTANT_RTOL)
        if is_one or n_moves > MOST_SLIDES * tape.n_instants:
            return -1
    return n_moves


@kernel
def _keeps_pairs(tape, instant_s):
    """Whether all instants follow those that must come before them."""
    for at in range(1, tape.n_instants):
        for i in range(tape.first[at]["before"], tape.first[at + 1]["before"]):
            if not instant_s[tape.before[i]] < instant_s[at]:
                return False
    return True


@kernel
def play(tape, c, instant_s):
    """Find the instants of a row of costs from a tape whose capacities and zeros are the row's.

    Parameters
    ----------
    tape : Tape
        ``order`` is overwritten.
    c : Costs
    instant_s : ndarray of float64, shape (at least n_instants,)
        Seconds, in the order of the tape; overwritten.

    Returns
    -------
    bool
        Whether this is for certain what a simulation of the row finds.
    """
    instant_s[0] = 0.0
    for at in range(1, tape.n_instants):
        first_s, last_s = np.inf, 0.0
        for i in range(tape.first[at]["clock"], tape.first[at + 1]["clock"]):
            end_s = _end_s(tape, tape.clock[i], c, instant_s)
            first_s = min(first_s, end_s)
            last_s = max(last_s, end_s)
        if not (0.0 < first_s < np.inf) or last_s > first_s * (1.0 + INSTANT_RTOL):
            return False
        instant_s[at] = first_s
    n_moves = _put_in_order(tape, instant_s)
    # In an order that has been met all pairs are kept.
    if n_moves == 0 or (n_moves > 0 and _keeps_pairs(tape, instant_s)):
        return True
    for at in range(tape.n_instants):
        tape.order[at] = at
    return False
