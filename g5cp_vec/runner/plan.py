"""Points are put in order: rows that cannot be, rows of the closed form, then structure by structure.

A *part* is what one file of the dataset holds. Its rows follow from the grid alone, never from how fast the machine
is, so that an interrupted sweep and an uninterrupted one write the same files.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID, Expansion
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.structure import structure_key

ROWS_PER_PART = 50_000
# Simulated ops after which a part is written: tens of seconds of work at most.
OPS_PER_PART = 4 * 10**7


class Slice(NamedTuple):
    """Rows of one deployment: positions in the expansion."""

    deployment: int
    rows: NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Rows that run together.

    Attributes
    ----------
    kind : {"invalid", "math", "g5"}
    key : hashable
        Names the structure; None for the closed form and for invalid rows.
    slices : list of Slice
    is_first : bool
        Whether no earlier part holds rows of the same structure.
    """

    kind: str
    key: Hashable
    slices: list[Slice] = field(default_factory=list)
    is_first: bool = True

    @property
    def n_rows(self) -> int:
        """Rows of all slices."""
        return sum(len(s.rows) for s in self.slices)


@dataclass(slots=True)
class Plan:
    """Every row of an expansion, in parts.

    Attributes
    ----------
    parts : list of list of Batch
    networks : dict
        Network of each valid deployment by its index.
    n_structures : int
    """

    parts: list[list[Batch]]
    networks: dict[int, Network]
    n_structures: int


def build_plan(expansion: Expansion, fidelity: str = "exact") -> Plan:
    """Group the rows of an expansion by structure and cut them into parts."""
    order = np.argsort(expansion.deployment, kind="stable")
    bounds = np.searchsorted(expansion.deployment[order], np.arange(len(expansion.deployments) + 1))
    networks: dict[int, Network] = {}
    shared: dict[Hashable, Network] = {}
    batches: dict[Hashable, Batch] = {}
    for index, dep in enumerate(expansion.deployments):
        rows = order[bounds[index] : bounds[index + 1]]
        valid = expansion.reason_code[rows] == VALID
        if not valid.all():
            batches.setdefault("invalid", Batch("invalid", None)).slices.append(Slice(index, rows[~valid]))
        if isinstance(dep, str) or not valid.any():
            continue
        network_key = (dep.topology.fingerprint, dep.n_chips)
        if network_key not in shared:
            shared[network_key] = build_network(dep.topology, dep.n_chips)
        networks[index] = shared[network_key]
        if dep.path == "math":
            key: Hashable = "math"
            batch = batches.setdefault(key, Batch("math", None))
        else:
            key = structure_key(dep, networks[index])
            batch = batches.setdefault(key, Batch("g5", key))
        batch.slices.append(Slice(index, rows[valid]))
    ranked = sorted(batches.values(), key=lambda b: ("invalid", "math", "g5").index(b.kind))
    n_structures = sum(batch.kind == "g5" for batch in ranked)
    return Plan(_cut(ranked, expansion.deployments, fidelity), networks, n_structures)


def estimated_ops(dep: Deployment, fidelity: str) -> int:
    """Roughly how many ops are simulated for a point of this deployment; cuts the work into parts, nothing else."""
    sends = 4 * (dep.tp - 1) + 2 * ((dep.ep or 1) - 1) + 2 * dep.cp
    if fidelity == "full":
        return dep.n_chips * dep.model.n_layers * (6 + sends)
    # A few classes of chips and a few layers are left of it.
    return min(dep.n_chips, 4) * min(dep.model.n_layers, 6) * (6 + sends)


def _cut(batches: list[Batch], deployments: list[Deployment | str], fidelity: str) -> list[list[Batch]]:
    """Cut batches into parts by rows and by estimated work; a batch may continue in the next part."""
    parts: list[list[Batch]] = []
    current: list[Batch] = []
    n_rows = n_ops = 0
    for batch in batches:
        is_first = True
        for index, rows in batch.slices:
            dep = deployments[index]
            ops_per_row = estimated_ops(dep, fidelity) if isinstance(dep, Deployment) and batch.kind == "g5" else 1
            while len(rows):
                room = min(ROWS_PER_PART - n_rows, (OPS_PER_PART - n_ops) // ops_per_row)
                if room <= 0 and n_rows > 0:
                    parts.append(current)
                    current, n_rows, n_ops = [], 0, 0
                    continue
                taken, rows = rows[: max(room, 1)], rows[max(room, 1) :]
                if not current or current[-1].kind != batch.kind or current[-1].key != batch.key:
                    current.append(Batch(batch.kind, batch.key, is_first=is_first))
                    is_first = False
                current[-1].slices.append(Slice(index, taken))
                n_rows += len(taken)
                n_ops += len(taken) * ops_per_row
    if current:
        parts.append(current)
    return parts
