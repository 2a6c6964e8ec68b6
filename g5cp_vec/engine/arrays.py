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
# Constants that are passed on are numpy's: for a literal a function is compiled anew.
# NONE inside the kernels, where indices are unsigned: a signed one costs a test for "from the end" at every use.
NIL = np.uint32(2**32 - 1)

OK = 0
ERR_CYCLE = 1  # info[0]: an op that never became ready
ERR_NO_PROGRESS = 2  # info[0]: the op at which the loop stopped making progress
ERR_NOT_FINITE = 3  # info[0]: an op whose end overflowed

# Two event times are one instant when they agree to this.
INSTANT_RTOL = 1e-12

# ``key_s`` of a slot that is not in the heap.
OUTSIDE = -1.0

# Lengths of the lists of a workspace, and slots at hand.
(
    N_HEAP,  # ``heap``
    N_SLOTS,  # slots handed out at least once
    N_QUEUE,  # ``queue``
    N_TOUCHED,  # ``touched``
    N_ADDED,  # ``added``
    N_CHANGED,  # ``changed``
    N_AFFECTED,  # ``affected``
    N_OPEN,  # ``open_links``
    N_ASIDE,  # ``aside``
    FREE,  # slot given back last, chained through ``after``
    LAST_PUSHED,  # slot: head of the bucket of events made last
    RECENT,  # here begin the slots of some recent chains, looked at for one to join
) = range(12)
N_RECENT = 8  # a power of two
# Counters of a simulation: ops ended, instants, rate solutions, links looked at by them; clocks, changes, notes and
# pairs recorded; and what the next row finds as it is: the stamp of the last solution, and whether rows are recorded.
N_DONE, N_EVENTS, N_SOLVES, N_LINK_VISITS, N_CLOCKS, N_CHANGES, N_NOTES, N_PAIRS, STAMP, RECORDS = range(10)

# What the loop asks of an op, side by side: one line of the cache holds two of them.
OP = np.dtype(
    [
        ("chip", np.uint32),  # NIL for a flow
        ("rank", np.uint32),
        ("cost", np.uint32),
        ("latency", np.uint32),
        ("succ", np.uint64),  # first successor, first route entry: they end where the next op's begin
        ("route", np.uint64),
    ]
)
# Ops with the same event time are chained from a slot. While the flows that begin to move at an instant are looked
# at, they are PENDING as long as nothing shares their links, else SHARING; then they have a slot.
MEMBER = np.dtype([("after", np.uint32), ("slot", np.uint32)])
PENDING, SHARING = np.uint32(2**32 - 2), np.uint32(2**32 - 3)
# ``lone`` of a link whose flows are in lists.
SHARED = np.uint32(2**32 - 2)
# What a slot stands for: one flow, in a bundle or listed, or a chain: of computes and latencies, of lone flows, or of
# those of a crowd.
SINGLE, TIMERS, LONE, CROWD = np.arange(4, dtype=np.uint32)
SLOT = np.dtype(
    [
        ("rate", np.float64),  # bytes/s; 0 until it has one
        ("new_rate", np.float64),  # being found: negative until it is, 0 outside the affected set
        ("remaining", np.float64),  # bytes at since_s
        ("since_s", np.float64),
        ("key_s", np.float64),  # time of its event (s), OUTSIDE when it has none
        ("kind", np.uint32),
        ("op", np.uint32),  # the flow; the first op of the chain,
        ("last", np.uint32),  # its last op,
        ("n_ops", np.uint32),  # and how many are still in it
        ("since", np.uint32),  # instant at which it began to move
        ("noted", np.uint32),  # last note of its rate
        ("heap_pos", np.uint32),  # place of the bucket that it is the head of in the heap of events
        ("before", np.uint32),  # neighbours in the bucket, which is a ring
        ("after", np.uint32),
        ("is_late", np.uint32),  # whether the event is later than its key
        ("first", np.uint32),  # first hop
        ("n_hops", np.uint32),
        ("bottleneck", np.uint32),  # link that bounds the rate
        ("new_bottleneck", np.uint32),
        ("mate_next", np.uint32),  # neighbours in the bundle, or in the list of flows with the same bottleneck
        ("mate_prev", np.uint32),
    ]
)
# A link crossed by a flow under way.
HOP = np.dtype(
    [
        ("count", np.float64),  # flows of the op's class on one such link
        ("link", np.uint32),
        ("slot", np.uint32),
        ("next", np.uint32),  # neighbours in the list of flows on the link
        ("prev", np.uint32),
    ]
)
LINK = np.dtype(
    [
        ("capacity", np.float64),  # bytes/s
        ("used", np.float64),  # sum of the rates
        ("level", np.float64),  # rate of the flows it is the bottleneck of: no flow on it is faster
        ("residual", np.float64),  # during a solution: what it has left,
        ("weight", np.float64),  # and how many flows to share that among
        ("head", np.uint32),  # first hop on it
        ("mate_head", np.uint32),  # first flow it is the bottleneck of
        ("n_mates", np.uint32),  # how many of these; during a solution, those outside the affected set
        ("n_updates", np.uint16),  # changes of ``used`` since it was summed
        ("is_changed", np.uint16),  # whether it is listed in ``changed``
        ("stamp", np.uint32),  # last solution, or look for a crowd, that it was part of
        ("open_pos", np.uint32),  # place in the heap of open links
    ]
)
CHIP = np.dtype(
    [
        ("begin", np.uint64),  # where its part of ``ready`` begins
        ("is_busy", np.uint32),
        ("is_touched", np.uint32),  # whether it is listed in ``touched``
        ("next_op", np.uint32),  # ready op that comes first in the chip's order, NIL when there is none,
        ("next_rank", np.uint32),  # and its place there
        ("n_ready", np.uint32),  # how many others are ready
        # While a simulation is recorded: the last instants at which it became free, started an op for which it had
        # waited, and started any; and the highest rank that it has started.
        ("freed", np.uint32),
        ("waited", np.uint32),
        ("chosen", np.uint32),
        ("highest", np.uint32),
        ("unused", np.uint32),
    ]
)
# Elements of the heaps: what (of a bucket of events, its head), and when or at which rate.
EVENT = np.dtype([("key_s", np.float64), ("slot", np.uint32), ("unused", np.uint32)])
OPEN_LINK = np.dtype([("key", np.float64), ("link", np.uint32), ("unused", np.uint32)])


