"""What attention with a sharded cache promises (pcp, dcp, gathering over cp): FLOPs, and bytes by collective.

Written from the tables of what vLLM and vllm-ascend send, collective by collective, with whole groups of ranks.
"""

from __future__ import annotations

import math

import numpy as np

from g5cp_vec.audit.messages import Collectives, Ints, Tokens, Traffic, is_hybrid, size_bytes, up
from g5cp_vec.audit.sharded_sparse import sparse_decode, sparse_prefill
from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.deployment import Deployment

FP32 = 4


def is_sharded(dep: Deployment) -> bool:
    """Whether a layer's attention is one of these."""
    if dep.phase == "decode":
        return dep.pcp * dep.dcp > 1
    return dep.prefill_form != "pass_kv" and dep.cp * dep.pcp * dep.dcp > 1


def attention_flops(dep: Deployment, tokens: Tokens, a: Attention) -> dict[str, int]:
    """Return the FLOPs of attention and up-projection of one layer, of the whole deployment."""
    sequences = dep.dp * tokens.batch
    if dep.phase == "decode":
        # Where pcp ranks have the whole cache, each of them attends all of it.
        copies = dep.pcp if dep.cp_semantics == "orthogonal" and dep.dcp == 1 else 1
        return {"attention": 2 * copies * sequences * a.n_heads * sum(_widths(dep, a)) * tokens.context}
    # A new token sees half of those that are new with it, and all that were there.
    twice = tokens.new * tokens.new + 2 * tokens.new * tokens.cached
    flops = {"attention": sequences * a.n_heads * sum(_widths(dep, a)) * twice}
    if a.kind == "mla":
        up_projected = 2 * a.kv_lora_rank * a.n_heads * (a.qk_nope_head_dim + a.v_head_dim)
        flops["kv_up"] = sequences * _rows_projected_up(dep, tokens) * up_projected
    return flops


def _rows_projected_up(dep: Deployment, tokens: Tokens) -> int:
    """Latents of a sequence that the ranks of a tp shard project up, all together."""
    ranks = dep.cp * dep.pcp
    of_context = ranks * tokens.cached
    if ranks == 1 or dep.cp_semantics == "orthogonal":
        return ranks * tokens.new + of_context
    chunk = tokens.new // (2 * ranks)
    return sum((2 * ranks - rank) * chunk for rank in range(ranks)) + of_context


def _widths(dep: Deployment, a: Attention) -> tuple[int, int]:
    if a.kind == "gqa":
        return a.head_dim, a.head_dim
    if dep.phase == "decode":
        return a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank
    return a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim


def _groups(chips: Ints, which: str, size: int) -> Ints:
    """Return the chips of each group; pcp varies first where a group has several pcp coordinates."""
    replicas, n_pcp, n_tp = chips.shape
    groups = []
    for replica in range(replicas):
        if which == "all":
            groups.append([chips[replica, p, t] for t in range(n_tp) for p in range(n_pcp)])
        elif which == "pcp":
            groups += [[chips[replica, p, t] for p in range(n_pcp)] for t in range(n_tp)]
        else:
            starts = [(p, t) for p in range(n_pcp) for t in range(0, n_tp, size)]
            groups += [[chips[replica, p, t + i] for i in range(size)] for p, t in starts]
    return np.array(groups, np.int64)


def sharded_traffic(dep: Deployment, tokens: Tokens, a: Attention, chips: Ints) -> list[Traffic]:
    """Return the traffic of one layer's attention; ``chips`` of its stage, shape (dp, P, tp)."""
    c = Collectives(dep)
    spans_pcp = dep.cp_semantics == "orthogonal" and dep.pcp > 1 and dep.dcp > 1
    which = "tp" if not spans_pcp else "pcp" if dep.dcp == dep.pcp else "all"
    dcp, pcp = _groups(chips, which, dep.dcp), _groups(chips, "pcp", chips.shape[1])
    query = _groups(chips, "tp", {"tp": dep.dcp, "pcp": 1, "all": dep.tp}[which])
    if dep.phase == "decode":
        _decode(dep, tokens, a, c, dcp, pcp, query)
    else:
        _prefill(dep, tokens, a, c, dcp, pcp, query)
    # A group of one has nothing to send.
    return [t for t in c.traffic if len(t.src)]


