"""The event heap against a plain mapping that is searched from end to end."""

from __future__ import annotations

import naive
import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.engine.arrays import HEAP_N, HEAP_POS, NONE, make_workspace
from g5cp_vec.engine.heap import heap_order, heap_put, heap_set, take_due

N_OPS = 127
SET, PUT, TAKE = range(3)


@numba.njit
def _do(w, what, ops, times_s, out):
    """One action on the heap; the number of ops taken out."""
    if what == TAKE:
        return take_due(w, times_s[0], out)
    for i in range(len(ops)):
        if what == SET:
            heap_set(w, ops[i], times_s[i])
        else:
            heap_put(w, ops[i], times_s[i])
    if what == PUT:
        heap_order(w)
    return 0


def check(w, events):
    """The heap holds what the twin holds, every parent is due no later than its children, positions are right."""
    n = w.count[HEAP_N]
    held = w.heap[:n].tolist()
    assert dict(zip(held, w.heap_key_s[:n].tolist(), strict=True)) == events.at
    assert len(held) == len(set(held))
    assert all(w.heap_key_s[(pos - 1) // 2] <= w.heap_key_s[pos] for pos in range(1, n))
    where = {op: pos for pos, op in enumerate(held)}
    assert w.op_int[:, HEAP_POS].tolist() == [where.get(op, NONE) for op in range(N_OPS)]


def run(actions):
    w, events, out = make_workspace(N_OPS, 1, 1, 1), naive.Events(), np.empty(N_OPS, np.int32)
    for what, ops, times in actions:
        n = _do(w, what, np.array(ops, np.int32), np.array(times, float), out)
        if what == TAKE:
            taken = out[:n].tolist()
            assert len(taken) == len(set(taken))
            assert set(taken) == events.take_due(times[0])
        else:
            for op, time in zip(ops, times, strict=True):
                events.set(op, time)
        check(w, events)
    return events


# Few distinct times: many events fall together, as they do in a symmetric deployment.
times = st.integers(0, 20).map(float)


@st.composite
def actions(draw):
    what = draw(st.sampled_from([SET, SET, PUT, TAKE]))
    if what == TAKE:
        return what, [], [draw(times | st.just(np.inf))]
    ops = draw(st.lists(st.integers(0, N_OPS - 1), min_size=1, max_size=60, unique=what == PUT))
    return what, ops, draw(st.lists(times, min_size=len(ops), max_size=len(ops)))


@settings(max_examples=100)
@given(st.lists(actions(), max_size=12))
def test_holds_and_gives_what_a_plain_mapping_does(actions):
    run(actions)


@settings(max_examples=10)
@given(st.permutations(range(N_OPS)), st.sampled_from([SET, PUT]))
def test_comes_out_in_order(order, what):
    # One event at a time: few are due among many, so each is taken out singly.
    assert (
        run([(what, list(range(N_OPS)), [float(t) for t in order])] + [(TAKE, [], [float(t)]) for t in range(N_OPS)]).at
        == {}
    )


@settings(max_examples=50)
@given(st.permutations(range(N_OPS)), st.integers(0, N_OPS))
def test_many_at_once(order, n_due):
    left = run([(SET, list(range(N_OPS)), [float(t) for t in order]), (TAKE, [], [n_due - 0.5])])
    assert len(left.at) == N_OPS - n_due


def test_few_due_among_many_and_the_last_of_all_among_them():
    """A heap as it is laid out: positions 0, 2, 6, ... lead down to the last; all others are due much later.

    Each due event is taken out singly, the last one moving into its place, which may itself be due and even earlier.
    """
    due = [0, 2, 6, 14, 30, 61, 62, 123, 124, 125, 126, 1, 3]
    time_of = {op: 1 + i / 100 for i, op in enumerate(due)}
    left = run([(PUT, list(range(N_OPS)), [time_of.get(op, 100.0 + op) for op in range(N_OPS)]), (TAKE, [], [10.0])])
    assert sorted(left.at) == sorted(set(range(N_OPS)) - set(due))
