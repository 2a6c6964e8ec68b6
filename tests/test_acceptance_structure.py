"""Graphs of context parallelism: exactly the edges of the contract; and the messages of decode."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from test_acceptance_tools import (
    DENSE,
    EXPERTS,
    MLA,
    PRESETS,
    bytes_of_ops,
    deploy,
    edges,
    flows_between,
    one_point,
    ops_of,
    predecessors,
    priced,
    serialised,
    small_model,
    with_edges,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.mapping.graph import REASON
from g5cp_vec.mapping.structure import build_structure

# --- Prefill ----------------------------------------------------------------------------------------------------------


class Ranks:
    """Chips of one layer's stage by coordinate, for a rank order given fastest first."""

    def __init__(self, dep, layer):
        stride, step = {}, 1
        for axis in dep.rank_order:
            stride[axis], step = step, step * getattr(dep, axis)
        held = [len(part) for part in np.array_split(np.arange(dep.model.n_layers), dep.pp)]
        stage = next(s for s in range(dep.pp) if layer < sum(held[: s + 1]))
        self.at = {
            (d, c, t): d * stride["dp"] + stage * stride["pp"] + c * stride["cp"] + t * stride["tp"]
            for d in range(dep.dp)
            for c in range(dep.cp)
            for t in range(dep.tp)
        }


def find(ops, reason, layer, kind):
    """Ops of a reason in a layer by (chip, step) (computes) or (source, destination, step) (flows), each once."""
    found = {}
    for op in ops_of(ops, reason, kind, layer):
        place = (int(ops.op_src[op]), int(ops.op_step[op]))
        if kind == FLOW:
            place = (int(ops.op_src[op]), int(ops.op_dst[op]), int(ops.op_step[op]))
        assert place not in found, f"{reason} at {place} twice"
        found[place] = op
    return found


def assert_prefill_ring(ops, dep):
    """The ring of every layer has the contract's ops and edges, and no other edge touches it."""
    cp, waits = dep.cp, predecessors(ops)
    follows = defaultdict(set)
    for before, after in edges(ops):
        follows[before].add(after)
    # A repeated edge is legal but not ours to make.
    assert len(edges(ops)) == len(set(edges(ops)))
    for layer in range(dep.model.n_layers):
        chips = Ranks(dep, layer).at
        step_of = find(ops, "attention", layer, COMPUTE)
        sent = find(ops, "cp_pass_kv", layer, FLOW)
        qkv = {chip: op for (chip, _), op in find(ops, "qkv", layer, COMPUTE).items()}
        o_proj = {chip: op for (chip, _), op in find(ops, "o_proj", layer, COMPUTE).items()}
        assert len(step_of) == len(chips) * cp
        assert len(sent) == len(chips) * (cp - 1)
        ring = set(step_of.values()) | set(sent.values())
        for (d, c, t), chip in chips.items():
            before, after = chips[d, (c - 1) % cp, t], chips[d, (c + 1) % cp, t]
            for i in range(cp):
                compute = step_of[chip, i]
                expected = {qkv[chip]} if i == 0 else {step_of[chip, i - 1], sent[before, chip, i - 1]}
                assert waits[compute] == expected, f"compute {i} of chip {chip}"
                if i < cp - 1:
                    expected = {qkv[chip]} if i == 0 else {sent[before, chip, i - 1]}
                    assert waits[sent[chip, after, i]] == expected, f"flow {i} out of chip {chip}"
            # Out of the ring only the last step's result goes, to the output projection.
            assert waits[o_proj[chip]] == {step_of[chip, cp - 1]}
            assert follows[step_of[chip, cp - 1]] == {o_proj[chip]}
            # Nothing else of the layer waits for a ring op.
            outside = {after for op in ring for after in follows[op]} - ring
            assert outside == set(o_proj.values())


def assert_sends_need_no_compute(ops, dep):
    """No send of a ring comes after any compute of the same layer's ring, however indirectly."""
    waits = predecessors(ops)
    for layer in range(dep.model.n_layers):
        steps = set(ops_of(ops, "attention", COMPUTE, layer))
        for op in ops_of(ops, "cp_pass_kv", FLOW, layer):
            seen, todo = set(), [op]
            while todo:
                for before in waits[todo.pop()] - seen:
                    assert before not in steps, f"flow {op} needs compute {before}"
                    if ops.op_layer[before] == layer:
                        seen.add(before)
                        todo.append(before)


