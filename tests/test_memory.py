"""Bytes of a rank: analytic values, published parameter counts, slow twins, and the longest context that fits."""

from __future__ import annotations

import dataclasses

import naive
import numpy as np
import pytest
from hypothesis import given, settings
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
    sweep_rows,
)

from g5cp_vec.mapping.memory import LONGEST_CONTEXT, MemoryModel

BITS = {"bf16": 16, "fp8": 8, "fp4": 4}
DSV3 = PRESETS["deepseek-v3-671b"]


def memory(dep, seq_len, batch=1, cached=0):
    return MemoryModel(dep).at(seq_len, batch, cached)


# --- The split by cp --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kv_dtype", sorted(BITS))
@pytest.mark.parametrize(
    ("attention", "tp", "elements"),
    [(MHA, 1, 256), (MHA, 4, 64), (GQA, 1, 64), (GQA, 2, 32), (GQA, 8, 32), (MLA, 1, 40), (MLA, 8, 40)],
    ids=["mha", "mha-tp4", "gqa", "gqa-tp2", "gqa-tp8", "mla", "mla-tp8"],
)
def test_memory_split(attention, tp, elements, kv_dtype, phase):
    """KV of a rank: b * ceil(S / cp) * c_kv * layers, to the byte; activations divide in prefill only."""
    model = small_model(attention=attention, n_layers=3)
    for cp in (1, 2, 3, 8):
        dep = deploy(model=model, tp=tp, cp=cp, phase=phase, kv_dtype=kv_dtype)
        for seq_len, batch in ((1, 1), (24, 2), (1000, 1), (1001, 5)):
            held = memory(dep, seq_len, batch)
            share = -(-seq_len // cp)
            assert held.kv_bytes == 3 * (batch * share * elements * BITS[kv_dtype] // 8)
            tokens = batch * share if phase == "prefill" else batch
            # The widest moment: q, k, v of the shard (MLA up-projected), or gate and up.
            heads = 8 // tp
            qkv = heads * (24 + 24 + 12) if attention is MLA else heads * 16 + elements
            assert held.activation_bytes == tokens * (2 * 64 + max(qkv, 2 * 128 // tp)) * 2


def test_memory_split_of_the_use_case():
    """DeepSeek-V3 at 1M tokens, tp 2: 2^20 / cp latents of 576 elements in bf16, 61 layers."""
    for cp, dp in ((8, 4), (16, 2)):
        row = one_point(
            phase="prefill", model="deepseek-v3-671b", chip="h200-sxm", topology="hgx-8", n_chips=64, tp=2, cp=cp,
            ep=2 * dp, seq_len="1M",
        )  # fmt: skip
        assert row["dp"] == dp
        assert row["kv_bytes"] == 2**20 // cp * 1152 * 61  # 9,210,691,584 at cp 8, half at 16
        # Top-8 copies of 7168 are wider than q, k, v of 64 heads (64 * 512) and than gate and up (2 * 18432 / 2).
        assert row["activation_bytes"] == 2**20 // cp * (2 * 7168 + 8 * 7168) * 2
        assert row["buffer_bytes"] == (cp - 1) * (2**20 // cp) * 1152
        total = sum(row[f"{part}_bytes"] for part in ("weight", "kv", "activation", "buffer"))
        assert row["peak_bytes"] == total
        assert row["hbm_bytes"] == 141 * 2**30
        assert row["fits"] == (total <= int(141 * 2**30 * 0.9))


def test_memory_split_halves_with_every_doubling():
    rows = sweep_rows(
        {"phase": "decode", "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "n_chips": 64,
         "seq_len": "1M"},
        cp=[1, 2, 4, 8, 16, 32, 64],
    )  # fmt: skip
    assert [row["kv_bytes"] for row in rows] == [2**20 * 4096 * 32 >> i for i in range(7)]
    assert len({row["weight_bytes"] for row in rows}) == 1
    assert {row["activation_bytes"] for row in rows} == {(2 * 4096 + 2 * 14_336) * 2}


def test_memory_split_of_padded_blocks_in_flight():
    """cp 4 pads 1001 to 1008 tokens: the buffers hold 3 blocks of 252, the cache 251 tokens; none in decode."""
    held = memory(deploy(cp=4), 1001, 2)
    assert held.buffer_bytes == 3 * (2 * 252 * 64 * 2)
    assert held.kv_bytes == 2 * (2 * 251 * 64 * 2)
    # 1001 new after 10 cached ones: 252 + 3 tokens a block.
    assert memory(deploy(cp=4), 1011, 2, 10).buffer_bytes == 3 * (2 * 255 * 64 * 2)
    assert memory(deploy(cp=4, phase="decode"), 1001, 2).buffer_bytes == 0
    assert memory(deploy(cp=1), 1001, 2).buffer_bytes == 0


# --- Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # Published totals of the safetensors files.
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen3-235b-a22b", 235_093_634_560),
        # Main model without the prediction layer.
        ("deepseek-v3-671b", 671_026_419_200),
    ],
)
def test_weights_are_the_published_parameters(model, parameters):
    dep = deploy(model=PRESETS[model], dtype="bf16", ep=1)
    assert memory(dep, 1).weight_bytes == 2 * parameters


def test_weights_of_a_shard_by_hand():
    """tp 4 of `DENSE`: 2 heads, one replicated KV head, 32 of 128 columns; embedding whole, 250 rows of the head."""
    layer = 64 * (2 + 1 + 1) * 16 + 2 * 16 * 64 + 3 * 64 * 32 + 2 * 64
    assert memory(deploy(tp=4), 1).weight_bytes == 2 * (2 * layer + 1000 * 64 + 64 + 250 * 64)
    # A tied head is the embedding itself.
    tied = small_model(tie_embeddings=True)
    assert memory(deploy(model=tied, tp=4), 1).weight_bytes == 2 * (2 * layer + 1000 * 64 + 64)
    # fp8 weights, fp4 FFN; norms, embedding and head stay in bf16.
    dep = deploy(tp=4, dtype="fp8", ffn_dtype="fp4")
    projections, ffn = 64 * 4 * 16 + 2 * 16 * 64, 3 * 64 * 32
    expected = 2 * (projections + ffn // 2 + 2 * 2 * 64) + 2 * (1000 * 64 + 64 + 250 * 64)
    assert memory(dep, 1).weight_bytes == expected


@pytest.mark.parametrize(("dp", "tp", "ep"), [(1, 1, 1), (2, 2, 4), (2, 2, 2), (4, 2, 1), (2, 4, 8), (2, 8, 16)])
def test_experts_are_held_once_over_dp_and_tp(dp, tp, ep):
    """dp * tp ranks together hold each routed expert once, whichever way they share them."""
    with_experts = deploy(model=MOE, dp=dp, tp=tp, ep=ep)
    fewer = small_model(n_layers=3, moe=EXPERTS.model_copy(update={"n_experts": 2 * EXPERTS.n_experts}), first_dense=1)
    twice = deploy(model=fewer, dp=dp, tp=tp, ep=ep)
    # Twice the experts: the difference is 16 experts of 3 * 64 * 64 (and 16 columns of the router) in 2 layers.
    added = memory(twice, 1).weight_bytes - memory(with_experts, 1).weight_bytes
    assert (added - 2 * 64 * 16 * 2) * dp * tp == 2 * 16 * 3 * 64 * 64 * 2


def test_halving_dp_doubles_the_experts_of_a_rank():
    """cp takes ranks from dp, so that fewer share the experts: the weight grows, as the semantics warn."""
    weights = []
    for dp, cp in ((8, 1), (4, 2), (2, 4)):
        dep = deploy(model=MOE, dp=dp, cp=cp, ep=dp)
        weights.append(memory(dep, 1).weight_bytes)
    assert weights == sorted(weights)
    expert = 3 * 64 * 64 * 2
    assert weights[1] - weights[0] == 2 * (16 // 4 - 16 // 8) * expert


# --- Stages -----------------------------------------------------------------------------------------------------------


def test_memory_is_the_fullest_stage():
    """5 layers over 2 stages: 3 on the first with the embedding, 2 on the second with norm and head."""
    model = small_model(n_layers=5)
    layer = 64 * 12 * 16 + 128 * 64 + 3 * 64 * 128 + 2 * 64
    held = memory(deploy(model=model, pp=2), 100)
    assert held.weight_bytes == 2 * (3 * layer + 1000 * 64)
    assert held.kv_bytes == 3 * 100 * 64 * 2
    # 4 layers: 2 each; norm and head make the second fuller by the norm.
    held = memory(deploy(model=small_model(n_layers=4), pp=2), 100)
    assert held.weight_bytes == 2 * (2 * layer + 64 + 1000 * 64)


def test_the_fullest_stage_can_change_with_the_load():
    """Expert weights fill the last stage, the cache of one more layer the first: which wins depends on the context."""
    model = small_model(n_layers=5, moe=EXPERTS, first_dense=3)
    dep = deploy(model=model, pp=2)
    few, many = memory(dep, 1), memory(dep, 10**6)
    assert few.kv_bytes == 2 * 1 * 64 * 2
    assert many.kv_bytes == 3 * 10**6 * 64 * 2
    assert few.weight_bytes > many.weight_bytes
    both = MemoryModel(dep).at(np.array([1, 10**6]), np.array([1, 1]), np.array([0, 0]))
    for name in ("weight_bytes", "kv_bytes", "activation_bytes", "buffer_bytes", "peak_bytes"):
        assert getattr(both, name).tolist() == [getattr(few, name), getattr(many, name)]


# --- Against the slow twins -------------------------------------------------------------------------------------------

MODELS = {
    "mha": small_model(attention=MHA, n_layers=5),
    "gqa": DENSE,
    "tied": small_model(tie_embeddings=True, n_layers=4),
    "mla": small_model(attention=MLA, n_layers=5, moe=EXPERTS, first_dense=2),
    "mla without q_rank": small_model(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "experts": MOE,
}
DEGREES = [(1, 1, 1), (2, 2, 4), (2, 2, 2), (1, 8, 2), (4, 2, 1), (2, 4, 8)]  # dp, tp, ep


@settings(max_examples=120)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(DEGREES),
    st.integers(1, 2),
    st.sampled_from(["prefill", "decode"]),
    st.tuples(*[st.sampled_from(sorted(BITS))] * 3),
    st.integers(1, 4),
    st.integers(1, 3000),
    st.integers(0, 500),
)
def test_memory_without_cp_is_what_the_twin_adds_up(name, degrees, pp, phase, types, batch, new, cached):
    dp, tp, ep = degrees
    dtype, ffn_dtype, kv_dtype = types
    dep = deploy(
        model=MODELS[name], phase=phase, dp=dp, tp=tp, ep=ep, pp=pp, dtype=dtype, ffn_dtype=ffn_dtype, kv_dtype=kv_dtype
    )
    held = memory(dep, new + cached, batch, cached)
    expected = naive.memory_of(
        plain_model(dep.model), phase, plain_types(dep), dp=dp, tp=tp, pp=pp, ep=ep, batch=batch,
        seq_len=new + cached, cached=cached,
    )  # fmt: skip
    assert (held.weight_bytes, held.kv_bytes, held.activation_bytes) == expected
    assert held.peak_bytes == sum(expected)


@settings(max_examples=60)
@given(st.sampled_from(sorted(MODELS)), st.integers(2, 6), st.integers(1, 3), st.integers(1, 3000))
def test_memory_with_cp_is_that_of_a_shorter_sequence(name, cp, batch, seq_len):
    """Without cached tokens a rank holds what a sequence of ceil(S / cp) tokens would, and ring buffers."""
    alone = memory(deploy(model=MODELS[name], ep=1), -(-seq_len // cp), batch)
    shared = memory(deploy(model=MODELS[name], ep=1, cp=cp), seq_len, batch)
    assert (shared.weight_bytes, shared.kv_bytes, shared.activation_bytes) == (
        alone.weight_bytes, alone.kv_bytes, alone.activation_bytes,
    )  # fmt: skip
    assert shared.buffer_bytes > 0


# --- The longest context ----------------------------------------------------------------------------------------------


def with_room(dep, n_bytes):
    """The same deployment on a chip of which exactly ``n_bytes`` may be filled."""
    chip = H200.model_copy(update={"hbm_bytes": int(n_bytes), "usable_memory_fraction": 1.0})
    return dataclasses.replace(dep, chip=chip)


def brute_force(dep, batch, cached, limit):
    """Try every length up to ``limit``; 0 when none fits."""
    shortest = cached + 1 if dep.phase == "prefill" else 1
    lengths = np.arange(shortest, limit)
    held = MemoryModel(dep).at(lengths, np.full(len(lengths), batch), np.full(len(lengths), cached)).peak_bytes
    assert (np.diff(held) >= 0).all()
    fitting = lengths[held <= dep.chip.hbm_bytes]
    assert len(fitting) < len(lengths), "raise the limit"
    return int(fitting[-1]) if len(fitting) else 0


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["prefill", "decode"]),
    st.integers(1, 7),
    st.integers(1, 2),
    st.sampled_from(sorted(BITS)),
    st.integers(1, 3),
    st.integers(0, 300),
    st.integers(1, 1000),
    st.integers(-2, 2),
)
def test_max_seq_len_is_what_trying_every_length_finds(name, phase, cp, pp, kv_dtype, batch, cached, length, more):
    """Room for exactly the peak of some length, or a few bytes more or less."""
    dep = deploy(model=MODELS[name], phase=phase, cp=cp, pp=pp, ep=1, kv_dtype=kv_dtype)
    if phase == "decode":
        cached = 0
    dep = with_room(dep, memory(dep, cached + length, batch, cached).peak_bytes + more)
    longest = MemoryModel(dep).max_seq_len(batch, cached)
    assert longest == brute_force(dep, batch, cached, cached + length + 4 * cp + 8)
    if longest:
        assert memory(dep, longest, batch, cached).peak_bytes <= dep.chip.hbm_bytes
    assert memory(dep, longest + 1 if longest else cached + 1, batch, cached).peak_bytes > dep.chip.hbm_bytes


@pytest.mark.parametrize(("phase", "cp"), [("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2)])
def test_max_seq_len_is_the_wall_of_a_sweep(phase, cp):
    """At the length that the column names a point fits; one token more is ``oom``, and still has its times."""
    fixed = {
        "phase": phase, "model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "n_chips": 16, "tp": 8,
        "ep": 8 * (2 // cp), "cp": cp, "kv_dtype": "fp8",
    }  # fmt: skip
    longest = one_point(**fixed, seq_len=1000)["max_seq_len"]
    at_the_wall, beyond = sweep_rows(fixed, seq_len=[longest, longest + 1])
    assert (at_the_wall["status"], at_the_wall["fits"]) == ("ok", True)
    assert (beyond["status"], beyond["fits"]) == ("oom", False)
    assert at_the_wall["max_seq_len"] == beyond["max_seq_len"] == longest
    assert beyond["step_s"] > 0
    usable = int(141 * 2**30 * 0.9)
    assert at_the_wall["peak_bytes"] <= usable < beyond["peak_bytes"]


def test_more_context_parallelism_holds_longer_contexts():
    longest = [
        one_point(
            phase="decode", model="llama-3.1-8b", chip="h200-sxm", topology="flat-450", n_chips=64, cp=cp,
            seq_len=1000,
        )["max_seq_len"]
        for cp in (1, 2, 4, 8)
    ]  # fmt: skip
    # Weights stay, the cache divides: exactly cp times as long.
    assert longest == [longest[0] * cp for cp in (1, 2, 4, 8)]


def test_max_seq_len_at_its_ends():
    dep = deploy(phase="decode")
    assert MemoryModel(with_room(dep, 1)).max_seq_len(1, 0) == 0
    assert MemoryModel(with_room(dep, 10**18)).max_seq_len(1, 0) == LONGEST_CONTEXT
