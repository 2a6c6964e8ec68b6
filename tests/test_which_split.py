"""sweeps/same_chips_which_split.toml: the table of the README is what the sweep says."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import polars as pl
import pytest

import g5cp_vec

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import which_split  # noqa: E402

SWEEP = ROOT / "sweeps" / "same_chips_which_split.toml"


def lines(**axes):
    """Return the lines of the table that a part of the grid gives."""
    grid = tomllib.loads(SWEEP.read_text(encoding="utf-8"))
    grid["axes"] |= axes
    rows = g5cp_vec.sweep(grid, audit="none")
    return which_split.table(rows, [which_split.TOKENS["128K"], which_split.TOKENS["1M"]])


def readme_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text[text.index(which_split.HEADER) :].split("\n\n")[0].splitlines()


def test_rows_of_16_chips():
    shown = readme_lines()
    found = lines(n_chips=[16], seq_len=["128K", "1M"])
    assert found[:2] == shown[:2]
    assert len(found) == 6
    assert [line for line in shown[2:] if line.split("|")[2].strip() == "16"] == found[2:]


@pytest.mark.slow
def test_the_whole_table():
    assert lines(seq_len=["128K", "1M"]) == readme_lines()


def test_the_best_are_the_best():
    """Twin of the summary: looks at every row."""
    grid = tomllib.loads(SWEEP.read_text(encoding="utf-8"))
    grid["axes"] |= {"n_chips": [16], "seq_len": ["128K"], "model": ["qwen3-235b-a22b"]}
    rows = g5cp_vec.sweep(grid, audit="none")
    fits = [row for row in rows.rows(named=True) if row["status"] == "ok"]
    first = min((r for r in fits if r["phase"] == "prefill"), key=lambda r: r["ttft_s"])
    decode = [r for r in fits if r["phase"] == "decode"]
    fastest = min(decode, key=lambda r: r["tpot_s"])
    most = max(decode, key=lambda r: r["max_concurrent_seqs"] * r["dp"])
    (line,) = which_split.table(rows, [2**17])[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert [which_split.split(row) for row in (first, fastest, most)] == [cells[5], cells[7], cells[9]]
    assert cells[8] == str(most["max_concurrent_seqs"] * most["dp"])


def test_what_heads_forbid_is_recorded():
    grid = tomllib.loads(SWEEP.read_text(encoding="utf-8"))
    grid["axes"] |= {"n_chips": [16], "seq_len": ["32K"], "phase": ["decode"]}
    rows = g5cp_vec.sweep(grid, audit="none")
    refused = rows.filter(pl.col("status") == "invalid")
    assert set(refused["model"]) == {"qwen3-235b-a22b"}
    assert all("dcp" in reason and "nearest legal" in reason for reason in refused["reason"])
    assert len(refused) > 0
