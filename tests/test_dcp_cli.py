"""What `check` and `list` say of deployed context parallelism."""

from __future__ import annotations

import json

import pytest
from commands import invoke
from test_dcp_bytes import DEEPSEEK, QWEN, SMALL, deploy

from g5cp_vec.analysis.layouts import legal_rows, rank_groups, rank_rows

POINT = """
[fixed]
model = "deepseek-v3-671b"
chip = "h100-sxm"
topology = "hgx-8"
phase = "decode"
cp = 1
seq_len = "8K"
n_chips = 8
tp = 4
pcp = 2
ep = 8
"""


def test_layout_of_pcp2_dcp2_tp4():
    """The layout that the developer guide draws: chips 0-3 and 4-7 are tp groups, shards 0 1 0 1 and 2 3 2 3."""
    dep = deploy(model=SMALL["mla"], tp=4, pcp=2, dcp=2)
    assert [tuple(row) for row in rank_rows(dep)] == [
        (0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 1, 1), (2, 0, 0, 0, 2, 0), (3, 0, 0, 0, 3, 1),
        (4, 0, 0, 1, 0, 2), (5, 0, 0, 1, 1, 3), (6, 0, 0, 1, 2, 2), (7, 0, 0, 1, 3, 3),
    ]  # fmt: skip
    assert rank_groups(dep) == {
        "tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "pcp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dcp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }


def test_groups_of_stages_replicas_and_experts():
    dep = deploy(model=DEEPSEEK, tp=2, pp=2, pcp=2, ep=4)
    assert rank_groups(dep) == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pcp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }
    assert [row.pp for row in rank_rows(dep)] == [0] * 4 + [1] * 4
    replicas = deploy(model=SMALL["mla"], tp=2, dp=2, dcp=2)
    assert rank_groups(replicas) == {"tp": [[0, 1], [2, 3]], "dcp": [[0, 1], [2, 3]]}


def test_orthogonal_groups():
    dep = deploy(model=SMALL["mla"], tp=2, pcp=2, dcp=4, cp_semantics="orthogonal")
    assert rank_groups(dep)["dcp"] == [[0, 2, 1, 3]]
    assert [row.kv_shard for row in rank_rows(dep)] == [0, 2, 1, 3]


def test_check_shows_a_single_layout(tmp_path):
    path = tmp_path / "point.toml"
    path.write_text(POINT + "dcp = 2\n")
    result = invoke("check", path)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "pcp = 2, tp = 4, dcp = 2 (multiplicative)" in result.stdout
    assert ["6", "0", "0", "1", "2", "2"] in lines
    assert "pcp" in result.stdout
    assert "0 4 | 1 5 | 2 6 | 3 7" in result.stdout
    assert "0 1 | 2 3 | 4 5 | 6 7" in result.stdout


def test_check_shows_every_layout_when_asked(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(POINT + "[axes]\ndcp = [1, 2, 3]\n")
    quiet, loud = invoke("check", path), invoke("check", path, "--ranks")
    assert "KV shard" not in quiet.stdout
    assert loud.stdout.count("KV shard") == 2
    assert "dcp = 3 does not divide tp = 4; nearest legal (tp, pcp, dcp): (4, 2, 4), (4, 2, 2)" in quiet.stdout


def test_check_shows_legal_layouts(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(POINT + '[axes]\ncp_semantics = ["multiplicative", "orthogonal"]\n')
    result = invoke("check", path, "--legal")
    for semantics in ("multiplicative", "orthogonal"):
        assert f"deepseek-v3-671b on 8 chips, {semantics}" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    for tp, pcp, dcp, shards in legal_rows(DEEPSEEK, 8, "orthogonal"):
        assert [str(n) for n in (tp, pcp, dcp, shards, 8 // (tp * pcp))] in lines


def test_list_layouts():
    result = invoke("list", "layouts", "--model", "qwen3-235b-a22b", "--n-chips", "16", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [list(row[:3]) for row in legal_rows(QWEN, 16, "multiplicative")]
    shown = invoke("list", "layouts", "--model", "qwen3-235b-a22b", "--n-chips", "16")
    assert ["8", "2", "2", "4", "1"] in [line.split() for line in shown.stdout.splitlines()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-chips", "8"], "list layouts: expected --model and --n-chips"),
        (["--model", "qwen3-235b-a22b"], "list layouts: expected --model and --n-chips"),
        (["--model", "qwen3-235b-a22b", "--n-chips", "8", "--cp-semantics", "both"], "--cp-semantics: expected one of"),
        (["--model", "qwen3", "--n-chips", "8"], "qwen3"),
    ],
)
def test_list_layouts_refuses(options, message):
    result = invoke("list", "layouts", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