DEPLOYMENTS = [
    {"cp": 2},
    {"cp": 3, "dp": 2},
    {"cp": 4, "tp": 2, "dp": 2, "rank_order": ("cp", "dp", "tp", "pp")},
    {"cp": 8, "model": small_model(attention=MLA)},
    {"cp": 3, "tp": 2, "pp": 2, "collective": "direct", "model": small_model(n_layers=3)},
    {"cp": 2, "tp": 2, "dp": 2, "ep": 2, "model": small_model(n_layers=3, moe=EXPERTS, first_dense=1)},
]
NAMES = ["-".join(f"{k}{v}" for k, v in d.items() if isinstance(v, int)) for d in DEPLOYMENTS]


@pytest.mark.parametrize("changes", DEPLOYMENTS, ids=NAMES)
def test_prefill_dag_structure(changes):
    dep = deploy(**changes)
    ops = build_structure(dep).ops
    assert_prefill_ring(ops, dep)
    assert_sends_need_no_compute(ops, dep)
    for reason in ("cp_pass_q", "cp_reduce", "merge"):
        assert ops_of(ops, reason) == []


def test_prefill_dag_structure_of_the_use_case():
    """DeepSeek-V3 on 64 chips, tp 2, cp 8, dp 4: 61 layers, 64 ranks, 8 computes and 7 sends each."""
    dep = deploy(model=PRESETS["deepseek-v3-671b"], tp=2, cp=8, dp=4, ep=8)
    ops = build_structure(dep).ops
    assert len(ops_of(ops, "attention", COMPUTE)) == 61 * 64 * 8
    assert len(ops_of(ops, "cp_pass_kv", FLOW)) == 61 * 64 * 7
    for chip, layer in ((0, 0), (13, 30), (63, 60)):
        assert sum(ops.op_src[op] == chip for op in ops_of(ops, "attention", COMPUTE, layer)) == 8
        assert sum(ops.op_src[op] == chip for op in ops_of(ops, "cp_pass_kv", FLOW, layer)) == 7


def ring_places(ops, layer=0):
    return find(ops, "attention", layer, COMPUTE), find(ops, "cp_pass_kv", layer, FLOW)


def doctored_rings():
    """(what is wrong, graph) for a ring of 4 on 4 chips."""
    ops = build_structure(deploy(cp=4)).ops
    step_of, sent = ring_places(ops)
    qkv = {int(ops.op_src[op]): op for op in ops_of(ops, "qkv", COMPUTE, 0)}
    o_proj = {int(ops.op_src[op]): op for op in ops_of(ops, "o_proj", COMPUTE, 0)}
    yield "every send waits for its step's compute", serialised(ops)
    yield "one send waits for its step's compute", with_edges(ops, add=[(step_of[1, 1], sent[1, 2, 1])])
    yield "a send waits for the compute before", with_edges(ops, add=[(step_of[0, 0], sent[0, 1, 1])])
    yield "a send waits for another rank's compute", with_edges(ops, add=[(step_of[3, 0], sent[0, 1, 2])])
    yield "a send waits for the rank's last send", with_edges(ops, add=[(sent[2, 3, 0], sent[2, 3, 1])])
    yield "a compute does not wait for its block", with_edges(ops, drop=[(sent[0, 1, 1], step_of[1, 2])])
    yield "a compute is out of program order", with_edges(ops, drop=[(step_of[2, 0], step_of[2, 1])])
    yield "a send forwards before it has received", with_edges(ops, drop=[(sent[3, 0, 0], sent[0, 1, 1])])
    yield "the ring starts before the projection", with_edges(ops, drop=[(qkv[1], step_of[1, 0])])
    yield "a block leaves before the projection", with_edges(ops, drop=[(qkv[1], sent[1, 2, 0])])
    yield (
        "the projection waits for too little",
        with_edges(ops, drop=[(step_of[0, 3], o_proj[0])], add=[(step_of[0, 2], o_proj[0])]),
    )
    yield "something waits for a send", with_edges(ops, add=[(sent[0, 1, 2], o_proj[1])])
    destination = ops.op_dst.copy()
    destination[sent[0, 1, 0]] = 2
    yield "a block goes to the wrong rank", ops._replace(op_dst=destination)
    reason = ops.op_reason.copy()
    reason[sent[0, 1, 2]] = REASON["tp"]
    yield "a send is missing", ops._replace(op_reason=reason)
    reason = ops.op_reason.copy()
    reason[o_proj[0]] = REASON["attention"]
    yield "a compute is added", ops._replace(op_reason=reason)


