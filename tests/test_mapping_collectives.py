"""Collectives of a tensor-parallel group: exact bytes and edges, closed-form times, who waits for a straggler."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from machines import PLAIN_H200
from test_acceptance_tools import (
    MHA,
    ancestors,
    bytes_of_ops,
    chosen_costs,
    deploy,
    ops_of,
    play,
    predecessors,
    priced,
    small_model,
    sweep_rows,
    switch,
    with_costs,
    with_edges,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.mapping.structure import build_structure

# 16 heads, so that tp may be 2 to 16; one layer holds two all-reduces.
WIDE = small_model(attention=MHA.model_copy(update={"n_heads": 16, "n_kv_heads": 16}), n_layers=1, hidden=250, d_ff=240)
SIZES = [2, 4, 8, 16]


def computes(ops, reason):
    return {int(ops.op_src[op]): op for op in ops_of(ops, reason, COMPUTE)}


def first_half(ops):
    """Flows of the all-reduce after attention: the first half of a layer's tp flows, by (step, source, destination)."""
    flows = ops_of(ops, "tp", FLOW)
    flows = flows[: len(flows) // 2]
    return {(int(ops.op_step[op]), int(ops.op_src[op]), int(ops.op_dst[op])): op for op in flows}


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("tokens", [16, 77])
def test_an_all_reduce_moves_exactly_its_share(tp, collective, tokens):
    """Each rank sends 2 (n - 1) / n of the buffer, in 2 (n - 1) chunks; what n does not divide rounds up."""
    dep = deploy(model=WIDE, tp=tp, dp=2, collective=collective)
    structure = build_structure(dep)
    n_bytes = bytes_of_ops(structure, priced(dep, structure, tokens))
    sent, received, n_sent = Counter(), Counter(), Counter()
    for op in ops_of(structure.ops, "tp", FLOW):
        sent[int(structure.ops.op_src[op])] += n_bytes[op]
        received[int(structure.ops.op_dst[op])] += n_bytes[op]
        n_sent[int(structure.ops.op_src[op])] += 1
    buffer = tokens * 250 * 2
    chunk = -(-buffer // tp)
    assert set(n_sent.values()) == {2 * 2 * (tp - 1)}  # two all-reduces
    assert set(sent.values()) == set(received.values()) == {2 * 2 * (tp - 1) * chunk}
    if buffer % tp == 0:
        assert set(sent.values()) == {2 * 2 * (tp - 1) * buffer // tp}
    assert len(sent) == 2 * tp


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_an_all_reduce_in_the_result(collective):
    """Llama-3.1-8B, tp 4, S = 1000: 32 layers * 2 * 2 * 3 chunks of 1000 * 4096 * 2 / 4 bytes."""
    (row,) = sweep_rows(
        {"phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "flat-450", "n_chips": 4, "tp": 4,
         "cp": 1, "collective": collective, "seq_len": 1000},
    )  # fmt: skip
    assert row["tp_bytes"] == 32 * 2 * 2 * 3 * 1000 * 4096 * 2 // 4


def assert_ring_edges(ops, tp):
    """A step waits for what came in and for what went out in the step before; the FFN for what came in last."""
    waits, sent = predecessors(ops), first_half(ops)
    o_proj, ffn = computes(ops, "o_proj"), computes(ops, "ffn")
    assert len(sent) == 2 * (tp - 1) * tp
    for step in range(2 * (tp - 1)):
        for chip in range(tp):
            before, after = (chip - 1) % tp, (chip + 1) % tp
            expected = {sent[step - 1, before, chip], sent[step - 1, chip, after]} if step else {o_proj[chip]}
            assert waits[sent[step, chip, after]] == expected
    for chip in range(tp):
        assert waits[ffn[chip]] == {sent[2 * (tp - 1) - 1, (chip - 1) % tp, chip]}


@pytest.mark.parametrize("tp", SIZES)
def test_edges_of_the_ring(tp):
    assert_ring_edges(build_structure(deploy(model=WIDE, tp=tp)).ops, tp)


@pytest.mark.parametrize("tp", SIZES)
def test_edges_of_the_direct_exchange(tp):
    """Reduced chunks leave once all parts have come in; the FFN waits for every reduced chunk, its own included."""
    ops = build_structure(deploy(model=WIDE, tp=tp, collective="direct")).ops
    waits, sent = predecessors(ops), first_half(ops)
    o_proj, ffn = computes(ops, "o_proj"), computes(ops, "ffn")
    assert len(sent) == 2 * (tp - 1) * tp
    for chip in range(tp):
        others = [other for other in range(tp) if other != chip]
        parts = {sent[0, other, chip] for other in others}
        for other in others:
            assert waits[sent[0, chip, other]] == {o_proj[chip]}
            assert waits[sent[1, chip, other]] == parts
        assert waits[ffn[chip]] == parts | {sent[1, other, chip] for other in others}


def play_all_reduce(tp, collective, *, chunk=2.0, latency=0.5, late=0.0, **changes):
    """Start of every FFN when only messages take time, and rank 0's output projection is late."""
    structure = build_structure(
        deploy(model=WIDE, tp=tp, collective=collective, topology=switch(1.0, latency), **changes)
    )
    slow = len(structure.keys.durations)
    ops = with_costs(structure.ops, {computes(structure.ops, "o_proj")[0]: slow})
    start, _ = play(ops, chosen_costs(structure, {}, {"tp_chunk": chunk}, more=(late,)))
    return {chip: float(start[op]) for chip, op in computes(ops, "ffn").items()}


@pytest.mark.parametrize("tp", SIZES)
def test_times_of_an_all_reduce(tp):
    """Ring: 2 (n - 1) steps of latency + chunk. Direct: two exchanges in which n - 1 chunks share each link."""
    assert set(play_all_reduce(tp, "ring").values()) == {2 * (tp - 1) * (0.5 + 2)}
    direct = set(play_all_reduce(tp, "direct").values())
    assert max(direct) - min(direct) < 1e-12 * max(direct)
    assert max(direct) == pytest.approx(2 * (0.5 + (tp - 1) * 2), rel=1e-14)


def test_a_straggler_delays_its_group_and_no_other():
    """Ring of 4, rank 0 late by 100 s: it still has all 6 steps of 2.5 s before it, and everyone waits for its chunk.

    Direct: the late parts leave at 100, 3 of 2 B over one link: 106.5; then the reduced chunks of all: 113. Rank 0,
    too, waits for those. The other replica is done as ever.
    """
    on_time = {"ring": 6 * 2.5, "direct": 2 * 6.5}
    for collective, late in (("ring", 100 + 6 * 2.5), ("direct", 100 + 2 * 6.5)):
        starts = play_all_reduce(4, collective, late=100.0, dp=2)
        assert {starts[chip] for chip in range(4)} == {late}
        assert {starts[chip] for chip in range(4, 8)} == {on_time[collective]}


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("tp", SIZES)
def test_everyone_depends_on_every_contribution(tp, collective):
    """The FFN of each rank comes after the output projection of every rank of its group, and of no other group."""
    ops = build_structure(deploy(model=WIDE, tp=tp, dp=2, collective=collective)).ops
    waits, o_proj = predecessors(ops), computes(ops, "o_proj")
    for chip, op in computes(ops, "ffn").items():
        seen = ancestors(waits, op)
        group = {other for other in o_proj if other // tp == chip // tp}
        assert {other for other, before in o_proj.items() if before in seen} == group


def test_a_collective_without_its_edges_would_be_seen():
    """Doctored: sends do not wait for what they forward. One edge is seen by the edges, all of them by the times."""
    structure = build_structure(deploy(model=WIDE, tp=4))
    ops, sent = structure.ops, first_half(structure.ops)
    forwards = [(sent[step - 1, (src - 1) % 4, src], op) for (step, src, _), op in sent.items() if step]
    assert len(forwards) == 4 * 5
    with pytest.raises(AssertionError):
        assert_ring_edges(with_edges(ops, drop=forwards[:1]), 4)
    slow = len(structure.keys.durations)
    late = with_costs(with_edges(ops, drop=forwards), {computes(ops, "o_proj")[0]: slow})
    start, _ = play(late, chosen_costs(structure, {}, {"tp_chunk": 2.0}, more=(100.0,)))
    starts = {chip: float(start[op]) for chip, op in computes(ops, "ffn").items()}
    # Ranks 2 and 3 do not receive from the late one directly, and are done as if it were not late.
    assert (starts[2], starts[3]) == (12.0, 12.0)


def test_tp_sp_moves_the_bytes_of_an_all_reduce_and_saves_norms():
    """Reduce-scatter and all-gather are the all-reduce's halves; between them a rank norms a tp-th of the tokens."""
    fixed = {
        "phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "flat-450", "n_chips": 4, "tp": 4,
        "cp": 1, "seq_len": "32K",
    }  # fmt: skip
    plain, split = sweep_rows(fixed, tp_sp=[False, True])
    assert split["tp_bytes"] == plain["tp_bytes"] == 32 * 2 * 2 * 3 * 32768 * 4096 * 2 // 4
    assert split["comm_s"] == pytest.approx(plain["comm_s"], rel=1e-9)
    # 32 layers, 2 norms, 4 passes over three quarters of 32768 * 4096 * 2 bytes, at 4.8 TB/s * 0.8.
    saved = 32 * 2 * 4 * (32768 * 4096 * 2 * 3 / 4) / (4800e9 * 0.8)
    assert plain["ttft_s"] - split["ttft_s"] == pytest.approx(saved, rel=1e-9)
    assert split["attention_s"] == plain["attention_s"]


def test_tp_sp_keeps_the_graph():
    for collective in ("ring", "direct"):
        plain = build_structure(deploy(model=WIDE, tp=4, collective=collective)).ops.graph
        split = build_structure(deploy(model=WIDE, tp=4, collective=collective, tp_sp=True)).ops.graph
        for name in plain._fields:
            np.testing.assert_array_equal(getattr(split, name), getattr(plain, name))


def test_no_tensor_parallelism_no_messages():
    assert ops_of(build_structure(deploy(model=WIDE)).ops, "tp") == []
