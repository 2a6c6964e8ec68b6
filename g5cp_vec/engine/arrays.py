"""The arrays that describe one operation graph, and the scratch space of one simulation.

Everything a graph's *structure* says is in `Graph`; everything that differs between points that share the
structure is in a `Costs` row, addressed through the ids ``op_cost``, ``op_latency`` and ``link_capacity``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel

COMPUTE = 0
FLOW = 1
NONE = -1

OK = 0
ERR_CYCLE = 1  # info[0]: an op that never became ready
ERR_NO_PROGRESS = 2  # info[0]: the op at which the loop stopped making progress
ERR_NOT_FINITE = 3  # info[0]: an op whose end overflowed

# Positions in the counter array of a workspace.
HEAP_N = 0
N_DONE = 1
N_ADDED = 2
N_REMOVED = 3
N_QUEUE = 4
N_TOUCHED = 5
N_EVENTS = 6
N_SOLVES = 7
N_LINK_VISITS = 8
STAMP = 9
LINK_STAMP = 10
N_COUNTERS = 11


class Graph(NamedTuple):
    """Structure of an operation graph in CSR form.

    Attributes
    ----------
    op_kind : ndarray of int8, shape (n_ops,)
        `COMPUTE` or `FLOW`.
    op_chip : ndarray of int32, shape (n_ops,)
        Chip of a compute op, -1 for a flow.
    op_cost : ndarray of int32, shape (n_ops,)
        Column of ``Costs.duration_s`` (compute) or ``Costs.bytes`` (flow).
    op_latency : ndarray of int32, shape (n_ops,)
        Column of ``Costs.latency_s``; -1 for a compute op.
    op_rank : ndarray of int32, shape (n_ops,)
        Place of a compute op in its chip's order (priority, then op index); -1 for a flow.
    chip_indptr, chip_ops : ndarrays of int64 (n_chips + 1,) and int32 (n_compute,)
        Compute ops of each chip in that order.
    route_indptr, route_indices : ndarrays of int64 (n_ops + 1,) and int32 (nnz,)
        Links crossed by each flow, no link twice.
    route_count : ndarray of float64, shape (nnz,)
        How many flows of the op's class cross one such link (1 unless classes are simulated).
    route_op : ndarray of int32, shape (nnz,)
        The op that owns each route entry.
    succ_indptr, succ_indices : ndarrays of int64 (n_ops + 1,) and int32 (n_edges,)
        Successors, each named once.
    pred_count : ndarray of int32, shape (n_ops,)
        Number of distinct predecessors.
    link_capacity : ndarray of int32, shape (n_links,)
        Column of ``Costs.capacity_bytes_per_s``.
    """

    op_kind: NDArray[np.int8]
    op_chip: NDArray[np.int32]
    op_cost: NDArray[np.int32]
    op_latency: NDArray[np.int32]
    op_rank: NDArray[np.int32]
    chip_indptr: NDArray[np.int64]
    chip_ops: NDArray[np.int32]
    route_indptr: NDArray[np.int64]
    route_indices: NDArray[np.int32]
    route_count: NDArray[np.float64]
    route_op: NDArray[np.int32]
    succ_indptr: NDArray[np.int64]
    succ_indices: NDArray[np.int32]
    pred_count: NDArray[np.int32]
    link_capacity: NDArray[np.int32]


class Costs(NamedTuple):
    """One row of costs: seconds, bytes and capacities by id (float64, C-contiguous)."""

    duration_s: NDArray[np.float64]
    bytes: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    capacity_bytes_per_s: NDArray[np.float64]


class Workspace(NamedTuple):
    """Scratch of one simulation, reusable for every row of a graph; see `make_workspace` for the shapes.

    By op: ``key_s``, ``heap_pos``, ``rate``, ``remaining`` (bytes at ``since_s``), ``bottleneck`` and the neighbours
    ``mate_next``, ``mate_prev`` in its list of flows with the same bottleneck. By link: ``link_head`` and
    ``entry_next``/``entry_prev`` chain the flows on it, ``link_used`` is the sum of their rates, ``mate_head`` starts
    the list of those it is the bottleneck of, all of which run at ``link_level``.
    """

    count: NDArray[np.int64]
    pred_left: NDArray[np.int32]
    key_s: NDArray[np.float64]
    heap: NDArray[np.int32]
    heap_pos: NDArray[np.int32]
    queue: NDArray[np.int32]
    added: NDArray[np.int32]
    removed: NDArray[np.int32]
    running: NDArray[np.int32]
    ready: NDArray[np.int32]
    n_ready: NDArray[np.int32]
    touched: NDArray[np.int32]
    is_touched: NDArray[np.int8]
    rate: NDArray[np.float64]
    new_rate: NDArray[np.float64]
    remaining: NDArray[np.float64]
    since_s: NDArray[np.float64]
    bottleneck: NDArray[np.int32]
    new_bottleneck: NDArray[np.int32]
    mate_next: NDArray[np.int32]
    mate_prev: NDArray[np.int32]
    op_stamp: NDArray[np.int64]
    affected: NDArray[np.int32]
    pending: NDArray[np.int32]
    link_head: NDArray[np.int64]
    link_n: NDArray[np.int32]
    link_used: NDArray[np.float64]
    link_level: NDArray[np.float64]
    link_updates: NDArray[np.int32]
    mate_head: NDArray[np.int32]
    mate_n: NDArray[np.int32]
    entry_next: NDArray[np.int64]
    entry_prev: NDArray[np.int64]
    link_stamp: NDArray[np.int64]
    links: NDArray[np.int32]
    residual: NDArray[np.float64]
    weight: NDArray[np.float64]
    fastest: NDArray[np.float64]
    mate_affected: NDArray[np.int32]


@kernel(allocates=True, entry=True)
def make_workspace(n_ops: int, n_chips: int, n_links: int, nnz: int) -> Any:
    """Allocate the scratch of one simulation (O(n_ops + n_chips + n_links + nnz) bytes)."""
    return Workspace(
        count=np.zeros(N_COUNTERS, np.int64),
        pred_left=np.empty(n_ops, np.int32),
        key_s=np.empty(n_ops, np.float64),
        heap=np.empty(n_ops, np.int32),
        heap_pos=np.full(n_ops, NONE, np.int32),
        queue=np.empty(n_ops, np.int32),
        added=np.empty(n_ops, np.int32),
        removed=np.empty(n_ops, np.int32),
        running=np.full(n_chips, NONE, np.int32),
        ready=np.empty(n_ops, np.int32),
        n_ready=np.zeros(n_chips, np.int32),
        touched=np.empty(n_chips, np.int32),
        is_touched=np.zeros(n_chips, np.int8),
        rate=np.empty(n_ops, np.float64),
        new_rate=np.empty(n_ops, np.float64),
        remaining=np.empty(n_ops, np.float64),
        since_s=np.empty(n_ops, np.float64),
        bottleneck=np.empty(n_ops, np.int32),
        new_bottleneck=np.empty(n_ops, np.int32),
        mate_next=np.empty(n_ops, np.int32),
        mate_prev=np.empty(n_ops, np.int32),
        op_stamp=np.zeros(n_ops, np.int64),
        affected=np.empty(n_ops, np.int32),
        pending=np.empty(n_ops, np.int32),
        link_head=np.full(n_links, NONE, np.int64),
        link_n=np.zeros(n_links, np.int32),
        link_used=np.zeros(n_links, np.float64),
        link_level=np.zeros(n_links, np.float64),
        link_updates=np.zeros(n_links, np.int32),
        mate_head=np.full(n_links, NONE, np.int32),
        mate_n=np.zeros(n_links, np.int32),
        entry_next=np.empty(nnz, np.int64),
        entry_prev=np.empty(nnz, np.int64),
        link_stamp=np.zeros(n_links, np.int64),
        links=np.empty(n_links, np.int32),
        residual=np.empty(n_links, np.float64),
        weight=np.empty(n_links, np.float64),
        fastest=np.empty(n_links, np.float64),
        mate_affected=np.empty(n_links, np.int32),
    )