def is_refused(check, ops, dep):
    try:
        check(ops, dep)
    except (AssertionError, KeyError):
        return True
    return False


def test_a_doctored_ring_is_refused():
    dep = deploy(cp=4)
    assert not is_refused(assert_prefill_ring, build_structure(dep).ops, dep)
    assert [wrong for wrong, ops in doctored_rings() if not is_refused(assert_prefill_ring, ops, dep)] == []


def test_an_indirect_wait_for_a_compute_is_seen():
    """Through an op in between: the direct edges of the ring alone would not show it."""
    ops = build_structure(deploy(cp=4)).ops
    step_of, _ = ring_places(ops)
    assert_sends_need_no_compute(ops, deploy(cp=4))
    qkv = {int(ops.op_src[op]): op for op in ops_of(ops, "qkv", COMPUTE, 0)}
    via = with_edges(ops, add=[(step_of[2, 0], qkv[0])])
    with pytest.raises(AssertionError):
        assert_sends_need_no_compute(via, deploy(cp=4))


# --- Decode -----------------------------------------------------------------------------------------------------------


def assert_decode_star(ops, dep):
    """Query out, partial attentions, reduction back, merge at the owner; the other ranks only attend."""
    waits, follows = predecessors(ops), defaultdict(set)
    for before, after in edges(ops):
        follows[before].add(after)
    assert len(edges(ops)) == len(set(edges(ops)))
    for layer in range(dep.model.n_layers):
        chips = Ranks(dep, layer).at
        partial = {chip: op for (chip, _), op in find(ops, "attention", layer, COMPUTE).items()}
        merge, qkv, o_proj = (
            {chip: op for (chip, _), op in find(ops, reason, layer, COMPUTE).items()}
            for reason in ("merge", "qkv", "o_proj")
        )
        query = find(ops, "cp_pass_q", layer, FLOW)
        reduction = find(ops, "cp_reduce", layer, FLOW)
        owners = {chips[d, 0, t] for d, t in itertools.product(range(dep.dp), range(dep.tp))}
        assert set(partial) == set(chips.values())
        assert set(merge) == set(qkv) == set(o_proj) == owners
        assert len(query) == len(reduction) == len(owners) * (dep.cp - 1)
        for d, t in itertools.product(range(dep.dp), range(dep.tp)):
            owner = chips[d, 0, t]
            returned = set()
            for c in range(1, dep.cp):
                other = chips[d, c, t]
                out, back = query[owner, other, 0], reduction[other, owner, 0]
                assert waits[out] == {qkv[owner]}
                assert waits[partial[other]] == {out}
                assert waits[back] == {partial[other]}
                assert (follows[out], follows[partial[other]], follows[back]) == (
                    {partial[other]}, {back}, {merge[owner]},
                )  # fmt: skip
                returned.add(back)
            assert waits[partial[owner]] == {qkv[owner]}
            assert waits[merge[owner]] == {partial[owner]} | returned
            assert waits[o_proj[owner]] == {merge[owner]}
            assert follows[merge[owner]] == {o_proj[owner]}
        idle = set(chips.values()) - owners
        busy_with = {REASON["attention"]}
        assert {int(ops.op_reason[op]) for op in np.flatnonzero(np.isin(ops.graph.op_chip, list(idle)))} == busy_with


@pytest.mark.parametrize("changes", DEPLOYMENTS, ids=NAMES)
def test_decode_dag_structure(changes):
    dep = deploy(phase="decode", **changes)
    ops = build_structure(dep).ops
    assert_decode_star(ops, dep)
    assert ops_of(ops, "cp_pass_kv") == []


def doctored_stars():
    ops = build_structure(deploy(phase="decode", cp=3)).ops
    partial = {int(ops.op_src[op]): op for op in ops_of(ops, "attention", COMPUTE, 0)}
    (merge,), (qkv,) = ops_of(ops, "merge", COMPUTE, 0), ops_of(ops, "qkv", COMPUTE, 0)
    query, reduction = find(ops, "cp_pass_q", 0, FLOW), find(ops, "cp_reduce", 0, FLOW)
    yield "a partial waits for no query", with_edges(ops, drop=[(query[0, 1, 0], partial[1])])
    yield "the owner waits for a query", with_edges(ops, add=[(query[0, 1, 0], partial[0])])
    yield "one query waits for another", with_edges(ops, add=[(query[0, 1, 0], query[0, 2, 0])])
    yield "a reduction without its partial", with_edges(ops, drop=[(partial[2], reduction[2, 0, 0])])
    yield "the merge misses one", with_edges(ops, drop=[(reduction[1, 0, 0], merge)])
    yield "the merge misses the owner's own", with_edges(ops, drop=[(partial[0], merge)])
    yield "a query before the projection", with_edges(ops, drop=[(qkv, query[0, 1, 0])])
    yield "partials one after another", with_edges(ops, add=[(partial[1], partial[2])])
    destination = ops.op_dst.copy()
    destination[reduction[2, 0, 0]] = 1
    yield "a reduction goes to another rank", ops._replace(op_dst=destination)


