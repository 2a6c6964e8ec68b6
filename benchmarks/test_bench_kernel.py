"""One call of the kernel on every family, a thousand to a million ops: no two events coincide."""

from __future__ import annotations

import time

import naive
import pytest
from simulation import Simulation
from workloads import FAMILIES, as_mapping, make

SIZES = ["small", "medium", "big", pytest.param("huge", marks=pytest.mark.slow)]


@pytest.mark.benchmark(group="kernel")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_simulate(benchmark, record, family, size):
    simulation = Simulation(make(family, size))
    simulation.run()
    if size in ("small", "medium"):
        benchmark(simulation.run)
    else:
        benchmark.pedantic(simulation.run, rounds=3)
    beside = {}
    if size == "small" and benchmark.enabled:
        mapping = as_mapping(simulation.workload)
        begin = time.perf_counter()
        naive.simulate(mapping, exact=False)
        beside["times_naive"] = (time.perf_counter() - begin) / benchmark.stats.stats.median
    record(**simulation.counters, **beside)
