"""What a deployment promises: bytes between every two chips and FLOPs of every class, in closed form.

The formulas are written from the semantics of a simulation and not from the code that builds and prices operation
graphs, so that a mistake there does not repeat itself here. Everything amounts to unbounded Python integers. Work is
counted as often as it is done: padding, every replica, and what tensor-parallel shards compute alike.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import DTYPE_BITS
from g5cp_vec.config.model import Attention, LayerKind

Ints = NDArray[np.int64]


class Tokens(NamedTuple):
    """Tokens of one forward pass, padded as the context-parallel split demands.

    Attributes
    ----------
    batch : int
        Sequences of one replica.
    new, cached : int
        Tokens per sequence that are computed and that were computed before.
    per_rank : int
        Tokens that projections and FFN of one rank see.
    """

    batch: int
    new: int
    cached: int
    per_rank: int


class Traffic(NamedTuple):
    """``n_bytes`` bytes from ``src[i]`` to ``dst[i]``, for every i."""

    src: Ints
    dst: Ints
    n_bytes: int


def promised_tokens(dep: Deployment, seq_len: int, batch: int, cached_tokens: int) -> Tokens:
    """Return the tokens of a pass over ``seq_len`` tokens of context, ``cached_tokens`` of them cached."""
    cp = dep.cp
    if dep.phase == "decode":
        return Tokens(batch, 1, _up(seq_len, cp) * cp, batch)
    new, cached = seq_len - cached_tokens, cached_tokens
    if cp > 1:
        # Two equal chunks per rank, a head and a tail one; the cache is shared out evenly.
        new, cached = _up(new, 2 * cp) * 2 * cp, _up(cached, cp) * cp
    return Tokens(batch, new, cached, batch * new // cp)


def rank_table(dep: Deployment) -> Ints:
    """Return the chip of every rank, shape (dp, pp, cp, tp)."""
    sizes = {"dp": dep.dp, "pp": dep.pp, "cp": dep.cp, "tp": dep.tp}
    stride, strides = 1, {}
    for axis in dep.rank_order:
        strides[axis] = stride
        stride *= sizes[axis]
    chips = np.zeros((1, 1, 1, 1), np.int64)
    for position, (axis, size) in enumerate(sizes.items()):
        shape = [1, 1, 1, 1]
        shape[position] = size
        chips = chips + (np.arange(size, dtype=np.int64) * strides[axis]).reshape(shape)
    return chips


def layers_of_stage(dep: Deployment, stage: int) -> range:
    """Return the layers of a pipeline stage: the first n_layers mod pp stages hold one more."""
    base, extra = dep.model.n_layers // dep.pp, dep.model.n_layers % dep.pp
    first = stage * base + min(stage, extra)
    return range(first, first + base + (1 if stage < extra else 0))


def promised_traffic(dep: Deployment, tokens: Tokens) -> list[Traffic]:
    """Return all traffic of the deployment; a pair of chips may occur in several entries."""
    chips = rank_table(dep)
    traffic = []
    for stage in range(dep.pp):
        kinds = Counter(dep.model.layers[layer] for layer in layers_of_stage(dep, stage))
        for kind, n_layers in kinds.items():
            traffic += [t._replace(n_bytes=t.n_bytes * n_layers) for t in _layer(dep, tokens, kind, chips[:, stage])]
    # In decode only the owners, cp coordinate 0, hold hidden states between layers.
    held = chips[:, :, :1] if dep.phase == "decode" else chips
    if dep.pp > 1:
        traffic.append(_traffic(held[:, :-1], held[:, 1:], _hidden_bytes(dep, tokens.per_rank)))
    return traffic


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _bytes(elements: int, dtype: str) -> int:
    return _up(elements * DTYPE_BITS[dtype], 8)


def _hidden_bytes(dep: Deployment, tokens: int) -> int:
    return _bytes(tokens * dep.model.hidden, dep.activation_dtype)


def _traffic(src: Ints, dst: Ints, n_bytes: int) -> Traffic:
    src, dst = np.broadcast_arrays(src, dst)
    return Traffic(src.ravel(), dst.ravel(), n_bytes)


def _around(groups: Ints, n_bytes: int) -> Traffic:
    """Send from every member to the next; the members lie along the last axis."""
    return _traffic(groups, np.roll(groups, -1, axis=-1), n_bytes)


def _everyone(groups: Ints, n_bytes: int) -> Traffic:
    """Send from every member to every other; the members lie along the last axis."""
    size = groups.shape[-1]
    sender, receiver = np.nonzero(~np.eye(size, dtype=bool))
    return _traffic(groups[..., sender], groups[..., receiver], n_bytes)


def _halves(dep: Deployment, groups: Ints, n_bytes: int) -> Traffic:
    """Reduce-scatter and all-gather, each member owning ``n_bytes`` of the result."""
    if dep.collective == "direct":
        return _everyone(groups, 2 * n_bytes)
    return _around(groups, 2 * (groups.shape[-1] - 1) * n_bytes)


def _layer(dep: Deployment, tokens: Tokens, kind: LayerKind, chips: Ints) -> list[Traffic]:
    """Traffic of one layer; ``chips`` of its stage, shape (dp, cp, tp)."""
    traffic = _attention(dep, tokens, kind.softmax, chips) if dep.cp > 1 else []
    busy = chips[:, :1] if dep.phase == "decode" else chips
    if dep.tp > 1:
        chunk = _up(_hidden_bytes(dep, tokens.per_rank), dep.tp)
        # Once after attention, once after the FFN or the experts.
        traffic += 2 * [_halves(dep, busy, chunk)]
    if kind.ffn == "moe":
        traffic += _experts(dep, tokens, busy)
    return traffic


def _attention(dep: Deployment, tokens: Tokens, attention: Attention, chips: Ints) -> list[Traffic]:
    if dep.phase == "prefill":
        cached = _kv_heads(dep, attention) // dep.tp * 2 * attention.head_dim
        if attention.kind == "mla":
            cached = attention.kv_lora_rank + attention.qk_rope_head_dim
        block = _bytes(tokens.batch * ((tokens.new + tokens.cached) // dep.cp) * cached, dep.kv_dtype)
        return [_around(np.moveaxis(chips, 1, -1), (dep.cp - 1) * block)]
    rows = tokens.batch * attention.n_heads // dep.tp
    query, output = _decode_widths(attention)
    owner, others = chips[:, :1], chips[:, 1:]
    # An output comes with the maximum and the denominator of each head's softmax.
    return [
        _traffic(owner, others, _bytes(rows * query, dep.activation_dtype)),
        _traffic(others, owner, _bytes(rows * (output + 2), dep.activation_dtype)),
    ]


def _expert_tokens(dep: Deployment, tokens: Tokens) -> int:
    """Rows of one message between two EP ranks: an ep-th of a rank's share of the routed tokens, in whole tokens."""
    assert dep.model.moe is not None
    assert dep.ep is not None
    return _up(dep.dp * tokens.per_rank * dep.model.moe.top_k, dep.ep**2)


