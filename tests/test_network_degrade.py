"""Faults: what a slow link does to the messages over it, and a slow chip to its own work and to those who wait."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from checks import assert_conserved_and_reduced_exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PLAIN_H200, faulty, hgx, switch
from test_acceptance_tools import H200, MOE, bytes_of_ops, deploy, one_row, play, priced
from test_audit import SOUND

import g5cp_vec
from g5cp_vec.audit.conservation import audit
from g5cp_vec.config.runtime import Runtime
from g5cp_vec.config.topology import Ring, Torus
from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.graph import REASON, split_rate
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure, structure_key
from g5cp_vec.runner.template import Template


def capacity(network, name):
    links = [network.link_name(link) for link in range(network.n_links)]
    return network.capacities()[network.link_capacity[links.index(name)]]


def speeds(network):
    return [network.rates()[rate] for rate in network.chip_rate]


def played(dep, seq_len=512):
    """Structure, costs, and start and end of every op."""
    structure = build_structure(dep)
    rows = priced(dep, structure, seq_len)
    return structure, rows, *play(structure.ops, one_row(rows))


# --- Links ------------------------------------------------------------------------------------------------------------


def test_a_slow_nic_halves_the_rate_of_the_message_over_it():
    """Two stages in two nodes of two chips, a NIC each of 1e9 bytes/s: each transfer takes bytes / 1e9, one of them
    twice that, and nothing else changes."""
    sound = deploy(topology=hgx(2, 2, up=1e12, nic=1e9), tp=2, pp=2)
    slow = deploy(topology=faulty(sound.topology, {"link": "node0.nic1.out", "factor": 0.5}), tp=2, pp=2)
    for dep, factor in ((sound, 1), (slow, 2)):
        structure, rows, start, finish = played(dep)
        ops = structure.ops
        sent = {int(ops.op_src[op]): op for op in np.flatnonzero(ops.op_reason == REASON["pp"])}
        n_bytes = bytes_of_ops(structure, rows)
        for chip, times in ((0, 1), (1, factor)):
            op = sent[chip]
            assert finish[op] - start[op] == pytest.approx(times * n_bytes[op] / 1e9, rel=1e-12)
    # The second stage of the other rank waits for the all-reduce with this one, so the whole step is later by as much.
    late = {dep.topology.is_degraded: played(dep)[3].max() for dep in (sound, slow)}
    assert late[True] - late[False] == pytest.approx(n_bytes[sent[1]] / 1e9, rel=1e-9)


def test_capacities_are_reduced_for_the_links_named():
    network = build_network(
        faulty(
            hgx(4, 4, up=9.0, nic=2.0, over=2.0),
            {"link": "node0.nic*.out", "factor": 0.5},
            {"link": ["node1.up", "node0.chip3.down"], "factor": 0.25},
        ),
        8,
    )
    reduced = {"node1.up": 1.0, "node0.chip3.down": 2.25} | {f"node0.nic{i}.out": 1.0 for i in range(4)}
    sound = {".chip": 9.0, ".nic": 2.0, ".up": 4.0, ".down": 4.0}
    for link in range(network.n_links):
        name = network.link_name(link)
        full = next(value for part, value in sound.items() if part in name)
        assert capacity(network, name) == reduced.get(name, full)
    # An id for each different (link, factor), not for each link: port, NIC, spine, and three reduced ones.
    assert len(network.capacities()) == 6


def test_faults_multiply():
    network = build_network(
        faulty(
            switch(8.0),
            {"link": "chip1.*", "factor": 0.5},
            {"link": "*.up", "factor": 0.5},
            {"link": ["chip2.up", "chip2.u*"], "factor": 0.5},
        ),
        4,
    )
    assert [capacity(network, f"chip{i}.up") for i in range(4)] == [4.0, 2.0, 1.0, 4.0]
    assert [capacity(network, f"chip{i}.down") for i in range(4)] == [8.0, 4.0, 8.0, 8.0]


def test_a_fault_in_the_spine():
    """Four NICs of 2 over a full spine: 8 both ways. At a quarter, the node's four messages share 2."""
    sound = hgx(4, 4, up=1e12, nic=2.0)
    network = build_network(faulty(sound, {"link": "node0.up", "factor": 0.25}), 8)
    assert (capacity(network, "node0.up"), capacity(network, "node0.down")) == (2.0, 8.0)
    keys = {"tp": 4, "pp": 2}
    dep = deploy(topology=faulty(sound, {"link": "node0.up", "factor": 0.25}), **keys)
    structure, rows, start, finish = played(dep)
    sent = np.flatnonzero(structure.ops.op_reason == REASON["pp"])
    n_bytes = bytes_of_ops(structure, rows)[sent[0]]
    assert (finish - start)[sent] == pytest.approx([n_bytes / 0.5] * 4, rel=1e-12)
    # Links that limit nothing change nothing.
    intact = deploy(topology=faulty(sound, {"link": "node0.up", "factor": 1 - 1e-15}), **keys)
    assert played(intact)[3].max() == pytest.approx(played(deploy(topology=sound, **keys))[3].max(), rel=1e-12)


