"""Exact parameter counts and cache sizes: published totals, sums by hand, and the general form of a model file."""

from __future__ import annotations

from pathlib import Path

import pytest

from g5cp_vec.config.dtypes import BLOCK_FORMATS, matrix_bytes
from g5cp_vec.config.model import Attention, Indexer, LayerTable, Linear, Model, Moe, load_model
from g5cp_vec.errors import ConfigError

FULL = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}


def model(**fields) -> Model:
    return Model.model_validate({"name": "m", "dtype": "bf16", **fields})


def gqa(heads, kv_heads, head_dim, **more) -> Attention:
    return Attention(kind="gqa", n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, **more)


def deepseek(**more) -> Attention:
    return Attention(
        kind="mla", **{"n_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                       "qk_rope_head_dim": 64, "v_head_dim": 128, **more},
    )  # fmt: skip


# Each model with its total, by the numbers of its Hugging Face config.json.
MIXTRAL = model(
    hidden=4096, vocab=32_000, n_layers=32, attention=gqa(32, 8, 128), moe=Moe(n_experts=8, top_k=2, d_expert=14_336)
)
GPT_OSS = model(
    hidden=2880, vocab=201_088, n_layers=36, ffn_bias=True, layer=(
        LayerTable(attention=gqa(64, 8, 64, window=128, sinks=True, qkv_bias=True, o_bias=True)),
        LayerTable(attention=gqa(64, 8, 64, sinks=True, qkv_bias=True, o_bias=True)),
    ), moe=Moe(n_experts=128, top_k=4, d_expert=2880, router_bias=True),
)  # fmt: skip
QWEN_NEXT = model(
    hidden=2048, vocab=151_936, n_layers=48, attention=gqa(16, 2, 256, rope_dim=64, output_gate=True, qk_norm="head"),
    linear=Linear(
        kind="gated_delta_net", n_heads=32, n_key_heads=16, key_head_dim=128, value_head_dim=128, conv_kernel=4
    ),
    layer=(LayerTable(mixer="linear", repeat=3), LayerTable()),
    moe=Moe(n_experts=512, top_k=10, d_expert=512, n_shared=1, shared_gate=True),
)  # fmt: skip
KIMI_K2 = model(
    hidden=7168, vocab=163_840, n_layers=61, d_ff=18_432, first_dense=1, attention=deepseek(n_heads=64),
    moe=Moe(n_experts=384, top_k=8, d_expert=2048, n_shared=1, router_bias=True),
)  # fmt: skip
MINIMAX_M2 = model(
    hidden=3072, vocab=200_064, n_layers=62, attention=gqa(48, 8, 128, rope_dim=64, qk_norm="width"),
    moe=Moe(n_experts=256, top_k=8, d_expert=1536, router_bias=True),
)  # fmt: skip
QWEN25_7B = model(
    hidden=3584, vocab=152_064, n_layers=28, d_ff=18_944, attention=gqa(28, 4, 128, qkv_bias=True),
)  # fmt: skip
GEMMA3_27B = model(
    hidden=5376, vocab=262_208, n_layers=62, d_ff=21_504, norms="sandwich", tie_embeddings=True,
    layer=(
        LayerTable(attention=gqa(32, 16, 128, qk_norm="head", window=1024), repeat=5),
        LayerTable(attention=gqa(32, 16, 128, qk_norm="head")),
    ),
)  # fmt: skip
SCOUT = model(
    hidden=5120, vocab=202_048, n_layers=48, attention=gqa(40, 8, 128, qk_norm="unweighted", chunk=8192),
    layer=(LayerTable(repeat=3), LayerTable(attention=gqa(40, 8, 128, rope_dim=0))),
    moe=Moe(n_experts=16, top_k=1, d_expert=8192, n_shared=1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # Totals as Hugging Face states them for the safetensors files of each.
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496, 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
        # 671B and 37B in arXiv:2412.19437; the exact total of the main model is 671,026,419,200.
        ("deepseek-v3-671b", 671_026_419_200, 37_552_297_472),
        ("deepseek-r1", 671_026_419_200, 37_552_297_472),
    ],
)
def test_presets_have_the_published_parameters(name, total, active):
    preset = load_model(name)
    assert (preset.n_parameters, preset.n_active_parameters) == (total, active)


def test_mixtral():
    """46.7B in total and 12.9B active (arXiv:2401.04088): 46,702,792,704 in the safetensors index."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 + 4096 * 8
    assert MIXTRAL.n_parameters == 32 * (layer + 8 * 3 * 4096 * 14_336) + 2 * 4096 * 32_000 + 4096 == 46_702_792_704
    assert MIXTRAL.n_active_parameters == 12_879_925_248


def test_gpt_oss():
    """Card (arXiv:2508.10925, table 1): MLP 114.71B, attention 0.96B, embedding and head 1.16B, 116.83B, 5.13B."""
    counts = GPT_OSS.parameters
    assert round((counts["experts"] + counts["router"]) / 1e9, 2) == 114.71
    assert round((counts["attention"] + counts["norms"]) / 1e9, 2) == 0.96
    assert round((counts["embedding"] + counts["head"]) / 1e9, 2) == 1.16
    assert round(GPT_OSS.n_parameters / 1e9, 2) == 116.83
    # The card leaves the embedding table out of the active ones.
    assert round((GPT_OSS.n_active_parameters - counts["embedding"]) / 1e9, 2) == 5.13


def test_the_model_of_the_readme_is_gpt_oss(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "m.toml"
    path.write_text(readme[readme.index("A model is a sequence of layers") :].split("```")[1].removeprefix("toml"))
    assert load_model(str(path)).n_parameters == GPT_OSS.n_parameters


def test_qwen3_next_by_hand():
    """12 gated attention and 36 delta-net layers; 80B, 3B active (its model card)."""
    full = 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048
    linear = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    counts = QWEN_NEXT.parameters
    assert counts["attention"] == 12 * full
    assert counts["linear"] == 36 * (linear + 4 * (2 * 2048 + 4096) + 2 * 32 + 128)
    assert counts["norms"] == 48 * 2 * 2048 + 2048 + 12 * 2 * 256
    assert counts["shared"] == 48 * (3 * 2048 * 512 + 2048)
    assert counts["experts"] == 48 * 512 * 3 * 2048 * 512
    assert counts["router"] == 48 * 2048 * 512
    assert round(QWEN_NEXT.n_parameters / 1e9) == 80
    assert round(QWEN_NEXT.n_active_parameters / 1e9) in (3, 4)
    # Two layers in eight cache, the others keep 32 states of 128 * 128 and 3 taps of 8192 channels.
    assert QWEN_NEXT.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2


def test_others_by_their_published_sizes():
    assert KIMI_K2.n_parameters == 1_026_408_232_448  # 1T, 32B active (arXiv:2507.20534)
    assert round(KIMI_K2.n_active_parameters / 1e9) in (32, 33)
    assert round(MINIMAX_M2.n_parameters / 1e9) == 229  # "230B, 10B active" (its model card)
    assert round(MINIMAX_M2.n_active_parameters / 1e9) in (10, 11)
    assert QWEN25_7B.n_parameters == 7_615_616_512  # "7.61B" (its model card)
    assert round(GEMMA3_27B.n_parameters / 1e9) == 27
    assert round(SCOUT.n_active_parameters / 1e9) in (17, 18)  # "17B active, 109B" with its vision encoder
    assert round(SCOUT.n_parameters / 1e9) == 108


def test_sparse_attention_by_hand():
    """DeepSeek-V3.2: 64 heads of 128 from the latent of queries, one key of 128, 64 weights, a norm with bias."""
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    fields = {"hidden": 7168, "vocab": 129_280, "d_ff": 18_432, "n_layers": 4}
    scorer = Indexer(n_heads=64, head_dim=128, top_k=2048)
    shared = scorer.model_copy(update={"shared": True})
    dense, sparse = model(**fields, attention=deepseek()), model(**fields, attention=deepseek(indexer=scorer))
    assert sparse.n_parameters - dense.n_parameters == 4 * indexer
    assert sparse.parameters["indexer"] == 4 * indexer
    # 132 bytes a key: 128 of fp8 and a scale.
    assert sparse.kv_bytes_per_token() - dense.kv_bytes_per_token() == 4 * 132
    # A layer that shares the choice has neither weights nor keys.
    one_in_four = model(
        **fields, layer=(LayerTable(attention=deepseek(indexer=scorer)),
                         LayerTable(attention=deepseek(indexer=shared), repeat=3)),
    )  # fmt: skip
    assert one_in_four.parameters["indexer"] == indexer
    assert one_in_four.kv_bytes_per_token() == 4 * 576 * 2 + 132


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"attention": gqa(4, 2, 8, qkv_bias=True)}, 2 * (32 + 2 * 16)),
        ({"attention": gqa(4, 2, 8, o_bias=True)}, 2 * 16),
        ({"attention": gqa(4, 2, 8, qk_norm="head")}, 2 * 2 * 8),
        ({"attention": gqa(4, 2, 8, qk_norm="width")}, 2 * (32 + 16)),
        ({"attention": gqa(4, 2, 8, qk_norm="unweighted")}, 0),
        ({"attention": gqa(4, 2, 8, sinks=True)}, 2 * 4),
        ({"attention": gqa(4, 2, 8, output_gate=True)}, 2 * 16 * 32),
        ({"attention": gqa(4, 2, 8, window=7)}, 0),
        ({"norms": "sandwich"}, 2 * 2 * 16),
        ({"norms": "parallel"}, -2 * 16),
        ({"norm_bias": True}, 2 * 2 * 16 + 16),
        ({"gated": False}, -2 * 16 * 24),
        ({"ffn_bias": True}, 2 * (2 * 24 + 16)),
        ({"tie_embeddings": True}, -16 * 100),
    ],
)
def test_each_feature_by_hand(changes, added):
    fields = {"hidden": 16, "vocab": 100, "n_layers": 2, "d_ff": 24, "attention": gqa(4, 2, 8)}
    assert model(**{**fields, **changes}).n_parameters - model(**fields).n_parameters == added


def test_mamba2_and_lightning_by_hand():
    fields = {"hidden": 16, "vocab": 100, "n_layers": 1}
    mamba = Linear(
        kind="mamba2", n_heads=4, n_key_heads=2, key_head_dim=8, value_head_dim=6, conv_kernel=4, conv_bias=True
    )
    alone = model(**fields, linear=mamba, layer=(LayerTable(mixer="linear", ffn="none"),))
    # z and x of 24, B and C of 16, a step a head; conv over 56 channels; A, D and the step's bias; norms.
    assert alone.parameters["linear"] == 16 * (48 + 32 + 4) + 24 * 16 + 56 * 5 + 3 * 4 + 24
    assert alone.parameters["norms"] == 16 + 16
    assert alone.kv_bytes_per_token() == 0
    lightning = Linear(kind="lightning", n_heads=4, n_key_heads=4, key_head_dim=8, value_head_dim=8)
    one = model(**fields, linear=lightning, d_ff=24, layer=(LayerTable(mixer="linear"),))
    assert one.parameters["linear"] == 16 * 4 * 32 + 32 * 16 + 32


def test_layer_tables_of_a_file(tmp_path):
    path = tmp_path / "gemma.toml"
    path.write_text(
        'hidden = 16\nvocab = 100\nn_layers = 9\nd_ff = 24\ndtype = "bf16"\n'
        '[attention]\nkind = "gqa"\nn_heads = 4\nn_kv_heads = 2\nhead_dim = 8\n'
        "[[layer]]\nonce = true\nd_ff = 32\n"
        "[[layer]]\nrepeat = 2\nattention = {window = 4, n_kv_heads = 4}\n"
        '[[layer]]\n[[layer]]\nffn = "none"\n'
    )
    read = load_model(str(path))
    assert [kind.softmax.window for kind in read.layers] == [None, 4, 4, None, None, 4, 4, None, None]
    assert [kind.d_ff for kind in read.layers] == [32, 24, 24, 24, 0, 24, 24, 24, 0]
    assert [kind.softmax.n_kv_heads for kind in read.layers] == [2, 4, 4, 2, 2, 4, 4, 2, 2]
    assert len(read.kinds[0]) == 4
    assert hash(read) == hash(load_model(str(path)))
    assert read.model_copy(update={"n_layers": 7}).layers == read.layers[:7]


BASE = 'hidden = 16\nvocab = 100\nn_layers = 4\ndtype = "bf16"\n'
GQA = '[attention]\nkind = "gqa"\nn_heads = 4\nn_kv_heads = 2\nhead_dim = 8\n'
REFUSED = {
    "no attention": (BASE + "d_ff = 8", "attention: missing"),
    "no attention of a layer": (BASE + "d_ff = 8\n[[layer]]\n", "layer[0].attention: missing"),
    "no linear": (BASE + 'd_ff = 8\n[[layer]]\nmixer = "linear"', "layer[0].linear: missing"),
    "no d_ff": (BASE + GQA + "[[layer]]\n", "layer[0].d_ff: expected an integer > 0"),
    "no moe": (BASE + GQA + '[[layer]]\nffn = "moe"', "layer[0].moe: missing"),
    "empty layer": (BASE + '[[layer]]\nmixer = "none"\nffn = "none"', "layer[0]: mixer"),
    "late once": (BASE + "d_ff = 8\n" + GQA + "[[layer]]\n[[layer]]\nonce = true", "layer[1].once: the layers"),
    "too many": (BASE + "d_ff = 8\n" + GQA + "[[layer]]\nrepeat = 5", "describe 5 layers, n_layers = 4"),
    "too few": (BASE + "d_ff = 8\n" + GQA + "[[layer]]\nonce = true", "describe 1 layers, n_layers = 4"),
    "first_dense too": (BASE + "d_ff = 8\nfirst_dense = 1\n" + GQA + "[[layer]]", "first_dense: the [[layer]]"),
    "window and chunk": (BASE + "d_ff = 8\n" + GQA + "window = 2\nchunk = 2", "window and chunk: expected one"),
    "unknown key": (BASE + "d_ff = 8\n" + GQA + "[[layer]]\nattention = {windw = 2}", "did you mean 'window'?"),
    "gate of mla": (
        BASE + 'd_ff = 8\n[attention]\nkind = "mla"\nn_heads = 2\nkv_lora_rank = 2\nqk_nope_head_dim = 1\n'
        "qk_rope_head_dim = 1\nv_head_dim = 1\noutput_gate = true",
        "attention: kind = 'mla' has no output_gate",
    ),
    "head groups": (
        BASE + 'd_ff = 8\n[linear]\nkind = "mamba2"\nn_heads = 3\nn_key_heads = 2\nkey_head_dim = 1\n'
        'value_head_dim = 1\n[[layer]]\nmixer = "linear"',
        "linear: n_key_heads = 2 must divide n_heads = 3",
    ),
    "parallel": (BASE + 'norms = "parallel"\n' + GQA + '[[layer]]\nffn = "none"', 'norms = "parallel": expected'),
    "shared width": (
        BASE + GQA + "[moe]\nn_experts = 2\ntop_k = 1\nd_expert = 2\nd_shared = 2",
        "moe: d_shared and shared_gate need n_shared > 0",
    ),
    "dtype of embedding": (BASE + 'd_ff = 8\n[dtypes]\nembedding = "mxfp4"\n' + GQA, "dtypes.embedding: expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    text, message = REFUSED[case]
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    (line,) = caught.value.lines
    assert line.startswith(f"{path}: ")
    assert message in line


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "expected"),
    [
        ("bf16", 3, 5, 30),
        ("fp4", 3, 5, 8),
        # 2 * 3 blocks of 128 * 128.
        ("fp8_block", 200, 300, 60_000 + 6 * 4),
        ("mxfp8", 64, 5, 320 + 10),
        ("mxfp4", 65, 5, 163 + 15),
        ("nvfp4", 64, 5, 160 + 20 + 4),
        ("int4_group32", 64, 5, 160 + 2 * 10),
        ("int4_group128", 64, 5, 160 + 2 * 5),
        ("int8_group32", 64, 5, 320 + 2 * 10),
        ("int8_group128_zeros", 200, 5, 1000 + 2 * 10 + 10),
        ("fp8_a16", 64, 5, 320),
        ("int8_a16", 64, 5, 320),
        ("mxfp4_a16", 65, 5, 163 + 15),
        ("nvfp4_a16", 64, 5, 160 + 20 + 4),
    ],
)
def test_bytes_of_block_formats(dtype, inputs, outputs, expected):
    assert matrix_bytes(inputs, outputs, dtype) == expected


def test_every_block_format_names_its_element():
    assert {form.element for form in BLOCK_FORMATS.values()} <= {"fp8", "fp4", "int4", "w8", "w4"}
