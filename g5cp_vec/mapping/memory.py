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
from g5cp_vec.config.dtypes import matrix_bytes, n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.config.weights import Shards, Weight, layer_weights
from g5cp_vec.mapping.load import Count, build_load, ceil_div
from g5cp_vec.mapping.structure import stage_layers

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


class MemoryModel:
    """Memory of one deployment as a function of its load.

    Parameters
    ----------
    dep : Deployment
    """

    def __init__(self, dep: Deployment) -> None:
        self.dep = dep
        self.usable_bytes = int(dep.chip.hbm_bytes * dep.chip.usable_memory_fraction)
        self._stages = _distinct_stages(dep)

    def at(self, seq_len: Count, batch: Count, cached_tokens: Count) -> Memory:
        """Return the memory of a rank of the fullest stage for a context of ``seq_len`` tokens."""
        stages = [_stage_memory(self.dep, stage, seq_len, batch, cached_tokens) for stage in self._stages]
        fullest = stages[0]
        for stage in stages[1:]:
            fuller = stage.peak_bytes > fullest.peak_bytes
            fullest = Memory(*(_choose(fuller, getattr(stage, f), getattr(fullest, f)) for f in Memory.__slots__))
        return fullest

    def max_seq_len(self, batch: int, cached_tokens: int) -> int:
        """Return the longest context that still fits, 0 when none does."""
        return min(self._longest(stage, batch, cached_tokens) for stage in self._stages)

    def _longest(self, stage: _Stage, batch: int, cached_tokens: int) -> int:
        def spare(seq_len: int) -> int:
            peak: int = _stage_memory(self.dep, stage, seq_len, batch, cached_tokens).peak_bytes
            return self.usable_bytes - peak

        shortest = cached_tokens + 1 if self.dep.phase == "prefill" else 1
        if spare(shortest) < 0:
            return 0
        # Memory never falls with length, and it is linear in whole steps of the head-tail split: the steps that
        # fit follow from two of them, the rest of a step from bisection.
        step = 4 * self.dep.cp
        slope = spare(shortest) - spare(shortest + step)
        if slope == 0:
            return LONGEST_CONTEXT
        low = shortest + spare(shortest) // slope * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if spare(middle) >= 0 else (low, middle)
        return min(low, LONGEST_CONTEXT)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a pipeline stage holds, as far as memory is concerned.

    ``kv_elements`` per token by number of layers, ``block_elements`` per token of the largest ring block,
    ``width`` elements per token at the widest moment.
    """

    weight_bytes: int
    kv_elements: tuple[tuple[int, int], ...]
    block_elements: int
    width: int


def _choose(mask: Any, if_true: Count, if_false: Count) -> Count:
    if isinstance(mask, np.ndarray):
        return np.where(mask, if_true, if_false)
    return if_true if mask else if_false


def _distinct_stages(dep: Deployment) -> list[_Stage]:
    """Return the stages of a deployment, equal ones once."""
    kinds, sequence = dep.model.kinds
    elements = [kind.softmax.kv_elements(dep.tp) for kind in kinds]
    weights = [layer_weight_bytes(dep, kind) for kind in kinds]
    widths = [_widest(dep, kind) for kind in kinds]
    stages = []
    for number, layers in enumerate(stage_layers(dep.model.n_layers, dep.pp)):
        counts = Counter(sequence[layer] for layer in layers)
        edges = _edge_weight_bytes(dep, first=number == 0, last=number == dep.pp - 1)
        stages.append(
            _Stage(
                weight_bytes=edges + sum(n * weights[kind] for kind, n in counts.items()),
                kv_elements=tuple(sorted((elements[kind], n) for kind, n in counts.items())),
                block_elements=max(elements[kind] for kind in counts),
                width=2 * dep.model.hidden + max(widths[kind] for kind in counts),
            )
        )
    return list(dict.fromkeys(stages))


def layer_weight_bytes(dep: Deployment, kind: LayerKind) -> int:
    """Weight bytes of one layer on one rank; vectors, routers and convolutions are kept in the activation type."""
    shards = Shards(dep.tp, dep.ep or 1, dep.moe_tp or 1)
    return sum(_stored_bytes(dep, weight) for weight in layer_weights(dep.model.hidden, kind, shards))


def _stored_bytes(dep: Deployment, weight: Weight) -> int:
    dtype = {
        "attention": dep.dtype,
        "ffn": dep.ffn_dtype,
        "experts": dep.expert_dtype,
        "activation": dep.activation_dtype,
    }[weight.stored]
    return weight.n * matrix_bytes(weight.inputs, weight.outputs, dtype)


def _edge_weight_bytes(dep: Deployment, *, first: bool, last: bool) -> int:
    """Embedding table on the first stage; final norm and the rank's part of the head on the last."""
    model = dep.model
    total = matrix_bytes(model.vocab, model.hidden, dep.embedding_dtype) if first else 0
    if last:
        total += int(n_bytes(model.hidden * (1 + model.norm_bias), dep.activation_dtype))
        if not (first and model.tie_embeddings):
            total += matrix_bytes(model.hidden, ceil_div(model.vocab, dep.tp), dep.head_dtype)
    return total


def _stage_memory(dep: Deployment, stage: _Stage, seq_len: Count, batch: Count, cached_tokens: Count) -> Memory:
    rank_context = batch * ceil_div(seq_len, dep.cp)
    kv = sum(n * n_bytes(rank_context * elements, dep.kv_dtype) for elements, n in stage.kv_elements)
    nothing = 0 * rank_context  # gives every field the shape of the load
    if dep.phase == "decode":
        tokens, buffers = batch, nothing
    else:
        tokens = batch * ceil_div(seq_len - cached_tokens, dep.cp)
        block = batch * (build_load(dep, seq_len, batch, cached_tokens).context // dep.cp)
        buffers = (dep.cp - 1) * n_bytes(block * stage.block_elements, dep.kv_dtype)
    activations = n_bytes(tokens * stage.width, dep.activation_dtype)
    return Memory(stage.weight_bytes + nothing, kv, activations + nothing, buffers)


def _widest(dep: Deployment, kind: LayerKind) -> int:
    """Elements per token at the widest moment of a layer, beside the residual stream and its copy."""
    attention, tp = kind.softmax, dep.tp
    heads = attention.n_heads // tp
    kv_heads = attention.kv_heads(tp) if attention.kind == "gqa" else heads
    qkv = heads * attention.d_qk + kv_heads * (attention.d_qk + attention.d_v)
    if kind.ffn == "dense":
        return max(qkv, 2 * kind.d_ff // tp)
    assert kind.moe is not None
    return max(qkv, kind.moe.top_k * dep.model.hidden)
