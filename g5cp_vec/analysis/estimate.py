"""What a sweep will cost, before it runs: points, structures, time and memory. Nothing is simulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID
from g5cp_vec.config.grid import Grid
from g5cp_vec.runner.plan import build_plan, estimated_ops

# Measured with sweeps/deepseek_v3_1m.toml on two cores of a server, templates included: 2.0 million ops/s.
OPS_PER_S = 2.0e6
# Measured with two threads: the template of 2 million ops, a workspace per thread and what numba and polars take.
BYTES_PER_OP = 350
BASE_BYTES = 250 * 10**6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Size of a sweep.

    Attributes
    ----------
    n_points, n_valid : int
        Rows after the filter, and those that can be simulated.
    n_structures, n_parts : int
        Distinct operation graphs, and files of the dataset.
    n_ops, most_ops : int
        Roughly the operations of all points together, and of the largest one.
    seconds, memory_bytes : float
        Roughly, at `OPS_PER_S` and `BYTES_PER_OP`.
    reasons : list of (str, int)
        Why points are invalid, and how many; most frequent first.
    """

    n_points: int
    n_valid: int
    n_structures: int
    n_parts: int
    n_ops: int
    most_ops: int
    seconds: float
    memory_bytes: float
    reasons: list[tuple[str, int]]


def estimate_sweep(grid: Grid) -> Estimate:
    """Return the size of a grid's sweep.

    Raises
    ------
    ConfigError
        The filter of the grid fails on some row.
    """
    expansion = grid.expand()
    plan = build_plan(expansion)
    is_valid = expansion.reason_code == VALID
    n_rows = np.bincount(expansion.deployment[is_valid], minlength=len(expansion.deployments)).tolist()
    ops = [
        (n, estimated_ops(dep))
        for n, dep in zip(n_rows, expansion.deployments, strict=True)
        if n and isinstance(dep, Deployment) and dep.path == "g5"
    ]
    n_ops, most_ops = sum(n * each for n, each in ops), max((each for _, each in ops), default=0)
    counts = np.bincount(expansion.reason_code[~is_valid], minlength=len(expansion.reasons)).tolist()
    reasons = sorted(zip(expansion.reasons, counts, strict=True), key=lambda pair: -pair[1])
    return Estimate(
        n_points=len(expansion),
        n_valid=int(is_valid.sum()),
        n_structures=plan.n_structures,
        n_parts=len(plan.parts),
        n_ops=n_ops,
        most_ops=most_ops,
        seconds=n_ops / OPS_PER_S,
        memory_bytes=BASE_BYTES + BYTES_PER_OP * most_ops,
        reasons=reasons,
    )
