"""Attention and feed-forward networks of a layer, from the keys that many families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from g5cp_vec.config.huggingface.source import MOST_LAYERS, Keys

Table = dict[str, Any]
Mark = TypeVar("Mark", str, int)

# What layer_types calls the ways to attend; transformers 5 has other words for the sparse ones.
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
SPARSE = ("deepseek_sparse_attention", "indexed_attention")


def n_layers(keys: Keys) -> int:
    """Return the number of layers."""
    return keys.count("num_hidden_layers", most=MOST_LAYERS)


def grouped(keys: Keys, **more: Any) -> Table:
    """Return grouped-query attention; `more` are fields that the family decides."""
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", null=heads)
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    head_dim = keys.optional("head_dim")
    if head_dim is None:
        hidden = keys.count("hidden_size")
        if hidden % heads:
            keys.refuse("num_attention_heads", f"{heads} does not divide hidden_size = {hidden}; head_dim is missing")
        head_dim = hidden // heads
    attention = {"kind": "gqa", "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim}
    rope_dim = int(head_dim * _rotated(keys))
    if rope_dim != head_dim:
        attention["rope_dim"] = rope_dim
    return attention | more


def _rotated(keys: Keys) -> float:
    """Return the share of a head that is rotated: old files say it beside, new ones in ``rope_parameters``."""
    rope = keys.values.get("rope_parameters")
    if isinstance(rope, dict) and "partial_rotary_factor" in rope:
        return Keys(keys.path, rope, f"{keys.place}rope_parameters.").fraction("partial_rotary_factor")
    if "partial_rotary_factor" in keys.values or "partial_rotary_factor" in keys.defaults:
        return keys.fraction("partial_rotary_factor")
    return 1.0


def latent(keys: Keys) -> Table:
    """Return multi-head latent attention."""
    bias = keys.flag("attention_bias")
    return {
        "kind": "mla",
        "n_heads": keys.count("num_attention_heads"),
        "q_lora_rank": keys.optional("q_lora_rank"),
        "kv_lora_rank": keys.count("kv_lora_rank"),
        "qk_nope_head_dim": keys.count("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.count("qk_rope_head_dim"),
        "v_head_dim": keys.count("v_head_dim"),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def indexer(keys: Keys, *, shared: bool = False) -> Table:
    """Return the indexer of sparse attention."""
    return {
        "n_heads": keys.count("index_n_heads"),
        "head_dim": keys.count("index_head_dim"),
        "top_k": keys.count("index_topk"),
        "shared": shared,
    }


def delta_net(keys: Keys) -> Table:
    """Return the gated delta net of Qwen3-Next and Qwen3.5."""
    heads, key_heads = keys.count("linear_num_value_heads"), keys.count("linear_num_key_heads")
    if heads % key_heads:
        keys.refuse("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads = {heads}")
    linear = {
        "kind": "gated_delta_net",
        "n_heads": heads,
        "n_key_heads": key_heads,
        "key_head_dim": keys.count("linear_key_head_dim"),
        "value_head_dim": keys.count("linear_value_head_dim"),
        "conv_kernel": keys.count("linear_conv_kernel_dim"),
    }
    return linear | state_dtype(keys, "mamba_ssm_dtype")


def state_dtype(keys: Keys, key: str) -> Table:
    """Return the element type of a linear layer's state where the file says it."""
    if not keys.says(key):
        return {}
    known = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if (dtype := known.get(keys.text(key))) is None:
        keys.wrong(key, f"one of {', '.join(known)}")
    return {"state_dtype": dtype}


def spans(keys: Keys, default: Sequence[str], known: Sequence[str] = (FULL, SLIDING)) -> Sequence[str]:
    """Return how each layer attends: ``layer_types`` where the file has it."""
    return keys.listing("layer_types", len(default), known) or default


def windowed(keys: Keys, attention: Table, types: Sequence[str]) -> list[Table]:
    """Return attention layer by layer, with a window where the type says so."""
    window = keys.count("sliding_window") if SLIDING in types else None
    sliding = attention | {"window": window}
    return [sliding if kind == SLIDING else attention for kind in types]


def every(n: int, interval: int, rare: Mark, usual: Mark) -> list[Mark]:
    """Return `rare` for every `interval`-th of `n` layers, `usual` for the others."""
    return [usual if (i + 1) % interval else rare for i in range(n)]


def dense(keys: Keys, key: str = "intermediate_size") -> Table:
    """Return a dense network."""
    return {"ffn": "dense", "d_ff": keys.count(key)}


def experts(keys: Keys, count: str, width: str, *, top_k: str = "num_experts_per_tok", **more: Any) -> Table:
    """Return a network of experts, three of whose numbers stand under these keys; `more` the family decides."""
    n, chosen = keys.count(count), keys.count(top_k)
    if chosen > n:
        keys.refuse(top_k, f"{chosen} is more than {count} = {n}")
    return {"ffn": "moe", "moe": {"n_experts": n, "top_k": chosen, "d_expert": keys.count(width), **more}}


def shared_experts(keys: Keys) -> Table:
    """Return DeepSeek's shared experts, each as wide as a routed one."""
    return {"n_shared": keys.count("n_shared_experts", least=0, null=0)}


def first_dense(keys: Keys, n: int, moe: Table) -> list[Table]:
    """Return networks layer by layer: ``mlp_layer_types``, or experts after ``first_k_dense_replace`` layers."""
    known = ("dense", "sparse")
    kinds = keys.listing("mlp_layer_types", n, known)
    if kinds is None:
        first = keys.count("first_k_dense_replace", least=0)
        step = keys.count("moe_layer_freq", null=1)
        kinds = ["sparse" if i >= first and i % step == 0 else "dense" for i in range(n)]
    plain = dense(keys) if "dense" in kinds else {}
    return [moe if kind == "sparse" else plain for kind in kinds]


def stacked(attention: Sequence[Table], networks: Sequence[Table]) -> list[Table]:
    """Return layers from the attention and the network of each."""
    return [{"attention": a, **ffn} for a, ffn in zip(attention, networks, strict=True)]
