"""Exact FLOPs, bytes and messages of attention with a sharded cache (`g5cp_vec.mapping.forms.sharded`).

Every rank attends exactly the tokens that its shard holds; where ranks of one class differ, the name of an op ends in
``@`` and the shard or pcp coordinate that it stands for. Bytes are those of tensors as deployed:

=================  ===========================================================================================
message            bytes
=================  ===========================================================================================
``pcp_kv``         what a rank contributes to the gathering of new keys and values: its rows of the cache's width
                   (multiplicative); of latents or keys alone (orthogonal), where ``pcp_kv_rest`` follows
``pcp_qkv``        queries, keys and values of its contiguous piece, in the activation type (hybrid models)
``pcp_exit``       outputs of the rows it attended (hybrid models)
``pcp_q``          queries of its rows
``dcp_q``          queries of all rows, its heads
``dcp_a2a``        a peer's heads' share of outputs and log-sum-exps, fp32 or packed
``pcp_partial``    all that the all-to-all made
``pcp_heads``      merged outputs of a pcp-th of a rank's heads
``dcp_lse``        log-sum-exps of all gathered heads, fp32 (of a peer's heads, where outputs travel apart)
``dcp_out``        one chunk of the reduce-scatter or all-reduce of outputs
``*_segment@``     rows of a segment: a shard's (dcp), a dcp group's (pcp)
=================  ===========================================================================================

Passes over memory that deployed code makes beside its kernels are priced by their bytes, in and out once: putting
gathered rows back in order, copying a segment from the cache and sorting it by request, packing and merging partial
outputs, updating the running softmax. Not modelled: copies that fuse into their neighbours (concatenation of K and V).
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.context import A2A_FP32, AG_RS, ALLGATHER_KV, ALLGATHER_Q
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.parts import AttentionShape, OpParts, Part
from g5cp_vec.cost.products import gemm, memory
from g5cp_vec.mapping.load import Count, Load, ceil_div, is_contiguous, most, wide
from g5cp_vec.mapping.sharding import (
    Chunks,
    chosen_on_shard,
    chunks_of,
    context_on_shard,
    context_tokens,
    doubled_causal,
    is_padded,
    segments,
)

LSE_BYTES = 4
# Of one chosen position.
CHOICE_BYTES = 4
FP32_BYTES = 4


class Widths:
    """Heads and elements per head of a layer as it is attended: latents absorbed in decode, projected up in prefill."""

    def __init__(self, dep: Deployment, a: Attention) -> None:
        self.heads = a.n_heads // dep.tp
        self.latent = a.kind == "mla" and (dep.phase == "decode" or a.span == "sparse")
        self.d_q, self.d_out = a.d_qk, a.d_v
        if self.latent:
            self.d_q, self.d_out = a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank
        # Heads of the queries that meet on a rank.
        self.gathered_heads = self.heads * {"tp": dep.dcp, "pcp": 1, "all": dep.tp}[dep.dcp_group]
        # Heads that a rank merges after an all-to-all: its own, or a pcp-th of them where the group spans pcp ranks.
        self.merged_heads = self.gathered_heads // dep.dcp
        self.cached = a.kv_elements(dep.tp)
        # Sparse attention sends outputs and log-sum-exps apart (vllm-ascend).
        self.apart = a.span == "sparse" and is_padded(dep)


def _partial_bytes(dep: Deployment, rows: Count, w: Widths) -> Count:
    """Bytes of ``rows`` outputs of one head with their log-sum-exps, as they are exchanged in one buffer."""
    if w.apart:
        return _output_bytes(dep, rows, w) + rows * LSE_BYTES
    if dep.decode_form in (None, A2A_FP32):  # prefill exchanges as the fp32 kernel does
        return rows * (w.d_out + 1) * FP32_BYTES
    return n_bytes(rows * w.d_out, dep.activation_dtype) + rows * LSE_BYTES


def _output_bytes(dep: Deployment, rows: Count, w: Widths) -> Count:
    """Bytes of ``rows`` outputs of one head."""
    return n_bytes(rows * w.d_out, dep.activation_dtype)


# --- Messages ---------------------------------------------------------------------------------------------------------


def sharded_message(dep: Deployment, load: Load, kind: LayerKind, name: str, part: str) -> Count:
    """Return the bytes of a message; see the module. ``part`` is what follows ``@``."""
    a = kind.softmax
    assert a is not None
    w = Widths(dep, a)
    rows = load.batch if dep.phase == "decode" else load.batch * load.new
    own = _attended_rows(dep, load)
    if name == "pcp_qkv":
        return n_bytes(load.rank_tokens * (w.heads * w.d_q + w.cached), dep.activation_dtype)
    if name == "pcp_exit":
        return _output_bytes(dep, own * w.heads, w)
    if name in ("pcp_kv", "pcp_kv_rest"):
        return n_bytes(_gathered_rows(dep, load) * _gathered_width(dep, a, w, name), dep.kv_dtype)
    if name == "pcp_q":
        return n_bytes(own * w.heads * w.d_q, dep.activation_dtype)
    if name == "dcp_q":
        return n_bytes(rows * w.heads * w.d_q, dep.activation_dtype)
    if name == "dcp_a2a":
        sent = rows * w.merged_heads
        return _output_bytes(dep, sent, w) if w.apart else _partial_bytes(dep, sent, w)
    if name == "pcp_partial":
        return _partial_bytes(dep, rows * w.gathered_heads, w)
    if name == "pcp_heads":
        return _output_bytes(dep, rows * w.merged_heads, w)
    if name == "dcp_lse":
        return rows * (w.heads if w.apart else w.gathered_heads) * LSE_BYTES
    if name == "dcp_out":
        chunk = _output_bytes(dep, rows * w.gathered_heads, w)
        return ceil_div(chunk, dep.dcp)
    s = segments(dep, load)
    shard_rows = load.batch * (s.last_shard_rows if part == "last" else s.shard_rows)
    assert name in ("dcp_segment", "pcp_segment")
    return n_bytes((shard_rows if name == "dcp_segment" else dep.dcp * shard_rows) * w.cached, dep.kv_dtype)


SHARDED_MESSAGES = (
    "pcp_kv", "pcp_kv_rest", "pcp_q", "dcp_q", "dcp_a2a", "pcp_partial", "pcp_heads", "dcp_lse", "dcp_out",
    "dcp_segment", "pcp_segment", "pcp_qkv", "pcp_exit",
)  # fmt: skip


def _attended_rows(dep: Deployment, load: Load) -> Count:
    """Rows whose attention a rank does: its own, but where pieces are contiguous its head and tail chunks."""
    return load.batch * (load.new // dep.pcp) if is_contiguous(dep) else load.rank_tokens


def _gathered_rows(dep: Deployment, load: Load) -> Count:
    """Rows that a rank brings to the gathering of new keys and values; of a cp group its share of the context too."""
    if dep.cp > 1 and dep.prefill_form == ALLGATHER_KV:
        return load.batch * (load.context // dep.cp)
    return load.rank_tokens


def _gathered_width(dep: Deployment, a: Attention, w: Widths, name: str) -> int:
    if is_padded(dep):
        return w.cached
    first = a.kv_lora_rank if a.kind == "mla" else w.cached // 2
    return first if name == "pcp_kv" else w.cached - first


# --- Computes ---------------------------------------------------------------------------------------------------------


def sharded_parts(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> OpParts:
    """Return the parts of the ops between the projections of a layer."""
    w = Widths(dep, a)
    return _decode_parts(dep, load, a, w) if dep.phase == "decode" else _prefill_parts(dep, load, a, w)


def _attend(
    dep: Deployment, load: Load, a: Attention, w: Widths, heads: int, *,
    q_rows: Count, kv_tokens: Count, doubled: Count, cached: bool, kv_rows: Count | None = None,
) -> Part:  # fmt: skip
    """Attention of ``q_rows`` rows a sequence over ``kv_tokens``; ``doubled`` pairs of one head of a sequence.

    Keys and values come as they are cached, or as they were projected; ``kv_rows`` of them where not once each.
    """
    keys = load.batch * (kv_tokens if kv_rows is None else kv_rows)
    up = a.kind == "mla" and not w.latent
    if cached and not up:
        kv_bytes = n_bytes(keys * w.cached, dep.kv_dtype)
    else:
        per_row = w.heads * (a.d_qk + a.d_v) if up else w.cached
        kv_bytes = n_bytes(keys * per_row, dep.activation_dtype)
    # What is empty is launched all the same: its duration is looked up as that of one token.
    vectors = n_bytes(load.batch * q_rows * heads * (w.d_q + w.d_out), dep.activation_dtype)
    shape = AttentionShape(
        phase=dep.phase,
        batch=load.batch,
        q_tokens=most(q_rows, 1),
        kv_tokens=most(kv_tokens, 1),
        pairs=most(doubled / 2, 1),
        heads=heads,
        kv_heads=heads if up else a.kv_heads(dep.tp),
        d_qk=w.d_q,
        d_v=w.d_out,
        latent=w.latent,
        kv_dtype=dep.kv_dtype if cached and not up else dep.activation_dtype,
    )
    flops = wide(load.batch) * heads * (w.d_q + w.d_out) * doubled
    return Part("attention", "attention", flops, kv_bytes + vectors, dep.activation_dtype, shape)


def _kv_up(dep: Deployment, a: Attention, w: Widths, rows: Count) -> list[Part]:
    """Up-projection of latents (kv_b_proj), where there are any."""
    if a.kind != "mla":
        return []
    # No op has no rows; a load that lacks the op is priced beside others that have it.
    width = w.heads * (a.qk_nope_head_dim + a.v_head_dim)
    return gemm(dep, "kv_up", most(rows, 1), a.kv_lora_rank, width, dep.kv_b_proj_dtype)


def _decode_parts(dep: Deployment, load: Load, a: Attention, w: Widths) -> OpParts:
    rows, shards = load.batch, dep.kv_shards
    outputs = _output_bytes(dep, rows * w.gathered_heads, w)
    sums = rows * w.gathered_heads * LSE_BYTES
    # Outputs and log-sum-exps are packed into one buffer; reduce-scatter takes outputs as they are.
    exchanged = _partial_bytes(dep, rows * w.gathered_heads, w)
    packed = shards > 1 and dep.decode_form != AG_RS and not w.apart
    packs = [memory(dep, "merge", outputs + sums + exchanged)] if packed else []
    choice: list[Part] = []
    parts: OpParts = {}
    for shard in range(shards):
        tokens = context_on_shard(dep, load, shard)
        if a.indexer is not None:
            tokens = chosen_on_shard(dep, load, a.indexer.top_k, shard)
            choice = [memory(dep, "attention", load.batch * tokens * CHOICE_BYTES)]
        core = _attend(
            dep, load, a, w, w.gathered_heads, q_rows=1, kv_tokens=tokens, doubled=2 * wide(tokens), cached=True
        )
        parts[f"shard@{shard}"] = [core, *choice, *packs]
    own = rows * w.merged_heads
    merged = shards * _partial_bytes(dep, own, w) + _output_bytes(dep, own, w)
    return parts | {
        "merge": [memory(dep, "merge", merged)],
        # Everyone's log-sum-exps in, outputs in and out.
        "rescale": [memory(dep, "merge", dep.dcp * sums + 2 * outputs)],
    }


def _prefill_parts(dep: Deployment, load: Load, a: Attention, w: Widths) -> OpParts:
    ranks = dep.sequence_ranks
    gathered = ranks * _gathered_rows(dep, load)
    parts: OpParts = {"restore": [memory(dep, "restore", 2 * n_bytes(gathered * w.cached, dep.kv_dtype))]}
    if is_contiguous(dep):
        parts = _changes_of_layout(dep, load, w)
    # Context that came along with the new tokens is attended with them.
    along = load.cached if dep.cp > 1 and dep.prefill_form == ALLGATHER_KV else 0 * load.cached
    for rank in range(ranks):
        parts |= _of_rank(dep, load, a, w, chunks_of(load.new, ranks, rank), rank, along)
    if dep.prefill_form == ALLGATHER_Q:
        parts |= _with_gathered_queries(dep, load, a, w)
    return parts


def _changes_of_layout(dep: Deployment, load: Load, w: Widths) -> OpParts:
    """Gathered pieces in order, then at the places of padded chunks; a rank's queries of these, and back again."""
    width, padded = w.heads * w.d_q + w.cached, load.batch * load.new
    moved = (dep.pcp * load.rank_tokens + padded) * width + _attended_rows(dep, load) * w.heads * w.d_q
    outputs = _output_bytes(dep, load.rank_tokens * w.heads, w)
    return {
        "restore": [memory(dep, "restore", 2 * n_bytes(moved, dep.activation_dtype))],
        "exit": [memory(dep, "restore", 2 * outputs)],
    }


