"""Sparse attention over a shared cache with a replicated indexer (vllm-ascend: dcp = tp, whole blocks)."""

from __future__ import annotations

import numpy as np
import pytest
from checks import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import H200, MLA, small_model
from test_dcp_bytes import DEEPSEEK, deploy, sent
from test_dcp_forms import TOPOLOGIES, assert_sound, build, names, order
from test_reduction import assert_reduced_equals_full

from g5cp_vec.config.grid import load_grid
from g5cp_vec.config.model import Indexer, LayerTable
from g5cp_vec.cost.rows import cost_rows, parts_by_key
from g5cp_vec.mapping.kv_layout import KVLayout
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel


def chooses(attention, top_k, **changes):
    return attention.model_copy(update={"indexer": Indexer(n_heads=4, head_dim=16, top_k=top_k, **changes)})


def large(**changes):
    """One layer like those of DeepSeek-V3.2."""
    attention = DEEPSEEK.attention.model_copy(update={"indexer": Indexer(n_heads=64, head_dim=128, top_k=2048)})
    model = DEEPSEEK.model_copy(update={"n_layers": 1, "first_dense": 0, "attention": attention})
    return deploy(model=model, tp=8, dcp=8, **changes)


SMALL = small_model(attention=chooses(MLA, 12), n_layers=1)
MIXED = small_model(
    name="mixed", n_layers=4,
    layer=(LayerTable(attention=chooses(MLA, 12)), LayerTable(attention=chooses(MLA, 12, shared=True))),
)  # fmt: skip
BESIDE = small_model(
    name="beside", n_layers=2, layer=(LayerTable(attention=chooses(MLA, 12)), LayerTable(attention=MLA))
)


