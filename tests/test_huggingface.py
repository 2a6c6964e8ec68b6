"""Hugging Face configurations against what is published of the models, and against transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g5cp_vec.config.model import load_model

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "configs"

# Parameters of the language model. "Index" is model.safetensors.index.json of the repository that the file is named
# after, "header" the headers of its safetensors (whose sum the Hub shows as the model's size), "loaded" the modules
# that its weights were loaded into. Without scales, multi-token prediction and encoders of other inputs.
PUBLISHED = {
    "Meta-Llama-3.1-8B": 8_030_261_248,  # index: total_size 16,060,522,496 bytes of bf16
    "Meta-Llama-3.1-405B": 405_853_388_800,  # header
    "Mistral-7B-v0.1": 7_241_732_096,  # loaded
    "Mixtral-8x7B-v0.1": 46_702_792_704,  # loaded; the card says 46.7B
    "Qwen2.5-0.5B": 494_032_768,  # header
    "Qwen2.5-VL-7B-Instruct": 7_615_616_512,  # header of Qwen2.5-7B, which is its text part
    "Qwen3-8B-FP8": 8_190_735_360,  # loaded, of Qwen3-8B
    "Qwen3-235B-A22B-FP8": 235_093_634_560,  # index of Qwen3-235B-A22B: total_size 470,187,269,120 bytes of bf16
    "Qwen3-VL-30B-A3B-Instruct": 30_532_122_624,  # loaded, of Qwen3-30B-A3B, which is its text part
    "Qwen3-Next-80B-A3B-Thinking": 79_674_391_296,  # index of Qwen3-Coder-Next: 159,348,782,592 bytes of bf16
    "Qwen3.5-397B-A17B": 403_397_928_944 - 456_010_480 - 6_595_568_128,  # header, less encoder, less prediction
    "DeepSeek-V3": 671_026_419_200,  # header; the report (arXiv:2412.19437) says 671B
    "DeepSeek-V3.2": 671_026_419_200 + 61 * 13_959_424,  # V3 with an indexer in each layer (inference code of V3.2-Exp)
    "Kimi-K2-Instruct": 1_026_408_232_448,  # header of the text part of Kimi-K2.5, of its size; card: 1T
    "GLM-4.7-Flash": 29_943_393_920,  # header, routers' corrections included
    "GLM-5.2-NVFP4": 743_377_019_904,  # header of GLM-5.2 in bf16, less 9,952,920,576 of prediction
    "Llama-4-Scout-17B-16E-Instruct": 108_641_793_536 - 871_932_416,  # header, less encoder and projector
    "Llama-4-Maverick-17B-128E-Instruct": 401_583_781_376 - 871_932_416,  # header, less encoder and projector
    "MiniMax-M2.5": 228_689_764_864,  # header of MiniMax-M2.7, of the same dimensions
    "gpt-oss-20b": 20_914_757_184,  # loaded
    "gpt-oss-120b": 116_829_156_672,  # index: total_parameters
    "gemma-2-9b": 9_241_705_984,  # header; 36,966,823,936 bytes of fp32
    "gemma-3-1b-it": 999_885_952,  # header
}

# Cards and reports, to their last digit: (active parameters in units, unit, whether the embedding table counts).
ACTIVE = {
    "Mixtral-8x7B-v0.1": (129, 10**8, True),  # card: "uses 12.9B parameters per token"
    "Qwen3-235B-A22B-FP8": (22, 10**9, True),  # card: "22B activated"
    "DeepSeek-V3": (37, 10**9, False),  # arXiv:2412.19437: "37B activated for each token"
    "DeepSeek-V3.2": (37, 10**9, False),  # as V3; with the indexers 37.5
    "Kimi-K2-Instruct": (32, 10**9, False),  # card: "32B activated parameters"
    "Qwen3.5-397B-A17B": (17, 10**9, True),  # card: "17B activated"
    "Llama-4-Scout-17B-16E-Instruct": (17, 10**9, True),  # card: 17B
    "Llama-4-Maverick-17B-128E-Instruct": (17, 10**9, True),  # card: 17B
    "MiniMax-M2.5": (10, 10**9, False),  # card of M2: "10 billion active parameters"
    "gpt-oss-120b": (51, 10**8, False),  # card: 5.1B active
    "gpt-oss-20b": (36, 10**8, False),  # card: 3.6B active
}

# By hand: caches of two bytes an element; (K and V) * heads * width * bytes * layers, or latent and positions.
KV_BYTES = {
    "Meta-Llama-3.1-8B": 2 * 8 * 128 * 2 * 32,
    "Meta-Llama-3.1-405B": 2 * 8 * 128 * 2 * 126,
    "Mistral-7B-v0.1": 2 * 8 * 128 * 2 * 32,
    "Mixtral-8x7B-v0.1": 2 * 8 * 128 * 2 * 32,
    "Qwen2.5-0.5B": 2 * 2 * 64 * 2 * 24,
    "Qwen2.5-VL-7B-Instruct": 2 * 4 * 128 * 2 * 28,
    "Qwen3-8B-FP8": 2 * 8 * 128 * 2 * 36,
    "Qwen3-235B-A22B-FP8": 2 * 4 * 128 * 2 * 94,
    "Qwen3-VL-30B-A3B-Instruct": 2 * 4 * 128 * 2 * 48,
    "Qwen3-Next-80B-A3B-Thinking": 2 * 2 * 256 * 2 * 12,  # a quarter of the layers has a cache
    "Qwen3.5-397B-A17B": 2 * 2 * 256 * 2 * 15,
    "DeepSeek-V3": (512 + 64) * 2 * 61,
    "DeepSeek-V3.2": ((512 + 64) * 2 + 128 + 4) * 61,  # and a key of the indexer in fp8 with its scale
    "Kimi-K2-Instruct": (512 + 64) * 2 * 61,
    "GLM-4.7-Flash": (512 + 64) * 2 * 47,
    "GLM-5.2-NVFP4": (512 + 64) * 2 * 78 + 21 * (128 + 4),  # 21 layers run an indexer, 57 take the choice of one
    "Llama-4-Scout-17B-16E-Instruct": 2 * 8 * 128 * 2 * 48,
    "Llama-4-Maverick-17B-128E-Instruct": 2 * 8 * 128 * 2 * 48,
    "MiniMax-M2.5": 2 * 8 * 128 * 2 * 62,
    "gpt-oss-20b": 2 * 8 * 64 * 2 * 24,
    "gpt-oss-120b": 2 * 8 * 64 * 2 * 36,
    "gemma-2-9b": 2 * 8 * 256 * 2 * 42,
    "gemma-3-1b-it": 2 * 1 * 256 * 2 * 26,
    "gemma-3-27b-it": 2 * 16 * 128 * 2 * 62,
    "glm-4-9b": 2 * 2 * 128 * 2 * 40,
    "c4ai-command-r-v01": 2 * 64 * 128 * 2 * 40,
}


def config(name: str):
    return load_model(str(CONFIGS / f"{name}.json"))


def spans(model) -> str:
    """One letter a layer: full, window, chunk, sparse, linear."""
    return "".join(kind.softmax.span[0] if kind.softmax else "l" for kind in model.layers)


def test_every_file_has_its_cache_by_hand():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(KV_BYTES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert config(name).n_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_round_to_the_published_ones(name):
    published, unit, embedding_counts = ACTIVE[name]
    model = config(name)
    active = model.n_active_parameters - (0 if embedding_counts else model.parameters["embedding"])
    assert round(active / unit) == published


@pytest.mark.parametrize("name", KV_BYTES)
def test_a_token_s_cache_is_as_by_hand(name):
    assert config(name).kv_bytes_per_token("bf16") == KV_BYTES[name]


COUNTS = json.loads((DATA / "huggingface_counts.json").read_text())["models"]


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: " ".join(map(str, case["config"].values()))[:60])
def test_parameters_are_those_of_transformers_modules(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    assert load_model(str(tmp_path)).n_parameters == case["parameters"]


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama-3.1-8b", "Meta-Llama-3.1-8B"),
        ("llama-3.1-405b", "Meta-Llama-3.1-405B"),
        ("deepseek-v3-671b", "DeepSeek-V3"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B-FP8"),
    ],
)
def test_a_preset_has_the_layers_of_its_configuration(preset, name):
    ours, theirs = load_model(preset), config(name)
    assert ours.layers == theirs.layers
    assert (ours.hidden, ours.vocab, ours.tie_embeddings) == (theirs.hidden, theirs.vocab, theirs.tie_embeddings)


def test_layers_attend_as_the_family_does():
    assert spans(config("gpt-oss-20b")) == "wf" * 12
    assert spans(config("gemma-2-9b")) == "wf" * 21
    assert spans(config("gemma-3-1b-it")) == ("wwwwwf" * 5)[:26]
    assert spans(config("gemma-3-27b-it")) == ("wwwwwf" * 11)[:62]
    assert spans(config("Llama-4-Scout-17B-16E-Instruct")) == "cccf" * 12
    assert spans(config("Qwen3-Next-80B-A3B-Thinking")) == "lllf" * 12
    assert spans(config("DeepSeek-V3.2")) == "s" * 61
    assert spans(config("Mistral-7B-v0.1")) == "w" * 32
    assert spans(config("Qwen2.5-0.5B")) == "f" * 24  # sliding_window = 32768, use_sliding_window = false
    assert config("gemma-3-27b-it").layers[0].softmax.window == 1024
    assert config("Llama-4-Scout-17B-16E-Instruct").layers[0].softmax.chunk == 8192
    assert [kind.ffn for kind in config("Llama-4-Maverick-17B-128E-Instruct").layers] == ["dense", "moe"] * 24
    glm = [kind.softmax.indexer.shared for kind in config("GLM-5.2-NVFP4").layers]
    assert glm == [False] * 2 + [False, True, True, True] * 19


def test_absent_keys_are_as_in_the_configuration_class():
    gemma = config("gemma-3-27b-it")  # says neither its vocabulary nor that its head is the embedding
    assert (gemma.vocab, gemma.tie_embeddings) == (262_208, True)
    assert any("vocab_size = 262208" in note and "Gemma3TextConfig" in note for note in gemma.notes)
    assert config("c4ai-command-r-v01").tie_embeddings
    assert not config("Llama-4-Scout-17B-16E-Instruct").tie_embeddings


def test_what_is_left_out_is_said():
    qwen = config("Qwen3.5-397B-A17B").notes
    assert any("text part of a multimodal model (qwen3_5_moe)" in note for note in qwen)
    assert any("multi-token prediction is left out (mtp_num_hidden_layers = 1)" in note for note in qwen)
    assert any("num_nextn_predict_layers = 1" in note for note in config("DeepSeek-V3").notes)
    assert not any("prediction" in note for note in config("Kimi-K2-Instruct").notes)  # 0 such layers
    assert config("Meta-Llama-3.1-8B").notes == ()


def test_the_file_in_a_folder_bears_the_folder_s_name(tmp_path):
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_bytes((CONFIGS / "Meta-Llama-3.1-8B.json").read_bytes())
    model = load_model("My-Llama", tmp_path)
    assert model.name == "My-Llama"
    assert model.fingerprint == config("Meta-Llama-3.1-8B").fingerprint


def test_the_fingerprint_follows_the_contents(tmp_path):
    contents = json.loads((CONFIGS / "Meta-Llama-3.1-8B.json").read_text())
    path = tmp_path / "config.json"
    prints = set()
    for change in ({}, {"num_hidden_layers": 31}, {"vocab_size": 128}, {"torch_dtype": "float16"}):
        path.write_text(json.dumps(contents | change))
        prints.add(load_model(str(path)).fingerprint)
    path.write_text(json.dumps(contents | {"rope_theta": 1.0, "_name_or_path": "elsewhere"}))  # costs nothing
    assert len(prints) == 4
    assert load_model(str(path)).fingerprint in prints


def read(tmp_path, base: str, **changes):
    contents = json.loads((CONFIGS / f"{base}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(contents))
    return load_model(str(tmp_path))


def test_old_and_new_spellings_mean_the_same(tmp_path):
    llama = config("Meta-Llama-3.1-8B")
    contents = json.loads((CONFIGS / "Meta-Llama-3.1-8B.json").read_text())
    del contents["torch_dtype"], contents["architectures"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(contents | {"dtype": "bfloat16"}))
    assert load_model(str(path)).fingerprint == llama.fingerprint
    del contents["model_type"]
    path.write_text(json.dumps(contents | {"dtype": "torch.bfloat16", "architectures": ["LlamaForCausalLM"]}))
    assert load_model(str(path)).fingerprint == llama.fingerprint
    # transformers 5 writes Qwen's num_experts as num_local_experts.
    contents = json.loads((CONFIGS / "Qwen3-235B-A22B-FP8.json").read_text())
    contents["num_local_experts"] = contents.pop("num_experts")
    path.write_text(json.dumps(contents))
    assert load_model(str(path)).fingerprint == config("Qwen3-235B-A22B-FP8").fingerprint


def test_heads_that_are_not_said(tmp_path):
    # LlamaConfig: as many key/value heads as heads; MistralConfig: 8, whatever there are.
    contents = json.loads((CONFIGS / "Meta-Llama-3.1-8B.json").read_text())
    del contents["num_key_value_heads"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(contents))
    assert load_model(str(path)).layers[0].softmax.n_kv_heads == 32
    contents |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    path.write_text(json.dumps(contents))
    assert load_model(str(path)).layers[0].softmax.n_kv_heads == 8
    assert read(tmp_path, "Meta-Llama-3.1-8B", head_dim=64).layers[0].softmax.head_dim == 64


def test_windows_of_qwen_begin_at_max_window_layers(tmp_path):
    model = read(tmp_path, "Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=21)
    assert spans(model) == "f" * 21 + "w" * 3
    listed = ["sliding_attention"] + ["full_attention"] * 23
    model = read(tmp_path, "Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=21, layer_types=listed)
    assert spans(model) == "w" + "f" * 23


def test_llama_4_without_chunks_or_with_positions_of_its_own(tmp_path):
    text = json.loads((CONFIGS / "Llama-4-Scout-17B-16E-Instruct.json").read_text())["text_config"]
    assert (
        spans(read(tmp_path, "Llama-4-Scout-17B-16E-Instruct", text_config=text | {"attention_chunk_size": None}))
        == "f" * 48
    )
    own = text | {"no_rope_layers": [1, 0] * 24}
    assert spans(read(tmp_path, "Llama-4-Scout-17B-16E-Instruct", text_config=own)) == "cf" * 24


V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "torch_dtype": "bfloat16",
}
# Dimensions as published, in the words of a configuration, with the parameters of the checkpoint.
DIMENSIONS = {
    # arXiv:2405.04434, sections 3.1.2 and B: 236B and 15.7B parameters.
    "DeepSeek-V2": (
        V2
        | {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60}
        | {"num_attention_heads": 128, "n_routed_experts": 160, "topk_method": "group_limited_greedy"},
        235_741_434_880,
    ),
    "DeepSeek-V2-Lite": (
        V2
        | {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27}
        | {"num_attention_heads": 16, "n_routed_experts": 64, "q_lora_rank": None},
        15_706_484_224,
    ),
    # Header of microsoft/phi-4.
    "phi-4": (
        {"model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40}
        | {"num_key_value_heads": 10, "num_hidden_layers": 40, "vocab_size": 100352, "sliding_window": None},
        14_659_507_200,
    ),
    # Tensors of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B without prediction; keys of the code before transformers 5.
    "Nemotron-3-Nano-30B-A3B": (
        {"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
        | {"moe_shared_expert_intermediate_size": 3712, "mamba_num_heads": 64, "mamba_head_dim": 64},
        31_577_940_288,
    ),
}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_published_dimensions_give_the_published_parameters(name, tmp_path):
    contents, parameters = DIMENSIONS[name]
    (tmp_path / "config.json").write_text(json.dumps(contents))
    assert load_model(str(tmp_path)).n_parameters == parameters


def test_lightning_attention_of_minimax_text_01(tmp_path):
    # arXiv:2501.08313, section 2: 80 layers, every eighth with softmax; 456B parameters, 45.9B activated.
    contents = {"model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216, "head_dim": 128}
    contents |= {"num_attention_heads": 64, "num_hidden_layers": 80, "num_local_experts": 32, "vocab_size": 200064}
    contents |= {"attn_type_list": ([0] * 7 + [1]) * 10, "rotary_dim": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    model = load_model(str(tmp_path))
    assert spans(model) == "lllllllf" * 10
    assert round(model.n_parameters / 10**9) == 456
    # Without the embedding table and the head, as there.
    active = model.n_active_parameters - model.parameters["embedding"] - model.parameters["head"]
    assert round(active / 10**8) == 459
    assert model.kv_bytes_per_token("bf16") == 10 * 2 * 8 * 128 * 2
