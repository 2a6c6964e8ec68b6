"""What a hurried person writes is answered with what to write instead."""

import pytest
from test_dcp_bytes import deploy

from g5cp_vec.calibration.tables import read_tables
from g5cp_vec.config._files import did_you_mean
from g5cp_vec.config.grid import load_grid, load_point
from g5cp_vec.errors import ConfigError, InfeasibleError

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
