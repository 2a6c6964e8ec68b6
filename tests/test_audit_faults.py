"""Each of the six conservation KPIs reacts to the fault it is there for, and to no other."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from test_audit import DEEPSEEK, QWEN, SOUND, deployment, simulated

from g5cp_vec.audit.conservation import _imbalance
from g5cp_vec.audit.promises import promised_tokens, promised_traffic
from g5cp_vec.mapping.graph import REASON

# A run of four ranks in a ring, two shards each; another with experts; nothing else is special.


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