# Instants at which an op starts and ends.
AT = np.dtype([("start", np.uint32), ("finish", np.uint32)])
# An event on a tape: when its time began to run, and what has to pass or to move since then.
CLOCK = np.dtype(
    [
        ("kind", np.uint32),  # DURATION, LATENCY, TRANSFER
        ("cost", np.uint32),
        ("since", np.uint32),  # instant; of a transfer, that of its last change
        ("n_changes", np.uint32),  # rates that a transfer has had, 0 for one that has had but ``rate``
        ("first", np.uint32),  # the first of them
        ("note", np.uint32),  # while it is recorded: note of the last of them
        ("rate", np.float64),  # last rate of a transfer (bytes/s)
    ]
)
DURATION, LATENCY, TRANSFER = np.arange(3, dtype=np.uint32)
# A rate that holds from an instant on; while a simulation is recorded, with the flow's rate before.
CHANGE = np.dtype([("rate", np.float64), ("since", np.uint32), ("before", np.uint32)])
# Where on a tape something of an instant begins: the clocks that run out there, the instants that must come before.
FIRST = np.dtype([("clock", np.uint32), ("before", np.uint32)])
# An instant that must come before another; 0 after it: none, as no instant comes before the first.
PAIR = np.dtype([("before", np.uint32), ("after", np.uint32)])


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


class Entries(NamedTuple):
    """What a record of `OP` points into, with unsigned indices."""

    succ_indices: NDArray[np.uint32]
    route_indices: NDArray[np.uint32]
    route_count: NDArray[np.float64]
    chip_ops: NDArray[np.uint32]


