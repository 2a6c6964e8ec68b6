"""Grid files: what is read, and what is said about wrong ones."""

from __future__ import annotations

import json

import pytest

from g5cp_vec.config._keys import KEYS
from g5cp_vec.config.grid import load_grid, load_point
from g5cp_vec.errors import ConfigError

FIXED = {
    "model": "llama-3.1-8b",
    "chip": "h100-sxm",
    "topology": "hgx-8",
    "n_chips": 8,
    "cp": 1,
    "phase": "prefill",
    "seq_len": "8K",
}


def grid_table(axes=None, points=None, **fixed):
    """A sound grid with some keys replaced; an axis takes its key out of the fixed ones."""
    axes = axes or {}
    kept = {key: value for key, value in {**FIXED, **fixed}.items() if key in fixed or key not in axes}
    return {"name": "g", "fixed": kept, "axes": axes, **({"points": points} if points else {})}


def complaints(source, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_grid(source, **options)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def test_defaults_are_filled_in():
    grid = load_grid(grid_table())
    assert grid.fixed["dp"] == "auto"
    assert (grid.fixed["tp"], grid.fixed["pp"], grid.fixed["ep"], grid.fixed["batch"]) == (1, 1, 1, 1)
    assert (grid.fixed["cached_tokens"], grid.fixed["path"], grid.fixed["tp_sp"]) == (0, "g5", False)
    assert (grid.on_invalid, grid.where, grid.n_points) == ("record", None, 1)
    assert grid.fixed.keys() | grid.axes.keys() == KEYS.keys()


def test_file_and_mapping_agree(tmp_path):
    text = 'name = "g"\n[fixed]\nmodel = "llama-3.1-8b"\nchip = "h100-sxm"\ntopology = "hgx-8"\nn_chips = 8\ncp = 1\n'
    path = tmp_path / "grid.toml"
    path.write_text(text + 'phase = "prefill"\n[axes]\ntp = [1, 2]\nseq_len = ["8K", "16k"]\n')
    grid = load_grid(path)
    assert grid == load_grid(str(path)) == load_grid(grid_table({"tp": [1, 2], "seq_len": [8192, "16384"]}))
    assert json.loads(json.dumps(grid.canonical(), allow_nan=False)) == grid.canonical()
    assert [key for key, _ in grid.canonical()["axes"]] == ["tp", "seq_len"]
    assert grid.canonical()["files"]["chip"]["h100-sxm"]["hbm_bytes"] == 80 * 2**30


def test_old_config_refused(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(
        '[fixed]\nmodel = "llama-3.1-8b"\nchip = "h100-sxm"\ntopology = "hgx-8"\n'
        'n_chips = 8\nseq_len = 1\nphase = "decode"\n'
    )
    for read in (load_grid, load_point):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert caught.value.lines == [
            f"{path}: cp: missing; context parallelism is a dimension of its own now and has no default: add cp = 1 "
            "under [fixed] to keep the old meaning (dp*tp*pp*cp = n_chips)"
        ]


def test_unknown_keys_get_suggestions():
    assert complaints(grid_table(tpp=2)) == ["<mapping>: fixed.tpp: unknown key 'tpp'; did you mean 'tp'?"]
    assert complaints(grid_table({"batchs": [1]})) == [
        "<mapping>: axes.batchs: unknown key 'batchs'; did you mean 'batch'?"
    ]
    assert complaints({**grid_table(), "axis": {}}) == ["<mapping>: axis: unknown key 'axis'; did you mean 'axes'?"]
    assert complaints({**grid_table(), "tp": 3}) == ["<mapping>: tp: belongs under [fixed] or [axes]"]
    assert complaints(grid_table(points={"were": "tp > 1"})) == [
        "<mapping>: points.were: unknown key 'were'; did you mean 'where'?"
    ]


def test_all_errors_are_reported_at_once(tmp_path):
    (tmp_path / "c.toml").write_text("hbm_gbytes = 0\n")
    axes = {"tp": [1, 1], "pp": [], "dp": ["all"]}
    wrong = {"n_chips": True, "cp": "x", "chip": str(tmp_path / "c.toml"), "tpp": 1}
    lines = complaints(grid_table(axes, {"on_invalid": "stop"}, **wrong))
    places = [line.split(": ")[1] for line in lines]
    assert places == [
        "fixed.tpp", "fixed.n_chips", "fixed.cp", "axes.tp[1]", "axes.pp", "axes.dp[0]", "points.on_invalid",
        "fixed.chip", "fixed.chip", "fixed.chip",
    ]  # fmt: skip
    assert lines[-3].endswith("c.toml: hbm_gbytes: expected greater than 0, got 0")


def test_a_key_is_fixed_or_an_axis():
    lines = complaints({"fixed": FIXED, "axes": {"cp": [1, 2]}})
    assert lines == ["<mapping>: axes.cp: also under [fixed]; keep one of the two"]


WRONG = {
    "missing model": ({"model": None}, "model: missing, expected under [fixed] or [axes]"),
    "number for name": ({"model": 3}, "fixed.model: expected a preset name or a path, got 3"),
    "unknown preset": ({"topology": "hgx8"}, "fixed.topology: unknown topology 'hgx8'; did you mean 'hgx-8'?"),
    "bool": ({"tp": True}, "fixed.tp: expected an integer from 1 to 1048576, got true"),
    "float": ({"tp": 2.0}, "fixed.tp: expected an integer from 1 to 1048576, got 2.0"),
    "zero": ({"tp": 0}, "fixed.tp: expected an integer from 1"),
    "derived": ({"tp": "auto"}, "fixed.tp: expected an integer"),
    "dp": ({"dp": "all"}, 'fixed.dp: expected "auto" or an integer'),
    "list": ({"tp": [1, 2]}, "got [1, 2]; several values belong under [axes]"),
    "tokens": ({"seq_len": "128G"}, "fixed.seq_len: expected a number of tokens"),
    "no tokens": ({"seq_len": 0}, "fixed.seq_len: expected a number of tokens from 1"),
    "negative": ({"cached_tokens": -1}, "fixed.cached_tokens: expected a number of tokens from 0"),
    "too long": ({"seq_len": "9999999999M"}, "fixed.seq_len: expected a number of tokens"),
    "nan": ({"batch": float("nan")}, "fixed.batch: expected an integer"),
    "flag": ({"tp_sp": 1}, "fixed.tp_sp: expected true or false, got 1"),
    "phase": ({"phase": "decoding"}, "one of prefill, decode, got 'decoding'; did you mean 'decode'?"),
    "dtype": ({"kv_dtype": "fp9"}, "fixed.kv_dtype: expected one of bf16"),
    "rank_order": ({"rank_order": ["tp", "cp", "pp", "pp"]}, "fixed.rank_order: expected a list with each of tp"),
    "collective": ({"collective": "tree"}, "fixed.collective: expected one of ring, direct, best, got 'tree'"),
    "no form": ({"decode_form": "pass_x"}, "fixed.decode_form: expected 'pass_q' or 'pass_q_ring' or 'dcp_ag_rs' or"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case):
    changes, message = WRONG[case]
    table = grid_table(**changes)
    table["fixed"] = {key: value for key, value in table["fixed"].items() if value is not None}
    (line,) = complaints(table)
    assert line.startswith("<mapping>: ")
    assert message in line


@pytest.mark.parametrize("form", ["pass_q", "pass_q_ring", "dcp_ag_rs", "dcp_a2a", "dcp_a2a_fp32"])
def test_prefill_decode_not_mixed(form):
    (line,) = complaints(grid_table(prefill_form=form))
    assert (
        line
        == f"<mapping>: fixed.prefill_form: {form!r} is a decode form; prefill distributes attention with 'pass_kv' or "
        "'allgather_kv' or 'allgather_q'"
    )


@pytest.mark.parametrize("form", ["pass_kv", "allgather_kv", "allgather_q"])
def test_decode_prefill_not_mixed(form):
    (line,) = complaints(grid_table({"decode_form": [form]}))
    assert line == (
        f"<mapping>: axes.decode_form[0]: {form!r} is a prefill form; decode distributes attention with 'pass_q' or "
        "'pass_q_ring' or 'dcp_ag_rs' or 'dcp_a2a' or 'dcp_a2a_fp32'"
    )


def test_hostile_grid_files(tmp_path):
    path = tmp_path / "g.toml"
    for contents, message in [
        (b"a = = 1", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        (b"fixed = 3\n[axes]", "fixed: expected a table"),
    ]:
        path.write_bytes(contents)
        assert message in complaints(path)[0]
    assert complaints(tmp_path) == [f"{tmp_path}: is a directory, expected a TOML file"]
    assert complaints(tmp_path / "none.toml") == [f"{tmp_path / 'none.toml'}: no such file"]
    assert complaints({**grid_table(), "name": 3}) == ["<mapping>: name: expected a text, got 3"]


def test_a_grid_too_large_is_refused():
    wide = {"from": 1, "to": 10_000, "steps": 10_000}
    (line,) = complaints(grid_table({"seq_len": wide, "batch": wide}))
    assert "100000000 points" in line


def test_points():
    grid = load_point({"fixed": FIXED})
    assert len(grid.expand()) == 1
    assert complaints(grid_table({"tp": [1]}), point=True) == [
        "<mapping>: has [axes], a point has [fixed] only; use g5cp-vec sweep for a grid"
    ]


def test_paths_are_relative_to_the_grid_file(tmp_path, monkeypatch):
    (tmp_path / "grids").mkdir()
    chip = "hbm_gbytes = 1\nhbm_bandwidth_gbytes_per_s = 1\npeak_tflops.bf16 = 1\n"
    (tmp_path / "grids" / "mine.toml").write_text(chip)
    (tmp_path / "here.toml").write_text(chip)
    lines = [f"{key} = {json.dumps(value)}" for key, value in FIXED.items() if key != "chip"]
    (tmp_path / "grids" / "g.toml").write_text(
        "[axes]\nchip = ['mine.toml', 'here.toml']\n[fixed]\n" + "\n".join(lines)
    )
    monkeypatch.chdir(tmp_path)
    expansion = load_grid("grids/g.toml").expand()
    assert [d.chip.name for d in expansion.deployments] == ["mine", "here"]
    assert expansion.keys["chip"].to_list() == ["mine.toml", "here.toml"]


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("128K", 131072),
        ("128k", 131072),
        ("1M", 1048576),
        ("2m", 2097152),
        (" 1K ", 1024),
    ],
)
def test_token_counts(written, tokens):
    assert load_grid(grid_table(seq_len=written)).fixed["seq_len"] == tokens


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ({"from": 1, "to": 5, "steps": 3}, [1, 3, 5]),
        ({"from": "1K", "to": "16K", "steps": 5, "scale": "log"}, [1024, 2048, 4096, 8192, 16384]),
        ({"from": 1, "to": 10, "steps": 4, "scale": "linear", "multiple_of": 4}, [4, 8, 12]),
        ({"from": 1, "to": 4, "steps": 100, "scale": "log"}, [1, 2, 3, 4]),
        ({"from": 7, "to": 7, "steps": 1}, [7]),
        ({"from": 10, "to": 1000, "steps": 2, "multiple_of": "1K"}, [1024]),
    ],
)
def test_range_axis(table, values):
    assert load_grid(grid_table({"seq_len": table})).axes["seq_len"] == values


