"""The rows of a grid: their order, their verdicts, and that the arrays equal the obvious loop."""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_config_grid import complaints, grid_table

from g5cp_vec.config._keys import KEYS, LOAD_KEYS
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.expansion import VALID
from g5cp_vec.config.grid import load_grid
from g5cp_vec.errors import InfeasibleError

AXES = {
    "phase": ["prefill", "decode"],
    "seq_len": [1024, 2048, 4096],
    "topology": ["hgx-8", "nvl72"],
    "model": ["llama-3.1-8b", "deepseek-v3-671b"],
    "tp": [1, 2, 3, 4, 8],
    "cp": [1, 2, 3, 8],
    "batch": [1, 4],
    "n_chips": [8, 16],
    "dp": ["auto", 1, 2],
    "ep": [1, 2, 4],
    "cached_tokens": [0, 1024, 2048],
    "kv_dtype": ["bf16", "fp8"],
    "path": ["g5", "math"],
    "tp_sp": [False, True],
    "rank_order": [["tp", "cp", "pp", "dp"], ["cp", "tp", "dp", "pp"]],
    "dtype": ["bf16", "fp8"],
}


def expand(axes=None, points=None, **fixed):
    return load_grid(grid_table(axes, points, **fixed)).expand()


def product_rows(grid):
    """The obvious loop: one dictionary and one verdict a row."""
    for values in itertools.product(*grid.axes.values()):
        point = {**grid.fixed, **dict(zip(grid.axes, values, strict=True))}
        objects = {key: grid.objects[key, point[key]] for key in ("model", "chip", "topology")}
        verdict: Deployment | str
        try:
            verdict = build_deployment({**point, **objects, "runtime": grid.objects["runtime", "ideal"]})
            if point["phase"] == "prefill" and point["cached_tokens"] >= point["seq_len"]:
                total, cached = point["seq_len"], point["cached_tokens"]
                verdict = f"cached_tokens = {cached} leaves no token of seq_len = {total} to prefill"
        except InfeasibleError as error:
            verdict = str(error)
        yield point, verdict


@st.composite
def some_axes(draw):
    keys = draw(st.lists(st.sampled_from(sorted(AXES)), unique=True, max_size=5))
    return {key: draw(st.lists(st.sampled_from(AXES[key]), min_size=1, max_size=3, unique_by=str)) for key in keys}


@given(some_axes(), st.sampled_from([None, "tp * cp <= 8", "phase = 'decode' OR seq_len > 1024", "ep < 4 AND dp >= 1"]))
def test_rows_equal_the_obvious_product(axes, where):
    grid = load_grid(grid_table(axes, {"where": where} if where else None))
    expansion = grid.expand()
    keep = {
        None: lambda p, dp: True,
        "tp * cp <= 8": lambda p, dp: p["tp"] * p["cp"] <= 8,
        "phase = 'decode' OR seq_len > 1024": lambda p, dp: p["phase"] == "decode" or p["seq_len"] > 1024,
        "ep < 4 AND dp >= 1": lambda p, dp: p["ep"] < 4 and dp is not None,
    }[where]
    expected = []
    for index, (point, verdict) in enumerate(product_rows(grid)):
        whole, rest = divmod(point["n_chips"], point["tp"] * point["pp"] * point["cp"])
        dp = point["dp"] if point["dp"] != "auto" else (None if rest else whole)
        if keep(point, dp):
            expected.append((index, point, dp, verdict))
    assert expansion.row.tolist() == [index for index, *_ in expected]
    keys = expansion.keys.to_dicts()
    for at, (_, point, dp, verdict) in enumerate(expected):
        code = expansion.reason_code[at]
        found = expansion.deployments[expansion.deployment[at]]
        if isinstance(verdict, str):
            assert expansion.reasons[code] == verdict
        else:
            assert code == VALID
            assert found == verdict
            assert found.digest == verdict.digest
        assert [int(getattr(expansion, key)[at]) for key in LOAD_KEYS] == [point[key] for key in LOAD_KEYS]
        moe = grid.objects["model", point["model"]].moe
        shown = {
            **point,
            "dp": dp,
            "ep": point["ep"] if moe else None,
            "moe_dispatch": "all_to_all" if moe else None,
            "runtime": "ideal",
            "rank_order": ",".join(point["rank_order"]),
            "dtype": point["dtype"] or grid.objects["model", point["model"]].dtype,
            "prefill_form": "pass_kv" if point["phase"] == "prefill" else None,
            "decode_form": "pass_q" if point["phase"] == "decode" else None,
            "cp_semantics": None,
        }
        shown["ffn_dtype"] = shown["dtype"]
        shown["kv_dtype"] = point["kv_dtype"] or "bf16"
        assert keys[at] == shown


