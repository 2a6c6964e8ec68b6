"""The same workloads in SimGrid's C++, its simulation loop alone, one thread each, round by round in turn."""

from __future__ import annotations

import statistics
import time

import pytest
from deployments import LARGE, lengths, prepare
from peers import simgrid
from simulation import Simulation
from workloads import FAMILIES, as_text, full_fidelity, make

from g5cp_vec.runner.simulate import simulate_rows
from g5cp_vec.runner.template import Template

# How far the two last ends may lie apart.
RTOL = 1e-9
# Seconds that our runs of a round take together: one of them may be over before its caches are warm again.
ROUND_S = 0.1
# Points of a batch.
N_POINTS = 64
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
    """Check the answers of every variant of SimGrid; time us against its plain use and against the fastest variant.

    Returns
    -------
    ours_s, plain_s, fastest_s : lists of float
        Seconds of one simulation; one entry a round, with ``beside`` run before each.
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
    ours_s, plain_s, fastest_s = [], [], []

    def round_of_all():
        beside()
        plain_s.append(simgrid.replay(program, path, simgrid.PLAIN).loop_s)
        fastest_s.append(simgrid.replay(program, path, fastest).loop_s)
        simulation.run()
        n_runs, begin = 0, time.perf_counter()
        while n_runs == 0 or time.perf_counter() < begin + ROUND_S:
            simulation.run()
            n_runs += 1
        ours_s.append((time.perf_counter() - begin) / n_runs)

    benchmark.pedantic(round_of_all, rounds=7)
    benchmark.extra_info.update(
        simgrid=simgrid.version(),
        fastest=" ".join(fastest),
        variants_ops_per_s={" ".join(variant): workload.n_ops / best_s for variant, best_s in loop_s.items()},
        **simulation.counters,
    )
    return ours_s, plain_s, fastest_s


def beside_simgrid(n_ops, ours_s, plain_s, fastest_s):
    """Return SimGrid's rates and how many times faster we are.

    Ratios are medians over rounds; those of the best times, which other work on the machine moves less, stand beside.
    """
    found = {"n_ops": n_ops}
    for use, simgrid_s in (("plain", plain_s), ("fastest", fastest_s)):
        found[f"{use}_ops_per_s"] = n_ops / statistics.median(simgrid_s)
        found[f"times_{use}"] = statistics.median(a / b for a, b in zip(simgrid_s, ours_s, strict=True))
        found[f"times_{use}_best"] = min(simgrid_s) / min(ours_s)
    found["ops_per_s"] = n_ops / statistics.median(ours_s)
    return found


@pytest.mark.benchmark(group="peer")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(benchmark, record, program, tmp_path, family, size):
    workload = make(family, size)
    record(**beside_simgrid(workload.n_ops, *compare(benchmark, program, tmp_path, workload)))


@pytest.mark.benchmark(group="peer")
def test_full(benchmark, record, program, tmp_path):
    """The deployment in full fidelity; beside it a batch of points at as many lengths."""
    structure, costs = prepare(**LARGE)
    workload = full_fidelity(structure, costs)
    template = Template(structure, reduced=False)
    _, rows = prepare(**{**LARGE, "seq_len": lengths(N_POINTS)})
    simulate_rows(template, rows, 2)
    batch_s = []

    def batch():
        simulate_rows(template, rows, 2)
        begin = time.perf_counter()
        simulate_rows(template, rows, 2)
        batch_s.append((time.perf_counter() - begin) / N_POINTS)

    ours_s, plain_s, fastest_s = compare(benchmark, program, tmp_path, workload, batch)
    record(
        **beside_simgrid(workload.n_ops, ours_s, plain_s, fastest_s),
        times_plain_batch=statistics.median(a / b for a, b in zip(plain_s, batch_s, strict=True)),
        times_fastest_batch=statistics.median(a / b for a, b in zip(fastest_s, batch_s, strict=True)),
        batch_ops_per_s=workload.n_ops / statistics.median(batch_s),
    )
