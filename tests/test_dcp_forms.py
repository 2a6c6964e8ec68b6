"""Deployed context parallelism: operation graphs, the audit, and exact reductions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import DENSE, EXPERTS, GQA, MLA, edges, hgx, ops_of, predecessors, small_model, switch
from test_audit import SOUND, simulated
from test_dcp_bytes import LAYOUTS, SMALL, WIDE, deploy, is_deployed
from test_reduction import assert_reduced_equals_full

from g5cp_vec import run
from g5cp_vec.audit.conservation import audit
from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.rows import cost_rows, parts_by_key
from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.sharding import context_on_shard
from g5cp_vec.mapping.spans import structure_reach
from g5cp_vec.mapping.structure import build_structure

EXPERTS_MODEL = {
    "gqa": small_model(name="experts", attention=WIDE, n_layers=3, moe=EXPERTS, first_dense=1),
    "mla": small_model(name="experts", attention=MLA, n_layers=3, moe=EXPERTS, first_dense=1),
}


def build(dep, seq_len, batch=1, cached=0):
    (reach,) = structure_reach(dep, build_load(dep, seq_len, batch, cached)).tolist()
    return build_structure(dep, reach=reach)


def assert_sound(dep, new, batch, cached):
    """Nothing is lost, early or beyond a capacity on the whole graph."""
    seq_len = new + cached
    assert simulated(dep, seq_len, batch, cached, structure=build(dep, seq_len, batch, cached)).audit() == SOUND


# --- Graphs -----------------------------------------------------------------------------------------------------------


def names(structure):
    ops, graph = structure.ops, structure.ops.graph
    of_duration = {i: key[0] for key, i in structure.keys.durations.items()}
    of_bytes = {i: key if isinstance(key, str) else key[0] for key, i in structure.keys.bytes.items()}
    kinds, costs = graph.op_kind.tolist(), graph.op_cost.tolist()
    return [of_bytes[c] if k == FLOW else of_duration[c] for k, c in zip(kinds, costs, strict=True)], ops


def order(structure, chip):
    """Names of the computes of a chip's first layer, in program order."""
    called, ops = names(structure)
    graph = ops.graph
    mine = [op for op in range(len(called)) if graph.op_kind[op] == COMPUTE and graph.op_chip[op] == chip]
    mine = [op for op in mine if ops.op_layer[op] == 0]
    return [called[op] for op in sorted(mine, key=lambda op: graph.op_rank[op])]


def test_programs():
    """The computes of a layer on one rank."""
    prefill = {"model": SMALL["gqa"], "tp": 4, "dcp": 2}
    around = ("qkv", "o_proj", "ffn")

    def middle(dep, seq_len, cached=0, chip=0):
        first, *rest, o_proj, ffn = order(build(dep, seq_len, 1, cached), chip)
        assert (first, o_proj, ffn) == around
        return rest

    assert middle(deploy(**prefill), 64) == ["attend@0"]
    assert middle(deploy(**prefill), 96, 32) == ["attend@0", "context@1", "merge_context"]
    assert middle(deploy(**prefill, cp_semantics="orthogonal"), 96, 32) == [
        "context@1", "rescale", "attend@0", "merge_context",
    ]  # fmt: skip
    dep = deploy(**prefill, pcp=2, prefill_form="allgather_q")
    assert middle(dep, 96) == ["restore", "attend@0"]
    assert middle(dep, 96, 32) == ["restore", "head@0", "context@3", "tail@0", "merge_context"]
    assert middle(dep, 96, 32, chip=4) == ["restore", "head@1", "context@3", "tail@1", "merge_context"]
    # 33 tokens: the first shard holds one more, the others one class.
    assert middle(dep, 97, 33) == ["restore", "head@0", "context@0", "tail@0", "merge_context"]
    assert middle(dep, 97, 33, chip=1) == ["restore", "head@0", "context@3", "tail@0", "merge_context"]
    dep = deploy(**prefill | {"model": SMALL["mla"]}, pcp=2)
    assert middle(dep, 64) == ["restore", "attend@0"]
    assert middle(dep, 96, 32, chip=7) == ["restore", "attend@1", "segment_last@0"]
    decode = {**prefill, "phase": "decode"}
    assert middle(deploy(**decode), 64) == ["shard@1", "merge"]
    assert middle(deploy(**decode, decode_form="dcp_ag_rs"), 64) == ["shard@1", "rescale"]
    assert middle(deploy(**decode | {"dcp": 1}, pcp=2, cp_semantics="orthogonal"), 64) == ["shard@0"]


