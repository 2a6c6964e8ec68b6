"""The benchmarks measure what they say: their workloads, the regression gate, the peer, compiled code itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import naive
import numpy as np
import pytest

from g5cp_vec import replay

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import deployments  # noqa: E402
import gate  # noqa: E402
import nets  # noqa: E402
import report  # noqa: E402
import workloads  # noqa: E402
from peers import simgrid  # noqa: E402
from simulation import Simulation  # noqa: E402

TINY = {
    "ring_star": lambda: workloads.ring_attention(nets.star(4), 2, 2, 2),
    "ring_torus": lambda: workloads.ring_attention(nets.torus(2, 4), 4, 2, 1),
    "ring_fat_tree": lambda: workloads.ring_attention(nets.fat_tree(2, per_leaf=3), 3, 2, 1),
    "random": lambda: workloads.random_dag(nets.torus(3, 3), 80, window=15, stretch=40),
    "all_to_all": lambda: workloads.all_to_all(nets.star(4), 2),
    "incast": lambda: workloads.incast(nets.torus(2, 3), 3),
    "pipeline": lambda: workloads.pipeline(nets.torus(2, 2), 4),
}
POINT = {"model": "llama-3.1-8b", "topology": "hgx-8", "n_chips": 16, "tp": 2, "cp": 2, "pp": 2, "seq_len": "8K"}
# Prints start and end of every op of the smallest workloads, and the measures of a reduced deployment.
PLAIN = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import test_benchmarks as t
print(json.dumps(t.compiled_or_not()))
"""


def test_every_family_has_a_tiny_one():
    assert TINY.keys() == workloads.FAMILIES.keys()


@pytest.mark.parametrize("family", TINY)
def test_workloads_simulate_as_their_twin_says(family):
    workload = TINY[family]()
    mapping = workloads.as_mapping(workload)
    simulation = Simulation(workload)
    simulation.run()
    makespan, start, finish = naive.simulate(mapping)
    assert simulation.makespan_s == pytest.approx(float(makespan), rel=1e-12)
    np.testing.assert_allclose(simulation.start_s, [float(t) for t in start], rtol=0, atol=1e-12 * float(makespan))
    np.testing.assert_allclose(simulation.finish_s, [float(t) for t in finish], rtol=0, atol=1e-12 * float(makespan))
    # The arrays that the generators make are those of the workload spelled out.
    replayed = replay(mapping)
    np.testing.assert_array_equal(replayed.start, simulation.start_s)
    np.testing.assert_array_equal(replayed.finish, simulation.finish_s)


def test_full_fidelity_simulates_as_its_twin_says():
    workload = workloads.full_fidelity(*deployments.prepare(**{**POINT, "n_chips": 4, "cp": 2, "tp": 2, "pp": 1}))
    simulation = Simulation(workload)
    simulation.run()
    makespan, _, finish = naive.simulate(workloads.as_mapping(workload), exact=False)
    np.testing.assert_allclose(simulation.finish_s, finish, rtol=0, atol=1e-12 * makespan)


@pytest.mark.parametrize("family", TINY)
def test_no_two_ends_are_one_instant(family):
    simulation = Simulation(workloads.make(family, "small"))
    simulation.run()
    assert abs(simulation.workload.n_ops - workloads.SIZES["small"]) <= 0.25 * workloads.SIZES["small"]
    assert np.diff(np.sort(simulation.finish_s)).min() > 1e-11 * simulation.makespan_s


def test_workloads_are_the_same_every_time():
    first, second = (workloads.as_text(workloads.make("random", "small")) for _ in range(2))
    assert first == second


def test_text_and_mapping_say_the_same():
    workload = TINY["random"]()
    mapping = workloads.as_mapping(workload)
    tokens = iter(workloads.as_text(workload).split())
    n_links, n_chips, n_ops, n_deps = (int(next(tokens)) for _ in range(4))
    links = [{"bw": float(next(tokens))} for _ in range(n_links)]
    ops = []
    for _ in range(n_ops):
        if next(tokens) == "0":
            chip, prio, secs = next(tokens), next(tokens), next(tokens)
            ops.append({"kind": "compute", "chip": int(chip), "secs": float(secs), "prio": int(prio)})
        else:
            n_bytes, latency = float(next(tokens)), float(next(tokens))
            route = [int(next(tokens)) for _ in range(int(next(tokens)))]
            ops.append({"kind": "flow", "route": route, "bytes": n_bytes, "lat": latency})
    deps = [[int(next(tokens)), int(next(tokens))] for _ in range(n_deps)]
    assert next(tokens, None) is None
    assert mapping == {"links": links, "chips": n_chips, "ops": ops, "deps": deps}


