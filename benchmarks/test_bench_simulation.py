"""One deployment: every rank and layer, or only what exact reductions leave; and what it takes to reduce it."""

from __future__ import annotations

import statistics
import time

import pytest
from deployments import LARGE, SHAPE, build_template, deploy, lengths, prepare
from simulation import Simulation
from workloads import full_fidelity

from g5cp_vec.runner.simulate import simulate_rows
from g5cp_vec.runner.template import Template

TEMPLATES = {
    "64 chips": {**SHAPE, "n_chips": 64},
    "1024 chips": {**SHAPE, "n_chips": 1024},
    "64 chips, experts": LARGE,
    "1024 chips, experts": {**LARGE, "n_chips": 1024, "ep": 64},
    "64 chips, direct all-to-all of 64": {**LARGE, "tp": 8, "cp": 1, "ep": 64, "collective": "direct"},
    "1024 chips, direct all-to-all of 256": {
        **LARGE, "n_chips": 1024, "tp": 8, "cp": 4, "ep": 256, "collective": "direct"
    },
}  # fmt: skip


@pytest.mark.benchmark(group="simulation")
def test_full(benchmark, record):
    simulation = Simulation(full_fidelity(*prepare(**LARGE)))
    simulation.run()
    benchmark.pedantic(simulation.run, rounds=10)
    record(**simulation.counters)


@pytest.mark.benchmark(group="simulation")
@pytest.mark.parametrize("jobs", [1, 2])
def test_full_batch(benchmark, record, jobs):
    """Points at many lengths; those whose ops wait for the same others are played from a tape."""
    structure, costs = prepare(**{**LARGE, "seq_len": lengths(64)})
    template = Template(structure, reduced=False)
    done = simulate_rows(template, costs, jobs)
    benchmark.pedantic(simulate_rows, (template, costs, jobs), rounds=5)
    record(n_points=64, n_ops=int(done.n_ops.sum()), n_events=int(done.n_events.sum()))


@pytest.mark.benchmark(group="simulation")
def test_reduced_batch(benchmark, record):
    structure, costs = prepare(**{**LARGE, "seq_len": lengths(500)})
    template = Template(structure, reduced=True)
    done = simulate_rows(template, costs)
    benchmark.pedantic(simulate_rows, (template, costs), rounds=5)
    record(
        n_points=500,
        n_ops=500 * template.n_ops,
        n_ops_simulated=int(done.n_ops.sum()),
        n_events=int(done.n_events.sum()),
    )


@pytest.mark.benchmark(group="simulation")
def test_cost_over_chips(benchmark, record):
    """One shape on more and more chips: the points of each size in turn, so that noise meets all of them."""
    sizes = (64, 1024, 16384)
    n_points = 500
    templates, costs, template_s = {}, {}, {}
    for n_chips in sizes:
        keys = {**SHAPE, "n_chips": n_chips, "seq_len": lengths(n_points)}
        dep, network, _ = deploy(**keys)
        begin = time.perf_counter()
        templates[n_chips] = build_template(dep, network)
        template_s[n_chips] = time.perf_counter() - begin
        costs[n_chips] = prepare(**keys)[1]
        simulate_rows(templates[n_chips], costs[n_chips])
    point_s = {n_chips: [] for n_chips in sizes}

    def run():
        for n_chips in sizes:
            begin = time.perf_counter()
            simulate_rows(templates[n_chips], costs[n_chips])
            point_s[n_chips].append((time.perf_counter() - begin) / n_points)

    benchmark.pedantic(run, rounds=9)
    growth = statistics.median(most / least for most, least in zip(point_s[16384], point_s[64], strict=True))
    record(
        n_points=len(sizes) * n_points,
        point_us={n_chips: 1e6 * statistics.median(times) for n_chips, times in point_s.items()},
        template_s=template_s,
        growth=growth,
    )


@pytest.mark.benchmark(group="template")
@pytest.mark.parametrize("name", TEMPLATES)
def test_template(benchmark, record, name):
    dep, network, _ = deploy(**TEMPLATES[name])
    template = build_template(dep, network)
    benchmark.pedantic(build_template, (dep, network), rounds=5)
    record(n_ops=template.n_ops, n_classes=len(template.chain(template.folds()[0]).graph.op_kind))
