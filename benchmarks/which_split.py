"""The table of the README: which split of the same chips answers first, decodes fastest and holds most.

    python benchmarks/which_split.py results/same-chips-which-split [128K 1M]

reads what ``g5cp-vec sweep sweeps/same_chips_which_split.toml`` has written. Only rows that fit count; of equal ones
the first in the order of the grid.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import polars as pl

from g5cp_vec.cli._output import seconds_text, tokens_text

POINT = ["model", "n_chips", "seq_len"]
HEADER = "| model | chips | context | TTFT | split | TPOT | split | sequences | split |"
TOKENS = {"32K": 2**15, "64K": 2**16, "128K": 2**17, "256K": 2**18, "512K": 2**19, "1M": 2**20}


def table(rows: pl.DataFrame, seq_lens: Sequence[int]) -> list[str]:
    """Return lines of Markdown, a row for each model, number of chips and context."""
    rows = rows.filter(pl.col("status") == "ok", pl.col("seq_len").is_in(seq_lens))
    rows = rows.with_columns(sequences=pl.col("max_concurrent_seqs") * pl.col("dp"))
    prefill, decode = (rows.filter(pl.col("phase") == phase) for phase in ("prefill", "decode"))
    first, fastest = _best(prefill, ["ttft_s", "row"], [False, False]), _best(decode, ["tpot_s", "row"], [False, False])
    most = _best(decode, ["sequences", "row"], [True, False])
    lines = [HEADER, "|" + "---|" * HEADER.count(" |")]
    for place in rows.select(POINT).unique().sort(POINT).rows():
        model, n_chips, seq_len = place
        shown = [model, str(n_chips), tokens_text(seq_len)]
        shown += [seconds_text(first[place]["ttft_s"]), split(first[place])]
        shown += [seconds_text(fastest[place]["tpot_s"]), split(fastest[place])]
        shown += [str(most[place]["sequences"]), split(most[place])]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def _best(rows: pl.DataFrame, by: list[str], descending: list[bool]) -> dict[tuple[object, ...], dict[str, object]]:
    best = rows.sort(by, descending=descending).unique(POINT, keep="first", maintain_order=True)
    return {tuple(row[key] for key in POINT): row for row in best.to_dicts()}


def split(row: dict[str, object]) -> str:
    """Return the degrees that are not 1."""
    return " ".join(f"{key}{row[key]}" for key in ("dp", "tp", "pcp", "dcp", "cp") if row[key] != 1)


if __name__ == "__main__":
    contexts = [TOKENS[name] for name in sys.argv[2:] or ("128K", "1M")]
    print("\n".join(table(pl.read_parquet(f"{sys.argv[1]}/part-*.parquet"), contexts)))
