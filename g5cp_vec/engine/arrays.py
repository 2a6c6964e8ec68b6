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
N_OPENINGS = 10
N_COUNTERS = 11

# Columns of ``op_real`` and ``op_int``: what belongs to one flow lies on one cache line or two.
RATE, NEW_RATE, REMAINING, SINCE_S = range(4)
HEAP_POS, BOTTLENECK, NEW_BOTTLENECK, MATE_NEXT, MATE_PREV, OP_STAMP = range(6)
# Columns of ``link_real`` and ``link_int``.
USED, LEVEL, RESIDUAL, WEIGHT, FASTEST = range(5)
HEAD, N_FLOWS, N_UPDATES, MATE_HEAD, N_MATES, N_MATES_AFFECTED, LINK_STAMP = range(7)
# Columns of ``entry``.
NEXT, PREV = range(2)


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
    """Scratch of one simulation, see `make_workspace` for the shapes.

    A simulation that ends with OK leaves it clean for the next row of its graph; after a failure make another.
    Rows of two-dimensional arrays are padded to 32 or 64 bytes, so that none straddles a cache line. Stamps count
    rate solutions and stay below 2**31 for any number of rows that one workspace is used for.

    ``op_real`` holds RATE and REMAINING (bytes at SINCE_S) of a flow and the NEW_RATE being found; ``op_int`` its
    place in the heap, its BOTTLENECK link, and its neighbours in the list of flows with the same bottleneck.
    ``link_real`` holds USED, the sum of the rates on a link, and LEVEL, the rate of the flows it is the bottleneck
    of; ``link_int`` the HEAD of the list of flows on it (chained by ``entry``, one row per route entry), MATE_HEAD of
    those it bounds, and their numbers.
    """

    count: NDArray[np.int64]
    pred_left: NDArray[np.int32]
    heap: NDArray[np.int32]
    heap_key_s: NDArray[np.float64]
    queue: NDArray[np.int32]
    added: NDArray[np.int32]
    removed: NDArray[np.int32]
    affected: NDArray[np.int32]
    pending: NDArray[np.int32]
    op_real: NDArray[np.float64]
    op_int: NDArray[np.int32]
    running: NDArray[np.int32]
    ready: NDArray[np.int32]
    n_ready: NDArray[np.int32]
    touched: NDArray[np.int32]
    is_touched: NDArray[np.int8]
    link_real: NDArray[np.float64]
    link_int: NDArray[np.int32]
    entry: NDArray[np.int32]
    links: NDArray[np.int32]
    link_share: NDArray[np.float64]


@kernel(allocates=True)
def _clean_ops(n_ops: int) -> Any:
    op_int = np.zeros((n_ops, 8), np.int32)
    op_int[:, HEAP_POS] = NONE
    return op_int


@kernel(allocates=True)
def _clean_links(n_links: int) -> Any:
    link_int = np.zeros((n_links, 8), np.int32)
    link_int[:, HEAD] = NONE
    link_int[:, MATE_HEAD] = NONE
    return link_int


@kernel(allocates=True, entry=True)
def make_workspace(n_ops: int, n_chips: int, n_links: int, nnz: int) -> Any:
    """Allocate the scratch of one simulation (O(n_ops + n_chips + n_links + nnz) bytes)."""
    return Workspace(
        count=np.zeros(N_COUNTERS, np.int64),
        pred_left=np.empty(n_ops, np.int32),
        heap=np.empty(n_ops, np.int32),
        heap_key_s=np.empty(n_ops, np.float64),
        queue=np.empty(n_ops, np.int32),
        added=np.empty(n_ops, np.int32),
        removed=np.empty(n_ops, np.int32),
        affected=np.empty(n_ops, np.int32),
        pending=np.empty(n_ops, np.int32),
        op_real=np.zeros((n_ops, 4), np.float64),
        op_int=_clean_ops(n_ops),
        running=np.full(n_chips, NONE, np.int32),
        ready=np.empty(n_ops, np.int32),
        n_ready=np.zeros(n_chips, np.int32),
        touched=np.empty(n_chips, np.int32),
        is_touched=np.zeros(n_chips, np.int8),
        link_real=np.zeros((n_links, 8), np.float64),
        link_int=_clean_links(n_links),
        entry=np.empty((nnz, 2), np.int32),
        links=np.empty(n_links, np.int32),
        link_share=np.empty(n_links, np.float64),
    )
