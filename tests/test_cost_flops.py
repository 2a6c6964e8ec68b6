"""FLOPs and bytes of every op: by hand for small shapes and for published models, and against the slow twins."""

from __future__ import annotations

import dataclasses

import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_acceptance_tools import (
    DENSE,
    EXPERTS,
    GQA,
    H200,
    MHA,
    MLA,
    MOE,
    PRESETS,
    deploy,
    one_point,
    plain_model,
    plain_types,
    small_model,
)

from g5cp_vec.config.runtime import Runtime
from g5cp_vec.cost.flops import attention_flops
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.cost.roofline import op_seconds, part_seconds
from g5cp_vec.cost.rows import parts_by_key
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import build_load, expert_rows

DSV3 = PRESETS["deepseek-v3-671b"]


def parts_of(dep, seq_len, batch=1, cached=0):
    """Every op's parts as ``(unit, flops, bytes, dtype)``, exact integers."""
    named = parts_by_key(dep, build_load(dep, seq_len, batch, cached))
    return {key: [(p.unit, p.flops, p.bytes, p.dtype) for p in parts] for key, parts in named.items()}


def flops_of(dep, seq_len, batch=1, cached=0, kind=0):
    """FLOPs of every op of a layer kind (and of the edges), summed over its parts."""
    parts = parts_of(dep, seq_len, batch, cached)
    return {name: sum(p[1] for p in value) for (name, k), value in parts.items() if k in (kind, None)}


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_small_prefill_by_hand():
    """GQA: hidden 64, 8 heads of 16, 2 KV heads, d_ff 128, vocab 1000; 10 tokens, b = 3: 30 rows."""
    flops = flops_of(deploy(), 10, batch=3)
    assert flops["qkv"] == 2 * 30 * 64 * (8 + 2 + 2) * 16  # 737,280
    # Causal: 10 * 10 / 2 pairs a sequence; 8 heads, two FLOPs for each of 16 + 16 elements.
    assert flops["attention"] == 3 * 50 * 8 * 2 * 32  # 76,800
    assert flops["o_proj"] == 2 * 30 * 128 * 64
    assert flops["ffn"] == 2 * 30 * 64 * 128 * 3  # gate, up, down
    assert flops["lm_head"] == 2 * 3 * 64 * 1000  # the last token of each sequence
    assert flops["embed"] == 0


def test_small_prefill_of_a_shard_by_hand():
    """tp 4: 2 heads and one (replicated) KV head, a quarter of d_ff, 250 columns of the head."""
    flops = flops_of(deploy(tp=4), 10, batch=3)
    assert flops["qkv"] == 2 * 30 * 64 * (2 + 1 + 1) * 16
    assert flops["attention"] == 3 * 50 * 2 * 2 * 32
    assert flops["ffn"] == 2 * 30 * 64 * 32 * 3
    assert flops["lm_head"] == 2 * 3 * 64 * 250


def test_small_ring_step_by_hand():
    """cp 2: 10 tokens are padded to 12, 6 a rank; each of 2 steps has a fourth of 12 * 12 / 2 pairs."""
    dep = deploy(cp=2)
    flops = flops_of(dep, 10, batch=3)
    assert flops["ring_step"] == 3 * 18 * 8 * 2 * 32
    assert flops["qkv"] == 2 * 18 * 64 * 12 * 16
    # 5 cached tokens are padded to 6, 5 new ones to 8: 8 * 6 + 8 * 8 / 2 = 80 pairs, 20 a step; 4 tokens a rank.
    flops = flops_of(dep, 10, batch=3, cached=5)
    assert flops["ring_step"] == 3 * 20 * 8 * 2 * 32
    assert flops["ffn"] == 2 * (3 * 4) * 64 * 128 * 3


def test_small_decode_by_hand():
    """One token per sequence over 10 cached ones; cp 4 leaves 3 of (padded) 12 to each rank."""
    flops = flops_of(deploy(phase="decode"), 10, batch=3)
    assert flops["attention"] == 3 * 10 * 8 * 2 * 32
    assert flops["qkv"] == 2 * 3 * 64 * 12 * 16
    flops = flops_of(deploy(phase="decode", cp=4), 10, batch=3)
    assert flops["partial"] == 3 * 3 * 8 * 2 * 32
    assert flops["merge"] == 0
    # The owner projects for its sequences alone, whatever cp.
    assert flops["qkv"] == 2 * 3 * 64 * 12 * 16


