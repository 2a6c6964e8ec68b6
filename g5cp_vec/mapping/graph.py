"""Operation graphs as arrays, built from blocks.

A deployment repeats a few distinct layers, so a graph is a chain of *blocks* (embedding, a layer, a transfer
between stages, the head). A block is built once, for all ranks of its stage at a time, with ops numbered from 0;
the chain copies it as often as it occurs and joins consecutive blocks chip by chip: every op that a block
declares as an *entry* of a chip waits for every op that the block before declares as an *exit* of that chip.

Op order, which users of the arrays may rely on: block by block, within a block as created, within one creation
in the order of the chips given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g5cp_vec.engine.arrays import COMPUTE, FLOW, NONE, Graph
from g5cp_vec.engine.csr import count_predecessors, group_by, order_chips
from g5cp_vec.mapping.network import Network

# Why an op exists. Positions in this table are the codes in ``OpGraph.op_reason``.
REASONS = (
    "embed", "qkv", "attention", "merge", "o_proj", "ffn", "moe", "lm_head",
    "cp_pass_kv", "cp_pass_q", "cp_reduce", "tp", "ep", "pp", "cp_halo", "cp_gather", "sync", "pcp", "dcp",
)  # fmt: skip
REASON = {name: code for code, name in enumerate(REASONS)}
# Calls of a collective library that may add a latency of their own to a route's (None adds nothing). Where they do, the
# latency ids of a network come once for each of them, in this order.
LIBRARY_CALLS = (None, "send_recv", "all_to_all")

Ids = NDArray[np.int32]
# Name of a compute op and index of its layer kind (None outside layers), and the rate id of its chip where that is
# not 0; name of a message, with the index where its size depends on it.
ComputeKey = tuple[str, int | None]
DurationKey = ComputeKey | tuple[str, int | None, int]
MessageKey = str | tuple[str, int]


def split_rate(key: DurationKey) -> tuple[ComputeKey, int]:
    """Return what a compute op does, and the rate id of the chips that do it."""
    return key[:2], key[2] if len(key) == 3 else 0


class OpGraph(NamedTuple):
    """An operation graph with the tags that say what each op is.

    Attributes
    ----------
    graph : Graph
        The engine's arrays.
    op_src, op_dst : ndarrays of int32, shape (n_ops,)
        Chips that a flow leaves and enters; both the chip itself for a compute op.
    op_reason : ndarray of int8, shape (n_ops,)
        Position in `REASONS`.
    op_layer : ndarray of int32, shape (n_ops,)
        Layer of the model, -1 outside layers.
    op_step : ndarray of int32, shape (n_ops,)
        Ring step or step of a collective, 0 elsewhere.
    leave_indptr, leave_ops : ndarrays of int64 (n_chips + 1,) and int32
        Flows out of each chip.
    arrive_indptr, arrive_ops : ndarrays of int64 (n_chips + 1,) and int32
        Flows into each chip.
    n_chips : int
    """

    graph: Graph
    op_src: NDArray[np.int32]
    op_dst: NDArray[np.int32]
    op_reason: NDArray[np.int8]
    op_layer: NDArray[np.int32]
    op_step: NDArray[np.int32]
    leave_indptr: NDArray[np.int64]
    leave_ops: Ids
    arrive_indptr: NDArray[np.int64]
    arrive_ops: Ids
    n_chips: int


class Block(NamedTuple):
    """A part of a graph with ops numbered from 0; the fields are those of `OpGraph` and `Graph`.

    Pairs (``leave_chip``, ``leave_op``) name the flows out of each chip, ``arrive_*`` those into it; ``route_length``
    has one entry per op, ``route_links`` and ``route_count`` one per link crossed.
    """

    kind: NDArray[np.int8]
    src: Ids
    dst: Ids
    cost: Ids
    latency: Ids
    prio: Ids
    reason: NDArray[np.int8]
    step: Ids
    route_length: NDArray[np.int64]
    route_links: Ids
    route_count: NDArray[np.float64]
    pred: Ids
    succ: Ids
    entry_chip: Ids
    entry_op: Ids
    exit_chip: Ids
    exit_op: Ids
    leave_chip: Ids
    leave_op: Ids
    arrive_chip: Ids
    arrive_op: Ids
    n_prio: int


class CostKeys:
    """Numbers the costs that a structure's ops refer to: what they mean is known, what they amount to is not.

    Parameters
    ----------
    n_rates : int
        Different speeds of chips; a duration has an id for each, in consecutive order.
    """

    def __init__(self, n_rates: int = 1) -> None:
        self.n_rates = n_rates
        self.durations: dict[DurationKey, int] = {}
        self.bytes: dict[MessageKey, int] = {}

    def duration(self, key: ComputeKey) -> int:
        """Return the duration id of ``key`` at full speed; `BlockBuilder.compute` adds the rate id of each chip."""
        if key not in self.durations:
            slower: list[DurationKey] = [(*key, rate) for rate in range(1, self.n_rates)]
            for each in [key, *slower]:
                self.durations[each] = len(self.durations)
        return self.durations[key]

    def message(self, key: MessageKey) -> int:
        """Return the bytes id of ``key``."""
        return self.bytes.setdefault(key, len(self.bytes))


def _flat(parts: Sequence[ArrayLike], dtype: type = np.int32) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


class BlockBuilder:
    """Collects the ops of a block; ids are handed out in order of creation, in the shape of the chips given.

    Parameters
    ----------
    network : Network
    library_calls : bool
        Whether the calls of `LIBRARY_CALLS` have latencies of their own.
    """

    def __init__(self, network: Network, *, library_calls: bool = False) -> None:
        self.network = network
        self.library_calls = library_calls
        self.n_ops = 0
        self.n_prio = 0
        self._ops: list[tuple[Ids, Ids, Ids, int, int, int, int]] = []
        self._routes: list[tuple[NDArray[np.int64], Ids, Ids]] = []
        # Steps of a ring send along the same pairs of chips, given as the same arrays.
        self._known_pairs: dict[tuple[int, int], tuple[Ids, Ids, tuple[Ids, Ids, NDArray[np.int64], Ids, Ids]]] = {}
        self._pred: list[Ids] = []
        self._succ: list[Ids] = []
        self._entry: tuple[list[Ids], list[Ids]] = ([], [])
        self._exit: tuple[list[Ids], list[Ids]] = ([], [])

    def _new_ids(self, shape: tuple[int, ...]) -> Ids:
        n = math.prod(shape)
        ids = np.arange(self.n_ops, self.n_ops + n, dtype=np.int32).reshape(shape)
        self.n_ops += n
        return ids

    def compute(self, chips: Ids, cost: int, reason: str, step: int = 0) -> Ids:
        """Add one compute op per chip, next in every chip's program order; ``cost`` is that at full speed."""
        flat = chips.ravel()
        costs = np.int32(cost) + self.network.chip_rate[flat]
        self._ops.append((flat, flat, costs, COMPUTE, self.n_prio, REASON[reason], step))
        none = np.zeros(0, np.int32)
        self._routes.append((np.zeros(len(flat), np.int64), none, np.full(len(flat), NONE, np.int32)))
        self.n_prio += 1
        return self._new_ids(chips.shape)

    def flow(self, src: Ids, dst: Ids, cost: int, reason: str, step: int = 0, call: str | None = None) -> Ids:
        """Add one flow per pair of chips, along the network's route; ``call`` is one of `LIBRARY_CALLS`."""
        known = self._known_pairs.get((id(src), id(dst)))
        if known is None:
            flat_src, flat_dst = src.ravel(), dst.ravel()
            routes = self.network.routes(flat_src, flat_dst)
            pairs = (flat_src, flat_dst, np.diff(routes.indptr), routes.links, routes.latency)
            # The arrays are kept, so that their ids stay theirs.
            known = self._known_pairs[id(src), id(dst)] = (src, dst, pairs)
        flat_src, flat_dst, length, links, latency = known[2]
        costs = np.full(len(flat_src), cost, np.int32)
        self._ops.append((flat_src, flat_dst, costs, FLOW, 0, REASON[reason], step))
        if self.library_calls:
            latency = latency + np.int32(LIBRARY_CALLS.index(call) * len(self.network.latencies()))
        self._routes.append((length, links, latency))
        return self._new_ids(src.shape)

    def edge(self, preds: Ids, succs: Ids) -> None:
        """Let ``succs[i]`` wait for ``preds[i]`` (shapes are broadcast against each other)."""
        if preds.shape != succs.shape:
            preds, succs = np.broadcast_arrays(preds, succs)
        self._pred.append(preds.ravel())
        self._succ.append(succs.ravel())

    def entry(self, ops: Ids, chips: Ids) -> None:
        """Declare ops that wait for what the block before delivers to their chip."""
        self._entry[0].append(chips.ravel())
        self._entry[1].append(ops.ravel())

    def exit(self, ops: Ids, chips: Ids) -> None:
        """Declare ops whose ends deliver this block's result to a chip."""
        self._exit[0].append(chips.ravel())
        self._exit[1].append(ops.ravel())

    def build(self) -> Block:
        """Return the block."""
        n_each = [len(part[0]) for part in self._ops]
        kind, prio, reason, step = (np.repeat([part[i] for part in self._ops], n_each) for i in range(3, 7))
        src, dst, cost = (_flat([part[i] for part in self._ops]) for i in range(3))
        flows = np.flatnonzero(kind == FLOW).astype(np.int32)
        links = _flat([part[1] for part in self._routes])
        return Block(
            kind=kind.astype(np.int8),
            src=src,
            dst=dst,
            cost=cost,
            latency=_flat([part[2] for part in self._routes]),
            prio=prio.astype(np.int32),
            reason=reason.astype(np.int8),
            step=step.astype(np.int32),
            route_length=_flat([part[0] for part in self._routes], np.int64),
            route_links=links,
            route_count=np.ones(len(links)),
            pred=_flat(self._pred),
            succ=_flat(self._succ),
            entry_chip=_flat(self._entry[0]),
            entry_op=_flat(self._entry[1]),
            exit_chip=_flat(self._exit[0]),
            exit_op=_flat(self._exit[1]),
            leave_chip=src[flows],
            leave_op=flows,
            arrive_chip=dst[flows],
            arrive_op=flows,
            n_prio=self.n_prio,
        )


