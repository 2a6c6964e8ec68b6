"""Workloads of `replay` written by hand, and how closely times have to agree."""

from __future__ import annotations

import numpy as np

from g5cp_vec import replay
from g5cp_vec.engine import _jit
from g5cp_vec.engine.arrays import AT, Instants
from g5cp_vec.engine.fold import is_periodic

RTOL = 1e-9
# Event times closer than this, yet not equal, are grouped by rounding: such cases say nothing about either side.
CLEAR_GAP = 1e-10


def compute(chip, secs, prio=0):
    return {"kind": "compute", "chip": chip, "secs": secs, "prio": prio}


def flow(route, n_bytes, lat=0):
    return {"kind": "flow", "route": route, "bytes": n_bytes, "lat": lat}


def workload(ops, deps=(), bw=(), chips=0, lat=None):
    links = [{"bw": b} for b in bw]
    for link, seconds in zip(links, lat or (), strict=False):
        link["lat"] = seconds
    return {"links": links, "chips": chips, "ops": list(ops), "deps": [list(dep) for dep in deps]}


def assert_times(actual, expected):
    """Every time within RTOL of itself: stricter than RTOL of the makespan, and attainable."""
    np.testing.assert_allclose(np.asarray(actual, float), [float(time) for time in expected], rtol=RTOL, atol=0)


def assert_same(result, makespan, start, finish):
    assert_times(result.finish, finish)
    assert_times(result.start, start)
    assert_times([result.makespan], [makespan])


def kernel(load):
    result = replay(load)
    return result.makespan, result.start, result.finish


@_jit.kernel(entry=True)
def _is_periodic(times, run, window):
    return is_periodic(times, run, window)


def settles(start, finish, run, window):
    """What the engine says of times of ops in seconds; see `is_periodic`."""
    instant_s, at = np.unique(np.concatenate([start, finish]).astype(float), return_inverse=True)
    ops = np.zeros(len(start), AT)
    ops["start"], ops["finish"] = np.split(at, 2)
    return bool(_is_periodic(Instants(instant_s, instant_s[-1], ops), run, window))