def test_small_decode_reads_its_cache_once():
    """cp 4: 3 tokens * 2 KV heads * (16 + 16) elements of 1 byte (fp8), and query and output vectors in bf16."""
    dep = deploy(phase="decode", cp=4, kv_dtype="fp8")
    ((unit, _, moved, _),) = parts_of(dep, 10, batch=3)["partial", 0]
    assert (unit, moved) == ("attention", 3 * 3 * 2 * 32 + 3 * 8 * 32 * 2)
    # The merge reads 4 outputs of 8 heads * (16 + 2 scalars), and writes one of 8 * 16.
    ((_, _, moved, _),) = parts_of(dep, 10, batch=3)["merge", 0]
    assert moved == 3 * 8 * (4 * 18 + 16) * 2


def test_small_experts_by_hand():
    """dp 2, tp 2, ep 4 (moe_tp 1): 16 experts of width 64, top-2, a shared one; 10 tokens."""
    dep = deploy(model=MOE, dp=2, tp=2, ep=4)
    flops = flops_of(dep, 10, kind=1)
    # 2 * 10 * 2 = 40 expert visits over 16 pairs: 2.5 -> 3 rows a message, 12 received.
    assert flops["experts"] == 2 * 12 * 64 * 64 * 3
    assert flops["shared"] == 2 * 10 * 64 * 32 * 3  # split by tp
    assert flops["router"] == 2 * 10 * 64 * 16
    # 4 experts a rank, all touched by 12 rows: their 3 matrices are read once, in bf16.
    gate_up, activation, down = parts_of(dep, 10)["experts", 1]
    assert gate_up[2] == 12 * (64 + 128) * 2 + 4 * 64 * 128 * 2
    assert activation[2] == 3 * 12 * 64 * 2
    assert down[2] == 12 * (64 + 64) * 2 + 4 * 64 * 64 * 2
    # A decode step of one sequence has fewer rows than experts: 2 * 1 * 2 / 16 -> 1 row a message, 4 received.
    # With ep 2 (8 experts a rank, moe_tp 2 splits each): 4 / 4 = 1 row, 2 received: 2 experts' halves are read.
    gate_up, _, _ = parts_of(deploy(model=MOE, dp=2, tp=2, ep=2, phase="decode"), 10)["experts", 1]
    assert gate_up[1] == 2 * 2 * 64 * 64
    assert gate_up[2] == 2 * (64 + 64) * 2 + 2 * 64 * 64 * 2


def test_small_latent_attention_by_hand():
    """MLA: 8 heads, q_rank 24, kv_rank 32, nope 16, rope 8, v 12; 10 tokens, 4 of them cached."""
    dep = deploy(model=small_model(attention=MLA))
    flops = flops_of(dep, 10, cached=4)
    down_and_up = 2 * 6 * (64 * (32 + 8) + 64 * 24 + 24 * 8 * 24)
    kv_up = 2 * 10 * 32 * 8 * (16 + 12)  # keys and values of the whole context
    assert flops["qkv"] == down_and_up + kv_up
    assert flops["attention"] == (6 * 4 + 18) * 2 * 8 * (24 + 12)
    assert flops["o_proj"] == 2 * 6 * (8 * 12) * 64
    # In the ring each step up-projects the block it holds: cp 2 pads to 4 + 8 tokens, 6 a block, 4 new a rank.
    flops = flops_of(deploy(model=small_model(attention=MLA), cp=2), 10, cached=4)
    assert flops["qkv"] == 2 * 4 * (64 * 40 + 64 * 24 + 24 * 192)
    assert flops["ring_step"] == 2 * 6 * 32 * 8 * 28 + (8 * 4 + 32) // 4 * 2 * 8 * 36
    # Decode absorbs kv_b_proj: queries to latents (16 -> 32), outputs from them (32 -> 12), attention on latents.
    flops = flops_of(deploy(model=small_model(attention=MLA), phase="decode"), 10, batch=3)
    assert flops["qkv"] == 2 * 3 * (64 * 40 + 64 * 24 + 24 * 192 + 8 * 16 * 32)
    assert flops["attention"] == 3 * 10 * 2 * 8 * (40 + 32)
    assert flops["o_proj"] == 2 * 3 * (8 * 32 * 12 + 96 * 64)


