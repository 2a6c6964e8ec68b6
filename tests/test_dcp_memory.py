"""Deployed context parallelism: what a rank holds, the longest context, the most sequences."""

from __future__ import annotations

import numpy as np
import pytest
from test_acceptance_tools import PRESETS
from test_dcp_bytes import DEEPSEEK, QWEN, SMALL, deploy, short

from g5cp_vec import run
from g5cp_vec.mapping.memory import MOST_SEQUENCES, MemoryModel

GIB = 2**30
KIB = 2**10


@pytest.mark.parametrize(
    ("shards", "layout", "gib"), [(1, {}, 8.58), (8, {"dcp": 8}, 1.07), (16, {"pcp": 2, "dcp": 8}, 0.54)]
)
def test_cache_of_deepseek(shards, layout, gib):
    """61 layers, 128K tokens of 576 elements of 2 bytes."""
    found = MemoryModel(deploy(model=DEEPSEEK, phase="decode", **layout)).at(128 * KIB, 1, 0).kv_bytes
    assert found == 61 * 128 * KIB // shards * 576 * 2
    assert found / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(("layout", "gib"), [({}, 5.88), ({"dcp": 2}, 2.94), ({"pcp": 2, "dcp": 2}, 1.47)])
def test_cache_of_qwen(layout, gib):
    """94 layers, one key/value head of 128 elements a rank."""
    found = MemoryModel(deploy(model=QWEN, phase="decode", **layout)).at(128 * KIB, 1, 0).kv_bytes
    assert found / GIB == pytest.approx(gib, abs=0.005)


def test_caches_are_whole_blocks_on_every_rank():
    """A token more than a virtual block is a block more on every rank."""
    model = MemoryModel(deploy(model=SMALL["mla"], tp=4, pcp=2, dcp=4, block_size=32, phase="decode"))
    block = 32 * 40 * 2
    for seq_len, blocks in ((1, 1), (256, 1), (257, 2), (512, 2), (513, 3)):
        assert model.at(seq_len, 3, 0).kv_bytes == 3 * blocks * block


def test_orthogonal_copies():
    """Pcp ranks hold copies of the cache unless dcp spans them."""
    sizes = {
        dcp: MemoryModel(
            deploy(model=SMALL["mla"], tp=2, pcp=2, dcp=dcp, cp_semantics="orthogonal", phase="decode")
        ).at(4096, 1, 0).kv_bytes
        for dcp in (1, 2, 4)
    }  # fmt: skip
    assert sizes[1] == 2 * sizes[2] == 4 * sizes[4]


def test_pcp_replicates_weights_but_experts():
    plain, wide = (MemoryModel(deploy(model=short(QWEN), tp=8, pcp=pcp, ep=8 * pcp)).at(4096, 1, 0) for pcp in (1, 2))
    expert = 3 * 4096 * 1536 * 2
    # 128 experts over 8 or 16 ranks, everything else alike.
    assert plain.weight_bytes - wide.weight_bytes == 8 * expert
    dcp = MemoryModel(deploy(model=short(QWEN), tp=8, dcp=2, ep=8)).at(4096, 1, 0)
    assert dcp.weight_bytes == plain.weight_bytes
    assert dcp.kv_bytes * 2 == plain.kv_bytes


def test_gathered_keys_and_values():
    """All of a layer as gathered and in order: of 8192 tokens, 512 bytes each, twice."""
    memory = MemoryModel(deploy(model=short(QWEN), pcp=2, dcp=2, moe_dispatch="all_to_all")).at(8192, 1, 0)
    assert memory.buffer_bytes == 2 * 8192 * 512


def test_latents_projected_up_are_buffers():
    """Of 8192 latents 4096 are another rank's: 16 heads of 320 elements."""
    memory = MemoryModel(deploy(model=short(DEEPSEEK), pcp=2, moe_dispatch="all_to_all")).at(8192, 1, 0)
    assert memory.buffer_bytes == 2 * 8192 * 1152 + 4096 * 16 * 320 * 2


def test_segments():
    """S 16 and a million tokens of context: a shard's 8192 rows, 8 times and 16 times as many, and these in order."""
    memory = MemoryModel(deploy(model=short(DEEPSEEK), pcp=2, dcp=8, interleave=128)).at(2**20 + 4096, 1, 2**20)
    rows = 8192 * (1 + 8 + 16 + 16)
    assert memory.buffer_bytes == rows * 1152 + 131072 * 16 * 320 * 2
    # vLLM: a workspace for all ranks' rows and one for a rank's own, allocated whole.
    memory = MemoryModel(deploy(model=short(DEEPSEEK), dcp=8, cp_semantics="orthogonal")).at(2**20 + 4096, 1, 2**20)
    assert memory.buffer_bytes == (65536 + 8192 + 65536) * 1152 + 65536 * 16 * 320 * 2


