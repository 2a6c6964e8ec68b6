"""What a layer's attention promises: FLOPs by class, and bytes between the ranks of a context-parallel group.

Written from what each kind of attention sees, query by query and interval by interval.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.audit.messages import (
    Ints,
    Tokens,
    Traffic,
    around,
    between,
    everyone,
    gathered,
    key_bytes,
    owners,
    size_bytes,
    up,
)
from g5cp_vec.audit.sharded import attention_flops, handed_over_traffic, is_sharded
from g5cp_vec.audit.sharded_sparse import attended_pairs_twice, scored_pairs_twice
from g5cp_vec.config.attention import Attention, Indexer, Linear
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.layers import LayerKind

Interval = tuple[int, int]


def promised_mixer_flops(dep: Deployment, tokens: Tokens, kind: LayerKind) -> dict[str, int]:
    """Return the FLOPs of one layer's attention, of the whole deployment, by class."""
    if isinstance(kind.attention, Linear):
        return _linear_flops(dep, tokens, kind.attention)
    if kind.attention is None:
        return {}
    a = kind.attention
    flops = _gqa_projections(dep, tokens, a) if a.kind == "gqa" else _latent_projections(dep, tokens, a)
    if is_sharded(dep) and a.indexer is not None:
        twice = attended_pairs_twice(dep, tokens, a, _seen_twice(dep, tokens, a))
        flops["attention"] = dep.dp * tokens.batch * a.n_heads * sum(_widths(dep, a)) * twice
    elif is_sharded(dep):
        flops |= attention_flops(dep, tokens, a)
    else:
        # In decode every owner's sequences, those that pad its share too; in prefill the batch, split as it may be.
        sequences = owners(dep) * tokens.per_rank if dep.phase == "decode" else tokens.batch
        heads = dep.dp * sequences * a.n_heads
        flops["attention"] = heads * sum(_widths(dep, a)) * _seen_twice(dep, tokens, a)
    if a.indexer is not None and not a.indexer.shared:
        flops["indexer"] = _indexer_flops(dep, tokens, a, a.indexer)
    return flops


def _computed(dep: Deployment, tokens: Tokens) -> int:
    """Tokens that the deployment computes, of all replicas, as often as it does, and what pads an owner's share."""
    return dep.dp * owners(dep) * tokens.per_rank


def _kv_heads(dep: Deployment, a: Attention) -> int:
    """Key/value heads of all shards together: at least one each."""
    return max(a.n_kv_heads, dep.tp)


def _attends_latents(dep: Deployment, a: Attention) -> bool:
    return a.kind == "mla" and (dep.phase == "decode" or a.indexer is not None)


def _widths(dep: Deployment, a: Attention) -> tuple[int, int]:
    """Elements per head of a query and of an output; with latents, the projections are absorbed into them."""
    if a.kind == "gqa":
        return a.head_dim, a.head_dim
    if _attends_latents(dep, a):
        return a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank
    return a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim


def _gqa_projections(dep: Deployment, tokens: Tokens, a: Attention) -> dict[str, int]:
    n, hidden = _computed(dep, tokens), dep.model.hidden
    heads = a.n_heads * (2 if a.output_gate else 1) + 2 * _kv_heads(dep, a)
    return {"qkv": 2 * n * hidden * heads * a.head_dim, "o_proj": 2 * n * a.n_heads * a.head_dim * hidden}


def _latent_projections(dep: Deployment, tokens: Tokens, a: Attention) -> dict[str, int]:
    n, hidden, heads = _computed(dep, tokens), dep.model.hidden, a.n_heads
    rank, nope, v = a.kv_lora_rank, a.qk_nope_head_dim, a.v_head_dim
    query = heads * (nope + a.qk_rope_head_dim)
    # Every shard projects down to the whole latents; only the heads are split.
    down = dep.tp * hidden * (rank + a.qk_rope_head_dim)
    q_rank = a.q_lora_rank
    up_q = hidden * query if q_rank is None else dep.tp * hidden * q_rank + q_rank * query
    flops = {"qkv": 2 * n * (down + up_q), "o_proj": 2 * n * heads * v * hidden}
    if _attends_latents(dep, a):
        return flops | {"q_absorb": 2 * n * heads * nope * rank, "v_up": 2 * n * heads * rank * v}
    if dep.cp > 1 and (a.window is not None or a.chunk is not None):
        # A rank projects up its own tokens, and what it needs of others.
        rows = tokens.new + sum(sum(_halo(dep, tokens, a, rank)) for rank in range(dep.cp))
    else:
        # Each of the cp ranks of a ring projects every token up that any query sees.
        rows = dep.cp * dep.pcp * (tokens.new + tokens.cached - _first_seen(a, tokens.cached))
    return flops | {"kv_up": 2 * dep.dp * tokens.batch * rows * rank * heads * (nope + v)}