def _of_rank(dep: Deployment, load: Load, a: Attention, w: Widths, chunks: Chunks, rank: int, along: Count) -> OpParts:
    """Attention of a rank's new tokens: head and tail by themselves and together, and with segments of context."""
    split = dep.sequence_ranks > 1

    def causal(chunk: tuple[Count, Count]) -> tuple[Count, Count, Count]:
        """Return rows, keys seen, doubled pairs."""
        rows = chunk[1] - chunk[0]
        return rows, chunk[1] + along, doubled_causal(*chunk) + 2 * wide(rows) * along

    def part(q_rows: Count, keys: Count, doubled: Count, kv_rows: Count | None = None) -> Part:
        return _attend(
            dep, load, a, w, w.heads,
            q_rows=q_rows, kv_tokens=keys, doubled=doubled, cached=False, kv_rows=kv_rows,
        )  # fmt: skip

    head, tail = causal(chunks.head), causal(chunks.tail)
    # Two kernels, each of which reads the keys that it sees.
    both = part(head[0] + tail[0], tail[1] if split else head[1], head[2] + tail[2], head[1] + tail[1] * split)
    # vllm-ascend projects no more latents up than the tail sees.
    rows = tail[1] if split and is_padded(dep) else load.new + along
    parts = {
        f"attend@{rank}": [*_kv_up(dep, a, w, load.batch * rows), both],
        f"head@{rank}": [part(*head)],
        f"tail@{rank}": [part(*tail)],
    }
    if dep.is_sharded and dep.prefill_form == ALLGATHER_KV:
        parts |= _segments_of_rank(dep, load, a, w, chunks.tokens, rank)
    return parts


