"""The event heap against a plain mapping that is searched from end to end."""

from __future__ import annotations

import naive
import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.engine.arrays import N_HEAP, N_SLOTS, NIL, OUTSIDE, TIMERS, make_workspace
from g5cp_vec.engine.heap import find_chain, heap_set, join_chain, leaves, next_event_s, take_bucket
from g5cp_vec.runner.workload import compile_workload

N_OPS = 127
SET, TAKE = range(2)
GRAPH, _ = compile_workload(
    {"links": [], "chips": 0, "ops": [{"kind": "flow", "route": [], "bytes": 0}] * N_OPS, "deps": []}
)


@numba.njit
def _do(w, what, slots, times_s, out):
    """One action on the heap; the number of slots taken out, as the loop of a simulation takes them."""
    if what == TAKE:
        n_due = 0
        while w.count[N_HEAP] > 0 and w.heap[0]["key_s"] <= times_s[0]:
            head = take_bucket(w)
            slot = head
            while True:
                after = w.slot[slot]["after"]
                if leaves(w, slot):
                    out[n_due] = slot
                    n_due += 1
                slot = after
                if slot == head:
                    break
        return n_due
    for i in range(len(slots)):
        # A flow that has nothing left to move at the time.
        f = w.slot[slots[i]]
        f["since_s"], f["remaining"], f["rate"] = times_s[i], 0.0, 1.0
        heap_set(w, slots[i], times_s[i])
    return 0


@numba.njit
def _chain(w, ops, times_s):
    for i in range(len(ops)):
        join_chain(w, find_chain(w, ops[i], TIMERS, 0.0, 0, times_s[i]), ops[i])


@numba.njit
def _next(w):
    return next_event_s(w)


def bucket(w, head):
    """The slots of a bucket, found by going round it; both directions agree."""
    slots, slot = [], head
    while True:
        slots.append(int(slot))
        after = w.slot["after"][slot]
        assert w.slot["before"][after] == slot
        slot = after
        if slot == head:
            return slots


