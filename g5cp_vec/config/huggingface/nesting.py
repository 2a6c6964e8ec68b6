"""Which object of a file describes the language model, and by which family it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from g5cp_vec.config._files import describe, did_you_mean
from g5cp_vec.config.huggingface.families import Family
from g5cp_vec.config.huggingface.further import ALL as FAMILIES
from g5cp_vec.config.huggingface.source import Keys, shown


class Outer(NamedTuple):
    """A ``model_type`` of several kinds of input.

    Attributes
    ----------
    architecture : str
    text_type : str
        Family of the text part where it does not say.
    key : str
        Where the text part stands.
    flat : bool
        Whether older files have the text part's keys beside the others.
    """

    architecture: str
    text_type: str
    key: str = "text_config"
    flat: bool = False


_OUTER = {
    "llama4": Outer("Llama4ForConditionalGeneration", "llama4_text"),
    "gemma3": Outer("Gemma3ForConditionalGeneration", "gemma3_text"),
    "mistral3": Outer("Mistral3ForConditionalGeneration", "mistral"),
    "qwen2_vl": Outer("Qwen2VLForConditionalGeneration", "qwen2_vl_text", flat=True),
    "qwen2_5_vl": Outer("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", flat=True),
    "qwen3_vl": Outer("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": Outer("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    "qwen3_5": Outer("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Outer("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "kimi_k25": Outer("KimiK25ForConditionalGeneration", "deepseek_v3"),
    "kimi_vl": Outer("KimiVLForConditionalGeneration", "deepseek_v3"),
    "deepseek_vl_v2": Outer("DeepseekVLV2ForCausalLM", "deepseek_v2", "language_config"),
    "glm4v": Outer("Glm4vForConditionalGeneration", "glm4v_text"),
    "glm4v_moe": Outer("Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
    "llava": Outer("LlavaForConditionalGeneration", "llama"),
    "llava_next": Outer("LlavaNextForConditionalGeneration", "llama"),
    "llava_onevision": Outer("LlavaOnevisionForConditionalGeneration", "qwen2"),
    "internvl": Outer("InternVLForConditionalGeneration", "qwen2"),
    "internvl_chat": Outer("InternVLChatModel", "llama", "llm_config"),
    "aya_vision": Outer("AyaVisionForConditionalGeneration", "cohere2"),
    "cohere2_vision": Outer("Cohere2VisionForConditionalGeneration", "cohere2"),
}

# Known, and not modelled: what the contract of a model lacks.
_LACKING = {
    "gemma3n": "per-layer embeddings and layers that share a cache",
    "gemma3n_text": "per-layer embeddings and layers that share a cache",
    "gemma4": "layers that share a cache, and keys that serve as values",
    "gemma4_text": "layers that share a cache, and keys that serve as values",
    "mllama": "cross-attention layers",
    "mllama_text_model": "cross-attention layers",
    "deepseek_v4": "compressed attention and hyper-connections",
    "kimi_linear": "Kimi delta attention",
    "longcat_flash": "two attentions a layer, and experts that compute nothing",
    "mimo_v2_flash": "keys and values of different widths, and windows with heads of their own",
    "bailing_hybrid": "latent attention beside lightning attention with group norms",
    "falcon_h1": "attention and Mamba side by side in a layer",
    "lfm2": "short convolutions in the place of attention",
    "lfm2_moe": "short convolutions in the place of attention",
    "hunyuan": "layers that share a cache",
    "apertus": "activations with weights of their own",
    "phi": "parallel layers with a biased head",
    "phi4mm": "adapters of the other inputs within the text part",
    "phi3small": "block-sparse attention",
    "phi4flash": "layers that share a cache",
    "mamba": "Mamba-1 mixers",
    "jamba": "Mamba-1 mixers",
    "t5": "encoders",
    "bert": "encoders",
    "gpt2": "learned positions",
}

# Keys that change cost where they are set; whoever does not read one cannot model it.
_TELLING = (
    "cross_attention_layers", "add_cross_attention", "is_encoder_decoder", "hidden_size_per_layer_input",
    "num_kv_shared_layers", "altup_num_inputs", "moe_latent_size", "linear_attn_config", "use_bidirectional_attention",
    "shared_intermediate_size", "compress_ratios", "hc_mult", "o_lora_rank", "index_topk", "block_configs",
    "layer_types", "mlp_layer_types", "attn_type_list", "attention_chunk_size", "hybrid_override_pattern",
    "linear_num_value_heads", "kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size",
    "moe_intermediate_size", "num_local_experts", "num_experts", "n_routed_experts", "lm_head_bias",
)  # fmt: skip
# How many layers or modules of multi-token prediction there are.
_PREDICTIONS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")


@dataclass(frozen=True)
class TextPart:
    """The language model of a file.

    Attributes
    ----------
    family : Family
    keys : Keys
        With the family's defaults.
    whole : Keys
        The file's outermost object; the same object where there is nothing else in it.
    notes : tuple of str
        What was left out.
    """

    family: Family
    keys: Keys
    whole: Keys
    notes: tuple[str, ...]


def text_part(path: Path, contents: dict[str, Any]) -> TextPart:
    """Find the language model of a file.

    Raises
    ------
    ConfigError
        A model type or architecture that is not modelled, with the nearest that is.
    """
    whole = Keys(path, contents)
    model_type = _model_type(whole)
    outer = _OUTER.get(model_type)
    inner, notes = whole, tuple[str, ...]()
    if outer is not None:
        _check_architecture(whole, (outer.architecture,), model_type)
        table = whole.table(outer.key)
        if table is None and not outer.flat:
            whole.refuse(outer.key, "missing")
        inner = whole if table is None else table
        notes = (f"the text part of a multimodal model ({model_type}): encoders of other inputs are left out",)
        inner_type = inner.raw("model_type")
        if inner is whole or inner_type is None:
            model_type = outer.text_type
        elif not isinstance(inner_type, str):
            inner.wrong("model_type", "a text")
        else:
            model_type = _text_name(inner_type)
    family = FAMILIES.get(model_type)
    if family is None:
        _refuse_type(inner, model_type)
    if outer is None:
        _check_architecture(whole, family.architectures, model_type)
    keys = Keys(path, inner.values, inner.place, family.defaults)
    return TextPart(family, keys, whole, notes)


def _text_name(model_type: str) -> str:
    """Return the family of a text part that is called as the whole is."""
    return _OUTER[model_type].text_type if model_type in _OUTER else model_type


def _model_type(whole: Keys) -> str:
    if whole.says("model_type"):
        return whole.text("model_type")
    named = _architecture(whole)
    if named is None:
        whole.refuse("model_type", "missing, and no architectures either; expected the config.json of a language model")
    for name, family in FAMILIES.items():
        if named in family.architectures:
            return name
    for name, outer in _OUTER.items():
        if named == outer.architecture:
            return name
    return whole.refuse("architectures", _unknown_architecture(named))


def _architecture(whole: Keys) -> str | None:
    listed = whole.raw("architectures")
    if listed is None or listed == []:
        return None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        whole.wrong("architectures", "a list of names")
    return str(listed[0])


def _unknown_architecture(name: str) -> str:
    known = [a for family in FAMILIES.values() for a in family.architectures] + [
        o.architecture for o in _OUTER.values()
    ]
    return f"{describe(name)} is not modelled{did_you_mean(name, known) or '; expected a language model with its head'}"


def _check_architecture(whole: Keys, expected: tuple[str, ...], model_type: str) -> None:
    named = _architecture(whole)
    if named is not None and named not in expected:
        words = " or ".join(expected) or "that of the model it is the text part of"
        whole.refuse("architectures", f"{describe(named)} is not modelled; model_type {model_type!r} is as {words}")


def _refuse_type(keys: Keys, model_type: str) -> NoReturn:
    if model_type in _LACKING:
        keys.refuse("model_type", f"{describe(model_type)} is not modelled: {_LACKING[model_type]}")
    known = [*FAMILIES, *_OUTER]
    hint = did_you_mean(model_type, known) or "; the README lists the families that are"
    keys.refuse("model_type", f"{describe(model_type)} is not modelled{hint}")


def refuse_what_was_not_read(part: TextPart) -> None:
    """Complain about keys that change a model's cost and that its family does not know."""
    for keys in (part.keys, part.whole) if part.keys.values is not part.whole.values else (part.keys,):
        for key in _TELLING:
            value = keys.values.get(key)
            if not value or key in part.keys.read or (key == "layer_types" and _all_full(value)):
                continue
            keys.refuse(key, f"{shown(value)} is not modelled: {part.family.config} has no such key")


def _all_full(value: Any) -> bool:
    return isinstance(value, list) and all(entry == "full_attention" for entry in value)


def prediction_note(part: TextPart) -> tuple[str, ...]:
    """Return what is to be said of multi-token prediction, where the file has any."""
    for keys in (part.keys, part.whole):
        for key in _PREDICTIONS:
            n = keys.values.get(key)
            if type(n) is int and n > 0:
                return (f"multi-token prediction is left out ({key} = {n})",)
    return ()
