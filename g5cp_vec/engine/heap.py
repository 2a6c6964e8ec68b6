"""A binary heap of ops ordered by event time, with positions kept so that a flow's end can move.

Events that fall together are common (a symmetric deployment runs in lockstep), so everything due at one
instant is taken out at once: one at a time when few are due, by filtering and re-heaping when many are.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import HEAP_N, HEAP_POS, NONE


@kernel
def _place(w, pos, op, key_s):
    w.heap[pos] = op
    w.heap_key_s[pos] = key_s
    w.op_int[op, HEAP_POS] = pos


@kernel
def _sift_up(w, pos, op, key_s):
    """Move the hole at ``pos`` up to where ``op`` belongs, and place it there."""
    while pos > 0:
        parent = (pos - 1) >> 1
        if w.heap_key_s[parent] <= key_s:
            break
        _place(w, pos, w.heap[parent], w.heap_key_s[parent])
        pos = parent
    _place(w, pos, op, key_s)


@kernel
def _sift_down(w, pos, op, key_s):
    """Move the hole at ``pos`` down to where ``op`` belongs, and place it there."""
    n = w.count[HEAP_N]
    while True:
        child = 2 * pos + 1
        if child >= n:
            break
        if child + 1 < n and w.heap_key_s[child + 1] < w.heap_key_s[child]:
            child += 1
        if w.heap_key_s[child] >= key_s:
            break
        _place(w, pos, w.heap[child], w.heap_key_s[child])
        pos = child
    _place(w, pos, op, key_s)


@kernel
def heap_set(w, op, key_s):
    """Insert ``op`` with event time ``key_s`` (s), or move it there when it is in the heap already."""
    pos = w.op_int[op, HEAP_POS]
    if pos == NONE:
        pos = w.count[HEAP_N]
        w.count[HEAP_N] = pos + 1
        _sift_up(w, pos, op, key_s)
    elif key_s < w.heap_key_s[pos]:
        _sift_up(w, pos, op, key_s)
    else:
        _sift_down(w, pos, op, key_s)


@kernel
def heap_put(w, op, key_s):
    """Insert or re-time ``op`` without keeping the order; `heap_order` must follow. For when most entries move."""
    pos = w.op_int[op, HEAP_POS]
    if pos == NONE:
        pos = w.count[HEAP_N]
        w.count[HEAP_N] = pos + 1
    _place(w, pos, op, key_s)


@kernel
def heap_order(w):
    """Put the whole heap in order, O(n)."""
    for pos in range(w.count[HEAP_N] // 2 - 1, -1, -1):
        _sift_down(w, pos, w.heap[pos], w.heap_key_s[pos])


@kernel
def _remove(w, op):
    pos = w.op_int[op, HEAP_POS]
    w.op_int[op, HEAP_POS] = NONE
    n = w.count[HEAP_N] - 1
    w.count[HEAP_N] = n
    if pos == n:
        return
    last, key_s = w.heap[n], w.heap_key_s[n]
    if pos > 0 and key_s < w.heap_key_s[(pos - 1) >> 1]:
        _sift_up(w, pos, last, key_s)
    else:
        _sift_down(w, pos, last, key_s)


@kernel
def take_due(w, limit_s, out):
    """Move every op with event time <= ``limit_s`` (s) out of the heap into ``out``; return how many."""
    n = w.count[HEAP_N]
    if n == 0 or w.heap_key_s[0] > limit_s:
        return 0
    # Due entries form a subtree that contains the root: breadth first, ``out`` holds heap positions meanwhile.
    n_due = 1
    out[0] = 0
    done = 0
    while done < n_due:
        child = 2 * out[done] + 1
        done += 1
        if child < n and w.heap_key_s[child] <= limit_s:
            out[n_due] = child
            n_due += 1
        if child + 1 < n and w.heap_key_s[child + 1] <= limit_s:
            out[n_due] = child + 1
            n_due += 1
    for i in range(n_due):
        out[i] = w.heap[out[i]]
    if n_due * 8 < n:
        for i in range(n_due):
            _remove(w, out[i])
        return n_due
    for i in range(n_due):
        w.op_int[out[i], HEAP_POS] = NONE
    kept = 0
    for pos in range(n):
        op = w.heap[pos]
        if w.op_int[op, HEAP_POS] != NONE:
            _place(w, kept, op, w.heap_key_s[pos])
            kept += 1
    w.count[HEAP_N] = kept
    heap_order(w)
    return n_due