def test_what_overlaps_with_gathered_queries():
    """Queries travel beside head chunks, answers beside tail chunks; keys of new tokens before any of it."""
    dep = deploy(model=SMALL["gqa"], tp=4, pcp=2, dcp=2, prefill_form="allgather_q")
    structure = build(dep, 96, 1, 32)
    called, ops = names(structure)
    waits = predecessors(ops)

    def before(name):
        found = set()
        for op in range(len(called)):
            if called[op] == name and ops.op_layer[op] == 0:
                todo, seen = [op], set()
                while todo:
                    new = waits[todo.pop()] - seen
                    seen |= new
                    todo += new
                found |= {called[p] for p in seen if ops.op_layer[p] == 0}
        return found

    assert not {"head@0", "head@1", "context@3"} & before("dcp_q")
    assert {"pcp_q", "pcp_kv"} <= before("dcp_q")
    assert not {"tail@0", "tail@1"} & before("pcp_partial")
    assert {"pcp_partial", "dcp_a2a", "tail@0"} <= before("merge_context")
    assert "pcp_q" not in before("head@0")


def test_one_workspace_holds_one_segment():
    """The next segment is gathered once the one before has been attended."""
    dep = deploy(model=SMALL["mla"], tp=4, pcp=2, dcp=2)
    structure = build(dep, 300_000, 1, 299_000)
    called, ops = names(structure)
    rounds = order(structure, 0).count("segment_full@0") + 1
    assert rounds == 3
    waits = predecessors(ops)
    gathers = [op for op in range(len(called)) if called[op] == "dcp_segment@full" and ops.op_layer[op] == 0]
    for op in gathers:
        (waited,) = {called[p] for p in waits[op]}
        assert waited in ("attend@0", "attend@1", "segment_full@0")


def test_decode_rows_are_on_all_pcp_ranks():
    """Projections, feed-forward and head run on every rank; final hidden states are gathered once."""
    dep = deploy(model=SMALL["gqa"], tp=4, pcp=2, phase="decode")
    ops = build(dep, 64).ops
    assert len(ops_of(ops, "qkv")) == len(ops_of(ops, "ffn")) == 8
    called, _ = names(build(dep, 64))
    assert called.count("pcp_hidden") == 8


def test_an_empty_shard_sends_as_much():
    """Runs of a block: a context of one block leaves three of four shards empty."""
    dep = deploy(model=SMALL["gqa"], tp=4, pcp=2, dcp=2, interleave=128, phase="decode")
    load = build_load(dep, 100, 1, 0)
    assert [context_on_shard(dep, load, shard) for shard in range(4)] == [100, 0, 0, 0]
    empty = parts_by_key(dep, load)["shard@3", 0][0]
    assert empty.flops == 0
    assert empty.bytes > 0
    structure = build(dep, 100)
    flows = structure.ops.graph.op_kind == FLOW
    assert len(set(np.bincount(structure.ops.op_src[flows]).tolist())) == 1


def test_no_sharding_no_trace():
    """Without pcp and dcp semantics and layout are not there, and the graph is that of cp alone."""
    plain = deploy(model=DENSE, tp=2, cp=4)
    told = deploy(model=DENSE, tp=2, cp=4, cp_semantics="orthogonal", interleave=8, block_size=64)
    assert plain == told
    assert plain.interleave is plain.block_size is plain.cp_semantics is None


def test_no_edge_twice():
    for changes in ({"pcp": 2, "dcp": 2, "prefill_form": "allgather_q"}, {"dcp": 2, "cp_semantics": "orthogonal"}):
        for collective in ("ring", "direct"):
            ops = build(deploy(model=SMALL["gqa"], tp=4, collective=collective, **changes), 96, 1, 32).ops
            assert len(set(edges(ops))) == len(edges(ops))


def test_a_ring_over_pcp_is_the_ring_over_cp():
    """The same ops, edge by edge, but for the end of the pass."""
    for attention in (GQA, MLA):
        model = small_model(attention=attention)
        rings = [
            build(deploy(model=model, tp=2, prefill_form="pass_kv", **{axis: 4}), 4096).blocks[1]
            for axis in ("cp", "pcp")
        ]
        for field in ("kind", "src", "dst", "cost", "pred", "succ", "prio"):
            np.testing.assert_array_equal(getattr(rings[0], field), getattr(rings[1], field))


# --- The audit --------------------------------------------------------------------------------------------------------

TOPOLOGIES = {"switch": switch(1e9, 1e-6), "hgx": hgx(4, 2, up=1e9, nic=1e8, over=2.0)}


# One for all kinds of groups, or one for each.
ALGORITHMS = ["ring", "direct", "tp=direct,ep=ring,pcp=direct,dcp=ring", "tp=ring,ep=direct,pcp=ring,dcp=direct"]


