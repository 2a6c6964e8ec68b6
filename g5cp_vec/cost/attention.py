"""Exact FLOPs and bytes of softmax attention and its projections.

Attention of T new tokens over P cached ones: b n_h (d_qk + d_v) FLOPs for each doubled pair of tokens that see each
other (`g5cp_vec.mapping.spans`; T^2 + 2 T P of them for full attention), each operand through memory once
(FlashAttention, arXiv:2205.14135, with tiles large enough that K/V re-reads stay on chip).

Latent attention up-projects keys and values in prefill; in decode, and wherever it is sparse (`g5cp_vec.cost.sparse`),
queries are absorbed and latents attended.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.parts import AttentionShape, OpParts, Part
from g5cp_vec.cost.products import gemm, memory, touch
from g5cp_vec.cost.sharded import sharded_parts
from g5cp_vec.cost.sharded_sparse import sparse_parts
from g5cp_vec.cost.sparse import CHOICE_BYTES, all_pairs, chosen_core, indexer_projections, rows_read, scoring
from g5cp_vec.mapping.load import Count, Load, ceil_div, least, wide
from g5cp_vec.mapping.sharding import is_sharded_form
from g5cp_vec.mapping.spans import (
    doubled_pairs,
    first_key,
    is_gathered,
    is_local,
    needed_of_cache,
    own_pairs,
    rank_pairs,
    received_tokens,
    visible_tokens,
)


def is_absorbed(dep: Deployment, a: Attention) -> bool:
    """Whether latents are attended as they are cached."""
    return a.kind == "mla" and (dep.phase == "decode" or a.span == "sparse")


def absorbed_dims(kind: LayerKind) -> tuple[int, int]:
    """Return the per-head width of query and output where latents are attended (absorbed projections)."""
    a = kind.softmax
    assert a is not None
    if a.kind == "mla":
        return a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank
    return a.d_qk, a.d_v


def attended_dims(dep: Deployment, kind: LayerKind) -> tuple[int, int]:
    """Return the per-head width of what is attended: of query and key, and of value and output."""
    a = kind.softmax
    assert a is not None
    return absorbed_dims(kind) if is_absorbed(dep, a) else (a.d_qk, a.d_v)


def attention_flops(dep: Deployment, load: Load, kind: LayerKind) -> Count:
    """FLOPs of one layer's attention over the whole (padded) sequence, heads of one tp shard."""
    a = kind.softmax
    assert a is not None
    heads, width = a.n_heads // dep.tp, sum(attended_dims(dep, kind))
    if dep.phase == "decode":
        return load.batch * 2 * heads * width * dep.cp * wide(shard_tokens(dep, load, a))
    return load.batch * heads * width * doubled_pairs(a, load.cached, load.context)


def shard_tokens(dep: Deployment, load: Load, a: Attention) -> Count:
    """Tokens of its share of the cache that a rank attends in a decode step."""
    return ceil_div(visible_tokens(a, load.cached_unpadded), dep.cp)


def attention_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Return the parts of the ops of a layer's attention, but for norms of the hidden state."""
    a = kind.softmax
    assert a is not None
    hidden, tp, tokens = dep.model.hidden, dep.tp, load.rank_tokens
    heads = a.n_heads // tp
    if a.kind == "gqa":
        kv_heads = a.kv_heads(tp)
        width = heads * (a.d_qk * (1 + a.output_gate)) + kv_heads * (a.d_qk + a.d_v)
        qkv = gemm(dep, "qkv", tokens, hidden, width, dep.dtype)
        if a.qk_norm != "none":
            qkv.append(touch(dep, "qkv", 2 * tokens * (heads + kv_heads) * a.d_qk))
        rotated = (heads + kv_heads) * (a.head_dim if a.rope_dim is None else a.rope_dim)
    else:
        rotated = (heads + 1) * a.qk_rope_head_dim
        qkv = _latent_projections(dep, load, a)
    if rotated:
        qkv.append(touch(dep, "qkv", 2 * tokens * rotated))
    qkv.append(memory(dep, "qkv", n_bytes(tokens * a.kv_elements(tp), dep.kv_dtype)))
    if a.scores is not None:
        qkv += indexer_projections(dep, load, a, a.scores)
    o_proj = gemm(dep, "o_proj", tokens, heads * a.d_v, hidden, dep.o_proj_dtype)
    if a.output_gate:
        o_proj.insert(0, touch(dep, "o_proj", 3 * tokens * heads * a.d_v))
    if dep.phase == "prefill" and dep.sequence_ranks > 1 and a.span == "full" and not is_sharded_form(dep):
        o_proj.insert(0, _ring_merge(dep, tokens, heads, a.d_v))
    if is_absorbed(dep, a):
        o_proj = _per_head(dep, "v_up", tokens, heads, a.kv_lora_rank, a.v_head_dim) + o_proj
    parts: OpParts = {"qkv": qkv, "o_proj": o_proj}
    if is_sharded_form(dep):
        if a.span == "sparse":
            return sparse_parts(dep, load, kind, a, parts)
        return parts | sharded_parts(dep, load, kind, a)
    if dep.phase == "decode":
        return _with_decode(dep, load, kind, a, parts)
    if is_local(dep, kind):
        return parts | _local_attention(dep, load, kind, a)
    if is_gathered(dep, kind):
        return parts | _gathered_attention(dep, load, kind, a)
    return parts | _prefill_attention(dep, load, kind, a)


