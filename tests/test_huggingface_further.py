"""Further families of config.json: parameters by hand, layer by layer, and what is said or refused."""

from __future__ import annotations

import json

import pytest
from test_huggingface_refused import CONFIGS

from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.huggingface.further import FURTHER
from g5cp_vec.config.layers import LayerDtypes
from g5cp_vec.config.model import Attention, Dtypes, LayerTable, Model, load_model
from g5cp_vec.config.topology import load_topology
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel


def read(tmp_path, contents, beside=None):
    (tmp_path / "config.json").write_text(json.dumps(contents))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    return load_model(str(tmp_path))


def attention(hidden, heads, kv, width, *, norms=0, qkv_bias=False, o_bias=False):
    """Matrices of queries, keys, values and the output; vectors beside."""
    matrices = hidden * width * (2 * heads + 2 * kv)
    return matrices + norms + qkv_bias * width * (heads + 2 * kv) + o_bias * hidden


def mlp(hidden, width, *, gated=True, bias=False):
    return (2 + gated) * hidden * width + bias * ((1 + gated) * width + hidden)


def edges(vocab, hidden, *, tied):
    """Tables, and the last norm."""
    return vocab * hidden * (2 - tied) + hidden


SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = attention(256, 8, 2, 32)
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
BODY = {
    # What a file says, and what one layer after another has beside two norms of the hidden state.
    "granite": ({}, 4 * [PLAIN + mlp(256, 512)]),
    "arcee": ({"mlp_bias": True}, 4 * [PLAIN + mlp(256, 512, gated=False, bias=True)]),
    "seed_oss": ({}, 4 * [attention(256, 8, 2, 32, qkv_bias=True) + mlp(256, 512)]),
    "smollm3": ({}, 4 * [PLAIN + mlp(256, 512)]),
    "olmo2": ({}, 4 * [attention(256, 8, 2, 32, norms=32 * 10) + mlp(256, 512)]),
    "olmo3": ({}, 4 * [attention(256, 8, 2, 32, norms=32 * 10) + mlp(256, 512)]),
    "olmoe": ({"num_experts": 16, "num_experts_per_tok": 4},
              4 * [attention(256, 8, 2, 32, norms=32 * 10) + 16 * mlp(256, 512) + 256 * 16]),
    "ernie4_5": ({"use_bias": True}, 4 * [attention(256, 8, 2, 32, qkv_bias=True, o_bias=True)
                                          + mlp(256, 512, bias=True)]),
    "ernie4_5_moe": (
        {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 64, "moe_layer_end_index": 2},
        # Layers 1 and 2; a correction for each expert; two shared ones.
        [PLAIN + mlp(256, 512), *2 * [PLAIN + 18 * mlp(256, 64) + 256 * 16 + 16], PLAIN + mlp(256, 512)],
    ),
    "hunyuan_v1_dense": ({"num_experts": 1}, 4 * [attention(256, 8, 2, 32, norms=64) + mlp(256, 512)]),
    "hunyuan_v1_moe": (
        {"num_experts": 16, "moe_topk": [4, 4, 4, 4], "moe_intermediate_size": [64, 64, 64, 128],
         "num_shared_expert": [1, 1, 2, 1]},
        [attention(256, 8, 2, 32, norms=64) + 256 * 16 + 16 * mlp(256, width) + mlp(256, shared * 512)
         for width, shared in ((64, 1), (64, 1), (64, 2), (128, 1))],
    ),
    "exaone4": ({}, 4 * [attention(256, 8, 2, 32, norms=64) + mlp(256, 512)]),
    "exaone_moe": (EXPERTS, [attention(256, 8, 2, 32, norms=64) + mlp(256, 512),
                             *3 * [attention(256, 8, 2, 32, norms=64) + 17 * mlp(256, 64) + 256 * 16 + 16]]),
    "dots1": (
        {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
         "first_k_dense_replace": 1},
        [attention(256, 8, 2, 32, norms=64) + mlp(256, 512),
         *3 * [attention(256, 8, 2, 32, norms=64) + 18 * mlp(256, 64) + 256 * 16 + 16]],
    ),
    "granitemoe": ({"num_local_experts": 16, "num_experts_per_tok": 4}, 4 * [PLAIN + 16 * mlp(256, 512) + 256 * 16]),
    "granitemoeshared": ({"num_local_experts": 16, "shared_intermediate_size": 64},
                         4 * [PLAIN + 16 * mlp(256, 512) + 256 * 16 + mlp(256, 64)]),
    "granitemoehybrid": (
        {"num_local_experts": 0, "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_state": 16,
         "layer_types": ["mamba", "mamba", "attention", "mamba"]},
        # Gate, values, B, C and a step a head in; four taps and a bias of values, B and C; A, D and a step's bias a
        # head; the norm and the projection of the values.
        [mixer + mlp(256, 64) for mixer in
         [256 * (2 * 512 + 2 * 16 + 8) + 5 * (512 + 2 * 16) + 3 * 8 + 512 + 512 * 256] * 2 + [PLAIN]
         + [256 * (2 * 512 + 2 * 16 + 8) + 5 * (512 + 2 * 16) + 3 * 8 + 512 + 512 * 256]],
    ),
    "mistral4": (
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "q_lora_rank": 24,
         "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
        4 * [256 * 24 + 24 + 24 * 8 * 24 + 256 * 40 + 32 + 32 * 8 * 28 + 8 * 12 * 256 + 17 * mlp(256, 64) + 256 * 16],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FURTHER))
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_by_hand(tmp_path, name, tied):
    more, layers = BODY[name]
    model = read(tmp_path, {"model_type": name, **SMALL, **more, "tie_word_embeddings": tied})
    assert model.n_parameters == edges(1000, 256, tied=tied) + sum(layer + 2 * 256 for layer in layers)


