"""The reduced simulation equals the full one, op by op: symmetry classes, folded layers, and what defeats them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from machines import PLAIN_B200, PLAIN_H100
from replays import settles

from g5cp_vec import replay
from g5cp_vec.config.expansion import VALID
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.rows import cost_rows
from g5cp_vec.engine.fold import unfold
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.reduce import Run, find_runs
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner.simulate import simulate_point, simulate_rows
from g5cp_vec.runner.template import Fold, Template

JITTER = 1e-11  # relative change of every duration and bandwidth by which amplification is measured
CHAOS = 1e5


def prepare(**keys):
    """Structure and one row of costs of a point; None when it cannot be deployed."""
    fixed = {"chip": PLAIN_H100, "phase": "prefill", "seq_len": "64K", **keys}
    expansion = load_grid({"name": "point", "fixed": fixed}, point=True).expand()
    if expansion.reason_code[0] != VALID:
        return None
    dep = expansion.deployments[0]
    network = build_network(dep.topology, dep.n_chips)
    structure = build_structure(dep, network)
    load = build_load(dep, expansion.seq_len, expansion.batch, expansion.cached_tokens)
    return structure, cost_rows(dep, structure.keys, network, load, 1)


def jittered(costs, seed):
    rng = np.random.default_rng(seed)
    return costs._replace(
        duration_s=costs.duration_s * (1 + JITTER * rng.uniform(-1, 1, costs.duration_s.shape)),
        capacity=costs.capacity * (1 + JITTER * rng.uniform(-1, 1, costs.capacity.shape)),
    )


def amplification(full, costs, finish_s):
    makespan = finish_s.max()
    moved = [np.abs(simulate_point(full, jittered(costs, seed), 0)[1] - finish_s).max() for seed in range(4)]
    return max(moved) / makespan / JITTER


def assert_reduced_equals_full(structure, costs):
    reduced, full = Template(structure, reduced=True), Template(structure, reduced=False)
    start, finish = simulate_point(full, costs, 0)
    start_r, finish_r = simulate_point(reduced, costs, 0)
    makespan = finish.max()
    error = max(np.abs(start_r - start).max(), np.abs(finish_r - finish).max()) / makespan
    growth = 0.0
    if error > 1e-12:  # amplification only widens the bound, and costs four more simulations
        growth = amplification(full, costs, finish)
        # Beyond this the jitter has grown to what chaos allows, and says nothing of how rounding grows.
        assume(growth < CHAOS)
        assert error <= 1e-12 * (1 + growth)
    measured, measured_r = simulate_rows(full, costs).measures[0], simulate_rows(reduced, costs).measures[0]
    assert measured_r[0] == pytest.approx(makespan, rel=1e-12 * (1 + growth))
    assert full.chips[int(measured[1])] == reduced.chips[int(measured_r[1])]
    # Sums over layers: each adds its rounding, and chaos multiplies it as it does that of the ends.
    bound = 1e-11
    if np.abs(measured_r[2:] - measured[2:]).max() > bound * makespan:
        moved = [simulate_rows(full, jittered(costs, seed)).measures[0, 2:] - measured[2:] for seed in range(4)]
        growth = np.abs(moved).max() / makespan / JITTER
        assume(growth < CHAOS)
        bound += 1e-12 * growth
    np.testing.assert_allclose(measured_r[2:], measured[2:], rtol=0, atol=bound * makespan)
    return reduced


CASES = {
    "symmetric switch": {"model": "llama-3.1-8b", "topology": "flat-450", "n_chips": 16, "tp": 2, "cp": 4},
    "decode": {"model": "llama-3.1-8b", "topology": "hgx-8", "n_chips": 16, "tp": 4, "cp": 4, "phase": "decode"},
    "uneven stages": {"model": "llama-3.1-8b", "topology": "hgx-8", "n_chips": 24, "tp": 2, "cp": 4, "pp": 3},
    "dense first layers": {
        "model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 16, "tp": 2, "cp": 2, "ep": 8
    },
    "shared spine": {
        "model": "deepseek-v3-671b", "topology": "hgx-8-oversub2", "n_chips": 32, "tp": 4, "cp": 4, "ep": 4
    },
    "replicas share experts": {"model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 16, "tp": 4, "cp": 1},
    "group straddles racks": {
        "model": "llama-3.1-405b", "topology": "nvl72", "n_chips": 96, "tp": 8, "cp": 12, "seq_len": "16K"
    },
    "chaotic ring": {
        "model": "llama-3.1-405b", "topology": "hgx-8", "n_chips": 64, "tp": 4, "cp": 16, "seq_len": "8K"
    },
    "direct collectives": {
        "model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 32, "tp": 8, "cp": 2, "ep": 16,
        "collective": "direct",
    },
    "other rank order": {
        "model": "qwen3-235b-a22b", "topology": "hgx-8", "n_chips": 32, "tp": 4, "cp": 4, "ep": 2,
        "rank_order": ["cp", "tp", "dp", "pp"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_reduced_equals_full(name):
    structure, costs = prepare(**CASES[name])
    reduced = assert_reduced_equals_full(structure, costs)
    assert len(reduced.chips) < structure.n_chips


@given(
    model=st.sampled_from(["llama-3.1-8b", "deepseek-v3-671b", "qwen3-235b-a22b"]),
    topology=st.sampled_from(["flat-450", "hgx-8", "hgx-8-oversub2", "nvl72"]),
    phase=st.sampled_from(["prefill", "decode"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.integers(1, 8),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    ep=st.sampled_from([1, 2, 4]),
    collective=st.sampled_from(["ring", "direct"]),
    order=st.permutations(["tp", "cp", "pp", "dp"]),
    seq_len=st.sampled_from(["1K", "8K", "100K", "1M"]),
)
@example("deepseek-v3-671b", "hgx-8", "prefill", 4, 3, 1, 2, 4, "ring", ["tp", "cp", "pp", "dp"], "8K")
def test_reduced_equals_full_at_random(model, topology, phase, tp, cp, pp, dp, ep, collective, order, seq_len):
    n_chips = tp * cp * pp * dp
    assume(n_chips <= 48)
    prepared = prepare(
        model=model, topology=topology, phase=phase, n_chips=n_chips, tp=tp, cp=cp, pp=pp, ep=ep,
        collective=collective, rank_order=list(order), seq_len=seq_len,
    )  # fmt: skip
    assume(prepared is not None)
    assert_reduced_equals_full(*prepared)


MACHINES = {
    "torus": 'kind = "torus"\ndims = [4, 2, 2]\nlink_bandwidth_gbytes_per_s = 90.0\nlatency_us = 1.0\n',
    "full mesh": 'kind = "full_mesh"\nlink_bandwidth_gbytes_per_s = 50.0\nlatency_us = 1.0\n',
    "ring": 'kind = "ring"\nlink_bandwidth_gbytes_per_s = 100.0\nlatency_us = 1.0\n',
    "graph": (
        'kind = "graph"\nn_chips = 16\n'
        + "".join(
            f'[[link]]\nfrom = {chip}\nto = "leaf{chip // 4}"\nbandwidth_gbytes_per_s = 100.0\nlatency_us = 1.0\n'
            for chip in range(16)
        )
        + "".join(
            f'[[link]]\nfrom = "leaf{leaf}"\nto = "spine"\nbandwidth_gbytes_per_s = 200.0\nlatency_us = 1.0\n'
            for leaf in range(4)
        )
    ),
}
SWITCH = 'kind = "switch"\nchip_bandwidth_gbytes_per_s = 450.0\nlatency_us = 2.0\n'
FAULTS = {
    "none": "",
    "straggler": "[[degrade]]\nchip = 5\nfactor = 0.8\n",
    "two stragglers": "[[degrade]]\nchip = [2, 10]\nfactor = 0.5\n",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("machine", [*MACHINES, "switch"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_reduced_equals_full_on_every_machine(machine, fault, phase, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(MACHINES.get(machine, SWITCH) + FAULTS[fault])
    prepared = prepare(model="llama-3.1-8b", topology=str(path), n_chips=16, tp=2, cp=4, phase=phase, seq_len="16K")
    assert_reduced_equals_full(*prepared)


@pytest.mark.parametrize("link", ["chip3.up", "chip*.down", "chip7.*"])
def test_reduced_equals_full_with_a_degraded_link(link, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(SWITCH + f'[[degrade]]\nlink = "{link}"\nfactor = 0.25\n')
    prepared = prepare(model="deepseek-v3-671b", topology=str(path), n_chips=16, tp=2, cp=4, ep=4, seq_len="4K")
    reduced = assert_reduced_equals_full(*prepared)
    # One bad link tells ranks apart; all links equally bad do not.
    assert (len(reduced.chips) == 1) == (link == "chip*.down")


def test_symmetric_deployment_is_one_class():
    structure, _ = prepare(**CASES["symmetric switch"])
    reduced = Template(structure, reduced=True)
    assert len(reduced.chips) == 1
    # 16 ranks fall together, and 32 layers are simulated as two.
    assert len(reduced.chain(Fold(1, 2)).graph.op_kind) * 100 < reduced.n_ops


def test_wrong_partition_is_noticed():
    from g5cp_vec.engine.quotient import is_equitable, refine
    from g5cp_vec.mapping.reduce import _side_by_side

    structure, _ = prepare(**CASES["group straddles racks"])
    parts, _ = _side_by_side(structure)
    ops, chips, links = refine(parts, 0)
    assert is_equitable(parts, ops, chips, links)
    assert chips.max() > 0
    assert not is_equitable(parts, ops, np.zeros_like(chips), links)
    merged = ops.copy()
    merged[merged == merged.max()] = 0
    assert not is_equitable(parts, merged, chips, links)


@pytest.mark.parametrize(
    ("chain", "runs"),
    [
        ([0], []),
        ([0, 1, 1, 1, 2], [Run(1, 1, 3)]),
        ([0, 1, 2, 1, 2, 1, 2, 3], [Run(1, 2, 3)]),
        ([0, 1, 1, 2, 1, 1, 2, 9], [Run(1, 3, 2)]),
        ([0, *[1] * 3, *[2] * 58, 3], [Run(1, 1, 3), Run(4, 1, 58)]),
    ],
)
def test_runs(chain, runs):
    assert find_runs(chain) == runs


def test_what_does_not_repeat_is_simulated_whole():
    # The comm-bound ring over two unequal kinds of link never settles: nothing may be left out of it.
    structure, costs = prepare(
        model="llama-3.1-405b", topology="nvl72", n_chips=256, tp=8, cp=16, chip=PLAIN_B200, seq_len="8K"
    )
    reduced = Template(structure, reduced=True)
    simulated = simulate_rows(reduced, costs)
    assert simulated.n_ops[0] == len(reduced.chain(None).graph.op_kind)
    assert simulated.measures[0, 0] > 0


def crossing(units, n_bytes):
    """A flow of 7 bytes competes with the next unit's first flow, one of 4 is through before."""
    ops, deps = [], []
    for unit in range(units):
        first = 4 * unit
        ops += [
            {"kind": "compute", "chip": 0, "secs": 10, "prio": unit},
            {"kind": "compute", "chip": 1, "secs": 5, "prio": unit},
            {"kind": "flow", "route": [0], "bytes": n_bytes, "lat": 0},
            {"kind": "flow", "route": [0], "bytes": 3.5, "lat": 1},
        ]
        deps.append([first + 1, first + 2])
        if unit:
            deps += [[first - 4, first], [first - 4, first + 1], [first - 4, first + 3]]
    ops.append({"kind": "compute", "chip": 0, "secs": 1, "prio": 10**6})
    deps += [[len(ops) - 1 - back, len(ops) - 1] for back in range(1, 5)]
    return {"links": [{"bw": 1}], "chips": 2, "ops": ops, "deps": deps}


@pytest.mark.parametrize(("n_bytes", "repeats"), [(4, True), (7, False)])
def test_a_period_is_believed_only_when_its_past_repeats(n_bytes, repeats):
    whole = replay(crossing(12, n_bytes))
    accepted = 0
    for kept in range(2, 9):
        short, window = replay(crossing(kept, n_bytes)), np.zeros(2)
        run = np.array([0, 4, kept, 12 - kept])
        if settles(short.start, short.finish, run, window):
            accepted += 1
            assert short.makespan + (12 - kept) * (window[1] - window[0]) == pytest.approx(whole.makespan, rel=1e-12)
            unfolded = unfold(short.finish, run[None], window[None], len(whole.finish))
            np.testing.assert_allclose(unfolded, whole.finish, rtol=1e-12)
    assert bool(accepted) == repeats