def _latent_projections(dep: Deployment, load: Load, a: Attention) -> list[Part]:
    """MLA: query through its latent, K/V to theirs; at cp = 1 prefill also up-projects the whole context's K/V."""
    hidden, tokens = dep.model.hidden, load.rank_tokens
    heads = a.n_heads // dep.tp
    query, rank = heads * a.d_qk, a.q_lora_rank
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    parts = gemm(dep, "qkv", tokens, hidden, latent, dep.dtype)
    parts += gemm(dep, "qkv", tokens, hidden, query if rank is None else rank, dep.dtype, shares_input=True)
    if rank is not None:
        parts += gemm(dep, "qkv", tokens, rank, query, dep.dtype)
    parts.append(touch(dep, "qkv", 2 * tokens * (a.kv_lora_rank + (rank or 0))))  # norms of the latents
    if is_absorbed(dep, a):
        parts += _per_head(dep, "q_absorb", tokens, heads, a.qk_nope_head_dim, a.kv_lora_rank)
    elif dep.sequence_ranks == 1 and not is_sharded_form(dep):
        # What no new token sees any more is not up-projected.
        parts += _kv_up(dep, load.batch * (load.context - first_key(a, load, 1, 0)), a)
    return parts


def _kv_up(dep: Deployment, rows: Count, a: Attention) -> list[Part]:
    """Up-projection of latents to the keys and values of this shard's heads (kv_b_proj)."""
    width = a.n_heads // dep.tp * (a.qk_nope_head_dim + a.v_head_dim)
    return gemm(dep, "kv_up", rows, a.kv_lora_rank, width, dep.kv_b_proj_dtype)


def _per_head(dep: Deployment, flop_class: str, tokens: Count, heads: int, k: int, n: int) -> list[Part]:
    """One small GEMM per head (the absorbed halves of kv_b_proj)."""
    return gemm(dep, flop_class, tokens * heads, k, n, dep.kv_b_proj_dtype, heads)


def _core(
    dep: Deployment,
    load: Load,
    kind: LayerKind,
    a: Attention,
    *,
    doubled: Count,
    q_tokens: Count,
    kv_tokens: Count,
    key_bytes: Count,
    sequences: Count | None = None,
) -> Part:
    """Attention itself: ``doubled`` pairs a sequence and head, keys and values of ``key_bytes`` in all.

    ``sequences`` are all of the batch where nothing is said.
    """
    batch = load.batch if sequences is None else sequences
    heads, (d_qk, d_v) = a.n_heads // dep.tp, attended_dims(dep, kind)
    absorbed = is_absorbed(dep, a)
    vectors = n_bytes(batch * q_tokens * heads * (d_qk + d_v), dep.activation_dtype)
    shape = AttentionShape(
        phase=dep.phase,
        batch=batch,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        pairs=doubled / 2,
        heads=heads,
        kv_heads=heads if a.kind == "mla" and not absorbed else a.kv_heads(dep.tp),
        d_qk=d_qk,
        d_v=d_v,
        latent=absorbed,
        kv_dtype=dep.kv_dtype if absorbed or dep.phase == "decode" else dep.activation_dtype,
        chosen=a.span == "sparse",
    )
    flops = batch * heads * (d_qk + d_v) * doubled
    return Part("attention", "attention", flops, key_bytes + vectors, dep.activation_dtype, shape)


def _key_bytes(dep: Deployment, a: Attention, tokens: Count) -> Count:
    """Bytes of so many tokens' keys and values as prefill reads them: in the activation type, latents up-projected."""
    kv_heads = a.n_heads // dep.tp if a.kind == "mla" else a.kv_heads(dep.tp)
    return n_bytes(tokens * kv_heads * (a.d_qk + a.d_v), dep.activation_dtype)