def test_up_projection_of_the_ring_is_no_attention():
    """A FLOP class of its own, not part of F_attn / cp^2."""
    dep = deploy(model=small_model(attention=MLA), cp=2)
    load = build_load(dep, 12, 1, 0)
    up, core = parts_by_key(dep, load)["ring_step", 0]
    assert (up.flop_class, core.flop_class) == ("kv_up", "attention")
    assert core.flops * 4 == attention_flops(dep, load, dep.model.layers[0])


def test_deepseek_v3_prefill_by_hand():
    """The specification's use case: 1M tokens, tp 2, cp 8, dp 4, ep 8; 131,072 tokens and 64 heads a rank."""
    dep = deploy(model=DSV3, tp=2, cp=8, dp=4, ep=8)
    tokens = 2**20 // 8
    dense, experts = flops_of(dep, 2**20, kind=0), flops_of(dep, 2**20, kind=1)
    # F_attn = 2 * 64 heads * (192 + 128) * S^2 / 2 = 20,480 * 2^40; a 64th of it a step; and 131,072 latents of 512
    # up-projected to 64 * (128 + 128).
    assert dense["ring_step"] == 20_480 * 2**40 // 64 + 2 * tokens * 512 * 64 * 256
    # Down to 512 + 64 and 1536, up to 64 * 192.
    assert dense["qkv"] == 2 * tokens * (7168 * 576 + 7168 * 1536 + 1536 * 12_288)
    assert dense["o_proj"] == 2 * tokens * 64 * 128 * 7168
    assert dense["ffn"] == 2 * tokens * 3 * 7168 * 9216  # 18,432 / 2
    # 4 * 131,072 * 8 / 64 = 65,536 rows a message, 8 messages; whole experts (moe_tp = 4 * 2 / 8 = 1) of 2048.
    assert experts["experts"] == 2 * 8 * 65_536 * 3 * 7168 * 2048
    assert experts["shared"] == 2 * tokens * 3 * 7168 * 1024
    assert experts["router"] == 2 * tokens * 7168 * 256
    assert dense["lm_head"] == 2 * 7168 * 64_640


def test_deepseek_v3_decode_by_hand():
    """1M cached tokens, tp 2, cp 8: latents of 576, outputs of 512, 64 heads, 131,072 tokens a rank."""
    dep = deploy(model=DSV3, tp=2, cp=8, phase="decode")
    parts, flops = parts_of(dep, 2**20), flops_of(dep, 2**20)
    assert flops["partial"] == 2 * 64 * (576 + 512) * 131_072
    ((_, _, moved, _),) = parts["partial", 0]
    assert moved == 131_072 * 576 * 2 + 64 * (576 + 512) * 2
    # Per head 128 -> 512 and back 512 -> 128.
    assert flops["qkv"] == 2 * (7168 * 576 + 7168 * 1536 + 1536 * 12_288 + 64 * 128 * 512)
    assert flops["o_proj"] == 2 * (64 * 512 * 128 + 64 * 128 * 7168)


@pytest.mark.parametrize(
    ("model", "active"),
    [
        # Parameters that a token meets, embedding and norms left out, from the published configurations:
        # 32 * (4096 * (32 + 16) * 128 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256 = 7,504,658,432.
        ("llama-3.1-8b", 7_504_658_432),
        # Attention of DeepSeek-V3: 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168 = 187,105,280
        # a layer; 3 dense layers of 3 * 7168 * 18432; 58 of 9 * 3 * 7168 * 2048 and a router of 7168 * 256; head.
        ("deepseek-v3-671b", 61 * 187_105_280 + 3 * 396_361_728 + 58 * (396_361_728 + 1_835_008) + 7168 * 129_280),
    ],
)
def test_two_flops_per_active_parameter(model, active):
    """Decode: 2 FLOPs per weight that a token meets, and attention on top; nothing for how it is split."""
    one = PRESETS[model]
    for changes in ({}, {"tp": 2, "cp": 2}):
        dep = deploy(model=one, phase="decode", ep=1, **changes)
        total = sum(model_flops(dep, build_load(dep, 1000, 1, 0)).values())
        per_token = {"llama-3.1-8b": 32 * 2 * 32 * 256, "deepseek-v3-671b": 61 * 2 * 128 * (576 + 512)}[model]
        assert total == 2 * active + per_token * 1000


