"""From the keys of a family to its layers, as the modelling code of transformers builds them.

Every function takes the keys and returns a table with ``layer``, a list with one table a layer, and what differs from
Llama in the model as a whole.
"""

from __future__ import annotations

from typing import Any

from g5cp_vec.config.huggingface import blocks
from g5cp_vec.config.huggingface.blocks import CHUNKED, FULL, SLIDING, Table, n_layers
from g5cp_vec.config.huggingface.source import MOST_LAYERS, Keys


def llama(keys: Keys) -> Table:
    """Llama 2 and 3, and the many models built like them."""
    bias = keys.flag("attention_bias")
    attention = blocks.grouped(keys, qkv_bias=bias, o_bias=bias)
    n = n_layers(keys)
    blocks.spans(keys, [FULL] * n, (FULL,))
    return {"layer": blocks.stacked([attention] * n, [blocks.dense(keys)] * n), "ffn_bias": keys.flag("mlp_bias")}


def mistral(keys: Keys) -> Table:
    """Mistral, Ministral and Phi-3: one window for all layers, or none."""
    n = n_layers(keys)
    everywhere = SLIDING if keys.optional("sliding_window") is not None else FULL
    types = blocks.spans(keys, [everywhere] * n, (FULL, SLIDING))
    attention = blocks.windowed(keys, blocks.grouped(keys), types)
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n)}


def mixtral(keys: Keys) -> Table:
    """Mixtral: Mistral with experts."""
    moe = blocks.experts(keys, "num_local_experts", "intermediate_size")
    layers = mistral(keys)["layer"]
    return {"layer": [{"attention": layer["attention"], **moe} for layer in layers]}


def _qwen_spans(keys: Keys, n: int) -> Any:
    """Return the spans of Qwen's layers: a window from ``max_window_layers`` on, where it is used at all."""
    default = [FULL] * n
    if keys.flag("use_sliding_window") and keys.optional("sliding_window") is not None:
        first = keys.count("max_window_layers", least=0)
        default = [SLIDING if i >= first else FULL for i in range(n)]
    return blocks.spans(keys, default)


def sparse_steps(keys: Keys, n: int, moe: Table) -> list[Table]:
    """Return Qwen's networks: experts in every ``decoder_sparse_step``-th layer but ``mlp_only_layers``."""
    step, plain = keys.count("decoder_sparse_step", null=1), keys.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(i) is int and 0 <= i < n for i in plain):
        keys.wrong("mlp_only_layers", f"a list of layers from 0 to {n - 1}")
    kinds = [i not in plain and (i + 1) % step == 0 for i in range(n)]
    dense = {} if all(kinds) else blocks.dense(keys)
    return [moe if sparse else dense for sparse in kinds]


def qwen2(keys: Keys) -> Table:
    """Qwen2 and Qwen2.5."""
    n = n_layers(keys)
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=True), _qwen_spans(keys, n))
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n)}


def qwen_shared(keys: Keys) -> Table:
    """Return Qwen's one shared expert with a gate of its own."""
    width = keys.count("shared_expert_intermediate_size")
    return {"n_shared": 1, "d_shared": width, "shared_gate": True}


def qwen2_moe(keys: Keys) -> Table:
    """Qwen2-MoE: a shared expert with a gate of its own."""
    n = n_layers(keys)
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=keys.flag("qkv_bias")), _qwen_spans(keys, n))
    moe = blocks.experts(keys, "num_experts", "moe_intermediate_size", **qwen_shared(keys))
    return {"layer": blocks.stacked(attention, sparse_steps(keys, n, moe))}


def qwen3_attention(keys: Keys, **more: Any) -> Table:
    """Return the attention of Qwen3 and its successors; `more` are fields that the family decides."""
    bias = keys.flag("attention_bias")
    return blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm="head", **more)


def qwen3(keys: Keys) -> Table:
    """Qwen3: norms of queries and keys."""
    n = n_layers(keys)
    attention = blocks.windowed(keys, qwen3_attention(keys), _qwen_spans(keys, n))
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n)}