def _segments_of_rank(dep: Deployment, load: Load, a: Attention, w: Widths, q_rows: Count, rank: int) -> OpParts:
    """Price a segment: copied out of the cache, sorted by request, projected up, attended, merged."""
    s = segments(dep, load)
    shared = dep.kv_shards > 1
    outputs = 3 * (_output_bytes(dep, load.batch * q_rows * w.heads, w) + load.batch * q_rows * w.heads * LSE_BYTES)
    parts: OpParts = {}
    for name, tokens, shard_rows in (("full", s.tokens, s.shard_rows), ("last", s.last_tokens, s.last_shard_rows)):
        gathered = dep.kv_shards * shard_rows
        copied = n_bytes(load.batch * (shard_rows + gathered * shared) * w.cached, dep.kv_dtype)
        parts[f"segment_{name}@{rank}"] = [
            memory(dep, "restore", 2 * copied),
            *_kv_up(dep, a, w, load.batch * tokens),
            _attend(
                dep, load, a, w, w.heads,
                q_rows=q_rows, kv_tokens=tokens, doubled=2 * wide(q_rows) * tokens, cached=True,
            ),
            memory(dep, "merge", outputs),
        ]  # fmt: skip
    return parts


def _with_gathered_queries(dep: Deployment, load: Load, a: Attention, w: Widths) -> OpParts:
    """All queries of a sequence over a shard of its context, and the merge of what comes back with new tokens' part."""
    rows = load.batch * load.new
    queries = n_bytes(rows * w.heads * w.d_q, dep.activation_dtype)
    before = [memory(dep, "restore", 2 * queries)] if dep.sequence_ranks > 1 else []
    outputs, sums = _output_bytes(dep, rows * w.gathered_heads, w), rows * w.gathered_heads * LSE_BYTES
    exchanges = is_padded(dep)
    packs = [memory(dep, "merge", outputs + sums + _partial_bytes(dep, rows * w.gathered_heads, w))]
    parts: OpParts = {}
    for shard in range(dep.kv_shards):
        tokens = _shard_context(dep, load, shard)
        core = _attend(
            dep, load, a, w, w.gathered_heads,
            q_rows=load.new, kv_tokens=tokens, doubled=2 * wide(load.new) * tokens, cached=True,
        )  # fmt: skip
        parts[f"context@{shard}"] = [*before, core, *(packs if exchanges else [])]
    own = _attended_rows(dep, load) * w.heads
    local = 2 * _output_bytes(dep, own, w) + own * LSE_BYTES  # in, with its log-sum-exp, and out
    answers = dep.kv_shards * _partial_bytes(dep, own, w) if exchanges else _output_bytes(dep, own, w) + own * LSE_BYTES
    return parts | {
        "rescale": [memory(dep, "merge", dep.dcp * sums + 2 * outputs)],
        "merge_context": [memory(dep, "merge", local + answers)],
    }


def _shard_context(dep: Deployment, load: Load, shard: int) -> Count:
    """Return the cached tokens of a sequence on one shard; of a cp group an equal share of the padded context."""
    return context_on_shard(dep, load, shard) if dep.is_sharded else context_tokens(load) // dep.cp