@settings(max_examples=60)
@given(st.data())
def test_audits_are_sound(data):
    kind = data.draw(st.sampled_from(sorted(SMALL)))
    semantics = data.draw(st.sampled_from(["multiplicative", "orthogonal"]))
    tp, pcp, dcp = data.draw(st.sampled_from(LAYOUTS[kind]))
    forms = ("dcp_ag_rs", "dcp_a2a", "dcp_a2a_fp32", "allgather_kv", "allgather_q")
    legal = [form for form in forms if is_deployed(kind, semantics, (tp, pcp, dcp), form)]
    if not legal:
        return
    form = data.draw(st.sampled_from(legal))
    phase = "decode" if form.startswith("dcp") else "prefill"
    model, ep = SMALL[kind], 1
    if 16 % (pcp * tp) == 0 and data.draw(st.booleans()):
        model, ep = EXPERTS_MODEL[kind], data.draw(st.sampled_from([1, pcp * tp]))
    dep = deploy(
        model=model, phase=phase, tp=tp, pcp=pcp, dcp=dcp,
        cp_semantics=semantics, ep=ep, collective=data.draw(st.sampled_from(ALGORITHMS)),
        moe_dispatch=data.draw(st.sampled_from(["all_to_all", "all_gather"])),
        topology=TOPOLOGIES[data.draw(st.sampled_from(sorted(TOPOLOGIES)))], block_size=16,
        interleave=data.draw(st.sampled_from([1, 8])), kv_dtype=data.draw(st.sampled_from(["bf16", "fp8"])),
        **{f"{phase}_form": form},
    )  # fmt: skip
    new, cached = data.draw(st.integers(1, 999)), data.draw(st.sampled_from([0, 1, 333, 4096, 70_001]))
    batch = data.draw(st.integers(1, 3))
    cached = cached if phase == "prefill" else 0
    assert_sound(dep, new, batch, cached)


@pytest.mark.parametrize("form", ["allgather_kv", "allgather_q"])
@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_audits_of_gathering_over_cp_are_sound(form, collective):
    for attention in (GQA, MLA) if form == "allgather_kv" else (GQA,):
        dep = deploy(
            model=small_model(attention=attention), tp=2, cp=4, prefill_form=form, collective=collective,
            topology=TOPOLOGIES["hgx"],
        )  # fmt: skip
        for new, cached in ((4096, 0), (999, 333)):
            assert_sound(dep, new, 2, cached)


def test_audits_of_rings_over_pcp_are_sound():
    dep = deploy(model=EXPERTS_MODEL["mla"], tp=2, pcp=4, ep=8, prefill_form="pass_kv", topology=TOPOLOGIES["hgx"])
    for new, cached in ((4096, 0), (999, 333)):
        assert_sound(dep, new, 2, cached)


def test_the_audit_misses_a_log_sum_exp():
    """A kernel that forgot it is told so: bytes are promised apart from how messages are built."""
    dep = deploy(model=SMALL["gqa"], tp=4, dcp=2, phase="decode", decode_form="dcp_ag_rs", topology=TOPOLOGIES["hgx"])
    seen = simulated(dep, 4096, 2, 0, structure=build(dep, 4096, 2))
    called, ops = names(seen.structure)
    without = seen.finish_s.copy()
    lost = [op for op in range(len(called)) if called[op] == "dcp_lse"]
    without[lost] = np.nan
    kpis = audit(dep, seen.structure, 4096, 2, 0, seen.start_s, without)
    assert kpis.lost_ops == len(lost) == 4
    assert kpis.lost_bytes == 4 * 2 * 8 * 4


# --- Reductions -------------------------------------------------------------------------------------------------------

REDUCED = {
    "decode, both": {"phase": "decode", "tp": 8, "pcp": 2, "dcp": 2},
    "decode, uneven shards": {"phase": "decode", "tp": 8, "pcp": 2, "dcp": 2, "seq_len": 5003, "interleave": 64},
    "decode, reduce-scatter": {"phase": "decode", "tp": 16, "dcp": 4, "decode_form": "dcp_ag_rs"},
    "decode, replicas": {"phase": "decode", "tp": 8, "pcp": 2, "cp_semantics": "orthogonal"},
    "prefill": {"tp": 8, "pcp": 2, "dcp": 2},
    "prefill, queries": {"tp": 8, "pcp": 2, "dcp": 2, "prefill_form": "allgather_q", "cached_tokens": 5000},
    "prefill, virtual batch": {"tp": 4, "pcp": 4, "cp_semantics": "orthogonal", "seq_len": 8191},
    "ring over pcp": {"tp": 4, "pcp": 4, "prefill_form": "pass_kv"},
    "gathering over cp": {"tp": 4, "cp": 4, "prefill_form": "allgather_kv"},
    "latents, decode": {"model": "deepseek-v3-671b", "phase": "decode", "tp": 8, "pcp": 2, "dcp": 8},
    "latents, all-reduce": {
        "model": "deepseek-v3-671b", "phase": "decode", "tp": 4, "pcp": 2, "dcp": 8, "cp_semantics": "orthogonal",
    },
    "latents, segments": {
        "model": "deepseek-v3-671b", "tp": 8, "pcp": 2, "dcp": 8, "seq_len": "300K", "cached_tokens": "290K",
    },
    "latents, direct": {"model": "deepseek-v3-671b", "tp": 8, "pcp": 2, "dcp": 2, "collective": "direct"},
}  # fmt: skip


