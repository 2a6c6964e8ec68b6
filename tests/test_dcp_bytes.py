"""Deployed context parallelism: the bytes of every collective, summed over the flows of the graph.

Hand-derived figures and a twin of the published tensor shapes (vllm-ascend v0.13 to v0.23, vLLM's second runner): bytes
that one rank contributes, and what it puts on the wire, for every phase, kernel and semantics.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from test_acceptance_tools import GQA, H200, MLA, PRESETS, hgx, small_model, switch

from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.model import Attention
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.engine.arrays import FLOW
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.spans import structure_reach
from g5cp_vec.mapping.structure import build_structure

QWEN = PRESETS["qwen3-235b-a22b"]
DEEPSEEK = PRESETS["deepseek-v3-671b"]
MIB = 2**20


def deploy(**changes):
    keys = {"phase": "prefill", "model": QWEN, "chip": H200, "topology": switch(), "cp": 1, "tp": 8, "ep": 1} | changes
    ranks = keys["tp"] * keys["cp"] * keys.get("pcp", 1) * keys.get("pp", 1) * keys.get("dp", 1)
    return build_deployment({"n_chips": ranks} | keys)


def short(model, n_layers=1):
    return model.model_copy(update={"n_layers": n_layers, "first_dense": 0})


def sent(dep, seq_len, batch=1, cached=0):
    """Return for each message key the bytes of one message, and the wire bytes of each rank in one layer (or pass)."""
    load = build_load(dep, seq_len, batch, cached)
    (reach,) = structure_reach(dep, load).tolist()
    structure = build_structure(dep, reach=reach)
    ops, graph = structure.ops, structure.ops.graph
    result = {}
    for key, number in structure.keys.bytes.items():
        size = int(message_bytes(dep, load, dep.model.kinds[0], key))
        flows = (graph.op_kind == FLOW) & (graph.op_cost == number)
        flows &= (ops.op_layer == 0) | (ops.op_layer == -1)
        per_rank = np.bincount(ops.op_src[flows], minlength=dep.n_chips) * size
        name = key[0] if isinstance(key, tuple) else key
        assert len(set(per_rank[per_rank > 0].tolist())) <= 1
        result[name] = (size, int(per_rank.max()))
    return result


# --- Published figures ------------------------------------------------------------------------------------------------


def test_qwen_chunk_of_8192_tokens():
    """Qwen3-235B, tp 8, pcp 2, dcp 2: a chunk of 8192 tokens over cached context."""
    dep = deploy(model=short(QWEN), pcp=2, dcp=2, prefill_form="allgather_q")
    found = sent(dep, 8192 + 4096, cached=4096)
    # 4096 rows of one key/value head, K and V of 128 elements of 2 bytes.
    assert found["pcp_kv"] == (2 * MIB, 2 * MIB)
    assert found["pcp_q"] == (8 * MIB, 8 * MIB)
    assert found["dcp_q"] == (16 * MIB, 16 * MIB)
    # 8192 rows of 16 heads, 129 fp32 each: 64.5 MiB, of which half goes to the other member.
    buffer = 8192 * 16 * 129 * 4
    assert buffer == 64.5 * MIB
    assert found["dcp_a2a"] == (buffer // 2, buffer // 2)
    assert found["pcp_partial"] == (buffer, buffer)


def test_qwen_chunk_of_131072_tokens():
    dep = deploy(model=short(QWEN), pcp=2, dcp=2, prefill_form="allgather_q")
    found = sent(dep, 131072 + 512, cached=512)
    assert 2 * found["dcp_a2a"][0] == 1032 * MIB
    assert 2 * found["pcp_partial"][0] == 2064 * MIB


@pytest.mark.parametrize(("pcp", "contributed", "received"), [(2, 72 * MIB, 72 * MIB), (4, 36 * MIB, 108 * MIB)])
def test_deepseek_prefill_of_131072_tokens(pcp, contributed, received):
    found = sent(deploy(model=short(DEEPSEEK), pcp=pcp), 131072)
    assert found["pcp_kv"] == (contributed, received)


def test_deepseek_decode_of_one_token():
    """Tp 8, dcp 8, one sequence, in each project's kernel: vllm-ascend sends twice as much."""
    wires = {}
    for form in ("dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs"):
        found = sent(deploy(model=short(DEEPSEEK), dcp=8, phase="decode", decode_form=form), 131072)
        assert found["dcp_q"][0] == 18_432
        wires[form] = found
    fp32, packed, ag_rs = wires["dcp_a2a_fp32"], wires["dcp_a2a"], wires["dcp_ag_rs"]
    assert (8 * fp32["dcp_a2a"][0], fp32["dcp_a2a"][1]) == (262_656, 229_824)
    assert (8 * packed["dcp_a2a"][0], packed["dcp_a2a"][1]) == (131_584, 115_136)
    assert ag_rs["dcp_lse"][0] == 512
    assert (8 * ag_rs["dcp_out"][0], ag_rs["dcp_out"][1]) == (131_072, 114_688)