def _first_seen(a: Attention, position: int) -> int:
    """First key that the query at a position sees."""
    if a.window is not None:
        return max(0, position + 1 - a.window)
    return position - position % a.chunk if a.chunk is not None else 0


def _seen_twice(dep: Deployment, tokens: Tokens, a: Attention) -> int:
    """Twice the number of keys seen by the queries of a sequence, summed over them."""
    limit = a.window if a.indexer is None else a.indexer.top_k
    if dep.phase == "decode":
        seen = tokens.context
        if a.chunk is not None:
            seen -= (seen - 1) // a.chunk * a.chunk
        elif limit is not None:
            seen = min(seen, limit)
        return 2 * dep.cp * up(seen, dep.cp)
    first, last = tokens.cached, tokens.cached + tokens.new
    if a.chunk is not None:
        # Chunk by chunk, a query sees all before it in its chunk, and half of itself.
        total = 0
        for begin in range(first - first % a.chunk, last, a.chunk):
            total += (min(last, begin + a.chunk) - begin) ** 2 - (max(first, begin) - begin) ** 2
        return total
    # The n queries whose keys are not cut off see 2a + 1 halves each, the others twice the limit.
    n = tokens.new if limit is None else min(max(limit - first, 0), tokens.new)
    return n * (2 * first + n) + (tokens.new - n) * 2 * (limit or 0)


def _indexer_flops(dep: Deployment, tokens: Tokens, a: Attention, indexer: Indexer) -> int:
    """Projections and scores; every tensor-parallel shard does all of them."""
    assert a.q_lora_rank is not None
    hidden, width = dep.model.hidden, indexer.n_heads * indexer.head_dim
    projected = a.q_lora_rank * width + hidden * indexer.head_dim + hidden * indexer.n_heads
    # A product of head_dim elements and a weight, per head and pair.
    per_pair = indexer.n_heads * (indexer.head_dim + 1)
    if is_sharded(dep):
        scored = dep.dp * tokens.batch * scored_pairs_twice(dep, tokens) * per_pair
        return dep.tp * 2 * _computed(dep, tokens) * projected + scored
    if dep.phase == "decode":
        # One query a sequence, those that pad an owner's share too.
        scored = _computed(dep, tokens) * 2 * tokens.context * per_pair
    else:
        scored = dep.dp * tokens.batch * tokens.new * (2 * tokens.cached + tokens.new) * per_pair
    return dep.tp * (2 * _computed(dep, tokens) * projected + scored)


def _linear_flops(dep: Deployment, tokens: Tokens, m: Linear) -> dict[str, int]:
    n, hidden = _computed(dep, tokens), dep.model.hidden
    keys, values = m.n_key_heads * m.key_head_dim, m.n_heads * m.value_head_dim
    scalars = {"gated_delta_net": 2, "mamba2": 1, "lightning": 0}[m.kind] * m.n_heads
    # Into the state and out of it, and once more to find what is to be replaced.
    is_delta = m.kind == "gated_delta_net"
    per_product = 2 * m.n_heads * m.key_head_dim * m.value_head_dim
    flops = {
        "qkv": 2 * n * hidden * (2 * keys + 2 * values + scalars),
        "attention": (3 if is_delta else 2) * n * per_product,
        "o_proj": 2 * n * values * hidden,
    }
    if dep.pcp > 1 and dep.phase == "prefill":
        # Once for the state and what becomes of one before; again on all ranks but the first, and for outputs.
        per_rank = n // dep.pcp
        transitions = 4 * m.n_heads * m.key_head_dim**2
        flops["states"] = n * (2 * per_product + transitions)
        flops["combine"] = dep.pcp * (dep.pcp - 1) * dep.dp * tokens.batch * per_product * m.key_head_dim
        flops["attention"] = (n + 2 * (n - per_rank)) * per_product
    if dep.cp > 1 and dep.phase == "prefill":
        flops["states"] = (2 if is_delta else 1) * n * per_product
        if is_delta:
            # Transitions are states as wide as keys; a rank applies all but the last to what comes before.
            flops["states"] += 2 * n * 2 * m.n_heads * m.key_head_dim**2
            n_applied = dep.cp * (2 * dep.cp - 1) * dep.dp * tokens.batch
            flops["combine"] = n_applied * per_product * m.key_head_dim
    return flops


def promised_cp_traffic(dep: Deployment, tokens: Tokens, kind: LayerKind, chips: Ints) -> list[Traffic]:
    """Return the traffic of one layer's attention; ``chips`` of its stage, shape (dp, cp, tp)."""
    if isinstance(kind.attention, Linear):
        return _linear_traffic(dep, tokens, kind.attention, chips) if dep.phase == "prefill" else []
    return [] if kind.attention is None else _attention_traffic(dep, tokens, kind.attention, chips)