def test_deepseek_v3_activates_37_billion():
    """The published 37B active parameters: the figure above without the head is 36.6e9, with the embedding 37.6e9."""
    dep = deploy(model=DSV3, phase="decode", ep=1)
    total = sum(model_flops(dep, build_load(dep, 1, 1, 0)).values())
    assert total / 2 == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_mfu_and_throughput_of_a_result(phase):
    """Model FLOPs over what all chips could have done at the dominant type's peak, padding and splits left out."""
    row = one_point(
        phase=phase, model="llama-3.1-8b", chip="h200-sxm", topology="flat-450", n_chips=16, tp=2, cp=4, batch=3,
        seq_len=10_001,
    )  # fmt: skip
    tokens, attended = (10_001, 10_001 / 2) if phase == "prefill" else (1, 10_001)
    layers = 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14_336)
    flops = 6 * (2 * tokens * layers + 32 * 2 * 32 * 256 * tokens * attended + 2 * 4096 * 128_256)
    assert row["mfu"] == pytest.approx(flops / (row["step_s"] * 16 * 989e12), rel=1e-12)
    assert row["tokens_per_s_per_chip"] == pytest.approx(6 * tokens / row["step_s"] / 16, rel=1e-12)


# --- Against the slow twins -------------------------------------------------------------------------------------------

