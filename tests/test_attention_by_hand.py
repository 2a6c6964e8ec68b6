"""Windows, sparse and linear attention, and element types: by hand and as published models have them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_acceptance_tools import (
    EXPERTS,
    deploy,
    one_point,
    small_model,
    switch,
)
from test_attention_kinds import HEAD, MIXED, structure_of
from test_audit import simulated

from g5cp_vec.config.model import Attention, Dtypes, Indexer, LayerTable, Linear
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.rows import parts_by_key
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel


def test_sparse_attention_of_deepseek_v32_by_hand():
    """1000 tokens after 4000, tp 8: 16 heads of 576 and 512; 64 heads of 128 score 5000^2 - 4000^2 doubled pairs."""
    attention = Attention(
        kind="mla", n_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, indexer=Indexer(n_heads=64, head_dim=128, top_k=2048),
    )  # fmt: skip
    dep = deploy(model=small_model(attention=attention, hidden=7168, n_layers=1), tp=8)
    parts = parts_by_key(dep, build_load(dep, 5000, 1, 4000))
    scoring, choice, core = parts["attention", 0]
    assert scoring.flops == 9_000_000 * 64 * 129
    assert scoring.dtype == "fp8"
    # Queries in fp8, 5000 keys of 132 bytes, 4.5M scores of 4 bytes.
    assert scoring.bytes == 1000 * 64 * 128 + 5000 * 132 + 4_500_000 * 4
    assert choice.bytes == 4_500_000 * 4 + 1000 * 2048 * 4
    assert core.flops == 1000 * 2 * 2048 * 16 * (576 + 512)
    assert core.bytes == 1000 * 2048 * (576 * 2 + 4) + 1000 * 16 * (576 + 512) * 2
    flops = {}
    for part in parts["qkv", 0] + parts["o_proj", 0]:
        flops[part.flop_class] = flops.get(part.flop_class, 0) + part.flops
    assert flops["indexer"] == 2 * 1000 * (1536 * 8192 + 7168 * 128 + 7168 * 64)
    assert flops["q_absorb"] == 2 * 1000 * 16 * 128 * 512
    assert "kv_up" not in flops


def test_linear_attention_by_hand():
    """Qwen3-Next, decode of 3 sequences: 32 states of 128 * 128, three products each, read and written in fp32."""
    linear = Linear(
        kind="gated_delta_net", n_heads=32, n_key_heads=16, key_head_dim=128, value_head_dim=128, conv_kernel=4
    )
    model = small_model(hidden=2048, linear=linear, n_layers=1, layer=(LayerTable(mixer="linear"),))
    dep = deploy(model=model, phase="decode")
    parts = parts_by_key(dep, build_load(dep, 10**6, 3, 0))
    (core,) = parts["attention", 0]
    assert core.flops == 3 * 32 * 3 * 2 * 128 * 128
    assert core.bytes == 3 * (2 * 2048 + 2 * 4096) * 2 + 2 * 3 * 32 * 128 * 128 * 4
    norm, product, conv = parts["qkv", 0]
    assert product.flops == 2 * 3 * 2048 * (2 * 2048 + 2 * 4096 + 64)
    assert conv.bytes == (2 * 3 * 8192 + 2 * 3 * 3 * 8192) * 2
    # The context changes nothing.
    assert parts_by_key(dep, build_load(dep, 10, 3, 0))["attention", 0] == [core]


def test_linear_attention_of_a_split_sequence_by_hand():
    """cp 4, 2 sequences of 64 tokens, tp 2: 4 heads of 8 by 6, conv over 56 channels; 16 tokens and 2 chunks a rank."""
    dep = deploy(model=MIXED["delta"], cp=4, tp=2, topology=switch(1e9, 1e-6))
    run = simulated(dep, 64, 2, 0, structure_of(dep, 64, 2))
    parts = parts_by_key(dep, build_load(dep, 64, 2, 0))
    convolution, summary = parts["states", 0]
    # 32 rows in and out, and 3 taps before each of 4 chunks.
    assert convolution.bytes == (2 * 32 + 2 * 2 * 2 * 3) * 56 * 2
    # Two products into the state, two into the transition.
    assert summary.flops == 32 * 4 * (4 * 8 * 6 + 4 * 8 * 8)
    assert summary.bytes == 32 * (16 + 24) * 2 + 2 * 2 * 4 * (48 + 64) * 4
    combined, passed = parts["scan", 0]
    assert combined.flops == 2 * 4 * 7 * 2 * 8 * 8 * 6
    assert combined.bytes == 8 * 2 * 4 * (48 + 64) * 4 + 2 * 2 * 4 * 48 * 4
    assert passed.flops == 32 * 4 * 3 * 2 * 8 * 6
    layer = {"layer": 0}
    taps = run.find("cp_halo", **layer)
    # To the head chunk from the rank before, to the tail chunk from the rank after; two shards.
    assert len(taps) == 2 * 2 * 3
    assert {run.n_bytes(op) for op in taps} == {2 * 3 * 56 * 2}
    gathers = run.find("cp_gather", **layer)
    assert len(gathers) == 2 * 4 * 3
    assert {run.n_bytes(op) for op in gathers} == {2 * 2 * 4 * (48 + 64) * 4}
    # The gathering costs the same whatever the length; the state is whole on every rank.
    longer = parts_by_key(dep, build_load(dep, 6400, 2, 0))
    assert longer["scan", 0][0] == combined
    assert MemoryModel(dep).at(64, 2, 0).kv_bytes == 3 * 2 * (3 * 56 * 2 + 4 * 48 * 4) + 2 * 16 * 32 * 2


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(MIXED)), st.sampled_from(["prefill", "decode"]), st.integers(1, 4),
    st.lists(st.integers(21, 10**6), min_size=1, max_size=4), st.integers(1, 3),
)  # fmt: skip
def test_arrays_are_priced_like_integers(name, phase, cp, lengths, batch):
    try:
        dep = deploy(model=MIXED[name], phase=phase, cp=cp, ep=1)
    except InfeasibleError:
        assume(False)
    cached = 20 if phase == "prefill" else 0
    n = len(lengths)
    table = build_load(dep, np.array(lengths), np.full(n, batch), np.full(n, cached))
    kinds = dep.model.kinds[0]
    held = MemoryModel(dep).at(np.array(lengths), np.full(n, batch), np.full(n, cached))
    for i, length in enumerate(lengths):
        load = build_load(dep, length, batch, cached)
        for key, parts in parts_by_key(dep, load).items():
            for part, column in zip(parts, parts_by_key(dep, table)[key], strict=True):
                assert np.broadcast_to(column.bytes, n)[i] == part.bytes
                assert np.broadcast_to(column.flops, n)[i] == pytest.approx(part.flops, rel=1e-15)
        for key in structure_of(dep, length, batch, cached).keys.bytes:
            assert np.broadcast_to(message_bytes(dep, table, kinds, key), n)[i] == message_bytes(dep, load, kinds, key)
        one = MemoryModel(dep).at(length, batch, cached)
        assert (held.kv_bytes[i], held.buffer_bytes[i], held.peak_bytes[i]) == (
            one.kv_bytes, one.buffer_bytes, one.peak_bytes,
        )  # fmt: skip


def test_inputs_are_quantised_where_the_chip_multiplies_so():
    """fp8 weights, 10 tokens of 64: read in bf16 and written in fp8 once for gate and up; not without an fp8 unit."""
    plain = {part.unit: part for part in parts_by_key(deploy(), build_load(deploy(), 10, 1, 0))["ffn", 0][1:2]}
    dep = deploy(ffn_dtype="fp8")
    _, quantised, product, *_ = parts_by_key(dep, build_load(dep, 10, 1, 0))["ffn", 0]
    assert (quantised.unit, quantised.flops, quantised.bytes) == ("memory", 0, 10 * 64 * 3)
    assert product.bytes == 10 * 64 + 10 * 256 * 2 + 64 * 256
    assert product.flops == plain["gemm"].flops
    # Blocks: a scale for 128 x 128, here one and two.
    dep = deploy(ffn_dtype="fp8_block")
    _, _, product, *_ = parts_by_key(dep, build_load(dep, 10, 1, 0))["ffn", 0]
    assert product.bytes == 10 * 64 + 10 * 256 * 2 + 64 * 256 + 2 * 4
    assert product.dtype == "fp8"
    for dtype, weights in (("mxfp4", 64 * 256 // 2 + 2 * 256), ("int4_group32", 64 * 256 // 2 + 2 * 2 * 256)):
        dep = deploy(ffn_dtype=dtype)  # no such unit in an H200: widened
        _, product, *_ = parts_by_key(dep, build_load(dep, 10, 1, 0))["ffn", 0]
        assert product.bytes == 10 * (64 + 256) * 2 + weights


def test_element_types_of_modules():
    """What the checkpoint says of each module holds until the grid says otherwise."""
    types = Dtypes(ffn="fp8", experts="nvfp4", head="fp8", kv="fp8")
    model = small_model(moe=EXPERTS, first_dense=1, dtypes=types)
    dep = deploy(model=model, ep=1)
    assert (dep.dtype, dep.ffn_dtype, dep.expert_dtype, dep.kv_dtype, dep.embedding_dtype, dep.head_dtype) == (
        "bf16", "fp8", "nvfp4", "fp8", "bf16", "fp8",
    )  # fmt: skip
    # 16 experts of two matrices of 64 * 64 and one of 64 * 64: half a byte, a byte for 16, four a matrix.
    experts = 16 * 3 * (64 * 64 // 2 + 64 * 64 // 16 + 4)
    shared, dense = 3 * 64 * 64, 3 * 64 * 128
    attention = 2 * (64 * 12 * 16 + 128 * 64) * 2
    rest = 2 * (2 * 2 * 64 + 64 + 64 * 16) + 1000 * 64 * 2 + 1000 * 64
    assert MemoryModel(dep).at(1, 1, 0).weight_bytes == experts + shared + dense + attention + rest
    over = deploy(model=model, ep=1, dtype="fp16", kv_dtype="bf16")
    assert (over.dtype, over.ffn_dtype, over.expert_dtype, over.kv_dtype) == ("fp16", "fp16", "fp16", "bf16")
    assert deploy(model=model, ep=1, ffn_dtype="bf16").expert_dtype == "bf16"


def test_a_window_pays(tmp_path):
    """gpt-oss-like layers at 64K tokens: attention and traffic of the windows are next to nothing."""
    path = tmp_path / "alternating.toml"
    path.write_text(HEAD.replace("n_heads = 8", "n_heads = 64").replace("n_kv_heads = 2", "n_kv_heads = 8").replace(
        "head_dim = 16", "head_dim = 64") + "[[layer]]\nattention = {window = 128}\n[[layer]]\n")  # fmt: skip
    full = tmp_path / "full.toml"
    full.write_text(path.read_text().split("[[layer]]")[0])
    point = {"phase": "prefill", "chip": "h200-sxm", "topology": "hgx-8", "n_chips": 8, "cp": 8, "seq_len": "64K"}
    alternating, everywhere = (one_point(model=str(file), **point) for file in (path, full))
    assert alternating["attention_s"] < 0.52 * everywhere["attention_s"]
    # Two of four layers send blocks of 8192 tokens seven times, the others 127 tokens to either side.
    layer = 7 * 8192 * 1024 * 2
    assert everywhere["passkv_bytes"] == 4 * layer
    assert alternating["passkv_bytes"] == 2 * layer + 2 * 2 * 127 * 1024 * 2
    assert alternating["kv_bytes"] == 2 * 8192 * 1024 * 2 + 2 * 16 * 1024 * 2
