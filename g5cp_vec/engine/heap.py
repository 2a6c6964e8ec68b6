"""Events in order of time: a binary heap of buckets, each a ring of slots whose events fall together.

Events that fall together are common (a symmetric deployment runs in lockstep), and they come one after another: an
event at the very time of the one before it joins its bucket, and a bucket is taken out whole. So most events cost no
more than a place in a list. Two buckets may have the same time; nothing depends on it.

The end of a flow moves whenever its rate does, mostly without becoming the next event. So a later end is only noted
(with the flow, not here): keys are never too late, and one that is too early is put right when its turn comes.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import FREE, LAST_PUSHED, N_HEAP, N_RECENT, N_SLOTS, NIL, OUTSIDE, RECENT


@kernel
def take_slot(w, op):
    """Return a slot: the one last given back, or a new one."""
    slot = w.count[FREE]
    if slot != NIL:
        w.count[FREE] = w.slot[slot]["after"]
    else:
        slot = w.count[N_SLOTS]
        w.count[N_SLOTS] = slot + 1
        w.slot[slot]["key_s"] = OUTSIDE
        w.slot[slot]["heap_pos"] = NIL
        w.slot[slot]["is_late"] = 0
    w.slot[slot]["op"] = op
    return np.uint32(slot)


@kernel
def free_slot(w, slot):
    """Give a slot back."""
    w.slot[slot]["after"] = w.count[FREE]
    w.count[FREE] = slot


@kernel
def _place(w, pos, slot, key_s):
    w.heap[pos]["slot"] = slot
    w.heap[pos]["key_s"] = key_s
    w.slot[slot]["heap_pos"] = pos


@kernel
def _sift_up(w, pos, slot, key_s):
    """Move the hole at ``pos`` up to where the bucket of ``slot`` belongs, and place it there."""
    while pos > 0:
        parent = (pos - 1) >> 1
        if w.heap[parent]["key_s"] <= key_s:
            break
        _place(w, pos, w.heap[parent]["slot"], w.heap[parent]["key_s"])
        pos = parent
    _place(w, pos, slot, key_s)


@kernel
def _sift_down(w, pos, slot, key_s):
    """Move the hole at ``pos`` down to where the bucket of ``slot`` belongs, and place it there."""
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
    f = w.slot[slot]
    f["key_s"] = key_s
    head = w.count[LAST_PUSHED]
    b = w.slot[head]
    if b["key_s"] == key_s and b["heap_pos"] != NIL and head != slot:
        tail = b["before"]
        f["before"] = tail
        f["after"] = head
        w.slot[tail]["after"] = slot
        b["before"] = slot
        return
    f["before"] = slot
    f["after"] = slot
    w.count[LAST_PUSHED] = slot
    pos = np.int64(w.count[N_HEAP])
    w.count[N_HEAP] = pos + 1
    _sift_up(w, pos, slot, key_s)


@kernel
def _fold_bits(key_s):
    """Return a number below `N_RECENT` to which all bits of a float contribute."""
    bits = np.float64(key_s).view(np.uint64)
    for shift in (32, 16, 8, 4):
        bits ^= bits >> np.uint64(shift)
    return bits & np.uint64(N_RECENT - 1)


@kernel
def find_chain(w, op, kind, rate, since, key_s):
    """Return the slot of the ops of a kind that have their event at ``key_s`` (s).

    Flows of a chain have one rate since one instant; of the others neither is said (0).

    Such ops need no slot each. Some recent chains are at hand, found by the bits of their time; where there is none,
    one is made that ``op`` is to be the first of.
    """
    at = _fold_bits(key_s)
    slot = w.count[RECENT + at]
    f = w.slot[slot]
    if f["key_s"] == key_s and f["kind"] == kind and f["rate"] == rate and f["since"] == since:
        return slot
    slot = take_slot(w, op)
    f = w.slot[slot]
    f["kind"] = kind
    f["rate"] = rate
    f["since"] = since
    f["n_ops"] = 0
    f["last"] = op
    w.count[RECENT + at] = slot
    heap_push(w, slot, key_s)
    return slot


@kernel
def join_chain(w, slot, op):
    """Put an op at the end of a chain."""
    f = w.slot[slot]
    w.member[f["last"]]["after"] = op
    f["last"] = op


@kernel
def _remove_bucket(w, pos):
    """Take the bucket at ``pos`` out of the heap."""
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
def _leave_bucket(w, slot):
    """Take ``slot`` out of a bucket that others are in, too."""
    f = w.slot[slot]
    after = f["after"]
    w.slot[f["before"]]["after"] = after
    w.slot[after]["before"] = f["before"]
    pos = f["heap_pos"]
    if pos != NIL:
        f["heap_pos"] = NIL
        w.heap[pos]["slot"] = after
        w.slot[after]["heap_pos"] = pos


@kernel
def heap_set(w, slot, key_s):
    """Insert ``slot`` with event time ``key_s`` (s), or re-time it when it is in the heap already."""
    f = w.slot[slot]
    f["is_late"] = 0
    if f["key_s"] == OUTSIDE:
        heap_push(w, slot, key_s)
    elif key_s >= f["key_s"]:
        f["is_late"] = 1
    elif f["after"] != slot:
        _leave_bucket(w, slot)
        heap_push(w, slot, key_s)
    else:
        f["key_s"] = key_s
        w.count[LAST_PUSHED] = slot
        _sift_up(w, np.int64(f["heap_pos"]), slot, key_s)


@kernel
def flow_end_s(w, slot):
    """End of a flow that moves at its rate from now on."""
    f = w.slot[slot]
    return f["since_s"] + max(f["remaining"], 0.0) / f["rate"]


@kernel
def next_event_s(w):
    """Time of the next event (s); the heap must not be empty."""
    while True:
        slot = w.heap[0]["slot"]
        f = w.slot[slot]
        if f["is_late"] == 0:
            return w.heap[0]["key_s"]
        f["is_late"] = 0
        key_s = flow_end_s(w, slot)
        if f["after"] != slot:
            _leave_bucket(w, slot)
            heap_push(w, slot, key_s)
        else:
            f["key_s"] = key_s
            _sift_down(w, np.int64(0), slot, key_s)


@kernel
def take_bucket(w):
    """Take the first bucket out of the heap; return its head.

    Whoever goes round it calls `leaves` on each slot before anything else is pushed or set.
    """
    head = w.heap[0]["slot"]
    w.slot[head]["heap_pos"] = NIL
    _remove_bucket(w, np.int64(0))
    return head


@kernel
def leaves(w, slot):
    """Whether the event of a slot from a bucket taken out is due; a later one goes back into the heap."""
    f = w.slot[slot]
    f["key_s"] = OUTSIDE
    if f["is_late"] == 0:
        return True
    f["is_late"] = 0
    heap_push(w, slot, flow_end_s(w, slot))
    return False
