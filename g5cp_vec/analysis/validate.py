"""Checks over the rows of a sweep: monotonicity inside the masked region, conservation, plausibility.

Two prefill points of rings that differ in cp alone (and in dp, which follows) are a pair. A pair is masked when, at
both ends, the ring hides its communication (ring_s <= 1.01 ring_compute_s; no ring at cp = 1), and, at the larger cp,
fixed overheads are at most 5 % of the ring's computes and the work outside attention has not grown. TTFT must not
rise over a masked pair; a scan with pairs of which fewer than 80 % are masked proves nothing and fails. The pairs are
one self join. Decode has no such law: TPOT may rise or fall with cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from g5cp_vec.config.context import PASS_KV
from g5cp_vec.runner.schema import KEY_TYPES, KPIS
from g5cp_vec.runner.store import expected_rows, reading, scan_sweep

# The masked region of the validation scan.
RING_SLACK = 1.01
OVERHEAD_SHARE = 0.05
LEAST_MASKED_SHARE = 0.8
# Two times are one instant when they agree to this; a rise below it is rounding.
INSTANT_RTOL = 1e-12

_PARTS = ("kv_bytes", "weight_bytes", "activation_bytes", "buffer_bytes")
# What no row may break, and what no simulated one may, whatever its values.
_RULES_OF_ALL = {
    "every row is there once": pl.col("row").is_unique() & (pl.col("row") >= 0),
    "status is ok, oom or invalid": pl.col("status").is_in(["ok", "oom", "invalid"]),
}
_RULES = {
    "step_s is positive and finite": pl.col("step_s").is_finite() & (pl.col("step_s") > 0),
    "exposed_comm_s is at most comm_s": pl.col("exposed_comm_s") <= pl.col("comm_s") * (1 + INSTANT_RTOL),
    "peak_bytes is at least the sum of its parts": pl.col("peak_bytes") >= pl.sum_horizontal(_PARTS),
    "status is oom exactly where fits is false": (pl.col("status") == "oom") != pl.col("fits"),
    "max_seq_len reaches seq_len exactly where the point fits": (
        (pl.col("max_seq_len") >= pl.col("seq_len")) == pl.col("fits")
    ),
}


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Verdict over one sweep.

    Attributes
    ----------
    n_rows, n_simulated, n_audited : int
        All rows, of which none counts twice, those that are not invalid, and those with conservation KPIs.
    n_expected : int
        Rows of the sweep when it is finished.
    n_pairs, n_masked : int
        Pairs of prefill points cp < cp', and those inside the masked region.
    rises : polars.DataFrame
        Masked pairs whose TTFT rises: the keys they share, then cp, row and TTFT at both ends.
    lost : polars.DataFrame
        Audited rows with a KPI that is not 0: row, point_id and the six.
    broken : polars.DataFrame
        Rows that break a rule of plausibility: row, point_id, rule.
    """

    n_rows: int
    n_simulated: int
    n_audited: int
    n_expected: int
    n_pairs: int
    n_masked: int
    rises: pl.DataFrame
    lost: pl.DataFrame
    broken: pl.DataFrame

    @property
    def masked_share(self) -> float | None:
        """Masked pairs over all pairs; None without pairs."""
        return self.n_masked / self.n_pairs if self.n_pairs else None

    @property
    def is_vacuous(self) -> bool:
        """Whether there are pairs but too few are masked for the scan to prove anything."""
        return self.masked_share is not None and self.masked_share < LEAST_MASKED_SHARE

    @property
    def is_finished(self) -> bool:
        """Whether every row of the sweep is here."""
        return self.n_rows == self.n_expected

    @property
    def is_sound(self) -> bool:
        """Whether no check found anything."""
        return self.is_finished and not (self.is_vacuous or self.rises.height or self.lost.height or self.broken.height)