def test_range_of_the_reference_grid_keeps_every_step():
    axis = {"from": "8K", "to": "4M", "steps": 48, "scale": "log", "multiple_of": 1024}
    values = load_grid(grid_table({"seq_len": axis})).axes["seq_len"]
    assert (len(values), values[0], values[-1]) == (48, 8192, 4 * 1024**2)
    assert values == sorted(set(values))
    assert all(value % 1024 == 0 for value in values)
    assert load_grid(grid_table({"cached_tokens": {"from": 0, "to": 10, "steps": 2}})).axes["cached_tokens"] == [0, 10]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"from": 1, "to": 5}, "steps: missing"),
        ({"from": 5, "to": 1, "steps": 3}, "expected from < to"),
        ({"from": 1, "to": 5, "steps": 1}, "at least 2 steps"),
        ({"from": 1, "to": 5, "steps": 3, "scale": "cubic"}, "scale: expected one of linear, log"),
        ({"from": 1, "to": 5, "steps": 3, "step": 3}, "unknown key 'step'; did you mean 'steps'?"),
        ({"from": "x", "to": 5, "steps": 3}, "from: expected a number of tokens"),
        ({"from": 1, "to": 5, "steps": 3, "multiple_of": 0}, "multiple_of: expected"),
    ],
)
def test_wrong_ranges(table, message):
    (line,) = complaints(grid_table({"seq_len": table}))
    assert line.startswith("<mapping>: axes.seq_len: ")
    assert message in line


def test_only_integer_keys_are_ranges():
    assert "expected a list of values" in complaints(grid_table({"phase": {"from": 1, "to": 2, "steps": 2}}))[0]
    assert "integers" in complaints(grid_table({"dp": {"from": "auto", "to": 2, "steps": 2}}))[0]
    assert "log scale" in complaints(grid_table({"cached_tokens": {"from": 0, "to": 2, "steps": 2, "scale": "log"}}))[0]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("tp * cpp < 3", "unknown key 'cpp'; did you mean 'pp'?"),
        ("tp +", "'tp +': "),
        ("tp", "expected a comparison"),
        ("model > 3", "cannot compare string with numeric"),
        ("", "expected an SQL expression"),
        (3, "expected an SQL expression"),
    ],
)
def test_wrong_where(where, message):
    (line,) = complaints(grid_table({"tp": [1]}, {"where": where}))
    assert line.startswith("<mapping>: points.where: ")
    assert message in line
