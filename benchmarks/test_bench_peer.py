"""The same workloads in SimGrid's C++, its simulation loop alone, one thread each, round by round in turn."""

from __future__ import annotations

import statistics
import time

import pytest
from deployments import LARGE, prepare
from peers import simgrid
from simulation import Simulation
from workloads import FAMILIES, as_text, full_fidelity, make

from g5cp_vec.cost.rows import CostRows
from g5cp_vec.runner.simulate import simulate_rows
from g5cp_vec.runner.template import Template

# How far the two last ends may lie apart.
RTOL = 1e-9
# Runs of each variant from which the fastest is chosen.
TRIALS = 2
SIZES = ["medium", pytest.param("big", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    try:
        return simgrid.build(tmp_path_factory.mktemp("simgrid"))
    except simgrid.Unavailable as reason:
        pytest.skip(str(reason))


def compare(benchmark, program, folder, workload, beside=lambda: None):
    """Check the answers of every variant of SimGrid; time us against the fastest, with ``beside`` before each round.

    Returns
    -------
    ours_s, simgrid_s : lists of float
        One entry a round; none of ours when nothing is timed.
    """
    simulation = Simulation(workload)
    simulation.run()
    path = folder / "workload.txt"
    path.write_text(as_text(workload))
    loop_s = {}
    for variant in simgrid.VARIANTS:
        peers = [simgrid.replay(program, path, variant) for _ in range(TRIALS)]
        for peer in peers:
            assert peer.n_done == workload.n_ops
            assert peer.makespan_s == pytest.approx(simulation.makespan_s, rel=RTOL)
        loop_s[variant] = min(peer.loop_s for peer in peers)
    fastest = min(loop_s, key=loop_s.__getitem__)
    simgrid_s = []

    def before_round():
        beside()
        simgrid_s.append(simgrid.replay(program, path, fastest).loop_s)

    benchmark.pedantic(simulation.run, setup=before_round, rounds=7)
    benchmark.extra_info.update(
        simgrid=simgrid.version(),
        variant=" ".join(fastest),
        variants_ops_per_s={" ".join(variant): workload.n_ops / best_s for variant, best_s in loop_s.items()},
        **simulation.counters,
    )
    if not benchmark.stats:
        return [], simgrid_s
    ours_s = benchmark.stats.stats.data
    modelled_s = min(loop_s["exec", update] for update in ("Lazy", "Full"))
    benchmark.extra_info["times_simgrid_modelled"] = modelled_s / min(ours_s)
    return ours_s, simgrid_s


def ratios(simgrid_s, ours_s):
    """Return the median over rounds, and that of the best times, which other work on the machine moves less."""
    if not ours_s:
        return {}
    paired = statistics.median(a / b for a, b in zip(simgrid_s, ours_s, strict=True))
    return {"times_simgrid": paired, "times_simgrid_best": min(simgrid_s) / min(ours_s)}


@pytest.mark.benchmark(group="peer")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(benchmark, record, program, tmp_path, family, size):
    workload = make(family, size)
    ours_s, simgrid_s = compare(benchmark, program, tmp_path, workload)
    record(
        n_ops=workload.n_ops,
        simgrid_ops_per_s=workload.n_ops / statistics.median(simgrid_s),
        **ratios(simgrid_s, ours_s),
    )


@pytest.mark.benchmark(group="peer")
def test_full(benchmark, record, program, tmp_path):
    """The deployment in full fidelity; beside it a batch of its points on two threads."""
    structure, costs = prepare(**LARGE)
    workload = full_fidelity(structure, costs)
    template = Template(structure, reduced=False)
    n_points = 8
    rows = CostRows(*(column.repeat(n_points, axis=0) for column in costs))
    simulate_rows(template, rows, 2)
    batch_s = []

    def batch():
        begin = time.perf_counter()
        simulate_rows(template, rows, 2)
        batch_s.append((time.perf_counter() - begin) / n_points)

    ours_s, simgrid_s = compare(benchmark, program, tmp_path, workload, batch)
    record(
        n_ops=workload.n_ops,
        simgrid_ops_per_s=workload.n_ops / statistics.median(simgrid_s),
        **ratios(simgrid_s, ours_s),
        times_simgrid_batch=statistics.median(a / b for a, b in zip(simgrid_s, batch_s, strict=True)),
        batch_ops_per_s=workload.n_ops / statistics.median(batch_s),
    )
