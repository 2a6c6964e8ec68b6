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
# What the audit of a single point may take: a dozen seconds and 4 GB.
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
    n_ops = max(
        (unfolded_ops(expansion.deployments[i]) for i in set(expansion.deployment[unfolded].tolist())), default=0
    )
    needed, there = n_ops * BYTES_PER_UNFOLDED_OP, memory_bytes()
    if there is not None and needed > there:
        instead = (
            "audit a sample, or nothing" if fidelity == "exact" else "take --fidelity exact, the results are the same"
        )
        raise ConfigError(
            f"{label}: about {n_ops:,} operations of all ranks and layers take {needed / 1e9:,.0f} GB of memory, and "
            f"there are {there / 1e9:,.0f}; {instead}"
        )
