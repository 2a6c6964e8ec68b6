"""The few lines that end a sweep: points by status, the best deployment of every context length."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import polars as pl

from g5cp_vec.analysis.reasons import group_reasons
from g5cp_vec.runner.schema import KEY_TYPES
from g5cp_vec.runner.store import reading, scan_sweep

REASONS_SHOWN = 3


class Summary(NamedTuple):
    """Counts and winners of a sweep.

    Attributes
    ----------
    n_by_status : dict of str to int
    reasons : list of (str, int)
        The most frequent reasons why points are invalid, and how many points each has.
    n_reasons : int
        All of them.
    n_uncalibrated : int
        Rows that rest on default efficiencies.
    uncalibrated_parts : list of str
        Computes that nothing was measured for although the chip is calibrated, over all rows, sorted.
    best : dict of str to polars.DataFrame
        For ``ttft_s`` and ``tpot_s``, where the sweep has them: one row per model, topology and context length,
        the fastest point that fits, with its time and the keys asked for.
    """

    n_by_status: dict[str, int]
    reasons: list[tuple[str, int]]
    n_reasons: int
    n_uncalibrated: int
    uncalibrated_parts: list[str]
    best: dict[str, pl.DataFrame]


def summarise_sweep(folder: str | Path, axes: Collection[str]) -> Summary:
    """Read the dataset of a sweep, one column at a time, and return its summary.

    Parameters
    ----------
    folder : path
    axes : collection of str
        Keys that vary in the sweep; the winners are described by these and by ``dp``.

    Raises
    ------
    ConfigError
        The folder is not that of a sweep.
    """
    with reading(folder):
        return _summarise_rows(scan_sweep(folder), axes)


def _summarise_rows(rows: pl.LazyFrame, axes: Collection[str]) -> Summary:
    by_status = rows.group_by("status").len().sort("status").collect()
    by_reason = (
        rows.filter(pl.col("status") == "invalid").group_by("reason").len().sort("len", "reason", descending=True)
    )
    reasons = group_reasons(by_reason.collect().iter_rows())
    of = [key for key in ("model", "topology") if key in axes] + ["seq_len"]
    shown = [key for key in KEY_TYPES if (key in axes or key == "dp") and key not in ("phase", *of)]
    best = {}
    for time in ("ttft_s", "tpot_s"):
        winners = (
            rows.filter((pl.col("status") == "ok") & pl.col(time).is_not_null())
            .select(*of, time, "row", *shown)
            .sort(time, "row")
            .group_by(of, maintain_order=True)
            .first()
            .sort(of)
            .drop("row")
            .collect()
        )
        if winners.height:
            best[time] = winners
    uncalibrated = rows.filter(~pl.col("calibrated")).select(pl.len()).collect().item()
    named = rows.select(pl.col("uncalibrated_parts").str.split(", ").explode().drop_nulls().unique()).collect()
    parts = sorted(named.to_series().to_list())
    return Summary(dict(by_status.iter_rows()), reasons[:REASONS_SHOWN], len(reasons), int(uncalibrated), parts, best)
