"""Exact FLOPs and bytes of every compute op.

A compute op is a list of *parts*, one per kernel or fused group of kernels. A part counts multiply-adds as two
FLOPs; element-wise work (norms, rotary, activations, gates, convolutions, residual adds, quantisation of inputs) is
counted by its bytes alone. GEMM y[m, n] = x[m, k] w[k, n]: 2mnk FLOPs; bytes of x, w and y. Attention is in
`g5cp_vec.cost.attention`.
"""

from __future__ import annotations

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind, Moe
from g5cp_vec.cost.attention import absorbed_dims, attention_flops, attention_parts
from g5cp_vec.cost.linear import linear_parts
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.products import gemm, hidden_bytes, memory, sequence_tokens, touch
from g5cp_vec.mapping.load import Count, Load, ceil_div, computed_expert_rows, least

__all__ = ["absorbed_dims", "attention_flops", "edge_parts", "layer_parts"]


def layer_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Return the parts of every compute op of one layer on one rank, by the op's name in the cost keys."""
    dep = dep.of_layer(kind)
    parts: OpParts = {}
    if kind.softmax is not None:
        parts = attention_parts(dep, load, kind)
    elif kind.linear is not None:
        parts = linear_parts(dep, load, kind)
    if parts:
        parts["qkv"] = [_first_norm(dep, load, kind, "qkv"), *parts["qkv"]]
        parts["o_proj"] += _last_norm(dep, load, kind, "o_proj")
    if kind.ffn == "dense":
        norm = _network_norm(dep, load, kind, "ffn")
        parts["ffn"] = [norm, *_mlp(dep, kind, "ffn", load.rank_tokens, kind.d_ff // dep.tp, dep.ffn_dtype)]
        parts["ffn"] += _last_norm(dep, load, kind, "ffn")
    elif kind.moe is not None:
        parts |= _moe_parts(dep, load, kind, kind.moe)
    return parts


def edge_parts(dep: Deployment, load: Load) -> OpParts:
    """Return the parts of the embedding look-up and of the head (last token of each sequence)."""
    hidden = hidden_bytes(dep, load.rank_tokens)
    # One token of each sequence; in decode a rank holds just these.
    sequences = load.rank_tokens if dep.phase == "decode" else load.batch
    head = gemm(dep, "lm_head", sequences, dep.model.hidden, ceil_div(dep.model.vocab, dep.tp), dep.head_dtype)
    looked_up = n_bytes(load.rank_tokens * dep.model.hidden, dep.embedding_dtype)
    parts: OpParts = {
        "embed": [memory(dep, "embed", looked_up + hidden)],
        "lm_head": [memory(dep, "lm_head", 2 * hidden_bytes(dep, sequences)), *head],
    }
    if dep.pcp > 1:
        # Residual, update, sum and norm of all tokens; gathered hidden states are put back in order.
        parts["final_norm"] = [memory(dep, "lm_head", 4 * hidden)]
        parts["lm_head"].insert(0, memory(dep, "lm_head", 2 * dep.pcp * hidden))
    return parts


def _first_norm(dep: Deployment, load: Load, kind: LayerKind, name: str) -> Part:
    """Residual and update in, their sum and its norm out."""
    return memory(dep, name, 4 * hidden_bytes(dep, sequence_tokens(dep, load)))


def _network_norm(dep: Deployment, load: Load, kind: LayerKind, name: str) -> Part:
    """As the first; where both halves start from one norm, only the updates are added up: two in, one out."""
    n_passes = 3 if kind.norms == "parallel" else 4
    return memory(dep, name, n_passes * hidden_bytes(dep, sequence_tokens(dep, load)))


def _last_norm(dep: Deployment, load: Load, kind: LayerKind, name: str) -> list[Part]:
    """Norm of an update before it is added, where the model has one: in and out."""
    if kind.norms != "sandwich":
        return []
    return [memory(dep, name, 2 * hidden_bytes(dep, sequence_tokens(dep, load)))]


def _mlp(
    dep: Deployment, kind: LayerKind, name: str, tokens: Count, width: int, dtype: str, n_experts: Count = 1
) -> list[Part]:
    """Gate and up projection (or up alone), activation, down projection."""
    hidden, inner = dep.model.hidden, kind.n_inner
    return [
        *gemm(dep, name, tokens, hidden, inner * width, dtype, n_experts, width=width),
        touch(dep, name, (inner + 1) * tokens * width),
        *gemm(dep, name, tokens, width, hidden, dtype, n_experts, width=width),
    ]


def _moe_parts(dep: Deployment, load: Load, kind: LayerKind, moe: Moe) -> OpParts:
    assert dep.ep is not None
    assert dep.moe_tp is not None
    tokens = load.rank_tokens
    received = computed_expert_rows(dep, load)
    # Uniform routing spreads the rows over all local experts: no more are read than there are rows.
    touched = least(received, moe.n_experts // dep.ep)
    router = gemm(dep, "router", tokens, dep.model.hidden, moe.n_experts, dep.activation_dtype)
    width = moe.d_expert // dep.moe_tp
    parts = {
        "router": [_network_norm(dep, load, kind, "router"), *router],
        "experts": _mlp(dep, kind, "experts", received, width, dep.expert_dtype, touched),
    }
    parts["experts"] += _last_norm(dep, load, kind, "experts")
    if moe.n_shared:
        parts["shared"] = _mlp(dep, kind, "shared", tokens, moe.shared_width // dep.tp, dep.ffn_dtype)
        if moe.shared_gate:
            parts["shared"] += gemm(dep, "shared", tokens, dep.model.hidden, 1, dep.activation_dtype)
            parts["shared"].append(touch(dep, "shared", 2 * tokens * dep.model.hidden))
    return parts