def test_deepseek_decode_over_pcp():
    found = sent(deploy(model=short(DEEPSEEK), pcp=2, dcp=8, phase="decode"), 131072)
    assert found["pcp_partial"] == (262_656, 262_656)


def test_segments_of_a_context_of_500000_tokens():
    """S 16, interleave and block 128: rounds of 8192, 8192, 8192 and 6784 rows, 9 MiB contributed to a full one."""
    dep = deploy(model=short(DEEPSEEK), pcp=2, dcp=8, interleave=128)
    found = sent(dep, 500_000 + 256, cached=500_000)
    width = 576 * 2
    assert found["dcp_segment@full"] == (9 * MIB, 3 * 7 * 9 * MIB)
    assert found["pcp_segment@full"] == (72 * MIB, 3 * 72 * MIB)
    assert 8192 * 16 * width == 144 * MIB
    assert found["dcp_segment@last"] == (6784 * width, 7 * 6784 * width)
    assert found["pcp_segment@last"] == (8 * 6784 * width, 8 * 6784 * width)


def test_eight_rounds_of_a_million_tokens():
    dep = deploy(model=short(DEEPSEEK), pcp=2, dcp=8, interleave=128)
    reach = structure_reach(dep, build_load(dep, 2**20 + 256, 1, 2**20))
    assert reach[0, 0] == 8


# --- A twin of the tensor shapes --------------------------------------------------------------------------------------