def _experts(dep: Deployment, tokens: Tokens, chips: Ints) -> list[Traffic]:
    assert dep.ep is not None
    assert dep.moe_tp is not None
    # Ranks in (dp, tp) order at each cp coordinate: moe_tp consecutive ones share an EP rank's experts.
    by_cp = np.moveaxis(chips, 1, 0).reshape(chips.shape[1], dep.ep, dep.moe_tp)
    traffic = []
    if dep.ep > 1:
        message = _hidden_bytes(dep, _expert_tokens(dep, tokens))
        # There and back.
        traffic.append(_everyone(np.moveaxis(by_cp, 1, -1), 2 * message))
    if dep.moe_tp > dep.tp:
        # Replicas whose ranks split an expert pool their tokens, each rank a tp-th of its replica's.
        traffic.append(_halves(dep, by_cp, _hidden_bytes(dep, _up(tokens.per_rank, dep.tp))))
    return traffic


def _kv_heads(dep: Deployment, attention: Attention) -> int:
    """Key/value heads of all shards together: at least one each."""
    return max(attention.n_kv_heads, dep.tp)


def _decode_widths(attention: Attention) -> tuple[int, int]:
    """Elements per head of a decode query and output; with latents, the projections are absorbed into them."""
    if attention.kind == "gqa":
        return attention.head_dim, attention.head_dim
    return attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank


