"""Further families: Granite, OLMo, ERNIE, Hunyuan, EXAONE, Seed-OSS, SmolLM, dots, Arcee and Mistral 4.

Built like those of `g5cp_vec.config.huggingface.builders`; defaults are those of the classes of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g5cp_vec.config.huggingface import blocks, builders, families, hybrids, modules
from g5cp_vec.config.huggingface.blocks import FULL, LINEAR, SLIDING, Table, n_layers
from g5cp_vec.config.huggingface.families import Family
from g5cp_vec.config.huggingface.modules import Names
from g5cp_vec.config.huggingface.source import Keys


def arcee(keys: Keys) -> Table:
    """Arcee: Llama without gates."""
    return builders.llama(keys) | {"gated": False}


def seed_oss(keys: Keys) -> Table:
    """Seed-OSS: biases of queries, keys and values apart from that of the output."""
    biases = {"qkv_bias": keys.flag("attention_bias"), "o_bias": keys.flag("attention_out_bias")}
    attention, n = blocks.grouped(keys, **biases), n_layers(keys)
    return {"layer": blocks.stacked([attention] * n, [blocks.dense(keys)] * n), "ffn_bias": keys.flag("mlp_bias")}


def smollm3(keys: Keys) -> Table:
    """SmolLM3: no positions in every fourth layer."""
    n = n_layers(keys)
    roped = keys.listing("no_rope_layers", n, (0, 1)) if keys.raw("no_rope_layers") else None
    if roped is None:
        roped = blocks.every(n, keys.count("no_rope_layer_interval"), 0, 1)
    narrow = keys.flag("use_sliding_window") and keys.optional("sliding_window") is not None
    types = blocks.spans(keys, [SLIDING if narrow and not rope else FULL for rope in roped])
    bias = keys.flag("attention_bias")
    attention = blocks.windowed(keys, blocks.grouped(keys, qkv_bias=bias, o_bias=bias), types)
    attention = [a if rope else a | {"rope_dim": 0} for a, rope in zip(attention, roped, strict=True)]
    return {"layer": blocks.stacked(attention, [blocks.dense(keys)] * n), "ffn_bias": keys.flag("mlp_bias")}


def olmo(keys: Keys) -> Table:
    """OLMo 2 and 3: norms over all heads together, and behind each half of a layer; OLMo 3 has windows."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    has_windows = "sliding_window" in keys.defaults
    known = (FULL, SLIDING) if has_windows else (FULL,)
    types = blocks.spans(keys, blocks.every(n, 4, FULL, SLIDING) if has_windows else [FULL] * n, known)
    plain = blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm="width")
    return {"layer": blocks.stacked(blocks.windowed(keys, plain, types), [blocks.dense(keys)] * n)}


