"""Deployed context parallelism: where ranks and shards are, and the exact work of every rank."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_acceptance_tools import DENSE
from test_dcp_bytes import SMALL, deploy

from g5cp_vec.cost.rows import parts_by_key
from g5cp_vec.mapping.kv_layout import KVLayout
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.ranks import rank_chips
from g5cp_vec.mapping.sharding import Groups, Reach, chunks_of, shard_numbers

# --- Where ranks and shards are ---------------------------------------------------------------------------------------


def test_the_layout_of_pcp2_dcp2_tp4():
    """World index = ((dp * pp + pp_rank) * pcp + pcp_rank) * tp + tp_rank; shard = pcp_rank * dcp + dcp_rank."""
    chips = rank_chips({"dp": 1, "pp": 1, "cp": 2, "tp": 4}, ("tp", "cp", "pp", "dp"))[:, 0]
    assert chips.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert Groups("pcp", 2).split(chips).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Groups("tp", 2).split(chips).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Groups("tp", 4).split(chips).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shard_numbers("tp", "multiplicative", 2, 4, 2).tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]]


def test_orthogonal_groups_walk_pcp_first():
    chips = rank_chips({"dp": 1, "pp": 1, "cp": 2, "tp": 4}, ("tp", "cp", "pp", "dp"))[:, 0]
    assert Groups("all", 8).split(chips).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert shard_numbers("all", "orthogonal", 2, 4, 8).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert shard_numbers("pcp", "orthogonal", 2, 4, 2).tolist() == [[0] * 4, [1] * 4]
    assert shard_numbers("tp", "orthogonal", 2, 4, 1).tolist() == [[0] * 4, [0] * 4]


@given(st.sampled_from(["tp", "pcp", "all"]), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_groups_are_a_partition(which, dp, pcp, tp):
    ids = np.random.default_rng(0).permutation(dp * pcp * tp).reshape(dp, pcp, tp)
    groups = Groups(which, max(1, tp // 2))
    assert sorted(groups.split(ids).ravel().tolist()) == list(range(ids.size))
    assert (groups.join(groups.split(ids), ids.shape) == ids).all()


@given(st.integers(1, 5000), st.integers(2, 9))
def test_the_fullest_rank_has_most_to_attend(new, pcp):
    """So pricing every rank's projections like its own delays nothing; the pads are fewer than 2 pcp."""
    chunks = [chunks_of(new, pcp, rank) for rank in range(pcp)]
    tokens, pairs = [c.tokens for c in chunks], [c.doubled_pairs for c in chunks]
    assert sum(tokens) == new
    assert max(pairs) == max(p for p, t in zip(pairs, tokens, strict=True) if t == max(tokens))
    assert sum(pairs) == new * new
    assert 0 <= 2 * pcp * -(-new // (2 * pcp)) - new < 2 * pcp


# --- Exact work of every rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleave", [1, 8, 16])
def test_a_rank_attends_what_it_holds(interleave):
    """Attention of a decode step, shard by shard: 2 n (d_qk + d_v) heads tokens FLOPs, and the cache once."""
    keys = {"model": SMALL["gqa"], "tp": 8, "pcp": 2, "dcp": 4, "interleave": interleave, "block_size": 16}
    dep = deploy(**keys, phase="decode")
    for seq_len in (1, 7, 40, 1000, 1024):
        parts = parts_by_key(dep, build_load(dep, seq_len, 3, 0))
        held = KVLayout(8, 16, interleave).tokens_per_rank(seq_len)
        assert held.sum() == seq_len
        for shard, tokens in enumerate(held.tolist()):
            core = parts[f"shard@{shard}", 0][0]
            # Two heads a rank, four ranks' queries; keys and values of one head, two bytes an element.
            assert core.flops == 2 * 3 * 8 * 48 * tokens
            assert core.bytes == 3 * tokens * 48 * 2 + 3 * 8 * 48 * 2


def test_classes_of_shards_stand_for_their_members():
    """Shards that share a duration hold equally many tokens, whatever the context."""
    for shards in (2, 5, 8):
        for interleave in (1, 4):
            for context in range(80):
                runs, rest = divmod(context, interleave)
                reach = Reach(1, runs % shards, int(rest > 0), 0)
                held = KVLayout(shards, interleave * 2, interleave).tokens_per_rank(context)
                for shard in range(shards):
                    assert held[reach.shard_class(shard, shards)] == held[shard]


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_a_prompt_is_computed_once(new, pcp, batch, orthogonal):
    """Every token on one rank, every pair with a key before it once; pads only with multiplicative semantics."""
    semantics = "orthogonal" if orthogonal else "multiplicative"
    dep = deploy(model=SMALL["gqa"], tp=1, pcp=pcp, cp_semantics=semantics) if pcp > 1 else deploy(model=DENSE, tp=1)
    load = build_load(dep, new, batch, 0)
    chunks = [chunks_of(load.new, pcp, rank) for rank in range(pcp)]
    assert sum(c.tokens for c in chunks) == load.new
    assert sum(c.doubled_pairs for c in chunks) == load.new**2
    assert load.new == (new if orthogonal or pcp == 1 else -(-new // (2 * pcp)) * 2 * pcp)
    assert load.rank_tokens == batch * max(c.tokens for c in chunks)
    covered = sorted(t for c in chunks for begin, end in (c.head, c.tail) for t in range(begin, end))
    assert covered == list(range(load.new))


def test_latents_are_projected_up_as_far_as_the_tail_sees():
    """Rank r of P needs (2P - r) / 2P of a padded prompt, pads included (vllm-ascend v0.23); all of it in vLLM."""
    dep = deploy(model=SMALL["mla"], tp=2, pcp=4)
    parts = parts_by_key(dep, build_load(dep, 64, 1, 0))
    per_row = 2 * 32 * 4 * (16 + 12)
    for rank in range(4):
        assert parts[f"attend@{rank}", 0][0].flops == (8 - rank) * 8 * per_row
    orthogonal = dataclasses.replace(dep, cp_semantics="orthogonal")
    parts = parts_by_key(orthogonal, build_load(orthogonal, 64, 1, 0))
    assert all(parts[f"attend@{rank}", 0][0].flops == 64 * per_row for rank in range(4))


def test_reordering_is_priced_by_its_bytes():
    """Gathered rows in and out once: of K/V, of queries, of final hidden states; of a segment from the cache too."""
    dep = deploy(model=SMALL["gqa"], tp=4, pcp=2, dcp=2, prefill_form="allgather_q")
    parts = parts_by_key(dep, build_load(dep, 64 + 32, 3, 32))
    assert [p.bytes for p in parts["restore", 0]] == [2 * 3 * 64 * 48 * 2]
    assert parts["context@0", 0][0].bytes == 2 * 3 * 64 * 4 * 24 * 2
    assert parts["lm_head", None][0].bytes == 2 * 3 * 64 * 64 * 2
    dep = deploy(model=SMALL["mla"], tp=4, pcp=2, dcp=2)
    load = build_load(dep, 64 + 512, 3, 512)
    copied = parts_by_key(dep, load)["segment_last@0", 0][0]
    # A quarter of the context from the cache, then all of it by request; latents of 40 elements.
    assert copied.bytes == 2 * 3 * (128 + 512) * 40 * 2


def test_merges_are_priced():
    """Four partial outputs with their log-sum-exps in, one output out; packing them before."""
    load = SimpleNamespace(rows=5, heads=4, gathered=8)
    keys = {"model": SMALL["gqa"], "tp": 4, "pcp": 2, "dcp": 2, "phase": "decode"}
    dep = deploy(**keys, decode_form="dcp_a2a_fp32")
    parts = parts_by_key(dep, build_load(dep, 4096, load.rows, 0))
    outputs = load.rows * load.heads * 24 * 2
    assert parts["merge", 0][0].bytes == 4 * load.rows * load.heads * 25 * 4 + outputs
    packed = load.rows * load.gathered * 25 * 4
    assert parts["shard@0", 0][1].bytes == load.rows * load.gathered * (24 * 2 + 4) + packed
    dep = deploy(**keys, decode_form="dcp_a2a")
    parts = parts_by_key(dep, build_load(dep, 4096, load.rows, 0))
    assert parts["merge", 0][0].bytes == 4 * load.rows * load.heads * (24 * 2 + 4) + outputs
    dep = deploy(**keys | {"pcp": 1}, decode_form="dcp_ag_rs")
    parts = parts_by_key(dep, build_load(dep, 4096, load.rows, 0))
    assert parts["rescale", 0][0].bytes == 2 * load.rows * load.gathered * 4 + 2 * load.rows * load.gathered * 24 * 2
    assert len(parts["shard@0", 0]) == 1
