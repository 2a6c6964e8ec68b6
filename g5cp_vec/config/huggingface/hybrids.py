"""Families whose layers differ in what mixes tokens: latent and sparse attention, delta nets, lightning, Mamba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g5cp_vec.config.huggingface import blocks
from g5cp_vec.config.huggingface.blocks import FULL, LINEAR, SPARSE, Table, n_layers
from g5cp_vec.config.huggingface.builders import qwen3_attention, qwen_shared, sparse_steps
from g5cp_vec.config.huggingface.source import MOST_LAYERS, Keys


def deepseek(keys: Keys) -> Table:
    """DeepSeek V2, V3 and the models built like them; V3.2's sparse attention where the class has index keys."""
    n = n_layers(keys)
    if keys.values.get("use_mla") is False:
        keys.refuse("use_mla", "false is not modelled: the class projects keys and values through latents")
    plain = blocks.latent(keys)
    attention = [plain] * n
    if "index_topk" in keys.defaults:
        blocks.spans(keys, SPARSE[:1] * n, SPARSE)
        attention = [plain | {"indexer": blocks.indexer(keys, shared=shared)} for shared in _shared_indexers(keys, n)]
    # Only the router without an auxiliary loss has a correction for each expert.
    corrected = "topk_method" not in keys.defaults if not keys.says("topk_method") else _is_corrected(keys)
    shared = blocks.shared_experts(keys)
    moe = blocks.experts(keys, "n_routed_experts", "moe_intermediate_size", router_bias=corrected, **shared)
    return {"layer": blocks.stacked(attention, blocks.first_dense(keys, n, moe))}


def _is_corrected(keys: Keys) -> bool:
    return keys.text("topk_method") == "noaux_tc"


def _shared_indexers(keys: Keys, n: int) -> list[bool]:
    """Return which layers take the choice of an earlier one (GLM-5: ``indexer_types``, or how often one is run)."""
    kinds: Sequence[Any] | None = keys.listing("indexer_types", n, ("full", "shared"))
    pattern = keys.values.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != n or set(pattern) - {"F", "S"}:
            keys.wrong("index_topk_pattern", f"{n} letters, F or S")
        kinds = ["full" if letter == "F" else "shared" for letter in pattern]
    if kinds is None:
        every, offset = keys.count("index_topk_freq", null=1), keys.count("index_skip_topk_offset", null=2, least=0)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(n)]
    if kinds[0] == "shared":
        keys.refuse(keys.written("indexer_types"), "the first layer has no earlier one to share an indexer with")
    return [kind == "shared" for kind in kinds]


