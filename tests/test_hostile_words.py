"""Words, streams and encodings of the command line that are not as they should be; grids that say things twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import polars as pl
import pytest
from commands import POINT, invoke

from g5cp_vec.analysis.reasons import group_reasons

GRID = """
name = "small"
[fixed]
phase = "prefill"
model = "llama-3.1-8b"
chip = "h100-sxm"
topology = "flat-450"
n_chips = 4
cp = 2
seq_len = "1K"
[axes]
ep = [1, 2]
"""


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"], ["--nonsense"], ["sweep"], ["sweep", "--jobs", "x", "g"], ["sweep", "--audit", "x", "g"],
        ["run", "a", "b"], ["list"], ["list", "x\ny"], ["calibrate", "a.csv"], ["kv-layout"], ["run", "--jsn", "g"],
        ["kv-layout", "--split", "--tokens", "1,x", "--pcp", "2"], ["sweep", "-o"],
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")


def run(words, **options):
    command = [sys.executable, "-m", "g5cp_vec.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.skipif(os.name != "posix", reason="descriptors of POSIX")
@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams(closed):
    done = run(["list", "chips"], preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("words", [["list", "chips"], ["--help"], ["--version"], ["run", "--help"]])
def test_a_full_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "g5cp_vec.cli", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: output: No space left on device"]


def test_an_encoding_without_the_characters(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID.replace('"small"', '"größe→"'), encoding="utf-8")
    done = run(["check", tmp_path / "grid.toml"], env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert r"gr\xf6\xdfe\u2192" in done.stdout


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interruption_inside_a_call_from_c_is_not_lost(monkeypatch, tmp_path, goes_on):
    """As when compiled code is handed over: what is raised in a destructor goes nowhere."""

    class Dies:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def fails(*words, **options):
        Dies()
        if goes_on:
            time.sleep(10)
        raise RuntimeError("no compiled object yet")

    (tmp_path / "point.toml").write_text(POINT)
    monkeypatch.setattr("g5cp_vec.runner.api.run_point", fails)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = invoke("run", tmp_path / "point.toml")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_points_that_stand_twice_are_counted(tmp_path):
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    path.write_text(GRID)
    checked = invoke("check", path)
    assert ["the", "same", "as", "another", "point", "1"] in [line.split() for line in checked.stdout.splitlines()]
    assert "2 points, 1 the same as another (equal point_id), 1 structures" in invoke("sweep", path, "-o", out).stderr
    assert pl.read_parquet(out / "part-00000.parquet")["point_id"].n_unique() == 1
    path.write_text(GRID.replace("ep = [1, 2]", "batch = [1, 2]"))
    assert "the same as another" not in invoke("check", path).stdout


def test_reasons_that_differ_in_numbers_are_one():
    reasons = [("tp = 3 of 32 heads", 1), ("tp = 5 of 32 heads", 4), ("other", 3)]
    assert group_reasons(reasons) == [("tp = 5 of 32 heads (and 1 more with other numbers)", 5), ("other", 3)]


def test_check_groups_many_reasons(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        GRID.replace("cp = 2\n", "").replace("ep = [1, 2]", "cp = [3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17, 18]")
    )
    lines = [line for line in invoke("check", path).stdout.splitlines() if "more with other numbers" in line]
    assert len(lines) == 1
    assert lines[0].split()[-1] == "13"


def test_tables_of_winners_end(tmp_path, monkeypatch):
    monkeypatch.setattr("g5cp_vec.cli.sweep._WINNERS_SHOWN", 3)
    path = tmp_path / "grid.toml"
    path.write_text(
        GRID.replace('seq_len = "1K"\n', "").replace("ep = [1, 2]", "seq_len = [1024, 2048, 3072, 4096, 5120]")
    )
    result = invoke("sweep", path, "-o", tmp_path / "out")
    assert "and 2 more rows, see the dataset" in result.stdout
