"""Every weight of a layer, of the whole model or of one shard of it: what is counted, stored and multiplied with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.layers import LayerKind, Moe


class Shards(NamedTuple):
    """How a layer's weights are split: over tp, experts over ep, and each expert over moe_tp ranks."""

    tp: int = 1
    ep: int = 1
    moe_tp: int = 1


class Weight(NamedTuple):
    """``n`` matrices (or vectors, as one row) of ``inputs`` rows and ``outputs`` columns.

    Attributes
    ----------
    module : str
        What it belongs to: attention, linear, indexer, ffn, experts, shared, router, norms, embedding, head.
    stored : str
        Whose element type it is stored in: attention, o_proj, kv_b_proj, indexer, ffn, experts, embedding, head, or
        activation (vectors, norms, routers, convolutions).
    """

    module: str
    stored: str
    inputs: int
    outputs: int
    n: int = 1

    @property
    def elements(self) -> int:
        """Elements of all of them."""
        return self.inputs * self.outputs * self.n


WHOLE = Shards()


def layer_weights(hidden: int, kind: LayerKind, shards: Shards = WHOLE) -> Iterator[Weight]:
    """Yield the weights of one layer that one rank holds (everything, by default).

    What cannot be split is held by every rank: norms, routers, latent down-projections, indexers, biases of row-split
    projections, key/value heads fewer than ranks.
    """
    yield Weight("norms", "activation", 1, hidden * kind.n_norms * (1 + kind.norm_bias))
    if kind.softmax is not None:
        yield from _attention(hidden, kind.softmax, shards.tp)
    elif kind.linear is not None:
        yield from _linear(hidden, kind.linear, shards.tp)
    if kind.ffn == "dense":
        yield from _network(hidden, kind, "ffn", "ffn", kind.d_ff // shards.tp)
    elif kind.moe is not None:
        yield from _experts(hidden, kind, kind.moe, shards)


def _attention(hidden: int, a: Attention, tp: int) -> Iterator[Weight]:
    heads, kv_heads = a.n_heads // tp, a.kv_heads(tp)

    def matrix(inputs: int, outputs: int, n: int = 1) -> Weight:
        return Weight("attention", "attention", inputs, outputs, n)

    def vector(elements: int, module: str = "attention") -> Weight:
        return Weight(module, "activation", 1, elements)

    if a.kind == "gqa":
        query, key = heads * a.head_dim, kv_heads * a.head_dim
        query_and_gate = query * (1 + a.output_gate)
        yield matrix(hidden, query_and_gate)
        yield matrix(hidden, key, 2)
        biases = query_and_gate + 2 * key
        yield vector({"head": 2 * a.head_dim, "width": query + key}.get(a.qk_norm, 0), "norms")
    else:
        query, latent = heads * a.d_qk, a.kv_lora_rank + a.qk_rope_head_dim
        if a.q_lora_rank is None:
            yield matrix(hidden, query)
        else:
            yield matrix(hidden, a.q_lora_rank)
            yield matrix(a.q_lora_rank, query)
        yield matrix(hidden, latent)
        up = heads * (a.qk_nope_head_dim + a.v_head_dim)
        yield Weight("attention", "kv_b_proj", a.kv_lora_rank, up)
        biases = (a.q_lora_rank or 0) + latent
        yield vector(a.kv_lora_rank + (a.q_lora_rank or 0), "norms")
    yield Weight("attention", "o_proj", heads * a.d_v, hidden)
    yield vector(biases * a.qkv_bias + hidden * a.o_bias + heads * a.sinks)
    if a.scores is not None:
        # Each rank scores with all heads of the indexer: its choice must be the same on every rank.
        assert a.q_lora_rank is not None
        yield Weight("indexer", "indexer", a.q_lora_rank, a.scores.n_heads * a.scores.head_dim)
        yield Weight("indexer", "indexer", hidden, a.scores.head_dim)
        yield Weight("indexer", "activation", hidden, a.scores.n_heads)
        yield vector(2 * a.scores.head_dim, "indexer")


def _linear(hidden: int, m: Linear, tp: int) -> Iterator[Weight]:
    heads, key, value = m.n_heads // tp, m.key_width // tp, m.value_width // tp
    yield Weight("linear", "attention", hidden, 2 * key + 2 * value + m.n_scalars * heads)
    yield Weight("linear", "o_proj", value, hidden)
    yield Weight("linear", "activation", m.conv_width // tp, m.conv_kernel + m.conv_bias)
    # Decay and step biases (and the skip of mamba2), and the norm of the output: of one head, or of all.
    per_head = {"gated_delta_net": 2, "lightning": 0, "mamba2": 3}[m.kind]
    norm = m.value_head_dim if m.kind == "gated_delta_net" else value
    yield Weight("linear", "activation", 1, per_head * heads + norm)


def _network(hidden: int, kind: LayerKind, module: str, stored: str, width: int, n: int = 1) -> Iterator[Weight]:
    yield Weight(module, stored, hidden, width, n * kind.n_inner)
    yield Weight(module, stored, width, hidden, n)
    if kind.ffn_bias:
        yield Weight(module, "activation", 1, width * kind.n_inner + hidden, n)


def _experts(hidden: int, kind: LayerKind, moe: Moe, shards: Shards) -> Iterator[Weight]:
    yield Weight("router", "activation", hidden, moe.n_experts)
    if moe.router_bias:
        yield Weight("router", "activation", 1, moe.n_experts)
    width, n_local = moe.d_expert // shards.moe_tp, moe.n_experts // shards.ep
    yield from _network(hidden, kind, "experts", "experts", width, n_local)
    if moe.n_shared:
        yield from _network(hidden, kind, "shared", "ffn", moe.shared_width // shards.tp)
        if moe.shared_gate:
            yield Weight("shared", "activation", hidden, 1)
