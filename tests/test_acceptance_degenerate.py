"""cp = 1 is the absence of context parallelism: nothing in a graph, a cost or a byte may remember that it exists.

`naive.build_graph`, `naive.op_costs`, `naive.message_sizes` and `naive.memory_of` have no cp parameter at all.
"""

from __future__ import annotations

import naive
import numpy as np
import pytest
from machines import PLAIN_H200
from test_acceptance_tools import (
    DENSE,
    EXPERTS,
    MHA,
    MLA,
    MOE,
    Costs,
    deploy,
    hgx,
    one_point,
    ops_of,
    plain_model,
    plain_types,
    play,
    small_model,
    switch,
    with_edges,
    write_model,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW, NONE, Graph
from g5cp_vec.mapping.graph import REASON, OpGraph
from g5cp_vec.mapping.structure import build_structure

LATENT = small_model(name="latent", attention=MLA, n_layers=4, moe=EXPERTS, first_dense=2)
NO_SHARED = small_model(name="qwen-like", attention=MHA, n_layers=3, moe=EXPERTS.model_copy(update={"n_shared": 0}))
TIED = small_model(name="tied", tie_embeddings=True, n_layers=5)

# model, dp, tp, pp, ep, collective, rank_order (fastest first), node size (None: a switch)
CASES = [
    (DENSE, 1, 1, 1, 1, "ring", ("tp", "cp", "pp", "dp"), None),
    (DENSE, 2, 4, 1, 1, "ring", ("tp", "cp", "pp", "dp"), None),
    (DENSE, 1, 4, 2, 1, "direct", ("tp", "cp", "pp", "dp"), 4),
    (TIED, 2, 2, 2, 1, "ring", ("dp", "cp", "tp", "pp"), 4),
    (TIED, 1, 2, 3, 1, "direct", ("pp", "tp", "cp", "dp"), None),
    (MOE, 2, 2, 1, 4, "ring", ("tp", "cp", "pp", "dp"), None),
    (MOE, 2, 2, 3, 2, "direct", ("cp", "tp", "dp", "pp"), 4),
    (LATENT, 4, 1, 2, 4, "ring", ("tp", "cp", "pp", "dp"), 4),
    (LATENT, 4, 2, 1, 2, "ring", ("tp", "cp", "pp", "dp"), None),  # experts split over two replicas
    (LATENT, 4, 2, 2, 2, "direct", ("tp", "cp", "pp", "dp"), None),
    (LATENT, 4, 2, 1, 1, "direct", ("dp", "tp", "cp", "pp"), None),  # experts split over all
    (NO_SHARED, 2, 8, 1, 16, "ring", ("tp", "cp", "pp", "dp"), 8),
    (NO_SHARED, 1, 8, 3, 2, "ring", ("tp", "pp", "cp", "dp"), None),  # experts split over half a tp group
]
IDS = [f"{c[0].name}-dp{c[1]}-tp{c[2]}-pp{c[3]}-ep{c[4]}-{c[5]}" for c in CASES]
# An odd length and a batch: nothing here may be padded. 24 of the tokens are in the cache already.
SEQ_LEN, BATCH, CACHED = 77, 3, 24


def keys_of(case, phase):
    """The keys of a case, as a user or a test writes them; model and topology are left to the caller."""
    _, dp, tp, pp, ep, collective, order, _ = case
    return {
        "phase": phase, "dp": dp, "tp": tp, "pp": pp, "cp": 1, "ep": ep, "n_chips": dp * tp * pp,
        "collective": collective, "rank_order": order, "kv_dtype": "fp8", "ffn_dtype": "fp8",
    }  # fmt: skip


def deployment(case, phase, **more):
    node = case[-1]
    topology = switch(450e9, 2e-6) if node is None else hgx(node, node, up=450e9, nic=50e9)
    return deploy(**{**keys_of(case, phase), "model": case[0], "topology": topology, **more})


def naive_graph(case):
    """The naive builder's ops and edges."""
    model, dp, tp, pp, ep, collective, order, node = case
    n_chips = dp * tp * pp
    network = naive.switch_network(n_chips) if node is None else naive.hgx_network(n_chips, node)
    order = tuple(axis for axis in order if axis != "cp")
    built = naive.build_graph(
        plain_model(model), network, dp=dp, tp=tp, pp=pp, ep=ep, rank_order=order, collective=collective
    )
    return built, network[0]


def as_arrays(built, link_capacity, n_chips):
    """Lay the naive builder's lists out as the engine's arrays are documented to lie."""
    ops, n_ops = built.ops, len(built.ops)
    is_compute = np.array([op["kind"] == "compute" for op in ops])
    routes = [([], NONE) if op["kind"] == "compute" else built.route(op["src"], op["dst"]) for op in ops]
    on_chip = [[i for i in np.flatnonzero(is_compute) if ops[i]["src"] == chip] for chip in range(n_chips)]
    succ = [[] for _ in ops]
    n_preds = [0] * n_ops
    for before, after in built.edges:
        succ[before].append(after)
        n_preds[after] += 1
    rank = [NONE] * n_ops
    for chip in on_chip:
        for place, op in enumerate(chip):
            rank[op] = place

    def starts(lists):
        return np.cumsum([0, *map(len, lists)]).astype(np.int64)

    def flat(lists):
        return np.array([x for each in lists for x in each], np.int32)

    def column(name, dtype=np.int32):
        return np.array([op[name] for op in ops], dtype)

    graph = Graph(
        op_kind=np.where(is_compute, COMPUTE, FLOW).astype(np.int8),
        op_chip=np.where(is_compute, column("src"), NONE).astype(np.int32),
        op_cost=column("cost"),
        op_latency=np.array([latency for _, latency in routes], np.int32),
        op_rank=np.array(rank, np.int32),
        chip_indptr=starts(on_chip),
        chip_ops=flat(on_chip),
        route_indptr=starts([links for links, _ in routes]),
        route_indices=flat([links for links, _ in routes]),
        route_count=np.ones(sum(len(links) for links, _ in routes)),
        route_op=flat([[op] * len(links) for op, (links, _) in enumerate(routes)]),
        succ_indptr=starts(succ),
        succ_indices=flat(succ),
        pred_count=np.array(n_preds, np.int32),
        link_capacity=np.array(link_capacity, np.int32),
    )
    leaving = [[i for i, op in enumerate(ops) if op["kind"] == "flow" and op["src"] == c] for c in range(n_chips)]
    arriving = [[i for i, op in enumerate(ops) if op["kind"] == "flow" and op["dst"] == c] for c in range(n_chips)]
    return {
        "graph": graph,
        "leave_indptr": starts(leaving),
        "leave_ops": flat(leaving),
        "arrive_indptr": starts(arriving),
        "arrive_ops": flat(arriving),
        "op_src": column("src"),
        "op_dst": column("dst"),
        "op_reason": np.array([REASON[op["reason"]] for op in ops], np.int8),
        "op_layer": column("layer"),
        "op_step": column("step"),
        "n_chips": n_chips,
    }


def assert_same_arrays(actual, expected):
    """Every array of a graph has the bytes, element type and shape that the naive builder's lists amount to."""
    pairs = {f"graph.{f}": (getattr(actual.graph, f), getattr(expected["graph"], f)) for f in Graph._fields}
    # A field that the naive side does not know would go unchecked: it is a KeyError here.
    pairs |= {f: (np.asarray(getattr(actual, f)), np.asarray(expected[f])) for f in OpGraph._fields if f != "graph"}
    for field, (x, y) in pairs.items():
        assert (x.dtype, x.shape) == (y.dtype, y.shape), field
        assert x.tobytes() == y.tobytes(), field


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_cp1_degenerate_arrays(case, phase):
    dep = deployment(case, phase)
    structure = build_structure(dep)
    built, link_capacity = naive_graph(case)
    assert_same_arrays(structure.ops, as_arrays(built, link_capacity, dep.n_chips))
    assert structure.keys.durations == built.durations
    assert structure.keys.bytes == built.messages
    # The tags of context parallelism do not occur.
    for reason in ("cp_pass_kv", "cp_pass_q", "cp_reduce", "merge"):
        assert ops_of(structure.ops, reason) == []


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_cp1_degenerate_times_and_memory(tmp_path, case, phase):
    """TTFT, TPOT and every memory column of a sweep equal those of the naive builder, to the last bit.

    With every op simulated, as the naive builder's are; the exact reductions may differ in the last digits.
    """
    model, dp, tp, pp, ep, _, _, node = case
    (tmp_path / "net.toml").write_text(HGX.format(node) if node else SWITCH)
    (tmp_path / "slow.toml").write_text("prefill_op_overhead_us = 3.0\ndecode_op_overhead_us = 1.0\n")
    fixed = dict(
        **keys_of(case, phase), model=write_model(tmp_path, model), chip=PLAIN_H200,
        topology=str(tmp_path / "net.toml"), runtime=str(tmp_path / "slow.toml"),
        seq_len=SEQ_LEN, batch=BATCH, cached_tokens=CACHED if phase == "prefill" else 0,
    )  # fmt: skip
    row = one_point("full", **fixed)
    dep = deployment(case, phase)
    plain, types = plain_model(model), plain_types(dep)
    load = {"batch": BATCH, "seq_len": SEQ_LEN, "cached": CACHED}
    new = 1 if phase == "decode" else SEQ_LEN - CACHED

    built, link_capacity = naive_graph(case)
    costs = naive.op_costs(plain, phase, types, dp=dp, tp=tp, ep=ep, **load)
    sizes = naive.message_sizes(plain, types, dp=dp, tp=tp, ep=ep, batch=BATCH, new=new)
    chosen = Costs(
        np.array([seconds(costs[key], phase) for key in built.durations]),
        np.array([float(sizes[key]) for key in built.messages] or [0.0]),
        np.array([2e-6] if node is None else [2e-6, 5e-6]),
        np.array([450e9] if node is None else [450e9, 50e9]),
    )
    fields = as_arrays(built, link_capacity, dep.n_chips)
    _, finish = play(OpGraph(**{name: fields[name] for name in OpGraph._fields}), chosen)
    assert row["status"] == "ok"
    assert row["step_s"] == finish.max()
    assert row["ttft_s"] == (finish.max() if phase == "prefill" else None)
    assert row["tpot_s"] == (finish.max() if phase == "decode" else None)
    assert one_point(**fixed)["step_s"] == pytest.approx(finish.max(), rel=1e-12)

    weights, cache, activations = naive.memory_of(plain, phase, types, dp=dp, tp=tp, pp=pp, ep=ep, **load)
    assert (row["weight_bytes"], row["kv_bytes"], row["activation_bytes"]) == (weights, cache, activations)
    assert row["buffer_bytes"] == 0
    assert row["peak_bytes"] == weights + cache + activations
    # No column of context parallelism applies, and no token is padded.
    columns = ("passkv_bytes", "passq_query_bytes", "passq_reduce_bytes", "ring_s", "ring_compute_s", "ring_comm_s")
    assert [row[column] for column in columns] == [None] * len(columns)
    if phase == "prefill":
        assert row["padded_seq_len"] == SEQ_LEN


HGX = """
kind = "hgx"
node_size = {0}
scale_up_gbytes_per_s = 450.0
scale_up_latency_us = 2.0
nics_per_node = {0}
nic_gbytes_per_s = 50.0
scale_out_latency_us = 5.0
"""
SWITCH = """
kind = "switch"
chip_bandwidth_gbytes_per_s = 450.0
latency_us = 2.0
"""


def seconds(parts, phase):
    """Roofline by hand: H200 SXM, 989 (bf16) or 1978 (fp8) TFLOP/s, 4.8 TB/s, stated efficiencies .7, .6 and .8."""
    total = 0
    for unit, flops, moved, dtype in parts:
        memory_s = moved / (4800.0e9 * 0.8)
        peak = {"bf16": 989.0e12, "fp8": 1978.0e12}[dtype]
        arithmetic_s = flops / (peak * {"gemm": 0.7, "attention": 0.6, "memory": 1.0}[unit])
        total += max(arithmetic_s, memory_s)
    return total + (3.0e-6 if phase == "prefill" else 1.0e-6)


def test_a_trace_of_context_parallelism_would_be_seen():
    """The comparison of arrays fails on one more edge, on another cost and on another tag."""
    case = CASES[1]
    dep = deployment(case, "prefill")
    ops = build_structure(dep).ops
    built, link_capacity = naive_graph(case)
    expected = as_arrays(built, link_capacity, dep.n_chips)
    assert_same_arrays(ops, expected)
    g = ops.graph
    retagged, repriced = ops.op_reason.copy(), g.op_cost.copy()
    retagged[5], repriced[-1] = REASON["cp_pass_kv"], 0
    for doctored in (
        with_edges(ops, add=[(0, len(g.op_kind) - 1)]),
        ops._replace(op_reason=retagged),
        ops._replace(graph=g._replace(op_cost=repriced)),
    ):
        with pytest.raises(AssertionError):
            assert_same_arrays(doctored, expected)