class Workspace(NamedTuple):
    """Scratch of one simulation: lists and heaps, and a record per op, flow under way, link and chip.

    What has an event to come has a slot until then, ops with the same event share one, so what is looked at all the
    time stays small however long the graph. A simulation that ends with OK leaves everything clean for the next row
    of its graph; after a failure make another. Stamps count rate solutions and crowds looked for; they stay below
    2**32 for any number of rows that one workspace is used for.
    """

    entries: Entries
    count: NDArray[np.uint32]
    counter: NDArray[np.int64]
    op: NDArray[np.void]
    pred_left: NDArray[np.uint32]
    slot: NDArray[np.void]
    hop: NDArray[np.void]
    member: NDArray[np.void]
    heap: NDArray[np.void]
    queue: NDArray[np.uint32]
    aside: NDArray[np.uint32]
    chip: NDArray[np.void]
    ready: NDArray[np.uint32]
    touched: NDArray[np.uint32]
    added: NDArray[np.uint32]
    lone_rate: NDArray[np.float64]
    changed: NDArray[np.uint32]
    affected: NDArray[np.uint32]
    link: NDArray[np.void]
    lone: NDArray[np.uint32]
    open_links: NDArray[np.void]
    max_hops: int
    instant_s: NDArray[np.float64]
    at: NDArray[np.void]


class Instants(NamedTuple):
    """When every op of a row starts and ends.

    Attributes
    ----------
    instant_s : ndarray of float64, shape (n_instants,)
        In order where they were simulated; where they were played, in that of the row that was recorded.
    end_s : float
        The last of them.
    at : ndarray of `AT`, shape (n_ops,)
        Instants.
    """

    instant_s: NDArray[np.float64]
    end_s: float
    at: NDArray[np.void]


@kernel
def start_s(times: Any, op: Any) -> Any:
    """Start of an op (s)."""
    return times.instant_s[times.at[op]["start"]]


@kernel
def finish_s(times: Any, op: Any) -> Any:
    """End of an op (s)."""
    return times.instant_s[times.at[op]["finish"]]


def _pack_ops(g: Graph) -> NDArray[np.void]:
    n_ops = len(g.op_kind)
    op = np.empty(n_ops + 1, OP)
    op["chip"][:n_ops] = g.op_chip.view(np.uint32)
    op["rank"][:n_ops] = g.op_rank.view(np.uint32)
    op["cost"][:n_ops] = g.op_cost.view(np.uint32)
    op["latency"][:n_ops] = g.op_latency.view(np.uint32)
    op["succ"] = g.succ_indptr
    op["route"] = g.route_indptr
    return op


def make_workspace(g: Graph) -> Workspace:
    """Allocate the scratch of one simulation of a graph.

    Nearly all of it is made for every op being under way at once; the system provides only what is touched.
    """
    n_ops, n_chips, n_links = len(g.op_kind), len(g.chip_indptr) - 1, len(g.link_capacity)
    max_hops = int(np.diff(g.route_indptr).max(initial=0))
    # The last slot is nobody's. The others are made clean when they are handed out: most never are.
    slot = np.empty(n_ops + 1, SLOT)
    slot["key_s"][n_ops] = OUTSIDE
    count = np.zeros(RECENT + N_RECENT, np.uint32)
    count[FREE], count[RECENT:] = NIL, n_ops
    chip = np.zeros(n_chips, CHIP)
    chip["begin"] = g.chip_indptr[:-1]
    chip["next_op"] = NIL
    link = np.zeros(n_links, LINK)
    link["head"] = link["mate_head"] = NIL
    entries = (
        g.succ_indices.view(np.uint32),
        g.route_indices.view(np.uint32),
        g.route_count,
        g.chip_ops.view(np.uint32),
    )
    return Workspace(
        entries=Entries(*entries),
        count=count,
        counter=np.zeros(RECORDS + 1, np.int64),
        op=_pack_ops(g),
        pred_left=np.empty(n_ops, np.uint32),
        slot=slot,
        hop=np.empty(n_ops * max_hops, HOP),
        member=np.empty(n_ops, MEMBER),
        heap=np.empty(n_ops, EVENT),
        queue=np.empty(n_ops, np.uint32),
        aside=np.empty(n_ops, np.uint32),
        chip=chip,
        ready=np.empty(n_ops, np.uint32),
        touched=np.empty(n_chips, np.uint32),
        added=np.empty(n_ops, np.uint32),
        lone_rate=np.empty(n_ops),
        changed=np.empty(n_links, np.uint32),
        affected=np.empty(n_ops, np.uint32),
        link=link,
        lone=np.full(n_links, NIL, np.uint32),
        open_links=np.empty(n_links, OPEN_LINK),
        max_hops=max_hops,
        # No op has more than two events, and every instant has one.
        instant_s=np.empty(2 * n_ops + 2),
        at=np.empty(n_ops, AT),
    )
