"""The ready ops of every chip: the one that comes first in the chip's order at hand, the others in a heap by place.

Mostly one op at most is ready on a chip, so mostly the heap is empty and nobody looks at it.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_TOUCHED, NIL


@kernel
def touch_chip(w, chip):
    """List a chip among those that choose at the end of the instant."""
    if w.chip[chip]["is_touched"] == 0:
        w.chip[chip]["is_touched"] = 1
        w.touched[w.count[N_TOUCHED]] = chip
        w.count[N_TOUCHED] += 1


@kernel
def _push_rank(w, chip, rank):
    """Enter a ready op in its chip's heap of those that do not come first."""
    state = w.chip[chip]
    ready = w.ready[state["begin"] :]
    pos = state["n_ready"]
    state["n_ready"] = pos + 1
    while pos > 0:
        parent = (pos - 1) >> 1
        if ready[parent] <= rank:
            break
        ready[pos] = ready[parent]
        pos = parent
    ready[pos] = rank


@kernel
def _pop_rank(w, chip):
    """Take the first out of a chip's heap of ready ops."""
    state = w.chip[chip]
    ready = w.ready[state["begin"] :]
    first = ready[0]
    n = state["n_ready"] - 1
    state["n_ready"] = n
    last = ready[n]
    pos = 0
    while True:
        child = 2 * pos + 1
        if child >= n:
            break
        if child + 1 < n and ready[child + 1] < ready[child]:
            child += 1
        if ready[child] >= last:
            break
        ready[pos] = ready[child]
        pos = child
    ready[pos] = last
    return first


@kernel
def push_ready(w, op, chip):
    """Let a chip know of a ready compute op. A busy chip chooses when what runs on it ends."""
    state = w.chip[chip]
    rank = w.op[op]["rank"]
    if state["next_op"] == NIL:
        state["next_op"] = op
        state["next_rank"] = rank
    elif rank < state["next_rank"]:
        _push_rank(w, chip, state["next_rank"])
        state["next_op"] = op
        state["next_rank"] = rank
    else:
        _push_rank(w, chip, rank)
    if state["is_busy"] == 0:
        touch_chip(w, chip)


@kernel
def pop_ready(g, w, chip):
    """Take the first op of the chip's order from among the ready ones."""
    state = w.chip[chip]
    op = state["next_op"]
    if state["n_ready"] == 0:
        state["next_op"] = NIL
    else:
        rank = _pop_rank(w, chip)
        state["next_rank"] = rank
        state["next_op"] = g.chip_ops[state["begin"] + np.uint64(rank)]
    return op
