"""Whether what has to be unfolded to every rank and layer finds room in this machine's memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID, Expansion
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.plan import Plan, estimated_ops

# Resident, of an audit and of ``--fidelity full``; measured 350 on audits of 1 to 24 million ops.
BYTES_PER_UNFOLDED_OP = 400
_BYTES_PER_TIMED_OP = 130
# What the audit of a single point may take: some seconds and 4 GB.
POINT_OPS = 10**7
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int | None:
    """Return the memory that this process may use: the machine's or its container's; None where nothing says so."""
    found = []
    with suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            found.append(int(Path(path).read_text()))
    return min(found, default=None)


def unfolded_ops(dep: Deployment | str) -> int:
    """Roughly the operations of all ranks and layers of a deployment; none of the closed form's."""
    return estimated_ops(dep, "full") if isinstance(dep, Deployment) and dep.path == "g5" else 0


def refuse_without_room(label: str, expansion: Expansion, plan: Plan, fidelity: str) -> None:
    """Refuse, before anything is computed, what would be killed for its memory.

    Raises
    ------
    ConfigError
        A row that is to be audited or simulated in full takes more memory than there is.
    """
    unfolded = plan.audited if fidelity == "exact" else expansion.reason_code == VALID
    deployments = set(expansion.deployment[unfolded].tolist())
    n_ops = max((unfolded_ops(expansion.deployments[i]) for i in deployments), default=0)
    audit, full = "audit a sample, or nothing", "take --fidelity exact, the results are the same"
    _refuse(label, n_ops, BYTES_PER_UNFOLDED_OP, audit if fidelity == "exact" else full)


def refuse_breakdown(label: str, dep: Deployment) -> None:
    """Refuse a breakdown, which needs the times of all operations, likewise."""
    _refuse(label, unfolded_ops(dep), _BYTES_PER_TIMED_OP, "leave --breakdown out, or break fewer chips down")


def _refuse(label: str, n_ops: int, bytes_per_op: int, instead: str) -> None:
    needed, there = n_ops * bytes_per_op, memory_bytes()
    if there is not None and needed > there:
        raise ConfigError(
            f"{label}: about {n_ops:,} operations of all ranks and layers take {needed / 1e9:,.0f} GB of memory, and "
            f"there are {there / 1e9:,.0f}; {instead}"
        )