def olmoe(keys: Keys) -> Table:
    """OLMoE."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    attention = blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm="width")
    moe = blocks.experts(keys, "num_experts", "intermediate_size")
    return {"layer": blocks.stacked([attention] * n, [moe] * n)}


def ernie(keys: Keys) -> Table:
    """ERNIE 4.5."""
    n, bias = n_layers(keys), keys.flag("use_bias")
    attention = blocks.grouped(keys, qkv_bias=bias, o_bias=bias)
    return {"layer": blocks.stacked([attention] * n, [blocks.dense(keys)] * n), "ffn_bias": bias}


def ernie_moe(keys: Keys) -> Table:
    """ERNIE 4.5 with experts, in every so many layers from one to another."""
    n, bias = n_layers(keys), keys.flag("use_bias")
    if bias:
        keys.refuse("use_bias", "experts without biases beside networks with them are not modelled")
    first = keys.count("moe_layer_start_index", least=0)
    last = keys.count("moe_layer_end_index", least=-1, null=-1)
    step = keys.count("moe_layer_interval")
    sparse = [(i + 1) % step == 0 and first <= i <= (n - 1 if last == -1 else last) for i in range(n)]
    moe = blocks.experts(
        keys, "moe_num_experts", "moe_intermediate_size", top_k="moe_k",
        n_shared=keys.count("moe_num_shared_experts", least=0, null=0), router_bias=True,
    )  # fmt: skip
    dense = {} if all(sparse) else blocks.dense(keys)
    return {"layer": blocks.stacked([blocks.grouped(keys)] * n, [moe if s else dense for s in sparse])}


def hunyuan(keys: Keys) -> Table:
    """Hunyuan V1: norms of queries and keys."""
    n = n_layers(keys)
    if keys.values.get("num_experts") == 1:
        keys.read.add("num_experts")  # a file of the dense kind may say so
    return {"layer": blocks.stacked([_hunyuan_attention(keys)] * n, [blocks.dense(keys)] * n)}


def _hunyuan_attention(keys: Keys) -> Table:
    if keys.values.get("use_cla"):
        keys.refuse("use_cla", "layers that share a cache are not modelled")
    if keys.says("use_qk_norm") and not keys.flag("use_qk_norm"):
        keys.refuse("use_qk_norm", "only true is modelled")
    bias = keys.flag("attention_bias")
    return blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm="head")


def hunyuan_moe(keys: Keys) -> Table:
    """Hunyuan V1 with experts: numbers of experts, one for all layers or one for each."""
    n, attention = n_layers(keys), _hunyuan_attention(keys)
    width, own = keys.count("intermediate_size"), {"moe_intermediate_size": None, "num_shared_expert": 1}
    columns = {key: _each_layer(keys, key, n, own.get(key)) for key in ("num_experts", "moe_topk", *own)}
    networks = []
    for experts, top_k, d_expert, shared in zip(*columns.values(), strict=True):
        if top_k > experts:
            keys.refuse("moe_topk", f"{top_k} is more than num_experts = {experts}")
        moe = {"n_experts": experts, "top_k": top_k, "d_expert": d_expert or width, "n_shared": 1}
        networks.append({"ffn": "moe", "moe": moe | {"d_shared": width * shared}})
    return {"layer": blocks.stacked([attention] * n, networks)}


def _each_layer(keys: Keys, key: str, n: int, absent: int | None) -> Sequence[int | None]:
    """Return one number for each layer."""
    value = keys.raw(key)
    if value is None:
        return [absent] * n
    numbers = value if isinstance(value, list) else [value] * n
    if len(numbers) != n or not all(type(number) is int and 0 < number < 2**20 for number in numbers):
        keys.wrong(key, f"an integer from 1, or a list of {n}")
    return numbers


def exaone4(keys: Keys) -> Table:
    """EXAONE 4 and K-EXAONE: windows with positions, full attention without; norms behind each half, or before."""
    n, norm = n_layers(keys), {"qk_norm": "head"}
    window = keys.optional("sliding_window")
    default = [FULL] * n
    if window is not None and keys.raw("layer_types") is None:
        default = blocks.every(n, keys.count("sliding_window_pattern"), FULL, SLIDING)
    types = blocks.spans(keys, default)
    plain = blocks.grouped(keys, **norm)
    # Where some layers have windows the others have no positions.
    full = plain | ({"rope_dim": 0} if window is not None else {})
    attention = [plain | {"window": window} if kind == SLIDING else full for kind in types]
    if SLIDING in types and window is None:
        keys.refuse("sliding_window", "missing, but layer_types has sliding attention")
    return {"layer": blocks.stacked(attention, _exaone_networks(keys, n))}


def _exaone_networks(keys: Keys, n: int) -> list[Table]:
    if "num_experts" not in keys.defaults:
        return [blocks.dense(keys)] * n
    shared = keys.count("num_shared_experts", least=0, null=0)
    moe = blocks.experts(keys, "num_experts", "moe_intermediate_size", n_shared=shared, router_bias=True)
    return blocks.first_dense(keys, n, moe)


def dots1(keys: Keys) -> Table:
    """dots.llm1: DeepSeek's experts under grouped-query attention."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    default = [FULL] * n
    if keys.raw("layer_types") is None and keys.optional("sliding_window") is not None:
        first = keys.count("max_window_layers", least=0)
        default = [SLIDING if i >= first else FULL for i in range(n)]
    plain = blocks.grouped(keys, qkv_bias=bias, o_bias=bias, qk_norm="head")
    attention = blocks.windowed(keys, plain, blocks.spans(keys, default))
    shared = blocks.shared_experts(keys)
    moe = blocks.experts(keys, "n_routed_experts", "moe_intermediate_size", router_bias=True, **shared)
    return {"layer": blocks.stacked(attention, blocks.first_dense(keys, n, moe))}


