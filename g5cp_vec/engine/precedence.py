"""Which instants of a recorded simulation have to keep their order: those that look at what the others changed.

An instant looks at and changes what its events concern, and nothing else: the ops that wait for them, the chips that
choose, and the links of the flows that begin, end or get another rate. Two instants that have nothing in common may
change places and nothing changes: a flow ends before a compute on some chip or after it. Where the instants with
something in common keep their order, every one of them finds what it found, and does what it did.

Noted are, as pairs of instants,

* that an op's predecessors end before it starts,
* that a chip becomes free before it waits, that nothing which it would have taken is ready before it is taken, and
  nothing at all while it waits,
* the order in which a link is looked at.

An instant and those since which its clocks run need no pair.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, N_PAIRS, NIL, RECORDS

# Two odd numbers, for places in the table of known pairs.
HASH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
HASH_SHIFT = np.uint64(40)


@kernel
def forget(r):
    """Begin a record: no pair is known, no chip has chosen, no link has been looked at."""
    for i in range(len(r.known)):
        r.known[i]["after"] = 0  # no instant comes before the first one
    for chip in range(len(r.choice)):
        state = r.choice[chip]
        state["freed"] = NIL
        state["waited"] = NIL
        state["chosen"] = NIL
        state["rank"] = 0
    for link in range(len(r.looked_at)):
        r.looked_at[link] = NIL


@kernel(inlines=False)
def _precedes(r, counter, before, after):
    """Note a pair of instants, unless it is among those known."""
    if before == after or before == NIL:
        return
    place = (np.uint64(before) * HASH[0] + np.uint64(after) * HASH[1]) >> HASH_SHIFT
    known = r.known[place & np.uint64(len(r.known) - 1)]
    if known["before"] == before and known["after"] == after:
        return
    known["before"] = before
    known["after"] = after
    n = counter[N_PAIRS]
    if n == len(r.pair):
        counter[RECORDS] = 0  # too long to be worth it
        return
    r.pair[n]["before"] = before
    r.pair[n]["after"] = after
    counter[N_PAIRS] = n + 1


@kernel
def note_ready(r, counter, chip, rank, at):
    """Note that a compute becomes ready."""
    if counter[RECORDS] > 0:
        state = r.choice[chip]
        _precedes(r, counter, state["chosen"] if rank < state["rank"] else state["waited"], at)


@kernel
def note_freed(r, counter, chip, at):
    """Note that a chip becomes free."""
    if counter[RECORDS] > 0:
        r.choice[chip]["freed"] = at


@kernel
def note_choice(r, counter, chip, rank, at):
    """Note that a chip starts an op."""
    if counter[RECORDS] > 0:
        state = r.choice[chip]
        if state["freed"] != at:
            _precedes(r, counter, state["freed"], at)
            state["waited"] = at
        state["chosen"] = at
        state["rank"] = max(rank, state["rank"])


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
            _precedes(r, w.counter, end, w.at[g.succ_indices[p]]["start"])


@kernel
def _drop_clocks(r, counter):
    """Drop the pairs of instants of which a clock of the later one runs since the earlier one."""
    n_kept = 0
    for i in range(counter[N_PAIRS]):
        before, after = r.pair[i]["before"], r.pair[i]["after"]
        is_clock = False
        for j in range(r.first[after]["clock"], r.first[after + 1]["clock"]):
            is_clock |= r.clock[j]["since"] == before
        if not is_clock:
            r.pair[n_kept]["before"] = before
            r.pair[n_kept]["after"] = after
            n_kept += 1
    counter[N_PAIRS] = n_kept


@kernel
def close(g, w, r):
    """End a record: put the pairs in order of the instant that comes later."""
    _note_ends(g, w, r)
    counter = w.counter
    if counter[RECORDS] == 0:
        return
    _drop_clocks(r, counter)
    n_instants = counter[N_EVENTS] + 1
    for at in range(n_instants + 1):
        r.first[at]["before"] = 0
    for i in range(counter[N_PAIRS]):
        r.first[r.pair[i]["after"]]["before"] += 1
    for at in range(n_instants):
        r.first[at + 1]["before"] += r.first[at]["before"]
    # Now the end of every part, counted down to its begin.
    for i in range(counter[N_PAIRS]):
        after = r.first[r.pair[i]["after"]]
        after["before"] -= 1
        r.before[after["before"]] = r.pair[i]["before"]
