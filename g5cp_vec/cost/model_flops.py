"""FLOPs the model needs, however it is split: no padding, no recomputation, no replication. The numerator of MFU."""

from __future__ import annotations

from collections import Counter, defaultdict

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import element_type
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.config.weights import layer_weights
from g5cp_vec.cost.attention import attended_dims
from g5cp_vec.cost.linear import linear_flops
from g5cp_vec.mapping.load import Count, Load, wide
from g5cp_vec.mapping.spans import doubled_pairs, visible_tokens


def model_flops(dep: Deployment, load: Load) -> dict[str, Count]:
    """Return the FLOPs of one forward pass over all replicas, by the element type they run in.

    Linear layers cost two FLOPs per weight and token; attention n_h (d_qk + d_v) per doubled pair of query and key that
    see each other, an indexer n_i (d_i + 1) per such pair of all; the head sees the last token of each sequence.
    """
    sequences = dep.dp * load.batch
    tokens = wide(sequences * load.new_unpadded)
    total: dict[str, Count] = defaultdict(int)
    kinds, sequence = dep.model.kinds
    for kind, n_layers in ((kinds[index], n) for index, n in Counter(sequence).items()):
        own = dep.of_layer(kind)
        stored = {
            "attention": own.dtype, "o_proj": own.o_proj_dtype, "kv_b_proj": own.kv_b_proj_dtype,
            "indexer": own.indexer_dtype, "ffn": own.ffn_dtype, "experts": own.expert_dtype,
        }  # fmt: skip
        for name, weights in _active_weights(dep, kind).items():
            dtype = element_type(stored.get(name, dep.activation_dtype))
            total[dtype] += n_layers * 2 * tokens * weights
        if kind.softmax is not None:
            for dtype, flops in _attention(dep, load, kind, kind.softmax).items():
                total[dtype] += n_layers * wide(sequences) * flops
        elif kind.linear is not None:
            total[dep.activation_dtype] += n_layers * linear_flops(kind.linear, tokens, kind.linear.n_heads)
    total[element_type(dep.head_dtype)] += 2 * wide(sequences) * dep.model.hidden * dep.model.vocab
    return dict(total)


def _active_weights(dep: Deployment, kind: LayerKind) -> dict[str, int]:
    """Weights of matrices that a token is multiplied with, by what they are stored as."""
    total: Counter[str] = Counter()
    for weight in layer_weights(dep.model.hidden, kind):
        if weight.inputs == 1 or (weight.module == "linear" and weight.stored == "activation"):
            continue  # vectors and convolutions are element-wise work
        n = weight.elements
        if weight.module == "experts":
            assert kind.moe is not None
            n = n // kind.moe.n_experts * kind.moe.top_k
        total[weight.stored] += n
    return dict(total)


def _attention(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> dict[str, Count]:
    """FLOPs per sequence."""
    context, width = load.new_unpadded + load.cached_unpadded, a.n_heads * sum(attended_dims(dep, kind))
    if dep.phase == "decode":
        context = load.cached_unpadded
        flops = {dep.activation_dtype: 2 * width * wide(visible_tokens(a, context))}
        scored = 2 * wide(context)
    else:
        flops = {dep.activation_dtype: width * doubled_pairs(a, load.cached_unpadded, context)}
        new = wide(load.new_unpadded)
        scored = new * (2 * wide(load.cached_unpadded) + new)
    if a.scores is not None:
        dtype = a.scores.dtype
        flops[dtype] = flops.get(dtype, 0) + a.scores.n_heads * (a.scores.head_dim + 1) * scored
    return flops
