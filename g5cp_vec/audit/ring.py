"""Follow the K/V blocks of the prefill rings along the sends that took place.

What a send carries is read off its dependencies: the block that a send into the same chip delivered, if it waits for
one; the chip's own, if it waits for the layer's projection there. Nothing is taken from its step number, which only
says when the block should have come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.audit.messages import Ints
from g5cp_vec.audit.promises import layers_of_stage, rank_table
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.graph import REASON, OpGraph

Array = NDArray[Any]
UNKNOWN = -1


def lost_kv_blocks(dep: Deployment, ops: OpGraph, ran: NDArray[np.bool_]) -> int:
    """Count the (layer, rank, block) that were not received exactly once, and at the step of the ring that needs them.

    Parameters
    ----------
    dep : Deployment
    ops : OpGraph
    ran : ndarray of bool, shape (n_ops,)
        Whether an op ran exactly once.
    """
    chips = rank_table(dep)
    sends = np.flatnonzero(ops.op_reason == REASON["cp_pass_kv"])
    expected = _expected_cells(dep, chips)
    if len(sends) == 0:
        return len(expected)
    block = _carried_blocks(ops, sends, ran)
    arrived = ran[sends] & (block != UNKNOWN)
    sends, block = sends[arrived], block[arrived]
    at, step = ops.op_dst[sends].astype(np.int64), ops.op_step[sends].astype(np.int64)
    received = (ops.op_layer[sends].astype(np.int64) * dep.n_chips + at) * dep.n_chips + block
    cells, place = np.unique(np.concatenate([expected, received]), return_inverse=True)
    wanted, came = np.split(place, [len(expected)])
    in_step = came[block == _due(chips, at, step)]
    n_wanted, n_received, n_in_step = (np.bincount(part, minlength=len(cells)) for part in (wanted, came, in_step))
    return int(np.count_nonzero((n_received != n_wanted) | (n_in_step != n_wanted)))


def _expected_cells(dep: Deployment, chips: Ints) -> Ints:
    """Return (layer * n + rank) * n + block for every block of another rank that a rank must receive, as chips."""
    if dep.phase != "prefill" or dep.prefill_form != "pass_kv" or dep.cp * dep.pcp == 1:
        return np.zeros(0, np.int64)
    parts = []
    for stage in range(dep.pp):
        ringed = [layer for layer in layers_of_stage(dep, stage) if _has_ring(dep, layer)]
        layer = np.array(ringed, np.int64)[:, None, None, None]
        for ahead in range(1, dep.cp * dep.pcp):
            rank, block = chips[:, stage], np.roll(chips[:, stage], ahead, axis=1)
            parts.append(np.ravel((layer * dep.n_chips + rank) * dep.n_chips + block))
    return np.concatenate(parts)


def _has_ring(dep: Deployment, layer: int) -> bool:
    """Whether all keys and values of a layer go round: not where a query sees few of them, or chooses."""
    a = dep.model.layers[layer].softmax
    return a is not None and a.window is None and a.chunk is None and a.indexer is None


def _due(chips: Ints, at: Ints, step: Ints) -> Ints:
    """Return the chip whose block the send of a step brings to a chip: rank r receives r - 1 - step, round the ring."""
    place = np.empty(chips.size, np.int64)
    place[chips.ravel()] = np.arange(chips.size)
    dp, pp, cp, tp = np.unravel_index(place[at], chips.shape)
    due: Ints = chips[dp, pp, (cp - 1 - step) % chips.shape[2], tp]
    return due


def _carried_blocks(ops: OpGraph, sends: Array, ran: NDArray[np.bool_]) -> Ints:
    """Return the chip whose block each send carries, `UNKNOWN` where the dependencies do not say."""
    n = len(sends)
    number = np.full(len(ran), -1, np.int64)
    number[sends] = np.arange(n)
    into = np.flatnonzero(number[ops.graph.succ_indices] >= 0)
    pred = np.searchsorted(ops.graph.succ_indptr, into, side="right") - 1
    succ = ops.graph.succ_indices[into]
    local = (ops.op_dst[pred] == ops.op_src[succ]) & (ops.op_layer[pred] == ops.op_layer[succ])
    projected = local & (ops.op_reason[pred] == REASON["qkv"]) & ran[pred]
    forwarded = local & (number[pred] >= 0)
    n_forwarded = np.bincount(number[succ[forwarded]], minlength=n)
    # Of two blocks that arrived it is open which one goes on; of a send that failed, nothing does.
    follows = (n_forwarded == 1) & ran[sends]
    source = np.arange(n)
    source[number[succ[forwarded]]] = number[pred[forwarded]]
    source[~follows] = np.flatnonzero(~follows)
    origin = np.full(n, UNKNOWN, np.int64)
    origin[number[succ[projected]]] = ops.op_src[succ[projected]]
    origin[(n_forwarded > 0) | ~ran[sends]] = UNKNOWN
    # Each round doubles how far back a send sees along its chain; what goes round and round has no source.
    for _ in range(n.bit_length()):
        before, source = source, source[source]
        if np.array_equal(before, source):
            break
    return origin[source]