# Whole models and their published totals (billions, and decimals given): of SmolLM3-3B's card (3.08B),
# ERNIE-4.5-21B-A3B's (21.83B, 3B active), Hunyuan-A13B's (80B, 13B active), EXAONE-4.0-32B's and 1.2B's,
# Mistral-Small-4-119B's.
EXAONE = {"model_type": "exaone4", "vocab_size": 102400}
PUBLISHED = {
    "smollm3": ({"model_type": "smollm3"}, (3.08, 2), None),
    "ernie": ({"model_type": "ernie4_5_moe", "head_dim": 128}, (21.83, 2), 3),
    "hunyuan": ({
        "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 128167, "num_experts": 64,
        "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32,
        "tie_word_embeddings": True,
    }, (80, 0), 13),
    "exaone 32B": (EXAONE | {
        "hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_hidden_layers": 64, "head_dim": 128, "sliding_window_pattern": "LLLG",
        "layer_types": 16 * [*3 * ["sliding_attention"], "full_attention"],
    }, (32.0, 1), None),
    "exaone 1.2B": (EXAONE | {
        "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 30, "head_dim": 64, "sliding_window": None, "tie_word_embeddings": True,
    }, (1.28, 2), None),
    "mistral": ({"model_type": "mistral4"}, (119, 0), None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_totals(tmp_path, name):
    contents, (total, digits), active = PUBLISHED[name]
    model = read(tmp_path, contents)
    assert round(model.n_parameters / 1e9, digits) == total
    assert active is None or round(model.n_active_parameters / 1e9) == active


def test_windows_and_positions(tmp_path):
    def spans(**contents):
        layers = read(tmp_path, {**SMALL, **contents}).layers
        return [(kind.softmax.window, kind.softmax.rope_dim) for kind in layers]

    assert spans(model_type="exaone4") == 3 * [(4096, None)] + [(None, 0)]
    assert spans(model_type="exaone4", sliding_window=None) == 4 * [(None, None)]
    assert spans(model_type="olmo3") == 3 * [(4096, None)] + [(None, None)]
    assert spans(model_type="olmo2") == 4 * [(None, None)]
    assert spans(model_type="smollm3") == 3 * [(None, None)] + [(None, 0)]
    narrow = spans(model_type="smollm3", use_sliding_window=True, sliding_window=64)
    assert narrow == 3 * [(None, None)] + [(64, 0)]


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [4, 4]}, "moe_topk: expected an integer from 1, or a list of 4"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": 4}, "moe_topk: 4 is more than num_experts = 1"),
        ({"model_type": "hunyuan_v1_dense", "use_cla": True}, "use_cla: layers that share a cache are not modelled"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias: experts without biases beside networks with"),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 7}, "mamba_n_heads: 7 heads of 73 in 1 groups do not"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern: expected an integer"),
        ({"model_type": "deepseek_v2", "use_mla": False}, "use_mla: false is not modelled"),
        ({"model_type": "longcat_flash"}, "two attentions a layer, and experts that compute nothing"),
        ({"model_type": "mimo_v2_flash"}, "keys and values of different widths"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, contents, complaint):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {**SMALL, **contents})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_further_family_is_named_in_the_readme():
    readme = (CONFIGS.parents[2] / "README.md").read_text()
    assert [name for name in FURTHER if f"`{name}`" not in readme] == []


# --- Formats of single modules ----------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", **SMALL, "torch_dtype": "bfloat16"}


def mixed(layers, **more):
    return {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **more}}


