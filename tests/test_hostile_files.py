"""Files that nobody meant to write: each is refused in one line that names it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import POINT, invoke

from g5cp_vec.config._text import MOST_BYTES
from g5cp_vec.config.chip import load_chip
from g5cp_vec.errors import ConfigError

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CHIP = 'name = "x"\nhbm_gbytes = 80\nhbm_bandwidth_gbytes_per_s = 3000\n[peak_tflops]\nbf16 = 900\n'
WORKLOAD = '{"links": [], "chips": 1, "ops": [], "deps": []}'
GEMM = "m,n,k,gemm_dtype,latency_ms\n" + "".join(f"{128 * i},4096,4096,bfloat16,{0.01 * i}\n" for i in range(1, 9))


def one_error(*words):
    """Return the only line on stderr of a command that refuses its input."""
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("key", ["model", "chip", "topology", "runtime"])
@pytest.mark.parametrize(
    "contents", [b"\0" * 100, b"\xff\xfe\x00", b"#" * (MOST_BYTES + 1), b"a = " + b"[" * 20_000, b"x = " + b"9" * 5000]
)
def test_named_files(tmp_path, key, contents):
    (tmp_path / "odd.toml").write_bytes(contents)
    kept = "".join(line + "\n" for line in POINT.splitlines() if not line.startswith(key))
    (tmp_path / "point.toml").write_text(f'{kept}{key} = "odd.toml"\n')
    line = one_error("check", tmp_path / "point.toml")
    assert f"fixed.{key}: " in line
    assert "odd.toml" in line


@pytest.mark.parametrize(
    "words", [("run",), ("sweep",), ("check",), ("replay",), ("calibrate", "--chip", "h100-sxm", "--evaluate")]
)
def test_a_device_has_no_end_and_a_folder_no_text(tmp_path, words):
    assert "expected" in one_error(words[0], tmp_path, *words[1:])
    assert "no such file" in one_error(words[0], tmp_path / "no", *words[1:])
    if words[0] in ("run", "sweep", "check"):
        assert "has more than" in one_error(words[0], "/dev/zero", *words[1:])


def test_line_breaks_in_a_name_stay_in_the_line(tmp_path):
    assert r"a\nb\x1b.toml" in one_error("check", tmp_path / "a\nb\x1b.toml")


def test_numbers_of_thousands_of_digits_in_json(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(WORKLOAD.replace("1", "1" * 5000))
    assert "not valid JSON" in one_error("replay", path)


def test_a_key_twice_in_json(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(WORKLOAD.replace("{", '{"chips": 2, '))
    assert "key 'chips' stands twice with different values" in one_error("replay", path)
    path.write_text(WORKLOAD.replace("{", '{"chips": 1, '))
    assert invoke("replay", path).exit_code == 0
    config = json.dumps({"model_type": "llama"})[:-1] + ', "model_type": "mistral"}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "p.toml").write_text(POINT.replace("llama-3.1-8b", "config.json"))
    assert "stands twice" in one_error("run", tmp_path / "p.toml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("= 80", "= 1e12", "hbm_gbytes: expected less than or equal to 1e+09, got 1000000000000.0"),
        ("= 3000", "= 1e-300", "hbm_bandwidth_gbytes_per_s: expected a quantity that is within"),
        (
            "[peak_tflops]\nbf16 = 900",
            "peak_tflops = 5",
            "expected a table of rates by element type, got 5",
        ),
        ("[peak_tflops]\nbf16 = 900", "peak_tflops = [5]", "by element type, got [5]"),
        ("= 900", "= 1e60", "peak_tflops.bf16: expected a quantity that is within 1e-30 to 1e+30"),
    ],
)
def test_complaints_quote_what_was_written(tmp_path, old, new, said):
    path = tmp_path / "chip.toml"
    path.write_text(CHIP.replace(old, new))
    with pytest.raises(ConfigError) as refusal:
        load_chip(str(path))
    (line,) = refusal.value.lines
    assert said in line


@pytest.mark.parametrize("cell", ["1e300", "1e-300", "nan", "inf", "-1", ""])
@pytest.mark.parametrize("how", [["--evaluate", "--json"], ["-o", "out.toml"]])
def test_measurements_beyond_any_kernel(tmp_path, monkeypatch, cell, how):
    monkeypatch.chdir(tmp_path)
    for row in (f"{cell},4096,4096,bfloat16,1\n", f"128,4096,4096,bfloat16,{cell}\n"):
        (tmp_path / "t.csv").write_text(GEMM + row)
        assert "t.csv:10: " in one_error("calibrate", "t.csv", "--chip", "h100-sxm", *how)


def test_too_many_measurements(tmp_path, monkeypatch):
    monkeypatch.setattr("g5cp_vec.calibration.tables.MOST_ROWS", 7)
    (tmp_path / "t.csv").write_text(GEMM)
    line = one_error("calibrate", tmp_path / "t.csv", "--chip", "h100-sxm", "--evaluate")
    assert "has 8 rows, expected at most 7" in line


def test_measurements_are_not_written_over(tmp_path):
    table, other = tmp_path / "t.csv", tmp_path / "link.toml"
    table.write_text(GEMM)
    other.symlink_to(table)
    for output in (table, other):
        assert "is a table to be read" in one_error("calibrate", table, "--chip", "h100-sxm", "-o", output)
    assert table.read_text() == GEMM


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text(GEMM)
    output = tmp_path / "out.toml"
    output.write_text("mine")
    monkeypatch.setattr("pathlib.Path.replace", lambda self, to: (_ for _ in ()).throw(OSError(28, "disk is full")))
    line = one_error("calibrate", tmp_path / "t.csv", "--chip", "h100-sxm", "-o", output)
    assert "disk is full" in line
    assert output.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.toml", "t.csv"]


def test_a_grid_is_no_point(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(POINT + '[axes]\ntp = [1, 2]\n[points]\nwhere = "tp = 1"\n')
    assert one_error("run", path).endswith(
        "has [axes] and [points], a point has [fixed] only; use g5cp-vec sweep for a grid"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_names_that_are_not_utf_8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    folder.mkdir()
    named = {"point": POINT, "table": GEMM, "chip": CHIP.replace('name = "x"\n', "")}
    paths = {name: folder / os.fsdecode(name.encode() + b"\xff") for name in named}
    for name, text in named.items():
        paths[name].write_text(text)
    assert json.loads(invoke("run", paths["point"], "--json").stdout)["status"] == "ok"
    assert invoke("check", paths["point"]).exit_code == 0
    assert load_chip(str(paths["chip"])).name == r"chip\udcff"
    for how in (["--csv"], ["--json"], []):
        result = invoke("calibrate", paths["table"], "--chip", "h100-sxm", "--evaluate", *how)
        assert result.exit_code == 0
        assert r"table\udcff" in result.stdout.replace("\\\\", "\\")
    result = invoke("calibrate", paths["table"], "--chip", paths["chip"], "--system", "x", "-o", folder / "out.toml")
    assert result.exit_code == 0
    assert r"table\\udcff" in (folder / "out.toml").read_text()
    assert load_chip(str(folder / "out.toml")).calibration is not None
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "hf.toml").write_text(POINT.replace("llama-3.1-8b", "config.json"))
    row = json.loads(invoke("run", folder / "hf.toml", "--json").stdout)
    assert row["status"] == "ok"