def mistral4(keys: Keys) -> Table:
    """Mistral 4: DeepSeek's layers, whose router has no correction."""
    table = hybrids.deepseek(keys)
    for layer in table["layer"]:
        if "moe" in layer:
            layer["moe"] = layer["moe"] | {"router_bias": False}
    return table


def _granite_network(keys: Keys) -> Table:
    """Return Granite's experts with a shared one beside, or that alone."""
    shared = keys.count("shared_intermediate_size", least=0, null=0)
    if keys.count("num_local_experts", least=0, null=0) == 0:
        keys.read |= {"num_experts_per_tok", "intermediate_size"}  # mean nothing without experts
        return {"ffn": "dense", "d_ff": shared}
    network = blocks.experts(keys, "num_local_experts", "intermediate_size")
    if shared:
        network["moe"] |= {"n_shared": 1, "d_shared": shared}
    return network


def granite_moe(keys: Keys) -> Table:
    """Granite 3 with experts, shared ones too."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    attention = blocks.grouped(keys, qkv_bias=bias, o_bias=bias)
    return {"layer": blocks.stacked([attention] * n, [_granite_network(keys)] * n)}


def granite_hybrid(keys: Keys) -> Table:
    """Granite 4: Mamba-2 mixers, attention in some layers, a network in all."""
    n, bias = n_layers(keys), keys.flag("attention_bias")
    words = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
    types = keys.listing("layer_types", n, tuple(words)) or [LINEAR] * n
    if keys.flag("mamba_proj_bias"):
        keys.refuse("mamba_proj_bias", "biases of these projections are not modelled")
    positions = {} if keys.raw("position_embedding_type") == "rope" else {"rope_dim": 0}
    network = _granite_network(keys)
    made: dict[str, Table] = {}
    if any(words[kind] == FULL for kind in types):
        made[FULL] = {"attention": blocks.grouped(keys, qkv_bias=bias, o_bias=bias, **positions)}
    if any(words[kind] == LINEAR for kind in types):
        made[LINEAR] = {"linear": _granite_mamba(keys)}
    return {"layer": [made[words[kind]] | network for kind in types]}


def _granite_mamba(keys: Keys) -> Table:
    heads, groups = keys.count("mamba_n_heads"), keys.count("mamba_n_groups")
    inner = keys.count("mamba_expand") * keys.count("hidden_size")
    width = inner // heads if keys.raw("mamba_d_head") == "auto" else keys.count("mamba_d_head")
    if heads % groups or width * heads != inner:
        keys.refuse("mamba_n_heads", f"{heads} heads of {width} in {groups} groups do not make {inner} channels")
    return {
        "kind": "mamba2",
        "n_heads": heads,
        "n_key_heads": groups,
        "key_head_dim": keys.count("mamba_d_state"),
        "value_head_dim": width,
        "conv_kernel": keys.count("mamba_d_conv"),
        "conv_bias": keys.flag("mamba_conv_bias"),
    }


def _of(config: str, architecture: str, build: Any, defaults: Table, names: Names | None = None) -> Family:
    return Family(config, (architecture,), build, defaults, names or Names())


_sizes = families.sizes
_GRANITE = _sizes(32000, 4096, 11008, 32, 32, None)
_GRANITE_MOE = _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
_EXAONE = _sizes(102400, 4096, 16384, 32, 32, 32, sliding_window=4096, sliding_window_pattern=4)
_HUNYUAN = _sizes(290943, 4096, 11008, 32, 32, None)
_FUSED = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
_GRANITE_NAMES = Names(
    linear=("mamba.in_proj", "mamba.out_proj"),
    network=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    experts=_FUSED,
    shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
)
_SHARED = Names(shared=modules.SHARED)

FURTHER: dict[str, Family] = {
    "arcee": _of("ArceeConfig", "ArceeForCausalLM", arcee, _sizes(32000, 2560, 18432, 32, 32, None),
                 Names(network=modules.UNGATED)),
    "granite": _of("GraniteConfig", "GraniteForCausalLM", builders.llama, _GRANITE),
    "granitemoe": _of("GraniteMoeConfig", "GraniteMoeForCausalLM", granite_moe, _GRANITE_MOE, _GRANITE_NAMES),
    "granitemoeshared": _of("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", granite_moe,
                            _GRANITE_MOE | {"shared_intermediate_size": 0}, _GRANITE_NAMES),
    "granitemoehybrid": _of(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", granite_hybrid,
        _GRANITE_MOE | {
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
            "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        }, _GRANITE_NAMES,
    ),
    "olmo2": _of("Olmo2Config", "Olmo2ForCausalLM", olmo, _sizes(50304, 4096, 11008, 32, 32, None)),
    "olmo3": _of("Olmo3Config", "Olmo3ForCausalLM", olmo,
                 _sizes(50304, 4096, 11008, 32, 32, None, sliding_window=4096)),
    "olmoe": _of("OlmoeConfig", "OlmoeForCausalLM", olmoe,
                 _sizes(50304, 2048, 2048, 16, 16, None, num_experts=64, num_experts_per_tok=8)),
    "ernie4_5": _of("Ernie4_5Config", "Ernie4_5ForCausalLM", ernie,
                    _sizes(103424, 1024, 3072, 18, 16, 2, head_dim=128) | {"tie_word_embeddings": True}),
    "ernie4_5_moe": _of(
        "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", ernie_moe,
        _sizes(
            103424, 2560, 12288, 28, 20, 4, moe_intermediate_size=1536, moe_k=6, moe_num_experts=64,
            moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1,
        ) | {"tie_word_embeddings": True}, _SHARED,
    ),
    "hunyuan_v1_dense": _of("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", hunyuan, _HUNYUAN),
    "hunyuan_v1_moe": _of("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", hunyuan_moe,
                          _HUNYUAN | {"num_experts": 1, "moe_topk": 1},
                          Names(shared=modules.prefixed("mlp.shared_mlp.", "gate_proj", "up_proj", "down_proj"))),
    "exaone4": _of("Exaone4Config", "Exaone4ForCausalLM", exaone4, _EXAONE),
    "exaone_moe": _of(
        "ExaoneMoeConfig", "ExaoneMoeForCausalLM", exaone4,
        _EXAONE | {
            "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "num_shared_experts": 1,
        }, _SHARED,
    ),
    "seed_oss": _of("SeedOssConfig", "SeedOssForCausalLM", seed_oss,
                    _sizes(155136, 4096, 27648, 64, 80, 8, head_dim=128, attention_bias=True)),
    "smollm3": _of("SmolLM3Config", "SmolLM3ForCausalLM", smollm3,
                   _sizes(128256, 2048, 11008, 36, 16, 4, no_rope_layer_interval=4) | {"tie_word_embeddings": True}),
    "dots1": _of(
        "Dots1Config", "Dots1ForCausalLM", dots1,
        _sizes(152064, 4608, 10944, 62, 32, 32, moe_intermediate_size=1408, first_k_dense_replace=0,
               sliding_window=4096, max_window_layers=62), _SHARED,
    ),
    "mistral4": _of(
        "Mistral4Config", "Mistral4ForCausalLM", mistral4,
        _sizes(131072, 4096, 12288, 36, 32, 32, **families.latent(256, 1024, 64, 64, 128),
               **families.experts(128, 4, 2048, 1, 0)), modules.DEEPSEEK,
    ),
}  # fmt: skip

ALL: dict[str, Family] = families.FAMILIES | FURTHER