def test_routes_are_short_and_name_no_link_twice():
    def lengths(net):
        src, dst = (index.ravel() for index in np.indices((net.n_chips, net.n_chips)))
        table = net.route(src, dst)
        for route in table:
            used = route[route >= 0]
            assert len(set(used)) == len(used)
            assert used.max(initial=0) < len(net.capacity)
        return src, dst, (table >= 0).sum(axis=1)

    src, dst, hops = lengths(nets.torus(3, 4))
    round_ = [np.minimum((d - s) % n, (s - d) % n) for s, d, n in ((src % 4, dst % 4, 4), (src // 4, dst // 4, 3))]
    np.testing.assert_array_equal(hops, sum(round_))
    src, dst, hops = lengths(nets.fat_tree(3))
    np.testing.assert_array_equal(hops, np.where(src // 4 == dst // 4, 2, 4))


@pytest.fixture
def doctored(tmp_path, monkeypatch):
    """Run the gate on measurements that equal the committed ones, times ``measured``, against a changed baseline."""
    true = json.loads(gate.BASELINE.read_text())
    monkeypatch.setattr(gate, "count", lambda: true["counters"])
    monkeypatch.setattr(gate, "timed_cases", lambda: dict.fromkeys(true["costs"]))

    def run(change=lambda baseline: None, measured=(), options=()):
        factors = iter(measured)

        def measure(cases):
            factor = next(factors, 1.0)
            return {case: factor * true["costs"][case] for case in cases}

        monkeypatch.setattr(gate, "measure", measure)
        baseline = json.loads(gate.BASELINE.read_text())
        change(baseline)
        path = tmp_path / "baseline.json"
        path.write_text(json.dumps(baseline))
        return gate.main(["--baseline", str(path), *options])

    return run


def test_gate_passes_on_the_committed_counters():
    """Only what is counted: nothing is timed."""
    assert gate.main(["--counters"]) == 0


def test_gate_passes_on_what_was_committed(doctored, capsys):
    assert doctored() == 0
    assert doctored(options=["--counters"]) == 0
    assert "counters equal the baseline" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["n_ops", "n_events", "n_solves", "n_link_visits"])
def test_gate_fails_on_another_counter(doctored, capsys, name):
    def change(baseline):
        baseline["counters"]["random"][name] -= 1

    assert doctored(change) == 1
    assert f"random: {name} is " in capsys.readouterr().err


def test_gate_fails_on_another_reduction(doctored, capsys):
    def change(baseline):
        baseline["counters"]["symmetric"]["n_ops_simulated"] -= 1

    assert doctored(change, options=["--counters"]) == 1
    assert "symmetric: n_ops_simulated is " in capsys.readouterr().err


def test_gate_fails_on_a_case_that_one_side_lacks(doctored, capsys):
    assert doctored(lambda baseline: baseline["counters"].pop("incast"), options=["--counters"]) == 1
    assert doctored(lambda baseline: baseline["costs"].pop("template")) == 1
    err = capsys.readouterr().err
    assert "incast: only measured" in err
    assert "template: only measured" in err


def test_gate_fails_on_a_cost_that_stays_high(doctored, capsys):
    def change(baseline):
        baseline["costs"]["template"] /= 2

    assert doctored(change) == 1
    assert "template: costs" in capsys.readouterr().err
    assert doctored(measured=[2.0] * gate.TRIES) == 1


def test_gate_forgives_a_cost_that_was_high_once(doctored):
    assert doctored(measured=[2.0, 1.0]) == 0


def test_calibration_is_fixed_work():
    calibration = gate.Calibration()
    assert calibration.run() == calibration.run()


def compiled_or_not():
    """Return times of tiny workloads and the measures of a reduced deployment, from whatever code there is."""
    from g5cp_vec.runner.simulate import simulate_rows
    from g5cp_vec.runner.template import Template

    found = {}
    for family, make in TINY.items():
        simulation = Simulation(make())
        simulation.run()
        found[family] = [*simulation.start_s.tolist(), *simulation.finish_s.tolist()]
    structure, costs = deployments.prepare(**POINT)
    found["reduced"] = simulate_rows(Template(structure, reduced=True), costs).measures[0].tolist()
    return found


def test_plain_python_gives_what_compiled_code_gives():
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-W", "error", "-c", PLAIN, str(Path(__file__).parent), str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    for case, values in compiled_or_not().items():
        np.testing.assert_allclose(plain[case], values, rtol=0, atol=1e-12 * max(values), err_msg=case)


def test_peer_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(simgrid.shutil, "which", lambda name: None)
    with pytest.raises(simgrid.Unavailable, match="compiler"):
        simgrid.build(tmp_path)


def test_peer_agrees(tmp_path):
    try:
        program = simgrid.build(tmp_path)
    except simgrid.Unavailable as reason:
        pytest.skip(str(reason))
    # Variants take turns.
    for make, variant in zip(TINY.values(), 2 * simgrid.VARIANTS, strict=False):
        simulation = Simulation(make())
        simulation.run()
        path = tmp_path / "workload.txt"
        path.write_text(workloads.as_text(simulation.workload))
        peer = simgrid.replay(program, path, variant)
        assert peer.n_done == simulation.workload.n_ops
        assert peer.makespan_s == pytest.approx(simulation.makespan_s, rel=1e-9)


def test_report_of_a_run_of_nothing():
    info = {"system": "Linux", "release": "6", "python_version": "3.11"}
    text = report.render({"benchmarks": [], "machine_info": info, "datetime": "2024-01-01T00:00:00"})
    assert "Made on 2024-01-01" in text
    assert f"| 20,000 points/s, aim 50,000 | {report.MISSING} |" in text.replace(">= ", "")


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123456, "0.00123"), (1.5, "1.50"), (999.6, "1,000"), (209408, "209,000"), (0, "0")]
)
def test_report_writes_three_digits(value, text):
    assert report.digits(value) == text
