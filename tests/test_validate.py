"""`g5cp-vec validate`, and the sweeps that ship with the project."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import polars as pl
import pytest
from commands import invoke
from machines import PLAIN_H100

from g5cp_vec.analysis.estimate import estimate_sweep
from g5cp_vec.analysis.validate import validate_sweep
from g5cp_vec.config.grid import load_grid
from g5cp_vec.runner.api import run_sweep
from g5cp_vec.runner.schema import KPIS

SWEEPS = sorted((Path(__file__).parent.parent / "sweeps").glob("*.toml"))
FIXED = {"model": "llama-3.1-8b", "chip": PLAIN_H100, "topology": "hgx-8", "n_chips": 16, "phase": "prefill"}
# Sequences of 256K keep the ring of each of these busy.
MASKED = {"name": "m", "fixed": FIXED, "axes": {"cp": [1, 2, 4, 8, 16], "seq_len": ["256K"]}}
# Between nodes, a block of 64 tokens takes longer to arrive than to attend.
EXPOSED = {"name": "e", "fixed": FIXED, "axes": {"cp": [1, 2, 4, 8, 16], "seq_len": ["1K"]}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Folder of a small masked scan; tests copy it before they doctor it."""
    folder = tmp_path_factory.mktemp("sound")
    run_sweep(MASKED, folder, audit="all")
    return folder


def doctored(sound: Path, tmp_path: Path, *changes: pl.Expr) -> Path:
    """Return a copy of a sweep whose columns are changed."""
    folder = tmp_path / "doctored"
    shutil.copytree(sound, folder)
    part = folder / "part-00000.parquet"
    pl.read_parquet(part).with_columns(*changes).write_parquet(part)
    return folder


def where_row(row: int, column: str, value: pl.Expr) -> pl.Expr:
    return pl.when(pl.col("row") == row).then(value).otherwise(column).alias(column)


# ---- the shipped sweeps


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_shipped_sweep_says_its_points(path):
    text = path.read_text()
    comment = " ".join(line.lstrip("# ") for line in text.split("\nname =")[0].splitlines())
    assert "?" in comment, "the question it answers"
    assert re.search(r"seconds|minute", comment), "how long it takes"
    stated = re.search(r"([\d,]+) points, (?:all valid|([\d,]+) of them invalid)", comment)
    assert stated is not None
    size = estimate_sweep(load_grid(path))
    n_points, n_invalid = (int((text or "0").replace(",", "")) for text in stated.groups())
    assert (n_points, n_points - n_invalid) == (size.n_points, size.n_valid)
    assert bool(size.reasons) == bool(n_invalid)
    shown = invoke("check", path).stdout
    assert ["points", str(size.n_points)] in [line.split() for line in shown.splitlines()]
    assert tomllib.loads(text)["name"] == path.stem.replace("_", "-")


def test_quickstart_is_a_real_grid():
    grid = load_grid(next(path for path in SWEEPS if path.stem == "quickstart"))
    assert estimate_sweep(grid).n_valid >= 400
    assert {"phase", "topology", "tp", "cp", "seq_len"} <= grid.axes.keys()


def test_validation_monotone(tmp_path):
    """The spec's validation scan: TTFT does not rise with cp inside the masked region."""
    path = next(path for path in SWEEPS if path.stem == "validation_cp_s")
    out = tmp_path / "out"
    assert invoke("sweep", path, "-o", out, "--audit", "none").exit_code == 0
    result = invoke("validate", out)
    assert result.exit_code == 0, result.output
    verdict = validate_sweep(out)
    assert verdict.n_pairs == 160
    assert verdict.n_masked >= 0.8 * verdict.n_pairs
    assert verdict.is_sound
    assert "0 audited" in result.stdout


# ---- what it must find


def test_sound_sweep_passes(sound):
    verdict = validate_sweep(sound)
    assert (verdict.n_rows, verdict.n_audited, verdict.n_pairs, verdict.masked_share) == (5, 5, 10, 1.0)
    assert invoke("validate", sound).exit_code == 0


def test_rising_ttft_names_the_rows(sound, tmp_path):
    # Row 3 (cp = 8) now takes longer than rows 1 and 2 (cp = 2, 4) and shorter than row 0 (cp = 1).
    between = pl.col("ttft_s").filter(pl.col("row") == 1) * 1.001
    folder = doctored(sound, tmp_path, where_row(3, "ttft_s", between))
    result = invoke("validate", folder)
    assert result.exit_code == 1
    rises = [line for line in result.stdout.splitlines() if line.startswith("TTFT rises")]
    assert len(rises) == 2
    for line, (row, cp) in zip(rises, [(1, 2), (2, 4)], strict=True):
        assert f"(row {row}, cp = {cp})" in line
        assert "(row 3, cp = 8)" in line


