"""A grid from file to Parquet: the rate at which more points are made, and the memory that a million of them take."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest

from g5cp_vec.config.grid import load_grid
from g5cp_vec.runner.api import expand_and_plan, run_sweep

HERE = Path(__file__).parent
MEMORY = """
import json, resource, sys, tempfile, time
sys.path.insert(0, sys.argv[1])
from test_bench_sweep import sweep
seconds, n_points = sweep(280, jobs=2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak_rss_bytes": peak, "n_points": n_points, "seconds": seconds}))
"""


def reference(steps: int) -> dict:
    """The reference grid with ``steps`` sequence lengths (as it stands: 48)."""
    grid = tomllib.loads((HERE / "reference_grid.toml").read_text())
    grid["axes"]["seq_len"]["steps"] = steps
    return grid


def sweep(steps: int, jobs: int) -> tuple[float, int]:
    """Seconds and valid points of a sweep that ends on disk."""
    n_valid = 0

    def on_plan(expansion, plan):
        nonlocal n_valid
        n_valid = int((expansion.reason_code < 0).sum())

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        run_sweep(reference(steps), folder, jobs=jobs, audit="none", collect=False, on_plan=on_plan)
        return time.perf_counter() - begin, n_valid


@pytest.mark.benchmark(group="sweep")
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    "steps", [pytest.param((4, 12), id="short"), pytest.param((12, 48), id="whole", marks=pytest.mark.slow)]
)
def test_marginal_rate(benchmark, record, steps, jobs):
    """Sizes in turn; what does not grow with the points (start, templates) is the rest of the time."""
    few, many = steps
    sweep(2, jobs)
    times = {few: [], many: []}
    n_points = {}

    def run(n):
        seconds, n_points[n] = sweep(n, jobs)
        times[n].append(seconds)

    benchmark.pedantic(run, (many,), setup=lambda: run(few), rounds=3)
    seconds = {n: statistics.median(times[n]) for n in steps}
    rate = (n_points[many] - n_points[few]) / (seconds[many] - seconds[few])
    begin = time.perf_counter()
    _, plan = expand_and_plan(load_grid(reference(many)), "exact", "none")
    plan_s = time.perf_counter() - begin
    record(
        n_points=n_points[many],
        n_structures=plan.n_structures,
        marginal_points_per_s=rate,
        fixed_s=seconds[few] - n_points[few] / rate,
        plan_s=plan_s,
    )


@pytest.mark.slow
@pytest.mark.benchmark(group="sweep")
def test_memory(benchmark, record):
    """In a process of its own, whose peak is nobody else's."""
    found = {}

    def run():
        command = [sys.executable, "-c", MEMORY, str(HERE)]
        found.update(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    benchmark.pedantic(run, rounds=1)
    record(**found)
