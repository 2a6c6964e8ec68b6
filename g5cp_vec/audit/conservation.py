"""The six conservation KPIs of one simulated deployment; all are 0 when nothing was lost, early or too fast.

Promises come from closed forms over the whole deployment, deeds from the recorded start and end of every operation
of the full (unfolded) graph. Not audited: how long a compute op took, and which of several ready ones a chip chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.audit.promises import promised_flops, promised_tokens, promised_traffic
from g5cp_vec.audit.ring import lost_kv_blocks
from g5cp_vec.audit.sharing import INSTANT_RTOL, Flows, capacity_violations
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.parts import Part
from g5cp_vec.cost.wires import transfer_latencies, wire
from g5cp_vec.mapping.graph import MessageKey, OpGraph, split_rate
from g5cp_vec.mapping.load import Load, build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import Structure

Array = NDArray[Any]
Mask = NDArray[np.bool_]

# Dependencies that are looked at together.
EDGES_TOGETHER = 2**18


class Kpis(NamedTuple):
    """Conservation KPIs (unbounded integers).

    Attributes
    ----------
    lost_ops : int
        Ops of the graph that did not run exactly once.
    lost_bytes : int
        Sum over pairs of chips of |promised - moved by flows that ended|.
    lost_kv_blocks : int
        Over layers and ranks, the blocks of the ring that were not received exactly once.
    lost_flops : int
        Sum over FLOP classes of |promised - those of the ops that ran|.
    order_violations : int
        Ops that started before a predecessor ended or while their chip was busy, or ended before they started.
    capacity_violations : int
        Flows that moved more or less than their fair share, and (link, interval) pairs asked for more than there is.
    """

    lost_ops: int
    lost_bytes: int
    lost_kv_blocks: int
    lost_flops: int
    order_violations: int
    capacity_violations: int


def audit(
    dep: Deployment,
    structure: Structure,
    seq_len: int,
    batch: int,
    cached_tokens: int,
    start_s: Array,
    finish_s: Array,
    ran: Array | None = None,
) -> Kpis:
    """Audit one simulation.

    Parameters
    ----------
    dep : Deployment
        Gives the promises, and bandwidths and latencies of the links.
    structure : Structure
        Of ``dep``, or of a deployment that shares its structure.
    seq_len, batch, cached_tokens : int
        Load of the simulation.
    start_s, finish_s : ndarrays of float64, shape (n_ops,)
        Recorded times; NaN where there is none.
    ran : ndarray of int, shape (n_ops,), optional
        How often each op ran; once where it has times, when absent.

    Returns
    -------
    kpis : Kpis
    """
    seq_len, batch, cached_tokens = int(seq_len), int(batch), int(cached_tokens)
    ops, graph = structure.ops, structure.ops.graph
    once = np.isfinite(start_s) & np.isfinite(finish_s)
    if ran is not None:
        once &= np.asarray(ran) == 1
    tokens = promised_tokens(dep, seq_len, batch, cached_tokens)
    load = build_load(dep, seq_len, batch, cached_tokens)
    kinds = dep.model.kinds[0]
    n_bytes = [int(message_bytes(dep, load, kinds, key)) for key in _messages(structure)]
    is_flow = graph.op_chip < 0
    sent = np.flatnonzero(once & is_flow)

    moved = [(np.array(t.src) * dep.n_chips + t.dst, t.n_bytes) for t in promised_traffic(dep, tokens)]
    moved += [(pairs, -n) for pairs, n in zip(_pairs_by_message(ops, sent, len(n_bytes)), n_bytes, strict=True)]

    flops = promised_flops(dep, tokens)
    n_runs = np.bincount(graph.op_cost[once & ~is_flow], minlength=len(structure.keys.durations))
    for parts, n in zip(_parts_by_id(dep, load, structure), n_runs.tolist(), strict=True):
        for part in parts:
            flops[part.flop_class] = flops.get(part.flop_class, 0) - n * int(part.flops)

    return Kpis(
        lost_ops=int(np.count_nonzero(~once)),
        lost_bytes=_imbalance(moved),
        lost_kv_blocks=lost_kv_blocks(dep, ops, once),
        lost_flops=sum(abs(difference) for difference in flops.values()),
        order_violations=int(np.count_nonzero(_out_of_order(ops, start_s, finish_s, once))),
        capacity_violations=_capacity_violations(dep, structure, n_bytes, start_s, finish_s, sent),
    )


def _messages(structure: Structure) -> list[MessageKey]:
    """Return the keys of the messages in the order of their ids."""
    return sorted(structure.keys.bytes, key=structure.keys.bytes.__getitem__)


def _pairs_by_message(ops: OpGraph, sent: Array, n_ids: int) -> list[Array]:
    """Return source * n + destination of the flows that were sent, by the id of their message."""
    code = np.sort(
        (ops.graph.op_cost[sent].astype(np.int64) * ops.n_chips + ops.op_src[sent]) * ops.n_chips + ops.op_dst[sent]
    )
    n_pairs = ops.n_chips**2
    ends = np.searchsorted(code, np.arange(n_ids + 1) * n_pairs)
    return [code[begin:end] - i * n_pairs for i, (begin, end) in enumerate(pairwise(ends))]


def _imbalance(moved: Sequence[tuple[Array, int]]) -> int:
    """Sum over pairs of chips of |sum of the amounts| that were booked to them."""
    booked = [(*np.unique(pairs, return_counts=True), amount) for pairs, amount in moved]
    # Far from any deployment, but a silent overflow would be a wrong verdict.
    fits = sum(int(times.sum()) * abs(amount) for _, times, amount in booked) < 2**63
    pairs, place = np.unique(
        np.concatenate([np.zeros(0, np.int64), *(pairs for pairs, *_ in booked)]), return_inverse=True
    )
    # Unbounded integers where int64 does not do.
    balance = np.zeros(len(pairs), np.int64 if fits else object)
    at = 0
    for some, times, amount in booked:
        balance[place[at : at + len(some)]] += times.astype(balance.dtype) * amount
        at += len(some)
    return int(np.abs(balance).sum())


def _parts_by_id(dep: Deployment, load: Load, structure: Structure) -> list[list[Part]]:
    """Return the parts of the compute ops of each duration id, with exact counts."""
    edges = edge_parts(dep, load)
    layers = [layer_parts(dep, load, kind) for kind in dep.model.kinds[0]]
    parts: list[list[Part]] = [[] for _ in structure.keys.durations]
    for key, i in structure.keys.durations.items():
        (name, kind), _ = split_rate(key)  # a slower chip does the same
        of_name = edges if kind is None else layers[kind]
        # Beside a transfer a ring step does the same, only slower; a host step computes nothing.
        parts[i] = of_name.get(name.removeprefix("slowed_"), [])
    return parts


def _out_of_order(ops: OpGraph, start_s: Array, finish_s: Array, once: Mask) -> Mask:
    """Return which ops started too early or ended before they started; one instant is allowed."""
    early = once & (finish_s < start_s * (1 - INSTANT_RTOL))
    # Who waits for an op that never ended has started before its end.
    ready_s, begun_s = (np.where(once, times, np.inf) for times in (finish_s * (1 - INSTANT_RTOL), start_s))
    indptr, succ = ops.graph.succ_indptr, ops.graph.succ_indices
    # Some at a time: exchanges have many more dependencies than ops.
    ends = np.unique(np.searchsorted(indptr, np.arange(0, len(succ) + EDGES_TOGETHER, EDGES_TOGETHER)))
    for first, last in pairwise(np.minimum(ends, len(once))):
        waiting = succ[indptr[first] : indptr[last]]
        ready = np.repeat(ready_s[first:last], np.diff(indptr[first : last + 1]))
        early[waiting[begun_s[waiting] < ready]] = True
    # Computes of a chip by start: none may start before the latest end so far. The latest is found among the ranks of
    # the ends, shifted by chip so that one running maximum serves all chips without rounding.
    computes = np.flatnonzero(once & (ops.graph.op_chip >= 0))
    chip = ops.graph.op_chip[computes].astype(np.int64)
    order = np.lexsort((finish_s[computes], start_s[computes], chip))
    computes, chip = computes[order], chip[order]
    ends, rank = np.unique(finish_s[computes], return_inverse=True)
    latest = np.maximum.accumulate(chip * len(ends) + rank)
    same_chip = chip[1:] == chip[:-1]
    busy_until_s = ends[(latest - chip * len(ends))[:-1]] if len(ends) else ends
    overlaps = same_chip & (start_s[computes[1:]] < busy_until_s * (1 - INSTANT_RTOL))
    early[computes[1:][overlaps]] = True
    return early


def _capacity_violations(
    dep: Deployment, structure: Structure, n_bytes: list[int], start_s: Array, finish_s: Array, sent: Array
) -> int:
    graph = structure.ops.graph
    # The structure may have been built for a machine with other bandwidths.
    network = build_network(dep.topology, dep.n_chips)
    # Links are occupied by what the library makes of a message.
    wires = {key: wire(dep, network, key, n) for key, n in zip(_messages(structure), n_bytes, strict=True)}
    (latency_s,) = transfer_latencies(dep, network, structure.keys, {k: w.start_s for k, w in wires.items()}, 1)
    amount = np.array([*(float(w.wire_bytes) for w in wires.values()), 0])
    length = np.diff(graph.route_indptr)
    is_moving = np.zeros(len(length), np.bool_)
    is_moving[sent] = (amount[graph.op_cost[sent]] > 0) & (length[sent] > 0)
    moving = np.flatnonzero(is_moving)
    flows = Flows(
        route_indptr=np.concatenate([[0], np.cumsum(length[moving])]),
        route_links=graph.route_indices[np.repeat(is_moving, length)],
        bytes=amount[graph.op_cost[moving]],
        active_s=start_s[moving] + latency_s[graph.op_latency[moving]],
        finish_s=finish_s[moving],
    )
    capacity = np.array(network.capacities(), np.float64)[graph.link_capacity]
    return capacity_violations(flows, capacity, finish_s[np.isfinite(finish_s)])