MODELS = {
    "mha": small_model(attention=MHA),
    "gqa": DENSE,
    "mla": small_model(attention=MLA, n_layers=3, moe=EXPERTS, first_dense=1),
    "mla without q_rank": small_model(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "experts": MOE,
    "no shared": small_model(attention=MHA, moe=EXPERTS.model_copy(update={"n_shared": 0})),
}
DTYPES = st.sampled_from(["bf16", "fp8", "fp4"])


@st.composite
def deployments(draw, **fixed):
    """Small deployments of every kind that can be."""
    keys = {
        "model": MODELS[draw(st.sampled_from(sorted(MODELS)))],
        "phase": draw(st.sampled_from(["prefill", "decode"])),
        "dp": draw(st.integers(1, 4)),
        "tp": draw(st.sampled_from([1, 2, 4, 8])),
        "ep": draw(st.sampled_from([1, 2, 4, 8, 16])),
        **{name: draw(DTYPES) for name in ("dtype", "ffn_dtype", "kv_dtype")},
        **fixed,
    }
    try:
        return deploy(**keys)
    except InfeasibleError:
        assume(False)


@settings(max_examples=150)
@given(deployments(), st.integers(1, 4), st.integers(1, 60), st.integers(0, 20))
def test_every_op_without_cp_is_what_its_twin_counts(dep, batch, new, cached):
    cached = cached if dep.phase == "prefill" else 0
    expected = naive.op_costs(
        plain_model(dep.model), dep.phase, plain_types(dep), dp=dep.dp, tp=dep.tp, ep=dep.ep, batch=batch,
        seq_len=new + cached, cached=cached,
    )  # fmt: skip
    assert parts_of(dep, new + cached, batch, cached) == expected


@settings(max_examples=100)
@given(deployments(phase="prefill"), st.integers(2, 5), st.integers(1, 3), st.integers(1, 40))
def test_with_cp_everything_but_attention_sees_its_share_of_the_tokens(dep, cp, batch, new):
    """b * S / cp tokens, S padded to a multiple of 2 cp: the ops are those of so short a sequence without cp."""
    shared = dataclasses.replace(dep, cp=cp, n_chips=dep.n_chips * cp)
    length = new
    while length % (2 * cp):
        length += 1
    expected = parts_of(dep, length // cp, batch)
    actual = parts_of(shared, new, batch)
    for (name, kind), parts in expected.items():
        if name == "qkv" and dep.model.attention.kind == "mla":
            for part in _up_projection(dep, kind, length // cp, batch):
                parts.remove(part)
        if name == "o_proj":
            # cp outputs, maxima and denominators in fp32 per row and head are read, one output is written.
            row = dep.model.attention.n_heads // dep.tp
            d_v = dep.model.attention.d_v
            merged = batch * length // cp * row * (cp * 4 * (d_v + 2) + 2 * d_v)
            assert actual[name, kind] == [("memory", 0, merged, dep.activation_dtype), *parts]
        elif name != "attention":
            assert actual[name, kind] == parts, name


def _up_projection(dep, kind, tokens, batch):
    """The one product that the ring does step by step, and what brings its input to type."""
    parts = parts_by_key(dep, build_load(dep, tokens, batch, 0))["qkv", kind]
    return [(part.unit, part.flops, part.bytes, part.dtype) for part in parts if part.flop_class == "kv_up"]


@settings(max_examples=60)
@given(
    st.sampled_from([MHA, GQA, MLA]),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 12),
)
def test_every_ring_step_of_every_rank_is_equal(attention, tp, cp, batch, new, cached):
    """Counting pairs of tokens in the head-tail split gives F_attn / cp^2 for each rank and step."""
    dep = deploy(model=small_model(attention=attention), tp=tp, cp=cp)
    load = build_load(dep, new + cached, batch, cached)
    (core,) = [part for part in parts_by_key(dep, load)["ring_step", 0] if part.flop_class == "attention"]
    heads, width = 8 // tp, attention.d_qk + attention.d_v
    counted = {
        batch * naive.ring_step_flops(heads, width, load.new, load.cached, cp, rank, step)
        for rank in range(cp)
        for step in range(cp)
    }
    assert counted == {core.flops}
    assert core.flops * cp * cp == batch * naive.causal_flops(heads, width, load.new, load.cached)


@settings(max_examples=60)
@given(deployments(), st.integers(1, 3), st.lists(st.integers(21, 10**6), min_size=1, max_size=4), st.integers(1, 4))
def test_arrays_are_priced_like_integers(dep, cp, lengths, batch):
    """A row of a table has exactly the bytes, and to rounding the FLOPs, of the point counted on its own."""
    dep = dataclasses.replace(dep, cp=cp, n_chips=dep.n_chips * cp)
    table = build_load(dep, np.array(lengths), np.full(len(lengths), batch), np.full(len(lengths), 20))
    for key, parts in parts_by_key(dep, table).items():
        for i, length in enumerate(lengths):
            alone = parts_by_key(dep, build_load(dep, length, batch, 20))[key]
            for part, exact in zip(parts, alone, strict=True):
                assert np.broadcast_to(part.bytes, len(lengths))[i] == exact.bytes
                assert np.broadcast_to(part.flops, len(lengths))[i] == pytest.approx(exact.flops, rel=1e-15)


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_rounded_rows_lose_no_token(tokens, dp, top_k, ep):
    """ep^2 messages carry all visits, and less than one row each more than that."""
    dep = dataclasses.replace(
        deploy(model=small_model(moe=EXPERTS.model_copy(update={"top_k": top_k}))), dp=dp, ep=ep, moe_tp=1
    )
    rows, _ = expert_rows(dep, build_load(dep, tokens, 1, 0))
    assert rows == naive.expert_rows(tokens, dp, top_k, ep)
    assert 0 <= rows * ep * ep - dp * tokens * top_k < ep * ep


# --- Durations --------------------------------------------------------------------------------------------------------


def test_roofline_by_hand():
    """H200: 989 TFLOP/s bf16 * 0.7 for products, * 0.6 for attention; 4.8 TB/s * 0.8."""
    dep = deploy(tp=1)
    parts = parts_by_key(dep, build_load(dep, 1, 1, 0))
    ((memory,),) = [parts["embed", None]]
    assert part_seconds(dep, memory) == 2 * 64 * 2 / (4.8e12 * 0.8)
    _, product = parts["lm_head", None]
    # Memory-bound: 2 * 64 * 1000 FLOPs against (64 + 1000 + 64,000) * 2 bytes.
    assert part_seconds(dep, product) == 130_128 / (4.8e12 * 0.8)
    big = dataclasses.replace(product, flops=10**12)
    assert part_seconds(dep, big) == 10**12 / (989e12 * 0.7)
    assert part_seconds(dep, dataclasses.replace(big, unit="attention")) == 10**12 / (989e12 * 0.6)
    assert part_seconds(dep, dataclasses.replace(big, dtype="fp8")) == 10**12 / (1978e12 * 0.7)
    # No int8 unit is listed: the bf16 rate.
    assert part_seconds(dep, dataclasses.replace(big, dtype="int8")) == 10**12 / (989e12 * 0.7)


def test_parts_follow_one_another_and_an_op_has_one_overhead():
    for phase, overhead in (("prefill", 3e-6), ("decode", 1e-6)):
        runtime = Runtime(name="r", prefill_op_overhead_s=3e-6, decode_op_overhead_s=1e-6)
        dep = deploy(runtime=runtime, phase=phase)
        for parts in parts_by_key(dep, build_load(dep, 1000, 1, 0)).values():
            assert op_seconds(dep, parts) == sum(part_seconds(dep, part) for part in parts) + overhead


def test_uncalibrated_is_said():
    assert H200.calibrated is False