def qwen3_next(keys: Keys) -> Table:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention with an output gate in every fourth layer."""
    n = n_layers(keys)
    interval = keys.count("full_attention_interval")
    types = blocks.spans(keys, blocks.every(n, interval, FULL, LINEAR), (FULL, LINEAR))
    full = {"attention": qwen3_attention(keys, output_gate=True)}
    linear = {"linear": blocks.delta_net(keys)} if LINEAR in types else {}
    mixers = [linear if kind == LINEAR else full for kind in types]
    if "num_experts" not in keys.defaults:
        networks = [blocks.dense(keys)] * n
    else:
        moe = blocks.experts(keys, "num_experts", "moe_intermediate_size", **qwen_shared(keys))
        networks = sparse_steps(keys, n, moe) if "decoder_sparse_step" in keys.defaults else [moe] * n
    return {"layer": [{**mixer, **ffn} for mixer, ffn in zip(mixers, networks, strict=True)]}


def minimax(keys: Keys) -> Table:
    """MiniMax-Text-01 and M1: lightning attention, and full attention in every eighth layer."""
    n = n_layers(keys)
    full = blocks.grouped(keys)
    if keys.says("rotary_dim"):
        full["rope_dim"] = keys.count("rotary_dim", least=0, most=full["head_dim"])
    heads, width = full["n_heads"], full["head_dim"]
    lightning = {
        "kind": "lightning",
        "n_heads": heads,
        "n_key_heads": heads,
        "key_head_dim": width,
        "value_head_dim": width,
    }
    marks = keys.listing("attn_type_list", n, (0, 1))
    if marks is not None:
        types: Sequence[str] = [FULL if mark else LINEAR for mark in marks]
    elif "layer_types" in keys.defaults:
        types = blocks.spans(keys, blocks.every(n, 2, LINEAR, FULL), (FULL, LINEAR))
    else:
        keys.refuse("attn_type_list", f"missing, expected a list of {n}: 1 for full attention, 0 for lightning")
    moe = blocks.experts(keys, "num_local_experts", "intermediate_size")
    return {"layer": [{**({"linear": lightning} if t == LINEAR else {"attention": full}), **moe} for t in types]}


def nemotron_h(keys: Keys) -> Table:
    """Nemotron-H and Nemotron 3: each layer is a Mamba-2 mixer, an attention, a network or experts."""
    kinds = _nemotron_layers(keys)
    for key in ("use_bias", "mamba_proj_bias", "attention_bias"):
        if keys.flag(key):
            keys.refuse(key, "biases of these projections are not modelled")
    keys.read |= {"n_shared_experts", "n_routed_experts", "moe_intermediate_size"}  # means nothing without experts
    made: dict[str, Table] = {}
    if "full_attention" in kinds:
        made["full_attention"] = {"attention": blocks.grouped(keys, rope_dim=0), "ffn": "none"}
    if "linear_attention" in kinds:
        made["linear_attention"] = {"linear": _mamba2(keys), "ffn": "none"}
    if "mlp" in kinds:
        made["mlp"] = {"mixer": "none", **blocks.dense(keys)}
    if "moe" in kinds and keys.flag("mlp_bias"):
        keys.refuse("mlp_bias", "shared experts with biases beside routed ones without are not modelled")
    if "moe" in kinds:
        width = keys.count("moe_shared_expert_intermediate_size")
        made["moe"] = {"mixer": "none"} | blocks.experts(
            keys, "n_routed_experts", "moe_intermediate_size", n_shared=1, d_shared=width, router_bias=True
        )
    return {"layer": [made[kind] for kind in kinds], "gated": False, "ffn_bias": keys.flag("mlp_bias")}


def _nemotron_layers(keys: Keys) -> list[str]:
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    # Names of layers before transformers 5.
    words = {**{name: name for name in letters.values()}, "mamba": "linear_attention", "attention": "full_attention"}
    listed = keys.raw("layer_types")
    if listed is not None:
        n = len(listed) if isinstance(listed, list) else 0
        if not 0 < n <= MOST_LAYERS:
            keys.wrong("layer_types", "a list, one entry a layer")
        return [words[entry] for entry in keys.listing("layer_types", n, tuple(words)) or ()]
    pattern = keys.text("hybrid_override_pattern")
    if not pattern or len(pattern) > MOST_LAYERS or set(pattern) - set(letters):
        keys.wrong("hybrid_override_pattern", "letters M, E, * or -, one a layer")
    if keys.says("num_hidden_layers") and n_layers(keys) != len(pattern):
        keys.refuse("num_hidden_layers", f"{n_layers(keys)}, but hybrid_override_pattern has {len(pattern)} layers")
    return [letters[letter] for letter in pattern]


def _mamba2(keys: Keys) -> Table:
    heads, groups = keys.count("mamba_num_heads"), keys.count("n_groups")
    if heads % groups:
        keys.refuse("n_groups", f"{groups} does not divide mamba_num_heads = {heads}")
    return {
        "kind": "mamba2",
        "n_heads": heads,
        "n_key_heads": groups,
        "key_head_dim": keys.count("ssm_state_size"),
        "value_head_dim": keys.count("mamba_head_dim"),
        "conv_kernel": keys.count("conv_kernel"),
        "conv_bias": keys.flag("use_conv_bias"),
        **blocks.state_dtype(keys, "mamba_ssm_cache_dtype"),
    }


def nemotron_nas(keys: Keys) -> Table:
    """Llama-Nemotron Super and Ultra: layers of a searched Llama, each with its own heads and width, or none."""
    n = n_layers(keys)
    listed = keys.raw("block_configs")
    if not isinstance(listed, list) or len(listed) != n:
        keys.wrong("block_configs", f"a list of {n}, one entry a layer")
    return {"layer": [_searched(keys, i, entry) for i, entry in enumerate(listed)]}


def _searched(keys: Keys, i: int, entry: Any) -> Table:
    place = f"{keys.place}block_configs[{i}]."
    if not isinstance(entry, dict) or not all(isinstance(entry.get(part), dict) for part in ("attention", "ffn")):
        keys.refuse(f"block_configs[{i}]", "expected an object with attention and ffn")
    attention, ffn = (Keys(keys.path, entry[part], f"{place}{part}.") for part in ("attention", "ffn"))
    for part in (attention, ffn):
        if part.flag("replace_with_linear"):
            part.refuse("replace_with_linear", "a linear layer in the place of a block is not modelled")
        if part.says("sparsify") or part.says("window_length") or part.says("num_sink_tokens"):
            part.refuse("sparsify", "sparse and windowed blocks are not modelled")
    layer: Table = {}
    if attention.flag("no_op"):
        layer["mixer"] = "none"
    else:
        heads, group = keys.count("num_attention_heads"), attention.count("n_heads_in_group")
        if heads % group:
            attention.refuse("n_heads_in_group", f"{group} does not divide num_attention_heads = {heads}")
        layer["attention"] = blocks.grouped(keys) | {"n_kv_heads": heads // group}
    if ffn.flag("no_op"):
        return layer | {"ffn": "none"}
    factor = ffn.raw("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
        ffn.wrong("ffn_mult", "a number > 0")
    width = int(2 * factor * keys.count("hidden_size") / 3)
    return layer | {"ffn": "dense", "d_ff": -(-width // 256) * 256}  # rounded up to a multiple of 256, as its code does
