"""Experts by all-gather: bytes summed over the graph, who waits for whom, work, memory, and the closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import (
    EXPERTS,
    GQA,
    ancestors,
    bytes_of_ops,
    deploy,
    hgx,
    one_point,
    ops_of,
    predecessors,
    priced,
    small_model,
    switch,
)
from test_audit import SOUND, simulated
from test_dcp_bytes import deploy as deploy_sharded
from test_reduction import assert_reduced_equals_full

from g5cp_vec import run, sweep
from g5cp_vec.audit.conservation import audit
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.mapping.spans import structure_reach
from g5cp_vec.mapping.structure import build_structure

HIDDEN, N_EXPERTS, TOP_K = 64, 16, 2
ONE = small_model(name="one", n_layers=1, moe=EXPERTS)
UNSHARED = small_model(name="unshared", n_layers=1, moe=EXPERTS.model_copy(update={"n_shared": 0}))


def ceil(a, b):
    return -(-a // b)


def build(dep, seq_len, batch=1, cached=0):
    (reach,) = structure_reach(dep, build_load(dep, seq_len, batch, cached)).tolist()
    return build_structure(dep, reach=reach)


def sent_by(dep, seq_len, batch):
    """Bytes of expert traffic that every chip puts on the wire, over the flows of the graph."""
    structure = build(dep, seq_len, batch)
    rows, ops = priced(dep, structure, seq_len, batch), structure.ops
    sizes, total = bytes_of_ops(structure, rows), np.zeros(dep.n_chips, object)
    for op in ops_of(ops, "ep", FLOW):
        total[ops.op_src[op]] += sizes[op]
    return total.tolist()


@settings(max_examples=60)
@given(st.data())
def test_bytes_are_those_of_hidden_states_logits_and_sums(data):
    """Every rank contributes hidden + experts and keeps hidden, per token of its own; whatever ep is."""
    pcp = data.draw(st.sampled_from([1, 1, 2, 3]))
    tp = data.draw(st.sampled_from([1, 2, 4]))
    dp = data.draw(st.sampled_from([1, 2, 4])) if pcp == 1 else 1
    ep = data.draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if dp * pcp * tp % n == 0 and 16 % n == 0]))
    phase = data.draw(st.sampled_from(["prefill", "decode"]))
    semantics = data.draw(st.sampled_from(["multiplicative", "orthogonal"]))
    new, batch = data.draw(st.integers(1, 999)), data.draw(st.integers(1, 5))
    moe_tp = dp * pcp * tp // ep
    if 64 % moe_tp or (tp % moe_tp and moe_tp % tp):
        return
    dep = deploy_sharded(
        model=small_model(n_layers=1, moe=EXPERTS, attention=GQA), tp=tp, dp=dp, pcp=pcp, ep=ep, phase=phase,
        moe_dispatch="all_gather", cp_semantics=semantics, collective=data.draw(st.sampled_from(["ring", "direct"])),
    )  # fmt: skip
    own = batch
    if phase == "prefill":
        chunk = ceil(new, 2 * pcp)
        lengths = [max(0, min(chunk, new - k * chunk)) for k in range(2 * pcp)]
        fullest = max(lengths[r] + lengths[2 * pcp - 1 - r] for r in range(pcp))
        own = batch * (new if pcp == 1 else fullest if semantics == "orthogonal" else 2 * chunk)
    replicas = dp * pcp
    expected = (replicas - 1) * own * (HIDDEN * 2 + N_EXPERTS * 2 + HIDDEN * 2)
    assert sent_by(dep, new, batch) == [expected] * dep.n_chips


@pytest.mark.parametrize("semantics", ["multiplicative", "orthogonal"])
def test_it_is_how_experts_are_fed_under_pcp(semantics):
    model = small_model(moe=EXPERTS)
    assert deploy_sharded(model=model, tp=4, pcp=2, ep=8, cp_semantics=semantics).moe_dispatch == "all_gather"
    assert deploy_sharded(model=model, tp=4, pcp=1, dcp=1, ep=4).moe_dispatch == "all_to_all"
    assert deploy_sharded(model=small_model(), tp=4, pcp=2).moe_dispatch is None


def test_published_sizes():
    """DeepSeek-R1, 128K tokens over pcp = 2: 65536 rows of 7168 hidden states and 256 logits, 58 layers of experts."""
    result = run({"fixed": {
        "model": "deepseek-r1", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8, "pcp": 2,
        "dcp": 8, "ep": 16, "n_chips": 16, "seq_len": "128K",
    }})  # fmt: skip
    assert result.moe_dispatch == "all_gather"
    assert result.ep_bytes == 58 * 65536 * (7168 + 256 + 7168) * 2
    assert result.lost_bytes == result.lost_flops == 0


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_who_waits_for_whom(collective):
    dep = deploy(model=ONE, dp=4, tp=2, ep=8, moe_dispatch="all_gather", collective=collective)
    ops = build_structure(dep).ops
    waits, flows = predecessors(ops), ops_of(ops, "ep", FLOW)
    n_hops = 3
    computes = {chip: [op for op in ops_of(ops, "moe", COMPUTE) if ops.op_src[op] == chip] for chip in range(8)}
    for chip in range(8):
        router, shared, experts = computes[chip]
        place = {chip % 2 + 2 * replica for replica in range(4)}
        before, after = ancestors(waits, experts), ancestors(waits, shared)
        incoming = [op for op in flows if ops.op_dst[op] == chip]
        assert {int(ops.op_src[op]) for op in incoming} <= place
        # Two gathers arrive before the experts, one scatter of their outputs after; shared experts wait for neither.
        assert len([op for op in incoming if op in before]) == 2 * n_hops
        sums = [op for op in incoming if op not in before]
        assert len(sums) == n_hops
        assert all(computes[int(ops.op_src[op])][2] in ancestors(waits, op) for op in sums)
        assert not after & set(flows)
        routers = {computes[other][0] for other in place}
        assert routers <= before
        # All that other replicas' experts sum up is there before the layer goes on.
        (last,) = [op for op in ops_of(ops, "lm_head", COMPUTE) if ops.op_src[op] == chip]
        assert {computes[other][2] for other in place} <= ancestors(waits, last)


def test_one_replica_sends_nothing():
    dep = deploy(model=ONE, tp=4, ep=4, moe_dispatch="all_gather")
    assert ops_of(build_structure(dep).ops, "ep") == []
    # Rows of all tokens go to the experts of each rank.
    (kind,) = dep.model.kinds[0]
    (up, *_) = layer_parts(dep, build_load(dep, 96, 1, 0), kind)["experts"]
    assert up.flops == 2 * ceil(96 * TOP_K, 4) * HIDDEN * 2 * 64


@pytest.mark.parametrize("first_dense", [0, 1])
def test_memory_of_gathered_tokens(first_dense):
    """Hidden states and logits of both replicas, and as many sums: more than anything that attention gathers here."""
    model = small_model(n_layers=1 + first_dense, moe=EXPERTS, attention=GQA, first_dense=first_dense)
    keys = {"model": model, "tp": 2, "pcp": 2, "ep": 4}
    for phase, own in (("prefill", 4 * 500), ("decode", 4)):
        gathered, exchanged = (
            MemoryModel(deploy_sharded(**keys, phase=phase, moe_dispatch=name)).at(1000, 4, 0)
            for name in ("all_gather", "all_to_all")
        )
        tokens = 2 * own * (HIDDEN + N_EXPERTS + HIDDEN) * 2
        assert gathered.buffer_bytes == max(tokens, exchanged.buffer_bytes)
        assert phase == "decode" or tokens > exchanged.buffer_bytes
        assert gathered.activation_bytes == exchanged.activation_bytes


def test_the_longest_context_fits_and_no_longer_one():
    for keys in ({"tp": 2, "dp": 4, "ep": 8}, {"tp": 2, "dp": 2, "cp": 2, "ep": 4}):
        model = MemoryModel(deploy(model=ONE, moe_dispatch="all_gather", **keys))
        longest = model.max_seq_len(3, 0)
        assert model.at(longest, 3, 0).peak_bytes <= model.usable_bytes < model.at(longest + 1, 3, 0).peak_bytes


COLLECTIVES = ["ring", "direct", "tp=ring,ep=direct", "tp=direct,ep=ring,pcp=direct"]


@settings(max_examples=40)
@given(st.data())
def test_audits_are_sound(data):
    degrees = data.draw(st.sampled_from([
        {"dp": 4, "tp": 2, "ep": 8}, {"dp": 4, "tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "cp": 2, "ep": 4},
        {"pcp": 2, "tp": 4, "ep": 8}, {"pcp": 4, "tp": 2, "ep": 1}, {"dp": 2, "tp": 2, "ep": 1, "pp": 3},
    ]))  # fmt: skip
    phase = data.draw(st.sampled_from(["prefill", "decode"]))
    model = small_model(name="experts", n_layers=3, moe=EXPERTS, first_dense=1)
    topology = data.draw(st.sampled_from([switch(), hgx(4, 2)]))
    collective = data.draw(st.sampled_from(COLLECTIVES))
    dep = deploy_sharded(
        model=model, phase=phase, topology=topology, moe_dispatch="all_gather", collective=collective, **degrees
    )
    seq_len, batch = data.draw(st.integers(1, 999)), data.draw(st.integers(1, 3))
    seen = simulated(dep, seq_len, batch, 0, structure=build(dep, seq_len, batch))
    assert audit(dep, seen.structure, seq_len, batch, 0, seen.start_s, seen.finish_s) == SOUND


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_reduced_equals_full(collective):
    for topology in (switch(), hgx(4, 2)):
        dep = deploy(model=ONE, dp=4, tp=2, ep=8, moe_dispatch="all_gather", collective=collective, topology=topology)
        structure = build_structure(dep)
        assert_reduced_equals_full(structure, priced(dep, structure, 512, 2))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_many_chips_by_symmetry(phase):
    """Structures of so many chips are built for one rank of an orbit."""
    fixed = {
        "model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "phase": phase, "cp": 1, "tp": 8, "ep": 64,
        "n_chips": 64, "seq_len": 4096, "collective": "direct", "moe_dispatch": "all_gather",
    }  # fmt: skip
    exact, full = (one_point(fidelity, **fixed) for fidelity in ("exact", "full"))
    assert exact["step_s"] == pytest.approx(full["step_s"], rel=1e-9)
    assert exact["ep_bytes"] == full["ep_bytes"]
    assert exact["n_ops_simulated"] < full["n_ops_simulated"] / 30


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_the_closed_form_agrees_where_nothing_overlaps(collective):
    for degrees in ({"dp": 4, "tp": 2, "ep": 8}, {"dp": 1, "tp": 4, "ep": 4}):
        chips = math.prod(n for key, n in degrees.items() if key != "ep")
        fixed = {
            "model": "qwen3-235b-a22b", "chip": "h200-sxm", "topology": "flat-450", "phase": "decode", "cp": 1,
            "n_chips": chips, "seq_len": 4096, "batch": 4, "collective": collective, "moe_dispatch": "all_gather",
        }  # fmt: skip
        simulated_, closed = (one_point(**fixed, **degrees, path=path) for path in ("g5", "math"))
        assert simulated_["step_s"] == pytest.approx(closed["step_s"], rel=1e-9)
        assert simulated_["ep_bytes"] == closed["ep_bytes"]


def test_both_are_an_axis():
    fixed = {
        "model": "deepseek-v3-671b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
        "pcp": 2, "ep": 16, "n_chips": 16, "seq_len": 8192,
    }  # fmt: skip
    frame = sweep({"name": "t", "fixed": fixed, "axes": {"moe_dispatch": ["all_to_all", "all_gather"]}}, audit="all")
    assert frame["moe_dispatch"].to_list() == ["all_to_all", "all_gather"]
    assert frame["lost_bytes"].to_list() == [0, 0]
    assert frame["ep_bytes"].n_unique() == 2
    with pytest.raises(InfeasibleError, match="ep = 3 does not divide"):
        deploy(model=UNSHARED, tp=4, ep=3, moe_dispatch="all_gather")
