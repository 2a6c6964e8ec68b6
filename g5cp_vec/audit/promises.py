"""What a deployment promises: bytes between every two chips and FLOPs of every class, in closed form.

The formulas are written from the semantics of a simulation and not from the code that builds and prices operation
graphs, so that a mistake there does not repeat itself here. Everything amounts to unbounded Python integers. Work is
counted as often as it is done: padding, every replica, and what tensor-parallel shards compute alike.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from g5cp_vec.audit.messages import (
    Ints,
    Tokens,
    Traffic,
    all_reduce,
    between,
    everyone,
    gathered,
    halves,
    hidden_bytes,
    owners,
    promised_tokens,
    size_bytes,
    up,
)
from g5cp_vec.audit.mixers import promised_cp_traffic, promised_mixer_flops
from g5cp_vec.audit.sharded import is_sharded, sharded_traffic
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.layers import LayerKind

__all__ = ["promised_flops", "promised_tokens", "promised_traffic"]


def rank_table(dep: Deployment) -> Ints:
    """Return the chip of every rank, shape (dp, pp, cp, tp)."""
    sizes = {"dp": dep.dp, "pp": dep.pp, "cp": dep.cp * dep.pcp, "tp": dep.tp}
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
    held = chips[:, :, : owners(dep)]
    if dep.pp > 1:
        traffic.append(between(held[:, :-1], held[:, 1:], hidden_bytes(dep, tokens.per_rank)))
    if dep.pcp > 1:
        # Once a pass, before the head.
        last, message = np.moveaxis(held[:, -1], 1, -1), hidden_bytes(dep, tokens.per_rank)
        traffic.append(gathered(dep, "pcp", last, message))
    return traffic


def _layer(dep: Deployment, tokens: Tokens, kind: LayerKind, chips: Ints) -> list[Traffic]:
    """Traffic of one layer; ``chips`` of its stage, shape (dp, cp, tp)."""
    traffic: list[Traffic] = []
    if kind.softmax is not None and is_sharded(dep):
        traffic = sharded_traffic(dep, tokens, kind.softmax, chips)
    elif dep.cp * dep.pcp > 1:
        traffic = promised_cp_traffic(dep, tokens, kind, chips)
    busy = chips[:, : owners(dep)]
    if dep.tp > 1:
        # Once after attention, once after the FFN or the experts.
        n_halves = (kind.attention is not None) + (kind.ffn != "none")
        traffic += n_halves * all_reduce(dep, busy, hidden_bytes(dep, tokens.per_rank))
    if kind.ffn == "moe":
        # To experts, pcp ranks are replicas.
        pool = (1, 1, dep.dp * dep.pcp * dep.tp)
        traffic += _experts(dep, tokens, kind, busy.reshape(pool) if dep.pcp > 1 else busy)
    return traffic


def _expert_tokens(dep: Deployment, tokens: Tokens) -> int:
    """Rows of one message between two EP ranks: an ep-th of a rank's share of the routed tokens, in whole tokens."""
    assert dep.ep is not None
    (top_k,) = {kind.moe.top_k for kind in dep.model.layers if kind.moe is not None}
    return up(dep.dp * dep.pcp * tokens.per_rank * top_k, dep.ep**2)


def _experts(dep: Deployment, tokens: Tokens, kind: LayerKind, chips: Ints) -> list[Traffic]:
    assert dep.ep is not None
    assert dep.moe_tp is not None
    if dep.moe_dispatch == "all_gather":
        assert kind.moe is not None
        # Hidden states and logits of all replicas to the ranks of one place in them, sums of hidden states back.
        places = np.moveaxis(chips.reshape(dep.dp * dep.pcp, -1, dep.tp), 0, -1)
        logits = size_bytes(tokens.per_rank * kind.moe.n_experts, dep.activation_dtype)
        contributed = 2 * hidden_bytes(dep, tokens.per_rank) + logits
        return [gathered(dep, "ep", places, contributed)] if dep.dp * dep.pcp > 1 else []
    # Ranks in (dp, tp) order at each cp coordinate: moe_tp consecutive ones share an EP rank's experts.
    by_cp = np.moveaxis(chips, 1, 0).reshape(chips.shape[1], dep.ep, dep.moe_tp)
    traffic = []
    if dep.ep > 1:
        message = hidden_bytes(dep, _expert_tokens(dep, tokens))
        # There and back.
        traffic.append(everyone(np.moveaxis(by_cp, 1, -1), 2 * message))
    if dep.moe_tp > dep.tp:
        # Replicas whose ranks split an expert pool their tokens, each rank a tp-th of its replica's.
        traffic.append(halves(dep, "ep", by_cp, hidden_bytes(dep, up(tokens.per_rank, dep.tp))))
    return traffic


def promised_flops(dep: Deployment, tokens: Tokens) -> dict[str, int]:
    """Return the FLOPs of the whole deployment by class; two per multiply-add, element-wise work not counted."""
    model = dep.model
    # The last token of each sequence, by shards of the vocabulary of one size.
    # Every rank that holds tokens runs the head: for its own sequences in decode, for all of them in prefill.
    rows = dep.dp * owners(dep) * (tokens.per_rank if dep.phase == "decode" else tokens.batch)
    flops = Counter({"lm_head": 2 * rows * model.hidden * up(model.vocab, dep.tp) * dep.tp})
    for kind, n_layers in Counter(model.layers).items():
        layer = Counter(promised_mixer_flops(dep, tokens, kind))
        layer.update(_ffn_flops(dep, tokens, kind))
        for name, n in layer.items():
            flops[name] += n_layers * n
    return dict(flops)


def _ffn_flops(dep: Deployment, tokens: Tokens, kind: LayerKind) -> dict[str, int]:
    # Tokens that pad an owner's share count too.
    hidden, n = dep.model.hidden, dep.dp * owners(dep) * tokens.per_rank
    # SwiGLU: three matrices of hidden * width; two without a gate.
    per_element = 6 if kind.gated else 4
    if kind.ffn == "none":
        return {}
    if kind.ffn == "dense":
        return {"ffn": per_element * n * hidden * kind.d_ff}
    assert kind.moe is not None
    assert dep.ep is not None
    moe = kind.moe
    # At each cp coordinate that holds tokens, ep EP ranks receive messages from ep of them.
    pools = 1 if dep.pcp > 1 else owners(dep)
    routed = pools * dep.ep**2 * _expert_tokens(dep, tokens)
    if dep.moe_dispatch == "all_gather":
        routed = pools * dep.ep * up(dep.dp * dep.pcp * tokens.per_rank * moe.top_k, dep.ep)
    shared_width = moe.n_shared * (moe.d_shared if moe.d_shared else moe.d_expert)
    return {
        "router": 2 * n * hidden * moe.n_experts * dep.tp,
        "experts": per_element * routed * hidden * moe.d_expert,
        # Every shard computes the gate of all shared experts.
        "shared": n * hidden * (per_element * shared_width + 2 * dep.tp * moe.shared_gate),
    }