def test_a_rise_by_rounding_is_none(sound, tmp_path):
    equal = pl.col("ttft_s").filter(pl.col("row") == 2) * (1 + 1e-13)
    assert invoke("validate", doctored(sound, tmp_path, where_row(3, "ttft_s", equal))).exit_code == 0


@pytest.mark.parametrize(
    ("change", "n_masked"),
    [
        # cp = 8 is the larger end of three pairs and the smaller of one; only the ring counts at both.
        (where_row(3, "ring_s", 1.02 * pl.col("ring_compute_s")), 6),
        (where_row(3, "overhead_s", 0.06 * pl.col("ring_compute_s")), 7),
        (where_row(3, "compute_s", 10 * pl.col("compute_s")), 7),
    ],
    ids=["exposed ring", "overheads", "more work elsewhere"],
)
def test_a_rise_outside_the_masked_region_is_none(sound, tmp_path, change, n_masked):
    slow = where_row(3, "ttft_s", 1000 * pl.col("ttft_s"))
    folder = doctored(sound, tmp_path, change, slow)
    verdict = validate_sweep(folder)
    assert verdict.n_masked == n_masked
    assert verdict.rises.height == 0
    assert invoke("validate", folder).exit_code == 1  # vacuous now


def test_vacuous_scan_fails(tmp_path):
    run_sweep(EXPOSED, tmp_path, audit="none")
    verdict = validate_sweep(tmp_path)
    assert verdict.n_pairs == 10
    assert verdict.masked_share is not None
    assert verdict.masked_share < 0.8
    result = invoke("validate", tmp_path)
    assert result.exit_code == 1
    assert f"vacuous: {verdict.masked_share:.1%} of the pairs are masked" in result.stdout


@pytest.mark.parametrize("kpi", KPIS)
@pytest.mark.parametrize("value", [1, None])
def test_lost_conservation_names_the_row(sound, tmp_path, kpi, value):
    folder = doctored(sound, tmp_path, where_row(2, kpi, pl.lit(value, pl.Int64)))
    result = invoke("validate", folder)
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if f"{kpi} = {value}" in line and "row 2 " in line]


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("status", pl.lit("oom"), "oom exactly"),
        ("fits", pl.lit(False), "max_seq_len reaches"),
        ("peak_bytes", pl.col("kv_bytes"), "sum of its parts"),
        ("exposed_comm_s", 2 * pl.col("comm_s"), "exposed_comm_s"),
        ("step_s", pl.lit(0.0), "step_s"),
    ],
)
def test_implausible_row_is_named(sound, tmp_path, column, value, rule):
    result = invoke("validate", doctored(sound, tmp_path, where_row(4, column, value)))
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("row 4 ") and rule in line]


def test_pairs_need_equal_keys(tmp_path):
    # Two tp at the same S: pairs stay within one tp; decode rows and invalid ones make none.
    axes = {"phase": ["prefill", "decode"], "tp": [1, 2, 3], "cp": [1, 2, 4], "seq_len": ["1K"]}
    fixed = {**FIXED, "n_chips": 4}
    del fixed["phase"]
    run_sweep({"name": "p", "fixed": fixed, "axes": axes}, tmp_path, audit="none")
    verdict = validate_sweep(tmp_path)
    assert verdict.n_pairs == 3 + 1  # tp = 1: cp 1, 2, 4; tp = 2: cp 1, 2


def test_sweep_without_pairs_is_checked_for_conservation_only(tmp_path):
    grid = {"name": "d", "fixed": {**FIXED, "phase": "decode", "cp": 1}, "axes": {"seq_len": ["1K", "2K"]}}
    run_sweep(grid, tmp_path, audit="all")
    result = invoke("validate", tmp_path)
    assert result.exit_code == 0
    assert "no pair of prefill points differs in cp alone" in result.stdout
    assert "2 audited of 2 rows" in result.stdout


def test_unfinished_sweep_is_said_to_be(sound, tmp_path):
    folder = doctored(sound, tmp_path)
    part = folder / "part-00000.parquet"
    pl.read_parquet(part).head(3).write_parquet(part)
    result = invoke("validate", folder)
    assert result.exit_code == 1
    assert "unfinished: 3 of 5 rows" in result.stdout


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        result = invoke("validate", folder)
        assert result.exit_code == 2
        assert "sweep.json" in result.stderr


def test_an_unreadable_part_is_refused(sound, tmp_path):
    folder = doctored(sound, tmp_path)
    part = folder / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    result = invoke("validate", folder)
    assert result.exit_code == 2
    assert str(part) in result.stderr