def promised_flops(dep: Deployment, tokens: Tokens) -> dict[str, int]:
    """Return the FLOPs of the whole deployment by class; two per multiply-add, element-wise work not counted."""
    model = dep.model
    # The last token of each sequence, by shards of the vocabulary of one size.
    # Every rank that holds tokens runs the head: the whole cp group in prefill, its owner in decode.
    heads = dep.cp if dep.phase == "prefill" else 1
    flops = Counter({"lm_head": 2 * dep.dp * heads * tokens.batch * model.hidden * _up(model.vocab, dep.tp) * dep.tp})
    for kind, n_layers in Counter(model.layers).items():
        layer = Counter(_projection_flops(dep, tokens, kind.softmax))
        layer.update(_attention_flops(dep, tokens, kind.softmax))
        layer.update(_ffn_flops(dep, tokens, kind))
        for name, n in layer.items():
            flops[name] += n_layers * n
    return dict(flops)


def _computed(dep: Deployment, tokens: Tokens) -> int:
    """Tokens that the deployment computes, of all replicas, each once."""
    return dep.dp * tokens.batch * tokens.new


def _projection_flops(dep: Deployment, tokens: Tokens, attention: Attention) -> dict[str, int]:
    n, hidden, heads = _computed(dep, tokens), dep.model.hidden, attention.n_heads
    if attention.kind == "gqa":
        width = (heads + 2 * _kv_heads(dep, attention)) * attention.head_dim
        return {"qkv": 2 * n * hidden * width, "o_proj": 2 * n * heads * attention.head_dim * hidden}
    rank, nope, v = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim
    query = heads * (nope + attention.qk_rope_head_dim)
    # Every shard projects down to the whole latents; only the heads are split.
    down = dep.tp * hidden * (rank + attention.qk_rope_head_dim)
    q_rank = attention.q_lora_rank
    up = hidden * query if q_rank is None else dep.tp * hidden * q_rank + q_rank * query
    flops = {"qkv": 2 * n * (down + up), "o_proj": 2 * n * heads * v * hidden}
    if dep.phase == "decode":
        return flops | {"q_absorb": 2 * n * heads * nope * rank, "v_up": 2 * n * heads * rank * v}
    # Each of the cp ranks of a ring projects every token of the context up.
    context = dep.dp * tokens.batch * (tokens.new + tokens.cached)
    return flops | {"kv_up": 2 * dep.cp * context * rank * heads * (nope + v)}


def _attention_flops(dep: Deployment, tokens: Tokens, attention: Attention) -> dict[str, int]:
    sequences = dep.dp * tokens.batch * attention.n_heads
    if dep.phase == "decode":
        return {"attention": 2 * sequences * sum(_decode_widths(attention)) * tokens.cached}
    width = 2 * attention.head_dim
    if attention.kind == "mla":
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
    # Causal: T P + T^2 / 2 pairs of tokens.
    return {"attention": sequences * width * tokens.new * (2 * tokens.cached + tokens.new)}


def _ffn_flops(dep: Deployment, tokens: Tokens, kind: LayerKind) -> dict[str, int]:
    model, n = dep.model, _computed(dep, tokens)
    # SwiGLU: three matrices of hidden * width.
    if kind.ffn == "dense":
        return {"ffn": 6 * n * model.hidden * kind.d_ff}
    assert model.moe is not None
    assert dep.ep is not None
    # At each cp coordinate that holds tokens, ep EP ranks receive messages from ep of them.
    holders = dep.cp if dep.phase == "prefill" else 1
    routed = holders * dep.ep**2 * _expert_tokens(dep, tokens)
    return {
        "router": 2 * n * model.hidden * model.moe.n_experts * dep.tp,
        "experts": 6 * routed * model.hidden * model.moe.d_expert,
        "shared": 6 * n * model.hidden * model.moe.n_shared * model.moe.d_expert,
    }
