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


_PER_OP = ("kind", "src", "dst", "cost", "latency", "prio", "reason", "step", "route_length")
_PAIRS = ("entry", "exit", "leave", "arrive")


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
        ops, n = self.ops, len(self.n_prio)
        block = np.repeat(np.arange(n), np.diff(self.first_op))

        def bounds(of_ops: Ids) -> list[int]:
            found: list[int] = np.searchsorted(block[of_ops], np.arange(n + 1)).tolist()
            return found

        first: list[int] = self.first_op.tolist()
        crossed = np.concatenate([[0], np.cumsum(ops.route_length)])[self.first_op].tolist()
        edges, pairs = bounds(ops.succ), {name: bounds(getattr(ops, f"{name}_op")) for name in _PAIRS}
        blocks = []
        for i, n_prio in enumerate(self.n_prio):
            own, links, between = (slice(at[i], at[i + 1]) for at in (first, crossed, edges))
            of: dict[str, Any] = {name: getattr(ops, name)[own] for name in _PER_OP}
            for name, at in pairs.items():
                of[f"{name}_chip"] = getattr(ops, f"{name}_chip")[at[i] : at[i + 1]]
                of[f"{name}_op"] = getattr(ops, f"{name}_op")[at[i] : at[i + 1]] - np.int32(first[i])
            blocks.append(
                Block(
                    **of,
                    route_links=ops.route_links[links],
                    route_count=ops.route_count[links],
                    pred=ops.pred[between] - np.int32(first[i]),
                    succ=ops.succ[between] - np.int32(first[i]),
                    n_prio=n_prio,
                    handle=ops.handle[own],
                )
            )
        return blocks