def check(w, events):
    """The heap holds what the twin holds, no key is below its parent's or too late, places are right."""
    n = w.count[N_HEAP]
    heads, keys = w.heap["slot"][:n].tolist(), w.heap["key_s"][:n]
    assert all(keys[(pos - 1) // 2] <= keys[pos] for pos in range(1, n))
    held = []
    for head, key in zip(heads, keys, strict=True):
        slots = bucket(w, head)
        assert (w.slot["key_s"][slots] == key).all()
        held += slots
    assert len(held) == len(set(held))
    ends = w.slot["since_s"][held]
    assert dict(zip(held, ends.tolist(), strict=True)) == events.at
    late = w.slot["is_late"][held] == 1
    assert (w.slot["key_s"][held][~late] == ends[~late]).all()
    assert (w.slot["key_s"][held][late] <= ends[late]).all()
    where = {slot: pos for pos, slot in enumerate(heads)}
    assert w.slot["heap_pos"].tolist() == [where.get(slot, NIL) for slot in range(len(w.slot))]
    assert set(np.flatnonzero(w.slot["key_s"] != OUTSIDE).tolist()) == set(held)


def run(actions):
    w, events, out = make_workspace(GRAPH), naive.Events(), np.empty(N_OPS, np.uint32)
    w.slot["heap_pos"], w.slot["key_s"], w.slot["is_late"] = NIL, OUTSIDE, 0
    for what, slots, times in actions:
        if what == TAKE and events.at:
            assert _next(w) == min(events.at.values())
        n = _do(w, what, np.array(slots, np.uint32), np.array(times, float), out)
        if what == TAKE:
            taken = out[:n].tolist()
            assert len(taken) == len(set(taken))
            assert set(taken) == events.take_due(times[0])
        else:
            for slot, time in zip(slots, times, strict=True):
                events.set(slot, time)
        check(w, events)
    return events


# Few distinct times: many events fall together, as they do in a symmetric deployment.
times = st.integers(0, 20).map(float)


@st.composite
def actions(draw):
    what = draw(st.sampled_from([SET, SET, SET, TAKE]))
    if what == TAKE:
        return what, [], [draw(times | st.just(np.inf))]
    slots = draw(st.lists(st.integers(0, N_OPS - 1), min_size=1, max_size=60))
    return what, slots, draw(st.lists(times, min_size=len(slots), max_size=len(slots)))


@settings(max_examples=100)
@given(st.lists(actions(), max_size=12))
def test_holds_and_gives_what_a_plain_mapping_does(actions):
    run(actions)


@settings(max_examples=10)
@given(st.permutations(range(N_OPS)))
def test_comes_out_in_order(order):
    # One event at a time: few are due among many, so each is taken out singly.
    assert (
        run([(SET, list(range(N_OPS)), [float(t) for t in order])] + [(TAKE, [], [float(t)]) for t in range(N_OPS)]).at
        == {}
    )


@settings(max_examples=50)
@given(st.permutations(range(N_OPS)), st.integers(0, N_OPS))
def test_many_at_once(order, n_due):
    left = run([(SET, list(range(N_OPS)), [float(t) for t in order]), (TAKE, [], [n_due - 0.5])])
    assert len(left.at) == N_OPS - n_due


def test_few_due_among_many_and_the_last_of_all_among_them():
    """A heap as it comes to lie: positions 0, 2, 6, ... lead down to the last; all others are due much later.

    Each due event is taken out singly, the last one moving into its place, which may itself be due and even earlier.
    """
    due = [0, 2, 6, 14, 30, 61, 62, 123, 124, 125, 126, 1, 3]
    time_of = {op: 1 + i / 100 for i, op in enumerate(due)}
    left = run([(SET, list(range(N_OPS)), [time_of.get(op, 100.0 + op) for op in range(N_OPS)]), (TAKE, [], [10.0])])
    assert sorted(left.at) == sorted(set(range(N_OPS)) - set(due))


def test_events_at_one_time_are_one_bucket():
    """Two times by turns in runs of ten; one of the first time moves away and back."""
    w, out = make_workspace(GRAPH), np.empty(N_OPS, np.uint32)
    w.slot["heap_pos"], w.slot["key_s"], w.slot["is_late"] = NIL, OUTSIDE, 0
    for first, time in ((0, 5.0), (10, 7.0)):
        _do(w, SET, np.arange(first, first + 10).astype(np.uint32), np.full(10, time), out)
    assert w.count[N_HEAP] == 2
    _do(w, SET, np.array([0], np.uint32), np.array([3.0]), out)  # the head of its bucket
    assert w.count[N_HEAP] == 3
    _do(w, SET, np.array([0], np.uint32), np.array([5.0]), out)
    assert _next(w) == 5.0
    n = _do(w, TAKE, np.zeros(0, np.uint32), np.array([6.0]), out)
    assert sorted(out[:n].tolist()) == list(range(10))
    assert w.count[N_HEAP] == 1


@given(st.lists(times.map(lambda time: time + 1), min_size=1, max_size=N_OPS))
def test_ops_of_one_time_are_chained(times_s):
    w, out = make_workspace(GRAPH), np.empty(N_OPS, np.uint32)
    w.slot["heap_pos"], w.slot["key_s"] = NIL, OUTSIDE
    _chain(w, np.arange(len(times_s), dtype=np.uint32), np.array(times_s))
    n_runs = 1 + sum(a != b for a, b in zip(times_s, times_s[1:], strict=False))
    assert len(set(times_s)) <= w.count[N_SLOTS] <= n_runs
    for time in sorted(set(times_s)):
        assert _next(w) == time
        n = _do(w, TAKE, np.zeros(0, np.uint32), np.array([time]), out)
        ops = []
        for slot in w.slot[out[:n]]:
            assert slot["kind"] == TIMERS
            ops.append(int(slot["op"]))
            while ops[-1] != slot["last"]:
                ops.append(int(w.member["after"][ops[-1]]))
        assert sorted(ops) == [op for op, at in enumerate(times_s) if at == time]
    assert w.count[N_HEAP] == 0


@settings(max_examples=50)
@given(st.permutations(range(N_OPS)), st.permutations(range(N_OPS)), st.integers(0, N_OPS))
def test_ends_that_move(first, then, n_due):
    """Every end moves, to and fro, before some are due."""
    slots = list(range(N_OPS))
    left = run([(SET, slots, [float(t) for t in times]) for times in (first, then)] + [(TAKE, [], [n_due - 0.5])])
    assert len(left.at) == N_OPS - n_due
