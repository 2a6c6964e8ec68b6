"""Bytes a rank holds: weights, KV cache, activations and ring buffers of the fullest pipeline stage.

All counts are exact integers (``semantics``: KV = batch * ceil(S / cp) * c_kv * layers of the stage; activations =
tokens of the rank times the widest moment of a layer; buffers = the ring blocks that can be in flight).
The embedding table is whole on every rank of the first stage, the head is split over tp.

Not modelled: allocator fragmentation, workspaces of kernels and collective libraries (the chip's usable fraction
stands for them), scales of quantised formats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.model import LayerKind
from g5cp_vec.mapping.load import Count, build_load, ceil_div
from g5cp_vec.mapping.structure import layer_kinds, stage_layers

# No context is longer than this; a deployment that holds nothing per token has no other limit.
LONGEST_CONTEXT = 2**40


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest stage's ranks; integers or int64 arrays of shape (n_points,)."""

    weight_bytes: Count
    kv_bytes: Count
    activation_bytes: Count
    buffer_bytes: Count

    @property
    def peak_bytes(self) -> Count:
        """Everything at once."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.buffer_bytes


def usable_bytes(dep: Deployment) -> int:
    """Bytes of a chip that weights, cache, activations and buffers may fill."""
    return int(dep.chip.hbm_bytes * dep.chip.usable_memory_fraction)


def memory_of(dep: Deployment, seq_len: Count, batch: Count, cached_tokens: Count) -> Memory:
    """Return the memory of a rank of the fullest stage for a context of ``seq_len`` tokens."""
    stages = [_stage(dep, kinds, weights, seq_len, batch, cached_tokens) for kinds, weights in _distinct_stages(dep)]
    fullest = stages[0]
    for stage in stages[1:]:
        fuller = stage.peak_bytes > fullest.peak_bytes
        fullest = Memory(*(_choose(fuller, getattr(stage, f), getattr(fullest, f)) for f in Memory.__slots__))
    return fullest


def max_seq_len(dep: Deployment, batch: int, cached_tokens: int) -> int:
    """Return the longest context that still fits, 0 when none does (bisection: memory never falls with length)."""
    budget = usable_bytes(dep)

    def fits(seq_len: int) -> bool:
        return bool(memory_of(dep, seq_len, batch, cached_tokens).peak_bytes <= budget)

    shortest = cached_tokens + 1 if dep.phase == "prefill" else 1
    if not fits(shortest):
        return 0
    low, step = shortest, 1
    while fits(low + step):
        low += step
        step *= 2
        if low >= LONGEST_CONTEXT:
            return LONGEST_CONTEXT
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _choose(mask: Any, if_true: Count, if_false: Count) -> Count:
    if isinstance(mask, np.ndarray):
        return np.where(mask, if_true, if_false)
    return if_true if mask else if_false


def _distinct_stages(dep: Deployment) -> list[tuple[Counter[LayerKind], int]]:
    """Layer kinds and weight bytes of each stage, each combination once, in order of the stages."""
    kinds, sequence = layer_kinds(dep.model)
    stages: dict[Any, tuple[Counter[LayerKind], int]] = {}
    ranges = stage_layers(dep.model.n_layers, dep.pp)
    for stage, layers in enumerate(ranges):
        counts = Counter(sequence[layer] for layer in layers)
        ends = (stage == 0, stage == dep.pp - 1)
        key = (tuple(sorted(counts.items())), ends)
        if key not in stages:
            by_kind = Counter({kinds[kind]: n for kind, n in counts.items()})
            weights = sum(n * layer_weight_bytes(dep, kind) for kind, n in by_kind.items())
            stages[key] = (by_kind, weights + _edge_weight_bytes(dep, first=ends[0], last=ends[1]))
    return list(stages.values())


def layer_weight_bytes(dep: Deployment, kind: LayerKind) -> int:
    """Weight bytes of one layer on one rank; norms and the router are kept in the activation type."""
    attention, hidden, tp = kind.attention, dep.model.hidden, dep.tp
    heads = attention.n_heads // tp
    if attention.kind == "gqa":
        projections = hidden * (heads * attention.d_qk + attention.kv_heads(tp) * (attention.d_qk + attention.d_v))
        norms = 2 * hidden
    else:
        query, rank, latent = heads * attention.d_qk, attention.q_lora_rank, attention.kv_lora_rank
        projections = hidden * query if rank is None else (hidden + query) * rank
        projections += hidden * (latent + attention.qk_rope_head_dim)
        projections += latent * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        norms = 2 * hidden + latent + (rank or 0)
    projections += heads * attention.d_v * hidden
    total = n_bytes(projections, dep.dtype) + n_bytes(norms, dep.activation_dtype)
    if kind.ffn == "dense":
        return total + n_bytes(3 * hidden * (dep.model.d_ff // tp), dep.ffn_dtype)
    moe = dep.model.moe
    assert moe is not None
    assert dep.ep is not None
    assert dep.moe_tp is not None
    experts = moe.n_experts // dep.ep * (moe.d_expert // dep.moe_tp) + moe.n_shared * moe.d_expert // tp
    router = n_bytes(hidden * moe.n_experts, dep.activation_dtype)
    return total + router + n_bytes(3 * hidden * experts, dep.ffn_dtype)


def _edge_weight_bytes(dep: Deployment, *, first: bool, last: bool) -> int:
    """Embedding table on the first stage; final norm and the rank's part of the head on the last."""
    model = dep.model
    elements = model.vocab * model.hidden if first else 0
    if last:
        elements += model.hidden
        if not (first and model.tie_embeddings):
            elements += ceil_div(model.vocab, dep.tp) * model.hidden
    return n_bytes(elements, dep.activation_dtype)


def _stage(
    dep: Deployment, kinds: Counter[LayerKind], weights: int, seq_len: Count, batch: Count, cached_tokens: Count
) -> Memory:
    rank_context = batch * ceil_div(seq_len, dep.cp)
    kv = sum(n * n_bytes(rank_context * kind.attention.kv_elements(dep.tp), dep.kv_dtype) for kind, n in kinds.items())
    if dep.phase == "decode":
        tokens = batch
        buffers = 0 * rank_context
    else:
        tokens = batch * ceil_div(seq_len - cached_tokens, dep.cp)
        load = build_load(dep, seq_len, batch, cached_tokens)
        elements = max(kind.attention.kv_elements(dep.tp) for kind in kinds)
        block = n_bytes(batch * (load.context // dep.cp) * elements, dep.kv_dtype)
        buffers = (dep.cp - 1) * block
    width = 2 * dep.model.hidden + max(_widest(dep, kind) for kind in kinds)
    activations = n_bytes(tokens * width, dep.activation_dtype)
    return Memory(weights + 0 * rank_context, kv, activations + 0 * rank_context, buffers)


def _widest(dep: Deployment, kind: LayerKind) -> int:
    """Elements per token at the widest moment of a layer, beside the residual stream and its copy."""
    attention, tp = kind.attention, dep.tp
    heads = attention.n_heads // tp
    kv_heads = attention.kv_heads(tp) if attention.kind == "gqa" else heads
    qkv = heads * attention.d_qk + kv_heads * (attention.d_qk + attention.d_v)
    if kind.ffn == "dense":
        return max(qkv, 2 * dep.model.d_ff // tp)
    assert dep.model.moe is not None
    return max(qkv, dep.model.moe.top_k * dep.model.hidden)
