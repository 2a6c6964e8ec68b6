"""A binary heap of ops under way ordered by event time, with positions kept so that a flow's end can move.

The end of a flow moves whenever its rate does, mostly without becoming the next event. So a later end is only noted
(with the flow, not here): keys are never too late, and one that is too early is put right when its turn comes.

Events that fall together are common (a symmetric deployment runs in lockstep), so everything due at one
instant is taken out at once: one at a time when few are due, by filtering and re-heaping when many are.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_HEAP, NIL


@kernel
def _place(w, pos, slot, key_s):
    w.heap[pos]["slot"] = slot
    w.heap[pos]["key_s"] = key_s
    w.slot[slot]["heap_pos"] = pos


@kernel
def _sift_up(w, pos, slot, key_s):
    """Move the hole at ``pos`` up to where ``slot`` belongs, and place it there."""
    while pos > 0:
        parent = (pos - 1) >> 1
        if w.heap[parent]["key_s"] <= key_s:
            break
        _place(w, pos, w.heap[parent]["slot"], w.heap[parent]["key_s"])
        pos = parent
    _place(w, pos, slot, key_s)


@kernel
def _sift_down(w, pos, slot, key_s):
    """Move the hole at ``pos`` down to where ``slot`` belongs, and place it there."""
    n = w.count[N_HEAP]
    child = 2 * pos + 1
    while child + 1 < n:
        # Added up, not branched on: which child is earlier is anybody's guess, the processor's too.
        child += w.heap[child + 1]["key_s"] < w.heap[child]["key_s"]
        if w.heap[child]["key_s"] >= key_s:
            break
        _place(w, pos, w.heap[child]["slot"], w.heap[child]["key_s"])
        pos = child
        child = 2 * pos + 1
    if child + 1 == n and w.heap[child]["key_s"] < key_s:
        _place(w, pos, w.heap[child]["slot"], w.heap[child]["key_s"])
        pos = child
    _place(w, pos, slot, key_s)


@kernel
def heap_push(w, slot, key_s):
    """Insert ``slot``, which is not in the heap, with event time ``key_s`` (s)."""
    pos = w.count[N_HEAP]
    w.count[N_HEAP] = pos + 1
    _sift_up(w, pos, slot, key_s)


@kernel
def heap_set(w, slot, key_s):
    """Insert ``slot`` with event time ``key_s`` (s), or re-time it when it is in the heap already."""
    f = w.slot[slot]
    pos = f["heap_pos"]
    f["is_late"] = 0
    if pos == NIL:
        heap_push(w, slot, key_s)
    elif key_s < w.heap[pos]["key_s"]:
        _sift_up(w, pos, slot, key_s)
    else:
        f["is_late"] = 1


@kernel
def flow_end_s(w, slot):
    """End of a flow that moves at its rate from now on."""
    f = w.slot[slot]
    return f["since_s"] + max(f["remaining"], 0.0) / f["rate"]


@kernel
def _put_right(w, pos):
    """Move an entry whose key is too early to where it belongs; return whether it was."""
    slot = w.heap[pos]["slot"]
    f = w.slot[slot]
    if f["is_late"] == 0:
        return False
    f["is_late"] = 0
    _sift_down(w, pos, slot, flow_end_s(w, slot))
    return True


@kernel
def next_event_s(w):
    """Time of the next event (s); the heap must not be empty."""
    while _put_right(w, 0):
        pass
    return w.heap[0]["key_s"]


@kernel
def _remove(w, slot):
    pos = w.slot[slot]["heap_pos"]
    w.slot[slot]["heap_pos"] = NIL
    n = w.count[N_HEAP] - 1
    w.count[N_HEAP] = n
    if pos == n:
        return
    last, key_s = w.heap[n]["slot"], w.heap[n]["key_s"]
    if pos > 0 and key_s < w.heap[(pos - 1) >> 1]["key_s"]:
        _sift_up(w, pos, last, key_s)
    else:
        _sift_down(w, pos, last, key_s)


@kernel
def _find_due(w, limit_s, out):
    """Write the places of the entries with key <= ``limit_s`` to ``out``; return how many."""
    n = w.count[N_HEAP]
    if n == 0 or w.heap[0]["key_s"] > limit_s:
        return 0
    # They form a subtree that contains the root: breadth first.
    n_due = 1
    out[0] = 0
    done = 0
    while done < n_due:
        child = 2 * out[done] + 1
        done += 1
        if child < n and w.heap[child]["key_s"] <= limit_s:
            out[n_due] = child
            n_due += 1
        if child + 1 < n and w.heap[child + 1]["key_s"] <= limit_s:
            out[n_due] = child + 1
            n_due += 1
    return n_due


@kernel
def _order(w):
    """Put the whole heap in order, O(n)."""
    n = w.count[N_HEAP] // 2
    for i in range(n):
        pos = n - 1 - i
        _sift_down(w, pos, w.heap[pos]["slot"], w.heap[pos]["key_s"])


@kernel
def take_due(w, limit_s, out):
    """Move every slot with event time <= ``limit_s`` (s) out of the heap into ``out``; return how many."""
    n_due = _find_due(w, limit_s, out)
    n_late = 0
    for i in range(n_due - 1, -1, -1):  # from below: places above stay as they are
        if _put_right(w, out[i]):
            n_late += 1
    if n_late > 0:
        n_due = _find_due(w, limit_s, out)
    for i in range(n_due):
        out[i] = w.heap[out[i]]["slot"]
    n = w.count[N_HEAP]
    if n_due * 8 < n:
        for i in range(n_due):
            _remove(w, out[i])
        return n_due
    for i in range(n_due):
        w.slot[out[i]]["heap_pos"] = NIL
    kept = 0
    for pos in range(n):
        slot = w.heap[pos]["slot"]
        if w.slot[slot]["heap_pos"] != NIL:
            _place(w, kept, slot, w.heap[pos]["key_s"])
            kept += 1
    w.count[N_HEAP] = kept
    _order(w)
    return n_due
