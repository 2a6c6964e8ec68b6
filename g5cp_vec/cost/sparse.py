"""Sparse attention (DeepSeek-V3.2): an indexer that scores every pair, and attention over what was chosen.

The indexer takes 2 (d_i + 1) FLOPs a head and pair, writes and reads the scores in fp32 and the choice as 32-bit
numbers; the chosen latents are gathered anew for every query.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention, Indexer
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.cost.parts import AttentionShape, Part
from g5cp_vec.cost.products import gemm, memory, touch
from g5cp_vec.mapping.load import Count, Load, least, most, wide

# Bytes of one score, and of one chosen position.
SCORE_BYTES = 4
CHOICE_BYTES = 4


def indexer_projections(dep: Deployment, load: Load, a: Attention, indexer: Indexer) -> list[Part]:
    """All heads on each rank: queries from the latent of queries, a key and a weight a head from the hidden state."""
    tokens, hidden, width = load.rank_tokens, dep.model.hidden, indexer.n_heads * indexer.head_dim
    assert a.q_lora_rank is not None
    # Attention's projections before have brought both inputs to their type.
    shares = dep.indexer_dtype == dep.dtype
    return [
        *gemm(dep, "indexer", tokens, a.q_lora_rank, width, dep.indexer_dtype, shares_input=shares),
        *gemm(dep, "indexer", tokens, hidden, indexer.head_dim, dep.indexer_dtype, shares_input=shares),
        *gemm(dep, "indexer", tokens, hidden, indexer.n_heads, dep.activation_dtype),
        touch(dep, "indexer", 2 * tokens * (width + indexer.head_dim)),  # norm, rotation
        memory(dep, "indexer", tokens * indexer.key_bytes),  # into the cache
    ]


def all_pairs(load: Load) -> Count:
    """Doubled pairs of causal attention without any limit."""
    new = wide(load.new)
    return new * (2 * wide(load.cached) + new)


def rows_read(a: Attention, first: Count, last: Count) -> Count:
    """Tokens that the queries at positions [first, last) attend, each query's counted anew: min(a + 1, k)."""
    assert a.indexer is not None
    k = a.indexer.top_k
    n_short = least(most(k - first, 0), last - first)
    return n_short * (2 * first + n_short + 1) // 2 + (last - first - n_short) * k


def chosen_core(
    dep: Deployment, load: Load, a: Attention, *,
    heads: int, doubled: Count, rows: Count, q_tokens: Count, kv_tokens: Count, kv_dtype: str | None = None,
) -> Part:  # fmt: skip
    """Attention of ``q_tokens`` queries a sequence over the tokens they chose, ``rows`` in all; of latents.

    ``doubled`` pairs of one head of a sequence; latents come in ``kv_dtype``, that of the cache where none is said.
    """
    assert a.indexer is not None
    d_qk, d_v = a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank
    kv_dtype = kv_dtype or dep.kv_dtype
    vectors = n_bytes(load.batch * q_tokens * heads * (d_qk + d_v), dep.activation_dtype)
    choice = load.batch * q_tokens * a.indexer.top_k * CHOICE_BYTES
    shape = AttentionShape(
        phase=dep.phase,
        batch=load.batch,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        pairs=doubled / 2,
        heads=heads,
        kv_heads=a.kv_heads(dep.tp),
        d_qk=d_qk,
        d_v=d_v,
        latent=True,
        kv_dtype=kv_dtype,
        chosen=True,
    )
    moved = n_bytes(load.batch * rows * a.kv_elements(dep.tp), kv_dtype) + choice + vectors
    flops = load.batch * heads * (d_qk + d_v) * doubled
    return Part("attention", "attention", flops, moved, dep.activation_dtype, shape)


def scoring(
    dep: Deployment,
    load: Load,
    indexer: Indexer,
    doubled: Count,
    q_tokens: Count,
    kv_tokens: Count,
    *,
    sequences: Count | None = None,
) -> list[Part]:
    """Scores of ``doubled`` pairs a sequence, all of the batch unless said, and the choice of the highest."""
    batch = load.batch if sequences is None else sequences
    width = indexer.n_heads * indexer.head_dim
    queries = n_bytes(batch * q_tokens * width, indexer.dtype)
    # Every pair's score once out, and in again for the choice.
    scores = batch * doubled * (SCORE_BYTES // 2)
    shape = AttentionShape(
        phase=dep.phase,
        batch=batch,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        pairs=doubled / 2,
        heads=indexer.n_heads,
        kv_heads=1,
        d_qk=indexer.head_dim,
        d_v=0,
        latent=False,
        kv_dtype=indexer.dtype,
    )
    flops = batch * indexer.n_heads * (indexer.head_dim + 1) * doubled
    moved = queries + batch * kv_tokens * indexer.key_bytes + scores
    chosen = batch * q_tokens * indexer.top_k * CHOICE_BYTES
    return [
        Part("indexer", "attention", flops, moved, indexer.dtype, shape),
        memory(dep, "indexer", scores + chosen),
    ]