def qwen3_moe(keys: Keys) -> Table:
    """Qwen3-MoE."""
    n = n_layers(keys)
    # Its class has no max_window_layers: a window that is used is everywhere.
    used = keys.flag("use_sliding_window") and keys.optional("sliding_window") is not None
    types = blocks.spans(keys, [SLIDING if used else FULL] * n)
    attention = blocks.windowed(keys, qwen3_attention(keys), types)
    moe = blocks.experts(keys, "num_experts", "moe_intermediate_size")
    return {"layer": blocks.stacked(attention, sparse_steps(keys, n, moe))}


def llama4(keys: Keys) -> Table:
    """Llama 4: chunks, but in every fourth layer, which has no positions; experts in every layer or every other."""
    n = n_layers(keys)
    roped = keys.listing("no_rope_layers", n, (0, 1)) if keys.raw("no_rope_layers") else None
    if roped is None:
        roped = blocks.every(n, keys.count("no_rope_layer_interval"), 0, 1)
    chunk = keys.optional("attention_chunk_size")
    types = blocks.spans(keys, [CHUNKED if r and chunk else FULL for r in roped], (CHUNKED, FULL))
    if CHUNKED in types and chunk is None:
        keys.refuse("attention_chunk_size", "missing, but layer_types has chunked attention")
    bias, norm = keys.flag("attention_bias"), "unweighted" if keys.flag("use_qk_norm") else "none"
    plain = blocks.grouped(keys, qkv_bias=bias, o_bias=bias)
    attention = [
        {**plain, **({"qk_norm": norm} if r else {"rope_dim": 0}), **({"chunk": chunk} if kind == CHUNKED else {})}
        for r, kind in zip(roped, types, strict=True)
    ]
    moe = blocks.experts(keys, "num_local_experts", "intermediate_size", n_shared=1)
    listed, step = keys.raw("moe_layers"), keys.count("interleave_moe_layer_step")
    if listed is not None and (not isinstance(listed, list) or not all(type(i) is int and 0 <= i < n for i in listed)):
        keys.wrong("moe_layers", f"a list of layers from 0 to {n - 1}")
    sparse = set(range(step - 1, n, step) if listed is None else listed)
    plain_ffn = {} if len(sparse) == n else blocks.dense(keys, "intermediate_size_mlp")
    return {"layer": blocks.stacked(attention, [moe if i in sparse else plain_ffn for i in range(n)])}


def glm(keys: Keys) -> Table:
    """GLM-4-9B."""
    n = n_layers(keys)
    attention = blocks.grouped(keys, qkv_bias=keys.flag("attention_bias"))
    return {"layer": blocks.stacked([attention] * n, [blocks.dense(keys)] * n)}


def glm4(keys: Keys) -> Table:
    """GLM-4-0414 and the text part of GLM-4.1V: norms on both sides of each half."""
    return glm(keys) | {"norms": "sandwich"}


def glm4_moe(keys: Keys) -> Table:
    """GLM-4.5 to 4.7."""
    n = n_layers(keys)
    norm = "head" if keys.flag("use_qk_norm") else "none"
    attention = blocks.grouped(keys, qkv_bias=keys.flag("attention_bias"), qk_norm=norm)
    shared = blocks.shared_experts(keys)
    moe = blocks.experts(keys, "n_routed_experts", "moe_intermediate_size", router_bias=True, **shared)
    return {"layer": blocks.stacked([attention] * n, blocks.first_dense(keys, n, moe))}


