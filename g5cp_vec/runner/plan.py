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

from g5cp_vec.config._keys import LOAD_KEYS
from g5cp_vec.config.collectives import BEST, COLLECTIVES
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID, Expansion
from g5cp_vec.config.limits import steps_of
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.spans import structure_reach, varies_with_load
from g5cp_vec.mapping.structure import structure_key
from g5cp_vec.runner.passes import Point, count_passes

ROWS_PER_PART = 50_000
# Work after which a part is written, in simulated ops of about 0.1 us: some seconds, which an interruption may lose.
OPS_PER_PART = 3 * 10**7
# What else costs as much as so many simulated ops: an audited op, a structure, and a pass that may have one of its own.
AUDIT_WORK = 3
STRUCTURE_WORK = 10**5
PASS_WORK = 2 * 10**4
# ``--audit sample``: rows beside the first of every structure; ops of the largest one, and of all together (some
# twenty seconds), beyond which only every second structure, or every third, and so on, is looked at.
SAMPLED_ROWS = 16
SAMPLED_OPS = 2 * 10**6
SAMPLED_OPS_TOGETHER = 5 * 10**7


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
    """

    kind: str
    key: Hashable
    slices: list[Slice] = field(default_factory=list)

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
    audited : ndarray of bool, shape (n_rows,)
        Rows of the expansion that are audited.
    """

    parts: list[list[Batch]]
    networks: dict[int, Network]
    n_structures: int
    audited: NDArray[np.bool_]


def build_plan(expansion: Expansion, fidelity: str = "exact", audit: str = "sample") -> Plan:
    """Group the rows of an expansion by structure, choose those to audit, and cut them into parts."""
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
            batches.setdefault(key, Batch("math", None)).slices.append(Slice(index, rows[valid]))
        else:
            for reach, chosen in _by_reach(dep, expansion, rows[valid]):
                key = structure_key(dep, networks[index], reach)
                batches.setdefault(key, Batch("g5", key)).slices.append(Slice(index, chosen))
    ranked = sorted(batches.values(), key=lambda b: ("invalid", "math", "g5").index(b.kind))
    n_structures = sum(batch.kind == "g5" for batch in ranked)
    passes = passes_of_rows(expansion)
    audited = _choose_audited(ranked, expansion, passes, audit)
    return Plan(_cut(ranked, expansion, passes, audited, fidelity), networks, n_structures, audited)


