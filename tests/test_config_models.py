"""Models, chips, topologies and runtimes: presets, units, and what is said about wrong files."""

from __future__ import annotations

import math

import pytest

from g5cp_vec.config._files import preset_names
from g5cp_vec.config._units import to_si, written_key
from g5cp_vec.config.chip import Chip, load_chip
from g5cp_vec.config.dtypes import DTYPE_BITS, n_bytes
from g5cp_vec.config.model import Attention, load_model
from g5cp_vec.config.runtime import load_runtime
from g5cp_vec.config.topology import Hgx, Ring, Switch, load_topology
from g5cp_vec.errors import ConfigError

LOADERS = {"models": load_model, "chips": load_chip, "topologies": load_topology, "runtimes": load_runtime}
PRESETS = [(kind, name) for kind in LOADERS for name in preset_names(kind)]

GQA = 'hidden = 8\nvocab = 9\nn_layers = 2\nd_ff = 4\ndtype = "bf16"\n[attention]\nkind = "gqa"\nn_heads = 4\n'
MLA = '[attention]\nkind = "mla"\nn_heads = 4\nkv_lora_rank = 2\nqk_nope_head_dim = 1\nqk_rope_head_dim = 1\n'
CHIP = "hbm_gbytes = 80\nhbm_bandwidth_gbytes_per_s = 3350\n"
SWITCH = 'kind = "switch"\nchip_bandwidth_gbytes_per_s = 100\n'


def parameters(model) -> int:
    """Weights of a model by summing its matrices and norms, as published totals do."""
    a, h = model.attention, model.hidden
    if a.kind == "gqa":
        attention = h * a.head_dim * (2 * a.n_heads + 2 * a.n_kv_heads)
    else:
        attention = h * a.q_lora_rank + a.q_lora_rank * a.n_heads * a.d_qk + a.q_lora_rank
        attention += h * (a.kv_lora_rank + a.qk_rope_head_dim) + a.kv_lora_rank
        attention += a.kv_lora_rank * a.n_heads * (a.qk_nope_head_dim + a.v_head_dim) + a.n_heads * a.v_head_dim * h
    total = h * model.vocab * (1 if model.tie_embeddings else 2) + h
    for layer in model.layers:
        total += attention + 2 * h
        if layer.ffn == "dense":
            total += 3 * h * model.d_ff
        else:
            total += 3 * h * model.moe.d_expert * (model.moe.n_experts + model.moe.n_shared) + h * model.moe.n_experts
    return total