def validate_sweep(folder: str | Path) -> Validation:
    """Check the rows of a sweep.

    Parameters
    ----------
    folder : path
        Output folder of a sweep.

    Raises
    ------
    ConfigError
        The folder is not that of a sweep.
    """
    with reading(folder):
        return _validate_rows(scan_sweep(folder), expected_rows(folder))


def _validate_rows(rows: pl.LazyFrame, n_expected: int) -> Validation:
    simulated = rows.filter(pl.col("status") != "invalid")
    audited = rows.filter(pl.any_horizontal(pl.col(KPIS).is_not_null()))
    # A KPI that is null in an audited row was lost by the audit itself.
    lost = audited.filter(pl.any_horizontal(pl.col(KPIS).fill_null(-1) != 0)).select("row", "point_id", *KPIS)
    broken = [
        frame.filter(~rule.fill_null(False)).select("row", "point_id", rule=pl.lit(name))
        for frame, rules in ((rows, _RULES_OF_ALL), (simulated, _RULES))
        for name, rule in rules.items()
    ]
    pairs = cp_pairs(simulated)
    masked = pairs.filter("masked")
    is_rise = pl.col("ttft_s_wide") > pl.col("ttft_s") * (1 + INSTANT_RTOL)
    counts = pl.collect_all([part.select(pl.len()) for part in (rows.unique("row"), simulated, audited)])
    return Validation(
        n_rows=counts[0].item(),
        n_simulated=counts[1].item(),
        n_audited=counts[2].item(),
        n_expected=n_expected,
        n_pairs=pairs.height,
        n_masked=masked.height,
        rises=masked.filter(is_rise).drop("masked").sort("row", "row_wide"),
        lost=lost.sort("row").collect(),
        broken=pl.concat(broken).sort("row").collect(),
    )


def cp_pairs(simulated: pl.LazyFrame) -> pl.DataFrame:
    """Return all pairs of prefill points cp < cp' of pass-KV that are equal in everything but cp and dp.

    Parameters
    ----------
    simulated : polars.LazyFrame
        Rows of a sweep that are not invalid.

    Returns
    -------
    polars.DataFrame
        The keys that vary in the sweep, ``cp``, ``row``, ``ttft_s`` of the smaller cp, the same with the suffix
        ``_wide`` of the larger, and ``masked``.
    """
    others = [key for key in KEY_TYPES if key not in ("cp", "dp")]
    is_hidden = (pl.col("cp") == 1) | (pl.col("ring_s") <= RING_SLACK * pl.col("ring_compute_s"))
    points = (
        simulated.filter((pl.col("phase") == "prefill") & (pl.col("prefill_form") == PASS_KV))
        .select(
            *others, "cp", "row", "ttft_s", "ring_compute_s", "overhead_s",
            hidden=is_hidden.fill_null(False),
            outside_s=pl.col("compute_s") - pl.col("attention_s"),
        )
        .collect()
    )  # fmt: skip
    varied = [key for key in others if points[key].n_unique() > 1]
    # Keys that do not vary need no comparison; the number of a group stands for those that do.
    group = pl.struct(varied).rank("dense") if varied else pl.lit(0, pl.UInt32)
    points = points.select(pl.col(varied), group.alias("group"), pl.exclude(others))
    wide = points.drop(varied)
    overhead_is_small = pl.col("overhead_s_wide") <= OVERHEAD_SHARE * pl.col("ring_compute_s_wide")
    nothing_else_grew = pl.col("outside_s_wide") <= pl.col("outside_s")
    masked = pl.col("hidden") & pl.col("hidden_wide") & overhead_is_small & nothing_else_grew
    return (
        points.lazy()
        .join(wide.lazy(), on="group", suffix="_wide")
        .filter(pl.col("cp") < pl.col("cp_wide"))
        .select(
            *varied, "cp", "cp_wide", "row", "row_wide", "ttft_s", "ttft_s_wide",
            masked=masked.fill_null(False),
        )
        .collect()
    )  # fmt: skip
