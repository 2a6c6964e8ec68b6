"""Every configuration through check, and through runs in both phases, with and without context parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import g5cp_vec
from g5cp_vec.cli import main
from g5cp_vec.config.model import load_model
from g5cp_vec.runner.store import MANIFEST

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def keys(model: str, **more) -> dict:
    point = {
        "model": model,
        "chip": "h200-sxm",
        "topology": "flat-450",
        "n_chips": 2,
        "tp": 1,
        "ep": 1,
        "seq_len": 4096,
    }
    return {"fixed": point | more}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_runs(name, phase):
    path = str(CONFIGS / f"{name}.json")
    alone = g5cp_vec.run(keys(path, phase=phase, cp=1, n_chips=1))
    spread = g5cp_vec.run(keys(path, phase=phase, cp=2))
    for result in (alone, spread):
        assert result.step_s > 0
        assert [getattr(result, kpi) for kpi in ("lost_ops", "lost_bytes", "lost_kv_blocks", "lost_flops")] == [0] * 4
        assert result.order_violations == result.capacity_violations == 0
    assert spread.weight_bytes == alone.weight_bytes
    if load_model(path).dtypes is None:
        assert alone.weight_bytes == 2 * load_model(path).n_parameters


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("Meta-Llama-3.1-8B", 16_060_522_496),
        ("Qwen3-Next-80B-A3B-Thinking", 159_348_782_592),
        ("gpt-oss-20b", 13_761_264_768),
        ("gpt-oss-120b", 65_248_815_744),
    ],
)
def test_weights_take_the_bytes_of_the_checkpoint(name, n_bytes):
    # total_size in model.safetensors.index.json of the repository (gpt-oss-120b: the tensors of all its files).
    result = g5cp_vec.run(keys(str(CONFIGS / f"{name}.json"), phase="decode", cp=1, n_chips=1))
    assert result.weight_bytes == n_bytes


def grid(tmp_path: Path, *models: str) -> str:
    text = '[fixed]\nchip = "h200-sxm"\ntopology = "flat-450"\nn_chips = 1\ncp = 1\nphase = "decode"\nseq_len = 4096\n'
    path = tmp_path / "grid.toml"
    path.write_text(f"{text}[axes]\nmodel = {json.dumps(list(models))}\n")
    return str(path)


def test_check_counts_them_all_and_says_what_is_left_out(tmp_path):
    paths = [str(CONFIGS / f"{name}.json") for name in NAMES]
    result = CliRunner().invoke(main, ["check", grid(tmp_path, *paths)])
    assert result.exit_code == 0, result.output
    assert "about the models" in result.output
    assert f"{CONFIGS / 'Qwen3.5-397B-A17B.json'}: the text part of a multimodal model" in result.output
    assert f"{CONFIGS / 'DeepSeek-V3.json'}: multi-token prediction is left out" in result.output
    assert f"{CONFIGS / 'Meta-Llama-3.1-8B.json'}:" not in result.output


def test_run_says_it_beside_its_result(tmp_path):
    path = tmp_path / "point.toml"
    model = CONFIGS / "DeepSeek-V3.json"
    point = 'chip = "h200-sxm"\ntopology = "flat-450"\nn_chips = 1\ncp = 1\nphase = "decode"\nseq_len = 8\nep = 1\n'
    path.write_text(f'[fixed]\nmodel = "{model}"\n{point}')
    result = CliRunner().invoke(main, ["run", str(path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["model"] == str(model)
    assert f"note: {model}: multi-token prediction is left out (num_nextn_predict_layers = 1)" in result.stderr


def test_a_sweep_holds_it(tmp_path):
    model = str(CONFIGS / "Qwen3-VL-30B-A3B-Instruct.json")
    result = CliRunner().invoke(main, ["sweep", grid(tmp_path, model), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert f"note: {model}: the text part of a multimodal model (qwen3_vl_moe)" in result.stderr
    assert "the text part of a multimodal model" in (tmp_path / "out" / MANIFEST).read_text()


def test_a_folder_beside_the_grid(tmp_path):
    folder = tmp_path / "Mixtral"
    folder.mkdir()
    (folder / "config.json").write_bytes((CONFIGS / "Mixtral-8x7B-v0.1.json").read_bytes())
    result = CliRunner().invoke(main, ["check", grid(tmp_path, "Mixtral")])
    assert result.exit_code == 0, result.output
