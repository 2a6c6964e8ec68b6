"""Changes that travel: through chains of links, through ends that move, and from one row to the next."""

from __future__ import annotations

import random

import naive
import numpy as np
import pytest

from g5cp_vec import replay
from g5cp_vec.engine.measure import MAKESPAN_S, no_tags
from g5cp_vec.runner.simulate import run_graph
from g5cp_vec.runner.workload import compile_workload


def flow(route, n_bytes, lat=0):
    return {"kind": "flow", "route": route, "bytes": n_bytes, "lat": lat}


def load_of(bw, ops, deps=(), chips=0):
    return {"links": [{"bw": b} for b in bw], "chips": chips, "ops": ops, "deps": [list(dep) for dep in deps]}


def assert_as_twin(load):
    makespan, start, finish = naive.simulate(load)
    result = replay(load)
    np.testing.assert_allclose(result.finish, [float(t) for t in finish], rtol=0, atol=1e-12 * float(makespan))
    np.testing.assert_allclose(result.start, [float(t) for t in start], rtol=0, atol=1e-12 * float(makespan))


def test_a_join_raises_a_join():
    # Links 2, 4, 9 B/s; f0 on 0, f1 on 0 and 1, f2 on 1 and 2, f3 on 2: rates 1, 1, 3, 6.
    # f0 ends at 1 s: f1 gets 2, so link 1 is full below the 3 of f2, which falls to 2 and leaves 7 to f3.
    load = load_of([2, 4, 9], [flow([0], 1), flow([0, 1], 5), flow([1, 2], 7), flow([2], 20)])
    finish = replay(load).finish
    # From 1 s: f1 has 4 B at 2 B/s, f2 4 B at 2 B/s, f3 14 B at 7 B/s: all end at 3 s.
    np.testing.assert_allclose(finish, [1, 3, 3, 3], rtol=1e-12)


@pytest.mark.parametrize("n_links", [3, 10, 33])
@pytest.mark.parametrize("rising", [False, True])
def test_cascade_along_a_chain(n_links, rising):
    # Flow i crosses links i and i + 1; every link is a little wider (narrower) than the one before, so that each change
    # at one end reaches the other, alternately up and down.
    bw = [100 + (i if rising else -i) for i in range(n_links + 1)]
    ops = [flow([i, i + 1], 1000 + 37 * (i % 5)) for i in range(n_links)]
    ops += [flow([0], 100), flow([0], 50, 1), flow([n_links], 70, 2)]
    assert_as_twin(load_of(bw, ops))


@pytest.mark.parametrize("seed", range(8))
def test_crowds_that_come_and_go(seed):
    # Ends move to and fro many times before they come; shares lie far apart.
    rng = random.Random(seed)
    bw = [rng.choice([1, 3, 10, 1000]) for _ in range(9)]
    ops = [
        flow(rng.sample(range(9), rng.randrange(1, 4)), rng.randrange(1, 400), rng.choice([0, 0, 1, 2, 5, 9]))
        for _ in range(60)
    ]
    assert_as_twin(load_of(bw, ops))


def test_ops_follow_one_another_in_few_places():
    # A hundred ops in three strands: places are handed on from flows to computes and back.
    rng = random.Random(1)
    ops, deps = [], []
    for i in range(102):
        if rng.random() < 0.5:
            ops.append(flow(rng.sample(range(3), 2), rng.randrange(5), rng.randrange(3)))
        else:
            ops.append({"kind": "compute", "chip": i % 2, "secs": rng.randrange(4), "prio": rng.randrange(3)})
        if i >= 3:
            deps.append((i - 3, i))
    assert_as_twin(load_of([2, 3, 5], ops, deps, chips=2))


def rows_of(seed, n_rows):
    rng = random.Random(seed)
    ops, deps = [], []
    for i in range(80):
        ops.append(flow(rng.sample(range(6), rng.randrange(1, 4)), rng.randrange(1, 90), rng.choice([0, 1])))
        if i % 4 == 3:
            ops[-1] = {"kind": "compute", "chip": i % 3, "secs": rng.random(), "prio": i}
        if i > 5:
            deps.append((rng.randrange(i - 5, i), i))
    graph, costs = compile_workload(load_of([rng.uniform(1, 9) for _ in range(6)], ops, deps, chips=3))
    drawn = np.random.default_rng(seed)
    tables = tuple(column * drawn.uniform(0.5, 2.0, (n_rows, len(column))) for column in costs)
    return graph, no_tags(80, 3), tables


def test_rows_leave_nothing_to_the_next():
    graph, tags, tables = rows_of(2, 7)
    together = run_graph(graph, tags, tables, keep_times=True)[3].times_s
    for row in range(7):
        alone = run_graph(graph, tags, tuple(column[row : row + 1] for column in tables), keep_times=True)[3].times_s
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("jobs", [2, 3])
def test_threads_change_no_bit(jobs):
    graph, tags, tables = rows_of(3, 11)
    times_s = run_graph(graph, tags, tables, keep_times=True)[3].times_s
    np.testing.assert_array_equal(run_graph(graph, tags, tables, jobs, keep_times=True)[3].times_s, times_s)
    measures = run_graph(graph, tags, tables, 1)[0]
    np.testing.assert_array_equal(run_graph(graph, tags, tables, jobs)[0], measures)
    np.testing.assert_array_equal(measures[:, MAKESPAN_S], times_s[:, 1].max(axis=1))