def _linear_traffic(dep: Deployment, tokens: Tokens, m: Linear, chips: Ints) -> list[Traffic]:
    """Last taps from chunk to chunk, and everyone's two states with their transitions to everyone."""
    if dep.cp == 1:
        return handed_over_traffic(dep, tokens, m, chips) if dep.pcp > 1 else []
    heads, keys = m.n_heads // dep.tp, m.n_key_heads // dep.tp * m.key_head_dim
    per_head = m.key_head_dim * m.value_head_dim
    per_head += m.key_head_dim * m.key_head_dim if m.kind == "gated_delta_net" else 1
    two_states = 2 * size_bytes(tokens.batch * heads * per_head, m.state_dtype)
    groups = np.moveaxis(chips, 1, -1)
    traffic = [gathered(dep, "cp", groups, two_states)]
    if m.conv_kernel > 1:
        channels = 2 * keys + heads * m.value_head_dim
        taps = size_bytes(tokens.batch * (m.conv_kernel - 1) * channels, dep.activation_dtype)
        holder = [*range(dep.cp), *reversed(range(dep.cp))]
        for src, dst in zip(holder, holder[1:], strict=False):
            if src != dst:
                traffic.append(between(chips[:, src], chips[:, dst], taps))
    return traffic


def _attention_traffic(dep: Deployment, tokens: Tokens, a: Attention, chips: Ints) -> list[Traffic]:
    per_token = _kv_heads(dep, a) // dep.tp * 2 * a.head_dim
    if a.kind == "mla":
        per_token = a.kv_lora_rank + a.qk_rope_head_dim
    choice = a.indexer if a.indexer is not None and not a.indexer.shared else None
    groups = np.moveaxis(chips, 1, -1)
    if dep.decode_form == "pass_q_ring":
        rows = tokens.per_rank * a.n_heads // dep.tp
        query, output = _widths(dep, a)
        chosen = 4 * tokens.per_rank * choice.top_k if choice is not None else 0
        # To its owner goes an output with its log-sum-exp in fp32.
        return [
            around(groups, (dep.cp - 1) * (size_bytes(rows * query, dep.activation_dtype) + chosen)),
            everyone(groups, size_bytes(rows * output, dep.activation_dtype) + 4 * rows),
        ]
    if dep.phase == "decode":
        rows = tokens.batch * a.n_heads // dep.tp
        query, output = _widths(dep, a)
        chosen = 4 * tokens.batch * choice.top_k if choice is not None else 0
        owner, others = chips[:, :1], chips[:, 1:]
        # An output comes with the maximum and the denominator of each head's softmax.
        return [
            between(owner, others, size_bytes(rows * query, dep.activation_dtype) + chosen),
            between(others, owner, size_bytes(rows * (output + 2), dep.activation_dtype)),
        ]
    size = dep.cp * dep.pcp
    block = tokens.batch * ((tokens.new + tokens.cached) // size)
    block_bytes = size_bytes(block * per_token, dep.kv_dtype)
    if a.indexer is not None:
        if choice is not None:
            block_bytes += block * key_bytes(choice)
        return [gathered(dep, "cp", groups, block_bytes)]
    if a.window is None and a.chunk is None:
        return [around(groups, (size - 1) * block_bytes)]
    traffic = []
    for dst in range(dep.cp):
        for src, n in enumerate(_halo(dep, tokens, a, dst)):
            if src != dst:
                message = size_bytes(tokens.batch * n * per_token, dep.kv_dtype)
                traffic.append(between(chips[:, src], chips[:, dst], message))
    return traffic


def _halo(dep: Deployment, tokens: Tokens, a: Attention, dst: int) -> list[int]:
    """Tokens that a rank needs of each rank's chunks and share of the cache; of its own, the share of the cache."""
    needed = [_needed(dep, tokens, a, chunk) for chunk in (dst, 2 * dep.cp - 1 - dst)]
    n = [up(_shared(needed, (0, tokens.cached)), dep.cp)] * dep.cp
    for src in range(dep.cp):
        if src != dst:
            held = [_queries(dep, tokens, chunk) for chunk in (src, 2 * dep.cp - 1 - src)]
            n[src] += sum(_shared(needed, interval) for interval in held)
    return n


def _queries(dep: Deployment, tokens: Tokens, chunk: int) -> Interval:
    """Positions of the chunk's tokens."""
    length = tokens.new // (2 * dep.cp)
    return tokens.cached + chunk * length, tokens.cached + (chunk + 1) * length


def _needed(dep: Deployment, tokens: Tokens, a: Attention, chunk: int) -> Interval:
    """Positions before a chunk that its queries see: as many as the first of them does."""
    first, _ = _queries(dep, tokens, chunk)
    return _first_seen(a, first), first


def _shared(needed: list[Interval], held: Interval) -> int:
    """Positions of an interval in the union of two others."""

    def length(*intervals: Interval) -> int:
        return max(0, min(end for _, end in intervals) - max(begin for begin, _ in intervals))

    one, other = needed
    return length(one, held) + length(other, held) - length(one, other, held)