def chatglm(keys: Keys) -> Table:
    """GLM-4-9B as it was first published; its code comes with the checkpoint."""
    for key, value in (("rmsnorm", True), ("post_layer_norm", True), ("multi_query_attention", True)):
        if keys.flag(key) is not value:
            keys.refuse(key, f"only {str(value).lower()} is modelled")
    n = keys.count("num_layers", most=MOST_LAYERS)
    heads, groups = keys.count("num_attention_heads"), keys.count("multi_query_group_num")
    if heads % groups:
        keys.refuse("multi_query_group_num", f"{groups} does not divide num_attention_heads = {heads}")
    bias = keys.flag("add_bias_linear")
    width = keys.count("kv_channels")
    attention = {"kind": "gqa", "n_heads": heads, "n_kv_heads": groups, "head_dim": width}
    attention |= {"rope_dim": width // 2, "qkv_bias": keys.flag("add_qkv_bias") or bias, "o_bias": bias}
    layers = blocks.stacked([attention] * n, [blocks.dense(keys, "ffn_hidden_size")] * n)
    return {"layer": layers, "ffn_bias": bias, "vocab": keys.count("padded_vocab_size")}


def gpt_oss(keys: Keys) -> Table:
    """gpt-oss: sinks, a window in every other layer, biases everywhere."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    types = blocks.spans(keys, blocks.every(n, 2, FULL, SLIDING))
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=bias, o_bias=bias, sinks=True), types)
    moe = blocks.experts(keys, "num_local_experts", "intermediate_size", router_bias=True)
    return {"layer": blocks.stacked(attention, [moe] * n), "ffn_bias": True}


def gemma(keys: Keys) -> Table:
    """Gemma 1."""
    bias = keys.flag("attention_bias")
    attention, n = blocks.grouped(keys, qkv_bias=bias, o_bias=bias), n_layers(keys)
    return {"layer": blocks.stacked([attention] * n, [blocks.dense(keys)] * n)}


def gemma2(keys: Keys) -> Table:
    """Gemma 2 and, with norms of queries and keys, Gemma 3."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    interval = keys.count("sliding_window_pattern")
    types = blocks.spans(keys, blocks.every(n, interval, FULL, SLIDING))
    norm = "head" if keys.defaults["qk_norm"] else "none"
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm=norm), types)
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n), "norms": "sandwich"}


def minimax_m2(keys: Keys) -> Table:
    """MiniMax-M2: norms over all heads together."""
    n = n_layers(keys)
    norm = "width" if keys.flag("use_qk_norm") else "none"
    if norm == "width" and keys.text("qk_norm_type") != "per_layer":
        keys.wrong("qk_norm_type", '"per_layer"')
    if keys.says("attn_type_list"):
        keys.listing("attn_type_list", n, (1,))
    attention = blocks.grouped(keys, qk_norm=norm)
    if keys.says("rotary_dim"):
        attention["rope_dim"] = keys.count("rotary_dim", least=0, most=attention["head_dim"])
    router_bias = keys.flag("use_routing_bias")
    moe = blocks.experts(keys, "num_local_experts", "intermediate_size", router_bias=router_bias)
    return {"layer": blocks.stacked([attention] * n, [moe] * n)}


def phimoe(keys: Keys) -> Table:
    """Phi-3.5-MoE: layer norms, biases of attention and of the head."""
    table, bias = mixtral(keys), keys.flag("attention_bias")
    for layer in table["layer"]:
        layer["attention"] = layer["attention"] | {"qkv_bias": bias, "o_bias": bias}
    return table | {"norm_bias": True, "head_bias": keys.flag("lm_head_bias")}


def cohere(keys: Keys) -> Table:
    """Command-R: both halves of a layer start from one norm; R7B and A have a window in three layers of four."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    has_windows = "sliding_window" in keys.defaults
    default = blocks.every(n, keys.count("sliding_window_pattern"), FULL, SLIDING) if has_windows else [FULL] * n
    types = blocks.spans(keys, default, (FULL, SLIDING) if has_windows else (FULL,))
    norm = "width" if keys.flag("use_qk_norm") else "none"
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm=norm), types)
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n), "norms": "parallel"}


def nemotron(keys: Keys) -> Table:
    """Nemotron-4 and Minitron: layer norms, and networks without a gate."""
    return llama(keys) | {"gated": False, "norm_bias": True}