def _join(before: Block, after: Block) -> tuple[Ids, Ids]:
    """Edges from every exit of ``before`` to every entry of ``after`` on the same chip (local op numbers)."""
    order = np.argsort(before.exit_chip, kind="stable")
    chips, ops = before.exit_chip[order], before.exit_op[order]
    begin = np.searchsorted(chips, after.entry_chip, side="left")
    n_exits = np.searchsorted(chips, after.entry_chip, side="right") - begin
    succ = np.repeat(after.entry_op, n_exits)
    within = np.arange(n_exits.sum()) - np.repeat(np.cumsum(n_exits) - n_exits, n_exits)
    return ops[np.repeat(begin, n_exits) + within], succ


def chain_blocks(
    blocks: Sequence[Block], layers: Sequence[int], link_capacity: NDArray[np.int32], n_chips: int
) -> OpGraph:
    """Chain blocks into one graph.

    Parameters
    ----------
    blocks : sequence of Block
        In program order; the same object may occur many times.
    layers : sequence of int
        Layer of the model that each occurrence is, -1 for none.
    link_capacity : ndarray of int32, shape (n_links,)
        Capacity id of each link.
    n_chips : int
    """
    n_ops = np.array([len(b.kind) for b in blocks], np.int64)
    first_op = np.concatenate([[0], np.cumsum(n_ops)])
    first_prio = np.concatenate([[0], np.cumsum([b.n_prio for b in blocks])])
    kind = _joined(blocks, "kind")
    src = _joined(blocks, "src")
    chip = np.where(kind == COMPUTE, src, np.int32(NONE))
    prio = np.concatenate([b.prio + first_prio[i] for i, b in enumerate(blocks)])
    route_indptr = np.zeros(len(kind) + 1, np.int64)
    np.cumsum(_joined(blocks, "route_length"), out=route_indptr[1:])
    n_total = len(kind)
    succ_indptr, succ_indices = group_by(n_total, *_chain_edges(blocks, first_op))
    chip_indptr, chip_ops, op_rank = order_chips(n_chips, chip, prio)
    graph = Graph(
        op_kind=kind,
        op_chip=chip,
        op_cost=_joined(blocks, "cost"),
        op_latency=_joined(blocks, "latency"),
        op_rank=op_rank,
        chip_indptr=chip_indptr,
        chip_ops=chip_ops,
        route_indptr=route_indptr,
        route_indices=_joined(blocks, "route_links"),
        route_count=_joined(blocks, "route_count"),
        route_op=np.repeat(np.arange(n_total, dtype=np.int32), np.diff(route_indptr)),
        succ_indptr=succ_indptr,
        succ_indices=succ_indices,
        pred_count=count_predecessors(n_total, succ_indices),
        link_capacity=link_capacity,
    )
    leave_ops = _flat([b.leave_op + first_op[i] for i, b in enumerate(blocks)])
    arrive_ops = _flat([b.arrive_op + first_op[i] for i, b in enumerate(blocks)])
    leave_indptr, leave_ops = group_by(n_chips, _joined(blocks, "leave_chip"), leave_ops)
    arrive_indptr, arrive_ops = group_by(n_chips, _joined(blocks, "arrive_chip"), arrive_ops)
    return OpGraph(
        graph=graph,
        op_src=src,
        op_dst=_joined(blocks, "dst"),
        op_reason=_joined(blocks, "reason"),
        op_layer=np.repeat(np.asarray(layers, np.int32), n_ops),
        op_step=_joined(blocks, "step"),
        leave_indptr=leave_indptr,
        leave_ops=leave_ops,
        arrive_indptr=arrive_indptr,
        arrive_ops=arrive_ops,
        n_chips=n_chips,
    )


def _joined(blocks: Sequence[Block], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(b, name) for b in blocks])


def _chain_edges(blocks: Sequence[Block], first_op: NDArray[np.int64]) -> tuple[Ids, Ids]:
    """Edges inside every block and between consecutive ones."""
    preds, succs = [], []
    joins: dict[tuple[int, int], tuple[Ids, Ids]] = {}
    for i, block in enumerate(blocks):
        preds.append(block.pred + first_op[i])
        succs.append(block.succ + first_op[i])
        if i + 1 < len(blocks):
            key = (id(block), id(blocks[i + 1]))
            if key not in joins:
                joins[key] = _join(block, blocks[i + 1])
            preds.append(joins[key][0] + first_op[i])
            succs.append(joins[key][1] + first_op[i + 1])
    return _flat(preds), _flat(succs)