def test_decode_bytes():
    """Queries of 16 heads; outputs of 128 heads in bf16, an eighth to each; log-sum-exps by themselves."""
    found = sent(large(phase="decode"), 131072)
    assert found["dcp_q"] == (18_432, 7 * 18_432)
    assert found["dcp_a2a"] == (128 * 512 * 2 // 8, 7 * 128 * 512 * 2 // 8)
    assert found["dcp_lse"] == (16 * 4, 7 * 16 * 4)
    assert set(found) == {"dcp_q", "dcp_a2a", "dcp_lse", "tp_chunk"}


@pytest.mark.parametrize(("seq_len", "blocks"), [(1, 1), (1024, 1), (1025, 2), (131072, 128)])
def test_prefill_gathers_the_blocks_that_are_referred_to(seq_len, blocks):
    found = sent(large(), seq_len)
    size = blocks * 128 * 576 * 2
    assert found["dcp_blocks"] == (size, 7 * size)
    assert set(found) == {"dcp_blocks", "tp_chunk"}
    assert sent(large(), 131072, batch=3, cached=65536)["dcp_blocks"][0] == 3 * 128 * 128 * 576 * 2


def test_programs_and_overlap():
    """Blocks travel while tokens are chosen; a layer that shares the choice has no scoring."""
    structure = build(deploy(model=SMALL, tp=4, dcp=4), 4096)
    assert order(structure, 0) == ["qkv", "indexer@0", "sparse@0", "o_proj", "ffn"]
    called, ops = names(structure)
    waits = {}
    preds = np.repeat(np.arange(len(called)), np.diff(ops.graph.succ_indptr))
    for before, after in zip(preds.tolist(), ops.graph.succ_indices.tolist(), strict=True):
        waits.setdefault(called[after], set()).add(called[before])
    assert waits["dcp_blocks"] == {"qkv", "dcp_blocks"}
    assert waits["sparse@0"] == {"indexer@0", "dcp_blocks"}
    decode = build(deploy(model=SMALL, tp=4, dcp=4, phase="decode"), 4096)
    assert order(decode, 0) == ["qkv", "shard@3", "merge", "o_proj", "ffn"]
    mixed = build(deploy(model=MIXED, tp=4, dcp=4), 4096)
    assert names(mixed)[0].count("indexer@0") == 2 * 4


def test_a_shard_attends_its_share_of_the_choice():
    """All it holds while everything is chosen; then as much of the choice as of the context."""
    dep = deploy(model=SMALL, tp=4, dcp=4, block_size=16, phase="decode")
    for seq_len in (1, 12, 13, 40, 64, 100, 5000):
        parts = parts_by_key(dep, build_load(dep, seq_len, 2, 0))
        held = KVLayout(4, 16, 16).tokens_per_rank(seq_len).tolist()
        attended = []
        for shard, tokens in enumerate(held):
            core = parts[f"shard@{shard}", 0][0]
            share, rest = divmod(int(core.flops), 2 * 2 * 8 * (40 + 32))
            assert rest == 0
            attended.append(share)
            assert share == min(tokens, -(-tokens * min(seq_len, 12) // seq_len))
        assert min(seq_len, 12) <= sum(attended) < min(seq_len, 12) + 4


def test_keys_of_the_indexer_are_not_shared():
    model = MemoryModel(large(phase="decode"))
    # Latents of an eighth of the tokens; 128 elements in fp8 with a scale for each.
    assert model.at(131072, 2, 0).kv_bytes == 2 * (131072 // 8 * 576 * 2 + 131072 * 132)
    assert MemoryModel(large()).at(131072, 1, 0).buffer_bytes == 131072 * 576 * 2


def test_runs_are_whole_blocks():
    assert large().interleave == large().block_size == 128
    assert large(block_size=64).interleave == 64
    fixed = {"model": "deepseek-v3-671b", "chip": "h100-sxm", "topology": "hgx-8", "cp": 1, "phase": "decode", "tp": 8,
             "dcp": 8, "n_chips": 8, "seq_len": 4096}  # fmt: skip
    grid = load_grid({"fixed": fixed}, point=True)
    grid.objects["model", "deepseek-v3-671b"] = large().model
    assert grid.expand().keys["interleave"].to_list() == [128]


REFUSED = {
    "tokens": ({"interleave": 1}, "sparse attention shares a cache by whole blocks"),
    "half": ({"dcp": 4}, "dcp = 4 of sparse attention must be tp = 8"),
    "packed": ({"phase": "decode", "decode_form": "dcp_a2a"}, "of sparse attention is not deployed"),
    "ring": ({"prefill_form": "pass_kv"}, "of sparse attention with pcp or dcp is not deployed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, message = REFUSED[case]
    keys = {"model": large().model, "tp": 8, "dcp": 8, "chip": H200} | changes
    with refused(message):
        deploy(**keys)


@settings(max_examples=40)
@given(st.data())
def test_audits_are_sound(data):
    phase = data.draw(st.sampled_from(["prefill", "decode"]))
    tp = data.draw(st.sampled_from([2, 4, 8]))
    dep = deploy(
        model=data.draw(st.sampled_from([SMALL, MIXED, BESIDE])), tp=tp, dcp=tp, phase=phase, block_size=16,
        collective=data.draw(st.sampled_from(["ring", "direct"])), ep=1,
        topology=TOPOLOGIES[data.draw(st.sampled_from(sorted(TOPOLOGIES)))],
    )  # fmt: skip
    new, cached = data.draw(st.integers(1, 999)), data.draw(st.sampled_from([0, 1, 333, 4096]))
    batch, cached = data.draw(st.integers(1, 3)), cached if phase == "prefill" else 0
    assert_sound(dep, new, batch, cached)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
def test_reduced_equals_full(phase, topology):
    dep = deploy(model=MIXED, tp=8, dcp=8, phase=phase, block_size=16, topology=TOPOLOGIES[topology])
    for seq_len in (1024, 1000):
        structure = build(dep, seq_len, 2)
        loads = (np.array([n]) for n in (seq_len, 2, 0))
        costs = cost_rows(dep, structure.keys, structure.network, build_load(dep, *loads), 1)
        assert_reduced_equals_full(structure, costs)