def ceil(a, b):
    return -(-a // b)


def widths(dep):
    a = dep.model.kinds[0][0].softmax
    if a.kind == "gqa":
        return a.head_dim, a.head_dim, max(1, a.n_kv_heads // dep.tp) * a.head_dim, None
    if dep.phase == "decode":
        return a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank, a.kv_lora_rank, a.qk_rope_head_dim
    return a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim, a.kv_lora_rank, a.qk_rope_head_dim


def shapes(dep, seq_len, batch, cached):
    """Yield (name, contributed bytes, wire bytes of a rank) of every collective; two bytes an element."""
    tp, P, C = dep.tp, dep.pcp, dep.dcp
    h = dep.model.kinds[0][0].softmax.n_heads // tp
    dq, dv, keys, values = widths(dep)
    values = keys if values is None else values
    orthogonal = dep.cp_semantics == "orthogonal"
    spans = orthogonal and P > 1 and C > 1

    def ag(n, contributed):
        return contributed, (n - 1) * contributed

    def a2a(n, buffer):
        return buffer // n, buffer // n * (n - 1)

    if dep.phase == "decode":
        n = batch
        if orthogonal and C == 1:
            return
        if not spans and C > 1:
            yield "dcp_q", *ag(C, n * h * dq * 2)
        if spans and tp * P == C and tp > 1:
            yield "dcp_q", *ag(tp, n * h * dq * 2)
        if dep.decode_form == "dcp_ag_rs":
            heads = h * C if not spans else h if C == P and tp > 1 else h * tp
            yield "dcp_lse", *ag(C, n * heads * 4)
            buffer = n * heads * dv * 2
            # All-reduce: a reduce-scatter and an all-gather.
            passes = 2 if spans else 1
            yield "dcp_out", ceil(buffer, C), passes * (C - 1) * ceil(buffer, C)
            return
        if spans:
            # Everyone's heads in equal shares; then whole heads of a rank from the ranks that hold the same ones.
            heads = h if C == P and tp > 1 else h * tp
            yield "dcp_a2a", *a2a(C, n * heads * (dv + 2) * 2)
            yield "pcp_heads", *ag(P, n * (h // P) * dv * 2)
            return
        per_head = (dv + 1) * 4 if dep.decode_form == "dcp_a2a_fp32" else (dv + 2) * 2
        if C > 1:
            yield "dcp_a2a", *a2a(C, n * h * C * per_head)
        if P > 1:
            yield "pcp_partial", *ag(P, n * h * C * per_head)
        return
    new = seq_len - cached
    chunk = ceil(new, 2 * P)
    padded = new
    rows = new
    if P > 1:
        lengths = [max(0, min(chunk, new - k * chunk)) for k in range(2 * P)]
        rows = max(lengths[r] + lengths[2 * P - 1 - r] for r in range(P)) if orthogonal else 2 * chunk
        padded = new if orthogonal else 2 * P * chunk
        if orthogonal:
            yield "pcp_kv", *ag(P, batch * rows * keys * 2)
            yield "pcp_kv_rest", *ag(P, batch * rows * values * 2)
        else:
            yield "pcp_kv", *ag(P, batch * rows * (keys + values) * 2)
    shards = C if orthogonal else P * C
    if not cached or shards == 1:
        return
    if dep.prefill_form == "allgather_q":
        T = batch * padded
        if P > 1:
            yield "pcp_q", *ag(P, batch * rows * h * dq * 2)
        if C > 1:
            yield "dcp_q", *ag(C, T * h * dq * 2)
        if orthogonal:
            yield "dcp_lse", *ag(C, T * h * C * 4)
            yield "dcp_out", T * h * dv * 2, (C - 1) * T * h * dv * 2
            return
        if C > 1:
            yield "dcp_a2a", *a2a(C, T * h * C * (dv + 1) * 4)
        if P > 1:
            yield "pcp_partial", *ag(P, T * h * C * (dv + 1) * 4)
        return
    B, turn = dep.block_size, dep.interleave * shards
    cap = 65536 if orthogonal else 131072
    W = max(min(max(8 * seq_len, 4 * batch * B), cap), batch * B)
    M = W // batch // math.lcm(B, turn) * math.lcm(B, turn)
    m = ceil(M, turn) * dep.interleave
    rounds = ceil(cached, M)
    for k in range(rounds):
        n_seg = batch * min(max(ceil(cached, turn) * dep.interleave - k * m, 0), m)
        name = "last" if k == rounds - 1 else "full"
        size = n_seg * (keys + values) * 2
        times = rounds - 1 if name == "full" else 1
        if k == 0 or name == "last":
            if C > 1:
                yield f"dcp_segment@{name}", size, times * (C - 1) * size
            if P > 1 and not orthogonal:
                yield f"pcp_segment@{name}", C * size, times * (P - 1) * C * size


WIDE = Attention(kind="gqa", n_heads=16, n_kv_heads=2, head_dim=24)
SMALL = {"gqa": small_model(attention=WIDE, n_layers=1), "mla": small_model(attention=MLA, n_layers=1)}
LAYOUTS = {
    "gqa": [(4, 1, 2), (8, 1, 4), (8, 2, 2), (8, 2, 4), (4, 2, 1), (2, 3, 1), (8, 4, 2), (1, 2, 1)],
    "mla": [(4, 1, 2), (8, 1, 8), (4, 2, 4), (4, 2, 2), (2, 4, 1), (2, 2, 2), (2, 2, 4), (1, 2, 2), (4, 2, 8)],
}
LOADS = [
    (1, 1, 0),
    (13, 1, 0),
    (96, 2, 0),
    (1000, 3, 0),
    (1000, 1, 1),
    (4099, 2, 4000),
    (70000, 1, 69000),
    (997, 5, 640),
]


def is_deployed(kind, semantics, layout, form):
    """Whether somebody runs it."""
    tp, pcp, dcp = layout
    if semantics == "orthogonal" and pcp > 1 and dcp > 1:
        return dcp in (pcp, tp * pcp) and kind == "mla" and form in ("dcp_ag_rs", "dcp_a2a", "allgather_kv")
    if dcp > tp:
        return False
    if form == "allgather_q":
        return kind == "gqa" and (semantics == "multiplicative" or pcp == 1)
    return not (form == "dcp_ag_rs" and semantics == "multiplicative" and pcp > 1)


CASES = [
    pytest.param(kind, semantics, layout, form, id=f"{kind}-{semantics}-{layout}-{form}")
    for kind in SMALL
    for semantics in ("multiplicative", "orthogonal")
    for layout in LAYOUTS[kind]
    for form in ("dcp_ag_rs", "dcp_a2a", "dcp_a2a_fp32", "allgather_kv", "allgather_q")
    if is_deployed(kind, semantics, layout, form)
]


@pytest.mark.parametrize(("kind", "semantics", "layout", "form"), CASES)
def test_every_collective_sends_what_the_shapes_say(kind, semantics, layout, form):
    tp, pcp, dcp = layout
    phase = "decode" if form.startswith("dcp") else "prefill"
    keys = {"model": SMALL[kind], "tp": tp, "pcp": pcp, "dcp": dcp, "cp_semantics": semantics, "block_size": 16}
    for interleave in (1, 8):
        for collective in ("ring", "direct"):
            changes = {f"{phase}_form": form, "collective": collective, "interleave": interleave}
            dep = deploy(**keys, phase=phase, **changes)
            for seq_len, batch, cached in LOADS:
                cached = 0 if phase == "decode" else cached
                found = sent(dep, seq_len, batch, cached)
                found = {name: value for name, value in found.items() if name[:3] in ("pcp", "dcp")}
                hidden = found.pop("pcp_hidden", None)
                wanted = {name: (a, b) for name, a, b in shapes(dep, seq_len, batch, cached)}
                assert found == wanted
                if pcp > 1:
                    rows = build_load(dep, seq_len, batch, cached).rank_tokens
                    assert hidden == (rows * 64 * 2, (pcp - 1) * rows * 64 * 2)
                else:
                    assert hidden is None


# --- Mistakes that others made ----------------------------------------------------------------------------------------


def test_log_sum_exps_travel():
    """Without them outputs cannot be merged; in a short head they are a sizeable part."""
    for form in ("dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs"):
        dep = deploy(model=SMALL["gqa"], tp=8, dcp=4, phase="decode", decode_form=form)
        found = sent(dep, 4096, batch=4)
        heads = 4 * 2
        if form == "dcp_ag_rs":
            assert found["dcp_lse"][1] == 3 * 4 * heads * 4
        else:
            outputs = heads * 24 * (4 if form == "dcp_a2a_fp32" else 2)
            assert found["dcp_a2a"][0] - outputs == 4 * heads


def test_a_share_is_not_the_total():
    """Every rank contributes its own heads, and meanwhile receives those of all others."""
    for dcp in (2, 4, 8):
        dep = deploy(model=short(DEEPSEEK), dcp=dcp, phase="decode")
        found = sent(dep, 4096)
        assert found["dcp_q"] == (16 * 576 * 2, (dcp - 1) * 16 * 576 * 2)


def test_one_byte_caches_halve_what_is_gathered_of_them():
    for name, context in (("pcp_kv", 0), ("dcp_segment@last", 8192)):
        whole, half = (
            sent(deploy(model=short(DEEPSEEK), pcp=2, dcp=4, kv_dtype=dtype), 4096 + context, cached=context)[name]
            for dtype in ("bf16", "fp8")
        )
        assert whole == (2 * half[0], 2 * half[1])


def test_a_cp_group_gathers_what_a_ring_would_pass():
    for attention in (GQA, MLA):
        model = small_model(attention=attention, n_layers=1)
        ring = sent(deploy(model=model, tp=2, cp=4, prefill_form="pass_kv"), 5003, 2, 333)["cp_pass_kv"]
        gathered = sent(deploy(model=model, tp=2, cp=4, prefill_form="allgather_kv"), 5003, 2, 333)["pcp_kv"]
        assert ring == gathered


def test_ring_and_gathering_over_pcp_send_the_same():
    for topology in (switch(), hgx(4, 2)):
        dep = deploy(model=SMALL["mla"], tp=2, pcp=4, topology=topology, prefill_form="pass_kv")
        gathering = dataclasses.replace(dep, prefill_form="allgather_kv")
        assert sent(dep, 4096)["cp_pass_kv"] == sent(gathering, 4096)["pcp_kv"]