def test_modelopt_s_formats_of_single_modules(tmp_path):
    """Each module has its own; a name means what is in it, and nothing that only begins like it; no other has any."""
    names = {f"model.layers.{i}.self_attn.{m}_proj": {"quant_algo": "FP8"} for i in range(4) for m in "qkvo"}
    names |= {f"model.layers.{i}.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for i in (0, 1, 3)}
    model = read(tmp_path, LLAMA, mixed({**names, "lm_head": {"quant_algo": "FP8"}}, kv_cache_quant_algo="FP8"))
    assert (model.dtypes.attention, model.dtypes.ffn, model.dtypes.head, model.dtypes.kv) == (
        "fp8", "nvfp4_a16", "fp8", "fp8",
    )  # fmt: skip
    assert [kind.dtypes and kind.dtypes.ffn for kind in model.layers] == [None, None, "bf16", None]
    some = {name.replace(".mlp", ".ml"): entry for name, entry in names.items()}
    model = read(tmp_path, LLAMA, mixed(some, exclude_modules=["model.layers.0*"]))
    assert model.dtypes.ffn == "bf16"
    assert [kind.dtypes and kind.dtypes.attention for kind in model.layers] == ["bf16", None, None, None]


@pytest.mark.parametrize(
    ("beside", "complaint"),
    [
        (mixed(None), "quantized_layers: missing"),
        (mixed({"model.layers.0.mlp": {"quant_algo": "W8A8"}}), "quantized_layers.model.layers.0.mlp.quant_algo: "),
        (mixed({f"model.layers.0.self_attn.{m}_proj": {"quant_algo": "FP8"} for m in "qo"}),
         "matrices of attention of one layer in several types are not modelled (layer 0: "),
    ],
)  # fmt: skip
def test_formats_that_are_not_modelled(tmp_path, beside, complaint):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LLAMA, beside)
    assert complaint in str(caught.value)