@pytest.mark.parametrize("topology", ["hgx-8", "flat-450"])
@pytest.mark.parametrize("case", REDUCED)
def test_reduced_equals_full(case, topology):
    fixed = {
        "model": "qwen3-235b-a22b", "chip": "h100-sxm", "phase": "prefill", "seq_len": 8192, "cp": 1, "ep": 16,
        "topology": topology, "n_chips": 16, **REDUCED[case],
    }  # fmt: skip
    ranks = fixed["tp"] * fixed["cp"] * fixed.get("pcp", 1)
    fixed |= {"n_chips": ranks, "ep": ranks // fixed["cp"]}
    expansion = load_grid({"name": "point", "fixed": fixed}, point=True).expand()
    assert not expansion.reasons
    (dep,) = expansion.deployments
    network = build_network(dep.topology, dep.n_chips)
    load = build_load(dep, expansion.seq_len, expansion.batch, expansion.cached_tokens)
    (reach,) = structure_reach(dep, load).tolist()
    structure = build_structure(dep, network, reach)
    costs = cost_rows(dep, structure.keys, network, load, 1)
    reduced = assert_reduced_equals_full(structure, costs)
    if "uneven" not in case and "virtual" not in case:
        # A ring over two nodes has ranks that do and do not cross between them.
        assert len(reduced.chips) <= ranks // 2


def test_points_share_a_structure_where_shards_are_alike():
    dep = deploy(model=SMALL["gqa"], tp=4, pcp=2, dcp=2, phase="decode")
    lengths = np.arange(1, 200)
    reach = structure_reach(dep, build_load(dep, lengths, 1 + 0 * lengths, 0 * lengths))
    assert len(np.unique(reach, axis=0)) == 4  # 0 to 3 shards that are one token longer


# --- What users ask ---------------------------------------------------------------------------------------------------


def point(**changes):
    fixed = {
        "model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "prefill", "seq_len": "64K",
        "n_chips": 16, "tp": 8, "cp": 1, "pcp": 2, "ep": 16,
    }  # fmt: skip
    return run({"name": "p", "fixed": fixed | changes})


def test_ring_or_gathering_on_one_deployment():
    """The same bytes either way; the ring hides them where attention is long, gathering never does."""
    gathered, ring = (point(prefill_form=form, moe_dispatch="all_to_all") for form in ("allgather_kv", "pass_kv"))
    assert gathered.prefill_form == "allgather_kv"
    assert ring.passkv_bytes == gathered.pcp_bytes - ring.pcp_bytes
    assert ring.exposed_comm_s < gathered.exposed_comm_s
    assert gathered.ring_s is None
    assert gathered.buffer_bytes == 2 * ring.buffer_bytes * 2  # all keys twice, instead of all but one block once


def test_kernels_differ_by_what_the_formulas_say():
    """Decode on one deployment: outputs with log-sum-exps in fp32, packed, or apart."""
    keys = {"phase": "decode", "tp": 8, "pcp": 1, "dcp": 2, "n_chips": 8, "ep": 8, "batch": 4}
    forms = {form: point(**keys, decode_form=form) for form in ("dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs")}
    heads, layers = 4 * 8, 94
    queries = heads * 128 * 2
    sent = {form: result.dcp_bytes // layers - queries for form, result in forms.items()}
    assert sent["dcp_a2a_fp32"] == heads * 129 * 4
    assert sent["dcp_a2a"] == heads * 130 * 2
    assert sent["dcp_ag_rs"] == heads * 128 * 2 + 2 * heads * 4
    # The semantics agree where there is no pcp.
    for form, result in forms.items():
        other = point(**keys, decode_form=form, cp_semantics="orthogonal")
        assert (other.step_s, other.dcp_bytes, other.kv_bytes) == (result.step_s, result.dcp_bytes, result.kv_bytes)


def test_build_deployment_takes_the_keys():
    dep = build_deployment(
        {"phase": "decode", "model": SMALL["gqa"], "chip": deploy(tp=8).chip, "topology": switch(), "n_chips": 8,
         "cp": 1, "tp": 8, "dcp": 4}
    )  # fmt: skip
    assert (dep.dp, dep.pcp, dep.kv_shards, dep.decode_form) == (1, 1, 4, "dcp_a2a_fp32")
