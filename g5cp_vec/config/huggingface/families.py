"""The families: what each ``model_type`` is built by, and what its configuration class takes for an absent key.

Adding one is one entry here. Defaults are those of the configuration classes of transformers 5.24.0; where code comes
with the checkpoint instead (``chatglm``, ``kimi_k2``, ``minimax_text_01``, ``nemotron-nas``), of the class there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g5cp_vec.config.huggingface import builders, hybrids, modules
from g5cp_vec.config.huggingface.blocks import Table
from g5cp_vec.config.huggingface.modules import Names
from g5cp_vec.config.huggingface.source import Keys


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes
    ----------
    config : str
        The configuration class whose defaults stand in for absent keys.
    architectures : tuple of str
        Classes with the head of a language model that the file may name.
    build : callable
        From the keys to a table with ``layer``, one table a layer, and keys of the whole model.
    defaults : dict
        What an absent key is; None where absence has a meaning of its own.
    names : Names
        What the checkpoint calls its modules.
    """

    config: str
    architectures: tuple[str, ...]
    build: Callable[[Keys], Table]
    defaults: Mapping[str, Any]
    names: Names = field(default_factory=Names)


def sizes(vocab: int, hidden: int, ff: int | None, layers: int, heads: int, kv_heads: int | None, **more: Any) -> Table:
    """Return defaults: the sizes that every class has, and `more`."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        **more,
    }


def latent(rank: int, queries: int, nope: int, rope: int, value: int, **more: Any) -> Table:
    """Return defaults of multi-head latent attention, and `more`."""
    ranks = {"kv_lora_rank": rank, "q_lora_rank": queries, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    return {**ranks, "v_head_dim": value, **more}


def experts(n: int, top_k: int | None, width: int, shared: int, first_dense: int) -> Table:
    """Return defaults of DeepSeek's experts."""
    routed = {"n_routed_experts": n, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
    return {**routed, "n_shared_experts": shared, "first_k_dense_replace": first_dense}


def _qwen_experts(n: int, top_k: int, width: int, shared: int | None = None) -> Table:
    """Return defaults of Qwen's experts."""
    more = {} if shared is None else {"shared_expert_intermediate_size": shared}
    return {"num_experts": n, "num_experts_per_tok": top_k, "moe_intermediate_size": width, **more}


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DELTA_NET = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
}
_MISTRAL = sizes(32000, 4096, 14336, 32, 32, 8, sliding_window=4096)
_MIXTRAL = _MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN2_VL = sizes(152064, 8192, 29568, 80, 64, 8, **_QWEN_WINDOW | {"max_window_layers": 80})
_QWEN3_5 = sizes(248320, 4096, 12288, 32, 16, 4, **_DELTA_NET)
_QWEN3_5_MOE = sizes(248320, 2048, None, 40, 16, 2, **_DELTA_NET, **_qwen_experts(256, 8, 512, 512))
_V3 = sizes(129280, 7168, 18432, 61, 128, 128, **latent(512, 1536, 128, 64, 128), **experts(256, 8, 2048, 1, 3))
_GLM4 = sizes(151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True, partial_rotary_factor=0.5)
_GLM4_MOE = sizes(151552, 4096, 10944, 46, 96, 8, partial_rotary_factor=0.5, **experts(128, 8, 1408, 1, 1))
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaConfig",
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        builders.llama,
        sizes(32000, 4096, 11008, 32, 32, None),
    ),
    "mistral": Family("MistralConfig", ("MistralForCausalLM",), builders.mistral, _MISTRAL),
    "ministral": Family("MinistralConfig", ("MinistralForCausalLM",), builders.mistral, _MISTRAL),
    "ministral3": Family(
        "Ministral3Config",
        ("Ministral3ForCausalLM",),
        builders.mistral,
        sizes(131072, 4096, 14336, 34, 32, 8, head_dim=128),
    ),
    "mixtral": Family("MixtralConfig", ("MixtralForCausalLM",), builders.mixtral, _MIXTRAL, modules.BLOCK_SPARSE),
    "qwen2": Family(
        "Qwen2Config",
        ("Qwen2ForCausalLM",),
        builders.qwen2,
        sizes(151936, 4096, 22016, 32, 32, 32, **_QWEN_WINDOW),
    ),
    "qwen2_vl_text": Family("Qwen2VLTextConfig", (), builders.qwen2, _QWEN2_VL),
    "qwen2_5_vl_text": Family("Qwen2_5_VLTextConfig", (), builders.qwen2, _QWEN2_VL),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        ("Qwen2MoeForCausalLM",),
        builders.qwen2_moe,
        sizes(151936, 2048, 5632, 24, 16, 16, qkv_bias=True, **_QWEN_WINDOW, **_qwen_experts(60, 4, 1408, 5632)),
        modules.QWEN,
    ),
    "qwen3": Family(
        "Qwen3Config",
        ("Qwen3ForCausalLM",),
        builders.qwen3,
        sizes(151936, 4096, 22016, 32, 32, 32, head_dim=128, **_QWEN_WINDOW),
    ),
    "qwen3_vl_text": Family(
        "Qwen3VLTextConfig", (), builders.qwen3, sizes(151936, 4096, 22016, 32, 32, 32, head_dim=128)
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        ("Qwen3MoeForCausalLM",),
        builders.qwen3_moe,
        sizes(151936, 2048, 6144, 24, 32, 4, sliding_window=4096, **_qwen_experts(128, 8, 768)),
    ),
    "qwen3_vl_moe_text": Family(
        "Qwen3VLMoeTextConfig",
        (),
        builders.qwen3_moe,
        sizes(151936, 2048, 5632, 24, 16, 16, **_qwen_experts(60, 4, 1408)),
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        ("Qwen3NextForCausalLM",),
        hybrids.qwen3_next,
        sizes(151936, 2048, 5632, 48, 16, 2, decoder_sparse_step=1, **_DELTA_NET, **_qwen_experts(512, 10, 512, 512)),
        modules.QWEN,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5TextConfig", ("Qwen3_5ForCausalLM",), hybrids.qwen3_next, _QWEN3_5, modules.QWEN_DELTA
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeTextConfig", ("Qwen3_5MoeForCausalLM",), hybrids.qwen3_next, _QWEN3_5_MOE, modules.QWEN_DELTA
    ),
    "llama4_text": Family(
        "Llama4TextConfig",
        ("Llama4ForCausalLM",),
        builders.llama4,
        sizes(
            202048,
            5120,
            8192,
            48,
            40,
            8,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=16,
            num_experts_per_tok=1,
            use_qk_norm=True,
            attention_chunk_size=8192,
            interleave_moe_layer_step=1,
            no_rope_layer_interval=4,
        ),
        modules.LLAMA4,
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        ("DeepseekV2ForCausalLM",),
        hybrids.deepseek,
        sizes(
            102400,
            4096,
            11008,
            32,
            32,
            None,
            topk_method="greedy",
            **latent(512, 1536, 128, 64, 128),
            **experts(64, None, 1407, 2, 0),
        ),
        modules.DEEPSEEK,
    ),
    "deepseek_v3": Family("DeepseekV3Config", ("DeepseekV3ForCausalLM",), hybrids.deepseek, _V3, modules.DEEPSEEK),
    "kimi_k2": Family(
        "DeepseekV3Config", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), hybrids.deepseek, _V3, modules.DEEPSEEK
    ),
    "deepseek_v32": Family(
        "DeepseekV32Config",
        ("DeepseekV32ForCausalLM",),
        hybrids.deepseek,
        _V3 | _INDEXER | {"index_n_heads": 64},
        modules.DEEPSEEK,
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        ("GlmMoeDsaForCausalLM",),
        hybrids.deepseek,
        sizes(
            154880,
            6144,
            12288,
            78,
            64,
            64,
            index_n_heads=32,
            **_INDEXER,
            **latent(512, 2048, 192, 64, 256),
            **experts(256, 8, 2048, 1, 3),
        ),
        modules.DEEPSEEK,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteConfig",
        ("Glm4MoeLiteForCausalLM",),
        hybrids.deepseek,
        sizes(154880, 2048, 10240, 47, 20, 20, **latent(512, 768, 192, 64, 256), **experts(64, 4, 1536, 1, 1)),
        modules.DEEPSEEK,
    ),
    "chatglm": Family(
        "ChatGLMConfig",
        ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        builders.chatglm,
        {"tie_word_embeddings": False},
    ),
    "glm": Family("GlmConfig", ("GlmForCausalLM",), builders.glm, _GLM4, modules.GLM),
    "glm4": Family("Glm4Config", ("Glm4ForCausalLM",), builders.glm4, _GLM4, modules.GLM),
    "glm4v_text": Family("Glm4vTextConfig", (), builders.glm4, _GLM4 | {"head_dim": None}, modules.GLM),
    "glm4_moe": Family(
        "Glm4MoeConfig", ("Glm4MoeForCausalLM",), builders.glm4_moe, _GLM4_MOE, Names(shared=modules.SHARED)
    ),
    "glm4v_moe_text": Family(
        "Glm4vMoeTextConfig",
        (),
        builders.glm4_moe,
        _GLM4_MOE | {"vocab_size": 151424, "attention_bias": True},
        Names(shared=modules.SHARED),
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        ("GptOssForCausalLM",),
        builders.gpt_oss,
        sizes(
            201088,
            2880,
            2880,
            36,
            64,
            8,
            head_dim=64,
            attention_bias=True,
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
        Names(experts=("mlp.experts",)),
    ),
    "gemma": Family(
        "GemmaConfig", ("GemmaForCausalLM",), builders.gemma, sizes(256000, 3072, 24576, 28, 16, 16) | _GEMMA
    ),
    "gemma2": Family(
        "Gemma2Config",
        ("Gemma2ForCausalLM",),
        builders.gemma2,
        sizes(256000, 2304, 9216, 26, 8, 4, sliding_window=4096, sliding_window_pattern=2, qk_norm=False) | _GEMMA,
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig",
        ("Gemma3ForCausalLM",),
        builders.gemma2,
        sizes(262208, 2304, 9216, 26, 8, 4, sliding_window=4096, sliding_window_pattern=6, qk_norm=True) | _GEMMA,
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        ("MiniMaxM2ForCausalLM",),
        builders.minimax_m2,
        sizes(
            200064,
            3072,
            1536,
            62,
            48,
            8,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            use_routing_bias=True,
        ),
        modules.BLOCK_SPARSE,
    ),
    "minimax": Family(
        "MiniMaxConfig", ("MiniMaxForCausalLM",), hybrids.minimax, _MIXTRAL | {"layer_types": None}, modules.MINIMAX
    ),
    "minimax_text_01": Family(
        "MiniMaxText01Config", ("MiniMaxText01ForCausalLM",), hybrids.minimax, _MIXTRAL, modules.MINIMAX
    ),
    "minimax_m1": Family("MiniMaxM1Config", ("MiniMaxM1ForCausalLM",), hybrids.minimax, _MIXTRAL, modules.MINIMAX),
    "phi3": Family(
        "Phi3Config", ("Phi3ForCausalLM",), builders.mistral, sizes(32064, 3072, 8192, 32, 32, None), modules.PHI
    ),
    "phimoe": Family(
        "PhimoeConfig",
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        builders.phimoe,
        sizes(32064, 4096, 6400, 32, 32, 8, num_local_experts=16, num_experts_per_tok=2),
        modules.BLOCK_SPARSE,
    ),
    "cohere": Family(
        "CohereConfig",
        ("CohereForCausalLM",),
        builders.cohere,
        sizes(256000, 8192, 22528, 40, 64, None) | {"tie_word_embeddings": True},
    ),
    "cohere2": Family(
        "Cohere2Config",
        ("Cohere2ForCausalLM",),
        builders.cohere,
        sizes(256000, 8192, 22528, 40, 64, None, sliding_window=4096, sliding_window_pattern=4)
        | {"tie_word_embeddings": True},
    ),
    "nemotron": Family(
        "NemotronConfig",
        ("NemotronForCausalLM",),
        builders.nemotron,
        sizes(256000, 6144, 24576, 32, 48, None, partial_rotary_factor=0.5),
        Names(network=modules.UNGATED),
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        ("NemotronHForCausalLM",),
        hybrids.nemotron_h,
        sizes(
            131072,
            4096,
            21504,
            52,
            32,
            8,
            head_dim=128,
            ssm_state_size=128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            conv_kernel=4,
            use_conv_bias=True,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
        ),
        modules.NEMOTRON_H,
    ),
    "nemotron-nas": Family(
        "DeciLMConfig", ("DeciLMForCausalLM",), hybrids.nemotron_nas, sizes(128256, 8192, None, 80, 64, None)
    ),
}
