"""Exact FLOPs and bytes of every compute op.

A compute op is a list of *parts*, one per kernel or fused group of kernels. A part counts multiply-adds as two
FLOPs; element-wise work (norms, rotary, activations, residual adds) is counted by its bytes alone.
GEMM y[m, n] = x[m, k] w[k, n]: 2mnk FLOPs; bytes of x, w and y.
Attention of T new tokens over P cached ones: b * 2 n_h (d_qk + d_v) (T P + T^2 / 2) FLOPs (causal), each operand
through memory once (FlashAttention, arXiv:2205.14135, with tiles large enough that K/V re-reads stay on chip).
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.model import LayerKind
from g5cp_vec.cost.parts import AttentionShape, GemmShape, OpParts, Part
from g5cp_vec.mapping.load import Count, Load, ceil_div, expert_rows, wide


def layer_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Return the parts of every compute op of one layer on one rank, by the op's name in the cost keys."""
    parts = _attention_parts(dep, load, kind)
    if kind.ffn == "dense":
        norm = _memory("ffn", 4 * _hidden(dep, _sequence_tokens(dep, load)), dep)
        parts["ffn"] = [norm, *_mlp(dep, "ffn", load.rank_tokens, kind.d_ff // dep.tp)]
    else:
        parts |= _moe_parts(dep, load, kind)
    return parts


def edge_parts(dep: Deployment, load: Load) -> OpParts:
    """Return the parts of the embedding look-up and of the head (last token of each sequence)."""
    hidden = _hidden(dep, load.rank_tokens)
    head = _gemm(dep, "lm_head", load.batch, dep.model.hidden, ceil_div(dep.model.vocab, dep.tp), dep.activation_dtype)
    return {
        "embed": [_memory("embed", 2 * hidden, dep)],
        "lm_head": [_memory("lm_head", 2 * _hidden(dep, load.batch), dep), head],
    }


def attention_flops(dep: Deployment, load: Load, kind: LayerKind) -> Count:
    """FLOPs of one layer's causal attention over the whole (padded) sequence, heads of one tp shard."""
    attention = kind.softmax
    heads = attention.n_heads // dep.tp
    new, cached = wide(load.new), wide(load.cached)
    if dep.phase == "decode":
        d_qk, d_v = absorbed_dims(kind)
        return load.batch * 2 * heads * (d_qk + d_v) * cached
    return load.batch * heads * (attention.d_qk + attention.d_v) * (2 * new * cached + new * new)


def absorbed_dims(kind: LayerKind) -> tuple[int, int]:
    """Return the per-head width of query and output in decode: MLA attends latents (absorbed projections)."""
    attention = kind.softmax
    if attention.kind == "mla":
        return attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank
    return attention.d_qk, attention.d_v


def _hidden(dep: Deployment, tokens: Count) -> Count:
    """Bytes of ``tokens`` hidden states."""
    return n_bytes(tokens * dep.model.hidden, dep.activation_dtype)


def _sequence_tokens(dep: Deployment, load: Load) -> Count:
    """Tokens whose norm and residual a rank computes: a tp-th of them when the tp group splits the sequence."""
    return ceil_div(load.rank_tokens, dep.tp) if dep.tp_sp else load.rank_tokens


def _memory(flop_class: str, n: Count, dep: Deployment) -> Part:
    return Part(flop_class, "memory", 0, n, dep.activation_dtype)


def _gemm(dep: Deployment, flop_class: str, m: Count, k: int, n: int, dtype: str, weight_rows: Count = 1) -> Part:
    """One GEMM, or ``weight_rows`` of the same weight shape over ``m`` rows in all."""
    activations = n_bytes(m * (k + n), dep.activation_dtype)
    n_bytes_ = activations + weight_rows * n_bytes(k * n, dtype)
    return Part(flop_class, "gemm", 2 * wide(m) * k * n, n_bytes_, dtype, GemmShape(m, k, n, weight_rows))


def _mlp(dep: Deployment, name: str, tokens: Count, width: int, n_experts: Count = 1) -> list[Part]:
    """SwiGLU: gate and up projection, activation, down projection."""
    hidden = dep.model.hidden
    return [
        _gemm(dep, name, tokens, hidden, 2 * width, dep.ffn_dtype, n_experts),
        _memory(name, n_bytes(3 * tokens * width, dep.activation_dtype), dep),
        _gemm(dep, name, tokens, width, hidden, dep.ffn_dtype, n_experts),
    ]


def _moe_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    moe = kind.moe
    assert moe is not None
    assert dep.ep is not None
    assert dep.moe_tp is not None
    tokens = load.rank_tokens
    norm = _memory("router", 4 * _hidden(dep, _sequence_tokens(dep, load)), dep)
    rows, _ = expert_rows(dep, load)
    received = dep.ep * rows
    # Uniform routing spreads the rows over all local experts: no more are read than there are rows.
    touched = (
        np.minimum(received, moe.n_experts // dep.ep)
        if isinstance(received, np.ndarray)
        else min(received, moe.n_experts // dep.ep)
    )
    parts = {
        "router": [norm, _gemm(dep, "router", tokens, dep.model.hidden, moe.n_experts, dep.activation_dtype)],
        "experts": _mlp(dep, "experts", received, moe.d_expert // dep.moe_tp, touched),
    }
    if moe.n_shared:
        parts["shared"] = _mlp(dep, "shared", tokens, moe.n_shared * moe.d_expert // dep.tp)
    return parts


def _attention_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    attention, hidden, tp, tokens = kind.softmax, dep.model.hidden, dep.tp, load.rank_tokens
    heads = attention.n_heads // tp
    norm = _memory("qkv", 4 * _hidden(dep, _sequence_tokens(dep, load)), dep)
    if attention.kind == "gqa":
        kv_heads = attention.kv_heads(tp)
        width = heads * attention.d_qk + kv_heads * (attention.d_qk + attention.d_v)
        rotated = (heads + kv_heads) * attention.d_qk
        projections = [_gemm(dep, "qkv", tokens, hidden, width, dep.dtype)]
    else:
        rotated = (heads + 1) * attention.qk_rope_head_dim
        projections = _latent_projections(dep, load, kind)
    rotary = _memory("qkv", n_bytes(2 * tokens * rotated, dep.activation_dtype), dep)
    cache_write = _memory("qkv", n_bytes(tokens * attention.kv_elements(tp), dep.kv_dtype), dep)
    o_proj = [_gemm(dep, "o_proj", tokens, heads * attention.d_v, hidden, dep.dtype)]
    if attention.kind == "mla" and dep.phase == "decode":
        o_proj.insert(0, _per_head(dep, "v_up", tokens, heads, attention.kv_lora_rank, attention.v_head_dim))
    return {
        "qkv": [norm, *projections, rotary, cache_write],
        "o_proj": o_proj,
        **(_decode_attention(dep, load, kind) if dep.phase == "decode" else _prefill_attention(dep, load, kind)),
    }


def _latent_projections(dep: Deployment, load: Load, kind: LayerKind) -> list[Part]:
    """MLA: query through its latent, K/V to theirs; at cp = 1 prefill also up-projects the whole context's K/V."""
    attention, hidden, tokens = kind.softmax, dep.model.hidden, load.rank_tokens
    heads = attention.n_heads // dep.tp
    query, rank = heads * attention.d_qk, attention.q_lora_rank
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    parts = [_gemm(dep, "qkv", tokens, hidden, latent, dep.dtype)]
    if rank is None:
        parts.append(_gemm(dep, "qkv", tokens, hidden, query, dep.dtype))
    else:
        parts.append(_gemm(dep, "qkv", tokens, hidden, rank, dep.dtype))
        parts.append(_gemm(dep, "qkv", tokens, rank, query, dep.dtype))
    if dep.phase == "decode":
        parts.append(_per_head(dep, "q_absorb", tokens, heads, attention.qk_nope_head_dim, attention.kv_lora_rank))
    elif dep.cp == 1:
        parts.append(_kv_up(dep, load.batch * load.context, kind))
    return parts


def _kv_up(dep: Deployment, rows: Count, kind: LayerKind) -> Part:
    """Up-projection of latents to the keys and values of this shard's heads (kv_b_proj)."""
    attention = kind.softmax
    width = attention.n_heads // dep.tp * (attention.qk_nope_head_dim + attention.v_head_dim)
    return _gemm(dep, "kv_up", rows, attention.kv_lora_rank, width, dep.dtype)


def _per_head(dep: Deployment, flop_class: str, tokens: Count, heads: int, k: int, n: int) -> Part:
    """One small GEMM per head (the absorbed halves of kv_b_proj)."""
    return _gemm(dep, flop_class, tokens * heads, k, n, dep.dtype, heads)


def _prefill_attention(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Count the whole attention at cp = 1; one of cp equal ring steps otherwise (a cp^2-th of the FLOPs each)."""
    attention, cp = kind.softmax, dep.cp
    heads, kv_heads = attention.n_heads // dep.tp, attention.kv_heads(dep.tp)
    if attention.kind == "mla":
        kv_heads = heads  # up-projected
    block = load.batch * (load.context // cp)
    elements = load.rank_tokens * heads * (attention.d_qk + attention.d_v) + block * kv_heads * (
        attention.d_qk + attention.d_v
    )
    flops = attention_flops(dep, load, kind) // (cp * cp)
    pairs = wide(load.new) * load.cached + wide(load.new) * load.new / 2
    shape = AttentionShape(
        phase="prefill",
        batch=load.batch,
        q_tokens=load.new // cp,
        kv_tokens=load.context // cp,
        pairs=pairs / (cp * cp),
        heads=heads,
        kv_heads=kv_heads,
        d_qk=attention.d_qk,
        d_v=attention.d_v,
        latent=False,
        kv_dtype=dep.activation_dtype,
    )
    core = Part("attention", "attention", flops, n_bytes(elements, dep.activation_dtype), dep.activation_dtype, shape)
    if cp == 1:
        return {"attention": [core]}
    if attention.kind == "mla":
        return {"ring_step": [_kv_up(dep, block, kind), core]}
    return {"ring_step": [core]}


def _decode_attention(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """One token per sequence over the rank's share of the cache, which is read once."""
    cp, attention = dep.cp, kind.softmax
    heads = attention.n_heads // dep.tp
    d_qk, d_v = absorbed_dims(kind)
    cache = n_bytes(load.batch * (load.cached // cp) * attention.kv_elements(dep.tp), dep.kv_dtype)
    vectors = n_bytes(load.batch * heads * (d_qk + d_v), dep.activation_dtype)
    flops = attention_flops(dep, load, kind) // cp
    shape = AttentionShape(
        phase="decode",
        batch=load.batch,
        q_tokens=1,
        kv_tokens=load.cached // cp,
        pairs=wide(load.cached // cp),
        heads=heads,
        kv_heads=attention.kv_heads(dep.tp),
        d_qk=d_qk,
        d_v=d_v,
        latent=attention.kind == "mla",
        kv_dtype=dep.kv_dtype,
    )
    core = Part("attention", "attention", flops, cache + vectors, dep.activation_dtype, shape)
    if cp == 1:
        return {"attention": [core]}
    # The merge reads cp partial outputs with two scalars per head and writes one output.
    merged = load.batch * heads * (cp * (d_v + 2) + d_v)
    return {"partial": [core], "merge": [_memory("merge", n_bytes(merged, dep.activation_dtype), dep)]}
