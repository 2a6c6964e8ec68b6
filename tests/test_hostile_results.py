"""Result folders that something happened to, and sweeps that are stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import polars as pl
import pytest
from commands import invoke

from g5cp_vec.engine import _jit

GRID = """
name = "small"
[fixed]
phase = "prefill"
model = "llama-3.1-8b"
chip = "h100-sxm"
topology = "flat-450"
n_chips = 4
[axes]
cp = [1, 2]
seq_len = ["1K", "2K"]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "grid.toml").write_text(GRID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("g5cp_vec.runner.plan.ROWS_PER_PART", 2)
        assert invoke("sweep", folder / "grid.toml", "-o", folder / "out", "--quiet").exit_code == 0
    return folder


@pytest.fixture
def sweep(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("g5cp_vec.runner.plan.ROWS_PER_PART", 2)
    shutil.copytree(finished, tmp_path / "sweep")
    return tmp_path / "sweep"


def again(sweep, *options):
    return invoke("sweep", sweep / "grid.toml", "-o", sweep / "out", *options)


def test_a_missing_part_is_unfinished(sweep):
    (sweep / "out" / "part-00001.parquet").unlink()
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 1
    assert "unfinished: 2 of 4 rows are here" in result.stdout


def test_parts_that_the_sweep_does_not_have(sweep):
    shutil.copy(sweep / "out" / "part-00000.parquet", sweep / "out" / "part-00002.parquet")
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 2
    assert "part-00002.parquet: not a readable part: the sweep has 2 parts" in result.stderr


def test_a_copy_of_another_part(sweep):
    first, second = (sweep / "out" / f"part-0000{i}.parquet" for i in range(2))
    whole = second.read_bytes()
    shutil.copy(first, second)
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 2
    assert "part-00001.parquet: not a readable part: a copy of part-00000.parquet" in result.stderr
    result = again(sweep)
    assert result.exit_code == 0
    assert "part-00001.parquet: a copy of part-00000.parquet; it is computed again" in result.stderr
    assert second.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: pl.concat([f[:1], f[:1]]), "row 0 (point {id}) breaks the rule: every row is there once"),
        (lambda f: f.with_columns(status=pl.lit(None, pl.String)), "breaks the rule: status is ok, oom or invalid"),
        (lambda f: f.with_columns(status=pl.lit("fine")), "breaks the rule: status is ok, oom or invalid"),
        (lambda f: f.with_columns(step_s=pl.lit(float("nan"))), "breaks the rule: step_s is positive and finite"),
        (lambda f: f.with_columns(row=pl.lit(None, pl.Int64)), "breaks the rule: every row is there once"),
        (lambda f: f[:0], "unfinished: 2 of 4 rows are here"),
    ],
)
def test_rows_that_another_program_changed(sweep, change, said):
    part = sweep / "out" / "part-00000.parquet"
    rows = pl.read_parquet(part)
    change(rows).write_parquet(part)
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 1
    assert said.format(id=rows["point_id"][0]) in result.stdout
    assert again(sweep, "--quiet").exit_code == 0
    assert pl.read_parquet(part).equals(rows)


def test_a_part_of_another_sweep(sweep, tmp_path):
    (tmp_path / "other.toml").write_text(GRID.replace('"1K"', '"4K"'))
    assert invoke("sweep", tmp_path / "other.toml", "-o", tmp_path / "other", "--quiet").exit_code == 0
    foreign = sweep / "out" / "part-00001.parquet"
    shutil.copy(tmp_path / "other" / foreign.name, foreign)
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 2
    assert "part-00001.parquet: not a readable part: not of this sweep" in result.stderr
    assert again(sweep).exit_code == 0
    assert sorted(pl.read_parquet(sweep / "out" / "*.parquet")["seq_len"]) == [1024, 1024, 2048, 2048]


def test_columns_of_another_type(sweep):
    part = sweep / "out" / "part-00000.parquet"
    pl.read_parquet(part).with_columns(pl.col("ttft_s").cast(pl.String)).write_parquet(part)
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 2
    assert "column ttft_s is String, expected Float64" in result.stderr


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
@pytest.mark.parametrize("where", [0, 4, 0.1, 0.5, -3000, -20, -1])
def test_damage_anywhere_is_found_and_made_good(sweep, where, quiet):
    part = sweep / "out" / "part-00001.parquet"
    whole = part.read_bytes()
    place = int(where * len(whole)) if isinstance(where, float) else where % len(whole)
    part.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    result = invoke("validate", sweep / "out")
    assert result.exit_code == 2
    assert "part-00001.parquet: not a readable part: " in result.stderr
    result = again(sweep, *quiet)
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if line.endswith("; it is computed again")]
    assert len(said) == (not quiet)
    assert all("part-00001.parquet: " in line for line in said)
    assert part.read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_part_cut_short_is_computed_again(sweep, kept):
    part = sweep / "out" / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    result = again(sweep)
    assert result.exit_code == 0
    assert "part-00000.parquet: not Parquet that can be read: " in result.stderr
    assert part.read_bytes() == whole