def _prefill_attention(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> OpParts:
    """Count the whole attention at cp = 1; one of cp equal ring steps otherwise (a cp^2-th of the FLOPs each)."""
    cp = dep.sequence_ranks
    doubled = doubled_pairs(a, load.cached, load.context)
    if cp == 1 and a.span == "sparse":
        core = _sparse_core(dep, load, a, doubled, rows_read(a, load.cached, load.context))
        if a.scores is not None:
            return {"attention": [*scoring(dep, load, a.scores, all_pairs(load), load.new, load.context), core]}
        return {"attention": [core]}
    seen = (load.context - first_key(a, load, 1, 0)) if cp == 1 else load.context // cp
    core = _core(
        dep, load, kind, a,
        doubled=doubled // (cp * cp),
        q_tokens=load.new // cp,
        kv_tokens=seen,
        key_bytes=_key_bytes(dep, a, load.batch * seen),
    )  # fmt: skip
    if cp == 1:
        return {"attention": [core]}
    if a.kind == "mla":
        return {"ring_step": [*_kv_up(dep, load.batch * seen, a), core]}
    return {"ring_step": [core]}


def _ring_merge(dep: Deployment, rows: Count, heads: int, d_v: int) -> Part:
    """Merge of cp partial results, each an output, a maximum and a denominator per row and head, all in fp32."""
    partial = 4 * rows * heads * (d_v + 2)
    return memory(dep, "merge", dep.sequence_ranks * partial + n_bytes(rows * heads * d_v, dep.activation_dtype))


def _local_attention(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> OpParts:
    """Windows and chunks of a split sequence: on every rank its own keys first, then those of others."""
    parts: OpParts = {}
    q_tokens = load.new // dep.cp
    for rank in range(dep.cp):
        own, whole = own_pairs(a, load, dep.cp, rank), rank_pairs(a, load, dep.cp, rank)
        share = ceil_div(needed_of_cache(a, load, dep.cp, rank), dep.cp)
        received = received_tokens(a, load, dep.cp, rank) + share
        for name, doubled, tokens in (("own", own, q_tokens), ("halo", whole - own, received)):
            key_bytes = _key_bytes(dep, a, load.batch * tokens)
            core = _core(dep, load, kind, a, doubled=doubled, q_tokens=q_tokens, kv_tokens=tokens, key_bytes=key_bytes)
            up = _kv_up(dep, load.batch * tokens, a) if a.kind == "mla" else []
            parts[f"{name}@{rank}"] = [*up, core]
    return parts


def _gathered_attention(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> OpParts:
    """Sparse attention of a split sequence: score every key of the context, then attend what was chosen."""
    parts: OpParts = {}
    q_tokens = load.new // dep.cp
    if a.scores is not None:
        # Head and tail chunks see equally much on every rank.
        doubled = all_pairs(load) // dep.cp
        parts["indexer"] = scoring(dep, load, a.scores, doubled, q_tokens, load.context)
    length = load.new // (2 * dep.cp)
    for rank in range(dep.cp):
        starts = [load.cached + chunk * length for chunk in (rank, 2 * dep.cp - 1 - rank)]
        rows = sum(rows_read(a, start, start + length) for start in starts)
        parts[f"sparse@{rank}"] = [_sparse_core(dep, load, a, rank_pairs(a, load, dep.cp, rank), rows)]
    return parts


def _sparse_core(dep: Deployment, load: Load, a: Attention, doubled: Count, rows: Count) -> Part:
    assert a.indexer is not None
    heads, kv_tokens = a.n_heads // dep.tp, least(load.context, a.indexer.top_k)
    return chosen_core(
        dep, load, a, heads=heads, doubled=doubled, rows=rows, q_tokens=load.new // dep.cp, kv_tokens=kv_tokens
    )


def _with_decode(dep: Deployment, load: Load, kind: LayerKind, a: Attention, parts: OpParts) -> OpParts:
    """One token per sequence over the rank's share of what it sees of the cache, which is read once."""
    cp, sequences, context = dep.cp, load.rank_tokens, load.cached_unpadded
    tokens = shard_tokens(dep, load, a)
    cache = n_bytes(sequences * tokens * a.kv_elements(dep.tp), dep.kv_dtype)
    if a.indexer is not None:
        cache = cache + sequences * tokens * CHOICE_BYTES
    core = _core(
        dep, load, kind, a,
        doubled=2 * wide(tokens),
        q_tokens=1,
        kv_tokens=tokens,
        key_bytes=cache,
        sequences=sequences,
    )  # fmt: skip
    scores: list[Part] = []
    if a.scores is not None:
        scores = scoring(dep, load, a.scores, 2 * wide(context), 1, context, sequences=sequences)
    if cp == 1:
        return parts | {"attention": [*scores, core]}
    # An owner scores: it keeps all keys of the indexer, and sends the choice along with the query.
    parts = parts | {"qkv": parts["qkv"] + scores}
    heads, d_v = a.n_heads // dep.tp, absorbed_dims(kind)[1]
    if dep.has_owner:
        # The merge reads cp partial outputs with two scalars per head and writes one output.
        merged = touch(dep, "merge", sequences * heads * (cp * (d_v + 2) + d_v))
        return parts | {"partial": [core], "merge": [merged]}
    # A step of a ring attends the queries of one owner; cp outputs, each with a log-sum-exp in fp32, become one.
    outputs = n_bytes(sequences * heads * (cp + 1) * d_v, dep.activation_dtype)
    return parts | {
        "ring_partial": [core],
        "ring_merge": [memory(dep, "merge", outputs + 4 * cp * sequences * heads)],
    }
