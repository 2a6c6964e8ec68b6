"""Repeated layers: the kernel's verdict and the times it derives, against their definitions and against long chains."""

from __future__ import annotations

import random

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replays import settles

from g5cp_vec import replay
from g5cp_vec.engine.fold import unfold


@st.composite
def short_chains(draw):
    """``(start, finish, first, unit, kept)`` in whole seconds: often periodic, often nearly so."""
    first, unit, kept = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    period, length = draw(st.integers(0, 6)), st.integers(0, 9)
    begin = draw(st.integers(0, 6))
    start = [draw(st.integers(0, begin)) for _ in range(first)]
    finish = [time + draw(st.integers(0, max(begin - time, 0))) for time in start]
    offsets, lengths = [draw(st.integers(0, 6)) for _ in range(unit)], [draw(length) for _ in range(unit)]
    for k in range(kept):
        start += [begin + k * period + offset for offset in offsets]
        finish += [begin + k * period + offset + n for offset, n in zip(offsets, lengths, strict=True)]
    end = begin + kept * period
    for _ in range(draw(st.integers(0, 2))):
        start.append(end + draw(st.integers(-3, 9)))
        finish.append(start[-1] + draw(length))
    for _ in range(draw(st.integers(0, 2))):
        op, change = draw(st.integers(0, len(start) - 1)), draw(st.integers(-2, 2))
        start[op] += draw(st.sampled_from([0, change]))
        finish[op] = max(start[op], finish[op] + change)
    return start, finish, first, unit, kept


def verdict(start, finish, first, unit, kept):
    window = np.zeros(2)
    run = np.array([first, unit, kept, 1])
    return settles(start, finish, run, window), tuple(window)


@settings(max_examples=500)
@given(short_chains())
def test_the_verdict_is_that_of_the_definition(chain):
    settled, window = naive.repeats(*chain)
    assume(window[1] >= window[0])  # units start in order
    assert verdict(*chain) == (settled, window)


# A unit is a compute of 3 s, which frees the next unit, and a flow of 5 s beside it: the flow of one unit is in flight
# when the next starts. Four units, and one op before and one after.
STEADY = ([0, 2, 2, 5, 5, 8, 8, 11, 11, 16], [2, 5, 7, 8, 10, 11, 13, 14, 16, 17], 1, 2, 4)


def changed(op, start=0.0, finish=0.0):
    starts, ends, *run = STEADY
    starts, ends = list(map(float, starts)), list(map(float, ends))
    starts[op] += start
    ends[op] += finish
    return starts, ends, *run


def test_a_steady_chain_is_periodic():
    assert verdict(*STEADY) == naive.repeats(*STEADY) == (True, (8, 11))


@pytest.mark.parametrize(("change", "what"), [
    ((0, 0, 4), "the op before still runs when the oldest flow in flight starts"),
    ((1, 0, 1), "the first compute took longer"),
    ((2, 0, 2), "the first flow, which is no flow's image, still runs when the next but one starts"),
    ((3, 0, 0.5), "the second compute took longer"),
    ((4, 0.5, 0), "the second flow started later"),
    ((4, 0, -3), "the second flow is through before the third starts"),
    ((9, -5, 0), "what follows starts with the last unit"),
])  # fmt: skip
def test_each_departure_from_the_period_is_noticed(change, what):
    assert not verdict(*changed(*change))[0], what
    assert not naive.repeats(*changed(*change))[0], what


def test_what_has_started_and_ended_must_be_the_same():
    """Two units of two ops, 3 s apart; the second op is in another state when its unit starts."""
    for start, finish in (
        ([0, 1, 3, 3], [2, 3, 5, 5]),  # to come in the first unit, started in the second
        ([0, 0, 3, 3], [2, 3, 5, 3]),  # running in the first unit, ended in the second
    ):
        assert not verdict(start, finish, 0, 2, 2)[0]
        assert not naive.repeats(start, finish, 0, 2, 2)[0]
    same = [0, 0, 3, 3], [2, 3, 5, 6], 0, 2, 2
    assert verdict(*same) == naive.repeats(*same) == (True, (0, 3))


@pytest.mark.parametrize(("times_eps", "settled"), [(0.4, True), (-0.4, True), (3, False), (-3, False)])
@pytest.mark.parametrize("op", [3, 4])
def test_times_are_equal_to_rounding_of_the_period(op, times_eps, settled):
    moved = times_eps * 1e-12 * 3
    # A compute's end moves the next unit's start; a flow's start moves alone.
    chain = changed(op, finish=moved) if op == 3 else changed(op, start=moved)
    assert verdict(*chain)[0] == settled