def test_a_folder_for_a_part(sweep):
    part = sweep / "out" / "part-00000.parquet"
    part.unlink()
    part.mkdir()
    for result in (invoke("validate", sweep / "out"), again(sweep, "--quiet")):
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "part-00000.parquet: " in line


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_and_a_giant_for_a_part(sweep):
    first, second = (sweep / "out" / f"part-0000{i}.parquet" for i in range(2))
    whole = first.read_bytes(), second.read_bytes()
    first.unlink()
    os.mkfifo(first)
    os.truncate(second, 2**40)
    assert "part-00000.parquet: not a readable part: no regular file" in invoke("validate", sweep / "out").stderr
    result = again(sweep)
    assert result.exit_code == 0
    assert "part-00000.parquet: no regular file; it is computed again" in result.stderr
    assert "part-00001.parquet: of 1099511627776 bytes, no part has more than 1073741824; it is comp" in result.stderr
    assert (first.read_bytes(), second.read_bytes()) == whole


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_two_sweeps_into_one_folder(sweep):
    from g5cp_vec.runner import store

    descriptor = store._lock(sweep / "out")
    before = sorted(path.name for path in (sweep / "out").iterdir())
    for options in ([], ["--no-resume"]):
        result = again(sweep, "--quiet", *options)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "another sweep is writing here; wait for it, or choose another -o" in line
    assert sorted(path.name for path in (sweep / "out").iterdir()) == before
    os.close(descriptor)
    assert again(sweep, "--quiet").exit_code == 0


@pytest.mark.parametrize("words", [["sweep", "GRID", "-o", ""], ["sweep", ""], ["check", ""], ["validate", ""]])
def test_an_empty_path_is_no_folder(sweep, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = invoke(*(sweep / "grid.toml" if word == "GRID" else word for word in words))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "expected a path, got an empty text" in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"n_rows": "4", "n_parts": 2}', "\0"])
def test_a_manifest_that_is_none(sweep, text):
    (sweep / "out" / "sweep.json").write_text(text)
    for result in (invoke("validate", sweep / "out"), again(sweep, "--quiet")):
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "sweep.json" in line
        assert "--no-resume" in line
    assert again(sweep, "--no-resume").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "options", "said"),
    [
        ('"2K"]', '"3K"]', [], "grid.axes.seq_len is [1024, 2048] there, [1024, 3072] here"),
        ("n_chips = 4", "n_chips = 8", [], "grid.fixed.n_chips is 4 there, 8 here"),
        ("", "", ["--audit", "none"], "audit is 'sample' there, 'none' here"),
        ("", "", ["--fidelity", "full"], "fidelity is 'exact' there, 'full' here"),
    ],
)
def test_what_differs_is_named(sweep, old, new, options, said):
    (sweep / "grid.toml").write_text(GRID.replace(old, new))
    result = again(sweep, *options)
    assert result.exit_code == 2
    assert f"results of another sweep are here: {said}; " in result.stderr


def test_another_version_is_named(sweep):
    path = sweep / "out" / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "g5cp_version": "0.0.1", "hash": "z"}))
    assert "g5cp_version is '0.0.1' there" in again(sweep).stderr


def test_names_of_folders(sweep, tmp_path):
    odd = tmp_path / "a [1]*" / "öut put"
    assert invoke("sweep", sweep / "grid.toml", "-o", odd).exit_code == 0
    assert "conservation" in invoke("validate", odd).stdout
    result = invoke("sweep", sweep / "grid.toml", "-o", os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


def test_an_interruption_before_anything_says_so(sweep, tmp_path, monkeypatch):
    def interrupted(*words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("g5cp_vec.runner.local.LocalRunner.run_part", interrupted)
        result = invoke("sweep", sweep / "grid.toml", "-o", tmp_path / "new", "--quiet")
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [
        "interrupted before the first part was finished; the same call starts from the beginning"
    ]
    with monkeypatch.context() as patch:
        patch.setattr("g5cp_vec.config.grid.Grid.expand", interrupted)
        result = again(sweep, "--quiet")
    assert result.exit_code == 130
    assert "nothing in " in result.stderr
    (sweep / "out" / "part-00001.parquet").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("g5cp_vec.runner.local.LocalRunner.run_part", interrupted)
        result = again(sweep, "--quiet")
    assert "interrupted: 1 of 2 parts are finished, in " in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_what_is_finished(tmp_path, number):
    (tmp_path / "grid.toml").write_text(
        GRID.replace('["1K", "2K"]', '{from = "1K", to = "1M", steps = 20000}').replace("n_chips = 4", "n_chips = 16")
    )
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import g5cp_vec.runner.plan as plan; plan.ROWS_PER_PART = 50\n"
        "from g5cp_vec.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "sweep", str(tmp_path / "grid.toml"), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--quiet", "--audit", "none"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "out" / "part-00001.parquet").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    (line,) = error.splitlines()
    assert line.startswith("interrupted")
    assert not list((tmp_path / "out").glob(".*tmp"))


def test_kernels_that_nobody_uses_are_removed(tmp_path, monkeypatch):
    names = {"mine": "0" * 16, "old": "1" * 16, "fresh": "2" * 16, "foreign": "holiday-pictures1"}
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").touch()
        if name != names["fresh"]:
            os.utime(tmp_path / name / "complete", (0, 0))
    _jit._remove_stale(tmp_path / names["mine"])
    assert {path.name for path in tmp_path.iterdir()} == {names["mine"], names["fresh"], names["foreign"]}
