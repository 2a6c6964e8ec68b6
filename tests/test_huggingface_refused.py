"""Files that are not the configuration of a model, values that cannot be, and what is not modelled: one line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.cli import main
from g5cp_vec.config.huggingface.families import FAMILIES
from g5cp_vec.config.model import load_model
from g5cp_vec.errors import ConfigError

CONFIGS = Path(__file__).parent / "data" / "configs"
ALL = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
_ABSENT = object()


def complaints(path: Path) -> list[str]:
    try:
        load_model(str(path))
    except ConfigError as error:
        return error.lines
    return []


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    (line,) = caught.value.lines
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def changed(tmp_path, base: str, **changes) -> str:
    """The complaint about a file with some keys changed; two underscores lead into an object."""
    contents = json.loads(json.dumps(ALL[base]))
    for name, value in changes.items():
        place, *path = contents, *name.split("__")
        for key in path[:-1]:
            place = place[key]
        if value is _ABSENT:
            del place[path[-1]]
        else:
            place[path[-1]] = value
    file = tmp_path / "config.json"
    file.write_text(json.dumps(contents))
    return refusal(file)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[]", "expected a JSON object, got a list of 0"),
        (b"null", "expected a JSON object, got null"),
        (b"NaN", "expected a JSON object, got NaN"),
        (b'"llama"', "expected a JSON object, got 'llama'"),
        (b"\xff\xfe{}", "is not UTF-8 text (byte 0), expected JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b"{}", "model_type: missing, and no architectures either"),
        (b'{"model_type": 7}', "model_type: expected a text, got 7"),
        (b'{"model_type": "lama"}', "model_type: 'lama' is not modelled; did you mean 'llama'?"),
        (b'{"model_type": "qwen3_mo"}', "model_type: 'qwen3_mo' is not modelled; did you mean 'qwen3_moe'?"),
        (b'{"model_type": "zebra"}', "model_type: 'zebra' is not modelled; the README lists the families that are"),
        (b'{"architectures": ["LlamaForCausalML"]}', "architectures: 'LlamaForCausalML' is not modelled; did you mean"),
        (b'{"architectures": "LlamaForCausalLM"}', "architectures: expected a list of names"),
        (b'{"_class_name": "FluxTransformer2DModel"}', "model_type: missing"),
    ],
)
def test_not_the_file_of_a_model(tmp_path, text, complaint):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    assert refusal(path).startswith(complaint)


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(ConfigError, match="is a directory without a config.json"):
        load_model(str(tmp_path))


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="no such model file"):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("32", "'32'"),
        (True, "true"),
        (32.0, "32.0"),
        (0, "0"),
        (-1, "-1"),
        (None, "null"),
        ([32], "a list of 1"),
        ({}, "an object"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (10**9, "1000000000"),
        (10**40, "1" + "0" * 40),
    ],
)
def test_a_number_of_layers_that_cannot_be(tmp_path, value, got):
    line = changed(tmp_path, "Meta-Llama-3.1-8B", num_hidden_layers=value)
    assert line == f"num_hidden_layers: expected an integer from 1 to 10000, got {got}"


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (
            "Meta-Llama-3.1-8B",
            {"hidden_size": "big"},
            "hidden_size: expected an integer from 1 to 2147483647, got 'big'",
        ),
        (
            "Meta-Llama-3.1-8B",
            {"hidden_size": 2**31},
            "hidden_size: expected an integer from 1 to 2147483647, got 2147483648",
        ),
        ("Meta-Llama-3.1-8B", {"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads"),
        (
            "Meta-Llama-3.1-8B",
            {"num_attention_heads": 24},
            "num_attention_heads: 24 does not divide hidden_size = 4096",
        ),
        ("Meta-Llama-3.1-8B", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ("Meta-Llama-3.1-8B", {"torch_dtype": "int7"}, "torch_dtype: expected one of bfloat16, float16"),
        ("Meta-Llama-3.1-8B", {"dtype": "float16"}, "torch_dtype: 'bfloat16' contradicts dtype = 'float16'"),
        (
            "Meta-Llama-3.1-8B",
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures: 'LlamaForSequence",
        ),
        (
            "Meta-Llama-3.1-8B",
            {"vocab_size": 2**31 - 1, "hidden_size": 2**30},
            "more than 72057594037927936 parameters",
        ),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention"] * 23},
            "layer_types: expected a list of 24, one entry a layer",
        ),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_atention"] * 24},
            "layer_types[0]: 'full_atention' is not modelled, exp",
        ),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window: expected an integer from 1 to 2147483647, got null"),
        (
            "gpt-oss-20b",
            {"num_local_experts": 2, "num_experts_per_tok": 4},
            "num_experts_per_tok: 4 is more than num_l",
        ),
        ("gpt-oss-20b", {"num_experts_per_tok": 3}, "experts_per_token: 4 contradicts num_experts_per_tok = 3"),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "kv_lora_rank: expected an integer from 1 to 2147483647, got 0"),
        (
            "DeepSeek-V3",
            {"first_k_dense_replace": -3},
            "first_k_dense_replace: expected an integer from 0 to 2147483647",
        ),
        (
            "Qwen3-Next-80B-A3B-Thinking",
            {"mlp_only_layers": [48]},
            "mlp_only_layers: expected a list of layers from 0 to 47",
        ),
        (
            "Qwen3-Next-80B-A3B-Thinking",
            {"linear_num_key_heads": 5},
            "linear_num_key_heads: 5 does not divide linear_num",
        ),
        (
            "Qwen3-Next-80B-A3B-Thinking",
            {"partial_rotary_factor": 2},
            "partial_rotary_factor: expected a number from 0",
        ),
        ("gemma-3-27b-it", {"text_config": _ABSENT}, "text_config: missing"),
        ("gemma-3-27b-it", {"text_config": [1]}, "text_config: expected an object, got a list of 1"),
        (
            "gemma-3-27b-it",
            {"text_config__model_type": "gemma9"},
            "text_config.model_type: 'gemma9' is not modelled; did",
        ),
        (
            "gemma-3-27b-it",
            {"text_config__hidden_size": 0},
            "text_config.hidden_size: expected an integer from 1 to 2147483647",
        ),
        (
            "GLM-5.2-NVFP4",
            {"indexer_types": ["shared"] * 78},
            "indexer_types: the first layer has no earlier one to share",
        ),
        ("GLM-5.2-NVFP4", {"num_experts": 9}, "num_experts: 9 contradicts n_routed_experts = 256; they mean the same"),
        ("MiniMax-M2.5", {"rotary_dim": 129}, "rotary_dim: expected an integer from 0 to 128, got 129"),
    ],
)
def test_values_that_cannot_be(tmp_path, base, changes, complaint):
    assert changed(tmp_path, base, **changes).startswith(complaint)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (
            "gemma-3-1b-it",
            {"model_type": "gemma3n_text"},
            "model_type: 'gemma3n_text' is not modelled: per-layer embed",
        ),
        ("gemma-3-1b-it", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: 256 is not modelled"),
        ("gemma-3-1b-it", {"num_kv_shared_layers": 10}, "num_kv_shared_layers: 10 is not modelled"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true is not modelled"),
        ("Meta-Llama-3.1-8B", {"model_type": "mllama"}, "model_type: 'mllama' is not modelled: cross-attention layers"),
        (
            "Meta-Llama-3.1-8B",
            {"cross_attention_layers": [3, 8]},
            "cross_attention_layers: a list of 2 is not modelled",
        ),
        (
            "Meta-Llama-3.1-8B",
            {"num_local_experts": 8},
            "num_local_experts: 8 is not modelled: LlamaConfig has no such",
        ),
        (
            "Meta-Llama-3.1-8B",
            {"layer_types": ["sliding_attention"] * 32},
            "layer_types[0]: 'sliding_attention' is not",
        ),
        ("DeepSeek-V3", {"index_topk": 2048}, "index_topk: 2048 is not modelled: DeepseekV3Config has no such key"),
        (
            "DeepSeek-V3",
            {"model_type": "deepseek_v4"},
            "model_type: 'deepseek_v4' is not modelled: compressed attention",
        ),
        ("MiniMax-M2.5", {"shared_intermediate_size": 1024}, "shared_intermediate_size: 1024 is not modelled"),
        ("MiniMax-M2.5", {"attn_type_list": [0] * 62}, "attn_type_list[0]: 0 is not modelled, expected one of 1"),
        ("Qwen2.5-0.5B", {"is_encoder_decoder": True}, "is_encoder_decoder: true is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, base, changes, complaint):
    assert changed(tmp_path, base, **changes).startswith(complaint)


NEMOTRON_H = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern: expected letters M, E, * or -, one a layer"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern: expected a text, got null"),
        ({"num_hidden_layers": 4}, "num_hidden_layers: 4, but hybrid_override_pattern has 5 layers"),
        ({"moe_latent_size": 1024}, "moe_latent_size: 1024 is not modelled"),
        ({"use_bias": True}, "use_bias: biases of these projections are not modelled"),
        ({"mlp_bias": True}, "mlp_bias: shared experts with biases beside routed ones without"),
        ({"n_groups": 3}, "n_groups: 3 does not divide mamba_num_heads = 128"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type[1]: 'conv' is not modelled"),
    ],
)
def test_nemotron_h(tmp_path, changes, complaint):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NEMOTRON_H | changes))
    assert refusal(path).startswith(complaint)


def block(n_heads_in_group=8, ffn_mult=1.0, **more):
    attention = {"n_heads_in_group": n_heads_in_group, "no_op": False, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"ffn_mult": ffn_mult, "no_op": False, "replace_with_linear": False} | more}


def test_a_searched_llama(tmp_path):
    skipped = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True, "ffn_mult": None}}
    no_attention = {"attention": skipped["attention"], "ffn": block()["ffn"]}
    contents = {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "vocab_size": 100,
        "block_configs": [block(4), no_attention, block(8, 2.625)],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(contents))
    model = load_model(str(path))
    # Widths: 2 * 1024 / 3 = 682 and 2 * 2.625 * 1024 / 3 = 1792, up to multiples of 256.
    assert [kind.d_ff for kind in model.layers] == [768, 768, 1792]
    assert [kind.softmax and kind.softmax.n_kv_heads for kind in model.layers] == [2, None, 1]
    attention = [1024 * (2 * 1024 + 2 * 128 * n) for n in (2, 1)]
    assert model.n_parameters == 2 * 100 * 1024 + 1024 * (1 + 5) + sum(attention) + 3 * 1024 * (768 + 768 + 1792)
    path.write_text(json.dumps(contents | {"block_configs": [block(), block(), block(replace_with_linear=True)]}))
    assert refusal(path).startswith("block_configs[2].ffn.replace_with_linear: a linear layer in the place of a block")


def test_the_command_line_says_one_line_and_exits_with_2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ALL["Meta-Llama-3.1-8B"] | {"hidden_size": None}))
    point = '[fixed]\nmodel = "."\nchip = "h200-sxm"\ntopology = "flat-450"\nn_chips = 8\ncp = 1\n'
    point += 'phase = "decode"\nseq_len = 8\n'
    (tmp_path / "point.toml").write_text(point)
    for command in ("check", "run", "sweep"):
        result = CliRunner().invoke(main, [command, str(tmp_path / "point.toml")])
        assert result.exit_code == 2
        (line,) = result.output.strip().splitlines()
        assert "hidden_size: expected an integer from 1 to 2147483647, got null" in line


def test_every_family_is_named_in_the_readme():
    readme = (CONFIGS.parents[2] / "README.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in readme] == []


GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([2**31, 10**9, 10**30]),
    st.floats(),
    st.sampled_from(["", "8", "full_attention", "re:(", "llama", "bfloat16", "a\nb"]),
    st.lists(st.one_of(st.none(), st.integers(-1, 3), st.just("full_attention")), max_size=3),
    st.dictionaries(st.sampled_from(["model_type", "weights", "a"]), st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbage_is_a_model_or_a_line(tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(ALL)))
    contents = json.loads(json.dumps(ALL[name]))
    objects = [contents] + [contents[k] for k in ("text_config", "quantization_config") if k in contents]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(objects))
        key = data.draw(st.sampled_from([*sorted(place), "layer_types", "num_experts", "text_config"]))
        if data.draw(st.booleans()):
            place[key] = data.draw(GARBAGE)
        else:
            place.pop(key, None)
    path = tmp_path_factory.mktemp("garbage") / "config.json"
    path.write_text(json.dumps(contents))
    lines = complaints(path)
    assert all(str(path) in line and "\n" not in line for line in lines)
