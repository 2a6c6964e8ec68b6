"""Parts of a graph, one by one and side by side: the distinct blocks that a chain repeats."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
# Ops of a block as `g5cp_vec.mapping.graph.BlockBuilder` hands them out.
Handles = NDArray[Any]


class Block(NamedTuple):
    """A part of a graph with ops numbered from 0; the fields are those of `OpGraph` and `Graph`.

    Pairs (``leave_chip``, ``leave_op``) name the flows out of each chip, ``arrive_*`` those into it; ``route_length``
    has one entry per op, ``route_links`` and ``route_count`` one per link crossed; ``handle`` is `BlockBuilder`'s.
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
    handle: Handles = np.zeros(0, np.int64)


_PER_OP = ("kind", "src", "dst", "cost", "latency", "prio", "reason", "step", "route_length", "handle")
# Ops, and what stands beside each.
_BESIDE = {
    "succ": "pred", "entry_op": "entry_chip", "exit_op": "exit_chip", "leave_op": "leave_chip",
    "arrive_op": "arrive_chip",
}  # fmt: skip


class Blocks(NamedTuple):
    """Distinct blocks side by side.

    Attributes
    ----------
    ops : Block
        All of them as one, with ops numbered on from block to block; pairs and edges come block by block too.
    first_op : ndarray of int64, shape (n_blocks + 1,)
        Where the ops of each block begin, and their number.
    n_prio : list of int
        Of each block.
    """

    ops: Block
    first_op: NDArray[np.int64]
    n_prio: list[int]

    def split(self) -> list[Block]:
        """Return each block, its ops numbered from 0."""
        ops, n_each, n_blocks = self.ops, np.diff(self.first_op), len(self.n_prio)
        begin, block = self.first_op[:-1].astype(np.int32).repeat(n_each), np.arange(n_blocks).repeat(n_each)
        of_ops, of_links = self.first_op.tolist(), np.append(0, ops.route_length.cumsum())[self.first_op].tolist()
        # Each column, and where every block begins in it.
        columns: dict[str, tuple[NDArray[Any], list[int]]] = {name: (getattr(ops, name), of_ops) for name in _PER_OP}
        columns |= {name: (getattr(ops, name), of_links) for name in ("route_links", "route_count")}
        for name, beside in _BESIDE.items():
            own = getattr(ops, name)
            at = block[own].searchsorted(np.arange(n_blocks + 1)).tolist()
            columns[name] = (own - begin[own], at)
            other = getattr(ops, beside)
            columns[beside] = (other - begin[other] if beside == "pred" else other, at)
        return [
            Block(**{name: column[at[i] : at[i + 1]] for name, (column, at) in columns.items()}, n_prio=n_prio)
            for i, n_prio in enumerate(self.n_prio)
        ]