def test_no_context_no_workspace():
    with_context, without = (
        MemoryModel(deploy(model=short(DEEPSEEK), dcp=8)).at(4096 + cached, 1, cached).buffer_bytes
        for cached in (4096, 0)
    )
    assert without == 0
    assert with_context == 4096 // 8 * (1 + 16) * 1152 + 4096 * 16 * 320 * 2


def test_exchanged_outputs_of_a_decode_step():
    """Queries of all heads; a rank's outputs; fp32 buffers sent, received, and gathered over two pcp ranks."""
    memory = MemoryModel(deploy(model=short(DEEPSEEK), pcp=2, dcp=8, phase="decode")).at(4096, 3, 0)
    heads = 3 * 128
    assert memory.buffer_bytes == heads * 576 * 2 + heads * 512 * 2 + 4 * heads * 513 * 4
    keys = {"pcp": 2, "cp_semantics": "orthogonal", "phase": "decode", "moe_dispatch": "all_to_all"}
    assert MemoryModel(deploy(model=short(DEEPSEEK), **keys)).at(4096, 3, 0).buffer_bytes == 0
    # Dcp over both: outputs sent and received with their log-sum-exps, and the merged heads of a rank.
    spans = deploy(model=short(DEEPSEEK), dcp=16, decode_form="dcp_a2a", **keys)
    exchanged = heads * (576 + 512) * 2 + 2 * heads * (512 * 2 + 4) + 3 * 16 * 512 * 2
    assert MemoryModel(spans).at(4096, 3, 0).buffer_bytes == exchanged


DEPLOYMENTS = {
    "dcp": {"model": DEEPSEEK, "dcp": 8, "ep": 8},
    "both": {"model": DEEPSEEK, "pcp": 2, "dcp": 8, "ep": 16, "interleave": 128},
    "orthogonal": {"model": DEEPSEEK, "pcp": 2, "dcp": 16, "ep": 16, "cp_semantics": "orthogonal"},
    "queries": {"model": QWEN, "pcp": 2, "dcp": 2, "ep": 16, "prefill_form": "allgather_q"},
    "ring": {"model": QWEN, "pcp": 2, "ep": 16, "prefill_form": "pass_kv"},
    "one chip": {"model": PRESETS["llama-3.1-8b"], "tp": 1},
}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", DEPLOYMENTS)
@pytest.mark.parametrize("cached", [0, 40_000])
def test_longest_context(case, phase, cached):
    """It fits, and not a token more does."""
    model = MemoryModel(deploy(**DEPLOYMENTS[case], phase=phase))
    cached = cached if phase == "prefill" else 0
    if cached and case == "ring":
        cached = 4096
    longest = model.max_seq_len(1, cached)
    if longest == 0:
        assert model.at(cached + 1, 1, cached).peak_bytes > model.usable_bytes
        return
    assert model.at(longest, 1, cached).peak_bytes <= model.usable_bytes
    assert model.at(longest + 1, 1, cached).peak_bytes > model.usable_bytes


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", DEPLOYMENTS)
def test_most_sequences(case, phase):
    """They fit, and not one more does; array by array as one by one."""
    model = MemoryModel(deploy(**DEPLOYMENTS[case], phase=phase))
    lengths = np.array([1, 100, 8192, 10**5, 10**6, 10**9])
    found = model.max_sequences(lengths, 0 * lengths)
    for seq_len, most in zip(lengths.tolist(), found.tolist(), strict=True):
        if most:
            assert model.at(seq_len, most, 0).peak_bytes <= model.usable_bytes
        if most < min(MOST_SEQUENCES, model.dep.most_tokens // (model.dep.dp * seq_len)):
            assert model.at(seq_len, most + 1, 0).peak_bytes > model.usable_bytes
    assert found[0] > found[3] >= found[4] >= found[5] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "decode", "seq_len": 100, "interleave": 128},
        {"seq_len": 300, "cached_tokens": 100},
        {"seq_len": 1},
        {"seq_len": 3, "dcp": 1, "cp_semantics": "orthogonal"},
    ],
)
@pytest.mark.filterwarnings("error")
def test_calibrated_chips_price_empty_shards_and_nothing_that_does_not_occur(changes):
    fixed = {"model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1,
             "ep": 16, "n_chips": 16, "tp": 8, "pcp": 2, "dcp": 8} | changes  # fmt: skip
    result = run({"name": "p", "fixed": fixed})
    assert result.calibrated
    assert np.isfinite(result.extrapolated)
    assert result.step_s > 0
