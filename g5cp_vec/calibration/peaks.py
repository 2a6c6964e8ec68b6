"""Measured rows that are faster than the hardware can be: what they say is not about the kernel.

A row may claim more than a peak because it is labelled with another element type than it multiplies in, because its
unit is wrong, or because its operands stay in a cache between repetitions. A surface bent by it would be cut off at the
peak again, and wrong beside it; so such rows are set aside, and named. No row is too
slow to be, but a table most of whose rows are a hundred times too slow has another unit than its column names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from g5cp_vec.calibration.fit import Machine
from g5cp_vec.calibration.tables import Row
from g5cp_vec.cost.calibration import WORK, bound_seconds

# So many are named; the others are counted.
_N_NAMED = 5
# A table is doubtful whose median time is so many times what the peaks allow, or this time if that is longer: a short
# kernel is all launch. Of the tables that the presets were made from the medians are 1.3 to 9.5 times.
SLOW_FACTOR = 100.0
SHORT_S = 1e-5


class TooFast(NamedTuple):
    """A row, and by how much it beats the peaks of its machine (> 1)."""

    row: Row
    factor: float


def least_seconds(row: Row, machine: Machine) -> float:
    """Return what no kernel of a row's shape can beat on a machine (s), as predictions are bounded."""
    constants = dict(row.constants)
    flops, n_bytes = WORK[row.kind](constants, *row.place)
    link = constants.get("link_gigabytes_per_second")
    byte_s = n_bytes / (machine.bandwidth if link is None else link * 1e9)
    surface = cast(Any, SimpleNamespace(kind=row.kind, numbers=constants))
    return float(bound_seconds(surface, flops / machine.peak(row.arithmetic_dtype), byte_s, row.place))


def split_by_peak(rows: Sequence[Row], machines: Mapping[str, Machine]) -> tuple[list[Row], list[TooFast]]:
    """Return the rows that their machine can have made, in order, and the others, the fastest first."""
    possible, too_fast = [], []
    for row in rows:
        least_s = least_seconds(row, machines[row.system])
        if row.seconds >= least_s:
            possible.append(row)
        else:
            too_fast.append(TooFast(row, least_s / row.seconds))
    return possible, sorted(too_fast, key=lambda found: -found.factor)


def describe_too_fast(too_fast: Sequence[TooFast], n_rows: int) -> str:
    """Return one line about rows that beat their peaks: how many of all, which, and by how much."""
    named = [
        f"{Path(path).name} line {line} ({found.row.kind} on {found.row.system}, {_times(found.factor)} the peak)"
        for found in too_fast[:_N_NAMED]
        for path, _, line in [found.row.where.rpartition(":")]
    ]
    others = f" and {len(too_fast) - _N_NAMED} more" if len(too_fast) > _N_NAMED else ""
    return f"{len(too_fast)} of {n_rows} rows beat what the hardware can do: {', '.join(named)}{others}"


def describe_too_slow(rows: Sequence[Row], machines: Mapping[str, Machine]) -> list[str]:
    """Return a line about each file most of whose rows are far slower than their machines."""
    factors: dict[str, list[float]] = {}
    for row in rows:
        allowed_s = max(least_seconds(row, machines[row.system]), SHORT_S)
        factors.setdefault(row.where.rpartition(":")[0], []).append(row.seconds / allowed_s)
    return [
        f"{Path(path).name}: half of its {len(found)} rows or more take {median:,.0f} times what the peaks and "
        f"{SHORT_S * 1e6:.0f} us of launch allow, or longer; "
        "check that its times are in the unit that their column names"
        for path, found in factors.items()
        if (median := float(np.median(found))) > SLOW_FACTOR
    ]


def _times(factor: float) -> str:
    # Never "1 times": what is shown is rounded up.
    return f"{np.ceil(factor * 1000) / 1000:.4g} times"
