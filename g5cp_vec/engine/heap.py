"""A binary heap of ops ordered by event time, with positions kept so that a flow's end can move.

Events that fall together are common (a symmetric deployment runs in lockstep), so everything due at one
instant is taken out at once: one at a time when few are due, by filtering and re-heaping when many are.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import HEAP_N, NONE


@kernel
def _sift_up(w, pos):
    op = w.heap[pos]
    key = w.key_s[op]
    while pos > 0:
        parent = (pos - 1) >> 1
        other = w.heap[parent]
        if w.key_s[other] <= key:
            break
        w.heap[pos] = other
        w.heap_pos[other] = pos
        pos = parent
    w.heap[pos] = op
    w.heap_pos[op] = pos


@kernel
def _sift_down(w, pos):
    n = w.count[HEAP_N]
    op = w.heap[pos]
    key = w.key_s[op]
    while True:
        child = 2 * pos + 1
        if child >= n:
            break
        if child + 1 < n and w.key_s[w.heap[child + 1]] < w.key_s[w.heap[child]]:
            child += 1
        other = w.heap[child]
        if w.key_s[other] >= key:
            break
        w.heap[pos] = other
        w.heap_pos[other] = pos
        pos = child
    w.heap[pos] = op
    w.heap_pos[op] = pos


@kernel
def heap_set(w, op, key_s):
    """Insert ``op`` with event time ``key_s`` (s), or move it there when it is in the heap already."""
    pos = w.heap_pos[op]
    if pos == NONE:
        pos = w.count[HEAP_N]
        w.count[HEAP_N] = pos + 1
        w.heap[pos] = op
        w.key_s[op] = key_s
        _sift_up(w, pos)
    else:
        earlier = key_s < w.key_s[op]
        w.key_s[op] = key_s
        if earlier:
            _sift_up(w, pos)
        else:
            _sift_down(w, pos)


@kernel
def _remove(w, op):
    pos = w.heap_pos[op]
    w.heap_pos[op] = NONE
    n = w.count[HEAP_N] - 1
    w.count[HEAP_N] = n
    if pos == n:
        return
    last = w.heap[n]
    w.heap[pos] = last
    w.heap_pos[last] = pos
    _sift_down(w, pos)
    _sift_up(w, w.heap_pos[last])


@kernel
def take_due(w, limit_s, out):
    """Move every op with event time <= ``limit_s`` (s) out of the heap into ``out``; return how many."""
    n = w.count[HEAP_N]
    if n == 0 or w.key_s[w.heap[0]] > limit_s:
        return 0
    # Due entries form a subtree that contains the root: breadth first, ``out`` holds heap positions meanwhile.
    n_due = 1
    out[0] = 0
    done = 0
    while done < n_due:
        child = 2 * out[done] + 1
        done += 1
        if child < n and w.key_s[w.heap[child]] <= limit_s:
            out[n_due] = child
            n_due += 1
        if child + 1 < n and w.key_s[w.heap[child + 1]] <= limit_s:
            out[n_due] = child + 1
            n_due += 1
    for i in range(n_due):
        out[i] = w.heap[out[i]]
    if n_due * 8 < n:
        for i in range(n_due):
            _remove(w, out[i])
        return n_due
    for i in range(n_due):
        w.heap_pos[out[i]] = NONE
    kept = 0
    for pos in range(n):
        op = w.heap[pos]
        if w.heap_pos[op] != NONE:
            w.heap[kept] = op
            w.heap_pos[op] = kept
            kept += 1
    w.count[HEAP_N] = kept
    for pos in range(kept // 2 - 1, -1, -1):
        _sift_down(w, pos)
    return n_due
