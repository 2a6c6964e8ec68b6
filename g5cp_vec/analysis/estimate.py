"""What a sweep will cost, before it runs: points, structures, time and memory. Nothing is simulated.

Time is a fixed part, a part for every structure (its graph is built and reduced once), and a part for the operations
left of every row after the exact reductions; an audit unfolds its row to every rank and layer. The rates were fitted
to the sweeps of the project and to one of 200,000 points, on two cores of a server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID, Expansion
from g5cp_vec.config.grid import Grid
from g5cp_vec.runner.plan import build_plan, estimated_ops, passes_of_rows
from g5cp_vec.runner.room import BYTES_PER_UNFOLDED_OP

START_S = 0.3
STRUCTURE_S = 0.01
OPS_PER_S = 1.5e7
AUDITED_OPS_PER_S = 3e6
# Resident: the interpreter with its libraries, the rows of a part, and the unfolded graph of the largest audited row.
BASE_BYTES = 250 * 10**6
BYTES_PER_ROW = 3200


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Size of a sweep.

    Attributes
    ----------
    n_points, n_valid, n_repeated : int
        Rows after the filter, those that can be simulated, and of these the ones that are another row once more.
    n_structures, n_parts : int
        Distinct operation graphs, and files of the dataset.
    n_ops, n_audited_ops : int
        Roughly the operations to simulate, and those of the rows that ``--audit sample`` looks at.
    seconds, audit_seconds, memory_bytes : float
        Roughly; the audit's time comes on top.
    reasons : list of (str, int)
        Why points are invalid, and how many; most frequent first.
    """

    n_points: int
    n_valid: int
    n_repeated: int
    n_structures: int
    n_parts: int
    n_ops: int
    n_audited_ops: int
    seconds: float
    audit_seconds: float
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
    exact, full = _ops(expansion, "exact"), _ops(expansion, "full")
    passes = passes_of_rows(expansion)
    audited_ops = (full[expansion.deployment] * passes)[plan.audited]
    most_rows = max((sum(batch.n_rows for batch in part) for part in plan.parts), default=0)
    n_ops = int((exact[expansion.deployment] * passes)[is_valid].sum())
    n_audited_ops = int(audited_ops.sum())
    most_audited = int(full[expansion.deployment[plan.audited]].max(initial=0))
    counts = np.bincount(expansion.reason_code[~is_valid], minlength=len(expansion.reasons)).tolist()
    return Estimate(
        n_points=len(expansion),
        n_valid=int(is_valid.sum()),
        n_repeated=expansion.n_repeated,
        n_structures=plan.n_structures,
        n_parts=len(plan.parts),
        n_ops=n_ops,
        n_audited_ops=n_audited_ops,
        seconds=START_S + STRUCTURE_S * plan.n_structures + n_ops / OPS_PER_S,
        audit_seconds=n_audited_ops / AUDITED_OPS_PER_S,
        memory_bytes=BASE_BYTES + BYTES_PER_ROW * most_rows + BYTES_PER_UNFOLDED_OP * most_audited,
        reasons=sorted(zip(expansion.reasons, counts, strict=True), key=lambda pair: -pair[1]),
    )


def _ops(expansion: Expansion, fidelity: str) -> NDArray[np.int64]:
    """Operations of one point of each deployment, 0 where none is simulated."""
    return np.array(
        [
            estimated_ops(dep, fidelity) if isinstance(dep, Deployment) and dep.path == "g5" else 0
            for dep in expansion.deployments
        ],
        np.int64,
    )
