"""FLOPs the model needs, however it is split: no padding, no recomputation, no replication. The numerator of MFU."""

from __future__ import annotations

from collections import Counter, defaultdict

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.model import LayerKind
from g5cp_vec.cost.flops import absorbed_dims
from g5cp_vec.mapping.load import Count, Load, wide


def model_flops(dep: Deployment, load: Load) -> dict[str, Count]:
    """Return the FLOPs of one forward pass over all replicas, by the element type they run in.

    Linear layers cost two FLOPs per weight and token; attention 2 n_h (d_qk + d_v) per pair of query and key, half
    of the pairs among new tokens being masked; the head sees the last token of each sequence.
    """
    sequences = dep.dp * load.batch
    tokens = wide(sequences * load.new_unpadded)
    total: dict[str, Count] = defaultdict(int)
    kinds, sequence = dep.model.kinds
    for kind, n_layers in ((kinds[index], n) for index, n in Counter(sequence).items()):
        total[dep.dtype] += n_layers * 2 * tokens * _projection_weights(dep, kind)
        total[dep.activation_dtype] += n_layers * _attention(dep, load, kind, sequences)
        if kind.ffn == "dense":
            total[dep.ffn_dtype] += n_layers * 2 * tokens * 3 * dep.model.hidden * kind.d_ff
        else:
            moe = kind.moe
            assert moe is not None
            active = 3 * dep.model.hidden * moe.d_expert * (moe.top_k + moe.n_shared)
            total[dep.ffn_dtype] += n_layers * 2 * tokens * active
            total[dep.activation_dtype] += n_layers * 2 * tokens * dep.model.hidden * moe.n_experts
    total[dep.activation_dtype] += 2 * wide(sequences) * dep.model.hidden * dep.model.vocab
    return dict(total)


def _projection_weights(dep: Deployment, kind: LayerKind) -> int:
    attention, hidden = kind.softmax, dep.model.hidden
    query, output = attention.n_heads * attention.d_qk, attention.n_heads * attention.d_v
    if attention.kind == "gqa":
        return hidden * (query + attention.n_kv_heads * (attention.d_qk + attention.d_v)) + output * hidden
    rank, latent = attention.q_lora_rank, attention.kv_lora_rank
    down_up = hidden * query if rank is None else (hidden + query) * rank
    heads_up = latent * attention.n_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    return down_up + hidden * (latent + attention.qk_rope_head_dim) + heads_up + output * hidden


def _attention(dep: Deployment, load: Load, kind: LayerKind, sequences: Count) -> Count:
    new, cached = wide(load.new_unpadded), wide(load.cached_unpadded)
    if dep.phase == "decode":
        d_qk, d_v = absorbed_dims(kind)
        return wide(sequences) * 2 * kind.softmax.n_heads * (d_qk + d_v) * cached
    widths = kind.softmax.d_qk + kind.softmax.d_v
    return wide(sequences) * kind.softmax.n_heads * widths * (2 * new * cached + new * new)