def test_the_file_beside_speaks_for_a_converted_checkpoint(tmp_path):
    """A text part that still says what the original was stored in (as nvidia/Kimi-K2.5-NVFP4's does) does not count."""
    latent = {
        "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    }  # fmt: skip
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    original = {
        "quant_method": "compressed-tensors", "config_groups": groups,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
    }  # fmt: skip
    text = {"model_type": "kimi_k2", **SMALL, **latent, "quantization_config": original}
    contents = {"model_type": "kimi_k25", "dtype": "bfloat16", "text_config": text}
    assert read(tmp_path, contents).dtypes.experts == "int4_group32"
    excluded = ["*self_attn*", "*lm_head", "*shared_experts*"]
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": excluded}}
    model = read(tmp_path, contents, beside)
    assert (model.dtypes.experts, model.dtypes.attention) == ("nvfp4", "bf16")


# --- Parts of attention in types of their own -------------------------------------------------------------------------

DEEPSEEK = json.loads((CONFIGS / "DeepSeek-V3.json").read_text()) | {"quantization_config": None}
SPARSE = json.loads((CONFIGS / "DeepSeek-V3.2.json").read_text()) | {"quantization_config": None}


def deployed(model, **more):
    keys = {"phase": "decode", "cp": 1, "n_chips": 1, "tp": 1, "ep": 1, "dp": 1, "model": model}
    return build_deployment({**keys, "chip": load_chip("b200-sxm"), "topology": load_topology("flat-450"), **more})


def weight_bytes(dep):
    return MemoryModel(dep).at(8, 1, 0).weight_bytes


def excluding(*modules):
    excluded = ["*lm_head", *(f"*self_attn.{module}*" for module in modules)]
    return {"quantization": {"quant_algo": "NVFP4", "exclude_modules": excluded}}


def test_latents_are_projected_up_in_a_type_of_their_own(tmp_path):
    """ModelOpt's recipe nvfp4_wq_a_wkv_a_wq_b_wo: all of a layer's attention in nvfp4 but kv_b_proj."""
    model = read(tmp_path, DEEPSEEK, excluding("kv_b_proj"))
    assert (model.default_dtypes.attention, model.default_dtypes.kv_b_proj) == ("nvfp4", "bf16")
    assert (model.default_dtypes.o_proj, model.dtypes.o_proj, model.dtypes.indexer) == ("nvfp4", None, None)
    dep = deployed(model)
    up = 512 * 128 * (128 + 128)
    # nvfp4: half a byte, a byte for 16, and fp32 for the matrix.
    assert weight_bytes(dep) - weight_bytes(deployed(read(tmp_path, DEEPSEEK, excluding()))) == 61 * (
        2 * up - (up // 2 + up // 16 + 4)
    )
    parts = layer_parts(dep, build_load(dep, 4096, 1, 0), model.layers[0])
    types = {part.flop_class: part.dtype for op in ("qkv", "o_proj") for part in parts[op] if part.unit == "gemm"}
    assert types == {"qkv": "fp4", "q_absorb": "bf16", "v_up": "bf16", "o_proj": "fp4"}
    # The grid's word is for all of it.
    dep = deployed(model, dtype="fp8")
    assert {dep.dtype, dep.o_proj_dtype, dep.kv_b_proj_dtype, dep.indexer_dtype} == {"fp8"}
    by_type = model_flops(deployed(model), build_load(deployed(model), 4096, 1, 0))
    without = model_flops(deployed(read(tmp_path, DEEPSEEK, excluding())), build_load(deployed(model), 4096, 1, 0))
    assert without["fp4"] - by_type["fp4"] == by_type["bf16"] - without["bf16"] == 61 * 2 * up


def test_outputs_are_projected_in_a_type_of_their_own(tmp_path):
    """Only the output projection is converted, and in one layer not even that."""
    kept = excluding("q_", "kv_")
    kept["quantization"]["exclude_modules"].append("model.layers.7.self_attn*")
    model = read(tmp_path, DEEPSEEK, kept)
    assert (model.default_dtypes.attention, model.default_dtypes.o_proj) == ("bf16", "nvfp4")
    dep = deployed(model)
    own = [dep.of_layer(kind) for kind in model.layers]
    assert [one.o_proj_dtype for one in own] == 7 * ["nvfp4"] + ["bf16"] + 53 * ["nvfp4"]
    assert {one.dtype for one in own} == {one.kv_b_proj_dtype for one in own} == {"bf16"}
    # Linear attention has an output projection too.
    linear = {
        **SMALL, "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["out_proj", "o_proj"]},
    }  # fmt: skip
    model = read(tmp_path, linear)
    assert (model.default_dtypes.attention, model.default_dtypes.o_proj) == ("fp8", "bf16")


def test_an_indexer_in_a_type_of_its_own(tmp_path):
    model = read(tmp_path, SPARSE, excluding("indexer"))
    assert (model.default_dtypes.attention, model.default_dtypes.indexer) == ("nvfp4", "bf16")
    dep = deployed(model)
    parts = layer_parts(dep, build_load(dep, 4096, 1, 0), model.layers[0])["qkv"]
    assert [part.dtype for part in parts if part.flop_class == "indexer" and part.unit == "gemm"] == 3 * ["bf16"]
    # Where it is narrower than the rest its inputs are brought to its type, 1536 and 7168 wide.
    names = [f"model.layers.{i}.self_attn.indexer.{name}" for i in range(61) for name in ("wq_b", "wk")]
    model = read(tmp_path, SPARSE, mixed({name: {"quant_algo": "FP8"} for name in names}))
    dep = deployed(model)
    parts = layer_parts(dep, build_load(dep, 4096, 1, 0), model.layers[0])["qkv"]
    brought = [part.bytes for part in parts if part.flop_class == "indexer" and part.unit == "memory"][:2]
    assert brought == [3 * 1536, 3 * 7168]


def test_a_written_layer_s_attention_carries_its_parts_along():
    """A layer that says attention alone means all of it, unless the model says a part."""
    fields = {
        "name": "m", "hidden": 64, "vocab": 100, "n_layers": 2, "d_ff": 64, "dtype": "bf16",
        "attention": Attention(kind="gqa", n_heads=4, n_kv_heads=4, head_dim=16),
        "layer": (LayerTable(dtypes=LayerDtypes(attention="fp8")), LayerTable()),
    }  # fmt: skip
    for said, expected in ((None, ["fp8", "bf16"]), ("nvfp4", ["nvfp4", "nvfp4"])):
        model = Model(**fields, dtypes=Dtypes(o_proj=said))
        dep = deployed(model)
        assert [dep.of_layer(kind).o_proj_dtype for kind in model.layers] == expected


@pytest.mark.parametrize(("algorithm", "rate"), [("W4A8_AWQ", "bf16"), ("W4A8_MXFP4_FP8", "fp4")])
def test_what_is_counted_otherwise_is_said(tmp_path, algorithm, rate):
    said = f"products of {algorithm} run in fp8, and are counted at the rate of {rate}"
    alone = {"quantization": {"quant_algo": algorithm, "group_size": 128}}
    assert said in read(tmp_path, LLAMA, alone).notes
    modules = {f"model.layers.{i}.mlp": {"quant_algo": algorithm, "group_size": 128} for i in range(4)}
    assert said in read(tmp_path, LLAMA, mixed(modules)).notes
