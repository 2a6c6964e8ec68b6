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

CONTEXTS = [which_split.TOKENS["128K"], which_split.TOKENS["1M"]]


def readme_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text[text.index(which_split.HEADER) :].split("\n\n")[0].splitlines()


@pytest.fixture(scope="module")
def rows():
    """Rows of 16 chips; the others of the table are made by the same command, in a minute."""
    grid = tomllib.loads((ROOT / "sweeps" / "same_chips_which_split.toml").read_text(encoding="utf-8"))
    grid["axes"] |= {"seq_len": CONTEXTS, "n_chips": [16]}
    return g5cp_vec.sweep(grid, audit="none")


def test_rows_of_16_chips(rows):
    shown, found = readme_lines(), which_split.table(rows, CONTEXTS)
    assert found[:2] == shown[:2]
    assert len(found) == 6
    assert [line for line in shown[2:] if line.split("|")[2].strip() == "16"] == found[2:]


@pytest.mark.parametrize("seq_len", CONTEXTS)
@pytest.mark.parametrize("model", ["deepseek-r1", "qwen3-235b-a22b"])
def test_the_best_are_the_best(rows, model, seq_len):
    """Twin of the summary: looks at every row."""
    fits = [r for r in rows.rows(named=True) if (r["status"], r["model"], r["seq_len"]) == ("ok", model, seq_len)]
    first = min((r for r in fits if r["phase"] == "prefill"), key=lambda r: r["ttft_s"])
    decode = [r for r in fits if r["phase"] == "decode"]
    fastest = min(decode, key=lambda r: r["tpot_s"])
    most = max(decode, key=lambda r: r["max_concurrent_seqs"] * r["dp"])
    (line,) = which_split.table(rows.filter(model=model), [seq_len])[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert [which_split.split(row) for row in (first, fastest, most)] == [cells[5], cells[7], cells[9]]
    assert cells[8] == str(most["max_concurrent_seqs"] * most["dp"])


def test_what_heads_forbid_is_recorded(rows):
    refused = rows.filter(pl.col("status") == "invalid")
    assert set(refused["model"]) == {"qwen3-235b-a22b"}
    assert all("dcp" in reason and "nearest legal" in reason for reason in refused["reason"])