def complaints(loader, path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loader(str(path))
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


@pytest.mark.parametrize(("kind", "name"), PRESETS)
def test_every_preset_loads_and_bears_its_name(kind, name):
    record = LOADERS[kind](name)
    assert record.name == name
    assert hash(record) == hash(LOADERS[kind](name))
    assert record == LOADERS[kind](name)
    assert record.fingerprint == LOADERS[kind](name).fingerprint


def test_expected_presets_ship():
    assert set(preset_names("models")) >= {"deepseek-v3-671b", "llama-3.1-405b", "llama-3.1-8b", "qwen3-235b-a22b"}
    assert set(preset_names("chips")) >= {"h100-sxm", "h200-sxm", "b200-sxm", "sg2262"}
    assert set(preset_names("topologies")) >= {"flat-450", "hgx-8", "hgx-8-oversub2", "nvl72"}
    assert preset_names("runtimes") == ["captured-graphs", "ideal", "meta-cp-study", "sglang", "trtllm", "vllm"]


def test_parameter_totals():
    assert parameters(load_model("llama-3.1-8b")) == 8_030_261_248  # as on its model card
    assert parameters(load_model("llama-3.1-405b")) == 405_853_388_800
    assert parameters(load_model("deepseek-v3-671b")) == pytest.approx(671e9, rel=0.01)
    assert parameters(load_model("qwen3-235b-a22b")) == pytest.approx(235e9, rel=0.01)


def test_layers_and_attention_widths():
    deepseek = load_model("deepseek-v3-671b")
    assert [layer.ffn for layer in deepseek.layers] == ["dense"] * 3 + ["moe"] * 58
    assert (deepseek.attention.d_qk, deepseek.attention.d_v) == (192, 128)
    assert deepseek.attention.kv_elements(1) == deepseek.attention.kv_elements(8) == 576
    llama = load_model("llama-3.1-405b").attention
    assert [llama.kv_heads(tp) for tp in (1, 4, 8, 16)] == [8, 2, 1, 1]
    assert llama.kv_elements(4) == 2 * 2 * 128
    assert {layer.ffn for layer in load_model("llama-3.1-8b").layers} == {"dense"}
    assert (
        Attention(
            kind="mla", n_heads=4, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1
        ).n_kv_heads
        == 4
    )


def test_chip_units_and_peaks():
    chip = load_chip("h100-sxm")
    assert (chip.hbm_bytes, chip.hbm_bandwidth_bytes_per_s) == (80 * 2**30, 3.35e12)
    assert [chip.peak(dtype) for dtype in ("bf16", "fp8", "fp16", "fp4")] == [989e12, 1978e12, 989e12, 989e12]
    assert load_chip("b200-sxm").peak("fp4") == 9e15
    assert load_chip("sg2262").hbm_bytes == 128 * 10**9
    assert chip.calibrated is True
    assert load_chip("sg2262").calibrated is False
    assert (chip.efficiency.gemm, chip.efficiency.attention, chip.efficiency.memory) == (0.7, 0.6, 0.8)


def test_topology_units_and_protocol_efficiency(tmp_path):
    (tmp_path / "lab.toml").write_text(SWITCH + "latency_us = 2\nprotocol_efficiency = 0.5\nn_chips = 6\n")
    assert load_topology(str(tmp_path / "lab.toml")) == Switch(
        name="lab", n_chips=6, chip_bandwidth_bytes_per_s=50e9, latency_s=2e-6, protocol_efficiency=0.5
    )
    (tmp_path / "ring.toml").write_text('kind = "ring"\nlink_bandwidth_gbytes_per_s = 25\nlatency_us = 0.3\n')
    assert load_topology("ring.toml", tmp_path) == Ring(name="ring", link_bandwidth_bytes_per_s=25e9, latency_s=3e-7)


def test_topology_sizes():
    rack, node = load_topology("nvl72"), load_topology("hgx-8")
    assert isinstance(rack, Hgx)
    assert [rack.used_per_node(n) for n in (8, 72, 73, 128)] == [8, 72, 64, 64]
    assert [node.used_per_node(n) for n in (4, 8, 64)] == [4, 8, 8]
    assert node.max_chips() is None
    assert Switch(name="s", n_chips=4, chip_bandwidth_bytes_per_s=1.0, latency_s=0.0).max_chips() == 4


def test_runtime_named_beside_a_topology_is_found_from_anywhere(tmp_path):
    (tmp_path / "graphs.toml").write_text("prefill_op_overhead_us = 5\ndecode_op_overhead_us = 1\n")
    (tmp_path / "t.toml").write_text(SWITCH + 'latency_us = 0\nruntime = "graphs.toml"\n')
    runtime = load_runtime(load_topology(str(tmp_path / "t.toml")).runtime)
    assert (runtime.prefill_op_overhead_s, runtime.decode_op_overhead_s) == (5e-6, 1e-6)


def test_units_round_trip():
    names = ["latency_s", "nic_bytes_per_s", "hbm_bytes", "peak_flops", "n_chips"]
    assert [written_key(name) for name in names] == [
        "latency_us", "nic_gbytes_per_s", "hbm_gbytes", "peak_tflops", "n_chips",
    ]  # fmt: skip
    assert [written_key(written_key(name)) for name in names] == [written_key(name) for name in names]
    assert to_si({"latency_us": 2, "hbm_gbytes": 85.89934592, "name": "x"}) == {
        "latency_s": 2e-6, "hbm_bytes": 85899345920, "name": "x",
    }  # fmt: skip


def test_n_bytes_rounds_up():
    assert {dtype: n_bytes(3, dtype) for dtype in DTYPE_BITS} == {
        "bf16": 6, "fp16": 6, "fp8": 3, "int8": 3, "fp4": 2, "int4": 2, "fp32": 12,
    }  # fmt: skip
    assert n_bytes(2**60, "bf16") == 2**61


def test_fingerprint_covers_numbers_not_provenance():
    model = load_model("llama-3.1-8b")
    assert model.model_copy(update={"source": "elsewhere"}).fingerprint == model.fingerprint
    assert model.model_copy(update={"hidden": 2048}).fingerprint != model.fingerprint


def test_copies_are_checked_and_forget_what_was_derived():
    model = load_model("llama-3.1-8b")
    assert len(model.layers) == 32
    assert len(model.model_copy(update={"n_layers": 2}).layers) == 2
    with pytest.raises(ValueError, match="n_layers"):
        model.model_copy(update={"n_layers": 0})


def test_unknown_key_gets_a_suggestion(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(GQA + "n_kv_heads = 2\nhead_dim = 2\nhead_dims = 2\n")
    assert complaints(load_model, path) == [
        f"{path}: attention.head_dims: unknown key 'head_dims'; did you mean 'head_dim'?"
    ]


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown chip 'h100-sx'; did you mean 'h100-sxm'"):
        load_chip("h100-sx")
    with pytest.raises(ConfigError, match=r"'nowhere\.toml': no such model file"):
        load_model("nowhere.toml")


def test_all_errors_are_reported_at_once(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('name = true\nhbm_gbytes = "80"\nlatency_s = 1\n[peak_tflops]\nbf16 = -1\n[efficiency]\ngem = 1\n')
    keys = ["latency_s", "name", "hbm_gbytes", "hbm_bandwidth_gbytes_per_s", "peak_tflops.bf16", "efficiency.gem"]
    assert [line.split(": ")[1] for line in complaints(load_chip, path)] == keys


KINDS = "kind: expected one of switch, ring, torus, full_mesh, graph, hgx, fat_tree, tiered"
HOSTILE = {
    "syntax": (load_chip, "a = = 1", "not valid TOML"),
    "twice": (load_chip, "a = 1\na = 2", "not valid TOML"),
    "not text": (load_chip, b"\xff\xfe", "not UTF-8"),
    "NUL": (load_chip, b"a\0 = 1", "not valid TOML"),
    "huge integer": (load_chip, "a = " + "9" * 5000, "not valid TOML"),
    "deep": (load_chip, "a = " + "[" * 5000, "nested too deeply"),
    "nan": (load_chip, CHIP.replace("80", "nan") + "peak_tflops.bf16 = 1", "hbm_gbytes: expected a number, got nan"),
    "inf": (
        load_chip,
        CHIP.replace("3350", "inf") + "peak_tflops.bf16 = 1",
        "hbm_bandwidth_gbytes_per_s: expected a fin",
    ),
    "beyond float": (
        load_chip,
        CHIP + "peak_tflops.bf16 = 1" + "0" * 400,
        "peak_tflops.bf16: expected a finite number",
    ),
    "bool": (load_chip, CHIP.replace("80", "true") + "peak_tflops.bf16 = 1", "hbm_gbytes: expected a number, got true"),
    "text": (load_chip, CHIP.replace("80", '"80"') + "peak_tflops.bf16 = 1", "hbm_gbytes: expected a number, got '80'"),
    "date": (load_chip, CHIP + "peak_tflops.bf16 = 2024-01-01", "peak_tflops.bf16: expected a number"),
    "peak no table": (load_chip, CHIP + "peak_tflops = 3", "peak_tflops: expected a table"),
    "peak without bf16": (load_chip, CHIP + "peak_tflops.fp8 = 3", "peak_tflops.bf16: missing"),
    "peak of nothing": (load_chip, CHIP + "peak_tflops.bf16 = 3\npeak_tflops.fp9 = 3", "peak_tflops.fp9: expected"),
    "calibration": (
        load_chip,
        CHIP + 'peak_tflops.bf16 = 3\n[calibration]\nsource = "me"\nfitted = "today"\ntables = []\nsurface = 3',
        "calibration.surface: expected",
    ),
    "fraction": (
        load_chip,
        CHIP + "usable_memory_fraction = 1.5\npeak_tflops.bf16 = 3",
        "less than or equal to 1, got 1.5",
    ),
    "odd key": (load_chip, CHIP + '"a\\nb" = 3\npeak_tflops.bf16 = 3', "unknown key 'a\\nb'"),
    "no kind": (load_topology, "", f"{KINDS}, missing"),
    "later kind": (
        load_topology,
        'kind = "dragonfly"',
        f"{KINDS}, got 'dragonfly'",
    ),
    "SI key": (
        load_topology,
        SWITCH + "latency_us = 1\nlatency_s = 1",
        "latency_s: unknown key 'latency_s'; did you mean",
    ),
    "efficiency": (
        load_topology,
        SWITCH + "latency_us = 1\nprotocol_efficiency = 0",
        "protocol_efficiency: expected greater",
    ),
    "no chips": (load_topology, SWITCH + "latency_us = 1\nn_chips = 0", "n_chips: expected greater than 0, got 0"),
    "backwards": (load_topology, SWITCH + "latency_us = -1", "latency_us: expected greater than or equal to 0, got -1"),
    "too many used": (
        load_topology,
        'kind = "hgx"\nnode_size = 8\nscale_up_gbytes_per_s = 1\nscale_up_latency_us = 1\nnics_per_node = 1\n'
        "nic_gbytes_per_s = 1\nscale_out_latency_us = 1\nchips_used_per_node = 9",
        "chips_used_per_node = 9 is more than node_size = 8",
    ),
    "float layers": (
        load_model,
        GQA.replace("n_layers = 2", "n_layers = 2.0") + "n_kv_heads = 2\nhead_dim = 2",
        "n_layers",
    ),
    "bool layers": (
        load_model,
        GQA.replace("n_layers = 2", "n_layers = true") + "n_kv_heads = 2\nhead_dim = 2",
        "n_layers",
    ),
    "kv heads": (load_model, GQA + "n_kv_heads = 3\nhead_dim = 2", "attention: n_kv_heads = 3 must divide n_heads = 4"),
    "no head_dim": (load_model, GQA + "n_kv_heads = 2", "attention: kind = 'gqa' needs head_dim > 0"),
    "latent in gqa": (load_model, GQA + "n_kv_heads = 2\nhead_dim = 2\nkv_lora_rank = 3", "has no kv_lora_rank"),
    "no latent": (load_model, GQA.split("[")[0] + MLA, "attention: kind = 'mla' needs v_head_dim > 0"),
    "no d_ff": (
        load_model,
        GQA.replace("d_ff = 4", "") + "n_kv_heads = 2\nhead_dim = 2",
        "d_ff: expected an integer > 0",
    ),
    "top_k": (
        load_model,
        GQA + "n_kv_heads = 2\nhead_dim = 2\n[moe]\nn_experts = 2\ntop_k = 3\nd_expert = 4",
        "moe: top_k = 3 is more than n_experts = 2",
    ),
    "first_dense alone": (load_model, "first_dense = 1\n" + GQA + "n_kv_heads = 2\nhead_dim = 2", "first_dense"),
    "dtype": (load_model, GQA.replace("bf16", "bf61") + "n_kv_heads = 2\nhead_dim = 2", "dtype: expected 'bf16', "),
    "overhead": (
        load_runtime,
        "prefill_op_overhead_us = -1\ndecode_op_overhead_us = 0",
        "prefill_op_overhead_us: expected",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case, tmp_path):
    loader, contents, message = HOSTILE[case]
    path = tmp_path / "file.toml"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    (line,) = complaints(loader, path)
    assert line.startswith(f"{path}: ")
    assert message in line


@pytest.mark.parametrize("loader", LOADERS.values())
def test_a_directory_is_refused(loader, tmp_path):
    (line,) = complaints(loader, tmp_path)
    # The folder of a Hugging Face checkpoint is a model.
    kind = "without a config.json, " if loader is load_model else ", "
    assert line.startswith(f"{tmp_path}: is a directory{kind if kind == ', ' else ' ' + kind}expected a")


def test_records_are_strict_in_python_too():
    with pytest.raises(ValueError, match="hbm_bytes"):
        Chip(name="c", hbm_bytes=True, hbm_bandwidth_bytes_per_s=1.0, peak_flops=(("bf16", 1.0),))
    with pytest.raises(ValueError, match="finite"):
        Switch(name="s", chip_bandwidth_bytes_per_s=math.inf, latency_s=0.0)
    assert Chip(
        name="c", hbm_bytes=1, hbm_bandwidth_bytes_per_s=1, peak_flops={"fp8": 2.0, "bf16": 1.0}
    ).peak_flops == (
        ("bf16", 1.0),
        ("fp8", 2.0),
    )
