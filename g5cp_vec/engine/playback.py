"""Many rows through one graph: played from the tape of another row where that holds, else simulated and recorded.

Tapes are tried from the one used last to the one used longest ago, which a new one takes the place of. Rows of which
hardly any is like another (ranks that drift apart) cost tries and recordings for nothing: after as many misses
as there is patience for, `PAUSE` rows are only simulated before one is tried and recorded, until one hits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import AT, CHANGE, CLOCK, FIRST, N_EVENTS, Costs, Graph
from g5cp_vec.engine.tape import Recorder, Tape, make_recorder, play

MAX_TAPES = 8
# Ops on all tapes of a worker together: its tapes and its recorder stay below 0.4 GB.
MAX_TAPE_OPS = 2**20
PATIENCE = 8
PAUSE = 8

# Columns of ``Shelf.tape`` and of ``Shelf.state``.
ORDER, ROW, N_INSTANTS = range(3)
N_TAPES, N_MISSES, N_PAUSED = range(3)


class Shelf(NamedTuple):
    """The tapes of one worker.

    Attributes
    ----------
    tape : ndarray of int64, shape (n_tapes, 3)
        In each column something else: the tapes in order, from the one used last on; the row that each was recorded
        from; its instants.
    at : ndarray of `AT`, shape (max(n_tapes, 1), n_ops)
    first, clock, change, before, order : ndarrays, likewise of a row for each tape
        As in `Tape`.
    note, pair, looked_at
        As in `Recorder`, for the row being recorded.
    state : ndarray of int64, shape (3,)
        Tapes recorded, misses in a row, rows that passed without a try since the last one.
    """

    tape: NDArray[np.int64]
    at: NDArray[np.void]
    first: NDArray[np.void]
    clock: NDArray[np.void]
    change: NDArray[np.void]
    before: NDArray[np.uint32]
    order: NDArray[np.uint32]
    note: NDArray[np.void]
    pair: NDArray[np.void]
    looked_at: NDArray[np.uint32]
    state: NDArray[np.int64]


def make_shelf(g: Graph, n_rows: int) -> Shelf:
    """Return an empty shelf for a worker's rows of a graph; the system provides only what is touched."""
    n_ops = len(g.op_kind)
    n_tapes = min(MAX_TAPES, MAX_TAPE_OPS // max(n_ops, 1), n_rows - 1)
    r = make_recorder(g, records=n_tapes > 0)
    n = max(n_tapes, 1)  # where there is none, something stands for it
    return Shelf(
        tape=np.tile(np.arange(n_tapes)[:, None], 3),
        at=np.empty((n, n_ops), AT),
        first=np.empty((n, len(r.first)), FIRST),
        clock=np.empty((n, len(r.clock)), CLOCK),
        change=np.empty((n, len(r.change)), CHANGE),
        before=np.empty((n, len(r.before)), np.uint32),
        order=np.empty((n, len(r.first)), np.uint32),
        note=r.note,
        pair=r.pair,
        looked_at=r.looked_at,
        state=np.zeros(3, np.int64),
    )


@kernel
def _same_zeros(a, b):
    for i in range(len(a)):
        if (a[i] == 0.0) != (b[i] == 0.0):
            return False
    return True


@kernel
def _fits(a, b):
    """Whether a row has the capacities of another, and its zeros."""
    for i in range(len(a.capacity_bytes_per_s)):
        if a.capacity_bytes_per_s[i] != b.capacity_bytes_per_s[i]:
            return False
    return (
        _same_zeros(a.duration_s, b.duration_s)
        and _same_zeros(a.latency_s, b.latency_s)
        and _same_zeros(a.bytes, b.bytes)
    )


@kernel
def _row_of(table, row):
    """One row of a table of costs."""
    return Costs(table.duration_s[row], table.bytes[row], table.latency_s[row], table.capacity_bytes_per_s[row])


@kernel
def _put_first(shelf, place):
    """Move the tape at a place of the order to its front."""
    t = shelf.tape[place, ORDER]
    for i in range(place, 0, -1):
        shelf.tape[i, ORDER] = shelf.tape[i - 1, ORDER]
    shelf.tape[0, ORDER] = t


@kernel
def take_turn(shelf):
    """Tell whether the next row tries tapes and is recorded; if not, it counts as one of the pause."""
    if len(shelf.tape) == 0:
        return False
    if shelf.state[N_MISSES] < PATIENCE or shelf.state[N_PAUSED] >= PAUSE:
        shelf.state[N_PAUSED] = 0
        return True
    shelf.state[N_PAUSED] += 1
    return False


@kernel
def find_tape(shelf, table, row, instant_s):
    """Play a row from the first tape whose order it takes; return the tape, -1 when there is none.

    Parameters
    ----------
    shelf : Shelf
    table : Costs
        Of arrays of shape (n_rows, number of ids).
    row : int
    instant_s : ndarray of float64
        Overwritten.
    """
    c = _row_of(table, row)
    for place in range(shelf.state[N_TAPES]):
        t = shelf.tape[place, ORDER]
        n = shelf.tape[t, N_INSTANTS]
        tape = Tape(n, shelf.first[t], shelf.clock[t], shelf.change[t], shelf.before[t], shelf.order[t])
        if _fits(c, _row_of(table, shelf.tape[t, ROW])) and play(tape, c, instant_s):
            _put_first(shelf, place)
            shelf.state[N_MISSES] = 0
            return t
    shelf.state[N_MISSES] += 1
    return -1


@kernel
def free_tape(shelf):
    """Return a tape to record on, which holds nothing any more: a new one, or the one used longest ago."""
    place = min(shelf.state[N_TAPES], len(shelf.tape) - 1)
    shelf.state[N_TAPES] = place
    return shelf.tape[place, ORDER]


@kernel
def recorder_of(shelf, t):
    """Return what records on a tape."""
    first, clock, change, before = shelf.first[t], shelf.clock[t], shelf.change[t], shelf.before[t]
    return Recorder(first, clock, change, before, shelf.note, shelf.pair, shelf.looked_at)


@kernel
def keep_tape(shelf, w, t, row):
    """Put a tape that has been recorded on the shelf."""
    place = shelf.state[N_TAPES]
    shelf.state[N_TAPES] = place + 1
    _put_first(shelf, place)
    n_instants = w.counter[N_EVENTS] + 1
    shelf.tape[t, ROW] = row
    shelf.tape[t, N_INSTANTS] = n_instants
    for i in range(len(w.at)):
        shelf.at[t, i]["start"] = w.at[i]["start"]
        shelf.at[t, i]["finish"] = w.at[i]["finish"]
    for at in range(n_instants):
        shelf.order[t, at] = at