@given(factor=st.sampled_from([1.0, 0.75, 0.5, 0.01]), kind=st.sampled_from(["switch", "ring", "torus", "hgx"]))
@settings(max_examples=20)
def test_every_link_slower_is_a_slower_network(factor, kind):
    def machine(bandwidth):
        if kind == "switch":
            return switch(bandwidth, 1e-6)
        if kind == "hgx":
            return hgx(4, 2, up=bandwidth, nic=bandwidth / 8, over=2.0)
        shape = {"name": kind, "link_bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-6}
        return Ring(**shape) if kind == "ring" else Torus(dims=(4, 2), **shape)

    keys = {"tp": 2, "cp": 2, "dp": 2}
    slow = played(deploy(topology=faulty(machine(1e9), {"link": "*", "factor": factor}), **keys))[3]
    np.testing.assert_allclose(slow, played(deploy(topology=machine(1e9 * factor), **keys))[3], rtol=1e-9)


# --- Chips ------------------------------------------------------------------------------------------------------------


def test_a_straggler_takes_longer_and_its_group_waits():
    """Two tensor-parallel ranks, chip 1 at half speed. Nothing overlaps: every layer waits for both, so the step takes
    twice the computes and the same all-reduces."""
    runtime = Runtime(name="r", prefill_op_overhead_s=1e-3, decode_op_overhead_s=1e-3)
    keys = {"tp": 2, "runtime": runtime}
    sound = deploy(topology=switch(1e9, 1e-6), **keys)
    slow = deploy(topology=faulty(switch(1e9, 1e-6), {"chip": 1, "factor": 0.5}), **keys)
    structure, _, start, finish = played(sound)
    ops = structure.ops
    computes = ops.graph.op_kind == COMPUTE
    own = (finish - start)[computes & (ops.op_src == 0)]
    assert own.min() >= 1e-3
    structure_s, _, start_s, finish_s = played(slow)
    assert structure_s.ops.op_src.tolist() == ops.op_src.tolist()
    durations, durations_s = (finish - start)[computes], (finish_s - start_s)[computes]
    # Overheads included.
    np.testing.assert_allclose(durations_s, np.where(ops.op_src[computes] == 1, 2.0, 1.0) * durations, rtol=1e-9)
    assert finish_s.max() - finish.max() == pytest.approx(own.sum(), rel=1e-9)
    # Chip 0 begins its all-reduce when it is ready, and ends it no sooner than the straggler lets it.
    (sent,) = np.flatnonzero(
        (ops.op_reason == REASON["tp"]) & (ops.op_layer == 0) & (ops.op_step == 0) & (ops.op_src == 0)
    )[:1]
    assert (
        start_s[sent]
        < finish_s[sent]
        < start_s[np.flatnonzero((ops.op_reason == REASON["ffn"]) & (ops.op_layer == 0))[0]]
    )


def test_speeds_multiply_and_are_as_many_as_differ():
    topology = faulty(
        switch(),
        {"chip": [1, 3, 3], "factor": 0.5},
        {"chip": 3, "factor": 0.5},
        {"chip": [0, 4], "factor": 0.25},
        {"chip": 5, "factor": 1.0},
    )
    network = build_network(topology, 6)
    assert speeds(network) == [0.25, 0.5, 1.0, 0.25, 0.25, 1.0]
    assert network.rates() == [1.0, 0.25, 0.5]
    assert network.capacities() == build_network(switch(), 6).capacities()


def test_durations_have_an_id_for_each_speed():
    dep = deploy(topology=faulty(switch(), {"chip": 3, "factor": 0.5}), tp=2, cp=2, phase="decode")
    structure = build_structure(dep)
    rows = priced(dep, structure, 1000)
    by_key = dict(structure.keys.durations)
    assert sorted(by_key.values()) == list(range(len(by_key)))
    sound = build_structure(deploy(topology=switch(), tp=2, cp=2, phase="decode"))
    assert {split_rate(key)[0] for key in by_key} == set(sound.keys.durations)
    for key, column in by_key.items():
        computed, rate = split_rate(key)
        assert rows.duration_s[0, column] == rows.duration_s[0, by_key[computed]] * (1 + rate)
    ops = structure.ops
    computes = ops.graph.op_kind == COMPUTE
    rate_of = {column: split_rate(key)[1] for key, column in by_key.items()}
    found = zip(ops.op_src[computes].tolist(), ops.graph.op_cost[computes].tolist(), strict=True)
    assert {(chip, rate_of[cost]) for chip, cost in found} == {(0, 0), (1, 0), (2, 0), (3, 1)}


def test_every_chip_slower_is_a_slower_chip():
    slow = deploy(topology=faulty(switch(1e9), {"chip": list(range(8)), "factor": 0.5}), model=MOE, tp=2, dp=4, ep=4)
    peaks = tuple((dtype, peak / 2) for dtype, peak in H200.peak_flops)
    half = H200.model_copy(
        update={"peak_flops": peaks, "hbm_bandwidth_bytes_per_s": H200.hbm_bandwidth_bytes_per_s / 2}
    )
    other = deploy(topology=switch(1e9), model=MOE, tp=2, dp=4, ep=4, chip=half)
    np.testing.assert_allclose(played(slow)[3], played(other)[3], rtol=1e-9)


# --- What shares a structure, and what does not -----------------------------------------------------------------------


def test_shapes():
    def key(*faults, topology=None):
        dep = deploy(topology=faulty(topology or switch(), *faults), tp=2, cp=2)
        return structure_key(dep, build_network(dep.topology, 4))

    link, chip = {"link": "chip1.up", "factor": 0.5}, {"chip": 2, "factor": 0.5}
    assert key() == key({"chip": 1, "factor": 1}, {"link": "*", "factor": 1})
    # How slow is a number; who is slow is structure.
    assert key(link) == key({**link, "factor": 0.25}, topology=switch(7.0, 0.1))
    assert key(chip) == key({**chip, "factor": 0.1})
    different = [
        key(),
        key(link),
        key(chip),
        key(link, chip),
        key({**link, "link": "chip0.up"}),
        key({**chip, "chip": 1}),
        key(chip, {"chip": 1, "factor": 0.5}),
        key(chip, {"chip": 1, "factor": 0.25}),
    ]
    assert len(set(different)) == len(different)


def test_a_fault_of_another_machine_is_refused():
    with pytest.raises(InfeasibleError, match="degrades chip 4"):
        build_network(faulty(switch(), {"chip": 4, "factor": 0.5}), 4)
    with pytest.raises(InfeasibleError, match=r"no link 'chip4\.up'"):
        build_network(faulty(switch(), {"link": "chip4.up", "factor": 0.5}), 4)


# --- Whole deployments ------------------------------------------------------------------------------------------------

FAST = hgx(4, 4, up=4e11, nic=5e10)
MACHINES = {
    "straggler": faulty(FAST, {"chip": 5, "factor": 0.6}),
    "slow NIC": faulty(FAST, {"link": "node1.nic2.*", "factor": 0.3}),
    "both": faulty(
        FAST, {"chip": [0, 1], "factor": 0.9}, {"link": "node0.up", "factor": 0.1}, {"chip": 1, "factor": 0.5}
    ),
    "torus": faulty(
        Torus(name="t", dims=(4, 2), link_bandwidth_bytes_per_s=5e10, latency_s=1e-6),
        {"link": "chip1>chip2", "factor": 0.5},
        {"chip": 7, "factor": 0.5},
    ),
}
KEYS = [
    {"tp": 4, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "collective": "direct"},
    {"model": MOE, "tp": 2, "dp": 4, "ep": 4},
    {"cp": 4, "tp": 2, "phase": "decode"},
    {"cp": 4, "tp": 2},
]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MACHINES)
def test_deployments_are_conserved_and_reduced_exactly(name, keys):
    dep = deploy(topology=MACHINES[name], **keys)
    assert_conserved_and_reduced_exactly(dep)