def test_order_is_that_of_itertools_product():
    axes = {"tp": [2, 1], "seq_len": [10, 30, 20], "phase": ["decode", "prefill"]}
    expansion = expand(axes)
    assert expansion.keys.select("tp", "seq_len", "phase").rows() == list(itertools.product(*axes.values()))
    assert expansion.row.tolist() == list(range(12))
    assert len(expansion.deployments) == 4


def test_arrays_have_the_promised_types():
    expansion = expand({"tp": [1, 2], "batch": [1, 2]})
    for name in ("row", *LOAD_KEYS):
        assert getattr(expansion, name).dtype == np.int64
    assert expansion.deployment.dtype == expansion.reason_code.dtype == np.int32
    assert expansion.keys.columns == list(KEYS)
    types = dict(expansion.keys.schema)
    assert all(types[key] == pl.Int64 for key in ("n_chips", "dp", "tp", "pp", "cp", "ep", *LOAD_KEYS))
    assert types["tp_sp"] == pl.Boolean
    assert expansion.keys_of(slice(1, 3)).equals(expansion.keys[1:3])


def test_infeasible_rows_carry_reasons():
    expansion = expand({"cached_tokens": [0, 8192], "cp": [1, 3]})
    assert expansion.reason_code.tolist() == [-1, 0, 1, 0]
    assert expansion.reasons == [
        'dp = "auto" is not whole: n_chips = 8 over tp*pp*cp = 1*1*3 = 3',
        "cached_tokens = 8192 leaves no token of seq_len = 8192 to prefill",
    ]
    assert expansion.keys["dp"].to_list() == [8, None, 8, None]
    with pytest.raises(InfeasibleError, match='3 of 4 points are invalid; the first is point 1: dp = "auto"'):
        expansion.refuse_invalid()
    expand().refuse_invalid()
    assert expand({"cached_tokens": [8192]}, phase="decode").reason_code.tolist() == [VALID]


def test_where_keeps_grid_positions():
    expansion = expand({"tp": [1, 2, 4], "cp": [1, 2, 4]}, {"where": "tp * cp = 4 AND topology LIKE 'hgx%'"})
    assert expansion.row.tolist() == [2, 4, 6]
    assert expansion.keys.select("tp", "cp").rows() == [(1, 4), (2, 2), (4, 1)]
    assert len(expansion.deployments) == 3
    assert len(expand(points={"where": "1 = 1"})) == 1
    nothing = expand({"tp": [1, 2]}, {"where": "tp > 2"})
    assert (len(nothing), nothing.deployments, nothing.keys.height) == (0, [], 0)


def test_where_sees_what_a_dense_model_ignores():
    assert len(expand({"ep": [1, 2]}, {"where": "ep <= 2"})) == 2


def test_runtime_of_a_topology_is_the_default(tmp_path):
    (tmp_path / "graphs.toml").write_text("prefill_op_overhead_us = 5\ndecode_op_overhead_us = 1\n")
    (tmp_path / "t.toml").write_text(
        'kind = "switch"\nchip_bandwidth_gbytes_per_s = 1\nlatency_us = 0\nruntime = "graphs.toml"\n'
    )
    expansion = expand({"topology": ["hgx-8", str(tmp_path / "t.toml")]})
    assert expansion.keys["runtime"].to_list() == ["ideal", "graphs"]
    assert [d.runtime.name for d in expansion.deployments] == ["ideal", "graphs"]
    (tmp_path / "graphs.toml").unlink()
    (line,) = complaints(grid_table(topology=str(tmp_path / "t.toml")))
    assert "runtime of t: 'graphs.toml': no such runtime file" in line


def test_many_rows_share_few_deployments():
    axes = {
        "seq_len": {"from": 1, "to": 1000, "steps": 1000},
        "tp": [1, 2, 4],
        "batch": {"from": 1, "to": 100, "steps": 100},
    }
    expansion = expand(axes)
    assert len(expansion) == 300_000
    assert len(expansion.deployments) == 3
    middle = expansion.keys_of(np.array([123_456]))
    assert middle.select("seq_len", "tp", "batch").row(0) == (412, 2, 57)
