"""What a hurried person writes is answered with what to write instead."""

import json

import pytest
from click.testing import CliRunner
from test_dcp_bytes import deploy

from g5cp_vec.calibration.tables import read_tables
from g5cp_vec.cli import main
from g5cp_vec.config._files import did_you_mean
from g5cp_vec.config.grid import load_grid, load_point
from g5cp_vec.errors import ConfigError, InfeasibleError
from g5cp_vec.runner.workload import replay_workload

POINT = {
    "model": "llama-3.1-8b",
    "chip": "h100-sxm",
    "topology": "hgx-8",
    "n_chips": 16,
    "tp": 8,
    "cp": 2,
    "phase": "decode",
    "seq_len": "8K",
}


def refused(read, *arguments):
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    return caught.value.lines


@pytest.mark.parametrize(
    ("where", "answer"),
    [
        ("seq_len <= 128K", "SQL does not know 128K as a number; write 131072"),
        ("seq_len >= 1m", "SQL does not know 1m as a number; write 1048576"),
        ("seq_len <= 1.5M and tp = 8", "SQL does not know 1.5M as a number; write 1572864"),
        ("tp = 8 && cp = 2", "&& does not join comparisons in SQL; write and"),
        ("tp = 8 || cp = 2", "|| does not join comparisons in SQL; write or"),
    ],
)
def test_filter_means_what_it_says(where, answer):
    grid = {"fixed": POINT, "points": {"where": where}}
    assert refused(load_grid, grid) == [f"<mapping>: points.where: {where!r}: {answer}"]


def test_names_in_a_filter_may_end_like_numbers():
    where = "topology <> 'mine 128K' and model <> 'a && b'"
    assert load_grid({"fixed": POINT, "points": {"where": where}}).where == where


def test_suggestions_ignore_case():
    assert did_you_mean("FP8", ["bf16", "fp8"]) == "; did you mean 'fp8'?"
    assert did_you_mean("H100", ["a100-sxm", "h100-sxm"]) == "; did you mean 'h100-sxm'?"
    assert did_you_mean("qwen", ["llama-3.1-8b"]) == ""
    assert "; did you mean 'h100-sxm'?" in refused(load_point, {"fixed": {**POINT, "chip": "H100"}})[0]


def test_byte_order_mark_of_a_toml_file(tmp_path):
    path = tmp_path / "point.toml"
    path.write_text("[fixed]\n" + "".join(f"{k} = {v!r}\n" for k, v in POINT.items()), encoding="utf-8-sig")
    assert load_point(path).fixed["tp"] == 8


def test_two_ways_to_split_are_named_whatever_the_default_form():
    with pytest.raises(InfeasibleError) as caught:
        deploy(cp=2, dcp=2, phase="decode")
    assert str(caught.value).startswith(
        "cp = 2 and dcp = 2 are two ways to split a context: use cp = 1 with pcp and dcp"
    )
    assert "decode_form" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("m;n;k;gemm_dtype;latency_us", "columns parted by ';'; write commas"),
        ("m\tn\tk\tgemm_dtype\tlatency_us", "columns parted by '\\t'; write commas"),
        ("m,n,k,gemm_dtype,latency", "'latency'; its unit belongs in the name"),
        ("m,n,k,gemm_dtype", "neither"),
        ("m,n,k,gemm_dtype,latency_ms,latency_us", "latency_ms and latency_us"),
    ],
)
def test_column_of_times(tmp_path, header, found):
    path = tmp_path / "gemm.csv"
    path.write_text(f"{header}\n")
    assert refused(read_tables, [path], "mine") == [
        f"{path}: expected one column of times, latency_ms or latency_us, got {found}"
    ]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"chips": 0}, "ops[0].chip: unknown chip 0: there are no chips"),
        ({"chips": 1, "ops": [{"kind": "send"}]}, 'ops[0].kind: expected kind "compute" or "flow", got \'send\''),
        ({"chips": 1, "ops": [{"chip": 0}]}, 'ops[0].kind: expected kind "compute" or "flow", got {\'chip\': 0}'),
        ({"chips": 1, "ops": [[1]]}, 'ops[0]: expected kind "compute" or "flow", got [1]'),
    ],
)
def test_replay_says_what_it_got(tmp_path, change, answer):
    path = tmp_path / "work.json"
    one = {"kind": "compute", "chip": 0, "secs": 1.0}
    path.write_text(json.dumps({"links": [], "ops": [one], "deps": [], **change}))
    assert f"{path}: {answer}" in refused(replay_workload, path)


@pytest.mark.parametrize(("n", "said"), [(4096, True), (14336, False)])
def test_calibrate_says_what_element_wise_work_lacks(tmp_path, n, said):
    table, chip = tmp_path / "gemm.csv", tmp_path / "mine.toml"
    table.write_text(f"m,n,k,gemm_dtype,latency_us\n16,{n},4096,bfloat16,60\n4096,{n},4096,bfloat16,2500\n")
    chip.write_text("hbm_gbytes = 96.0\nhbm_bandwidth_gbytes_per_s = 3000.0\n[peak_tflops]\nbf16 = 500.0\n")
    arguments = ["calibrate", str(table), "--chip", str(chip), "-o", str(tmp_path / "out.toml")]
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    line = "element-wise work stays at the default efficiency: GEMMs with m <= 16 and 50 MB or more would measure it"
    assert (line in shown) is said