def _decode(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, dcp: Ints, pcp: Ints, query: Ints) -> None:
    q_width, out_width = _widths(dep, a)
    heads = tokens.batch * a.n_heads // dep.tp
    if a.indexer is not None and not sparse_decode(dep, tokens, a, c, dcp, pcp):
        return
    if dep.cp_semantics == "orthogonal" and dep.dcp == 1:
        return
    c.gather("dcp", query, size_bytes(heads * q_width, dep.activation_dtype))
    met = heads * query.shape[1]
    if dep.decode_form == "dcp_ag_rs":
        c.gather("dcp", dcp, FP32 * met)
        merged = size_bytes(met * out_width, dep.activation_dtype)
        if query.shape == dcp.shape and (query == dcp).all():
            c.scatter(dcp, up(merged, dep.dcp))
        else:
            c.reduce(dcp, up(merged, dep.dcp))
        return

    def partial(rows: int) -> int:
        if dep.decode_form == "dcp_a2a_fp32":
            return FP32 * rows * (out_width + 1)
        return size_bytes(rows * out_width, dep.activation_dtype) + FP32 * rows

    c.exchange(dcp, partial(met // dep.dcp))
    if dep.cp_semantics == "orthogonal" and dep.pcp > 1:
        # Whole heads, merged: the members of a pcp group have one share each.
        c.gather("pcp", pcp, size_bytes(heads // dep.pcp * out_width, dep.activation_dtype))
    else:
        c.gather("pcp", pcp, partial(met))


def _prefill(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, dcp: Ints, pcp: Ints, query: Ints) -> None:
    if a.indexer is not None:
        sparse_prefill(dep, tokens, a, c, dcp, pcp)
        return
    keys, values = a.kv_lora_rank, a.qk_rope_head_dim
    if a.kind == "gqa":
        keys = values = max(1, a.n_kv_heads // dep.tp) * a.head_dim
    own, queries = tokens.per_rank, dep.prefill_form == "allgather_q"
    if dep.cp > 1 and not queries:
        # A share of the context goes with the new tokens.
        own += tokens.batch * (tokens.cached // dep.cp)
    attended = own
    if dep.pcp > 1 and is_hybrid(dep):
        attended = tokens.batch * (tokens.new // dep.pcp)
        heads = a.n_heads // dep.tp * a.head_dim
        c.gather("pcp", pcp, size_bytes(own * (heads + keys + values), dep.activation_dtype))
        c.gather("pcp", pcp, size_bytes(attended * heads, dep.activation_dtype))
    elif dep.cp_semantics == "orthogonal":
        c.gather("pcp", pcp, size_bytes(own * keys, dep.kv_dtype))
        c.gather("pcp", pcp, size_bytes(own * values, dep.kv_dtype))
    else:
        c.gather("pcp", pcp, size_bytes(own * (keys + values), dep.kv_dtype))
    if tokens.cached == 0:
        return
    if queries:
        rows = tokens.batch * tokens.new * a.n_heads // dep.tp
        c.gather("pcp", pcp, size_bytes(attended * a.n_heads // dep.tp * a.d_qk, dep.activation_dtype))
        c.gather("dcp", query, size_bytes(rows * a.d_qk, dep.activation_dtype))
        if dep.cp_semantics == "orthogonal":
            c.gather("dcp", dcp, FP32 * rows * dep.dcp)
            c.scatter(dcp, size_bytes(rows * a.d_v, dep.activation_dtype))
        else:
            c.exchange(dcp, FP32 * rows * (a.d_v + 1))
            c.gather("pcp", pcp, FP32 * rows * dep.dcp * (a.d_v + 1))
    elif dep.cp == 1:
        for shard_rows in _segment_rows(dep, tokens):
            c.gather("dcp", dcp, size_bytes(shard_rows * (keys + values), dep.kv_dtype))
            if dep.cp_semantics == "multiplicative":
                c.gather("pcp", pcp, size_bytes(dep.dcp * shard_rows * (keys + values), dep.kv_dtype))


def handed_over_traffic(dep: Deployment, tokens: Tokens, m: Linear, chips: Ints) -> list[Traffic]:
    """Return what linear attention gathers over pcp: last taps, states, and a matrix a head in fp32."""
    c, pcp = Collectives(dep), _groups(chips, "pcp", dep.pcp)
    heads, d_k, d_v = m.n_heads // dep.tp, m.key_head_dim, m.value_head_dim
    if m.conv_kernel > 1:
        channels = 2 * (m.n_key_heads // dep.tp) * d_k + heads * d_v
        c.gather("pcp", pcp, size_bytes(tokens.batch * (m.conv_kernel - 1) * channels, dep.activation_dtype))
    c.gather("pcp", pcp, size_bytes(tokens.batch * heads * d_k * d_v, m.state_dtype))
    c.gather("pcp", pcp, FP32 * tokens.batch * heads * d_k * d_k)
    return c.traffic


def _segment_rows(dep: Deployment, tokens: Tokens) -> list[int]:
    """Rows of the batch that a shard contributes to each round of gathering its context."""
    assert dep.block_size is not None
    assert dep.interleave is not None
    shards, cap = dep.dcp, 65536
    if dep.cp_semantics == "multiplicative":
        shards, cap = dep.dcp * dep.pcp, 131072
    turn = dep.interleave * shards
    # The workspace is that of the engine as it is configured; the contexts of this pass share it.
    longest, blocks = dep.max_model_len or tokens.context, dep.block_size * (dep.max_num_seqs or tokens.batch)
    room = max(min(max(8 * longest, 4 * blocks), cap), blocks) // tokens.batch
    segment = room - room % math.lcm(dep.block_size, turn)
    rows, left = [], up(tokens.cached, turn) * dep.interleave
    for _ in range(up(tokens.cached, segment)):
        rows.append(tokens.batch * min(left, segment // shards))
        left -= min(left, segment // shards)
    return rows
