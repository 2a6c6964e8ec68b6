"""What the benchmarks share: the naive twin, and what goes beside each time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))


@pytest.fixture
def record(benchmark: Any) -> Callable[..., None]:
    """Write counts beside a measured time, and the rates that follow from them."""

    def write(**counts: Any) -> None:
        benchmark.extra_info.update(counts)
        if benchmark.stats is None:  # --benchmark-disable: run once, not timed
            return
        median_s = benchmark.stats.stats.median
        for per, name in (("n_ops", "ops_per_s"), ("n_points", "points_per_s")):
            if name not in counts and per in counts:
                benchmark.extra_info[name] = counts[per] / median_s
        if "n_events" in counts:
            benchmark.extra_info["events_per_s"] = counts["n_events"] / median_s
            benchmark.extra_info["ns_per_event"] = 1e9 * median_s / counts["n_events"]

    return write
