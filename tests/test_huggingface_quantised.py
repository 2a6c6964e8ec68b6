"""Element types that quantised checkpoints are stored in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.dtypes import matrix_bytes
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import load_topology
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel

CONFIGS = Path(__file__).parent / "data" / "configs"


def read(tmp_path, base: str, quantisation=None, **changes):
    contents = json.loads((CONFIGS / f"{base}.json").read_text()) | changes
    contents.pop("quantization_config", None)
    if quantisation is not None:
        contents["quantization_config"] = quantisation
    (tmp_path / "config.json").write_text(json.dumps(contents))
    return load_model(str(tmp_path))


def stored(model) -> dict[str, str]:
    types = model.default_dtypes.model_dump()
    return {name: types[name] for name in ("attention", "ffn", "experts", "head", "kv")}


def refusal(tmp_path, base: str, quantisation) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, base, quantisation)
    assert len(caught.value.lines) == 1
    return caught.value.lines[0].removeprefix(f"{tmp_path}/config.json: quantization_config")


def config(name: str):
    return load_model(str(CONFIGS / f"{name}.json"))


def test_whole_files():
    plain = {"head": None, "kv": "bf16"}
    blocks = {"attention": "fp8_block", "ffn": "fp8_block", "experts": "fp8_block", **plain}
    assert stored(config("DeepSeek-V3")) == stored(config("Kimi-K2-Instruct")) == blocks
    # No layer is dense or has shared experts: nothing says what those would be stored in.
    assert stored(config("Qwen3-235B-A22B-FP8")) == blocks | {"ffn": "bf16"}
    assert stored(config("MiniMax-M2.5")) == blocks | {"ffn": "bf16"}
    half = {"attention": "bf16", "ffn": "bf16", **plain}
    assert stored(config("gpt-oss-20b")) == half | {"experts": "mxfp4"}
    assert stored(config("GLM-5.2-NVFP4")) == half | {"experts": "nvfp4", "kv": "fp8"}
    note = [note for note in config("GLM-5.2-NVFP4").notes if note.startswith("stored as")]
    assert note == ["stored as attention bf16, ffn bf16, experts nvfp4, kv fp8; everything else bf16"]


def test_types_that_are_not_quantised(tmp_path):
    assert config("gemma-2-9b").dtype == "fp32"
    assert read(tmp_path, "Meta-Llama-3.1-8B", torch_dtype="float16").dtype == "fp16"
    silent = config("MiniMax-M2.5")
    assert silent.dtype == "bf16"
    assert any("does not say the type" in note for note in silent.notes)


def compressed(bits: int, kind: str, ignore=("lm_head",), targets=("Linear",), **weights):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    group = {"input_activations": None, "output_activations": None, "targets": list(targets), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": list(ignore)}


# As in the text part of moonshotai/Kimi-K2.5 (copy in ai-dynamo/aiconfigurator).
KIMI = compressed(
    4,
    "int",
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    group_size=32,
    strategy="group",
)


def test_compressed_tensors(tmp_path):
    kimi = read(tmp_path, "Kimi-K2-Instruct", KIMI)
    plain = {"attention": "bf16", "ffn": "bf16", "head": None, "kv": "bf16"}
    assert stored(kimi) == plain | {"experts": "int4_group32"}
    channel = compressed(8, "float", strategy="channel")
    types = stored(read(tmp_path, "Meta-Llama-3.1-8B", channel))
    assert (types["attention"], types["ffn"], types["head"]) == ("fp8_a16", "fp8_a16", None)
    headed = compressed(8, "int", ignore=[], strategy="channel")
    assert stored(read(tmp_path, "Meta-Llama-3.1-8B", headed))["head"] == "int8_a16"
    # A tied head is the embedding, which no rule for matrices means.
    assert stored(read(tmp_path, "Qwen2.5-0.5B", headed))["head"] is None
    wide = compressed(4, "float", group_size=16, strategy="tensor_group")
    cached = wide | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert stored(read(tmp_path, "Meta-Llama-3.1-8B", cached))["kv"] == "fp8"
    assert stored(read(tmp_path, "Meta-Llama-3.1-8B", cached))["ffn"] == "nvfp4_a16"


def test_two_groups_with_formats_of_their_own(tmp_path):
    mixed = compressed(8, "float", strategy="channel", targets=["re:.*self_attn.*"])
    mixed["config_groups"]["group_1"] = {
        "targets": ["re:.*block_sparse_moe.experts.*"],
        "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": False},
    }
    types = stored(read(tmp_path, "Mixtral-8x7B-v0.1", mixed))
    assert (types["attention"], types["experts"]) == ("fp8_a16", "int4_group128_zeros")


@pytest.mark.parametrize(
    ("quantisation", "dtype"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4_group128_zeros"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, "int4_group64"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, "int4_group128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, "int4_group32_zeros"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_a16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8_group128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, "int8_group32_zeros"),
        ({"quant_algo": "W4A16_NVFP4", "group_size": 16}, "nvfp4_a16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 128, "ignore": ["lm_head"]}, "int4_group128"),
    ],
)
def test_one_format_for_all(tmp_path, quantisation, dtype):
    types = stored(read(tmp_path, "Meta-Llama-3.1-8B", quantisation))
    assert types["attention"] == types["ffn"] == dtype


def test_modules_that_are_not_converted(tmp_path):
    def types(base: str, *names: str):
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": list(names)}
        found = stored(read(tmp_path, base, fp8))
        return found["attention"], found["ffn"], found["experts"]

    quantised = ("fp8_block", "fp8_block", "fp8_block")
    assert types("DeepSeek-V3", "gate", "lm_head") == quantised  # the router, not a gate_proj
    assert types("DeepSeek-V3", "model.layers.*.self_attn") == ("bf16", *quantised[1:])
    assert types("DeepSeek-V3", "self_attn") == ("bf16", *quantised[1:])
    assert types("DeepSeek-V3", *(f"model.layers.{i}.self_attn" for i in range(61))) == ("bf16", *quantised[1:])
    # A multimodal checkpoint has its text part under another name.
    names = [f"model.language_model.layers.{i}.self_attn" for i in range(48)]
    assert types("Qwen3-VL-30B-A3B-Instruct", *names)[0] == "bf16"


def test_modelopt_s_own_file_beside(tmp_path):
    # As beside nvidia/Qwen3-32B-NVFP4 (copy in ai-dynamo/aiconfigurator).
    said = {
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    bare = read(tmp_path, "Qwen3-8B-FP8", torch_dtype="bfloat16")
    assert stored(bare)["attention"] == "bf16"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    model = read(tmp_path, "Qwen3-8B-FP8", torch_dtype="bfloat16")
    assert stored(model) == {"attention": "nvfp4", "ffn": "nvfp4", "experts": "nvfp4", "head": None, "kv": "fp8"}
    assert model.fingerprint != bare.fingerprint


@pytest.mark.parametrize(
    ("quantisation", "complaint"),
    [
        ({"quant_method": "aqlm"}, ".quant_method: 'aqlm' is not modelled; modelled: fp8, "),
        ({"quant_method": 4}, ".quant_method: expected a text, got 4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ".load_in_4bit: bitsandbytes' 4-bit formats"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, ".bits: 3-bit integers in groups of 128 are not"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 16}, ".bits: 8-bit integers in groups of 16 are not"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:x": {}}}, ".dynamic: modules with"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ".weight_block_size: blocks of [64, 64] are not"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, ".modules_to_not_convert: expected a list"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, ".modules_to_not_convert: is not a list of regular"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["(a+)+b"]}, ".modules_to_not_convert: '(a+)+b' repeats"),
        ({"quant_algo": "MIXED_PRECISION"}, ".quantized_layers: missing, but quant_algo is MIXED_PRECISION"),
        ({"quant_method": "compressed-tensors"}, ".config_groups: missing"),
        (
            compressed(8, "float", strategy="block", block_structure=[32, 32]),
            ".config_groups.group_0.weights.block_structure: ",
        ),
        (
            compressed(4, "int", targets=["Linear", "Embedding"], group_size=128),
            ".config_groups.group_0.targets: quant",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.self_attn.k_proj"]},
            ": matrices of attention of one layer in several types are not modelled (layer 3: self_attn.q_proj in fp8 "
            "and self_attn.k_proj in bf16)",
        ),
        (7, ": expected an object, got 7"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, quantisation, complaint):
    assert refusal(tmp_path, "Meta-Llama-3.1-8B", quantisation).startswith(complaint)


def deployment(model, **more):
    chip, topology = load_chip("h200-sxm"), load_topology("flat-450")
    keys = {"phase": "decode", "cp": 1, "n_chips": 8, "tp": 8, "ep": 8, "dp": 1}
    return build_deployment({**keys, "model": model, "chip": chip, "topology": topology, **more})


def test_a_grid_s_types_come_first(tmp_path):
    glm = config("GLM-5.2-NVFP4")
    dep = deployment(glm)
    assert (dep.dtype, dep.ffn_dtype, dep.expert_dtype, dep.kv_dtype) == ("bf16", "bf16", "nvfp4", "fp8")
    dep = deployment(glm, dtype="fp8", kv_dtype="bf16")
    assert (dep.dtype, dep.ffn_dtype, dep.expert_dtype, dep.kv_dtype) == ("fp8", "fp8", "fp8", "bf16")
    gemma = config("gemma-2-9b")
    assert (deployment(gemma).dtype, deployment(gemma).embedding_dtype) == ("fp32", "fp32")
    assert (deployment(gemma, dtype="bf16").dtype, deployment(gemma, dtype="bf16").embedding_dtype) == ("bf16", "bf16")


def llama_405b_fp8(tmp_path):
    """As meta-llama/Llama-3.1-405B-FP8: only networks are converted, and neither the first nor the last of them."""
    kept = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(126) for name in "qkvo"]
    kept += [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 125) for name in ("gate", "up", "down")]
    return read(tmp_path, "Meta-Llama-3.1-405B", {"quant_method": "fbgemm_fp8", "modules_to_not_convert": kept})


def test_layers_that_are_stored_otherwise(tmp_path):
    model = llama_405b_fp8(tmp_path)
    assert (model.default_dtypes.attention, model.default_dtypes.ffn) == ("bf16", "fp8")
    assert [i for i, kind in enumerate(model.layers) if kind.dtypes is not None] == [0, 125]
    assert "2 of 126 layers are stored otherwise, as layer 0: ffn bf16" in model.notes
    # In fp8: three matrices of 16384 x 53248 in 124 layers. Everything else has two bytes.
    narrow = 124 * 3 * 16384 * 53248
    assert narrow == 324_538_466_304
    wide = 405_853_388_800 - narrow
    n_bytes = build_memory(deployment(model, n_chips=1, tp=1))
    assert n_bytes == narrow + 2 * wide == 487_168_311_296
    # The grid's word is for all layers.
    assert build_memory(deployment(model, n_chips=1, tp=1, ffn_dtype="bf16")) == 2 * 405_853_388_800
    assert build_memory(deployment(model, n_chips=1, tp=1, dtype="bf16")) == 2 * 405_853_388_800
    assert build_memory(deployment(model, n_chips=1, tp=1, ffn_dtype="fp8")) == n_bytes - 2 * narrow // 124


def build_memory(dep) -> int:
    return MemoryModel(dep).at(8, 1, 0).weight_bytes


def test_layers_that_are_stored_otherwise_run_at_their_own_rate(tmp_path):
    model = llama_405b_fp8(tmp_path)
    dep = deployment(model)
    load = build_load(dep, 4096, 1, 0)
    rates = [{part.dtype for part in layer_parts(dep, load, kind)["ffn"] if part.flops} for kind in model.kinds[0]]
    assert rates == [{"bf16"}, {"fp8"}]
    by_type = model_flops(dep, load)
    # A decode step of one token: two FLOPs a weight.
    assert by_type["fp8"] == 2 * 324_538_466_304


def test_zero_points_take_four_bits_a_group():
    assert matrix_bytes(256, 3, "int4_group128_zeros") == 256 * 3 // 2 + 6 * 2 + 3
    assert matrix_bytes(256, 3, "int4_group64") == 256 * 3 // 2 + 12 * 2
    assert matrix_bytes(96, 1, "int4_group32_zeros") == 48 + 3 * 2 + 2


@pytest.mark.parametrize(
    ("weights", "alone", "both"),
    [
        ({"bits": 8, "kind": "float", "strategy": "channel"}, "fp8_a16", "fp8"),
        ({"bits": 8, "kind": "int", "strategy": "channel"}, "int8_a16", "int8"),
        ({"bits": 4, "kind": "float", "group_size": 16}, "nvfp4_a16", "nvfp4"),
        ({"bits": 4, "kind": "float", "group_size": 32}, "mxfp4_a16", "mxfp4"),
    ],
)
def test_weights_alone_or_with_their_inputs(tmp_path, weights, alone, both):
    """What a checkpoint says of inputs decides what products run in: narrow weights alone are widened."""
    said = compressed(**weights)
    models = [read(tmp_path, "Meta-Llama-3.1-8B", said)]
    said["config_groups"]["group_0"]["input_activations"] = {"num_bits": weights["bits"], "dynamic": True}
    models.append(read(tmp_path, "Meta-Llama-3.1-8B", said))
    assert [model.default_dtypes.ffn for model in models] == [alone, both]
    chip = load_chip("b200-sxm")
    peaks = []
    for model in models:
        dep = deployment(model, chip=chip)
        parts = layer_parts(dep, build_load(dep, 4096, 1, 0), model.layers[0])["ffn"]
        product = next(part for part in parts if part.unit == "gemm")
        peaks.append(chip.peak(product.dtype))
        # Inputs are brought to a narrower type only where products run in it: before each of the two products.
        assert sum(part.unit == "memory" for part in parts) == 2 + 2 * (product.dtype in ("fp8", "fp4"))
        # Whatever they run in, weights take their stored bytes.
        assert product.bytes >= matrix_bytes(4096, 2 * 14336 // 8, both)
    assert peaks[0] == chip.peak("bf16")
    assert (peaks[1] > peaks[0]) == (both != "int8")  # this chip has no rate for int8
    assert build_memory(deployment(models[0])) == build_memory(deployment(models[1]))


def test_groups_of_weights_and_inputs_are_refused(tmp_path):
    said = compressed(8, "int", group_size=128, strategy="group")
    said["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    assert ".config_groups.group_0.weights.num_bits: 8-bit integers in groups of 128 of weights and inputs are not" in (
        refusal(tmp_path, "Meta-Llama-3.1-8B", said)
    )
