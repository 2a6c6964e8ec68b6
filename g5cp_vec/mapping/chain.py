"""Blocks chained into one operation graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE, NONE, Graph
from g5cp_vec.engine.csr import count_predecessors, group_by, join_rows, order_chips
from g5cp_vec.mapping.graph import Block, Ids, OpGraph
from g5cp_vec.mapping.sends import flat


def _join(before: Block, after: Block, n_chips: int) -> tuple[Ids, Ids]:
    """Edges from every exit of ``before`` to every entry of ``after`` on the same chip (local op numbers)."""
    exits = group_by(n_chips, before.exit_chip, before.exit_op)
    joined: tuple[Ids, Ids] = join_rows(*exits, after.entry_chip, after.entry_op)
    return joined


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
    succ_indptr, succ_indices = group_by(n_total, *_chain_edges(blocks, first_op, n_chips))
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
    leave_ops = flat([b.leave_op + first_op[i] for i, b in enumerate(blocks)])
    arrive_ops = flat([b.arrive_op + first_op[i] for i, b in enumerate(blocks)])
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


def _chain_edges(blocks: Sequence[Block], first_op: NDArray[np.int64], n_chips: int) -> tuple[Ids, Ids]:
    """Edges inside every block and between consecutive ones."""
    preds, succs = [], []
    joins: dict[tuple[int, int], tuple[Ids, Ids]] = {}
    for i, block in enumerate(blocks):
        preds.append(block.pred + first_op[i])
        succs.append(block.succ + first_op[i])
        if i + 1 < len(blocks):
            key = (id(block), id(blocks[i + 1]))
            if key not in joins:
                joins[key] = _join(block, blocks[i + 1], n_chips)
            preds.append(joins[key][0] + first_op[i])
            succs.append(joins[key][1] + first_op[i + 1])
    return flat(preds), flat(succs)