def test_a_doctored_star_is_refused():
    dep = deploy(phase="decode", cp=3)
    assert not is_refused(assert_decode_star, build_structure(dep).ops, dep)
    assert [wrong for wrong, ops in doctored_stars() if not is_refused(assert_decode_star, ops, dep)] == []


def test_decode_messages_by_hand():
    """Query b d s bytes out, b (d + 2 n_h) s bytes back, d = n_h head_dim of the shard; independent of S."""
    # GQA: 8 heads of 16 over tp = 2: d = 64, n_h = 4. b = 3, bf16: 3 * 64 * 2 = 384 and 3 * (64 + 8) * 2 = 432.
    # MLA absorbed: query 4 * (32 + 8) = 160 -> 960 bytes; output 4 * 32 = 128 -> 3 * (128 + 8) * 2 = 816 bytes.
    for model, query, reduction in ((DENSE, 384, 432), (small_model(attention=MLA), 960, 816)):
        for seq_len in (1, 77, 1 << 20):
            dep = deploy(phase="decode", model=model, tp=2, cp=4)
            structure = build_structure(dep)
            n_bytes = bytes_of_ops(structure, priced(dep, structure, seq_len, 3))
            assert {n_bytes[op] for op in ops_of(structure.ops, "cp_pass_q")} == {query}
            assert {n_bytes[op] for op in ops_of(structure.ops, "cp_reduce")} == {reduction}


def test_decode_messages_of_presets_in_the_result():
    """Columns are the formula times the layers, per non-owner rank."""
    # Llama-3.1-8B, tp 2: d = 16 * 128 = 2048: 32 layers * 2048 * 2 bytes; back 32 * (2048 + 32) * 2. b = 1.
    # DeepSeek-V3, tp 2: query 64 * 576, output 64 * 512.
    shared = {"phase": "decode", "chip": "h200-sxm", "topology": "flat-450", "seq_len": "64K", "n_chips": 8, "tp": 2}
    row = one_point(**shared, model="llama-3.1-8b", cp=4)
    assert (row["passq_query_bytes"], row["passq_reduce_bytes"]) == (32 * 2048 * 2, 32 * (2048 + 2 * 16) * 2)
    row = one_point(**shared, model="deepseek-v3-671b", cp=4)
    assert (row["passq_query_bytes"], row["passq_reduce_bytes"]) == (61 * 64 * 576 * 2, 61 * (64 * 512 + 2 * 64) * 2)
    assert row["passkv_bytes"] is None


def test_columns_count_the_layers_of_one_stage():
    """DeepSeek-V3 over 2 stages: 31 layers on the first, which sends most."""
    shared = {"model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "flat-450", "seq_len": "64K", "n_chips": 8}
    row = one_point(**shared, phase="prefill", cp=4, pp=2)
    assert row["passkv_bytes"] == 31 * 3 * (65_536 // 4) * 576 * 2
    row = one_point(**shared, phase="decode", cp=4, pp=2)
    assert row["passq_query_bytes"] == 31 * 128 * 576 * 2
    assert row["passq_reduce_bytes"] == 31 * (128 * 512 + 2 * 128) * 2


def test_context_parallel_groups_lie_where_the_rank_order_puts_them():
    """tp 2, cp 2, dp 2, fastest first tp, cp, dp: chip = t + 2 c + 4 d; the ring joins 0-2, 1-3, 4-6, 5-7."""
    ops = build_structure(deploy(tp=2, cp=2, dp=2)).ops
    pairs = [(0, 2), (2, 0), (1, 3), (3, 1), (4, 6), (6, 4), (5, 7), (7, 5)]
    assert flows_between(ops, "cp_pass_kv", layer=0) == sorted(pairs)
    ops = build_structure(deploy(tp=2, cp=2, dp=2, rank_order=("cp", "dp", "tp", "pp"))).ops
    # chip = c + 2 d + 4 t.
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (6, 7), (7, 6)]
    assert flows_between(ops, "cp_pass_kv", layer=0) == sorted(pairs)
