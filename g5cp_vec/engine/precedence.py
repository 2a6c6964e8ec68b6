"""Which instants of a recorded simulation have to keep their order: those that look at what the others changed.

An instant looks at and changes what its events concern, and nothing else: the ops that wait for them, the chips that
choose, and the links of the flows that begin, end or get another rate. Two instants that have nothing in common may
change places and nothing changes: a flow ends before a compute on some chip or after it. Where the instants with
something in common keep their order, every one of them finds what it found, and does what it did.

Noted are, as pairs of instants,

* that an op's predecessors end before it starts,
* that a chip is free before an op for which it has waited, that no other op is ready while it waits, and that one
  which comes before the op that it starts in its order is not ready before that starts,
* the order in which a link is looked at.

An instant and those since which its clocks run need no pair.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, N_PAIRS, NIL, RECORDS

# Odd numbers below 2**31, for places in the table of pairs: nothing overflows.
SPREAD = np.uint64(1_481_765_933), np.uint64(1_284_865_837)


@kernel
def forget(w, r):
    """Begin a record: no instant must come before another, no chip has chosen, no link has been looked at."""
    for i in range(len(r.pair)):
        r.pair[i]["after"] = 0
    for chip in range(len(w.chip)):
        state = w.chip[chip]
        state["freed"] = NIL
        state["waited"] = NIL
        state["chosen"] = NIL
        state["highest"] = 0
    for link in range(len(r.looked_at)):
        r.looked_at[link] = NIL


@kernel(inlines=False)
def _precedes(r, counter, before, after):
    """Note a pair of instants."""
    if before == after or before == NIL:
        return
    mask = np.uint64(len(r.pair) - 1)
    place = (np.uint64(before) * SPREAD[0] + np.uint64(after) * SPREAD[1] >> np.uint64(16)) & mask
    while r.pair[place]["after"] != 0:
        if r.pair[place]["before"] == before and r.pair[place]["after"] == after:
            return
        place = (place + np.uint64(1)) & mask
    if counter[N_PAIRS] == len(r.before):
        counter[RECORDS] = 0  # too long to be worth it
        return
    r.pair[place]["before"] = before
    r.pair[place]["after"] = after
    counter[N_PAIRS] += 1


@kernel
def note_ready(w, r, chip, rank, at):
    """Note that a compute becomes ready."""
    if w.counter[RECORDS] > 0:
        state = w.chip[chip]
        _precedes(r, w.counter, state["chosen"] if rank < state["highest"] else state["waited"], at)


@kernel
def note_choice(w, r, chip, rank, at):
    """Note that a chip starts an op."""
    if w.counter[RECORDS] > 0:
        state = w.chip[chip]
        if state["freed"] != at:
            _precedes(r, w.counter, state["freed"], at)
            state["waited"] = at
        state["chosen"] = at
        state["highest"] = max(rank, state["highest"])


@kernel(inlines=False)
def _look_at(g, w, r, op):
    at = w.counter[N_EVENTS]
    for p in range(w.op[op]["route"], w.op[op + 1]["route"]):
        link = g.route_indices[p]
        _precedes(r, w.counter, r.looked_at[link], at)
        r.looked_at[link] = at


@kernel
def look_at(g, w, r, op):
    """Note that the present instant looks at the links of a flow."""
    if w.counter[RECORDS] > 0:
        _look_at(g, w, r, op)


@kernel
def _note_ends(g, w, r):
    """Note that predecessors end before ops start."""
    for op in range(len(w.at)):
        end = w.at[op]["finish"]
        for p in range(w.op[op]["succ"], w.op[op + 1]["succ"]):
            _precedes(r, w.counter, end, np.int64(w.at[g.succ_indices[p]]["start"]))


@kernel
def _is_clock(r, before, after):
    """Whether a clock of an instant runs since another."""
    for i in range(r.first[after]["clock"], r.first[after + 1]["clock"]):
        if r.clock[i]["since"] == before:
            return True
    return False


@kernel
def close(g, w, r):
    """End a record: put the pairs in order of the instant that comes later."""
    _note_ends(g, w, r)
    if w.counter[RECORDS] == 0:
        return
    n_instants = w.counter[N_EVENTS] + 1
    for at in range(n_instants + 1):
        r.first[at]["before"] = 0
    for i in range(len(r.pair)):
        after = r.pair[i]["after"]
        if after != 0:
            if _is_clock(r, r.pair[i]["before"], after):
                r.pair[i]["after"] = 0
            else:
                r.first[after]["before"] += 1
    for at in range(n_instants):
        r.first[at + 1]["before"] += r.first[at]["before"]
    # Now the end of every part, counted down to its begin.
    for i in range(len(r.pair)):
        if r.pair[i]["after"] != 0:
            first = r.first[r.pair[i]["after"]]
            first["before"] -= 1
            r.before[first["before"]] = r.pair[i]["before"]