def n_classes(topology, **keys):
    return len(Template(build_structure(deploy(topology=topology, **keys)), reduced=True).chips)


def test_only_what_a_fault_touches_is_told_apart():
    keys = {"tp": 4, "dp": 2}
    assert n_classes(FAST, **keys) == 1
    # The replica of the straggler: itself and, around its ring, those at each distance; and the other replica.
    assert n_classes(MACHINES["straggler"], **keys) == 5
    # No message crosses the slow interface.
    assert n_classes(MACHINES["slow NIC"], **keys) == 1
    assert n_classes(MACHINES["slow NIC"], cp=4, tp=2) > n_classes(FAST, cp=4, tp=2)


def test_the_audit_knows_what_a_slow_link_carries():
    """Times of the sound machine move bytes faster over the slow NIC than it can."""
    keys = {"tp": 2, "pp": 2}
    sound = deploy(topology=hgx(2, 2, up=4e11, nic=5e10), **keys)
    slow = dataclasses.replace(sound, topology=faulty(sound.topology, {"link": "node0.nic0.out", "factor": 0.5}))
    structure, _, start, finish = played(sound)
    assert audit(sound, structure, 512, 1, 0, start, finish) == SOUND
    structure_s = build_structure(slow)
    kpis = audit(slow, structure_s, 512, 1, 0, start, finish)
    # The transfer, and the NIC it crosses.
    assert kpis == SOUND._replace(capacity_violations=2)