def _by_reach(
    dep: Deployment, expansion: Expansion, rows: NDArray[np.int64]
) -> list[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Group the rows of a deployment by what of their load decides the structure."""
    if not varies_with_load(dep):
        return [((), rows)]
    reach = row_reach(dep, expansion, rows)
    distinct, which = np.unique(reach, axis=0, return_inverse=True)
    which = which.ravel()
    return [(tuple(numbers.tolist()), rows[which == i]) for i, numbers in enumerate(distinct)]


def row_reach(dep: Deployment, expansion: Expansion, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `structure_reach` of some rows of an expansion, all of one deployment."""
    loads = (expansion.seq_len[rows], expansion.batch[rows], expansion.cached_tokens[rows])
    return structure_reach(dep, build_load(dep, *loads))


def _choose_audited(
    batches: list[Batch], expansion: Expansion, passes: NDArray[np.int64], audit: str
) -> NDArray[np.bool_]:
    """Choose the rows to audit: all, none, or the first of every structure and `SAMPLED_ROWS` more, evenly spaced.

    An audit unfolds its row to every rank and layer, so a sample leaves out structures of more than `SAMPLED_OPS`, and
    takes every n-th structure where all would be more than `SAMPLED_OPS_TOGETHER`.
    """
    audited = np.zeros(len(expansion), np.bool_)
    simulated = [batch for batch in batches if batch.kind == "g5"]
    if not simulated or audit == "none":
        return audited
    rows = np.concatenate([s.rows for batch in simulated for s in batch.slices])
    if audit == "all":
        audited[rows] = True
        return audited
    deps = expansion.deployments
    n_ops = np.array([estimated_ops(d, "full") if isinstance(d, Deployment) else 0 for d in deps], np.int64)
    first = np.array([batch.slices[0].rows[0] for batch in simulated], np.int64)
    some = rows[np.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows))).astype(np.int64)]
    first, some = (at[n_ops[expansion.deployment[at]] <= SAMPLED_OPS] for at in (first, some))
    together = int((n_ops[expansion.deployment[first]] * passes[first]).sum())
    audited[first[:: -(-together // SAMPLED_OPS_TOGETHER) or 1]] = True
    audited[some] = True
    return audited


def estimated_ops(dep: Deployment, fidelity: str) -> int:
    """Roughly how many ops are simulated for a point of this deployment; cuts the work into parts, nothing else."""
    sends = 4 * (dep.tp - 1) + 2 * ((dep.ep or 1) - 1) + 2 * dep.sequence_ranks
    if dep.is_sharded:
        sends += 6 * (dep.pcp * dep.dcp - 1)
    if fidelity == "full":
        return dep.n_chips * dep.model.n_layers * (6 + sends)
    # A few classes of chips and a few layers are left of it.
    return min(dep.n_chips, 4) * min(dep.model.n_layers, 6) * (6 + sends)


def _simulations(dep: Deployment) -> int:
    """Return how often a row is simulated, at most, until its collectives are chosen."""
    n_groups = sum(size > 1 for size in (dep.tp, dep.cp, dep.pcp, dep.dcp, dep.replicas if dep.ep else 1))
    return len(COLLECTIVES) + n_groups if dep.collective == BEST else 1


def _slice_work(
    dep: Deployment | str, kind: str, audited: NDArray[np.bool_], passes: NDArray[np.int64], fidelity: str
) -> tuple[int, NDArray[np.int64]]:
    """Work of a structure and of each row of a slice, in simulated ops."""
    if kind != "g5" or not isinstance(dep, Deployment):
        return 0, np.ones(len(audited), np.int64)
    of_pass = estimated_ops(dep, fidelity) + (PASS_WORK if varies_with_load(dep) else 0)
    of_audit = AUDIT_WORK * estimated_ops(dep, "full")
    return STRUCTURE_WORK * _simulations(dep), passes * (_simulations(dep) * of_pass + audited * of_audit)


def points(expansion: Expansion, rows: slice | NDArray[np.int64]) -> Point:
    """Return the load keys of some rows."""
    return Point(*(getattr(expansion, key)[rows] for key in LOAD_KEYS))


def passes_of_rows(expansion: Expansion) -> NDArray[np.int64]:
    """Return how many passes every row takes, one where it cannot be simulated."""
    is_prefill = [isinstance(dep, Deployment) and dep.phase == "prefill" for dep in expansion.deployments]
    steps = steps_of(expansion.deployments, expansion.deployment)
    return count_passes(points(expansion, slice(None)), np.array(is_prefill, np.bool_)[expansion.deployment], steps)


def _cut(
    batches: list[Batch], expansion: Expansion, passes: NDArray[np.int64], audited: NDArray[np.bool_], fidelity: str
) -> list[list[Batch]]:
    """Cut batches into parts by rows and by estimated work; a batch may continue in the next part."""
    parts: list[list[Batch]] = []
    current: list[Batch] = []
    n_rows = work = 0
    for batch in batches:
        for index, rows in batch.slices:
            dep = expansion.deployments[index]
            structure, per_row = _slice_work(dep, batch.kind, audited[rows], passes[rows], fidelity)
            done = np.concatenate([[0], np.cumsum(per_row)])
            at = 0
            while at < len(rows):
                is_new = not current or current[-1].kind != batch.kind or current[-1].key != batch.key
                before = work + structure * is_new
                # As many rows as the part has room for, at least one into an empty part.
                fitting = int(np.searchsorted(done, done[at] + OPS_PER_PART - before, side="right")) - 1
                end = min(fitting, at + ROWS_PER_PART - n_rows, len(rows))
                if end <= at and n_rows > 0:
                    parts.append(current)
                    current, n_rows, work = [], 0, 0
                    continue
                end = max(end, at + 1)
                if is_new:
                    current.append(Batch(batch.kind, batch.key))
                current[-1].slices.append(Slice(index, rows[at:end]))
                n_rows += end - at
                work = before + int(done[end] - done[at])
                at = end
    if current:
        parts.append(current)
    return parts
