"""The audit finds nothing in sound simulations, and each KPI reacts to the fault it is there for."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from g5cp_vec.audit.conservation import Kpis, _imbalance, audit
from g5cp_vec.audit.promises import promised_tokens, promised_traffic
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import Ring, load_topology
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.roofline import op_seconds
from g5cp_vec.engine.arrays import OK, Costs, make_workspace
from g5cp_vec.engine.schedule import simulate
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.graph import REASON
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.structure import Structure, build_structure

SOUND = Kpis(0, 0, 0, 0, 0, 0)
TOPOLOGIES = {
    "ring": Ring(name="ring", link_bandwidth_bytes_per_s=5e10, latency_s=1e-6),
    "no-latency": Ring(name="no-latency", link_bandwidth_bytes_per_s=5e10, latency_s=0.0),
}


class Run(NamedTuple):
    dep: Deployment
    structure: Structure
    load: tuple[int, int, int]
    start_s: np.ndarray
    finish_s: np.ndarray

    def audit(self, ran=None):
        return audit(self.dep, self.structure, *self.load, self.start_s, self.finish_s, ran)

    def doctor(self, *, start=None, finish=None, ops=None, **graph):
        """Return a copy with other times of single ops, other tags of ops, or other arrays of the graph."""
        start_s, finish_s = self.start_s.copy(), self.finish_s.copy()
        for times, changes in ((start_s, start or {}), (finish_s, finish or {})):
            for op, time in changes.items():
                times[op] = time
        old = self.structure.ops
        new = old._replace(graph=old.graph._replace(**graph), **(ops or {}))
        # The whole graph is derived from blocks; a doctored one takes its place.
        structure = copy.copy(self.structure)
        vars(structure)["ops"] = new
        return self._replace(structure=structure, start_s=start_s, finish_s=finish_s)

    def find(self, reason, **tags):
        """Return the ops of a reason whose tags (layer, step, src, dst) have the values given."""
        ops = self.structure.ops
        found = ops.op_reason == REASON[reason]
        for tag, value in tags.items():
            found &= getattr(ops, f"op_{tag}") == value
        return np.flatnonzero(found)

    def n_bytes(self, op):
        by_id = {i: key for key, i in self.structure.keys.bytes.items()}
        key = by_id[int(self.structure.ops.graph.op_cost[op])]
        return message_bytes(self.dep, build_load(self.dep, *self.load), self.dep.model.kinds[0], key)

    def flops(self, op):
        by_id = {i: key for key, i in self.structure.keys.durations.items()}
        key = by_id[int(self.structure.ops.graph.op_cost[op])]
        return sum(part.flops for part in parts_of(self.dep, build_load(self.dep, *self.load))[key])

    def rewired(self, drop, add=()):
        """Return a copy without the dependencies ``drop`` and with ``add``, both lists of (pred, succ)."""
        graph = self.structure.ops.graph
        pred = np.repeat(np.arange(len(graph.op_kind)), np.diff(graph.succ_indptr))
        edges = set(zip(pred.tolist(), graph.succ_indices.tolist(), strict=True))
        assert set(drop) <= edges
        edges = sorted((edges - set(drop)) | set(add))
        pred, succ = np.array(edges, np.int64).T
        indptr = np.searchsorted(pred, np.arange(len(graph.op_kind) + 1))
        return self.doctor(succ_indptr=indptr, succ_indices=succ.astype(np.int32))


def parts_of(dep, load):
    parts = {(name, None): part for name, part in edge_parts(dep, load).items()}
    for i, kind in enumerate(dep.model.kinds[0]):
        parts |= {(name, i): part for name, part in layer_parts(dep, load, kind).items()}
    return parts


def deployment(model="llama-3.1-8b", topology="flat-450", **values):
    loaded = load_model(model)
    shape = {name: values.pop(name) for name in ("n_layers", "hidden") if name in values}
    loaded = loaded.model_copy(update=shape)
    objects = {
        "model": loaded,
        "chip": load_chip("h200-sxm"),
        "topology": TOPOLOGIES.get(topology) or load_topology(topology),
    }
    return build_deployment({"phase": "prefill", "cp": 1, **values, **objects})


def simulated(dep, seq_len=4096, batch=1, cached_tokens=0, structure=None):
    structure = structure or build_structure(dep)
    load = build_load(dep, seq_len, batch, cached_tokens)
    kinds, graph = dep.model.kinds[0], structure.ops.graph
    parts = parts_of(dep, load)
    costs = Costs(
        np.array([float(op_seconds(dep, parts[key])) for key in structure.keys.durations]),
        np.array([float(message_bytes(dep, load, kinds, key)) for key in structure.keys.bytes], np.float64),
        np.array(structure.network.latencies()),
        np.array(structure.network.capacities()),
    )
    n_ops = len(graph.op_kind)
    workspace = make_workspace(n_ops, structure.ops.n_chips, len(graph.link_capacity), len(graph.route_indices))
    start_s, finish_s = np.full(n_ops, np.nan), np.full(n_ops, np.nan)
    assert simulate(graph, costs, workspace, start_s, finish_s, np.zeros(2, np.int64)) == OK
    return Run(dep, structure, (seq_len, batch, cached_tokens), start_s, finish_s)


LLAMA = {"n_layers": 3}
DEEPSEEK = {"model": "deepseek-v3-671b", "n_layers": 5}
QWEN = {"model": "qwen3-235b-a22b", "n_layers": 3}
SOUND_CASES = [
    ({"n_chips": 1}, {}),
    ({"n_chips": 1, "phase": "decode"}, {"batch": 3}),
    ({**LLAMA, "n_chips": 8, "cp": 8}, {"seq_len": 8192}),
    ({**LLAMA, "n_chips": 8, "cp": 4, "tp": 2}, {"seq_len": 5003, "batch": 2}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "tp": 4, "collective": "direct"}, {"seq_len": 999, "cached_tokens": 333}),
    ({**LLAMA, "n_chips": 16, "tp": 16, "kv_dtype": "int4"}, {"seq_len": 77, "cached_tokens": 9}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "tp": 2, "pp": 2, "topology": "ring"}, {"seq_len": 5000}),
    ({**LLAMA, "n_chips": 16, "cp": 4, "dp": 4, "topology": "ring", "rank_order": ["dp", "tp", "cp", "pp"]}, {}),
    ({**LLAMA, "n_chips": 8, "cp": 8, "topology": "no-latency"}, {"seq_len": 100}),
    ({**LLAMA, "n_chips": 8, "cp": 4, "tp": 2, "phase": "decode"}, {"seq_len": 10001, "batch": 5}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "pp": 2, "tp": 2, "phase": "decode", "topology": "ring"}, {"batch": 2}),
    ({"n_chips": 8, "tp": 2, "tp_sp": True}, {"seq_len": 1023}),
    ({**LLAMA, "n_chips": 4, "tp": 4, "hidden": 4097, "activation_dtype": "fp4"}, {"seq_len": 51}),
    ({**LLAMA, "n_chips": 32, "cp": 4, "tp": 2, "topology": "hgx-8-oversub2"}, {"seq_len": 2**20}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "topology": "hgx-8"}, {"seq_len": 2049, "batch": 3}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 2, "tp": 2, "ep": 2, "topology": "hgx-8"}, {"cached_tokens": 1001}),
    ({**DEEPSEEK, "n_chips": 16, "tp": 2, "ep": 4, "collective": "direct", "topology": "hgx-8-oversub2"}, {}),
    ({**DEEPSEEK, "n_chips": 8, "cp": 2, "tp": 4, "ep": 1, "kv_dtype": "fp8"}, {"seq_len": 1237}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "phase": "decode", "topology": "hgx-8"}, {"batch": 7}),
    ({**DEEPSEEK, "n_chips": 32, "cp": 4, "tp": 2, "pp": 2, "phase": "decode", "topology": "hgx-8"}, {}),
    ({**DEEPSEEK, "n_chips": 4, "tp": 2, "pp": 2}, {"cached_tokens": 1}),
    ({**QWEN, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "topology": "hgx-8"}, {"seq_len": 10007}),
    ({**QWEN, "n_chips": 16, "tp": 8, "ep": 4, "ffn_dtype": "fp4", "activation_dtype": "fp8"}, {"seq_len": 17}),
    ({**QWEN, "n_chips": 32, "tp": 2, "cp": 2, "ep": 4, "rank_order": ["cp", "dp", "pp", "tp"]}, {}),
    ({**QWEN, "n_chips": 16, "cp": 2, "tp": 8, "ep": 8, "phase": "decode", "collective": "direct"}, {"batch": 2}),
]


@pytest.mark.parametrize(("values", "load"), SOUND_CASES)
def test_conservation(values, load):
    run = simulated(deployment(**values), **load)
    assert run.audit() == SOUND
    assert run.audit(np.ones(len(run.start_s), np.int8)) == SOUND


def test_conservation_of_the_specification_s_use_case():
    dep = deployment("deepseek-v3-671b", n_chips=64, tp=2, cp=8, topology="hgx-8")
    run = simulated(dep, seq_len=2**20)
    assert len(run.start_s) > 100_000
    assert run.audit() == SOUND


@given(data=st.data())
@settings(max_examples=60)
def test_conservation_of_any_deployment(data):
    def pick(*choices):
        return data.draw(st.sampled_from(choices))

    values = {
        **pick({"n_layers": 2}, {**DEEPSEEK, "n_layers": 4}, {**QWEN, "n_layers": 2}),
        "phase": pick("prefill", "decode"),
        "topology": pick("ring", "no-latency", "flat-450", "hgx-8", "hgx-8-oversub2"),
        "rank_order": data.draw(st.permutations(["tp", "cp", "pp", "dp"])),
        "collective": pick("ring", "direct"),
        "kv_dtype": pick("bf16", "int4"),
        "activation_dtype": pick("bf16", "fp8"),
        **{axis: pick(1, 2, 4) for axis in ("tp", "cp", "dp")},
        "pp": pick(1, 2),
        "ep": pick(1, 2, 4),
    }
    values["n_chips"] = values["tp"] * values["cp"] * values["dp"] * values["pp"]
    try:
        dep = deployment(**values)
    except InfeasibleError:
        assume(False)
    cached = 0 if dep.phase == "decode" else data.draw(st.integers(0, 300))
    assert simulated(dep, cached + data.draw(st.integers(1, 3000)), pick(1, 3), cached).audit() == SOUND


# --- Planted faults. A run of four ranks in a ring, two shards each; another with experts; nothing else is special.


@functools.cache
def ring_run():
    return simulated(deployment(n_layers=2, n_chips=8, cp=4, tp=2), seq_len=2**17)


@functools.cache
def expert_run():
    return simulated(deployment("deepseek-v3-671b", n_layers=4, n_chips=8, tp=2, cp=2, ep=4), seq_len=2**14)


def test_an_op_without_a_record_is_lost():
    run = ring_run()
    (head,) = run.find("lm_head", src=0)
    lost = SOUND._replace(lost_ops=1, lost_flops=run.flops(head))
    assert run.doctor(finish={head: np.nan}).audit() == lost
    assert run.doctor(start={head: np.nan}).audit() == lost


@pytest.mark.parametrize("times", [0, 2])
def test_an_op_that_did_not_run_exactly_once_is_lost(times):
    run = ring_run()
    (head,) = run.find("lm_head", src=0)
    ran = np.ones(len(run.start_s), np.int64)
    ran[head] = times
    assert run.audit(ran) == SOUND._replace(lost_ops=1, lost_flops=run.flops(head))


def test_who_waits_for_a_lost_op_started_too_early():
    run = ring_run()
    op = run.find("ffn", layer=0)[0]
    n_waiting = np.diff(run.structure.ops.graph.succ_indptr)[op]
    kpis = run.doctor(finish={op: np.nan}).audit()
    assert kpis == SOUND._replace(lost_ops=1, lost_flops=run.flops(op), order_violations=n_waiting)


@pytest.mark.parametrize("make", [ring_run, expert_run])
@pytest.mark.parametrize("reason", ["tp", "cp_pass_kv", "ep"])
def test_a_lost_flow_loses_its_bytes(make, reason):
    run = make()
    for op in run.find(reason)[:2]:
        kpis = run.doctor(finish={op: np.nan}).audit()
        assert (kpis.lost_ops, kpis.lost_bytes, kpis.lost_flops) == (1, run.n_bytes(op), 0)


def test_a_message_of_another_size_loses_the_difference():
    run = ring_run()
    op, other = run.find("tp")[0], run.find("cp_pass_kv")[0]
    cost = run.structure.ops.graph.op_cost.copy()
    cost[op] = cost[other]
    kpis = run.doctor(op_cost=cost).audit()
    assert kpis.lost_bytes == abs(run.n_bytes(op) - run.n_bytes(other)) > 0
    assert kpis.capacity_violations > 0
    assert kpis[2:5] == (0, 0, 0)


def test_a_message_to_the_wrong_chip_is_missed_there_and_surplus_here():
    run = ring_run()
    op = run.find("tp", src=0)[0]
    dst = run.structure.ops.op_dst.copy()
    dst[op] = 5
    assert run.doctor(ops={"op_dst": dst}).audit() == SOUND._replace(lost_bytes=2 * run.n_bytes(op))


@pytest.mark.parametrize("values", [{"collective": "direct"}, {"rank_order": ["cp", "tp", "pp", "dp"]}, {"ep": 2}])
def test_the_graph_of_another_deployment_sends_other_bytes(values):
    fixed = {**DEEPSEEK, "n_chips": 16, "tp": 4, "cp": 2, "ep": 4}
    run = simulated(deployment(**{**fixed, **values}))
    assert run.audit() == SOUND
    assert run._replace(dep=deployment(**fixed)).audit().lost_bytes > 0


def _ring_ops(run, layer=1):
    """Return a projection, a ring step and a send of step 1 of chip 0, and the send of step 0 that it forwards."""
    (forwarding,) = run.find("cp_pass_kv", layer=layer, step=1, src=0)
    (forwarded,) = run.find("cp_pass_kv", layer=layer, step=0, dst=0)
    (projection,) = run.find("qkv", layer=layer, src=0)
    (attention,) = run.find("attention", layer=layer, step=0, src=0)
    return projection, attention, forwarded, forwarding


def test_a_block_sent_twice_is_surplus_and_the_other_one_missing():
    run = ring_run()
    projection, _, forwarded, forwarding = _ring_ops(run)
    doctored = run.rewired([(forwarded, forwarding)], [(projection, forwarding)])
    # The next two ranks get the block of chip 0 twice, and lack the one that chip 0 should have passed on.
    assert doctored.audit() == SOUND._replace(lost_kv_blocks=4)


def test_a_send_that_waits_for_a_compute_of_the_ring_carries_no_block():
    run = ring_run()
    _, attention, forwarded, forwarding = _ring_ops(run)
    kpis = run.rewired([(forwarded, forwarding)], [(attention, forwarding)]).audit()
    assert kpis.lost_kv_blocks == 2


def test_a_lost_send_loses_its_block_for_all_after_it():
    run = ring_run()
    for step, n_lost in ((0, 3), (1, 2), (2, 1)):
        (op,) = run.find("cp_pass_kv", layer=0, step=step, src=2)
        assert run.doctor(finish={op: np.nan}).audit().lost_kv_blocks == n_lost


def test_blocks_in_the_wrong_order_are_lost():
    run = ring_run()
    (a,), (b,) = run.find("cp_pass_kv", layer=0, step=0, dst=2), run.find("cp_pass_kv", layer=0, step=1, dst=2)
    step = run.structure.ops.op_step.copy()
    step[[a, b]] = step[[b, a]]
    assert run.doctor(ops={"op_step": step}).audit() == SOUND._replace(lost_kv_blocks=2)


def test_a_ring_without_sends_loses_every_block():
    run = ring_run()
    reason = run.structure.ops.op_reason.copy()
    reason[reason == REASON["cp_pass_kv"]] = REASON["tp"]
    assert run.doctor(ops={"op_reason": reason}).audit() == SOUND._replace(lost_kv_blocks=2 * 8 * 3)


def test_an_op_of_other_work_loses_both():
    run = ring_run()
    a, b = run.find("ffn")[0], run.find("qkv")[0]
    cost = run.structure.ops.graph.op_cost.copy()
    cost[a] = cost[b]
    assert run.doctor(op_cost=cost).audit() == SOUND._replace(lost_flops=run.flops(a) + run.flops(b))


def test_a_missing_layer_loses_its_flops():
    fixed = {**QWEN, "n_chips": 4, "cp": 2, "ep": 2}
    run = simulated(deployment(**{**fixed, "n_layers": 2}))
    layer = [op for reason in ("qkv", "attention", "o_proj", "moe") for op in run.find(reason, layer=1)]
    kpis = run._replace(dep=deployment(**fixed)).audit()
    assert kpis.lost_flops == sum(run.flops(op) for op in layer)
    assert kpis.lost_ops == kpis.order_violations == 0


def test_an_op_that_starts_before_a_predecessor_ended_is_out_of_order():
    run = ring_run()
    (head,) = run.find("lm_head", src=0)
    start_s = run.start_s[head]
    assert run.doctor(start={head: start_s * (1 - 1e-6)}).audit() == SOUND._replace(order_violations=1)
    assert run.doctor(start={head: start_s * (1 - 5e-13)}).audit() == SOUND


def test_computes_that_overlap_are_out_of_order():
    run = ring_run()
    (first,), (second,) = (run.find("attention", layer=0, step=step, src=0) for step in (0, 1))
    assert run.start_s[second] == run.finish_s[first]
    (arrived,) = run.find("cp_pass_kv", layer=0, step=0, dst=0)
    assert run.finish_s[arrived] < run.finish_s[first]
    # No dependency orders the two any more: only the chip does.
    doctored = run.rewired([(first, second)])
    assert doctored.audit() == SOUND
    earlier = (run.finish_s[arrived] + run.finish_s[first]) / 2
    assert doctored.doctor(start={second: earlier}).audit() == SOUND._replace(order_violations=1)


def test_an_op_that_ends_before_it_starts_is_out_of_order():
    run = ring_run()
    (head,) = run.find("lm_head", src=0)
    kpis = run.doctor(finish={head: run.start_s[head] * 0.99}).audit()
    assert kpis == SOUND._replace(order_violations=1)


def test_a_flow_that_ends_too_early_breaks_capacity():
    run = ring_run()
    op = run.find("cp_pass_kv", layer=1, step=1, src=0)[0]
    duration_s = run.finish_s[op] - run.start_s[op]
    kpis = run.doctor(finish={op: run.start_s[op] + 0.7 * duration_s}).audit()
    # The flow itself, and both links of its route.
    assert kpis.capacity_violations >= 3
    assert kpis._replace(capacity_violations=0) == SOUND
    before_latency = run.doctor(finish={op: run.start_s[op] + 1e-9}).audit()
    assert before_latency == SOUND._replace(capacity_violations=1)


@pytest.mark.parametrize("make", [ring_run, expert_run])
def test_a_slow_run_gives_no_flow_its_share_and_a_fast_one_overloads_links(make):
    run = make()
    n_flows = np.count_nonzero(run.structure.ops.graph.op_chip < 0)
    slow = run._replace(start_s=run.start_s * 1.001, finish_s=run.finish_s * 1.001)
    assert slow.audit() == SOUND._replace(capacity_violations=n_flows)
    fast = run._replace(start_s=run.start_s * 0.999, finish_s=run.finish_s * 0.999).audit()
    assert fast.capacity_violations > n_flows
    assert fast._replace(capacity_violations=0) == SOUND


def test_bandwidths_are_those_of_the_deployment():
    fixed = {"n_layers": 2, "n_chips": 4, "cp": 4}
    run = simulated(deployment(**fixed))
    halved = run.dep.topology.model_copy(update={"chip_bandwidth_bytes_per_s": 225e9})
    other = dataclasses.replace(run.dep, topology=halved)
    assert run._replace(dep=other).audit().capacity_violations > 0
    # A structure may be shared: the times of the other machine are sound for the other machine.
    times = simulated(other)
    assert times._replace(structure=run.structure).audit() == SOUND


def test_ring_traffic_is_the_equation_of_the_specification():
    dep = deployment(n_chips=8, cp=8)
    sent = promised_traffic(dep, promised_tokens(dep, 2**20, 1, 0))
    # (cp - 1) * S / cp * c_kv bytes a layer; c_kv = 2 * 8 heads * 128 * 2 bytes.
    per_rank = 32 * 7 * (2**20 // 8) * 4096
    assert sum(np.count_nonzero(t.src == 3) * t.n_bytes for t in sent) == per_rank


def test_balances_are_unbounded():
    pairs, huge = np.zeros(3, np.int64), 2**62
    assert _imbalance([(pairs, huge)]) == 3 * 2**62
    assert _imbalance([(pairs, huge), (pairs, -huge), (pairs[:1], 1)]) == 1
