"""Where tokens live and how batches are split: against twins that deal token by token, and against known answers."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive import kv_layout as naive

from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping import head_tail, kv_layout
from g5cp_vec.mapping.head_tail import split_batch
from g5cp_vec.mapping.kv_layout import NOT_OWNED, KVLayout

DATA = Path(__file__).parent / "data" / "kv_layout"


@st.composite
def layouts(draw):
    interleave = draw(st.integers(1, 5))
    return KVLayout(draw(st.integers(1, 5)), interleave * draw(st.integers(1, 4)), interleave)


@st.composite
def batches(draw):
    tokens = draw(st.lists(st.integers(1, 25), min_size=1, max_size=4))
    return tokens, draw(st.integers(1, 5)), draw(st.integers(0, len(tokens)))


def rows_of(name):
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---- where tokens live ----


@given(layouts(), st.integers(1, 200))
def test_placement_is_dealing(layout, context_len):
    dealt = naive.deal(context_len, layout.kv_shards, layout.block_size, layout.interleave)
    where = layout.place(np.arange(context_len))
    assert list(zip(*(column.tolist() for column in where), strict=True)) == dealt


@given(layouts(), st.integers(0, 200))
def test_counts_are_those_of_dealing(layout, context_len):
    dealt = naive.deal(context_len, layout.kv_shards, layout.block_size, layout.interleave)
    held = [[token for token, place in enumerate(dealt) if place[2] == rank] for rank in range(layout.kv_shards)]
    lengths = layout.tokens_per_rank(context_len).tolist()
    assert lengths == [len(tokens) for tokens in held]
    longest = kv_layout.longest_shard_tokens(context_len, layout.kv_shards, layout.interleave)
    assert longest == max(lengths)
    assert longest - min(lengths) <= layout.interleave
    for rank, tokens in enumerate(held):
        assert layout.tokens_of(rank, np.arange(len(tokens))).tolist() == tokens
    blocks = len({block for block, *_ in dealt})
    assert layout.blocks(context_len) == blocks
    args = (context_len, layout.kv_shards, layout.block_size)
    assert kv_layout.allocated_tokens_per_shard(*args) == blocks * layout.block_size >= longest
    # Whole virtual blocks: the last token of each has been dealt.
    granularity = layout.virtual_block_tokens
    whole = sum(granularity for _, offset, _, _ in dealt if offset == granularity - 1)
    assert kv_layout.reusable_prefix_tokens(*args) == whole


@given(layouts(), st.integers(1, 120), st.randoms(use_true_random=False))
def test_each_token_has_one_slot(layout, context_len, random):
    table = list(range(layout.blocks(context_len)))
    random.shuffle(table)
    slots = np.stack([layout.slots(np.arange(context_len), table, rank) for rank in range(layout.kv_shards)])
    assert ((slots != NOT_OWNED).sum(axis=0) == 1).all()
    for row in slots:
        owned = row[row != NOT_OWNED].tolist()
        assert len(set(owned)) == len(owned)
        # Block by block in the order of the table, without a gap.
        logical = [
            table.index(slot // layout.block_size) * layout.block_size + slot % layout.block_size for slot in owned
        ]
        assert logical == list(range(len(owned)))


@given(layouts(), st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_counts_take_arrays_and_unbounded_integers(layout, contexts):
    shards, block, interleave = layout.kv_shards, layout.block_size, layout.interleave
    lengths = layout.tokens_per_rank(contexts)
    assert lengths.shape == (len(contexts), shards)
    assert lengths.sum(axis=1).tolist() == contexts
    for context, row in zip(contexts, lengths.tolist(), strict=True):
        assert [kv_layout.shard_tokens(context, rank, shards, interleave) for rank in range(shards)] == row
    huge = 10**30 + contexts[0]
    assert sum(kv_layout.shard_tokens(huge, rank, shards, interleave) for rank in range(shards)) == huge
    # Every argument may be an array over points.
    points = (np.array(contexts), np.full(len(contexts), shards), np.full(len(contexts), block))
    for count in (kv_layout.blocks_per_shard, kv_layout.allocated_tokens_per_shard, kv_layout.reusable_prefix_tokens):
        assert count(*points).tolist() == [count(context, shards, block) for context in contexts]


def test_slot_mapping_of_the_oracle():
    rows = rows_of("slot_mapping.csv")
    assert len(rows) > 1500
    for row in rows:
        number = {name: int(cell) for name, cell in row.items()}
        layout = KVLayout(number["cp_size"], number["block_size"], number["interleave"])
        where = layout.place(number["token"])
        assert where._asdict() == {name: number[name] for name in where._fields}
        table = [10, 21, 7]
        assert table[number["virtual_block"]] == number["block_table_row"]
        for rank in range(layout.kv_shards):
            slot = number["slot_on_target_rank"] if rank == number["target_rank"] else NOT_OWNED
            assert layout.slots(number["token"], table, rank) == slot


@pytest.mark.parametrize(
    ("shards", "interleave", "context_len", "lengths"),
    [
        # vllm-ascend v0.23.0, tests/ut/worker/test_pcp_manager.py (two by two ranks)
        (4, 1, 129, [33, 32, 32, 32]),
        (4, 128, 128, [128, 0, 0, 0]),
        (4, 128, 129, [128, 1, 0, 0]),
        (4, 128, 257, [128, 128, 1, 0]),
        # vllm-ascend main, tests/ut/attention/a2/test_common_cp.py
        (2, 4, 1, [1, 0]),
        (2, 4, 4, [4, 0]),
        (2, 4, 5, [4, 1]),
        (2, 4, 8, [4, 4]),
        (2, 4, 9, [5, 4]),
    ],
)
def test_lengths_that_others_assert(shards, interleave, context_len, lengths):
    assert KVLayout(shards, 128, interleave).tokens_per_rank(context_len).tolist() == lengths


def test_prefix_cache_by_hand():
    # Sixteen shards of blocks of 128: a shared system prompt of 2047 tokens is never found.
    assert KVLayout(16, 128).virtual_block_tokens == 2048
    assert kv_layout.prefix_granularity_tokens(16, 128) == 2048
    assert [kv_layout.reusable_prefix_tokens(n, 16, 128) for n in (2047, 2048, 5000)] == [0, 2048, 4096]


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 8, 1), "kv_shards"), ((2, 0, 1), "block_size"), ((2, 8, 0), "interleave")]
)
def test_sizes_below_one_are_refused(sizes, name):
    with pytest.raises(InfeasibleError, match=f"^{name} = 0: "):
        KVLayout(*sizes)


@pytest.mark.parametrize(("block_size", "interleave"), [(128, 3), (128, 256), (8, 5)])
def test_interleave_divides_the_block(block_size, interleave):
    with pytest.raises(InfeasibleError, match=f"block_size = {block_size}, interleave = {interleave}: "):
        KVLayout(2, block_size, interleave)


# ---- gathering cached context in rounds ----


def test_gathering_by_hand():
    # Sixteen shards, runs of whole blocks, one context of 500000 tokens: four rounds, the last one shorter.
    workspace = kv_layout.gather_workspace_tokens(500_000, 1, 128, 131_072)
    assert workspace == 131_072
    rows = kv_layout.gathered_segment_tokens([500_000, 0], workspace, KVLayout(16, 128, 128))
    assert rows.tolist() == [8192, 8192, 8192, 6784]
    assert len(kv_layout.gathered_segment_tokens([2**20], workspace, KVLayout(16, 128, 128))) == 8
    # Eight times a short longest context; four blocks a sequence; one block a sequence above the cap.
    assert kv_layout.gather_workspace_tokens(1000, 1, 128, 131_072) == 8000
    assert kv_layout.gather_workspace_tokens(100, 64, 128, 131_072) == 32_768
    assert kv_layout.gather_workspace_tokens(100, 4096, 128, 131_072) == 524_288


def test_gathering_needs_a_turn_for_each():
    layout, contexts = KVLayout(16, 128, 128), [5000] * 64
    assert len(kv_layout.gathered_segment_tokens(contexts, 131_072, layout)) == 3
    with pytest.raises(InfeasibleError, match="65 requests with cached context"):
        kv_layout.gathered_segment_tokens([*contexts, 1], 131_072, layout)
    assert kv_layout.gathered_segment_tokens([0, 0], 1, layout).tolist() == []


@given(layouts(), st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(400, 1000))
def test_gathering_moves_every_shard_once(layout, contexts, workspace):
    turn = layout.interleave * layout.kv_shards
    rows = kv_layout.gathered_segment_tokens(contexts, workspace, layout)
    # Every shard counts as long as if all turns were whole.
    padded = [-(-context // turn) * turn for context in contexts]
    assert (rows * layout.kv_shards).sum() == sum(padded)
    assert all(n * layout.kv_shards <= workspace for n in rows)
    assert sorted(rows.tolist(), reverse=True) == rows.tolist()


# ---- the head-tail split ----


@given(batches())
def test_padded_form_is_dealing(case):
    tokens, pcp, n_decodes = case
    batch = split_batch(*case)
    computed, restore, mask = naive.split_padded(tokens, pcp, n_decodes)
    assert [[part.tolist() for part in batch.padded_positions(rank)] for rank in range(pcp)] == computed
    assert batch.padded_restore_index().tolist() == restore
    assert batch.padded_unpad_mask().tolist() == mask
    real = [sum(p < tokens[i] for i, part in enumerate(parts) for p in part) for parts in computed]
    assert batch.real_tokens.tolist() == real
    assert batch.padded_lengths_per_rank.tolist() == [len(part) for part in computed[0]]
    assert batch.padded_lengths.tolist() == [sum(len(parts[i]) for parts in computed) for i in range(len(tokens))]
    assert batch.pad_tokens.tolist() == [sum(map(len, computed[r])) - real[r] for r in range(pcp)]
    assert batch.causal_pairs.tolist() == [naive.causal_pairs(parts, tokens) for parts in computed]


@given(batches())
def test_virtual_batch_is_dealing(case):
    batch = split_batch(*case)
    segments, most, restore = naive.split_virtual(*case)
    assert [batch.virtual_rows(rank) for rank in range(batch.pcp)] == segments
    assert batch.gather_rows == most
    assert batch.kv_gather_rows == most - sum(case[0][: case[2]])
    assert batch.virtual_restore_index().tolist() == restore


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=4), st.integers(1, 64))
def test_work_is_balanced(tokens, pcp):
    batch = split_batch(tokens, pcp)
    assert batch.real_tokens.sum() == sum(tokens)
    assert batch.causal_pairs.sum() == sum(n * (n + 1) // 2 for n in tokens)
    padded = [-(-n // (2 * pcp)) * 2 * pcp for n in tokens]
    assert batch.padded_lengths.tolist() == padded
    assert batch.padded_lengths_per_rank.tolist() == [n // pcp for n in padded]
    assert all(0 <= p - n < 2 * pcp for p, n in zip(padded, tokens, strict=True))
    # Where every request is cut evenly, all ranks have the same work, and nothing is padded.
    even = split_batch([n * 2 * pcp for n in tokens if n * 2 * pcp <= 10**6] or [2 * pcp], pcp)
    assert len(set(even.causal_pairs.tolist())) == 1
    assert even.pad_tokens.tolist() == [0] * pcp


def test_docstring_case_of_vllm_ascend():
    # vllm_ascend/worker/pcp_utils.py, update_tokens_for_pcp
    batch = split_batch([1, 5, 8], 2, n_decodes=1)
    assert [np.concatenate(batch.padded_positions(rank)).tolist() for rank in (0, 1)] == [
        [0, 0, 1, 6, 7, 0, 1, 6, 7],
        [0, 2, 3, 4, 5, 2, 3, 4, 5],
    ]
    assert batch.padded_lengths_per_rank.tolist() == [1, 4, 4]
    assert (batch.padded_lengths - batch.tokens).tolist() == [1, 3, 0]
    assert batch.padded_restore_index().tolist() == [0, 9, 1, 2, 10, 11, 12, 13, 3, 4, 5, 6, 14, 15, 16, 17, 7, 8]
    assert "".join(map(str, batch.padded_unpad_mask().astype(int))) == "101111100011111111"


@pytest.mark.parametrize(
    ("tokens", "pcp", "per_rank"), [([8, 12, 16], 4, [2, 4, 4]), ([3, 7, 9], 4, [2, 2, 4]), ([10], 4, [4])]
)
def test_padded_counts_that_others_assert(tokens, pcp, per_rank):
    # vllm-ascend, tests/ut/worker/test_pcp_manager.py
    assert split_batch(tokens, pcp).padded_lengths_per_rank.tolist() == per_rank


def test_virtual_batch_that_others_assert():
    # vllm-ascend's second runner, n = 18 over two ranks: rank 0 has tokens 15, 16, 17, 0, …, 4 and is padded to 10.
    batch = split_batch([18], 2)
    assert batch.virtual_rows(0) == [(0, 15, 18), (0, 0, 5)]
    assert batch.gather_rows == 10
    # The comment of vLLM's manager: seven tokens A to G, gathered as A B G _ C D E F.
    assert split_batch([7], 2).real_tokens.tolist() == [3, 4]


def test_short_requests_leave_ranks_empty():
    batch = split_batch([3], 4)
    assert batch.real_tokens.tolist() == [1, 1, 1, 0]
    assert batch.virtual_rows(3) == []
    assert split_batch([9], 4).real_tokens.tolist() == [2, 2, 2, 3]


def test_decode_requests_of_several_tokens_are_copied_whole():
    batch = split_batch([2, 4], 2, n_decodes=1)
    # Rank 0: d0 d1, 0 3; rank 1: d0 d1, 1 2. Restored: the copy of rank 0, that of rank 1, the prefill.
    assert batch.padded_restore_index().tolist() == [0, 1, 4, 5, 2, 6, 7, 3]
    assert batch.padded_unpad_mask().tolist() == [True, False, True, False, True, True, True, True]
    assert batch.virtual_restore_index().tolist() == [0, 1, 3, 6, 7, 2]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (([], 2), "at least one request"),
        (([4, 0], 2), "at least 1 token"),
        (([4], 0), "pcp = 0"),
        (([4], 2, 2), "decodes = 2: expected 0 to 1"),
        (([4], 2, -1), "decodes = -1: expected 0 to 1"),
        (([2**30, 2**30], 2), "more than 2147483647 tokens"),
    ],
)
def test_batches_that_cannot_be_are_refused(case, text):
    with pytest.raises(InfeasibleError, match=text):
        split_batch(*case)


def test_pairs_of_the_largest_batch_fit():
    n = head_tail.MOST_BATCH_TOKENS
    assert sum(split_batch([n], 1).causal_pairs.tolist()) == n * (n + 1) // 2