@settings(max_examples=100)
@given(st.data())
def test_unfolded_times_are_those_of_one_unit_more_after_another(data):
    runs, windows, times, n_full = [], [], [], 0
    some = st.integers(0, 20)
    for _ in range(data.draw(st.integers(0, 3))):
        before, unit, kept, extra = data.draw(st.tuples(*(st.integers(low, 4) for low in (0, 1, 2, 0))))
        times += data.draw(st.lists(some, min_size=before, max_size=before))
        runs.append((len(times), unit, kept, extra))
        copies = data.draw(
            st.lists(st.lists(some, min_size=kept, max_size=kept).map(sorted), min_size=unit, max_size=unit)
        )
        times += [mine[k] for k in range(kept) for mine in copies]
        b = data.draw(st.integers(max(mine[0] for mine in copies), 20))
        windows.append((b - data.draw(st.integers(0, 6)), b))
        n_full += before + unit * (kept + extra)
    tail = data.draw(st.lists(some, max_size=3))
    times += tail
    table = np.array(runs, np.int64).reshape(-1, 4)
    long = unfold(np.array(times, float), table, np.array(windows, float).reshape(-1, 2), n_full + len(tail))
    assert long.tolist() == naive.unfold(times, runs, windows)


def test_unfolded_by_hand():
    # STEADY with two units more. The window (8, 11] passes twice more: of the starts it holds the fourth unit's, of the
    # ends the third compute's and the second flow's; what ends later ends 2 * 3 s later still.
    starts, ends, first, unit, kept = STEADY
    runs, windows = np.array([[first, unit, kept, 2]]), np.array([[8.0, 11.0]])
    assert unfold(np.array(starts, float), runs, windows, 14).tolist() == [
        0, 2, 2, 5, 5, 8, 8, 11, 11, 14, 14, 17, 17, 22,
    ]  # fmt: skip
    assert unfold(np.array(ends, float), runs, windows, 14).tolist() == [
        2, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23,
    ]  # fmt: skip


# --- Chains that are played -------------------------------------------------------------------------------------------


def random_unit(seed):
    """Computes on two chips and flows over two links, waiting for one another and for the unit before."""
    rng = random.Random(seed)
    ops, inside, across = [], [], []
    for i in range(rng.randrange(2, 6)):
        if i == 0 or rng.random() < 0.5:
            ops.append({"kind": "compute", "chip": rng.randrange(2), "secs": rng.choice([1, 2, 3, 0.7])})
        else:
            route = rng.choice([[0], [1], [0, 1]])
            ops.append({"kind": "flow", "route": route, "bytes": rng.choice([1, 2, 5]), "lat": rng.choice([0, 0.5])})
        inside += [(before, i) for before in range(i) if rng.random() < 0.4]
    across += [(rng.randrange(len(ops)), rng.randrange(len(ops))) for _ in range(rng.randrange(1, 4))]
    # Everything waits for something of the unit before, as a layer does.
    return ops, inside, sorted({*across, *((rng.randrange(len(ops)), i) for i in range(len(ops)))})


def chained(unit, n_units):
    """A compute, the unit as often as said, and a compute that waits for the whole last one."""
    pattern, inside, across = unit
    ops = [{"kind": "compute", "chip": 0, "secs": 1, "prio": -1}]
    deps = [[0, 1 + i] for i in range(len(pattern))]
    for k in range(n_units):
        base = len(ops)
        for op in pattern:
            ops.append({**op, "prio": len(ops)} if op["kind"] == "compute" else dict(op))
        deps += [[base + before, base + after] for before, after in inside]
        if k:
            deps += [[base - len(pattern) + before, base + after] for before, after in across]
    deps += [[len(ops) - 1 - i, len(ops)] for i in range(len(pattern))]
    ops.append({"kind": "compute", "chip": 1, "secs": 1, "prio": len(ops)})
    return {"links": [{"bw": 1}, {"bw": 2}], "chips": 2, "ops": ops, "deps": deps}


N_UNITS = 12


def accepted_folds(seed):
    """How many short chains of a random unit are believed periodic; each must give the times of the long one."""
    unit = random_unit(seed)
    whole = replay(chained(unit, N_UNITS))
    n_accepted = 0
    for kept in range(2, 8):
        short, window = replay(chained(unit, kept)), np.zeros(2)
        run = np.array([1, len(unit[0]), kept, N_UNITS - kept])
        if settles(short.start, short.finish, run, window):
            n_accepted += 1
            for mine, theirs in ((short.start, whole.start), (short.finish, whole.finish)):
                derived = unfold(mine, run[None], window[None], len(theirs))
                np.testing.assert_allclose(derived, theirs, rtol=0, atol=1e-12 * whole.makespan)
    return n_accepted


def test_what_is_believed_is_true_of_the_long_chain():
    counts = [accepted_folds(seed) for seed in range(300)]
    # The verdict means something: most chains settle, not all at once, some never.
    assert sum(n == 6 for n in counts) > 10
    assert sum(0 < n < 6 for n in counts) > 10
    assert sum(n == 0 for n in counts) > 10
