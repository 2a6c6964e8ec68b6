"""What must emerge from the costs and the graph together, and what must not depend on names and units."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from machines import PLAIN_H200
from test_acceptance_tools import (
    DENSE,
    EXPERTS,
    GQA,
    MHA,
    MLA,
    MOE,
    PRESETS,
    Costs,
    deploy,
    hgx,
    one_point,
    one_row,
    ops_of,
    play,
    play_point,
    priced,
    small_model,
    sweep_rows,
    switch,
    with_costs,
)

from g5cp_vec.config.chip import Chip
from g5cp_vec.config.runtime import Runtime
from g5cp_vec.config.topology import Ring
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.mapping import structure as structure_module
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.structure import build_structure

# --- Attention is never free ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [MHA, GQA, MLA], ids=["mha", "gqa", "mla"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [1, 2, 77, 4096])
def test_attention_costs_something(attention, phase, cp, seq_len):
    """Every attention op of the graph has FLOPs and takes time, also at one token."""
    dep = deploy(model=small_model(attention=attention), phase=phase, cp=cp)
    structure = build_structure(dep)
    costs = one_row(priced(dep, structure, seq_len))
    attending = ops_of(structure.ops, "attention", COMPUTE)
    assert len(attending) == dep.model.n_layers * cp * (cp if phase == "prefill" else 1)
    start, finish = play(structure.ops, costs)
    assert (finish[attending] > start[attending]).all()
    parts = layer_parts(dep, build_load(dep, seq_len, 1, 0), dep.model.layers[0])
    name = {key[0] for key in structure.keys.durations} & {"attention", "ring_step", "partial"}
    (core,) = [part for part in parts[name.pop()] if part.flop_class == "attention"]
    assert core.flops > 0
    assert core.bytes > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3-671b"])
def test_attention_costs_something_in_results(phase, model):
    fixed = {"phase": phase, "model": model, "chip": PLAIN_H200, "topology": "flat-450", "n_chips": 8, "tp": 2}
    rows = sweep_rows(fixed, cp=[1, 4], seq_len=[1, 1024, "128K"])
    assert all(0 < row["attention_s"] < row["compute_s"] <= row["step_s"] for row in rows)
    # More context costs more, at equal cp.
    for cp in (1, 4):
        times = [row["attention_s"] for row in rows if row["cp"] == cp]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_free_attention_would_be_seen():
    """Doctored: the attention ops take the cost of nothing; the durations that the tests above look at are then 0."""
    structure = build_structure(deploy(cp=2))
    costs = one_row(priced(deploy(cp=2), structure, 4096))
    free = len(costs.duration_s)
    attending = ops_of(structure.ops, "attention", COMPUTE)
    start, finish = play(
        with_costs(structure.ops, dict.fromkeys(attending, free)),
        costs._replace(duration_s=np.append(costs.duration_s, 0.0)),
    )
    assert not (finish[attending] > start[attending]).any()


# --- TPOT against cp --------------------------------------------------------------------------------------------------


def tpot(model, topology, seq_len, **more):
    fixed = {"phase": "decode", "model": model, "chip": PLAIN_H200, "topology": topology, "n_chips": 8}
    return [row["tpot_s"] for row in sweep_rows({**fixed, "seq_len": seq_len, **more}, cp=[1, 2, 4, 8])]


def test_tpot_sign_rises_where_messages_outweigh_the_cache():
    """1K tokens of Llama-3.1-8B are 4 MB a layer, 1 us to read; two messages of 2 us latency cost more than that."""
    times = tpot("llama-3.1-8b", "flat-450", 1024)
    assert times[0] < times[1]
    # Two latencies per layer are the least that pass-Q adds, the whole cache read the most that it saves.
    assert times[1] - times[0] > 32 * (2 * 2e-6 - 1024 * 4096 / (4800e9 * 0.8))


def test_tpot_sign_falls_where_the_cache_is_long():
    """1M tokens are 4.3 GB a layer, 1.1 ms to read: each doubling of cp takes nearly half of it away."""
    times = tpot("llama-3.1-8b", "flat-450", "1M")
    assert times == sorted(times, reverse=True)
    saved = 32 * 2**20 * 4096 / (4800e9 * 0.8) * (1 - 1 / 8)
    assert times[0] - times[-1] == pytest.approx(saved, rel=0.01)


def test_tpot_sign_of_latent_attention():
    """DeepSeek-V3 caches 1152 bytes a token: over NICs cp costs at 4K tokens and pays at 4M."""
    # dp = 1 throughout, so that the experts lie the same way: every cp takes 8 more chips.
    times = {}
    for seq_len in ("4K", "4M"):
        times[seq_len] = [
            one_point(
                phase="decode", model="deepseek-v3-671b", chip=PLAIN_H200, topology="hgx-8", n_chips=8 * cp, tp=8,
                ep=8, cp=cp, seq_len=seq_len,
            )["tpot_s"]
            for cp in (1, 2, 4)
        ]  # fmt: skip
    assert times["4K"] == sorted(times["4K"])
    assert times["4K"][0] < times["4K"][1]
    assert times["4M"][0] > times["4M"][1] > times["4M"][2]


# --- Names do not matter ----------------------------------------------------------------------------------------------

RELABELLED = [
    {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
    {"tp": 2, "cp": 3, "dp": 2, "phase": "decode", "collective": "direct"},
    {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "model": MOE},
    {"tp": 2, "cp": 2, "dp": 4, "ep": 2, "model": MOE, "phase": "decode"},
    {"tp": 4, "pp": 3, "model": small_model(n_layers=4, moe=EXPERTS, attention=MLA, first_dense=1), "ep": 2},
]


@pytest.mark.parametrize("changes", RELABELLED, ids=range(len(RELABELLED)))
def test_relabelling_rank_order_on_a_switch_changes_nothing(changes):
    """All 24 orders lay the ranks on other ports of a switch; the time is the same."""
    times = {
        play_point(deploy(topology=switch(450e9, 2e-6), rank_order=order, **changes), 1001, 2)
        for order in itertools.permutations(("tp", "cp", "pp", "dp"))
    }
    assert max(times) - min(times) <= 1e-13 * max(times)


def test_relabelling_rank_order_changes_no_column():
    fixed = {
        "phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "flat-450", "n_chips": 16,
        "tp": 2, "cp": 2, "pp": 2, "seq_len": "32K",
    }  # fmt: skip
    rows = sweep_rows(fixed, rank_order=[list(o) for o in itertools.permutations(("tp", "cp", "pp", "dp"))][::5])
    label = {"point_id", "row", "rank_order", "bottleneck_link"}
    for row in rows[1:]:
        for name, value in rows[0].items():
            if name not in label:
                assert row[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), name


@pytest.mark.parametrize("changes", RELABELLED, ids=range(len(RELABELLED)))
def test_relabelling_chips_changes_nothing(monkeypatch, changes):
    """Any permutation of a switch's ports, and of whole nodes and the chips in them, gives the same times."""
    n = int(np.prod([changes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")]))
    rng = np.random.default_rng(5)
    anywhere = rng.permutation(n)
    nodes, within = rng.permutation(n // 2), [rng.permutation(2) for _ in range(n // 2)]
    node_by_node = np.array([2 * nodes[chip // 2] + within[chip // 2][chip % 2] for chip in range(n)])
    cases = [(switch(450e9, 2e-6), anywhere), (hgx(2, 2, up=4.0, nic=1.0, over=2.0), node_by_node)]
    original = structure_module.rank_chips
    for topology, moved in cases:
        dep = deploy(topology=topology, **changes)
        before = play_point(dep, 1001, 2)
        monkeypatch.setattr(
            structure_module, "rank_chips", lambda *a, moved=moved: moved[original(*a)].astype(np.int32)
        )
        assert play_point(dep, 1001, 2) == pytest.approx(before, rel=1e-13)
        monkeypatch.undo()


def test_relabelling_across_nodes_does_matter(monkeypatch):
    """The test above could fail: swapping two chips of different nodes is no relabelling of an hgx system."""
    dep = deploy(topology=hgx(2, 2, up=4.0, nic=1.0), tp=2, cp=2, dp=2)
    before = play_point(dep, 1001, 2)
    original = structure_module.rank_chips
    swapped = np.array([2, 1, 0, 3, 4, 5, 6, 7])
    monkeypatch.setattr(structure_module, "rank_chips", lambda *a: swapped[original(*a)].astype(np.int32))
    assert play_point(dep, 1001, 2) > 1.01 * before


# --- The scaling law --------------------------------------------------------------------------------------------------

SCALED = [
    {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
    {"tp": 2, "cp": 3, "dp": 2, "phase": "decode", "collective": "direct"},
    {"tp": 2, "cp": 2, "dp": 4, "ep": 2, "model": MOE},
]


@pytest.mark.parametrize("k", [2.0**-7, 2.0, 2.0**20, 3.0, 1 / 7])
@pytest.mark.parametrize("changes", SCALED, ids=range(len(SCALED)))
def test_scaling_law_of_the_graph(changes, k):
    """Durations and latencies times k, bandwidths over k: every start and end times k; to the last bit for 2^n."""
    dep = deploy(topology=hgx(2, 1, up=450e9, nic=50e9, over=2.0), **changes)
    structure = build_structure(dep)
    costs = one_row(priced(dep, structure, 5000, 2))
    costs = costs._replace(latency_s=np.array([2e-6, 5e-6]))
    scaled = Costs(costs.duration_s * k, costs.bytes, costs.latency_s * k, costs.capacity_bytes_per_s / k)
    for before, after in zip(play(structure.ops, costs), play(structure.ops, scaled), strict=True):
        if np.log2(k) % 1 == 0:
            np.testing.assert_array_equal(after, before * k)
        else:
            np.testing.assert_allclose(after, before * k, rtol=1e-12)


@pytest.mark.parametrize("k", [4.0, 3.0])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_scaling_law_of_the_machine(phase, k):
    """A machine that is k times slower in everything takes k times as long for everything."""
    times = []
    for slower in (1.0, k):
        chip = Chip(
            name="c", hbm_bytes=10**12, hbm_bandwidth_bytes_per_s=4e12 / slower, peak_flops={"bf16": 1e15 / slower}
        )
        net = switch(450e9 / slower, 2e-6 * slower)
        runtime = Runtime(name="r", prefill_op_overhead_s=3e-6 * slower, decode_op_overhead_s=1e-6 * slower)
        dep = deploy(chip=chip, topology=net, runtime=runtime, phase=phase, tp=2, cp=4, dp=2, ep=2, model=MOE)
        times.append(play_point(dep, 100_000, 4))
    assert times[1] == pytest.approx(k * times[0], rel=1e-12)


def test_a_symmetric_deployment_never_slows_on_a_better_switch():
    """True without contention, unlike in general: more bandwidth or less latency is never slower."""
    for changes in (*SCALED, {"cp": 8}):
        times = [
            play_point(deploy(topology=switch(bandwidth, latency), **changes), 3000, 2)
            for bandwidth, latency in ((1e9, 1e-5), (2e9, 1e-5), (2e9, 1e-6), (450e9, 1e-6), (450e9, 0.0))
        ]
        assert times == sorted(times, reverse=True)


def test_lower_bounds_hold():
    """No pass is shorter than its busiest chip's work, nor than any link's bytes over its bandwidth."""
    for changes in SCALED:
        ring = Ring(name="ring", link_bandwidth_bytes_per_s=1e9, latency_s=1e-6)
        for net in (switch(1e9, 1e-6), hgx(2, 1, up=4e9, nic=1e9), ring):
            dep = deploy(topology=net, **changes)
            structure = build_structure(dep)
            costs = one_row(priced(dep, structure, 3000, 2))
            start, finish = play(structure.ops, costs)
            g = structure.ops.graph
            computes = g.op_chip >= 0
            busy = np.bincount(g.op_chip[computes], (finish - start)[computes])
            carried = np.bincount(g.route_indices, costs.bytes[g.op_cost[g.route_op]], len(g.link_capacity))
            assert finish.max() >= busy.max() * (1 - 1e-12)
            assert finish.max() >= (carried / costs.capacity_bytes_per_s[g.link_capacity]).max() * (1 - 1e-12)


def test_every_replica_and_shard_ends_alike_on_a_switch():
    """dp replicas do the same work at the same time: with more of them on a switch nothing changes."""
    one = play_point(deploy(tp=2, cp=2, model=DENSE), 3000)
    assert play_point(deploy(tp=2, cp=2, dp=4, model=DENSE), 3000) == one


def test_one_point_and_the_graph_agree():
    """What the tests play by hand is what a result reports."""
    fixed = {
        "phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "flat-450", "n_chips": 8, "tp": 2,
        "cp": 4, "seq_len": 10_000,
    }  # fmt: skip
    played = play_point(deploy(model=PRESETS["llama-3.1-8b"], topology=switch(450e9, 2e-6), tp=2, cp=4), 10_000)
    assert one_point("full", **fixed)["ttft_s"] == played
    assert one_point(**fixed)["ttft_s"] == pytest.approx(played, rel=1e-12)
