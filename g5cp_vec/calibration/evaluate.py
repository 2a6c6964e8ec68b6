"""Predictions of a calibration beside measured rows, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from g5cp_vec.calibration.fit import LONG_S
from g5cp_vec.calibration.tables import Row
from g5cp_vec.config.calibration import Calibration, Surface
from g5cp_vec.config.chip import Chip, Efficiency
from g5cp_vec.cost.calibration import extrapolation, surface_seconds

_ROW = {
    "table": pl.String, "line": pl.Int64, "system": pl.String, "kind": pl.String, "library": pl.String,
    "labels": pl.String, "shape": pl.String, "surface": pl.String,
    "measured_us": pl.Float64, "predicted_us": pl.Float64, "error": pl.Float64, "extrapolated": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Rows with what is predicted for them.

    Attributes
    ----------
    rows : polars.DataFrame
        ``surface`` is "own" where the calibration knows the row's library and labels, "default" where another library's
        surface stands in, "none" where there is none and nothing is predicted; ``error`` is predicted / measured - 1.
    summary : polars.DataFrame
        Per table: rows, those without prediction, and median and 90th percentile of the absolute error, of all rows and
        of those longer than 20 us.
    """

    rows: pl.DataFrame
    summary: pl.DataFrame


def evaluate(chip: Chip, rows: Sequence[Row]) -> Evaluation:
    """Predict every row with a chip's calibration."""
    assert chip.calibration is not None
    by_variant = {surface.variant: surface for surface in chip.calibration.surface}
    share = chip.calibration.memory_efficiency or Efficiency().memory
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.variant, []).append(i)
    predicted, factor = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    used = ["none"] * len(rows)
    for members in groups.values():
        surface, how = _surface_for(chip.calibration, by_variant, rows[members[0]])
        if surface is None:
            continue
        coordinates = list(np.array([rows[i].place for i in members], float).T)
        extra_s = np.array([rows[i].extra_bytes for i in members]) / chip.hbm_bandwidth_bytes_per_s / share
        predicted[members] = surface_seconds(chip, surface, coordinates) + extra_s
        factor[members] = extrapolation(surface, coordinates)
        for i in members:
            used[i] = how
    table = _frame(rows, used, predicted, factor)
    return Evaluation(table, _summary(table))


def _surface_for(calibration: Calibration, by_variant: dict[Any, Surface], row: Row) -> tuple[Surface | None, str]:
    """Return the surface of a row's own library and labels; else one with the same labels; else the default."""
    if row.variant in by_variant:
        return by_variant[row.variant], "own"
    alike = [s for s in calibration.surface if (s.kind, s.labels, s.constants) == (row.kind, row.labels, row.constants)]
    if alike:
        return max(alike, key=lambda surface: (bool(surface.default_for), surface.n_rows)), "default"
    default = calibration.defaults.get((row.kind, row.use))
    return (default, "default") if default is not None else (None, "none")


def _frame(rows: Sequence[Row], used: list[str], predicted: Any, factor: Any) -> pl.DataFrame:
    places = [row.where.rpartition(":") for row in rows]
    measured = np.array([row.seconds for row in rows])
    return pl.DataFrame(
        {
            "table": [Path(path).name for path, _, _ in places],
            "line": [int(line) for _, _, line in places],
            "system": [row.system for row in rows],
            "kind": [row.kind for row in rows],
            "library": [row.library for row in rows],
            "labels": [", ".join(f"{name} = {value}" for name, value in row.labels if value) for row in rows],
            "shape": [" x ".join(f"{x:g}" for x in row.place) for row in rows],
            "surface": used,
            "measured_us": measured * 1e6,
            "predicted_us": predicted * 1e6,
            "error": predicted / measured - 1,
            "extrapolated": factor,
        },
        schema=_ROW,
    ).with_columns(pl.col("predicted_us", "error", "extrapolated").fill_nan(None))


def _summary(rows: pl.DataFrame) -> pl.DataFrame:
    size = pl.col("error").abs()
    is_long = pl.col("measured_us") > LONG_S * 1e6
    return rows.group_by("table", "system", maintain_order=True).agg(
        rows=pl.len(),
        unpredicted=pl.col("error").is_null().sum(),
        extrapolated=(pl.col("extrapolated") > 1).sum(),
        median=size.median(),
        p90=size.quantile(0.9, "linear"),
        long_rows=is_long.sum(),
        long_median=size.filter(is_long).median(),
        long_p90=size.filter(is_long).quantile(0.9, "linear"),
    )
