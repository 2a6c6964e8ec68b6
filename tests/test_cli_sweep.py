"""`g5cp-vec sweep`: dataset, summary, progress, and every way of going on after an interruption."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from commands import invoke
from polars.testing import assert_frame_equal

import g5cp_vec
from g5cp_vec.cli import _progress
from g5cp_vec.cli.sweep import _file_name
from g5cp_vec.runner import plan
from g5cp_vec.runner.local import LocalRunner
from g5cp_vec.runner.schema import KPIS, SCHEMA
from g5cp_vec.runner.store import scan_sweep

ROOT = Path(__file__).parent.parent
GRID = """
name = "small"
[fixed]
model = "llama-3.1-8b"
chip = "h100-sxm"
topology = "flat-450"
n_chips = 4
[axes]
phase = ["prefill", "decode"]
tp = [1, 3]
cp = [1, 2, 4]
seq_len = ["1K", "2K", "4M"]
"""
N_POINTS, N_INVALID = 36, 18


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(plan, "ROWS_PER_PART", 5)


def rows(folder) -> pl.DataFrame:
    return scan_sweep(folder).collect()


def test_dataset_has_every_column_and_point(grid, tmp_path):
    out = tmp_path / "out"
    result = invoke("sweep", grid, "-o", out)
    assert result.exit_code == 0
    frame = rows(out)
    assert frame.schema == pl.Schema(SCHEMA)
    assert sorted(frame["row"]) == list(range(N_POINTS))
    assert frame["point_id"].n_unique() == N_POINTS
    manifest = json.loads((out / "sweep.json").read_text())
    assert manifest["n_rows"] == N_POINTS
    by_python = g5cp_vec.sweep(grid)
    assert_frame_equal(frame.sort("row"), by_python)


def test_summary_names_the_winners(grid, tmp_path):
    out = tmp_path / "out"
    lines = [line.split() for line in invoke("sweep", grid, "-o", out).stdout.splitlines()]
    frame = rows(out)
    for status in ("ok", "oom", "invalid"):
        assert [status, str(frame.filter(status=status).height)] in lines
    for phase, time in (("prefill", "ttft_s"), ("decode", "tpot_s")):
        best = frame.filter(phase=phase, status="ok", seq_len=2048).sort(time, "row").row(0, named=True)
        deployment = [str(best[key]) for key in ("dp", "tp", "cp")]
        assert any(line[:1] == ["2K"] and line[-3:] == deployment for line in lines)
    # What does not fit has times but wins nothing.
    assert not frame.filter(status="oom")["step_s"].is_null().any()
    assert not any(line[:1] == ["4M"] for line in lines)
    assert f"{out}/part-*.parquet" in lines[-1]


def test_default_folder_is_named_after_the_grid(grid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("sweep", grid).exit_code == 0
    assert rows(tmp_path / "results" / "small").height == N_POINTS
    assert [_file_name(name) for name in ("../a b", "..", "α/β")] == ["a-b", "sweep", "α-β"]


def test_quiet_prints_nothing(grid, tmp_path):
    result = invoke("sweep", grid, "-o", tmp_path / "out", "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


def test_plain_lines(grid, tmp_path, monkeypatch, small_parts):
    monkeypatch.setattr(_progress, "SILENCE_S", 0.0)
    lines = invoke("sweep", grid, "-o", tmp_path / "out").stderr.splitlines()
    headline = f"small: {N_POINTS} points, 6 structures, {N_INVALID} invalid, 8 parts"
    at = lines.index(headline)
    done = [int(line.split("/")[0]) for line in lines[at + 1 :]]
    assert done == sorted(set(done))
    assert done[-1] == N_POINTS
    assert len(done) > 8
    assert all("rows/s" in line for line in lines[at + 2 :])
    assert all("left" in line for line in lines[at + 2 : -1])
    assert "left" not in lines[-1]


def test_bar_on_a_terminal(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(_progress, "make_progress", lambda quiet: _progress.Bar())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke("sweep", grid, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert f"{N_POINTS}/{N_POINTS}" in result.stderr
    assert "rows/s" in result.stderr


@pytest.mark.parametrize("audit", ["none", "sample", "all"])
def test_audit_option(grid, tmp_path, audit):
    out = tmp_path / "out"
    assert invoke("sweep", grid, "-o", out, "--audit", audit).exit_code == 0
    audited = rows(out).filter(pl.col("lost_ops").is_not_null())
    n_simulated = N_POINTS - N_INVALID
    # A sample is the first row of each of the 6 structures and 16 rows spread over all, which may coincide.
    least, most = {"none": (0, 0), "sample": (16, 6 + 16), "all": (n_simulated, n_simulated)}[audit]
    assert least <= audited.height <= most
    assert audit == "none" or audited.select("phase", "tp", "cp", "topology").unique().height >= 6
    assert audited.select(KPIS).null_count().sum_horizontal().item() == 0
    assert not audited.select(pl.any_horizontal(pl.col(KPIS) != 0)).to_series().any()


def test_jobs_do_not_change_results(grid, tmp_path):
    frames = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        result = invoke("sweep", grid, "-o", out, "--jobs", jobs)
        if "--jobs: expected 1 to 1" in result.stderr:
            pytest.skip("one core")
        frames.append(rows(out))
    assert_frame_equal(*frames, check_exact=True)
    result = invoke("sweep", grid, "-o", tmp_path / "0", "--jobs", 0)
    assert result.exit_code == 2
    assert "--jobs" in result.stderr


def test_fidelity_full_agrees(grid, tmp_path):
    frames = []
    for fidelity in ("exact", "full"):
        out = tmp_path / fidelity
        assert invoke("sweep", grid, "-o", out, "--fidelity", fidelity).exit_code == 0
        frames.append(rows(out).select("point_id", "ttft_s", "tpot_s"))
    assert_frame_equal(*frames, rel_tol=1e-12, abs_tol=0.0)


# ---- resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of an uninterrupted sweep in eight parts; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "grid.toml").write_text(GRID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "ROWS_PER_PART", 5)
        assert invoke("sweep", folder / "grid.toml", "-o", folder / "whole").exit_code == 0
    assert len(list((folder / "whole").glob("part-*.parquet"))) == 8
    return folder / "whole"


@pytest.fixture
def whole(finished, tmp_path, small_parts):
    """Rows of an uninterrupted sweep, whose folder is copied to ``whole``."""
    shutil.copytree(finished, tmp_path / "whole")
    return rows(tmp_path / "whole")


def part_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*.parquet")}


def test_finished_sweep_computes_nothing(grid, tmp_path, whole):
    before = part_times(tmp_path / "whole")
    result = invoke("sweep", grid, "-o", tmp_path / "whole")
    assert result.exit_code == 0
    assert part_times(tmp_path / "whole") == before
    assert f"nothing left to compute, {N_POINTS} found finished" in result.stdout


@pytest.mark.parametrize("damage", ["delete", "truncate", "empty", "other_rows"])
def test_damaged_part_is_computed_again(grid, tmp_path, whole, damage):
    out = tmp_path / "whole"
    part, other = out / "part-00003.parquet", out / "part-00007.parquet"
    if damage == "delete":
        part.unlink()
    elif damage == "other_rows":
        pl.read_parquet(part).head(2).write_parquet(part)
    else:
        part.write_bytes(b"" if damage == "empty" else part.read_bytes()[:-100])
    before = part_times(out)
    assert invoke("sweep", grid, "-o", out).exit_code == 0
    after = part_times(out)
    assert after[other.name] == before[other.name]
    assert after[part.name] != before.get(part.name)
    assert_frame_equal(rows(out), whole, check_exact=True)


def test_interrupted_sweep_goes_on(grid, tmp_path, whole, monkeypatch):
    out = tmp_path / "again"
    run_part = LocalRunner.run_part
    calls = []

    def interrupted(self, part):
        calls.append(part)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_part(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRunner, "run_part", interrupted)
        result = invoke("sweep", grid, "-o", out)
    assert result.exit_code == 130
    message = result.stderr.splitlines()[-1]
    assert message.startswith("interrupted: ")
    assert str(out) in message
    assert "the same call goes on" in message
    assert sorted(part_times(out)) == [f"part-{n:05d}.parquet" for n in range(3)]
    result = invoke("sweep", grid, "-o", out)
    assert result.exit_code == 0
    assert "15 found finished" in result.stdout
    assert_frame_equal(rows(out), whole, check_exact=True)


def test_no_resume_starts_afresh(grid, tmp_path, whole):
    out = tmp_path / "whole"
    before = part_times(out)
    assert invoke("sweep", grid, "-o", out, "--no-resume").exit_code == 0
    assert not before.items() & part_times(out).items()
    assert_frame_equal(rows(out), whole, check_exact=True)


@pytest.mark.parametrize("change", ["grid", "audit", "no manifest"])
def test_other_results_in_the_folder_are_refused(grid, tmp_path, whole, change):
    out = tmp_path / "whole"
    options = []
    if change == "grid":
        grid.write_text(GRID.replace('"2K"', '"3K"'))
    elif change == "audit":
        options = ["--audit", "none"]
    else:
        (out / "sweep.json").unlink()
    before = part_times(out)
    result = invoke("sweep", grid, "-o", out, *options)
    assert result.exit_code == 2
    assert "another -o" in result.stderr
    assert part_times(out) == before
    again = invoke("sweep", grid, "-o", out, *options, "--no-resume")
    if change == "no manifest":  # nothing says that these files are ours to delete
        assert again.exit_code == 2
        assert part_times(out) == before
    else:
        assert "--no-resume" in result.stderr
        assert again.exit_code == 0
        assert rows(out).height == N_POINTS


def test_on_invalid_error_stops_before_anything_is_written(grid, tmp_path):
    grid.write_text(GRID + '[points]\non_invalid = "error"\n')
    out = tmp_path / "out"
    result = invoke("sweep", grid, "-o", out)
    assert result.exit_code == 2
    assert f"{N_INVALID} of {N_POINTS} points are invalid" in result.stderr
    assert not out.exists()


def test_old_grid_is_refused_with_a_hint(grid, tmp_path):
    grid.write_text(GRID.replace("cp = [1, 2, 4]\n", ""))
    result = invoke("sweep", grid, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "add cp = 1 under [fixed]" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unwritable_folder_is_refused(grid, tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("sweep", grid, "-o", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of a process are set where processes are forked")
def test_a_full_disk_is_one_line_and_keeps_what_is_finished(grid, tmp_path):
    # A limit on the size of a file stands in for a full disk: the manifest fits, a part does not.
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000));"
        "from g5cp_vec.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "sweep", str(grid), "-o", str(tmp_path / "out"), "--audit", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sweep.json"]


def test_the_summary_names_what_was_not_measured(tmp_path):
    grid = tmp_path / "grid.toml"
    text = GRID.replace("llama-3.1-8b", "qwen3-235b-a22b").replace("[1, 3]", "[4]").replace("[1, 2, 4]", "[1]")
    grid.write_text(text)
    shown = invoke("sweep", grid, "-o", tmp_path / "out").stdout
    assert "not measured on this chip, at default efficiencies: experts\n" in shown
    grid.write_text(GRID)
    assert "not measured" not in invoke("sweep", grid, "-o", tmp_path / "all").stdout


def test_parts_of_ranks_have_one_name(tmp_path):
    config = ROOT / "tests" / "data" / "configs" / "DeepSeek-V3.2.json"
    fixed = {"model": str(config), "chip": "h200-sxm", "topology": "hgx-8", "n_chips": 16, "tp": 8, "cp": 2, "ep": 8}
    row = g5cp_vec.run({"fixed": {**fixed, "phase": "prefill", "seq_len": 8192}})
    assert row.uncalibrated_parts == "indexer, sparse"