def test_a_user_s_fault(tmp_path):
    """From the file to the row: a slow chip and a slow link make the step slower, and the busiest link is that one."""
    lines = ['kind = "torus"', "dims = [4, 2]", "link_bandwidth_gbytes_per_s = 50", "latency_us = 1"]
    (tmp_path / "sound.toml").write_text("\n".join(lines))
    (tmp_path / "slow.toml").write_text(
        "\n".join(
            [*lines, "[[degrade]]", 'link = "chip1>chip2"', "factor = 0.1", "[[degrade]]", "chip = 6", "factor = 0.8"]
        )
    )
    fixed = {
        "phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "n_chips": 8, "tp": 4, "cp": 1,
        "seq_len": 4096,
    }  # fmt: skip
    files = [str(tmp_path / f"{name}.toml") for name in ("sound", "slow")]
    sound, slow = (g5cp_vec.run({"fixed": {**fixed, "topology": file}}).to_dict() for file in files)
    assert slow["ttft_s"] > sound["ttft_s"]
    assert slow["bottleneck_link"] == "chip1>chip2"
    assert slow["lost_flops"] == slow["capacity_violations"] == slow["order_violations"] == 0
    assert slow["n_ops"] == sound["n_ops"]
    assert slow["point_id"] != sound["point_id"]
